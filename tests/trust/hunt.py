"""Find the cases that notice a fault, and those whose answers differ by it.

Cases run in batches, first on the adapter as it is: a case that fails there counts for no fault. A fault whose
statement does not run, from the start of the process to the end of the batch, can change nothing in it. Each of the
other faults gets a fresh process for the same cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, zip_longest

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.properties import case_ids
from conformance.run.execute import execute
from conformance.run.isolation.isolate import Isolation
from conformance.run.session.settings import FILE, WaiverBook, read, today
from conformance.suite import FAMILIES, ops
from conformance.suite.family import Level

from .faults import ROOT, Fault
from .inject import Injector, Probe

TIME_LIMIT = 60.0
"""Seconds that a request may take; a fault by which it takes longer is noticed."""
TOGETHER = 64
"""Cases that share a process, of one family each."""
TRAJECTORIES_TOGETHER = 8
"""The same of trajectories, which take longer than a process takes to start."""
PARTS = (1, 8, 16)
"""How many of a batch run before the next, where one that fails is enough; the last again and again."""
NOTHING = "nothing passes"
"""Verdict on a fault by which an adapter refuses all that it took: a run in which nothing passes on a backend fails."""
DRAWN = ("random", "alias", "kv_growth", "multi_sequence", "gqa")
"""Families of trajectories that cases are drawn from."""
OF_EACH_OP = 20
"""Drawn cases of each op."""
TRAJECTORIES = 24
"""Drawn cases of each family of `DRAWN`."""
BETWEEN = 6
"""Cases of ops between two trajectories."""
ENOUGH = 300
"""Cases that reach a fault and differ nowhere by it, after which no more are tried."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """Whether one family noticed one fault."""

    fault: str
    family: str
    noticed: bool
    case: str = ""
    """The first one that noticed it."""
    verdict: str = ""
    detail: str = ""


def hunt(
    faults: Sequence[Fault], level: Level, say: Callable[[Hunt], None] = lambda _: None, *, once: bool = False
) -> list[Hunt]:
    """Whether each family that a fault names noticed it. `once`: until one of its families did.

    An adapter on which some cases fail as it is has a hunt of the fault `no-fault` for each of these, too.
    """
    found: list[Hunt] = []
    for of in dict.fromkeys(f.of for f in faults):
        for each in _hunt([f for f in faults if f.of == of], level, once=once):
            found.append(each)
            say(each)
    return found


def _hunt(faults: Sequence[Fault], level: Level, *, once: bool) -> Iterator[Hunt]:
    noticed, passed, proven = set[str](), set[str](), False
    with closing(Trials(faults)) as trials:
        for family in dict.fromkeys(n for n in FAMILIES for f in faults if n in f.families):
            left = [f for f in faults if family in f.families and not (once and f.name in noticed)]
            for ids in batches(family, level) if left else ():
                if not left:
                    break
                trial = trials.batch(ids)
                yield from (Hunt("no-fault", family, True, r.case, str(r.verdict), r.detail) for r in trial.alarms)
                proven |= trial.passes
                for fault in list(left):
                    wrong = None
                    if fault in trial.reached:
                        wrong = next((r for r in trial.run(fault, passed) if r.verdict in FAILURES), None)
                    elif trial.passes:
                        passed.add(fault.name)
                    if wrong is not None:
                        left.remove(fault)
                        noticed.add(fault.name)
                        yield Hunt(fault.name, family, True, wrong.case, str(wrong.verdict), wrong.detail)
            yield from (Hunt(f.name, family, False) for f in left)
    for fault in faults if proven and once else ():
        if fault.name not in noticed | passed:
            detail = "every case that passes without it is refused"
            yield Hunt(fault.name, fault.families[0], True, "", NOTHING, detail)


def matrix(faults: Sequence[Fault], level: Level) -> dict[str, list[str]]:
    """Fault -> all cases of `ops` at `level` that notice it. The faults are of one adapter."""
    found: dict[str, list[str]] = {f.name: [] for f in faults}
    with closing(Trials(faults)) as trials:
        for ids in batches(ops.NAME, level):
            trial = trials.batch(ids)
            for fault in trial.reached:
                found[fault.name] += [r.case for r in trial.run(fault, set()) if r.verdict in FAILURES]
    return found


def fewest(noticed: Mapping[str, Sequence[str]], given: Sequence[str] = ()) -> list[str]:
    """Choose cases that, with `given`, notice each fault that any case notices.

    Always the case that notices most of what is left, of equals the first by its text.
    """
    have = frozenset(given)
    left = {fault: set(cases) for fault, cases in noticed.items() if cases and have.isdisjoint(cases)}
    found: list[str] = []
    while left:
        counts = Counter(case for cases in left.values() for case in cases)
        best = min(counts, key=lambda case: (-counts[case], case))
        found.append(best)
        left = {fault: cases for fault, cases in left.items() if best not in cases}
    return found


def batches(family: str, level: Level) -> Iterator[Sequence[str]]:
    """The ids of a family, so many at a time as share a process, those of one op side by side."""
    of_ops = family == ops.NAME
    ids = sorted(FAMILIES[family].ids(level), key=_op) if of_ops else list(FAMILIES[family].ids(level))
    size = TOGETHER if of_ops else TRAJECTORIES_TOGETHER
    yield from (ids[at : at + size] for at in range(0, len(ids), size))


class Trials:
    """Batches of cases on an adapter as it is and with faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        """`faults` are of one adapter."""
        self.faults = faults
        self.probe = Probe(faults[0].of, faults)
        spec = Spec.parse(self.probe.of)
        known = read(ROOT / FILE).waivers_of([spec], None)
        waivers = WaiverBook({self.probe.spec: known[spec]} if known else {}, today())
        self.runner = Injector([*faults, self.probe], isolation=Isolation(time_limit=TIME_LIMIT), waivers=waivers)

    def fresh(self, plant: Fault | Probe) -> Backend:
        """The plant in a process that did nothing before; every other process ends."""
        self.runner.restart()
        return self.runner.backend(plant.spec)

    def unchanged(self) -> Backend:
        """The adapter as it is, in such a process, with nothing reached yet."""
        marks = self.runner.folder(self.probe).reached
        assert marks is not None
        marks[:] = bytes(len(marks))
        return self.fresh(self.probe)

    def reached(self) -> list[Fault]:
        """Faults whose statement ran since `unchanged`."""
        marks = self.runner.folder(self.probe).reached
        assert marks is not None
        return [f for f, mark in zip(self.faults, bytes(marks), strict=False) if mark]

    def batch(self, ids: Sequence[str]) -> Trial:
        """Run the cases on the adapter as it is."""
        cases = [self.runner.case(i) for i in ids]
        self.unchanged()
        results = self.runner.run(self.probe.spec, cases)
        return Trial(self, cases, results, self.reached())

    def close(self) -> None:
        """End the processes."""
        self.runner.close()


