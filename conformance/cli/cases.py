"""`conform backends`, `cases`, `show`, `splits` and `shrink`: what there is, and single cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import click

from conformance.backend import registry
from conformance.backend.interface import describe
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import JSON, Case
from conformance.case.casefile import ARCHITECTURE
from conformance.ggml.errors import CaseFileError, UnavailableError, UsageError
from conformance.report import graphview
from conformance.report.runfile import write_json, write_text
from conformance.report.snippet import cpp, python
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.runner import Runner
from conformance.run.scheduler.backend import SchedBackend
from conformance.run.scheduler.plan import HEADER
from conformance.run.scheduler.plan import rows as split_rows
from conformance.run.session import failures, settings
from conformance.run.session.select import build, parse_specs, probe
from conformance.run.session.untrusted import backends_of
from conformance.run.shrink import shrink as smallest
from conformance.run.shrink import size
from conformance.suite.family import LEVELS
from conformance.testrun import Chosen

from . import options
from .options import File, backend_option, chosen, isolation, json_option, say_seed, settings_here
from .output import line, table

HEAD = 1 << 16
"""Bytes of a file that are read to say what it is."""
_ARCHITECTURE = re.compile(rb"\x14\0{7}general\.architecture\x08\0{3}(.)\0{7}", re.DOTALL)
"""The GGUF key, each text behind its length in 8 bytes; 8 is the type of a text."""
T = TypeVar("T")

CasePath = click.Path(path_type=Path, exists=True)
"""A case file: a folder is taken too, since `read_cases` can say more of it than a usage text."""


@click.command()
@backend_option
@json_option
def backends(backends: Sequence[str], json_path: Path | None) -> None:
    """List the backends: what executes, its versions and buffer types, or why it is not available."""
    rows: list[Sequence[str]] = []
    document: dict[str, JSON] = {}
    for spec in parse_specs(backends):
        try:
            about = probe(spec)
        except UnavailableError as e:
            rows.append((str(spec), "not available", str(e), ""))
            document[str(spec)] = {"available": False, "reason": str(e)}
            continue
        info, buffers = about.info, about.buffer_types
        versions = ", ".join(f"{k} {v}" for k, v in info.versions.items())
        kinds = ", ".join(b.name for b in buffers)
        rows.append((str(spec), info.device, f"{info.description} ({versions})", kinds))
        document[str(spec)] = {"available": True, **describe(info), "buffer_types": [describe(b) for b in buffers]}
    for name, named in ({} if backends else registry.defined()).items():
        by = f"{named.adapter}, by {settings_here().path}; opened where it is named with --backend"
        rows.append((name, "not opened", by, ""))
        document[name] = {"opened": False, "adapter": named.adapter}
    table(rows, ["backend", "device", "what executes", "buffer types"], maxcolwidths=[None, 24, 60, 40])
    if json_path:
        write_json(json_path, {"schema": 1, "backends": document})


@click.command()
@chosen(*options.SELECTION)
def cases(chosen: Chosen) -> None:
    """List case ids, smallest first within a family."""
    ids = chosen.at(chosen.level or LEVELS[0])
    say_seed(chosen)
    for i in [*ids, *chosen.fresh_cases]:
        line(i)


@click.command()
@click.argument("what", metavar="CASE|FILE", shell_complete=options.complete_case)
@click.option("--step", type=int, default=None, help="Only this step.")
@click.option("--svg", "svg_path", type=File, metavar="FILE", help="Draw the graph (of --step, default the first).")
def show(what: str, step: int | None, svg_path: Path | None) -> None:
    """Print the graphs of a case, by id or from a file, as a table like ggml's own dump."""
    if svg_path and svg_path.exists() and Path(what).exists() and svg_path.samefile(what):
        raise UsageError(f"--svg {svg_path}: a file to draw into expected, this is the case itself")
    for case in _cases_of(what):
        if not case.steps:
            raise UsageError(f"{case.id}: a live case has no graphs (docs/live.md)")
        if step is not None:
            _check_step(case, step)
        chosen = range(len(case.steps)) if step is None else [step]
        line(f"{case.id}: {len(case.steps)} step(s), {len(case.persistent)} persistent tensor(s)")
        for k in chosen:
            click.echo(f"\nstep {k}")
            click.echo(graphview.table(case.steps[k].graph))
        if svg_path:
            write_text(svg_path, graphview.svg(case.steps[chosen[0]].graph), "--svg")
            click.echo("")
            line(f"drawn: {svg_path}")
            break


def _cases_of(what: str) -> list[Case]:
    path = Path(what)
    if path.exists():
        return read_cases(path)
    if path.suffix == ".gguf":
        raise UsageError(f"{what}: no such file")
    return [build(what)]


def _check_step(case: Case, step: int) -> None:
    if not 0 <= step < len(case.steps):
        raise UsageError(f"--step {step}: {case.id} has steps 0 to {len(case.steps) - 1}")


@click.command()
@click.argument("case_id", metavar="CASE")
@backend_option
@click.option("--step", type=int, default=0, show_default=True, help="Which graph of the case.")
def splits(case_id: str, backends: Sequence[str], step: int) -> None:
    """Show how a scheduler (--backend 'sched?devices=xdna2,cpu') divides a graph: splits, nodes, copies."""
    case = build(case_id)
    _check_step(case, step)
    for spec in parse_specs(backends or ["sched"]):
        with closing(open_backend(spec)) as backend:
            if not isinstance(backend, SchedBackend):
                raise UsageError(f"splits: a scheduler such as 'sched?devices=xdna2,cpu' expected, {spec} found")
            plan = backend.plan(case).graphs[case.steps[step].graph]
            nodes = split_rows(case.steps[step].graph, plan, backend.labels)
        line(f"{case.id} step {step} on {spec}: {len(plan.assignment.splits)} splits")
        table(nodes, HEADER)


