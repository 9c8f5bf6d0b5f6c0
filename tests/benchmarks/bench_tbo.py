"""The same cases through test-backend-ops and through the suite: `python tests/benchmarks/bench_tbo.py PROGRAM`.

PROGRAM is llama.cpp's test-backend-ops. A seed draws lines of each op from the family `tbo`; the program runs them on
its `--device`, the suite on its `--backend`, both on one core, in turns, each round in the other order. A case that
ends the program is left out. Printed: cases per second of
processor time with the start-up taken off (a run of no case there, of one tiny case here, imports apart), medians of
the rounds, and ours over theirs: first with nothing kept from one run to the next, then, as `kept`, with the expected
values on disk that a run before left there.

SOFT_MAX and FLASH_ATTN_EXT spend their time in `np.exp` of float64, which NumPy vectorises with AVX-512 only: 0.8 ns a
value there, 4.1 ns with AVX2 (one EPYC, `NPY_DISABLE_CPU_FEATURES`). Of what was tried nothing is faster: numexpr,
whose wheel lacks MKL's functions, takes 4.3 ns, and exp made of NumPy's own operations in blocks (a table of 64 powers,
a polynomial; 1.3 ulp, against 0.5) 8.7 ns. MKL, numba and torch are too large to be a dependency.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from tabulate import tabulate

from conformance.cli import main as main_of_conform
from conformance.suite.tbo import Row, rows

OPS = ("MUL_MAT", "SOFT_MAX", "ROPE", "FLASH_ATTN_EXT", "GET_ROWS")
LARGEST = 64 << 20
"""Bytes of a case."""
TINY = "tbo/CONT(type=f16,ne=[2,1,1,1],use_view_slice=0,permute=[0,0,0,0])@0"


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


@dataclass(frozen=True)
class Program:
    """test-backend-ops and the device that it tests."""

    path: Path
    device: str

    def known(self, op: str, chosen: Sequence[Row]) -> list[Row]:
        """Those of `chosen` that this version has, that its device takes, and that do not end it."""
        own = list(chosen)
        while own:
            _, said = cpu(self._asked(op, own, ""))
            lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in said.splitlines()]
            if any("backends passed" in line for line in lines):
                ran = {line.partition("): ")[0] + ")" for line in lines if line.endswith(("OK", "FAIL"))}
                return [r for r in own if r.name in ran]
            dead = next((r for line in reversed(lines) for r in own if line.startswith(f"{r.name}:")), None)
            if dead is None:
                raise click.ClickException(f"{self.path} tells no case before it ends:\n{said[-400:]}")
            click.echo(f"{dead.name} ends the program", err=True)
            own.remove(dead)
        return []

    def speed(self, op: str, chosen: Sequence[Row]) -> float:
        """Cases per second of processor time; its start-up, taken off, makes all cases and matches their names."""
        start, _ = cpu(self._asked(op, chosen, "nothing"))
        whole, _ = cpu(self._asked(op, chosen, ""))
        return len(chosen) / max(1e-9, whole - start)

    def _asked(self, op: str, chosen: Sequence[Row], after: str) -> list[str]:
        names = "|".join(re.sub(r"([][(){}.*+?^$|])", r"\\\1", r.name[len(op) + 1 : -1]) for r in chosen)
        return [self.path.as_posix(), "test", "-b", self.device, "-o", op, "-p", f"^({names}){after}$"]


def ours(backend: str, chosen: Sequence[Row], kept: str = "") -> float:
    """Cases per second of processor time of `conform run`, with expected values kept in a folder, if one is named."""
    ids = json.dumps([f"tbo/{r.name}@0" for r in chosen])
    environment = {**os.environ, "CONFORMANCE_EXPECTED": kept}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "ours", backend, f"{folder}/run.json"]
        done = subprocess.run(words, input=ids, env=environment, capture_output=True, text=True, check=True)
        ran = sum(
            r["verdict"] in ("PASS", "FAIL") for r in json.loads(Path(f"{folder}/run.json").read_text())["results"]
        )
    if ran < len(chosen):
        click.echo(f"{ran} of {len(chosen)} cases ran here", err=True)
    return ran / max(1e-9, float(done.stdout.split()[-1]))


def own(backend: str, path: str, ids: Sequence[str]) -> float:
    """Processor seconds of `conform run` over cases, without those of a run of a tiny one.

    Workers count, imports do not.
    """
    asked = ["run", "--level", "full", "--backend", backend, "--json", path]
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
@click.option("--device", default="CPU", show_default=True, help="What the program tests.")
@click.option("--backend", default="ggml?threads=1", show_default=True, help="What the suite tests.")
@click.option("--count", default=60, show_default=True, help="Cases of each op.")
@click.option("--seed", default=1, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(program: Path, ops: Sequence[str], device: str, backend: str, count: int, seed: int, rounds: int) -> None:
    """Print the table."""
    other = Program(program, device)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table = []
    for op in ops:
        chosen = other.known(op, drawn(op, count, seed))
        if not chosen:
            click.echo(f"{device} takes none of these cases of {op}", err=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            ours(backend, chosen, folder)
            sides = (
                lambda: other.speed(op, chosen),  # noqa: B023
                lambda: ours(backend, chosen),  # noqa: B023
                lambda: ours(backend, chosen, folder),  # noqa: B023
            )
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
        click.echo(own(sys.argv[2], sys.argv[3], json.load(sys.stdin)))
    else:
        main()
