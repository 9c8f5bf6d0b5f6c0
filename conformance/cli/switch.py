"""`conform switch`: a backend with an environment variable and without it, both judged and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
from conformance.judge.verdict import Verdict, counted
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.oracle import Oracle
from conformance.run.session.environment import header
from conformance.run.session.select import build, case_ids
from conformance.run.switch import PASSES, Switched, changes_nothing, coverage, sides, switched
from conformance.suite.family import Level
from conformance.suite.zoo.model import runnable
from conformance.suite.zoo.play import RUNS, Device, Played, play

FAMILIES = ("gqa", "multi_sequence", "kv_growth")
"""What is run where the user names nothing: attention, of one sequence and several."""
SAYS = "it changes nothing, to the bit, in any of them: nothing shows that the library reads it"
OFF = frozenset({"", "0", "off", "false", "no"})
"""Values by which a library is commonly told to leave a switch off."""


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
    """Run cases on a backend with the environment variable NAME=VALUE and without it; judge both, and compare them.

    By default attention: gqa, multi_sequence, kv_growth. The float64 reference judges the run with the switch as any
    other. Exit codes: 0 it is right, 1 a case fails with the switch, 3 nothing could be compared, or the switch changed
    nothing to the bit: see docs/exit-codes.md.
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
        worst = max((r.nmse for r in own if r.verdict == Verdict.PASS and r.nmse is not None), default=None)
        sums = (_sums(r.verdict for r in own), _sums(r.without for r in own), sum(r.equal for r in own))
        told.append((text, *sums, "" if worst is None else f"{worst:.2g}"))
    heads = ("backend", f"with {name}", "without it", "equal to the bit", "NMSE of a PASS, at most")
    table(told, heads, disable_numparse=True)
    for text in backends:
        line(f"{text}: {coverage([r for b, r in rows if b == text])}")
    idle = [text for text in backends if changes_nothing([r for b, r in rows if b == text])]
    variable, _, value = name.partition("=")
    advice = f"; {value or 'an empty value'} commonly leaves a switch off: try {variable}=1"
    hint = advice if value.lower() in OFF else ""
    if json_path:
        document: dict[str, JSON] = {"switch": name, "results": [_json(b, r) for b, r in rows]}
        write_json(json_path, {**header("switch"), **document})
    wrong = sum(r.verdict not in PASSES for _, r in rows)
    passed = any(r.compared and r.verdict is Verdict.PASS for _, r in rows)
    leave(
        Outcome.of(Why.FAILED, [f"{counted(wrong, 'case')} failed with {name}"] if wrong else [])
        + Outcome.of(Why.UNPROVEN, [f"{text}: {name}: {SAYS}{hint}" for text in idle])
        + Outcome.of(Why.UNPROVEN, [] if passed else [f"no case could be compared with and without {name}"])
    )


def _sums(verdicts: Iterable[Verdict]) -> str:
    return ", ".join(f"{n} {v}" for v, n in sorted(Counter(verdicts).items()))


def _graphs(off: Spec, on: Spec, ids: Sequence[str], isolation: Isolation) -> list[Switched]:
    """Every case, graph by graph."""
    with (
        closing(open_backend(off, isolation)) as without,
        closing(open_backend(on, isolation)) as with_,
        closing(Oracle()) as oracle,
        Progress().of(since(f"{on.name}: {len(ids)} cases")),
    ):
        return [switched(without, with_, oracle, build(i)) for i in ids]


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
            same = len(before.results) == len(after.results) and all(
                a.tobytes() == b.tobytes() for a, b in zip(before.results, after.results, strict=True)
            )
            nmse = after.nmse if before.results and after.results else None
            verdict, without = _verdict(after), _verdict(before)
            detail = (
                after.detail if without in PASSES else f"{after.detail}; without it {before.verdict} {before.detail}"
            )
            found.append(Switched(f"{case_id}, {run}", verdict, without, detail, nmse, same))
    return found


def _verdict(played: Played) -> Verdict:
    """As the verdict of a case."""
    own = {"ERROR": Verdict.FAIL, "NO REFERENCE": Verdict.VACUOUS}
    return own[played.verdict] if played.verdict in own else Verdict(played.verdict)


def _json(backend: str, row: Switched) -> dict[str, JSON]:
    nmse = row.nmse if row.nmse is not None and isfinite(row.nmse) else None
    return {
        "backend": backend, "case": row.case, "verdict": row.verdict, "without": row.without, "detail": row.detail,
        "nmse": nmse, "compared": row.compared, "equal": row.equal, "batch": row.batch,
    }  # fmt: skip