@click.command()
@click.argument("file", type=CasePath)
@click.option("--backend", metavar="NAME[?KEY=VALUE]", help="Default: the one that the case was saved for.")
@options.config_option
@click.option("--case", "case_id", metavar="ID", help="Which case of a bundle.")
@click.option("-o", "--output", type=File, metavar="OUT.gguf", help="Default: FILE with -small before its suffix.")
@click.option("--time-budget", type=float, default=120.0, show_default=True, metavar="SECONDS")
@isolation
def shrink(
    file: Path, backend: str | None, case_id: str | None, output: Path | None, time_budget: float, isolation: Isolation
) -> None:
    """Cut the case of FILE down to what still fails in the same way on a backend.

    Writes a case file, and beside it a Python program that builds the case (.py) and a test_case for ggml's own
    tests/test-backend-ops.cpp (.cpp).
    """
    case = _read(file, lambda: casefile.read_one(file, case_id))
    was = failures.record_of(case)
    if backend is None and was is None:
        raise UsageError(f"{file}: was saved for no backend; name one with --backend")
    if backend is None and was:
        (spec,) = backends_of(file, [was["backend"]], ["conform", "shrink", str(file)]).values()
    else:
        spec = Spec.parse(str(backend))
    for text in settings.lines_of(settings.in_force(settings_here())):
        line(text)
    output = output or file.with_name(f"{file.stem}-small.gguf")
    with closing(Runner(isolation=isolation)) as runner:
        small = smallest(runner, spec, case, time_budget=time_budget, progress=lambda text: line(text, err=True))
    casefile.write(output, [failures.with_result(small.case, small.result)])
    write_text(output.with_suffix(".py"), python(small.case), "-o")
    write_text(output.with_suffix(".cpp"), cpp(small.case), "-o")
    if not small.finished:
        line(f"stopped after {time_budget:g} s; shrink {output} again to go on", err=True)
    line(small.result.sentence())
    line(f"{size(small.case)}, after {small.tried} runs in {small.seconds:.1f} s")
    line(f"written: {output}, {output.with_suffix('.py').name}, {output.with_suffix('.cpp').name}")


def read_cases(path: Path) -> list[Case]:
    """Every case of a file; CaseFileError if it is broken, UsageError if it is something else: the message says what,
    and what to do with that.
    """
    return _read(path, lambda: casefile.read(path))


def _read(path: Path, read: Callable[[], T]) -> T:
    if path.is_dir():
        n = sum(1 for _ in path.glob("*.gguf"))
        raise UsageError(f"{path}: a case file expected, this is a folder; it has {n} .gguf files: {path}/*.gguf")
    try:
        return read()
    except CaseFileError:
        if other := _other(path):
            raise UsageError(f"{path}: {other}") from None
        raise


def _other(path: Path) -> str:
    """What a file is that is no case; empty where it may be a broken one."""
    try:
        with path.open("rb") as f:
            head = f.read(HEAD)
    except OSError:
        return ""
    if head[:4] != b"GGUF":
        return f"this is {_kind(head)}, not a case: a .gguf that --save-failures or `conform capture` wrote is expected"
    name = _architecture(head) or ARCHITECTURE
    if name == ARCHITECTURE:
        return ""
    keys = int.from_bytes(head[16:24], "little")
    return (
        f"this is a model ({name}, {keys} keys), not a case: `conform check-model {path} --backend NAME` judges a "
        f"backend on it, `conform capture {path} -o case.gguf` makes a case of it"
    )


def architecture_of(model: Path) -> str:
    """The architecture of a model file, "" where it stands nowhere near the file's begin.

    UsageError for what is no model: it says what it is, and what to type instead.
    """
    if model.is_dir():
        n = sum(1 for _ in model.glob("*.gguf"))
        raise UsageError(f"{model}: a model file expected, this is a folder; it has {n} .gguf files: {model}/*.gguf")
    if not model.exists():
        raise UsageError(f"{model}: there is no such file; a model in GGUF expected")
    with model.open("rb") as f:
        head = f.read(HEAD)
    if head[:4] != b"GGUF":
        raise UsageError(
            f"{model}: this is {_kind(head)}, not a model in GGUF: llama.cpp's convert_hf_to_gguf.py makes one, and "
            "`conform make-model --arch llama -o tiny.gguf` a tiny one"
        )
    name = _architecture(head)
    if name == ARCHITECTURE:
        raise UsageError(f"{model}: this is a case, not a model: conform run {model} --backend NAME")
    return name


def _architecture(head: bytes) -> str:
    """`general.architecture` in the first bytes of a GGUF file; "" where it is not there."""
    key = _ARCHITECTURE.search(head)
    return head[key.end() : key.end() + key[1][0]].decode("ascii", "replace") if key else ""


def _kind(head: bytes) -> str:
    return "a text file" if head and _is_text(head) else "empty" if not head else "another kind of file"


def _is_text(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as e:
        return e.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head
