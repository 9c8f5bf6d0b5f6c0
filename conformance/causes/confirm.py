"""Confirm failures: a failure counts once it is reproduced in a fresh process.

Each try starts a new process. A case that fails alone every time is itself at fault. A case that never fails alone may
depend on an earlier case. So it runs again after the last few cases that preceded it in its process, then after more of
them, until the process dies or the case fails. The shortest such tail begins with the damaging case. No case of the
tail is skipped, so a bug that depends on the number of cases still occurs. The damaging case is reported only if the
failing case, repeated, fails after it alone and does not fail without it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from threading import Event

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError
from conformance.judge.cause import ALWAYS
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.process import FOREVER, Deadline
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.shrink.workers import Runners
from conformance.run.signature import Signature, signature_of

TRIES = 10
"""Tries of a case alone; at a failure probability of 0.3 all ten fail once in 170,000 times."""
SURE = 6
"""Minimum failures in a row to report `always`; 0.3 ** 6 is less than 1 in 1,000."""
ALONE = 2
"""Tries without a failure after which earlier cases are suspected."""
FEW = 3
"""Cases per signature that get all tries; others get one, and more only if it passes."""
AGAIN = 2
"""Runs that must fail after the damaging case alone, and runs that must pass without it."""
SPARE = 8
"""Extra repeats of the failing case after a tail, plus one per four cases of the tail."""
PATIENCE = (1, 16)
"""Repeat multipliers: heap damage is not deterministic."""
STRIDE = 8
"""Length of the first tail, and growth factor of the next ones."""
DEADLY = frozenset({Verdict.CRASH, Verdict.TIMEOUT})
"""Verdicts that end the process."""


@dataclass(frozen=True, slots=True)
class Seen:
    """How reliably a failure was reproduced."""

    words: str
    """`always`, `k of n` or `after CASE`."""
    failed: int
    """Number of failed tries of the case alone."""
    runs: int
    """Number of all tries of the case alone."""
    after: str = ""
    """Id of the case that damages the process; empty if unknown."""

    @property
    def unsteady(self) -> bool:
        """True if only some tries failed."""
        return 0 < self.failed < self.runs


def confirm(
    spec: Spec,
    results: Sequence[Result],
    before: Mapping[str, Sequence[str]] | None = None,
    *,
    isolation: Isolation | None = None,
    runs: int = TRIES,
    jobs: int = 1,
    deadline: Deadline = FOREVER,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Seen]:
    """Return how reliably each failure in `results` reproduces on `spec`, by case id.

    A try fails if the verdict is the same or the process dies. The first few cases of each signature get `runs` tries;
    timeouts come last. A case that neither its id nor its file reproduces is left out, and so is one that got no try
    before `deadline`; a request in progress may exceed it by the time limit of `isolation`.

    Args:
        spec: the backend.
        results: results of a run, in its order; those of other backends are ignored.
        before: failing case id -> ids that ran before it in its process, in order; if None, those since the last result
            that ended the process.
        isolation: limits of a process.
        runs: tries of a case alone; fewer than `SURE` never give `always`.
        jobs: number of failures to confirm at a time; what is found does not depend on it.
        deadline: no try starts after it.
        progress: receives a line per case.

    Raises:
        UsageError: the backend or one of its options is unknown.
    """
    own = [r for r in results if r.backend == str(spec)]
    saved = {r.case: r.saved for r in own if r.saved is not None}
    found: dict[str, Seen] = {}
    similar: dict[Signature, list[Seen]] = defaultdict(list)
    over = Event()

    def is_late() -> bool:
        return over.is_set() or deadline.is_over()

    def see(runner: Runner, turn: tuple[int, Signature]) -> Seen | None:
        at, signature = turn
        trial, failure = _Trial(runner, spec, saved, runs, is_late), own[at]
        if failure.case in found or not trial.makes(failure.case):
            return None
        earlier = ran_before(own, at) if before is None else before.get(failure.case, ())
        return trial.seen(failure, earlier, similar.get(signature, ()))

    runners = Runners([_Fresh(isolation=isolation) for _ in range(jobs)])
    try:
        for turns in _in_turn(own):
            for (at, signature), seen in runners.ahead(see, turns):
                if seen is None:
                    continue
                if not seen.runs:
                    return found
                similar[signature].append(seen)
                found[own[at].case] = seen
                progress(f"{own[at].case}: {seen.words}")
    finally:
        over.set()  # what still runs ends soon
        runners.close()
    return found


def ran_before(results: Sequence[Result], at: int) -> list[str]:
    """Return the case ids that ran in the process of `results[at]` before it."""
    died = (k for k in range(at - 1, -1, -1) if (results[k].waived or results[k].verdict) in DEADLY)
    return [r.case for r in results[next(died, -1) + 1 : at]]


def _in_turn(results: Sequence[Result]) -> Iterator[list[tuple[int, Signature]]]:
    """Yield indices and signatures of failures: the first of every signature, then the seconds.

    Failures of a list have different signatures and cases, so that they can be confirmed at the same time.
    """
    ranks: Counter[Signature] = Counter()
    turns = []
    for at, result in enumerate(results):
        signature = signature_of(result)
        if signature is not None and result.verdict in FAILURES - {Verdict.XPASS}:
            turns.append((result.verdict is Verdict.TIMEOUT, ranks[signature], at, signature))
            ranks[signature] += 1
    for _, same in groupby(sorted(turns, key=itemgetter(0, 1, 2)), itemgetter(0, 1)):
        left = [(at, signature) for _, _, at, signature in same]
        while left:  # a case may have several results
            first = {results[at].case: at for at, _ in reversed(left)}
            yield [turn for turn in left if turn[0] in first.values()]
            left = [turn for turn in left if turn[0] not in first.values()]


class _Fresh(Runner):
    """A runner that does not locate failures."""

    locates = False


class _Trial:
    """Tries on one backend; a try that is cut short by the time limit counts as harmless."""

    def __init__(
        self, runner: Runner, spec: Spec, saved: Mapping[str, str], runs: int, late: Callable[[], bool]
    ) -> None:
        self._runner, self._spec, self._saved, self._runs, self._late = runner, spec, saved, runs, late

    def makes(self, case_id: str) -> bool:
        """Return True if the case can be built from its id or its file."""
        return self._case(case_id) is not None

    def _case(self, case_id: str) -> Case | None:
        with suppress(ConformanceError):
            return self._runner.case(case_id)
        with suppress(ConformanceError):
            return casefile.read_one(self._saved[case_id]) if case_id in self._saved else None
        return None

    def seen(self, failure: Result, before: Sequence[str], similar: Sequence[Seen]) -> Seen:
        """Return how `failure` reproduces, given earlier ones of its signature; run nothing if late."""
        failed = tries = 0
        while tries < self._runs and not self._late():
            harmed = self._harms(failure, (), 1)
            if not harmed and self._late():  # it may have been cut short
                break
            failed, tries = failed + harmed, tries + 1
            if len(similar) >= FEW and (failed or any(k.unsteady for k in similar)):
                break
            if tries == min(ALONE, self._runs) and not failed and (poison := self._poison(failure, before)):
                return Seen(f"after {poison}", failed, tries, poison)
        return Seen(ALWAYS if failed == tries >= SURE else f"{failed} of {tries}", failed, tries)

    def _poison(self, failure: Result, before: Sequence[str]) -> str:
        """Return the earlier case that makes the process die or the failing case fail; else ""."""
        for patience in PATIENCE:
            bad = self._shortest(failure, before, patience)
            poison, rest, times = _last(before, bad)[:1], _last(before, bad - 1), _times(bad, max(PATIENCE))
            # one more run in place of the poison: a bug that counts cases, or is random, shows without it too
            if (
                bad
                and all(self._harms(failure, poison, times) for _ in range(AGAIN))
                and not any(self._harms(failure, rest, times + 1) for _ in range(AGAIN))
                and not self._late()
            ):
                return poison[0]
        return ""

    def _shortest(self, failure: Result, before: Sequence[str], patience: int) -> int:
        """Return the length of the shortest harmful tail of `before`; 0 if all of it is harmless."""
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
        """Return True if `tail` and `times` runs of the case kill a fresh process or fail as before."""
        self._runner.restart()
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
    """Return how often the failing case runs after a tail of that length."""
    return 1 + patience * (SPARE + tail // 4)
