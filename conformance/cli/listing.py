"""`conform list`: backends, families, cases and builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from conformance.backend import registry
from conformance.backend.interface import describe
from conformance.backend.registry import Spec
from conformance.builds.build import Build, DeviceOf, probe
from conformance.case.case import JSON
from conformance.cli.cases import read_cases
from conformance.ggml.errors import UnavailableError, UsageError, nearest
from conformance.judge.outcome import Outcome, Why
from conformance.report.runfile import write_json
from conformance.run.live import family_names
from conformance.run.session import select
from conformance.suite import FAMILIES
from conformance.suite.family import LEVELS
from conformance.testrun import Chosen

from . import options
from .options import chosen, json_option, settings_here
from .output import leave, line, table


class _Kind(click.Choice[str]):
    """A choice whose error suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401  # as click
        """Return the choice."""
        near = "" if value in self.choices else nearest(str(value), self.choices)
        if near:
            self.fail(f"{value!r} is not one of {', '.join(self.choices)};{near}", param, ctx)
        return super().convert(value, param, ctx)


def _complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[str] | list[CompletionItem]:
    """Complete a word by the kind of list that the first word names."""
    if ctx.params.get("what") == "builds":
        return options.complete_build(ctx, param, begun)
    if ctx.params.get("what") == "families":
        return options.complete_family(ctx, param, begun)
    of = options.complete_case if ctx.params.get("what") == "cases" else options.complete_backend
    return of(ctx, param, begun)


@click.command("list")
@click.argument("what", type=_Kind(["backends", "families", "cases", "builds"]), default="backends")
@click.argument("names", nargs=-1, metavar="[NAME|GLOB|FILE|BUILD]…", shell_complete=_complete)
@chosen(options.CONFIG, options.FAMILY, options.CASE, options.LEVEL)
@click.option("--format", "form", type=click.Choice(["ids", "test-file"]), default="ids", show_default=True,
              help="Format of cases: ids, or ops for test-backend-ops.")  # fmt: skip
@click.option("--lib", metavar="BUILD", default="", help="Build whose op numbers are used; default: the wheel's.")
@click.option("-o", "--output", type=options.File, metavar="FILE", help="Write the ops for test-backend-ops to FILE.")
@options.ISA
@json_option
def list_(
    what: str,
    names: Sequence[str],
    chosen: Chosen,
    form: str,
    lib: str,
    output: Path | None,
    isa: str | None,
    json_path: Path | None,
) -> None:
    """List backends (default), families, case ids or builds of llama.cpp.

    NAME is a backend or a family, GLOB matches case ids, FILE contains cases, BUILD is a folder, a library, an
    archive, an installed distribution, pypi:NAME==VERSION or npm:NAME@VERSION. Exit code 1: no BUILD can be tested.
    """
    if what == "cases":
        _cases(names, chosen, lib if form == "test-file" else None, output, json_path)
    elif what == "builds":
        _builds(names, isa or "", json_path)
    elif what == "families":
        _families(names, json_path)
    else:
        _backends(names, json_path)


def _backends(names: Sequence[str], json_path: Path | None) -> None:
    """Print device, versions and buffer types of each backend, or why it is not available."""
    rows: list[Sequence[str]] = []
    document: dict[str, JSON] = {}
    defaults = [Spec(n) for n in registry.defaults()]
    for spec, about in select.probes(select.parse_specs(names or registry.names())).items():
        runs = spec in defaults
        default = "yes" if runs else "if named"
        if isinstance(about, UnavailableError):
            rows.append((str(spec), default, "not available", str(about), ""))
            document[str(spec)] = {"available": False, "default": runs, "reason": str(about)}
            continue
        info, buffers = about.info, about.buffer_types
        versions = ", ".join(f"{k} {v}" for k, v in info.versions.items())
        kinds = ", ".join(b.name for b in buffers)
        rows.append((str(spec), default, info.device, f"{info.description} ({versions})", kinds))
        own = {"available": True, "default": runs, "buffer_types": [describe(b) for b in buffers]}
        document[str(spec)] = {**describe(info), **own}
    for name, named in ({} if names else registry.defined()).items():
        by = f"{named.adapter}, defined in {settings_here().path}; opened only if named"
        rows.append((name, "if named", "not opened", by, ""))
        document[name] = {"opened": False, "adapter": named.adapter}
    heads = ["backend", "default", "device", "what executes", "buffer types"]
    table(rows, heads, maxcolwidths=[None, None, 24, 56, 34])
    if json_path:
        write_json(json_path, {"schema": 1, "backends": document})


