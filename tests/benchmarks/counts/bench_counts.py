"""Draws slowdowns of ggml and asks whether counts see them.

    python tests/benchmarks/counts/bench_counts.py LIBRARY DRAWS SEED [GLOB …]

LIBRARY is a build of ggml for one processor without AVX-512, to which `slower.patch` was applied. A draw adds a share
of a unit's instructions, or loads that miss the caches and cost as many estimated cycles, to the op of the unit, or of
a decoder one of its ops. Each unit is also counted in a second process without a change, whose environment and folder
differ. Printed: how many draws of each kind fail, and how many of the unchanged.
"""

from __future__ import annotations

import math
import os
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import VIEW_OPS
from conformance.judge.verdict import Result, Verdict
from conformance.perf.count import SLOWDOWN, Counts, callgrind
from conformance.perf.gates import COUNT_LIMIT, Gate, judge_counts
from conformance.perf.measure import play, restore
from conformance.perf.units import Unit, units
from conformance.run.isolation.isolate import Isolation, Workers, open_backend, process_of
from conformance.run.session.select import build, parse_specs

SHARE = 0.01
"""Instructions, or cycles, that a draw adds."""
PROBE = 1_000
"""Repetitions that measure what one costs."""
KINDS = ("unchanged", "nops", "loads")
Sums = Counter[tuple[str, bool]]
"""Kind of draw and whether it fails -> how many."""
LARGEST = 400_000_000
"""Instructions of a unit that is drawn: valgrind takes a second for 50 million."""


@dataclass
class Slower:
    """The file that the patched build reads at each op: an op, repetitions of nops, and loads."""

    path: Path

    def ask(self, op: int = -1, nops: int = 0, loads: int = 0) -> None:
        """Write the three numbers in place: the build has mapped the file."""
        with self.path.open("r+b" if self.path.exists() else "wb") as f:
            f.write(struct.pack("3i", op, nops, loads))


@contextmanager
def counting(unit: Unit, case: Case, spec: Spec) -> Iterator[Callable[[], Counts]]:
    """A process that ran the unit once, as a function that counts its timed steps again."""
    with callgrind() as tool:
        isolation = Isolation(time_limit=SLOWDOWN * 120, under=tool.under)
        backend = open_backend(spec, Workers(isolation), own=True)
        own = process_of(backend)
        assert own is not None

        def count() -> Counts:
            restore(session, case)
            play(session, case.steps[: unit.first])
            tool.take()
            play(session, case.steps[unit.first :])
            counts = tool.take()
            assert counts is not None
            return counts

        with closing(backend), backend.open(case) as session:
            tool.begin(own.pid)
            play(session, case.steps)
            yield count


def fails(unit: Unit, now: Counts, then: Counts) -> bool:
    """Return True if `conform perf run --count --against` fails for the difference."""
    (spec,) = parse_specs(["ggml"])
    a, b = (Result(unit.id, "ggml", Verdict.PASS, metrics=c.metrics()) for c in (now, then))
    return judge_counts(Gate("g", "ratio", unit, spec, COUNT_LIMIT), a, b).verdict is Verdict.FAIL


def measure(unit: Unit, spec: Spec, ops: Mapping[str, int], slower: Slower, rng: random.Random, draws: int) -> Sums:
    """Kind of draw -> how many fail, of how many; nothing of a unit that is too large."""
    case, said = build(unit.case_id), Counter[tuple[str, bool]]()
    slower.ask()
    os.environ["UNUSED"] = "x" * rng.randint(0, 4000)
    with counting(unit, case, spec) as count:
        other = count()
    os.environ["UNUSED"] = ""
    if other.instructions > LARGEST:
        return said
    with counting(unit, case, spec) as count:
        then = count()
        base = then.metrics()
        apart = {m: int(abs(other.metrics()[m] - base[m]) / base["graphs"]) for m in ("instructions", "cycles")}
        sys.stdout.write(f"  {unit.name}: unchanged, apart by {apart} of {base['cycles']:.0f} cycles\n")
        said["unchanged", fails(unit, other, then) or fails(unit, then, other)] += 1
        computed = sorted({n.op for s in case.steps[unit.first :] for n in s.graph.nodes} - VIEW_OPS)
        for metric, key in (("instructions", "nops"), ("cycles", "loads")):
            for _ in range(draws):
                op = rng.choice(computed)
                slower.ask(ops[op], **{key: PROBE})
                each = (count().metrics()[metric] - base[metric]) / PROBE
                slower.ask(ops[op], **{key: math.ceil(SHARE * base[metric] / each)})
                now = count()
                said[key, fails(unit, now, then)] += 1
                told = " ".join(f"{m} {now.metrics()[m] / base[m]:.4f}" for m in ("instructions", "cycles"))
                sys.stdout.write(f"  {unit.name}: {key} in {op}: {told}\n")
                slower.ask()
    return said


def main(library: str, draws: int, seed: int, *globs: str) -> None:
    """Print each draw, and the totals of each kind."""
    rng = random.Random(seed)  # noqa: S311  # no secret
    (spec,) = parse_specs([f"ggml?lib={library}"])
    ops, total = Library(library).ops, Counter[tuple[str, bool]]()
    with tempfile.TemporaryDirectory() as folder:
        slower = Slower(Path(folder) / "slower")
        os.environ["SLOWER"] = str(slower.path)
        for unit in [u for u in units("full", globs) if u.steps and u.timed and not u.fresh]:
            total += measure(unit, spec, ops, slower, rng, draws)
            told = (f"{k} {total[k, True]} of {total[k, True] + total[k, False]}" for k in KINDS)
            sys.stdout.write(f"{unit.name}: {', '.join(told)} fail\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
