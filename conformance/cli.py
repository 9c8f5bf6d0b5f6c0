"""`conform`: the command line.

Exit codes: 0 fine, 1 conformance failures, 2 bad input or usage, 3 nothing executed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click
from tabulate import tabulate

from conformance import __version__
from conformance.backend.interface import describe
from conformance.backend.registry import Spec
from conformance.cases import captured
from conformance.cases.family import LEVELS, Level
from conformance.cgraph import casefile
from conformance.cgraph.case import Case
from conformance.cgraph.errors import ConformanceError, UnavailableError, UsageError
from conformance.check.verdict import FAILURES, Result, Totals
from conformance.report import graphview
from conformance.report.record import check_writable, record, write_json
from conformance.run import golden
from conformance.run.isolate import open_backend
from conformance.run.runner import Runner
from conformance.run.select import build, case_ids, parse_specs
from conformance.run.stages import choose


class _Group(click.Group):
    """Turns every error of ours into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  # click's own signature
        try:
            return super().invoke(ctx)
        except ConformanceError as e:
            _fail(str(e))
        except BrokenPipeError:
            sys.exit(141)


def _fail(message: str) -> NoReturn:
    click.echo(f"conform: {' '.join(message.split())}", err=True)
    sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="conform")
def main() -> None:
    """Conformance tests for LLM inference backends that execute ggml compute graphs."""


_File = click.Path(path_type=Path, dir_okay=False)
_ExistingFile = click.Path(path_type=Path, exists=True, dir_okay=False)


def _writable(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        check_writable(path)
    return path


_json = click.option(
    "--json", "json_path", type=_File, callback=_writable, help="Write every result to FILE.", metavar="FILE"
)
_backend = click.option(
    "--backend", "backends", multiple=True, metavar="NAME[?KEY=VALUE]", help="Repeatable; default: every available one."
)
_family = click.option("--family", "families", multiple=True, metavar="NAME", help="Repeatable; default: all.")
_case = click.option("--case", "globs", multiple=True, metavar="GLOB", help="Case ids, repeatable.")
_level = click.option("--level", type=click.Choice(LEVELS), default="smoke", show_default=True)
_stage = click.option(
    "--stage",
    metavar="STAGE",
    help="Check the values of this stage of each backend: translate (before anything is compiled) or run.",
)
_save = click.option(
    "--save-failures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep failing cases in DIR.",
)


def _selection(f: Callable[..., None]) -> Callable[..., None]:
    @_family
    @_case
    @_level
    @wraps(f)
    def g(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # passes options through
        f(*args, **kwargs)

    return g


@main.command()
@_backend
@_json
def backends(backends: Sequence[str], json_path: Path | None) -> None:
    """List the backends: what executes, its versions and buffer types, or why it is not available."""
    rows, document = [], {}
    for spec in parse_specs(backends):
        try:
            backend = open_backend(spec)
        except UnavailableError as e:
            rows.append((str(spec), "not available", str(e), ""))
            document[str(spec)] = {"available": False, "reason": str(e)}
            continue
        try:
            info, buffers = backend.info(), backend.buffer_types()
        finally:
            backend.close()
        versions = ", ".join(f"{k} {v}" for k, v in info.versions.items())
        rows.append((str(spec), info.device, f"{info.description} ({versions})", ", ".join(b.name for b in buffers)))
        document[str(spec)] = {
            "available": True,
            **describe(info),
            "buffer_types": [describe(b) for b in buffers],
        }
    click.echo(tabulate(rows, ["backend", "device", "what executes", "buffer types"], maxcolwidths=[None, 24, 60, 40]))
    if json_path:
        write_json(json_path, {"schema": 1, "backends": document})


@main.command()
@_selection
def cases(families: Sequence[str], globs: Sequence[str], level: Level) -> None:
    """List case ids, smallest first within a family."""
    for i in case_ids(families, globs, level):
        click.echo(i)


@main.command()
@click.argument("what", metavar="CASE|FILE")
@click.option("--step", type=int, default=None, help="Only this step.")
@click.option("--svg", "svg_path", type=_File, metavar="FILE", help="Draw the graph (of --step, default the first).")
def show(what: str, step: int | None, svg_path: Path | None) -> None:
    """Print the graphs of a case, by id or from a file, as a table like ggml's own dump."""
    for case in _cases_of(what):
        if step is not None and not 0 <= step < len(case.steps):
            raise UsageError(f"--step {step}: {case.id} has steps 0 to {len(case.steps) - 1}")
        chosen = range(len(case.steps)) if step is None else [step]
        click.echo(f"{case.id}: {len(case.steps)} step(s), {len(case.persistent)} persistent tensor(s)")
        for k in chosen:
            click.echo(f"\nstep {k}")
            click.echo(graphview.table(case.steps[k].graph))
        if svg_path:
            svg_path.write_text(graphview.svg(case.steps[chosen[0]].graph), encoding="utf-8")
            click.echo(f"\ndrawn: {svg_path}")
            break


def _cases_of(what: str) -> list[Case]:
    path = Path(what)
    if path.is_file():
        return casefile.read(path)
    if path.suffix == ".gguf":
        raise UsageError(f"{what}: no such file")
    return [build(what)]


@main.command()
@_backend
@_stage
@_selection
@_json
@_save
@click.argument("files", nargs=-1, type=_ExistingFile)
def run(  # click shows the options' help
    backends: Sequence[str],
    stage: str | None,
    families: Sequence[str],
    globs: Sequence[str],
    level: Level,
    json_path: Path | None,
    save_failures: Path | None,
    files: Sequence[Path],
) -> None:
    """Run cases, by family, glob and level or from FILES, on backends; print what is wrong and the totals."""
    read = [c for f in files for c in casefile.read(f)]
    ids = case_ids(families, globs, level) if not files or families or globs else []
    _run(choose(backends, stage), ids, read, json_path, save_failures, named=bool(backends))


@main.command()
@click.argument("file", type=_ExistingFile)
@_backend
@_stage
@_json
def repro(file: Path, backends: Sequence[str], stage: str | None, json_path: Path | None) -> None:
    """Run the case(s) of FILE again; the same verdict, numbers and first divergence as when it was saved."""
    _run(choose(backends, stage), [], casefile.read(file), json_path, None, named=bool(backends), verbose=True)


def _run(
    backends: tuple[list[Spec], dict[Spec, str]],
    ids: Sequence[str],
    read: Sequence[Case],
    json_path: Path | None,
    save: Path | None,
    *,
    named: bool,
    verbose: bool = False,
) -> NoReturn:
    specs, lacking = backends
    if lacking and named:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in lacking.items()))
    runner = Runner(save_failures=save)
    results: list[Result] = []
    try:
        for spec in specs:
            results += _run_backend(runner, spec, ids, read, verbose=verbose)
    except KeyboardInterrupt:
        click.echo("interrupted; what ran is recorded", err=True)
    finally:
        runner.close()
        if json_path:
            write_json(json_path, record(results, {str(s): why for s, why in lacking.items()}))
    totals = Totals()
    for r in results:
        totals.add(r)
    _summary(results, {str(s): why for s, why in lacking.items()})
    sys.exit(totals.exit_code())


