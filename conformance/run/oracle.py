"""Compute expected values. A backend is never its own oracle.

The reference computes every expected value in the arithmetic that the tested backend declares. The reference itself is
compared with a second opinion, the real ggml, in *ggml's* arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from conformance import shipped
from conformance.backend.interface import Backend
from conformance.backend.registry import REFERENCE, Spec
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic, Mixed
from conformance.ggml.errors import BackendCrashError, UnavailableError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor
from conformance.judge.budget import touches
from conformance.judge.judge import Judged, judge_trajectory
from conformance.judge.waivers import parse
from conformance.suite.batch import merge

from .contiguous import contiguous
from .execute import Execution, StepValues, execute
from .isolation.isolate import open_backend
from .session.cache import Cache
from .session.expected import Expected

SECOND_OPINION = "ggml"


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected values of a case."""

    steps: list[StepValues]
    """Values computed in `arithmetic`."""
    exact: list[StepValues] | None
    """Values rounded only when stored; `steps` if these are equal, None if not requested."""
    arithmetic: Arithmetic
    """Arithmetic of `steps`."""
    note: str = field(default="", kw_only=True)
    """A note on how the values were computed, if not as usual."""

    @property
    def values(self) -> list[StepValues]:
        """Values of every output and cache of each step."""
        return self.steps

    def judge(self, case: Case, execution: Execution) -> tuple[list[Judged], list[Judged]]:
        """Judge a free run by the expected values; the second list is for subclasses."""
        return list(judge_steps(case, self.steps, execution, self.arithmetic)), []


def judge_steps(
    case: Case, expected: Sequence[StepValues], execution: Execution, arithmetic: Arithmetic
) -> Iterator[Judged]:
    """Judge outputs and caches of a free run, except caches that the backend cannot read."""
    yield from judge_trajectory(case, execution.comparable(expected), [v.all for v in execution.steps], arithmetic)


class NoSecondOpinionError(UnavailableError):
    """The real ggml refuses a case, so the reference cannot be checked on it."""


