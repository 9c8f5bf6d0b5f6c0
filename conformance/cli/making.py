"""`conform build`, its commands `make` and `devices`; those that run llama.cpp join it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from conformance.builds.devices import devices
from conformance.builds.make import OPTIONS, make
from conformance.ggml.errors import UsageError
from conformance.ggml.text import shell
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json

from .options import ISA, Folder, json_option
from .output import Group, line, table


@click.group(cls=Group)
def build() -> None:
    """Compare builds of llama.cpp.

    A build is a folder such as a CMake build tree, an archive, a library, an installed
    distribution, pypi:NAME==VERSION or npm:NAME@VERSION.
    """


@build.command("make")
@click.argument("device", type=click.Choice(list(OPTIONS)))
@click.option("--from", "sources", metavar="SOURCE", required=True, multiple=True,
              help="Source of ggml: folder, archive, pypi:NAME==VERSION; debian: has headers, npm: Dawn.")  # fmt: skip
@click.option("-o", "--output", type=Folder, metavar="DIR", required=True, help="Put the libraries in DIR.")
@ISA
def build_make(device: str, sources: Sequence[str], output: Path, isa: str | None) -> None:
    """Compile ggml for DEVICE from its source, for `--backend 'ggml?lib=DIR'`.

    The compiler is CC and CXX, or cc and c++. An OpenCL device that is a CPU gets what ggml-opencl asks for; what that
    changes stands in DIR/made.json and in each record.
    """
    if isa and device != "cpu":
        raise UsageError(f"--isa: cpu expected, {device} found; leave --isa out")
    with Progress().of(since(f"compiling {device} from {' '.join(sources)}")):
        made = make(device, sources, output, isa or "")
    for what, text in made.notes.items():
        line(f"{what}: {text}")
    if device == "opencl":
        line(f"driver: {made.driver or 'those of the system; conform build devices shows others'}")
    command = shell(["conform", "list", "builds", str(made.folder), *(["--isa", isa] if isa else [])])
    line(f"{made.folder}: written; try {command}")


@build.command("devices")
@json_option
def build_devices(json_path: Path | None) -> None:
    """List devices that this machine can run without a GPU, and what each lacks."""
    found = [d.to_json() for d in devices()]
    table([(d["name"], ", ".join(d["lacks"]) or "nothing") for d in found], ["device", "lacks"])
    for d in found:
        line("")
        line(f"{d['name']}:")
        for text in (*d["adding"], *d["running"]):
            line(f"  {text}")
    if json_path:
        write_json(json_path, {"schema": 1, "devices": found})
