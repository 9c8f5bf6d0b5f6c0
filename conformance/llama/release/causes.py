"""Causes of the differences between two builds; each is listed once, with its devices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb, inf
from typing import NamedTuple, Protocol

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.causes.cause import in_order
from conformance.causes.same import same
from conformance.judge.cause import Cause
from conformance.judge.message import between_builds
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.report.compare import Sides, State

from .target import Target

RIGHT = 3
"""Runs of a cause's smallest case, in new processes, to confirm it; one if time is short."""
FINDING = 0.85
"""Share of a search's time to find causes; the rest is to confirm them."""
OFTEN = 12
"""Runs of a flaky case, which failed in some of the first `RIGHT` runs only."""
NOT_AGAIN = "not run again (time limit)"
BY_CHANCE = 0.01
"""Maximum probability that equal builds differ so much, to call two builds different."""
AFTER = "after "
"""Prefix of `Cause.seen` if another case must run first."""


class CauseSearch(Protocol):
    """Finds the causes of one target's failures."""

    def find(self, results: Sequence[Result], seconds: float) -> list[Cause]:
        """Return the causes of the failures in `results`."""

    def again(self, spec: Spec, case_id: str) -> Result:
        """Run a case alone, in a new process."""


def fails(result: Result) -> bool:
    """Return True if the result is a failure."""
    return result.verdict in FAILURES


@dataclass(slots=True)
class SharedCause:
    """A cause, with all targets that have it, and how the builds differ by it."""

    cause: Cause
    state: State
    """NEW, STILL or FIXED.

    WORSE if the base fails in all its cases, too; CHANGED if it seldom fails alone, or never."""
    devices: list[str] = field(default_factory=list)
    note: str = ""
    """Why it is not called new or fixed, if that is not obvious."""
    firm: bool = False
    """True if its smallest case differs each time.

    Alone, it failed `RIGHT` times, and passed as often on the other side."""
    shared: bool = False
    """True if a case of a STILL cause fails in the same way on the base."""
    cases: dict[str, list[str]] = field(default_factory=dict)
    """Backend, as named in results -> ids of its cases that fail with this cause."""

    def at(self, targets: Sequence[Target]) -> str:
        """Return the party at fault: only failures under software drivers alone may be a driver's."""
        software = {t.name for t in targets if t.software}
        return str(self.cause.party_if(emulated=software.issuperset(self.devices)))

    def to_json(self, targets: Sequence[Target]) -> dict[str, JSON]:
        """Return its entry in the record's `builds`."""
        return {
            "id": self.cause.id, "state": str(self.state), "devices": list(self.devices), "note": self.note,
            "at": self.at(targets),
        }  # fmt: skip

    def take(self, other: SharedCause) -> None:
        """Add the cases of the same cause, and the devices that have it."""
        self.cause = replace(self.cause, cases=tuple(dict.fromkeys([*self.cause.cases, *other.cause.cases])))
        self.devices += [d for d in other.devices if d not in self.devices]
        for backend, ids in other.cases.items():
            self.cases[backend] = list(dict.fromkeys([*self.cases.get(backend, ()), *ids]))

    def explain(self, results: Iterable[Result]) -> None:
        """Add the cases of these failures."""
        for r in results:
            self.cases.setdefault(r.backend, []).append(r.case)


class Confirmed(NamedTuple):
    """The result of a cause's smallest case, run again on both sides."""

    state: State
    note: str = ""
    firm: bool = False
    """True if it differed each time: `SharedCause.firm`."""


