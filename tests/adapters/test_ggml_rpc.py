"""The RPC server of a build: started, waited for, ended; and what is said where there is none."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.ggml import GgmlBackend
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.lib.files import RPC_SERVERS
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.rpc import Proxy, Server

LISTENS = """
import socket, sys, time
if "--help" in sys.argv:
    print("  -t, --threads N  -d, --device <dev1,dev2,...>")
    sys.exit()
assert sys.argv[1:5] == ["-d", "CPU", "-t", "1"], sys.argv
s = socket.create_server(("127.0.0.1", int(sys.argv[-1])))
time.sleep(60)
"""
DIES = """
import sys
print("no memory")
sys.exit(1)
"""

ENDS = """
import socket, sys
if "--help" in sys.argv:
    sys.exit()
s = socket.create_server(("127.0.0.1", int(sys.argv[-1])))
s.accept()  # of the one who waits until it listens
s.accept()
print("accepted a client")
print("ops.cpp:7: GGML_ASSERT(x) failed")
sys.exit(1)
"""


def _program(folder: Path, text: str) -> Path:
    path = folder / RPC_SERVERS[0]
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return folder


def test_a_server_listens_until_it_is_closed(tmp_path: Path) -> None:
    """It computes on the CPU alone, with one thread, where its version lets one choose, and nothing is left of it."""
    server = Server(_program(tmp_path, LISTENS))
    host, _, port = server.endpoint.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=5)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """With its last words; and a build without the program names what was expected."""
    with pytest.raises(UnavailableError, match=r"no ggml-rpc-server or rpc-server there"):
        Server(tmp_path)
    with pytest.raises(UnavailableError, match=r"does not listen at 127.0.0.1:\d+; it said: no memory"):
        Server(_program(tmp_path, DIES))


def test_why_a_server_ended_is_said_before_what_that_led_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The library ends the process for want of an answer: its own message comes after the server's assertion."""
    aborts: list[Callable[[bytes], None]] = []
    library = SimpleNamespace(ggml=SimpleNamespace(set_abort_callback=aborts.append))
    server = Server(_program(tmp_path, ENDS))
    server.speak_through(cast("Library", library))
    host, _, port = server.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        aborts[0](b"rpc.cpp:5: the server is gone")
    server.close()
    assert capfd.readouterr().err.splitlines() == ["ops.cpp:7: GGML_ASSERT(x) failed", "rpc.cpp:5: the server is gone"]


@pytest.fixture
def echo() -> Iterator[str]:
    """The address of a server that sends back what it gets."""

    def serve() -> None:
        while True:
            try:
                end = listener.accept()[0]
            except OSError:
                return
            with end, suppress(OSError):  # a proxy that breaks may reset it
                while data := end.recv(1 << 16):
                    end.sendall(data)

    listener = socket.create_server(("127.0.0.1", 0))
    Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _sent(proxy: Proxy, data: bytes) -> bytes:
    host, _, port = proxy.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: end.recv(1 << 16), b""))


@given(st.binary(min_size=1, max_size=300), st.integers(0, 9), st.integers(0, 400), st.integers(0, 9))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_proxy_counts_bytes(echo: str, data: bytes, piece: int, drop: int, seed: int) -> None:
    """All come through in pieces of any size; after `drop` of them the connection ends, and a new proxy serves on."""
    proxy = Proxy(echo, piece, drop, seed)
    got = _sent(proxy, data)
    assert data.startswith(got)
    assert proxy.sent == (min(drop, len(data)) if drop else len(data))
    assert proxy.broke is (0 < drop <= len(data))
    assert proxy.broke or got == data
    proxy.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "haswell"}, r"variant=haswell: .*libggml-cpu-haswell.so expected; found: none"),
        ({"rpc": "loopback", "device": "RPC0"}, r"no ggml-rpc-server or rpc-server there"),
        ({"rpc": "127.0.0.1:1", "device": "RPC0"}, r"rpc: .* has no RPC device"),
    ],
)
def test_what_a_build_lacks_is_said(options: dict[str, str], message: str) -> None:
    """The wheel has one CPU, built in, and no RPC."""
    pytest.importorskip("xllamacpp")
    with pytest.raises((UnavailableError, UsageError), match=message):
        GgmlBackend(**options)
