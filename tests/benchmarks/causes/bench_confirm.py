"""Poisoned and flaky adapters.

    PYTHONPATH=tests/helpers/runs python tests/benchmarks/causes/bench_confirm.py [DRAWS [FIRST]]

In each draw one case of `ops` spoils its process, which dies 1 to 200 cases later by an abort, a fault or a damaged
heap. Then, a fifth as often, an adapter fails each case with probability 0.3. Prints what was named. Exit code 1 where
the poison is named in less than nine draws of ten, or a flaky failure is called `always`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers" / "runs"))
from poison_adapter import WAYS, flaky, installed, poisoned

from conformance.backend.registry import Spec
from conformance.causes.confirm import DEADLY, Seen, confirm
from conformance.judge.cause import ALWAYS
from conformance.judge.verdict import Result
from conformance.run.runner import Runner
from conformance.suite import ops

LONGEST = 200
"""Cases from the poison to the end, at most."""
EARLY = 90
"""Cases that may run before the poison."""
FLAKY = 12
"""Cases that a flaky adapter runs in a draw."""


def ran(spec: Spec, ids: list[str]) -> list[Result]:
    """Results up to the first that ended the process."""
    runner, results = Runner(), list[Result]()
    try:
        for case_id in ids:
            results += runner.run(spec, [runner.case(case_id)])
            if results[-1].verdict in DEADLY:
                break
    finally:
        runner.close()
    return results


def poison(seed: int) -> tuple[bool, str]:
    """Whether the poison of a draw is named, and a line for a person."""
    rng = random.Random(seed)  # noqa: S311  # no secret
    ids, at, cases = list(ops.ids("smoke")), rng.randrange(EARLY), rng.randint(1, LONGEST)
    first, how = rng.randrange(len(ids) - EARLY - LONGEST), list(WAYS)[seed % len(WAYS)]
    ids = ids[first:]
    results = ran(poisoned(ids[at], cases, how), ids[: at + cases + 1])
    start = time.monotonic()
    (seen,) = confirm(Spec.parse(results[-1].backend), results).values()
    took = time.monotonic() - start
    return seen.after == ids[at], f"{how}, {len(results) - 1 - at} of {cases} cases later, {took:.0f} s: {seen.words}"


def chance(seed: int, folder: Path) -> list[Seen]:
    """How the failures of a flaky adapter came again."""
    rng = random.Random(seed)  # noqa: S311  # no secret
    spec = flaky(0.3, seed, folder / f"{seed}.draws")
    return list(confirm(spec, ran(spec, rng.sample(list(ops.ids("smoke")), FLAKY))).values())


def main() -> int:
    """Draw them."""
    draws, first = (int(a) for a in (*sys.argv[1:3], *("50", "0")[len(sys.argv[1:3]) :]))
    named, found = 0, list[Seen]()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, installed(Path(name), patch):
        for seed in range(first, first + draws):
            right, line = poison(seed)
            named += right
            sys.stdout.write(f"{seed}: {'named' if right else 'MISSED'}: {line}\n")
            sys.stdout.flush()
        for seed in range(first, first + draws // 5):
            found += chance(seed, Path(name))
    wrong = sum(seen.words == ALWAYS for seen in found)
    after = sum(bool(seen.after) for seen in found)
    sys.stdout.write(f"the poison is named in {named} of {draws}\n")
    sys.stdout.write(f"of {len(found)} flaky failures {wrong} are called always, {after} after another case\n")
    return int(wrong > 0 or 10 * named < 9 * draws)


if __name__ == "__main__":
    sys.exit(main())
