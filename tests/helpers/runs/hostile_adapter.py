"""One adapter that does one wrong thing in one of its methods: `hostile?at=METHOD&how=WAY`.

Installed for a test by its entry point (`test_hostile_adapters.py`); right in all else, by kernels of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.backend.interface import Backend, DeviceInfo
from conformance.backend.kernel import KernelBackend, KernelSession

BACKEND = (
    "constructor", "info", "buffer_types", "arithmetic", "arithmetic_in", "supports", "supports_op", "supports_case",
    "open", "close",
)  # fmt: skip
SESSION = ("compute", "read", "write", "witness", "opaque", "clock", "session_close")
MB = 1 << 20


class OwnError(BaseException):
    """An exception outside of `Exception`."""


def _raise(error: BaseException) -> Callable[..., Any]:
    def way(_: tuple[Any, ...], __: Callable[[], Any]) -> Any:  # noqa: ANN401  # whatever the method gives
        raise error

    return way


def _exit(_: tuple[Any, ...], __: Callable[[], Any]) -> None:
    os._exit(0)


def _hang(_: tuple[Any, ...], __: Callable[[], Any]) -> None:
    while True:
        time.sleep(0.05)


def _stubborn(_: tuple[Any, ...], __: Callable[[], Any]) -> None:
    """Catches the first interrupt."""
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001  # the fault
        time.sleep(60)


def _fork(_: tuple[Any, ...], right: Callable[[], Any]) -> Any:  # noqa: ANN401  # as above
    """Children that hold everything they inherit, and are named so that a test finds them."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", os.environ["HOSTILE_MARK"]]
    for _n in range(2):
        if os.fork() == 0:
            os.execv(command[0], command)  # noqa: S606  # it inherits what this process holds, its wire too
        subprocess.Popen(command, close_fds=False)
    return right()


def _flood(_: tuple[Any, ...], right: Callable[[], Any]) -> Any:  # noqa: ANN401  # as above
    for descriptor in (1, 2):
        for _n in range(50):
            os.write(descriptor, b"x" * MB)
    return right()


def _none(_: tuple[Any, ...], __: Callable[[], Any]) -> None:
    return None


def _odd(_: tuple[Any, ...], __: Callable[[], Any]) -> object:
    return object()


def _text(_: tuple[Any, ...], __: Callable[[], Any]) -> str:
    return "all is well"


def _long(_: tuple[Any, ...], right: Callable[[], Any]) -> Any:  # noqa: ANN401  # as above
    """One more than there should be, or twice as large."""
    found = right()
    if isinstance(found, list):
        return [*found, *found]
    if isinstance(found, np.ndarray):
        return np.concatenate([found, found])
    if isinstance(found, dict):
        return {t: np.concatenate([d, d]) for t, d in found.items()}
    return [found] * 3


def _shape(_: tuple[Any, ...], right: Callable[[], Any]) -> Any:  # noqa: ANN401  # as above
    found = right()
    if isinstance(found, dict):
        return {t: d.view("<f4").reshape(-1, 1) for t, d in found.items()}
    return found.view("<f4").reshape(-1, 1) if isinstance(found, np.ndarray) else [[found]]


def _mutate(args: tuple[Any, ...], right: Callable[[], Any]) -> Any:  # noqa: ANN401  # as above
    """Change whatever can be reached from the arguments, then go on."""
    found = right()
    for a in args:
        for graph in [a] if hasattr(a, "nodes") else [s.graph for s in getattr(a, "steps", ())]:
            for n in graph.nodes:
                n.op_params = (7, *n.op_params[1:])
                n.name = "spoiled"
        for values in [getattr(a, "persistent", {}), *(s.inputs for s in getattr(a, "steps", ()))]:
            for t in values:
                values[t] = np.zeros_like(values[t])
        if isinstance(a, dict):
            a.clear()
    return found


def _scribble(args: tuple[Any, ...], right: Callable[[], Any]) -> Any:  # noqa: ANN401  # as above
    """Write into every array that can be reached, by force."""
    for a in args:
        held = [a] if isinstance(a, dict) else [getattr(a, "persistent", {})]
        held += [s.inputs for s in getattr(a, "steps", ())]
        for data in [x for v in held for x in v.values()]:
            data.flags.writeable = True
            data[:] = 0
    return right()


WAYS: dict[str, Callable[..., Any]] = {
    "raise": _raise(RuntimeError("no luck")),
    "sysexit": _raise(SystemExit(0)),
    "generator": _raise(GeneratorExit()),
    "own": _raise(OwnError("x" * MB)),
    "none": _none,
    "odd": _odd,
    "text": _text,
    "long": _long,
    "shape": _shape,
    "mutate": _mutate,
    "scribble": _scribble,
    "exit": _exit,
    "hang": _hang,
    "stubborn": _stubborn,
    "fork": _fork,
    "flood": _flood,
}


def _add(_node: object, dst: Any, src: Any) -> None:  # noqa: ANN401  # arrays
    dst[...] = src[0] + src[1]


def _mul(_node: object, dst: Any, src: Any) -> None:  # noqa: ANN401  # arrays
    dst[...] = src[0] * src[1]


class HostileSession(KernelSession):
    """Right, but for what its backend was told."""


class Hostile(KernelBackend):
    """Right, but for `how` in `at`.

    Args:
        at: a method of `BACKEND` or `SESSION`; empty for none.
        how: of `WAYS`.
    """

    name = "hostile"

    def __init__(self, at: str = "", how: str = "raise") -> None:
        if at == "constructor":
            WAYS[how]((), lambda: None)
        if at in SESSION:
            self.session = _with(HostileSession, at.removeprefix("session_"), how)
        else:
            self.session = HostileSession
            if at in BACKEND and at != "constructor":
                self.__class__ = _with(Hostile, at, how)

    def kernels(self) -> Any:  # noqa: ANN401  # a table
        """Sums and products."""
        return {"ADD": _add, "MUL": _mul}

    def info(self) -> DeviceInfo:
        """A made-up device."""
        return DeviceInfo("hostile", "CPU", "sums and products")

    def supports_case(self, case: Any) -> Any:  # noqa: ANN401  # so that it is asked
        """As every backend."""
        return Backend.supports_case(self, case)

    def arithmetic_in(self, case: Any) -> Any:  # noqa: ANN401  # so that it is asked
        """As every backend."""
        return Backend.arithmetic_in(self, case)

    def open(self, case: Any) -> Any:  # noqa: ANN401  # a session
        """Its session."""
        return self.session(self.name, self.kernels(), case)


def _with(base: type, method: str, how: str) -> Any:  # noqa: ANN401  # a class
    def hostile(self: Any, *args: Any) -> Any:  # noqa: ANN401  # any method
        return WAYS[how](args, lambda: getattr(base, method)(self, *args))

    return type(base.__name__, (base,), {method: hostile})
