"""The matrix of faults and cases: which cases of `ops` notice a fault, all of them and not the first alone.

As a script it is the worker that runs them: it answers one request with a reply for each event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import FAILURES, Result
from conformance.process import WorkerDiedError
from conformance.run.runner import Runner
from conformance.suite import FAMILIES, ops
from conformance.suite.family import Level

from .campaign import TIME_LIMIT, TOGETHER, Hunter, Reach, answer, batches, crowded, events, kind_of
from .faults import Fault
from .reach import Probe


def matrix(
    faults: Sequence[Fault], level: Level, progress: Callable[[str], None] = lambda _: None, limit: float = TIME_LIMIT
) -> dict[str, list[str]]:
    """Fault -> the cases of `ops` at `level` that notice it, in the order of their ops.

    Of a fault that ends the worker, or hangs for `limit` seconds, those before: whatever reaches it notices it.
    UsageError if the adapter as it is dies.
    """
    found: dict[str, list[str]] = {f.name: [] for f in faults}
    alive, start, ended = list(faults), 0, False
    while alive and not ended:
        running = ""
        try:
            for event in events("conformance.planted.matrix", alive, {"level": level, "start": start}, limit):
                kind = event["event"]
                if kind == "batch":
                    start, running = event["at"], ""
                    progress(event["case"])
                elif kind == "runs":
                    running = event["fault"]
                elif kind == "noticed":
                    found[event["fault"]] += event["cases"]
                ended = kind == "end"
        except WorkerDiedError as e:
            if not running:
                raise UsageError(f"the adapter as it is died: {e}") from None
            alive = [f for f in alive if f.name != running]
    return {name: list(dict.fromkeys(cases)) for name, cases in found.items()}


def fewest(noticed: Mapping[str, Sequence[str]], given: Iterable[str] = ()) -> list[str]:
    """Cases that beside those `given` notice each fault that any case notices: always the one that notices most of
    what is left, of equals the first by its text.
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


def _rows(faults: list[Fault], request: JSON) -> Iterator[JSON]:
    probes = [Probe(of, [f for f in faults if f.of == of]) for of in dict.fromkeys(f.of for f in faults)]
    runner = Hunter([*faults, *probes])
    reach = Reach(runner, probes)
    cut = list(batches(list(FAMILIES[ops.NAME].ids(request["level"])), TOGETHER[ops.NAME], kind_of))
    runs = 0
    for at, ids in enumerate(cut[request["start"] :], request["start"]):
        if crowded(runs):
            yield {"event": "turn"}
            return
        yield {"event": "batch", "at": at, "case": ids[0]}
        cases = [runner.case(i) for i in ids]
        for fault in reach.of(kind_of(ids[0]), faults, partial(_run, runner, cases)):
            runs += 1
            yield {"event": "runs", "fault": fault.name}
            noticed = [r.case for r in runner.run(fault.spec, cases) if r.verdict in FAILURES]
            if noticed:
                yield {"event": "noticed", "fault": fault.name, "cases": noticed}
    yield {"event": "end"}


def _run(runner: Runner, cases: Sequence[Case], spec: Spec) -> list[Result]:
    return runner.run(spec, cases)


if __name__ == "__main__":
    answer(_rows)
