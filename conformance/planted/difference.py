"""Whether a fault that no case notices changes anything: cases drawn at random, on the adapter with it and without.

As a script it is the worker that runs them: it answers one request with a reply for each event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.ggml.errors import UsageError
from conformance.process import WorkerDiedError
from conformance.run.execute import execute
from conformance.suite import FAMILIES
from conformance.suite.strategies import case_ids

from .campaign import TIME_LIMIT, Hunter, Reach, answer, crowded, events, kind_of
from .faults import Fault
from .reach import Probe

DRAWN = ("random", "alias", "kv_growth", "multi_sequence", "gqa")
"""Families of trajectories that are drawn from; of the first two every key is drawn by itself."""
OPS = 40
"""Drawn cases of each op."""
BETWEEN = 3
"""Cases of ops between two trajectories."""
ENOUGH = 600
"""Cases that reach a fault and differ nowhere by it, after which no more are tried."""


def search(
    faults: Sequence[Fault],
    seed: int,
    examples: int,
    progress: Callable[[str, str], None] = lambda *_: None,
    limit: float = TIME_LIMIT,
) -> dict[str, str]:
    """Fault -> the first case, of those that `draw` gives, whose answer or bytes differ by it.

    UsageError if the adapter as it is dies.
    """
    found: dict[str, str] = {}
    tried = Counter[str]()
    start, running, ended = 0, None, False
    while not ended:
        alive = [f for f in faults if f.name not in found and tried[f.name] < ENOUGH]
        if not alive:
            break
        request = {"seed": seed, "examples": examples, "start": start, "tried": dict(tried)}
        try:
            for event in events("conformance.planted.difference", alive, request, limit):
                kind = event["event"]
                if kind == "case":
                    start, running = event["at"], None
                elif kind == "runs":
                    running = event
                    tried[event["fault"]] += 1
                elif kind == "differs":
                    found[event["fault"]] = event["case"]
                    progress(event["fault"], event["case"])
                ended = kind == "end"
        except WorkerDiedError as e:
            if running is None:
                raise UsageError(f"mutants: the adapter as it is died: {e}") from None
            found[running["fault"]] = running["case"]
    return found


def draw(seed: int, examples: int) -> list[str]:
    """`examples` ids of each of `DRAWN`, and between them up to `OPS` of every op's at level standard, all with seeds
    of their own.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    of_op: dict[str, list[str]] = {}
    for case_id in rng.permutation(FAMILIES["ops"].ids("standard")).tolist():
        of_op.setdefault(kind_of(case_id), []).append(f"{case_id.rpartition('@')[0]}@{rng.integers(1000, 10**9)}")
    ops = [i for turn in zip_longest(*(ids[:OPS] for ids in of_op.values())) for i in turn if i]
    trajectories = [i for ids in zip(*(_drawn(f, seed, examples) for f in DRAWN), strict=False) for i in ids]
    turns = [ops[k : k + BETWEEN] for k in range(0, len(ops), BETWEEN)]
    return [i for turn, last in zip_longest(turns, trajectories) for i in (*(turn or ()), last) if i]


def _drawn(family: str, seed: int, examples: int) -> list[str]:
    ids: dict[str, None] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case_ids(family))
    def take(case_id: str) -> None:
        ids[case_id] = None

    take()
    return list(ids)


def differences(
    faults: Sequence[Fault], seed: int, examples: int, start: int, before: Mapping[str, int]
) -> Iterator[JSON]:
    """Run the cases from `start` on, on every fault that they reach, until one differs by it or `ENOUGH` do not.

    Of each fault so many cases have run `before`.
    """
    tried = Counter(before)
    probes = [Probe(of, [f for f in faults if f.of == of]) for of in dict.fromkeys(f.of for f in faults)]
    runner = Hunter([*faults, *probes])
    reach = Reach(runner, probes)
    plain = {p.of: p.spec for p in probes}
    alive = list(faults)
    ids = draw(seed, examples)
    runs = 0
    for at in range(start, len(ids)):
        if crowded(runs) or not alive:
            yield {"event": "turn"}
            return
        yield {"event": "case", "at": at}
        case = runner.case(ids[at])
        right: dict[Spec, object] = {}

        def run(spec: Spec, case: Case = case, right: dict[Spec, object] = right) -> None:
            right[spec] = _answer(runner.backend(spec), case)

        reached = reach.of(kind_of(case.id), alive, run)
        runs += 1 + len(reached)
        for fault in reached:
            yield {"event": "runs", "fault": fault.name, "case": case.id}
            tried[fault.name] += 1
            if _answer(runner.backend(fault.spec), case) != right[plain[fault.of]]:
                alive.remove(fault)
                yield {"event": "differs", "fault": fault.name, "case": case.id}
            elif tried[fault.name] == ENOUGH:
                alive.remove(fault)
    yield {"event": "end"}


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


def _differences(faults: list[Fault], request: JSON) -> Iterator[JSON]:
    return differences(faults, request["seed"], request["examples"], request["start"], request["tried"])


if __name__ == "__main__":
    answer(_differences)
