"""The family `layout`: compares graphs of llama.cpp with the builder's, node for node.

An id is `layout/ARCH-key=value@0`, with the keys of a decoder.
"""

from __future__ import annotations

from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, UsageError
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.verdict import Pair, Result, Verdict, counted
from conformance.llama.live import graphs as layout
from conformance.llama.zoo.model import lacks
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, split_glob, without_steps
from conformance.suite.family import Level

from .llama import device

NAME = "layout"
SHOWN = 4
"""Maximum number of further differences in a result's notes."""


def _ids(level: Level) -> list[str]:
    few = 1 if level == "smoke" else None
    return [f"{NAME}/{arch}-{keys}@0" for arch, settings in layout.SETTINGS.items() for keys in settings[:few]]


def _read(case_id: str) -> tuple[str, str]:
    arch, keys = split_glob(case_id)
    if arch not in layout.SETTINGS:
        raise UsageError(f"case {case_id!r}: {NAME}/ARCH-key=value@0 of {', '.join(layout.SETTINGS)} expected")
    return arch, keys.rpartition("@")[0]


def _build(case_id: str) -> Case:
    layout.check(*_read(case_id))
    return without_steps(case_id)


class Player:
    """Records graphs of one library's llama.cpp; they do not depend on the device."""

    def __init__(self, spec: Spec, _isolation: Isolation, _save: Path | None) -> None:
        """Find the library. UnavailableError if the backend is not a ggml library."""
        self._spec, self._lib = spec, device(spec).lib

    def play(self, case_id: str) -> Result:
        """Return PASS if all graphs are equal. BackendError if llama.cpp fails."""
        pair = Pair(case_id, str(self._spec))
        try:
            theirs, ours = layout.pair(*_read(case_id), self._lib)
        except UsageError as e:
            raise BackendError(str(e)) from None
        metrics = {"nodes": float(sum(len(step.graph) for step in theirs.steps))}
        moved = list(layout.moved(theirs, ours))
        if not moved:
            return Result(*pair, Verdict.PASS, steps=len(theirs.steps), metrics=metrics)
        where = Place(Fault.NODE, moved[0].step, moved[0].place, steps=len(theirs.steps))
        error = Error(f"{counted(len(moved), 'difference')}: {moved[0].what}", moved[0].what)
        others = tuple(map(str, moved[1 : 1 + SHOWN]))
        return Result(*pair, Verdict.FAIL, where=where, error=error, notes=others, metrics=metrics)

    def close(self) -> None:
        """Do nothing, because no process or file stays open."""


FAMILY = LiveFamily(
    NAME,
    "graphs of llama.cpp compared with the builder's, node for node",
    _ids,
    _build,
    seeded=False,
    lacks=lacks,
    player=Player,
)
