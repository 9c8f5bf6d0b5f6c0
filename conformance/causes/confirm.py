"""Confirm failures: a failure counts once it came again, in a fresh process.

Each try starts a process of its own. A case that fails alone in each is at fault itself. One that never fails alone may
have stumbled over what another left behind: it runs again after the last few cases that ran before it in its process,
then after more of them, until the process dies or the case fails. The shortest such tail begins with the poison.
Nothing is left out between the poison and the end, so a fault that waits for a number of cases meets as many again.
The poison is named if it does the same with the failing case alone, many times over, and that does nothing without it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.isolation.isolate import DEFAULT, Isolation
from conformance.run.runner import Runner
from conformance.run.signature import Signature, signature_of

from .cause import ALWAYS

TRIES = 10
"""Tries of a case alone: one that fails with a probability of 0.3 fails in all of them once in 170,000 times."""
SURE = 6
"""Failures in a row below which nothing is called `always`: 0.3 to the sixth power is less than 1 in 1,000."""
ALONE = 2
"""Tries without a failure after which what ran before is suspected."""
FEW = 3
"""Cases of a signature that get all tries. Another gets one, and the others only if it does not fail like those."""
AGAIN = 2
"""How often a poison must do harm without the cases between it and the end, and those none without it."""
SPARE = 8
"""How many times more the failing case runs after a tail, and once more for four cases of it."""
PATIENCE = (1, 16)
"""Factors of that: a damaged heap may last longer when it is damaged again."""
STRIDE = 8
"""The first tail that is tried, and by how much the next one is longer."""
DEADLY = frozenset({Verdict.CRASH, Verdict.TIMEOUT})
"""Verdicts that end the process."""


@dataclass(frozen=True, slots=True)
class Seen:
    """How a failure came again."""

    words: str
    """`always`; `k of n`; `after CASE`."""
    failed: int
    """Tries alone that failed."""
    runs: int
    """Tries alone."""
    after: str = ""
    """Id of the case that poisons the process; empty where none is known."""

    @property
    def unsteady(self) -> bool:
        """True if it came in some tries only."""
        return 0 < self.failed < self.runs


def confirm(
    spec: Spec,
    results: Sequence[Result],
    before: Mapping[str, Sequence[str]] | None = None,
    *,
    isolation: Isolation | None = None,
    runs: int = TRIES,
    time_budget: float = 600.0,
    progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Seen]:
    """How each failure among `results` came again on the backend behind `spec`, by the id of its case.

    A try fails where the verdict is the same or the process dies. The first few cases of each signature get `runs`
    tries; what times out comes last. A case that neither its id nor its file makes again is left out, and so is one
    that got no try in `time_budget` seconds; a request in progress may exceed them by the time limit of `isolation`.

    Args:
        spec: the backend.
        results: of a run, in its order; those of other backends are ignored.
        before: id of a failing case -> ids of those that ran before it in its process, in order; where None, those
            since the last result that ended the process.
        isolation: limits of a process.
        runs: tries of a case alone; nothing is `always` with fewer than `SURE`.
        time_budget: seconds.
        progress: gets a line for each case.
        clock: gives seconds.

    Raises:
        UsageError: the backend or one of its options is unknown.
    """
    end = clock() + time_budget
    own = [r for r in results if r.backend == str(spec)]
    trial = _Trial(spec, own, isolation or DEFAULT, runs, lambda: clock() >= end)
    found: dict[str, Seen] = {}
    alike: dict[Signature, list[Seen]] = defaultdict(list)
    try:
        for at, signature in _in_turn(own):
            failure = own[at]
            if failure.case in found or not trial.makes(failure.case):
                continue
            earlier = ran_before(own, at) if before is None else before.get(failure.case, ())
            seen = trial.seen(failure, earlier, alike[signature])
            if not seen.runs:
                break
            alike[signature].append(seen)
            found[failure.case] = seen
            progress(f"{failure.case}: {seen.words}")
    finally:
        trial.close()
    return found


def ran_before(results: Sequence[Result], at: int) -> list[str]:
    """Ids of the `results` of one backend since a process of it died last, up to the one at index `at`."""
    died = (k for k in range(at - 1, -1, -1) if (results[k].waived or results[k].verdict) in DEADLY)
    return [r.case for r in results[next(died, -1) + 1 : at]]


def _in_turn(results: Sequence[Result]) -> Iterator[tuple[int, Signature]]:
    """Index and signature of each failure: the first of every signature, then the second of every one, and so on."""
    ranks: Counter[Signature] = Counter()
    turns = []
    for at, result in enumerate(results):
        signature = signature_of(result)
        if signature is not None and result.verdict in FAILURES - {Verdict.XPASS}:
            turns.append((result.verdict is Verdict.TIMEOUT, ranks[signature], at, signature))
            ranks[signature] += 1
    for _, _, at, signature in sorted(turns, key=lambda turn: turn[:3]):
        yield at, signature


class _Fresh(Runner):
    """A runner that finds out whether a case fails, and not where."""

    locates = False


class _Trial:
    """Tries on one backend; once it is late, a try is cut short and does no harm."""

    def __init__(
        self, spec: Spec, results: Sequence[Result], isolation: Isolation, runs: int, late: Callable[[], bool]
    ) -> None:
        self._runner = _Fresh(isolation=isolation.but(True))
        self._spec, self._runs, self._late = spec, runs, late
        self._saved = {r.case: r.saved for r in results if r.saved is not None}

    def close(self) -> None:
        self._runner.close()

    def makes(self, case_id: str) -> bool:
        """True if its id or its file makes the case."""
        return self._case(case_id) is not None

    def _case(self, case_id: str) -> Case | None:
        with suppress(ConformanceError):
            return self._runner.case(case_id)
        with suppress(ConformanceError):
            return casefile.read_one(self._saved[case_id]) if case_id in self._saved else None
        return None

    def seen(self, failure: Result, before: Sequence[str], alike: Sequence[Seen]) -> Seen:
        """How `failure` comes again; `alike` are those of its signature so far. Without a run where time is up."""
        failed = tries = 0
        while tries < self._runs and not self._late():
            harmed = self._harms(failure, (), 1)
            if not harmed and self._late():  # it may have been cut short
                break
            failed, tries = failed + harmed, tries + 1
            if len(alike) >= FEW and (failed or any(k.unsteady for k in alike)):
                break
            if tries == min(ALONE, self._runs) and not failed and (poison := self._poison(failure, before)):
                return Seen(f"after {poison}", failed, tries, poison)
        return Seen(ALWAYS if failed == tries >= SURE else f"{failed} of {tries}", failed, tries)

    def _poison(self, failure: Result, before: Sequence[str]) -> str:
        """The case of `before` after which, whatever came before it, the process dies or the failing case fails; empty
        where there is none.
        """
        for patience in PATIENCE:
            bad = self._shortest(failure, before, patience)
            poison, rest, times = _last(before, bad)[:1], _last(before, bad - 1), _times(bad, max(PATIENCE))
            # one more in the poison's place: what counts cases, or comes and goes, does harm without it too
            if (
                bad
                and all(self._harms(failure, poison, times) for _ in range(AGAIN))
                and not any(self._harms(failure, rest, times + 1) for _ in range(AGAIN))
                and not self._late()
            ):
                return poison[0]
        return ""

    def _shortest(self, failure: Result, before: Sequence[str], patience: int) -> int:
        """How many of the last of `before` do harm, if one fewer does none; 0 where not even all of them do."""
        fine, bad = 0, min(STRIDE, len(before))
        while fine < bad and not self._harms(failure, _last(before, bad), _times(bad, patience)):
            fine, bad = bad, min(STRIDE * bad, len(before))
        if fine == bad:
            return 0
        while bad - fine > 1:
            middle = (fine + bad) // 2
            if self._harms(failure, _last(before, middle), _times(middle, patience)):
                bad = middle
            else:
                fine = middle
        return bad

    def _harms(self, failure: Result, tail: Sequence[str], times: int) -> bool:
        """True if a fresh process dies of `tail` and the failing case, `times` over, or that fails as it did."""
        self._runner.renew()
        return any(self._hurts(failure, i) for i in (*tail, *[failure.case] * times))

    def _hurts(self, failure: Result, case_id: str) -> bool:
        case = None if self._late() else self._case(case_id)
        if case is None:
            return False
        (result,) = self._runner.run(self._spec, [case])
        return result.verdict in DEADLY or (case_id == failure.case and result.verdict is failure.verdict)


def _last(before: Sequence[str], n: int) -> Sequence[str]:
    return before[len(before) - n :] if n > 0 else ()


def _times(tail: int, patience: int) -> int:
    """How often the failing case runs after a tail of so many."""
    return 1 + patience * (SPARE + tail // 4)
