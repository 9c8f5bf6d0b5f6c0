"""Trajectories that fail, shrunk: does what is left fail by the cause that `conform causes` gave the trajectory?

    python tests/benchmarks/causes/bench_trajectories.py RUN.json BACKEND N SEED

RUN.json has causes (`conform causes RUN.json --json RUN.json`); a `conformance.toml` here may name BACKEND. Of its
failures with several steps N are drawn: one of each cause, then a second of each, and so on. Of each it prints whether
the shrunk case fails by its own cause, by another one, or by none that is known.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.causes.cause import Cause
from conformance.causes.form import Form
from conformance.causes.group import BY_CHANCE, Failure, failure_of
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import FAILURES, Result
from conformance.report.runs import read_runs
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session import settings
from conformance.run.shrink import shrink, size

SECONDS = 60.0
"""To shrink one."""
OWN, OTHER, NONE = "its own cause", "another cause", "no known cause"


def main(path: Path, backend: str, n: int, seed: int) -> None:
    """Print each draw, and how many ended where."""
    settings.load(None)
    runs = read_runs([path])
    causes = [c for row in runs.causes if (c := Cause.from_json(row.value)).backend == backend]
    runner = Runner(isolation=Isolation(isolate=True))
    ended: Counter[str] = Counter()
    try:
        for result in _drawn([r.value for r in runs.results if r.value.backend == backend], runner, n, seed):
            words, where = _shrunk(runner, Spec.parse(backend), result, causes)
            ended[where] += 1
            sys.stdout.write(f"{result.case} ({result.cause}): {words}\n")
            sys.stdout.flush()
    finally:
        runner.close()
    sys.stdout.write(", ".join(f"{count} {where}" for where, count in ended.items()) + "\n")


def _drawn(results: Sequence[Result], runner: Runner, n: int, seed: int) -> list[Result]:
    by_cause: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        if r.verdict in FAILURES and r.cause and len(runner.case(r.case).steps) > 1:
            by_cause[r.cause].append(r)
    rng = random.Random(seed)  # noqa: S311  # no secret
    turns = [(k, c, r) for c, rs in sorted(by_cause.items()) for k, r in enumerate(rng.sample(rs, len(rs)))]
    return [r for *_, r in sorted(turns, key=lambda turn: turn[:2])][:n]


def _shrunk(runner: Runner, spec: Spec, result: Result, causes: Sequence[Cause]) -> tuple[str, str]:
    try:
        small = shrink(runner, spec, runner.case(result.case), time_budget=SECONDS)
    except ConformanceError as e:
        return str(e), "not shrunk"
    failure = failure_of(small.case, small.result)
    named = [c.id for c in causes if failure is not None and _shows(c, failure)]
    where = OWN if result.cause in named else OTHER if named else NONE
    return f"{size(small.case)}, {small.signature}: {where} {' '.join(named)}", where


def _shows(cause: Cause, failure: Failure) -> bool:
    """Whether `failure` is one of `cause`: by its node, or, where none is at fault, by its words."""
    form = Form(cause.conditions)
    if not form.ops or failure.at is None:
        return bool(cause.message) and failure.signature.kind == cause.message
    verdicts, found = {cause.verdict, failure.result.verdict}, failure.features()
    alike = len(verdicts) == 1 or (form.of_extent and verdicts <= BY_CHANCE)
    return alike and (form.holds(found) or (form.spreads and form.beside(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
