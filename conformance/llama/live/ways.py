"""Live families with ids `FAMILY/WAY@seed`: a worker calls functions in a known way.

A worker service answers `{"load": {"lib": path}, "device": name, "rpc": endpoint}`, which opens a device, and `{"way":
name, "seed": n}` with `{"wrong": text}`, or `{"unsupported": text}` if the library or device lacks a function.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.rpc import attach
from conformance.judge.verdict import Result, Verdict
from conformance.process.service import Frame, Service, failure
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, without_steps
from conformance.suite.family import Level, split_id

from .llama import Process, device

FORM = "WAY"


class Mismatch(Exception):  # noqa: N818  # no error of ours: what the library or device did wrong
    """A result that is not as expected."""


@dataclass(frozen=True, slots=True)
class Load:
    """The fields of a worker's `load` request."""

    lib: str


class Player:
    """Plays ways on one device in the worker of a module."""

    def __init__(self, service: str, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the device. UnavailableError if the backend is not a ggml library."""
        self._spec, found = spec, device(spec)
        self._process = Process(service, found, Load(found.lib), isolation)

    def play(self, case_id: str) -> Result:
        """Return the result; UnavailableError if the device lacks it, else as `Process.ask`."""
        way, seed = split_id(case_id, case_id.partition("/")[0], FORM)
        begun = time.perf_counter()
        wrong = self._process.ask(way=way, seed=seed)["wrong"]
        verdict = Verdict.FAIL if wrong else Verdict.PASS
        return Result(case_id, str(self._spec), verdict, seconds=time.perf_counter() - begun).noted(wrong)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def family(name: str, description: str, ways: Sequence[str], service: str) -> LiveFamily:
    """Return the family of `ways`, the same at each level, which the worker `service` plays."""

    def ids(_: Level) -> Sequence[str]:
        return [f"{name}/{way}@1" for way in ways]

    def build(case_id: str) -> Case:
        way, _ = split_id(case_id, name, FORM)
        if way not in ways:
            raise UsageError(f"case {case_id!r}: one of {', '.join(ways)} expected")
        return without_steps(case_id)

    return LiveFamily(name, description, ids, build, player=partial(Player, service))


def bound(library: Library, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:  # noqa: ANN401  # ctypes' own
    """Return a function of the library with its types.

    UnavailableError if the library does not export it.
    """
    function: Any = library.function(name)
    if function is None:
        raise UnavailableError(f"this ggml exports no {name}")
    function.restype, function.argtypes = result, arguments
    found: Callable[..., Any] = function
    return found


def reply(play: Callable[[], object]) -> dict[str, Any]:
    """Return the reply of a way, which raises Mismatch, or UnavailableError."""
    try:
        play()
    except Mismatch as e:
        return {"wrong": str(e)}
    except UnavailableError as e:
        return {"unsupported": str(e)}
    return {"wrong": ""}


def serve(play: Callable[[Library, str, str, int], dict[str, Any]]) -> None:
    """Answer requests until the caller is gone.

    `play` gets the library, the name of the device, way and seed.
    """
    opened: list[tuple[Library, str]] = []

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            if "load" not in header:
                return play(*opened[-1], header["way"], header["seed"]), ()
            library = Library(header["load"]["lib"])
            attach(library, header["rpc"])
            opened.append((library, library.devices.by_name(header["device"] or "CPU").name))
        except UnavailableError as e:
            return failure(e)
        except ConformanceError as e:
            return failure(e, UsageError.__name__)
        return {}, ()

    Service().serve(answer)
    os._exit(0)  # skip the libraries' own clean-up; there is nothing to save
