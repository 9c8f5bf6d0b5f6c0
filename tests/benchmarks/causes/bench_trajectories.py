"""Shrink failing trajectories and check that the smallest case fails as in the run.

    python tests/benchmarks/causes/bench_trajectories.py RUN.json BACKEND N SEED [SECONDS]

Of the failures on BACKEND in RUN.json with several steps N are drawn: one of each signature, then a second of each, and
so on; a `conformance.toml` here may name BACKEND. Each is shrunk for at most SECONDS (60), and the smallest case is
seen again in a fresh process. It prints whether that fails with the signature that the run has, with another, or not at
all. Exit code 1 where one has another.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import FAILURES, Result
from conformance.report.runs import read_runs
from conformance.run.runner import Runner
from conformance.run.session import settings
from conformance.run.shrink import shrink, size
from conformance.run.signature import Signature, signature_of

SAME, OTHER, RIGHT = "the same", "ANOTHER", "not seen again"


def main(path: Path, backend: str, n: int, seed: int, seconds: float) -> None:
    """Print each draw, and how many ended where; exit code 1 where one ended at another failure."""
    settings.load(None)
    results = [r.value for r in read_runs([path]).results if r.value.backend == backend]
    runner = Runner()
    ended: Counter[str] = Counter()
    try:
        for result in _drawn(results, runner, n, seed):
            where, words = _shrunk(runner, Spec.parse(backend), result, seconds)
            ended[where] += 1
            sys.stdout.write(f"{where}: {result.case}: {words}\n")
            sys.stdout.flush()
    finally:
        runner.close()
    sys.stdout.write(", ".join(f"{count} {where}" for where, count in ended.items()) + "\n")
    sys.exit(int(ended[OTHER] > 0))


def _drawn(results: Sequence[Result], runner: Runner, n: int, seed: int) -> list[Result]:
    alike: dict[Signature | None, list[Result]] = defaultdict(list)
    for r in results:
        if r.verdict in FAILURES and len(runner.case(r.case).steps) > 1:
            alike[signature_of(r)].append(r)
    rng = random.Random(seed)  # noqa: S311  # no secret
    turns = [(k, str(s), r) for s, rs in alike.items() for k, r in enumerate(rng.sample(rs, len(rs)))]
    return [r for *_, r in sorted(turns, key=lambda turn: turn[:2])][:n]


def _shrunk(runner: Runner, spec: Spec, result: Result, seconds: float) -> tuple[str, str]:
    wanted, case = signature_of(result), runner.case(result.case)
    runner.restart()
    try:
        small = shrink(runner, spec, case, time_budget=seconds)
        runner.restart()
        (seen,) = runner.run(spec, [small.case])
    except ConformanceError as e:
        return RIGHT, str(e)
    found = signature_of(seen)
    if wanted is None or found is None:
        return RIGHT, f"{size(small.case)}: {wanted}"
    if not wanted.covers(small.signature):
        return RIGHT, f"alone it fails otherwise: {small.signature}, and {wanted} in the run"
    where = SAME if wanted.covers(found) else OTHER
    return where, f"{size(case)} to {size(small.case)}: {wanted}{'' if where == SAME else f', then {found}'}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float((*sys.argv, "60")[5]))