def _families(names: Sequence[str], json_path: Path | None) -> None:
    """Print the summary of each family, or why it cannot be used."""
    rows: list[Sequence[str]] = []
    document: dict[str, JSON] = {}
    ours = FAMILIES.ours()
    for name in names or family_names():
        runs = name in ours
        default = "yes" if runs else "if named"
        try:
            family = select.family_named(name)
            why = family.lacks()
        except UnavailableError as e:
            why = str(e)
        if why:
            rows.append((name, default, f"not available: {why}"))
            document[name] = {"available": False, "default": runs, "reason": why}
        else:
            rows.append((name, default, family.summary))
            document[name] = {"available": True, "default": runs, "summary": family.summary}
    table(rows, ["family", "default", "a case"], maxcolwidths=[None, None, 90])
    if json_path:
        write_json(json_path, {"schema": 1, "families": document})


def _cases(names: Sequence[str], chosen: Chosen, lib: str | None, output: Path | None, json_path: Path | None) -> None:
    """Print case ids, smallest first; with `lib` ops in that build's numbering."""
    own = [c for name in names if Path(name).is_file() for c in read_cases(Path(name))]
    globs = [name for name in names if not Path(name).is_file()]
    level = chosen.level or (LEVELS[0] if lib is None else LEVELS[-1])
    chosen = replace(chosen, globs=[*chosen.globs, *globs])
    ids = chosen.at(level) if chosen.globs or not own else []
    if lib is not None:
        from .testfile import show  # noqa: PLC0415  # loads a library

        show([*own, *map(select.build, ids)], lib, output)
        return
    ids = [*(c.id for c in own), *ids]
    for i in ids:
        line(i)
    if json_path:
        write_json(json_path, {"schema": 1, "cases": ids})


def _builds(names: Sequence[str], isa: str, json_path: Path | None) -> None:
    """Print version, devices, features and missing functions of each build."""
    if not names:
        raise UsageError("list builds: BUILD expected, such as a folder of libraries or pypi:NAME==VERSION")
    fit: list[Build] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            fit.append(probe(name, isa=isa))
        except UnavailableError as e:
            refused[name] = str(e)
    if fit:
        table([row for b in fit for row in rows(b)], ["build", "ggml", "number", "llama.cpp", "devices"])
    for build in fit:
        line(f"{build.name}: features: {' '.join(build.features) or 'not told'}")
        for sentence in build.left_out:
            line(f"{build.name}: left out: {sentence}")
    for name, why in refused.items():
        line(f"{name}: refused: {why}")
    if json_path:
        listed = [*(b.to_json() for b in fit), *({"name": n, "refused": why} for n, why in refused.items())]
        write_json(json_path, {"schema": 1, "builds": listed})
    leave(Outcome.of(Why.FAILED, [] if fit else ["none of these builds can be tested"]))


def rows(build: Build) -> list[tuple[str, ...]]:
    """Return a row for each device; the build's own columns are in the first."""
    first = (build.name, build.ggml, build.number, "yes" if build.llama else "no")
    texts = [spell(d) for d in build.devices] or ["none"]
    return [(*(first if i == 0 else ("",) * len(first)), text) for i, text in enumerate(texts)]


def spell(device: DeviceOf) -> str:
    """Format a device, as `Vulkan0 (CPU, in software): llvmpipe …`."""
    software = ", in software" if device.software else ""
    return f"{device.name} ({device.type}{software}): {device.description}"