class Causes:
    """Finds causes for `seconds`; equal failures of devices are analysed on the first."""

    def __init__(
        self,
        *,
        seconds: float,
        grace: float = inf,
        progress: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the time: after `seconds` each cause runs only once again, `grace` later none does."""
        self._grace = grace
        self._progress, self._clock = progress, clock
        self._end = clock() + seconds
        self._known: dict[Hashable, SharedCause] = {}
        """Key of a failure (`_key`) -> its cause."""
        self._found: list[SharedCause] = []

    def add_all(
        self, targets: Sequence[tuple[Target, Sequence[Result], Sequence[Result]]], search: CauseSearch
    ) -> None:
        """Find the causes of targets, with their results of the build and of the base.

        Each gets time for its failing cases that no earlier target has.
        """
        known: set[str] = set()
        weights: list[int] = []
        for _, build, base in targets:
            failing = {r.case for r in (*build, *base) if fails(r)}
            weights.append(1 + len(failing - known))
            known |= failing
        for i, (target, build, base) in enumerate(targets):
            self.add(target, search, build, base, weights[i] / sum(weights[i:]))

    def add(
        self, target: Target, search: CauseSearch, build: Sequence[Result], base: Sequence[Result], share: float
    ) -> None:
        """Find the causes of one kind's results on a target, in `share` of the remaining time."""
        there = {_key(target, State.STILL, r): r for r in base if fails(r)}
        failed = {r.case for r in there.values()}
        wanted = [
            (state, fresh)
            for state, results in in_states(build, base).items()
            if any(map(fails, fresh := self._fresh(target, state, results, there)))
        ]
        until = self._clock() + max(0.0, self._end - self._clock()) * share
        counts = [sum(map(fails, results)) for _, results in wanted]
        for i, (state, results) in enumerate(wanted):
            self._progress(f"{target.name}: {counts[i]} failures, {state}")
            keys = [_key(target, state, r) for r in results]  # before they are looked at more closely
            share = counts[i] / sum(counts[i:])
            causes = search.find(results, FINDING * max(0.0, until - self._clock()) * share)
            earlier = list(self._found)  # this search has told its own causes apart
            for cause in causes:
                worse = state is State.NEW and failed.issuperset(cause.cases)
                told = _first_new(cause, failed) if state is State.NEW else cause
                found = self._merged(target, search, State.WORSE if worse else state, told, earlier)
                earlier = [f for f in earlier if f is not found]
                mine = [(k, r) for k, r in zip(keys, results, strict=True) if r.case in cause.cases]
                found.explain(r for _, r in mine)
                own = [k for k, _ in mine]
                alike = [there[k] for k in own if k in there]
                found.explain(alike)
                found.shared |= bool(alike)
                self._known |= dict.fromkeys(own, found)

    def _fresh(
        self, target: Target, state: State, results: Sequence[Result], there: Mapping[Hashable, Result]
    ) -> list[Result]:
        """Return `results` without failures of causes known from other devices; extend these causes.

        `there`: the failures of the base that are alike.
        """
        fresh: list[Result] = []
        for r in results:
            key = _key(target, state, r)
            known = self._known.get(key) if fails(r) else None
            if known is None:
                fresh.append(r)
            else:
                known.explain([r, *([there[key]] if key in there else [])])
                known.devices += [] if target.name in known.devices else [target.name]
        return fresh

    def _merged(
        self, target: Target, search: CauseSearch, state: State, cause: Cause, earlier: Sequence[SharedCause]
    ) -> SharedCause:
        """Add a cause, or its device to one with the same id or to an `earlier` one that is alike."""
        state, note, firm = self._confirmed(target, search, state, cause)
        known = [f for f in self._found if f.cause.id == cause.id] + [f for f in earlier if _alike(f.cause, cause)]
        found = next((f for f in known if f.state is state), None)
        if found is None:
            found = SharedCause(cause, state, note=note)
            self._found.append(found)
        found.firm |= firm
        found.shared |= state is State.STILL and bool(note)
        found.take(SharedCause(cause, state, [target.name]))
        return found

    def _confirmed(self, target: Target, search: CauseSearch, state: State, cause: Cause) -> Confirmed:
        """Run the smallest case again on both sides.

        Without time for that it stays in its state, and the note says so.
        """
        new = target.build, target.base
        sides = {State.NEW: new, State.WORSE: new, State.FIXED: new[::-1]}
        own, other = sides.get(state, (None, None))
        if own is not None and (self._over() or (state is State.FIXED and self._clock() >= self._end)):
            return Confirmed(state, NOT_AGAIN)
        found = self._compared(own, other, search, state, cause)
        return Confirmed(state, NOT_AGAIN) if own is not None and self._over() else found  # it may have been cut short

    def _over(self) -> bool:
        return self._clock() > self._end + self._grace

    def _compared(
        self, own: Spec | None, other: Spec | None, search: CauseSearch, state: State, cause: Cause
    ) -> Confirmed:
        alone = own is not None and not cause.seen.startswith(AFTER)
        fails_here = state in (State.NEW, State.WORSE)
        side = "base" if fails_here else "build"
        mine: list[Result] = []
        ran: list[Result] = []
        for times in (RIGHT, OFTEN):
            if own is not None and alone:
                self._again(search, own, cause, times, mine)
            last = next(filter(fails, reversed(mine)), None)
            if mine and last is None:
                text = f"{cause.smallest} passed {len(mine)} times of {len(mine)} when it ran alone"
                return Confirmed(State.CHANGED, text)
            if other is not None:
                self._again(search, other, cause, times, ran)
            how = [Sides.of(r, last).worse if fails_here and last else None for r in ran]
            alike = sum(fails(r) and worse is None for r, worse in zip(ran, how, strict=True))
            if alike:
                text = f"{cause.smallest} also failed on the {side}, {alike} times of {len(ran)} when it ran alone"
                return Confirmed(State.STILL, text)
            if all(map(fails, mine)):
                break
        failed = sum(map(fails, mine))
        if ran and failed < len(mine) and _at_random(failed, len(mine), len(ran)) > BY_CHANCE:
            seldom = f"{failed} times of {len(mine)} when it ran alone, and on the {side} never of {len(ran)}"
            return Confirmed(State.CHANGED, f"{cause.smallest} failed {seldom}")
        firm = len(mine) == len(ran) == RIGHT and not any(map(fails, ran))
        worse = next(filter(None, how), None) if state is State.WORSE else None
        return Confirmed(state, f"{cause.smallest} fails on the base, too: {worse}" if worse else "", firm)

    def _again(self, search: CauseSearch, spec: Spec, cause: Cause, times: int, results: list[Result]) -> None:
        """Run a cause's smallest case alone until it has `times` results, or time is over."""
        wanted = 1 if cause.verdict is Verdict.TIMEOUT else times
        while len(results) < wanted and not (results and self._clock() >= self._end):
            results.append(search.again(spec, cause.smallest))

    def all(self) -> list[SharedCause]:
        """Return all causes: new, unfixed, fixed; the most urgent of each first.

        A cause that is new in some cases and fixed in others is STILL, unless the new ones are too many for a fault
        that both builds show at times. One that is new in some cases and on both builds in others is new if it is
        `firm`. If the base fails in another way in some, the cases belong to the new cause; in all, it is WORSE.
        """
        cases = {state: Counter[str]() for state in (State.NEW, State.FIXED)}
        for f in self._found:
            if f.state in cases:
                cases[f.state][f.cause.id] += len(f.cause.cases)
        new, fixed = cases[State.NEW], cases[State.FIXED]
        firm = {f.cause.id for f in self._found if f.state is State.NEW and f.firm} - fixed.keys()
        shared = {f.cause.id for f in self._found if f.state is State.STILL and f.shared} - firm
        both = shared | {i for i in new.keys() & fixed.keys() if _by_chance(new[i], fixed[i]) > BY_CHANCE}
        for f in self._found:
            if f.state in cases and f.cause.id in both:
                f.state, f.note = State.STILL, f"{f.state} in these cases; both builds have the cause in others"
            elif f.state is State.FIXED and f.cause.id in new:
                f.state = State.STILL
        named, kept = {f.cause.id for f in self._found if f.state is State.NEW}, dict[tuple[str, State], SharedCause]()
        for f in sorted(self._found, key=lambda f: f.state is not State.NEW):
            state = State.NEW if f.state in (State.STILL, State.WORSE) and f.cause.id in named else f.state
            if (first := kept.setdefault((f.cause.id, state), f)) is not f:
                first.take(f)
        self._found = list(kept.values())
        return [f for state in State for f in self._of(state)]

    def _of(self, state: State) -> Iterator[SharedCause]:
        own = [f for f in self._found if f.state is state]
        for cause in in_order([f.cause for f in own]):
            yield next(f for f in own if f.cause is cause)


def _first_new(cause: Cause, failed: Collection[str]) -> Cause:
    """Return the cause with those cases first that pass on the base (not in `failed`)."""
    return replace(cause, cases=tuple(sorted(cause.cases, key=failed.__contains__)))


def _by_chance(new: int, fixed: int) -> float:
    """Return how probable so many new cases are if both builds fail equally often.

    McNemar's exact test, one-sided: the sum of C(n, k) / 2^n for k from `new` to n = `new` + `fixed`.
    """
    n = new + fixed
    return sum(comb(n, k) / (1 << n) for k in range(new, n + 1))


def _at_random(failed: int, runs: int, others: int) -> float:
    """Return how probable it is that all failures are among `runs`, none among `others`.

    Fisher's exact test, one-sided, if none of the `others` failed: C(runs, failed) / C(runs + others, failed).
    """
    return comb(runs, failed) / comb(runs + others, failed)


def _alike(a: Cause, b: Cause) -> bool:
    """Return True if the searches on two devices, each with its own cases, found the same cause."""
    return a.op == b.op and bool(same([replace(a, backend=b.backend)], [b]))


def _key(target: Target, state: State, result: Result) -> Hashable:
    """Return a key of a fault across setups and builds: case, verdict and innermost message."""
    error = None if result.verdict is Verdict.FAIL else result.error
    message = "" if error is None else between_builds(error)
    return state, target.name.partition(" ")[0], result.case, result.verdict, message


def in_states(build: Sequence[Result], base: Sequence[Result]) -> dict[State, list[Result]]:
    """Return the results in which to search for the causes of each state.

    NEW: of the build, without failures that are no worse than the base's. FIXED: of the base, without failures that the
    build also has. STILL: of the build, without new failures. All have the passes, which help to separate causes.
    """
    pairs = compared(build, base)
    both = {p.case: p for p in pairs if p.before.fails and p.after.fails}
    as_before = {case for case, p in both.items() if p.worse is None}
    return {
        State.NEW: [r for r in build if r.case not in as_before],
        State.FIXED: [r for r in base if r.case not in both],
        State.STILL: [r for r in build if r.case in as_before or not fails(r)],
    }


def compared(build: Sequence[Result], base: Sequence[Result]) -> list[Sides]:
    """Pair each result of the build with the base's, as `TestRun.pairs` does for a whole run."""
    before = {r.case: r for r in base}
    return [Sides.of(before.get(r.case), r) for r in build]
