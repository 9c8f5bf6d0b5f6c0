"""`conform switch`: a backend with a switch of its environment, held against itself without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path

import click

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.cli import options
from conformance.cli.llama import device
from conformance.cli.options import backend_option, isolation, json_option, smoke_option
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import counted
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.session.environment import header
from conformance.run.session.select import build, case_ids
from conformance.run.switch import NO_REFERENCE, PASSES, Switched, changes_nothing, sides, switched
from conformance.suite.family import Level
from conformance.suite.zoo.model import runnable
from conformance.suite.zoo.play import RUNS, Device, play

FAMILIES = ("gqa", "multi_sequence", "kv_growth")
"""What is run where the user names nothing: attention, of one sequence and several."""
SAYS = "it changes nothing, to the bit, in any of them: nothing shows that the library reads it"


@click.command()
@click.argument("name", metavar="NAME=VALUE")
@backend_option
@options.FAMILY.click()
@options.CASE.click()
@smoke_option
@click.option("--arch", "archs", multiple=True, metavar="GLOB",
              help="Architectures that llama.cpp itself runs both ways on a ggml device, too; repeatable.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="A metadata key of these architectures, such as attention.head_count_kv=2; repeatable.")  # fmt: skip
@json_option
@isolation
def switch(
    name: str,
    backends: Sequence[str],
    families: Sequence[str],
    globs: Sequence[str],
    level: Level,
    archs: Sequence[str],
    settings: Sequence[str],
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Run cases on a backend with the environment variable NAME=VALUE and without it, and hold one against the other.

    By default attention: gqa, multi_sequence, kv_growth. Exit codes: 0 both agree, 1 they do not, or it fails only with
    the switch, 3 nothing could be compared, or the switch changed nothing to the bit: see docs/exit-codes.md.
    """
    if not backends:
        raise UsageError("switch: --backend NAME expected")
    ids = case_ids(families or (() if globs else FAMILIES), globs, level)
    rows: list[tuple[str, Switched]] = []
    for text in backends:
        off, on = sides(Spec.parse(text), name)
        rows += [(text, row) for row in _graphs(off, on, ids, isolation)]
        if archs:
            rows += [(text, row) for row in _architectures(off, on, archs, settings, isolation.time_limit)]
    for backend, row in rows:
        if row.verdict not in PASSES:
            line(f"{row.verdict} {row.case} on {backend} with {name}: {row.detail}", err=True)
    told = []
    for text in backends:
        own = [r for b, r in rows if b == text]
        counts = Counter(r.verdict for r in own)
        same = sum(r.equal for r in own)
        worst = max((r.nmse for r in own if r.verdict == "PASS" and r.nmse is not None), default=None)
        verdicts = ", ".join(f"{n} {v}" for v, n in sorted(counts.items()))
        told.append((text, verdicts, same, "" if worst is None else f"{worst:.2g}"))
    table(told, ("backend", f"with {name}", "equal to the bit", "NMSE of a PASS, at most"), disable_numparse=True)
    idle = [text for text in backends if changes_nothing([r for b, r in rows if b == text])]
    if json_path:
        document: dict[str, JSON] = {"switch": name, "results": [_json(b, r) for b, r in rows]}
        write_json(json_path, {**header("switch"), **document})
    wrong = sum(r.verdict not in PASSES for _, r in rows)
    passed = any(r.verdict == "PASS" for _, r in rows)
    leave(
        Outcome.of(Why.FAILED, [f"{counted(wrong, 'case')} that differ or fail with {name}"] if wrong else [])
        + Outcome.of(Why.UNPROVEN, [f"{text}: {name}: {SAYS}" for text in idle])
        + Outcome.of(Why.UNPROVEN, [] if passed else [f"no case could be compared with and without {name}"])
    )


def _graphs(off: Spec, on: Spec, ids: Sequence[str], isolation: Isolation) -> list[Switched]:
    """Every case, graph by graph."""
    with (
        closing(open_backend(off, isolation)) as without,
        closing(open_backend(on, isolation)) as with_,
        Progress().of(since(f"{on.name}: {len(ids)} cases")),
    ):
        return [switched(without, with_, build(i)) for i in ids]


def _architectures(
    off: Spec, on: Spec, globs: Sequence[str], settings: Sequence[str], time_limit: float
) -> list[Switched]:
    """llama.cpp itself runs architectures both ways, each against its own CPU: where only one passes, they differ."""
    archs = [a for a in runnable() if any(fnmatchcase(a, g) for g in globs)]
    if not archs:
        raise UsageError(f"switch: no architecture fits {', '.join(globs)}; conform capture --list shows them")
    devices: list[Device] = [device(off), device(on)]
    keys = "+".join(text.replace("=", ":", 1) for text in settings)
    found = []
    for arch in archs:
        case_id = f"zoo/{arch}-real=1{',set=' if keys else ''}{keys}@1"
        played = play(case_id, devices, RUNS, time_limit)
        for run in RUNS:
            before, after = (played[d.name, run] for d in devices)
            case = f"{case_id}, {run}"
            if before.verdict != "PASS":
                found.append(Switched(case, NO_REFERENCE, f"{before.verdict} {before.detail}"))
                continue
            same = len(before.results) == len(after.results) and all(
                a.tobytes() == b.tobytes() for a, b in zip(before.results, after.results, strict=True)
            )
            found.append(Switched(case, after.verdict, after.detail, after.nmse, same))
    return found


def _json(backend: str, row: Switched) -> dict[str, JSON]:
    nmse = row.nmse if row.nmse is not None and isfinite(row.nmse) else None
    return {
        "backend": backend, "case": row.case, "verdict": row.verdict, "detail": row.detail, "nmse": nmse,
        "equal": row.equal,
    }  # fmt: skip