class Oracle:
    """Computes expected values and caches the latest."""

    def __init__(self, *, exact: bool = False, disk: Expected | None = None) -> None:
        """Open the reference.

        `exact`: also compute without the declared rounding, at twice the cost. `disk`: cache of values on disk.
        """
        self._exact = exact
        self._disk = disk
        self._reference = open_backend(Spec(REFERENCE))
        self._imitating: dict[str, Backend] = {EXACT.name: self._reference}
        self._declared: dict[str, list[Arithmetic]] = {EXACT.name: [EXACT]}
        self._known: Cache[tuple[Case, str], list[StepValues]] = Cache()
        """Values for the next backend; those of a trajectory include the caches after each step."""
        self._second: Backend | None = None
        self._second_reason = ""
        waivers = shipped.path("waivers", f"{SECOND_OPINION}.toml")
        self._waivers = parse(waivers.read_text(encoding="utf-8"), waivers.name)

    def reference_in(self, arithmetic: Arithmetic) -> Backend:
        """Return the reference computing in `arithmetic`."""
        if isinstance(arithmetic, Mixed):  # one case's own
            return self._reference.computing_in(arithmetic)
        name = self._name(arithmetic)
        if name not in self._imitating:
            self._imitating[name] = self._reference.computing_in(arithmetic)
        return self._imitating[name]

    def _name(self, arithmetic: Arithmetic) -> str:
        """Return a unique name: arithmetics of two adapters may have the same name."""
        if isinstance(arithmetic, Mixed):  # one case's own
            return arithmetic.name
        held = self._declared.setdefault(arithmetic.name, [])
        if arithmetic not in held:
            held.append(arithmetic)
        i = held.index(arithmetic)
        return f"{arithmetic.name} {i}" if i else arithmetic.name

    def second_opinion(self) -> Backend:
        """Return the real ggml; UnavailableError if this machine lacks it."""
        if self._second is None and not self._second_reason:
            try:
                self._second = open_backend(Spec(SECOND_OPINION))
            except UnavailableError as e:
                self._second_reason = str(e)
        if self._second is None:
            message = f"{SECOND_OPINION}, which checks the reference, is not available: {self._second_reason}"
            raise UnavailableError(message)
        return self._second

    def expect(self, cases: Sequence[Case], arithmetic: Arithmetic) -> list[Expectation]:
        """Return expected values of each case, one-step cases in one graph; BackendError on failure."""
        changed = dict.fromkeys(c for c in cases if touches(c, arithmetic))
        plain = [c for c in cases if self._exact or c not in changed]
        exact = dict(zip(plain, self._values(plain, EXACT), strict=True))
        values = exact | dict(zip(changed, self._values(list(changed), arithmetic), strict=True))
        return [Expectation(values[c], exact.get(c), arithmetic) for c in cases]

    def expect_second(self, cases: Sequence[Case]) -> tuple[list[Expectation], Backend]:
        """Return the real ggml's values for each case, and the reference in the arithmetic of ggml.

        NoSecondOpinionError if ggml refuses a node, another ConformanceError if it is unavailable or fails.
        """
        second = self.second_opinion()
        arithmetic = second.arithmetic()
        copied = contiguous(cases[0]) if len(cases) == 1 else None
        refusal = ""
        if copied is None or not self.doubt(cases[0].id):
            refusal = _refusal(second, cases)
            try:
                values = [] if refusal else run_together(second, cases)
            except BackendCrashError:
                if copied is None:
                    raise
            else:
                if not refusal:
                    return [Expectation(v, v, arithmetic) for v in values], self.reference_in(arithmetic)
        if copied is not None and not (refusal := _refusal(second, [copied[0]])):
            steps = [_of_copy(execute(second, copied[0]).steps[0], copied[1], cases[0])]
            note = f"checked against {SECOND_OPINION} over contiguous copies of its sources"
            return [Expectation(steps, steps, arithmetic, note=note)], self.reference_in(arithmetic)
        raise NoSecondOpinionError(f"{SECOND_OPINION}, which checks the reference, does not support it: {refusal}")

    def doubt(self, case_id: str) -> str:
        """Return why ggml is known to be wrong about a case, from its waivers; empty if it is not."""
        return next((w.reason for w in self._waivers.entries if w.covers(case_id)), "")

    def whole(self, case: Case, arithmetic: Arithmetic, steps: Sequence[int]) -> list[StepValues]:
        """Return the reference's values of each step, with every computed node of `steps`.

        They are cached for `expect` too. BackendError if the reference cannot run the case.
        """
        key = (case, f"{arithmetic.name}, every node")
        if key not in self._known:
            values = execute(self.reference_in(arithmetic), case, every_node=steps).steps
            plain = [
                StepValues({t: v.outputs[t] for t in s.outputs}, v.caches)
                for s, v in zip(case.steps, values, strict=True)
            ]
            self._known.add((case, arithmetic.name), plain, _size(plain))
            self._known.add(key, values, _size(values))
        return self._known[key]

    def _values(self, cases: Sequence[Case], arithmetic: Arithmetic) -> list[list[StepValues]]:
        name = self._name(arithmetic)
        missing = [c for c in cases if (c, name) not in self._known]
        for c, values in zip(missing, self._found(missing, arithmetic), strict=True):
            self._known.add((c, name), values, _size(values))
        found = [self._known[c, name] for c in cases]
        self._known.trim(len(cases))
        return found

    def _found(self, cases: Sequence[Case], arithmetic: Arithmetic) -> list[list[StepValues]]:
        """Return the values of each case, from disk or computed."""
        if self._disk is None:
            return run_together(self.reference_in(arithmetic), cases)
        entries = {c: self._disk.entry(c, arithmetic) for c in cases}
        read = {c: None if entry is None else entry.read() for c, entry in entries.items()}
        found = {c: values for c, values in read.items() if values is not None}
        missing = [c for c in cases if c not in found]
        for c, values in zip(missing, run_together(self.reference_in(arithmetic), missing), strict=True):
            found[c] = values
            if (entry := entries[c]) is not None:
                self._disk.add(entry, values)
        return [found[c] for c in cases]

    def close(self) -> None:
        """Close its backends."""
        if self._disk is not None:
            self._disk.trim()
        for backend in (*self._imitating.values(), self._second):
            if backend is not None:
                backend.close()


def _of_copy(values: StepValues, outputs: Mapping[Tensor, Tensor], case: Case) -> StepValues:
    """Return the values of `case` from those of its contiguous copy."""
    return StepValues(
        {t: values.outputs[copy] for t, copy in outputs.items()}, {t: values.caches[t] for t in case.caches()}
    )


def _refusal(backend: Backend, cases: Sequence[Case]) -> str:
    """Return the first reason why `backend` rejects a node; empty if it supports all."""
    answers = backend.supports(Graph([n for c in cases for s in c.steps for n in s.graph]))
    return next((a.reason for a in answers if not a), "")


def _size(values: list[StepValues]) -> int:
    return sum(data.nbytes for v in values for d in (v.outputs, v.caches) for data in d.values())


def run_together(backend: Backend, cases: Sequence[Case]) -> list[list[StepValues]]:
    """Return the values of each case, one-step cases in one graph; ConformanceError on failure."""
    single = [c for c in cases if len(c.steps) == 1]
    values: dict[Case, list[StepValues]] = {}
    if len(single) > 1:
        ran = execute(backend, merge(single)).steps[0]
        for c in single:
            values[c] = [part(ran, c)]
    return [values[c] if c in values else execute(backend, c).steps for c in cases]


def part(merged: StepValues, case: Case) -> StepValues:
    """Return the values of `case` from those of its batch."""
    return StepValues(
        {t: merged.outputs[t] for t in case.steps[0].outputs},
        {t: merged.caches[t] for t in case.caches()},
    )
