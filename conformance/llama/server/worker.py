"""The service that runs a server of llama.cpp: llama-server, or that of xllamacpp.

The request `start` (the fields of `Start`) has the reply `{"url": text, "pid": number}`. `alive` has the reply `{}`; if
the server has ended, the process ends as the server did.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.process.service import Frame, Service, failure

HOST = "127.0.0.1"
LISTENS = 60.0
"""Seconds in which a server listens, without the time to load a large model."""
ENDS = 1.0
"""Seconds in which a server that closed its connections ends."""
PER_GIB = 60.0
"""Further seconds for each GiB of a model."""
_SLOTS = 2
_OPTIONS = {"type_k": "--cache-type-k", "type_v": "--cache-type-v", "n_ubatch": "--ubatch-size"}
"""Field of a context -> option of llama-server."""
_XLLAMACPP = "xllamacpp"


@dataclass(frozen=True, slots=True)
class Start:
    """A server to start."""

    model: str
    folder: str
    """Where it saves slots."""
    program: str = ""
    """Path of llama-server; "" for the package xllamacpp."""
    package: str = ""
    """Folder with another build of that package; "" for the installed one."""
    libraries: str = ""
    """Folder with the libraries of the program."""
    device: str | None = None
    """Name of the device; "" for the CPU, None for the build's own choice."""
    threads: int = 0
    """Number of threads; 0 for the build's own choice."""
    n_ctx: int = 512
    """Cells of a slot."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `zoo.family.Request` that differ from llama.cpp's defaults."""


def words(start: Start, port: int, known: str) -> list[str]:
    """Return the command line of llama-server, with the options that its help `known` has."""
    c = start.context
    unified = bool(c.get("unified"))
    given = {
        "--model": start.model, "--host": HOST, "--port": str(port), "--parallel": str(_SLOTS),
        "--ctx-size": str(start.n_ctx * (1 if unified else _SLOTS)), "--slot-save-path": start.folder,
    }  # fmt: skip
    given |= {option: str(c[name]) for name, option in _OPTIONS.items() if name in c}
    given |= {"--flash-attn": "on" if c["flash_attn"] else "off"} if "flash_attn" in c else {}
    given |= {"--threads": str(start.threads), "--threads-batch": str(start.threads)} if start.threads else {}
    given |= {} if start.device is None else {"--device": start.device or "none"}
    flags = ["--context-shift", "--slots", "--no-warmup", "--kv-unified" if unified else "--no-kv-unified"]
    flags += ["--swa-full"] if c.get("swa_full") else []
    out = [start.program]
    out += [word for option, value in given.items() if option in known for word in (option, value)]
    return out + [flag for flag in flags if flag in known]


def _start_program(start: Start, port: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if start.libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, (start.libraries, environment.get("LD_LIBRARY_PATH")))
        )
    try:
        helped = subprocess.run(  # noqa: S603  # the program that the user named
            [start.program, "--help"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=LISTENS, check=False,
        )  # fmt: skip
        known = helped.stdout + helped.stderr
        if "--slot-save-path" not in known:
            raise UnavailableError(f"{start.program}: llama-server expected; --help says {known.strip()[:200]!r}")
        line = words(start, port, known)
        return subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603  # as above
    except OSError as e:
        raise UnavailableError(f"{start.program}: cannot be started: {e.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{start.program}: --help gives no answer within {LISTENS:g} s") from None


def _start_package(start: Start, port: int) -> object:
    """Start the server of xllamacpp in threads of this process."""
    if start.device:
        raise UnavailableError(f"xllamacpp's server takes no device {start.device}; a build with llama-server does")
    if start.package:
        sys.path.insert(0, start.package)
    try:
        package = importlib.import_module(_XLLAMACPP)
        params, server = package.CommonParams(), package.Server
    except (ImportError, AttributeError) as e:
        where = start.package or _XLLAMACPP
        raise UnavailableError(f"no server in {where}: {e}; a build with llama-server has one") from None
    c = start.context
    types, attention = package.ggml_type, getattr(package, "llama_flash_attn_type", None)
    of_type = {name.removeprefix("GGML_TYPE_").lower(): getattr(types, name) for name in dir(types)}
    unified = bool(c.get("unified"))
    values = {
        "hostname": HOST, "hostnames": [HOST], "port": port, "n_parallel": _SLOTS, "kv_unified": unified,
        "n_ctx": start.n_ctx * (1 if unified else _SLOTS), "slot_save_path": f"{start.folder}/",
        "endpoint_slots": True, "ctx_shift": True, "warmup": False,
        **({} if start.device is None else {"n_gpu_layers": 0}),
        **{name: c[name] for name in ("swa_full", "n_ubatch") if name in c},
        **{f"cache_{name}": of_type[c[name]] for name in ("type_k", "type_v") if name in c},
    }  # fmt: skip
    if attention is not None and "flash_attn" in c:
        on = "ENABLED" if c["flash_attn"] else "DISABLED"
        values["flash_attn_type"] = getattr(attention, f"LLAMA_FLASH_ATTN_TYPE_{on}")
    for name, value in values.items():
        if hasattr(params, name):
            setattr(params, name, value)
    params.model.path = start.model
    for threads in (params.cpuparams, params.cpuparams_batch) if start.threads else ():
        threads.n_threads = start.threads
    try:
        return server(params)
    except Exception as e:  # noqa: BLE001  # whatever its C++ raises
        raise UnavailableError(f"xllamacpp's server does not start: {e}") from None


def patience(model: str) -> float:
    """Return the seconds in which a server has loaded a model."""
    return LISTENS + PER_GIB * Path(model).stat().st_size / (1 << 30)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        port: int = s.getsockname()[1]
        return port


def _wait(url: str, seconds: float, ended: Callable[[], object]) -> None:
    """Wait until the server has loaded its model; `ended` ends this process if the server has."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended()
        with suppress(OSError), direct.open(f"{url}/health", timeout=5.0):
            return
        time.sleep(0.02)
    raise UnavailableError(f"its server does not listen at {url} within {seconds:g} s")


def _end_as(process: subprocess.Popen[bytes] | None, seconds: float = 0.0) -> None:
    """End this process as `process` did, if it ends within `seconds`."""
    code = None
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(seconds) if process is not None else None
    if code is not None:
        with suppress(OSError, ValueError):
            os.kill(os.getpid(), -code)
        os._exit(max(code, 1))


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    kept: list[Any] = []
    processes: list[subprocess.Popen[bytes]] = []

    def answer(header: dict[str, Any], _: object) -> Frame:
        if "alive" in header:
            _end_as(processes[0] if processes else None, ENDS)
            return {}, ()
        start = Start(**header["start"])
        port = _free_port()
        url = f"http://{HOST}:{port}"
        try:
            if start.program:
                processes.append(_start_program(start, port))
            else:
                kept.append(_start_package(start, port))
            _wait(url, patience(start.model), lambda: _end_as(processes[0] if processes else None))
        except ConformanceError as e:
            return failure(e)
        return {"url": url, "pid": processes[0].pid if processes else os.getpid()}, ()

    Service().serve(answer)
    for process in processes:
        process.kill()
        process.wait()
    os._exit(0)  # xllamacpp's threads would wait for requests


if __name__ == "__main__":
    main()
