"""What runs on a target, and what its results say of two builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conformance.backend.registry import Spec
from conformance.causes.cause import Cause
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.runner import Runner

from .target import Target


class Kind(Protocol):
    """What failed: cases, or whole models."""

    def find(self, results: Sequence[Result], seconds: float) -> list[Cause]:
        """The causes of the failures in `results`; each failing result gets the id of its own."""

    def again(self, spec: Spec, case_id: str) -> Result:
        """The result of a case by itself, in a new process."""


class Work(Protocol):
    """Something to run on a target, bit by bit."""

    target: Target
    left: list[str]
    """What did not run yet."""
    results: dict[Spec, list[Result]]
    hung: dict[str, list[str]]
    """What did not return -> what of it does not run for that."""

    @property
    def stage(self) -> str:
        """Its name."""

    @property
    def kind(self) -> Kind:
        """What finds the causes of its failures."""

    def run(self, runner: Runner, seconds: float, clock: Callable[[], float]) -> None:
        """Run what is left, for so long."""


def fails(result: Result) -> bool:
    """Whether something is wrong, waived or not."""
    return result.verdict in FAILURES - {Verdict.XPASS} or result.verdict is Verdict.XFAIL


@dataclass(frozen=True, slots=True)
class Difference:
    """Results of one target, by what they say of the two builds; each list has what passes, too, to tell causes by."""

    new: list[Result]
    """Of the build, without what fails on the base as well."""
    still: list[Result]
    """Of the build, without what fails there only."""
    fixed: list[Result]
    """Of the base, without what fails on the build as well."""
    dropped: list[str]
    """Ids of cases that are right on the base, and refused by the build."""


def difference(build: Sequence[Result], base: Sequence[Result]) -> Difference:
    """What changed from `base` to `build`, case by case. Without a base everything that fails is new."""
    there, here = ({r.case: r for r in results} for results in (base, build))
    both = {i for i, r in here.items() if fails(r) and i in there and fails(there[i])}
    dropped = [
        i for i, r in here.items()
        if r.verdict is Verdict.UNSUPPORTED and i in there and there[i].verdict is Verdict.PASS
    ]  # fmt: skip
    return Difference(
        [r for r in build if r.case not in both],
        [r for r in build if r.case in both or not fails(r)],
        [r for r in base if r.case not in both],
        dropped,
    )
