"""`conform builds`: what builds of ggml and llama.cpp hold, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from conformance.builds.build import Build, DeviceOf, probe
from conformance.cli.options import complete_build, json_option
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import UnavailableError
from conformance.judge.outcome import Outcome, Why
from conformance.report.runfile import write_json
from conformance.run.session.environment import header


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="BUILD…", shell_complete=complete_build)
@json_option
def builds(names: Sequence[str], json_path: Path | None) -> None:
    """Say of each BUILD which ggml it is, its devices here, and what it lacks.

    BUILD is a folder or build tree, a library file, an archive (.tar.gz, .tgz, .zip, .whl), the name of an installed
    distribution, pypi:NAME==VERSION or npm:NAME@VERSION. Exit code 1: none fits.
    """
    fit: list[Build] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            fit.append(probe(name))
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
        results = [*(b.to_json() for b in fit), *({"name": n, "refused": why} for n, why in refused.items())]
        write_json(json_path, {**header("builds"), "results": results})
    leave(Outcome.of(Why.FAILED, [] if fit else ["none of these builds fits"]))


def rows(build: Build) -> list[tuple[str, ...]]:
    """A row for each device; what is true of all stands in the first."""
    first = (build.name, build.ggml, build.number, "yes" if build.llama else "no")
    texts = [spell(d) for d in build.devices] or ["none"]
    return [(*(first if i == 0 else ("",) * len(first)), text) for i, text in enumerate(texts)]


def spell(device: DeviceOf) -> str:
    """`Vulkan0 (CPU, in software): llvmpipe …`."""
    software = ", in software" if device.software else ""
    return f"{device.name} ({device.type}{software}): {device.description}"
