"""`conform capture`: records the graphs that llama.cpp builds and runs as a case."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from conformance.case import casefile
from conformance.case.case import Case
from conformance.case.reference import FOLDERS
from conformance.cli import options
from conformance.cli.output import line, table
from conformance.ggml.errors import UsageError
from conformance.ggml.types import TYPES
from conformance.llama import captured
from conformance.llama.live.llama import llama_of
from conformance.llama.live.projector import capture_projector, medium_of
from conformance.llama.zoo import family
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.model import Architecture, runnable
from conformance.llama.zoo.model import table as architectures
from conformance.report.progress import Progress, since

_TYPE = click.Choice(list(TYPES))
_SWITCH = {"on": "1", "off": "0", None: ""}
_lib_option = click.option(
    "--lib", metavar="BUILD", help="Build with llama.cpp (docs/builds.md); default: the wheel's."
)


@click.command()
@click.argument("source", required=False, metavar="MODEL.gguf|ARCH|ID|CAPTURE.json")
@click.option("--run", metavar="PLAN", help="Plan of tokens and steps, as p250.d8; default: p5.d4.")
@click.option("--sequences", "seqs", type=click.IntRange(1, 64), metavar="N", help="Number of sequences; default: 1.")
@click.option("--context", "ctx", type=click.IntRange(1), metavar="N", help="Cells of one stream; default: 256.")
@click.option(
    "--flash-attn",
    "fa",
    type=click.Choice(["on", "off"]),
    help="Flash attention; default: on, if the architecture has it.",
)
@click.option("--cache-type", "cache", type=_TYPE, metavar="TYPE", help="Type of the KV cache; default: f16.")
@click.option("--nodes", type=click.IntRange(0), metavar="N", help="Record every node of the first N graphs.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Metadata of ARCH, repeatable.")
@click.option("--weight-type", "w", type=_TYPE, metavar="TYPE", help="Type of the matrices of ARCH; default: f32.")
@click.option("--model", "whole", is_flag=True, help="Write the model of ARCH instead of a case.")
@click.option("--weights", type=click.Choice(["embedded", "reference"]), default="embedded", show_default=True,
              help="Copy the weights of MODEL.gguf into the case, or refer to them.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 10**18 - 1), default=0, metavar="N", help="Seed of tokens and weights.")
@_lib_option
@click.option("-o", "--output", type=options.File, metavar="FILE.gguf", help="Case file, or with --model the model.")
def capture(
    source: str | None, output: Path | None, whole: bool, weights: str, seed: int, lib: str | None,
    settings: Sequence[str], **given: Any,  # noqa: ANN401  # of the other options
) -> None:  # fmt: skip
    """Record the graphs that llama.cpp runs as a case file.

    MODEL.gguf runs with its own weights, ARCH (llama, qwen3, …) with random weights. ID is a case of the families zoo
    or projector, CAPTURE.json a capture with its .npz beside it. Without an argument: list the architectures.
    """
    if source is None:
        rows = [(a.name, _note(a), a.lacks or "runs") for a in architectures().values()]
        table(rows, ["architecture", "", "llama_decode"])
        line(f"{len(runnable(with_variants=True))} of {len(rows)} architectures run")
        return
    if output is None:
        raise UsageError("capture: -o FILE.gguf is missing")
    given = {k: v for k, v in given.items() if v is not None} | ({"set": _settings(settings)} if settings else {})
    path = Path(source)
    if weights == "reference" and not path.is_file():
        raise UsageError("capture: --weights reference: only with a model file; random weights are always seeds")
    if path.is_file() and path.suffix != ".json":
        _refuse({**given, "model": whole}, ("set", "w", "model"), "only with an architecture; a model file has its own")
        case = _recorded(path, given, seed, lib, by_reference=weights == "reference")
    elif path.suffix == ".json" or "/" in source:
        _refuse({**given, "model": whole}, (*given, "model"), "only with a model file or an architecture")
        case = _named(source, output, lib)
    else:
        case_id = _zoo_id(source, {**given, "fa": _SWITCH[given.get("fa")]}, seed)
        if whole:
            request, name, keys, _ = family.read(case_id, llama_of(lib))
            family.make_model(output, request, name, keys)
            line(f"{output}: {name}, {output.stat().st_size:,} bytes")
            return
        with Progress().of(since(f"llama.cpp runs {source}")):
            case = family.make(case_id, llama_of(lib))
    casefile.write(output, case)
    nodes = sum(len(s.graph) for s in case.steps)
    text = f"{output}: {case.id}, {len(case.steps)} steps, {nodes} nodes, {output.stat().st_size:,} bytes"
    if case.references:
        files = ", ".join(sorted({r.file for r in case.references.values()}))
        text += f"; {len(case.references)} weights are in {files}: keep it beside, or name its folder in {FOLDERS}"
    line(text)


def _recorded(model: Path, given: Mapping[str, Any], seed: int, lib: str | None, *, by_reference: bool) -> Case:
    """Record a model file, with its own weights."""
    stem = re.sub(r"[^A-Za-z0-9_.]+", "_", model.stem)
    seqs, plan, cache = given.get("seqs", 1), given.get("run", "p5.d4"), given.get("cache", "f16")
    request = Request(
        id=f"model/{stem}-seqs={seqs},run={plan}@{seed}", stream=f"{stem}@{seed}", model=str(model.resolve()),
        lib=llama_of(lib), plan=plan, n_ctx=given.get("ctx", 256), n_seq_max=seqs,
        flash_attn=given.get("fa") != "off", type_k=cache, type_v=cache, nodes=given.get("nodes", 0),
        by_reference=by_reference, family="model", params={"model": model.name, "seqs": str(seqs), "run": plan},
        seed=seed, provenance={"model": model.name},
    )  # fmt: skip
    with Progress().of(since(f"llama.cpp runs {model.name}")):
        return family.record_model(request)


def _named(source: str, output: Path, lib: str | None) -> Case:
    """Read a capture, or record a case by its id."""
    if source.endswith(".json"):
        return captured.import_capture(Path(source))
    with Progress().of(since(f"llama.cpp runs {source}")):
        if source.partition("/")[0] == family.FAMILY.name:
            return family.make(source, llama_of(lib))
        name, medium, w = medium_of(source)
        capture_projector(name, medium, output, llama_of(lib), w)
        return casefile.read_one(output)


def _refuse(given: Mapping[str, object], wrong: Iterable[str], why: str) -> None:
    """Raise UsageError if the user gave an option that has no effect here."""
    options = {p.name: p.opts[0] for p in click.get_current_context().command.params}
    options |= {"set": "--set", "model": "--model"}
    if found := [options[name] for name in wrong if given.get(name)]:
        raise UsageError(f"capture: {', '.join(found)}: {why}")


def _zoo_id(arch: str, values: Mapping[str, object], seed: int) -> str:
    """Return the id of an architecture's case, without empty keys and defaults."""
    keys = [f"{key}={value}" for key, value in values.items() if value and value != family.KEYS[key].default]
    return f"zoo/{arch}{'-' if keys else ''}{','.join(keys)}@{seed}"


def _settings(settings: Sequence[str]) -> str:
    """Format `--set` for an id: `KEY:VALUE` joined by `+`, a list's numbers joined by `/`."""
    items = []
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[a-z0-9_.]+", key):
            raise UsageError(f"--set {text!r}: KEY=VALUE expected, such as block_count=1")
        value = re.sub(r"[\[\]\s]", "", value).replace(",", "/")
        if not re.fullmatch(r"[A-Za-z0-9_./-]+", value):
            raise UsageError(f"--set {text!r}: a number, true, false, text or a list like [2,0] expected")
        items.append(f"{key}:{value}")
    return "+".join(items)


def _note(arch: Architecture) -> str:
    return "encodes only" if arch.encodes else f"a variant of {arch.of}" if arch.of else ""
