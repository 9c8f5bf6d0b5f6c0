"""The same cases through test-backend-ops and through `ggml`: `python tests/benchmarks/bench_tbo.py PROGRAM`.

PROGRAM is llama.cpp's test-backend-ops, built with the CPU backend. A seed draws lines of each op from the family
`tbo`; both run them on one core with one thread, in turns, each round in the other order. Printed: cases per second of
processor time with the start-up taken off (a run of no case there, of one tiny case here, imports apart), medians of
the rounds, and ours over theirs: first with nothing kept from one run to the next, then, as `kept`, with the expected
values on disk that a run before left there.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import click
from tabulate import tabulate

from conformance.cli import main as main_of_conform
from conformance.suite.tbo import Row, rows

OPS = ("MUL_MAT", "SOFT_MAX", "ROPE", "FLASH_ATTN_EXT", "GET_ROWS")
LARGEST = 64 << 20
"""Bytes of a case."""
TINY = "ops/ADD-f32+f32-a=7x5@1"


def drawn(op: str, count: int, seed: int) -> list[Row]:
    """Lines of an op, by a seed; none that a level leaves out or that the program runs twice."""
    rng = random.Random(f"{seed} {op}")  # noqa: S311  # the same lines for the same seed
    own = [r for r in rows().values() if r.name.startswith(f"{op}(") and not r.why and r.size <= LARGEST]
    names = {r.name for r in rows().values()}
    own = [r for r in own if "~" not in r.name and f"{r.name}~2" not in names]
    return rng.sample(own, min(count, len(own)))


def cpu(command: Sequence[str]) -> tuple[float, str]:
    """Seconds of processor time of a command and its children, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def known(program: Path, op: str, chosen: Sequence[Row]) -> list[Row]:
    """Those of `chosen` that this version of test-backend-ops has, and runs."""
    _, said = cpu(_asked(program, op, chosen, ""))
    ran = {line.partition(": ")[0].strip() for line in said.splitlines() if "OK" in line or "FAIL" in line}
    return [r for r in chosen if r.name in ran]


def theirs(program: Path, op: str, chosen: Sequence[Row]) -> float:
    """Cases per second of processor time of test-backend-ops; its start-up makes all cases and matches their names."""
    start, _ = cpu(_asked(program, op, chosen, "nothing"))
    whole, _ = cpu(_asked(program, op, chosen, ""))
    return len(chosen) / max(1e-9, whole - start)


def _asked(program: Path, op: str, chosen: Sequence[Row], after: str) -> list[str]:
    names = "|".join(re.sub(r"([][(){}.*+?^$|])", r"\\\1", r.name[len(op) + 1 : -1]) for r in chosen)
    return [program.as_posix(), "test", "-b", "CPU", "-o", op, "-p", f"^({names}){after}$"]


def ours(chosen: Sequence[Row], kept: str = "") -> float:
    """Cases per second of processor time of `conform run`, with expected values kept in a folder, if one is named."""
    ids = json.dumps([f"tbo/{r.name}@0" for r in chosen])
    environment = {**os.environ, "CONFORMANCE_EXPECTED": kept}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "ours", f"{folder}/run.json"]
        done = subprocess.run(words, input=ids, env=environment, capture_output=True, text=True, check=True)
        ran = sum(
            r["verdict"] in ("PASS", "FAIL") for r in json.loads(Path(f"{folder}/run.json").read_text())["results"]
        )
    if ran < len(chosen):
        click.echo(f"{ran} of {len(chosen)} cases ran here", err=True)
    return ran / max(1e-9, float(done.stdout.split()[-1]))


def own(path: str, ids: Sequence[str]) -> float:
    """Seconds of processor time of `conform run` over cases, above those of a run of a tiny one, in this process and
    its workers; what is imported by then counts for neither.
    """
    asked = ["run", "--level", "full", "--backend", "ggml?threads=1", "--json", path]
    seconds = []
    for chosen in ([TINY], [TINY], ids):
        before = used()
        with suppress(SystemExit):
            main_of_conform([*asked, *(word for i in chosen for word in ("--case", i))], standalone_mode=False)
        seconds.append(used() - before)
    return seconds[2] - seconds[1]


def used() -> float:
    """Seconds of processor time of this process and of those that it waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in both)


@click.command()
@click.argument("program", type=click.Path(path_type=Path, exists=True))
@click.option("--op", "ops", multiple=True, default=OPS, show_default=True)
@click.option("--count", default=60, show_default=True, help="Cases of each op.")
@click.option("--seed", default=1, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(program: Path, ops: Sequence[str], count: int, seed: int, rounds: int) -> None:
    """Print the table."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table = []
    for op in ops:
        chosen = known(program, op, drawn(op, count, seed))
        with tempfile.TemporaryDirectory() as folder:
            ours(chosen, folder)
            sides = (lambda: theirs(program, op, chosen)), (lambda: ours(chosen)), (lambda: ours(chosen, folder))  # noqa: B023
            found: list[list[float]] = [[], [], []]
            for k in range(rounds):
                for side in range(3) if k % 2 else reversed(range(3)):
                    found[side].append(sides[side]())
        a, b, c = map(median, found)
        size = sum(r.size for r in chosen) >> 20
        table.append((op, len(chosen), size, *(f"{x:.1f}" for x in (a, b, c)), f"{b / a:.2f}", f"{c / a:.2f}"))
    heads = ("op", "cases", "MiB", "test-backend-ops, cases/s", "ours", "kept", "ours / theirs", "kept / theirs")
    click.echo(tabulate(table, heads, "github"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        click.echo(own(sys.argv[2], json.load(sys.stdin)))
    else:
        main()
