"""The family `access`: a ggml device sets, reads, clears and copies bytes of tensors.

An id is `access/WAY@seed`, where WAY is a function of `transfers.WAYS`. After each call every byte of every tensor is
read back, so a stray write is seen too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, without_steps
from conformance.suite.family import Level, split_id

from .llama import Process, device
from .transfers import WAYS

NAME = "access"


@dataclass(frozen=True, slots=True)
class Load:
    """The fields of a worker's `load` request."""

    lib: str


def _ids(_: Level) -> Sequence[str]:
    return [f"{NAME}/{way}@1" for way in WAYS]


def _build(case_id: str) -> Case:
    way, _ = split_id(case_id, NAME, "WAY")
    if way not in WAYS:
        raise UsageError(f"case {case_id!r}: one of {', '.join(WAYS)} expected")
    return without_steps(case_id)


class Player:
    """Transfers bytes on one device."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the device. UnavailableError if the backend is not a ggml library."""
        self._spec, found = spec, device(spec)
        self._process = Process("conformance.llama.live.transfers", found, Load(found.lib), isolation)

    def play(self, case_id: str) -> Result:
        """Return the result; UnavailableError if the device lacks it, else as `Process.ask`."""
        way, seed = split_id(case_id, NAME, "WAY")
        begun = time.perf_counter()
        wrong = self._process.ask(way=way, seed=seed)["wrong"]
        verdict = Verdict.FAIL if wrong else Verdict.PASS
        return Result(case_id, str(self._spec), verdict, seconds=time.perf_counter() - begun).noted(wrong)

    def close(self) -> None:
        """End the process."""
        self._process.close()


FAMILY = LiveFamily(
    NAME,
    "a ggml device sets, reads, clears and copies bytes of tensors",
    _ids,
    _build,
    player=Player,
)
