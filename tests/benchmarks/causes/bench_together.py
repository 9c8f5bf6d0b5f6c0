"""Planted faults together: are the causes found as many as the faults, and is each the cause of one?

    python tests/benchmarks/causes/bench_together.py DRAWS SEED [ADAPTER]

Each draw plants 2 to 6 faults in one adapter and runs level smoke. A cause belongs to the fault with which its smallest
case fails when it is planted alone. Precision: causes that belong to a fault which no other cause belongs to, of all
causes. Recall: faults with a cause, of those that smoke notices alone and that still change a result together.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from conformance.backend.registry import Spec
from conformance.causes.failure import failure_of
from conformance.causes.group import Group, Nodes, Search
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.planted.campaign import Hunter
from conformance.planted.faults import FOLDER, ROOT, Bundle, Fault, PlantError, read
from conformance.run.session.select import case_ids

BATCH = 64
IDS = case_ids((), (), "smoke")


class _Runner(Hunter):
    locates = True


def _run(runner: Hunter, spec: Spec) -> list[Result]:
    parts = [IDS[at : at + BATCH] for at in range(0, len(IDS), BATCH)]
    return [r for part in parts for r in runner.run(spec, [runner.case(i) for i in part])]


def _groups(runner: Hunter, spec: Spec) -> list[Group]:
    results = _run(runner, spec)
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    nodes = Nodes(failures, (runner.case(r.case) for r in results if r.verdict is Verdict.PASS))
    return Search(runner, spec).run(failures, nodes)


def _draw(faults: Sequence[Fault], seed: int) -> tuple[Fault, ...]:
    rng = random.Random(seed)  # noqa: S311  # no secret
    while True:
        chosen = tuple(rng.sample(list(faults), rng.randint(2, 6)))
        files = {f.file: (ROOT / f.file).read_text(encoding="utf-8") for f in chosen}
        try:
            for f in chosen:
                files[f.file] = f.apply(files[f.file])
        except PlantError:  # two at one place
            continue
        return chosen


def draw(faults: Sequence[Fault], seed: int) -> tuple[int, int, int, str]:
    """Of one draw: causes, faults to be found, causes that belong to a fault of their own, and what was found."""
    chosen = _draw(faults, seed)
    bundle = Bundle("together", chosen)
    runner = _Runner([bundle, *chosen])
    start = time.monotonic()
    groups = _groups(runner, bundle.spec)
    seconds = time.monotonic() - start
    hunter = Hunter(chosen)
    noticed = [f for f in chosen if any(r.verdict in FAILURES for r in _run(hunter, f.spec))]
    owners = [next((f for f in noticed if _fails(hunter, f, g)), None) for g in groups]
    found = {f.name for f in owners if f is not None}
    lines = [f"seed {seed}, {seconds:.0f} s: {', '.join(f.name for f in noticed)}"]
    for group, owner in zip(groups, owners, strict=True):
        conditions = ", ".join(map(str, group.form.conditions)) or " ".join(group.kind)
        lines.append(f"    {owner.name if owner else '?'}: {conditions} ({len(group.failures)})")
    return len(groups), len(noticed), len(found), "\n".join(lines)


def _fails(hunter: Hunter, fault: Fault, group: Group) -> bool:
    try:
        return any(r.verdict in FAILURES for r in hunter.run(fault.spec, [group.proof.case]))
    except ConformanceError:
        return False


def main(draws: int, seed: int, adapter: str) -> None:
    """Print each draw, and precision and recall over all of them."""
    faults = [f for f in read([FOLDER]) if f.of == adapter]
    context = multiprocessing.get_context("spawn")
    causes = wanted = found = 0
    for n in range(seed, seed + draws):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                a, b, c, text = pool.submit(draw, faults, n).result()
            except BrokenProcessPool:  # a fault may corrupt the memory of its process
                sys.stdout.write(f"seed {n}: died\n")
                continue
        causes, wanted, found = causes + a, wanted + b, found + c
        sys.stdout.write(
            f"{text}\n  so far: precision {found / max(1, causes):.2f}, recall {found / max(1, wanted):.2f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
