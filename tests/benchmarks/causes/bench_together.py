"""Inject several faults at once and compare them with the causes found: one cause per fault.

    PYTHONPATH=tests python tests/benchmarks/causes/bench_together.py DRAWS SEED [ADAPTER [MINUTES [GLOB ...]]]

Each draw plants 2 to 6 faults in one adapter, runs what the globs match of level smoke and looks for causes for as many
minutes (30). A cause may belong to a fault with which its smallest case fails when it is planted alone, and to one
only; no fault has two causes. Where a cause says that what ran before is at fault, its cases fail after the others of
the level; what did not come again is a row beside the causes, and counts only where a fault has no other. Precision:
causes that belong to a fault, of all causes. Recall: faults with a cause, of those that smoke notices alone, but for
what the others hide: a fault without which each case that it makes fail alone has the same result.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from trust.copies import Copies
from trust.faults import FOLDER, ROOT, Bundle, Fault, PlantError, read

from conformance.backend.registry import Spec
from conformance.causes.failure import failure_of
from conformance.causes.group import GONE, Group, Nodes
from conformance.causes.search import Search
from conformance.ggml.errors import ConformanceError
from conformance.judge import evidence
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.process import Deadline
from conformance.run.session.select import case_ids

BATCH = 64


class _Runner(Copies):
    locates = True


def _run(runner: Copies, spec: Spec, ids: Sequence[str]) -> Iterator[Result]:
    for at in range(0, len(ids), BATCH):
        yield from runner.run(spec, [runner.case(i) for i in ids[at : at + BATCH]])


def _failing(runner: Copies, fault: Fault, ids: Sequence[str]) -> Iterator[str]:
    """The cases that fail with `fault`: the search for a wrong node, which may pass a case, runs only for those."""
    for at in range(0, len(ids), BATCH):
        cases = [runner.case(i) for i in ids[at : at + BATCH]]
        with runner.quick(locates=False, checks_stale_state=False):
            failed = [c for c, r in zip(cases, runner.run(fault.spec, cases), strict=True) if r.verdict in FAILURES]
        yield from (c.id for c in failed if runner.run(fault.spec, [c])[0].verdict in FAILURES)


def _groups(runner: Copies, spec: Spec, results: Sequence[Result], minutes: float) -> list[Group]:
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    nodes = Nodes(failures, (runner.case(r.case) for r in results if r.verdict is Verdict.PASS))
    return Search(runner, spec, nodes, deadline=Deadline.after(60 * minutes)).run(failures)


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


def draw(faults: Sequence[Fault], seed: int, minutes: float, smoke: Sequence[str]) -> tuple[int, int, int, str]:
    """Of one draw: causes, faults to be found, causes that belong to a fault of their own, and what was found."""
    chosen = _draw(faults, seed)
    bundle = Bundle("together", chosen)
    runner = _Runner([bundle, *chosen])
    start = time.monotonic()
    results = list(_run(runner, bundle.spec, smoke))
    groups = _groups(runner, bundle.spec, results, minutes)
    seconds = time.monotonic() - start
    hunter = Copies(chosen)
    failed = [r.case for r in results if r.verdict in FAILURES]
    ids = list(dict.fromkeys([*failed, *smoke]))  # what fails together fails alone, mostly
    by = {f: next(_failing(hunter, f, ids), "") for f in chosen}
    noticed = [f for f in chosen if by[f]]
    owners = _one_to_one([[f for f in noticed if _fails(hunter, f, g, smoke)] for g in groups])
    lines = [f"seed {seed}, {seconds:.0f} s, {len(failed)} failures: {', '.join(f.name for f in noticed)}"]
    for fault in [f for f in noticed if f not in owners]:
        if not _changes(fault, chosen, {r.case: r for r in results}, smoke):
            noticed.remove(fault)
            lines.append(f"    hidden by the others: {fault.name}, which alone fails {by[fault]}")
    for group, owner in zip(groups, owners, strict=True):
        conditions = ", ".join(map(str, group.rule.conditions)) or " ".join(group.kind)
        lines.append(f"    {owner.name if owner else '?'}: {conditions} ({len(group.failures)}), {group.proof.case.id}")
    lines += [f"    missed: {f.name}, which fails {by[f]}" for f in noticed if f not in owners]
    found = sum(owner is not None for owner in owners)
    rows = sum(g.kind[1] == GONE and owner is None for g, owner in zip(groups, owners, strict=True))
    return len(groups) - rows, len(noticed), found, "\n".join(lines)


def _changes(fault: Fault, chosen: Sequence[Fault], together: Mapping[str, Result], smoke: Sequence[str]) -> bool:
    """Whether any case that `fault` alone makes fail has another result with the others than with all."""
    others = Bundle("others", tuple(f for f in chosen if f is not fault))
    runner = _Runner([others, fault])
    alone = list(_failing(runner, fault, smoke))
    return any(_said(r) != _said(together[r.case]) for r in _run(runner, others.spec, alone))


def _said(result: Result) -> tuple[object, ...]:
    return result.verdict, result.detail, result.budget_used


def _one_to_one(may_own: Sequence[Sequence[Fault]]) -> list[Fault | None]:
    """The fault of each cause, no fault twice, so that as many causes as can be have one."""
    owner: dict[Fault, int] = {}

    def give(cause: int, asked: set[Fault]) -> bool:
        for fault in may_own[cause]:
            if fault not in asked:
                asked.add(fault)
                if fault not in owner or give(owner[fault], asked):
                    owner[fault] = cause
                    return True
        return False

    for cause in range(len(may_own)):
        give(cause, set())
    of = {cause: fault for fault, cause in owner.items()}
    return [of.get(cause) for cause in range(len(may_own))]


def _fails(hunter: Copies, fault: Fault, group: Group, smoke: Sequence[str]) -> bool:
    try:
        if group.kind[1] == GONE or group.kind[1].startswith((evidence.Fault.STALE, evidence.Fault.EARLIER)):
            cases = {f.case.id for f in group.failures}
            return any(r.verdict in FAILURES and r.case in cases for r in _run(hunter, fault.spec, smoke))
        return any(r.verdict in FAILURES for r in hunter.run(fault.spec, [group.proof.case]))
    except ConformanceError:
        return False


def main(draws: int, seed: int, adapter: str = "cpu", minutes: str = "30", *globs: str) -> None:
    """Print each draw, and precision and recall over all of them."""
    faults = [f for f in read([FOLDER]) if f.of == adapter]
    smoke = case_ids((), globs, "smoke")
    context = multiprocessing.get_context("spawn")
    causes = wanted = found = 0
    for n in range(seed, seed + draws):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                a, b, c, text = pool.submit(draw, faults, n, float(minutes), smoke).result()
            except BrokenProcessPool:
                sys.stdout.write(f"seed {n}: died\n")
                continue
        causes, wanted, found = causes + a, wanted + b, found + c
        rates = f"precision {found / max(1, causes):.2f}, recall {found / max(1, wanted):.2f}"
        sys.stdout.write(f"{text}\n  so far: {found} of {causes} causes and {wanted} faults: {rates}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
