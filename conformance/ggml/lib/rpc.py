"""ggml over RPC: a server of the same build on this machine, and its devices in a library."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Thread

from conformance.ggml.errors import UnavailableError

from .files import RPC_SERVERS, program
from .layout import ABORT_CALLBACK
from .library import Library

LOOPBACK = "loopback"
"""Value of the option `rpc` that starts a server on this machine."""
PATIENCE = 20.0
"""Seconds to wait until it listens."""
LAST_WORDS = 2.0
"""Seconds to wait for the messages of a server that exits."""
_TELLING = ("GGML_", "error", "abort")
_HOST = "127.0.0.1"
_P = ctypes.c_void_p


class Server:
    """A server that computes on the CPU of the build in `folder` until closed.

    UnavailableError, with its last messages, if the build has no such program or it does not listen.
    """

    def __init__(self, folder: Path) -> None:
        found = program(folder, RPC_SERVERS)
        if found is None:
            raise UnavailableError(f"ggml: rpc={LOOPBACK}: {folder}: no {' or '.join(RPC_SERVERS)} there")
        self.endpoint = f"{_HOST}:{_free_port()}"
        environment = {**os.environ, "LD_LIBRARY_PATH": os.fspath(folder)}
        words = [*_words(found, environment), "-H", _HOST, "-p", self.endpoint.rpartition(":")[2]]
        self._process = _start(words, environment)
        self._lines: deque[str] = deque(maxlen=64)  # a backtrace follows an assertion
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self._wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._lines.extend(line.strip() for line in lines)

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE
        host, _, port = self.endpoint.rpartition(":")
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
                return
            time.sleep(0.05)
        self.close()
        said = " / ".join(list(self._lines)[-8:]) or "nothing"
        raise UnavailableError(f"ggml: its RPC server does not listen at {self.endpoint}; it said: {said}")

    def speak_through(self, library: Library) -> None:
        """Print the server's messages when `library` aborts because the server is gone.

        Without `ggml_set_abort_callback` only the library's own message is printed.
        """
        self._callback = ABORT_CALLBACK(self._aborted)
        if library.ggml.set_abort_callback is not None:
            library.ggml.set_abort_callback(self._callback)

    def _aborted(self, message: bytes | None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WORDS)
            self._reader.join(LAST_WORDS)
            sys.stderr.writelines(f"{said}\n" for said in self._lines if any(word in said for word in _TELLING))
        sys.stderr.write(f"{(message or b'').decode(errors='replace')}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._reader.join()


class Proxy:
    """A connection to a server that carries few bytes at a time, or breaks.

    Args: piece: most bytes of a message, a number that `seed` draws each time; 0: all that there are. drop: bytes from
    the client after which the connection closes; 0: never. Nothing depends on the clock.
    """

    def __init__(self, endpoint: str, piece: int = 0, drop: int = 0, seed: int = 0) -> None:
        self._server, self._piece, self._drop, self._seed = endpoint, piece, drop, seed
        self.sent = 0
        """Bytes of the client that were passed on."""
        self._listener = socket.create_server((_HOST, 0))
        self.endpoint = f"{_HOST}:{self._listener.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    @property
    def broke(self) -> bool:
        """True if the connection was closed as `drop` says."""
        return 0 < self._drop <= self.sent

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        host, _, port = self._server.rpartition(":")
        with suppress(OSError), client, socket.create_connection((host, int(port))) as server:
            ways = ((client, server, True), (server, client, False))
            threads = [Thread(target=self._pass, args=way, daemon=True) for way in ways]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        random = Random(f"{self._seed} {counted}")  # noqa: S311  # sizes of messages, no secret
        with suppress(OSError):
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self.broke and (data := source.recv(1 << 16)):
                while data and not self.broke:
                    n = random.randint(1, self._piece) if self._piece else len(data)
                    piece = data[: min(n, self._drop - self.sent) if counted and self._drop else n]
                    target.sendall(piece)
                    self.sent += counted * len(piece)
                    data = data[len(piece) :]
        for end in (source, target) if self.broke else (target,):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR if self.broke else socket.SHUT_WR)

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _start(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(  # noqa: S603  # the program of the build that the user named
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except OSError as e:
        raise UnavailableError(f"ggml: {words[0]} cannot be started: {e.strerror}") from None


def _words(program: Path, environment: dict[str, str]) -> list[str]:
    """Return the command line: on the CPU, whose arithmetic is known, with one thread."""
    words = [os.fspath(program)]
    helped = _start([*words, "--help"], environment)
    try:
        text, _ = helped.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        helped.kill()
        return words
    known = (("--device <", ("-d", "CPU")), ("--threads", ("-t", "1")))
    return [*words, *(word for option, own in known if option in text for word in own)]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((_HOST, 0))
        port: int = s.getsockname()[1]
        return port


def attach(library: Library, rpc: str) -> Server | None:
    """Register the devices of `rpc` (`HOST:PORT` or `loopback`); return a server started here."""
    if not rpc:
        return None
    server = Server(library.folder) if rpc == LOOPBACK else None
    connect(library, server.endpoint if server else rpc, server)
    return server


def connect(library: Library, endpoint: str, server: Server | None = None) -> int:
    """Register the devices of the server at `endpoint`, `HOST:PORT`; return the registry.

    `server` is given if it was started here. UnavailableError if the library has no RPC or the server no device.
    """
    rpc = library.devices.reg_by_name("RPC")
    add = None if rpc is None else rpc.function("ggml_backend_rpc_add_server", _P, ctypes.c_char_p)
    if add is None:
        raise UnavailableError(f"ggml: rpc: {library.title} has no RPC device; a build with libggml-rpc expected")
    registry: int | None = add(endpoint.encode())
    if not registry:
        raise UnavailableError(f"ggml: rpc: no server answers at {endpoint}")
    library.ggml.backend_register(registry)
    if server is not None:
        server.speak_through(library)
    return registry