class Trial:
    """A batch of cases that ran on the adapter as it is."""

    def __init__(self, trials: Trials, cases: Sequence[Case], results: Sequence[Result], reached: list[Fault]) -> None:
        self._trials = trials
        self.reached = reached
        self.alarms = [r for r in results if r.verdict in FAILURES]
        """Failures of the unchanged adapter that no waiver covers."""
        self.passes = any(r.verdict is Verdict.PASS for r in results)
        right = {r.case for r in results if r.verdict in {Verdict.PASS, Verdict.UNSUPPORTED}}
        self.cases = [c for c in cases if c.id in right]

    def run(self, fault: Fault, passed: set[str]) -> Iterator[Result]:
        """Results of the cases that do not fail without the fault, few at first.

        Where one passes, the fault's name goes into `passed`.
        """
        runner = self._trials.runner
        runner.restart()
        sizes, at = list(PARTS), 0
        while at < len(self.cases):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            for result in runner.run(fault.spec, self.cases[at : at + size]):
                if result.verdict is Verdict.PASS:
                    passed.add(fault.name)
                yield result
            at += size


def differences(
    faults: Sequence[Fault], seed: int, say: Callable[[str, str], None] = lambda *_: None
) -> dict[str, str]:
    """Fault -> the first case of `draw` whose answer or bytes differ by it.

    The faults are of one adapter. No difference counts in a case that the adapter as it is answers in two ways.
    """
    found: dict[str, str] = {}
    tried = Counter[str]()
    ids = draw(seed)
    with closing(Trials(faults)) as trials:
        for at in range(0, len(ids), TOGETHER):
            left = [f for f in faults if f.name not in found and tried[f.name] < ENOUGH]
            if not left:
                break
            cases = [trials.runner.case(i) for i in ids[at : at + TOGETHER]]
            right = [_answer(backend, c) for backend in [trials.unchanged()] for c in cases]
            reached = set(trials.reached())
            for fault in [f for f in left if f in reached]:
                tried[fault.name] += len(cases)
                differs = _first_difference(trials, fault, cases, right)
                if differs:
                    found[fault.name] = differs
                    say(fault.name, differs)
    return found


def _first_difference(trials: Trials, fault: Fault, cases: Sequence[Case], right: Sequence[object]) -> str:
    backend = trials.fresh(fault)
    differ = (k for k, c in enumerate(cases) if _answer(backend, c) != right[k])
    first = next(differ, None)
    while first is not None:
        again = trials.fresh(trials.probe)
        if [_answer(again, c) for c in cases[: first + 1]][-1] == right[first]:
            return cases[first].id
        backend = trials.fresh(fault)
        first = next(differ, None)
    return ""


def draw(seed: int) -> list[str]:
    """Up to `OF_EACH_OP` ids of every op at standard, `TRAJECTORIES` of each `DRAWN` family.

    The trajectories are spread between them; all have seeds of their own.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    shuffled = rng.permutation(FAMILIES[ops.NAME].ids("standard")).tolist()
    fresh = [f"{i.rpartition('@')[0]}@{rng.integers(1000, 10**9)}" for i in shuffled]
    of_op = [list(own)[:OF_EACH_OP] for _, own in groupby(sorted(fresh, key=_op), _op)]
    of_ops = [i for turn in zip_longest(*of_op) for i in turn if i]
    trajectories = [i for turn in zip_longest(*(_drawn(f, seed) for f in DRAWN)) for i in turn if i]
    turns = [of_ops[k : k + BETWEEN] for k in range(0, len(of_ops), BETWEEN)]
    return [i for turn, last in zip_longest(turns, trajectories) for i in (*(turn or ()), last) if i]


def _op(case_id: str) -> str:
    return case_id.partition("-")[0]


def _drawn(family: str, seed: int) -> list[str]:
    ids: dict[str, None] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=TRAJECTORIES, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case_ids(family))
    def take(case_id: str) -> None:
        ids[case_id] = None

    take()
    return list(ids)


def _answer(backend: Backend, case: Case) -> object:
    """Which nodes the backend takes, and every output and cache of the case; or that it failed."""
    try:
        taken = [bool(s) for step in case.steps for s in backend.supports(step.graph)]
        if not all(taken) or not backend.supports_case(case):
            return taken
        steps = execute(backend, case).steps
    except Exception as e:  # noqa: BLE001  # whatever a fault raises
        return type(e).__name__
    return [[np.asarray(data).tobytes() for data in step.all.values()] for step in steps]