def _run_backend(
    runner: Runner, spec: Spec, ids: Sequence[str], read: Sequence[Case], *, verbose: bool
) -> list[Result]:
    results: list[Result] = []
    chosen: list[Case | str] = [*read, *ids]
    size = runner.batch_size(spec)
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=len(chosen), label=str(spec), file=sys.stderr, hidden=hidden) as bar:
        for start in range(0, len(chosen), size):
            batch = chosen[start : start + size]
            cases = [c if isinstance(c, Case) else runner.case(c) for c in batch]
            for result in runner.run(spec, cases):
                results.append(result)
                if verbose or result.verdict in FAILURES:
                    click.echo(result.sentence())
                if result.saved:
                    click.echo(f"  reproduce: conform repro {result.saved} --backend '{spec}'")
            bar.update(len(batch))
    return results


def _summary(results: Sequence[Result], lacking: dict[str, str]) -> None:
    per_backend: dict[str, list[Result]] = {}
    for r in results:
        per_backend.setdefault(r.backend, []).append(r)
    rows = []
    for name, found in per_backend.items():
        totals = Totals()
        for r in found:
            totals.add(r)
        used = [r.budget_used for r in found if r.budget_used is not None]
        rows.append((name, str(totals), f"{max(used):.3g}" if used else "–", f"{sum(r.seconds for r in found):.2f} s"))
    rows += [(name, f"not available: {why}", "–", "–") for name, why in lacking.items()]
    click.echo(tabulate(rows, ["backend", "verdicts", "budget used, at most", "ran for"]))
    if not results:
        click.echo("nothing was executed, so nothing is proven")


@main.command("import-capture")
@click.argument("capture", type=_ExistingFile)
@click.option("-o", "--output", required=True, type=_File, metavar="FILE.gguf")
def import_capture(capture: Path, output: Path) -> None:
    """Turn a capture (JSON beside its .npz) into a case file with expected outputs."""
    case = captured.import_capture(capture)
    casefile.write(output, [case])
    click.echo(f"{output}: {case.id}, {len(case.steps)} steps, {output.stat().st_size:,} bytes")


@main.group("golden")
def golden_group() -> None:
    """Golden outputs: the pinned corpus of expected values."""


@golden_group.command()
@_json
def verify(json_path: Path | None) -> None:
    """Compute every golden value again, on the reference and on the real ggml, and compare."""
    _golden(golden.verify(), json_path)


@golden_group.command()
@_json
def update(json_path: Path | None) -> None:
    """Make the golden values anew; one is accepted only where the reference and the real ggml agree within budget."""
    _golden(golden.update(), json_path)


def _golden(results: list[Result], json_path: Path | None) -> NoReturn:
    totals = Totals()
    for r in results:
        totals.add(r)
        if r.verdict in FAILURES:
            click.echo(r.sentence())
    if json_path:
        write_json(json_path, record(results))
    click.echo(f"golden: {totals}")
    sys.exit(totals.exit_code())
