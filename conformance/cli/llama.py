"""`conform capture`, `make-model` and `import-capture`: what llama.cpp itself builds and runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import click

from conformance.case import casefile
from conformance.case.case import Case
from conformance.case.reference import FOLDERS
from conformance.ggml.errors import UsageError
from conformance.ggml.types import TYPES
from conformance.live.llama import llama_of
from conformance.live.projector import capture_projector
from conformance.live.projectors.encoder import Medium
from conformance.report.progress import Progress, since
from conformance.suite import captured
from conformance.suite.zoo import family
from conformance.suite.zoo.family import Request
from conformance.suite.zoo.model import Architecture, runnable
from conformance.suite.zoo.model import table as architectures

from .options import ExistingFile, File
from .output import line, table

_TYPE = click.Choice(list(TYPES))
_SWITCH = {"on": "1", "off": "0", None: ""}
_arch_option = click.option("--arch", metavar="NAME", help="An architecture; --list shows them.")
_set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A metadata key of the architecture; repeatable."
)
_seed_option = click.option("--seed", type=click.IntRange(0, 10**18 - 1), default=0, show_default=True)
_lib_option = click.option(
    "--lib", metavar="BUILD", help="A build with llama.cpp, as `conform builds` reads it; default: the wheel's."
)
_output_option = click.option("-o", "--output", type=File, metavar="FILE.gguf")
_context_option = click.option("--context", type=click.IntRange(1), default=256, show_default=True,
                               help="Cells of one stream.")  # fmt: skip
_flash_option = click.option("--flash-attn", type=click.Choice(["on", "off"]),
                             help="Default: on, where the architecture can.")  # fmt: skip
_cache_option = click.option("--cache-type", type=_TYPE, default="f16", show_default=True)


@click.command()
@click.argument("model", required=False, type=ExistingFile)
@_arch_option
@_set_option
@click.option("--weight-type", type=_TYPE, default="f32", help="Of the made-up matrices.")
@click.option("--real", is_flag=True, help="Leave out weights that llama.cpp can do without, as model files do.")
@click.option("--run", "plan", metavar="PLAN", help="Such as p250.d8; instead of --prefill and --decode.")
@click.option("--prefill", type=click.IntRange(1), default=5, show_default=True, help="Tokens of each sequence.")
@click.option("--decode", type=click.IntRange(0), default=4, show_default=True, help="Steps after it.")
@click.option("--sequences", type=click.IntRange(1, 64), default=1, show_default=True)
@_context_option
@click.option("--ubatch", type=click.IntRange(1), default=512, show_default=True, help="Tokens of one graph, at most.")
@_flash_option
@click.option("--unified-kv", is_flag=True, help="All sequences share one stream of cells.")
@_cache_option
@click.option("--cache-type-v", type=_TYPE, help="Where V's is another.")
@click.option("--weights", type=click.Choice(["embedded", "reference"]), default="embedded", show_default=True,
              help="Of MODEL.gguf: in the case file, or left in MODEL.gguf, named there with digests.")  # fmt: skip
@click.option("--nodes", type=click.IntRange(0), default=0, help="Record every node of this many graphs.")
@_seed_option
@_lib_option
@click.option("--list", "listing", is_flag=True, help="Show every architecture and whether it runs.")
@click.option("--projector", metavar="NAME", help="A projector; conform cases --family projector shows them.")
@click.option("--medium", type=click.Choice(get_args(Medium)), default="odd", show_default=True, help="Of --projector.")
@_output_option
def capture(
    model: Path | None,
    arch: str | None,
    settings: Sequence[str],
    weight_type: str,
    real: bool,
    plan: str | None,
    prefill: int,
    decode: int,
    sequences: int,
    context: int,
    ubatch: int,
    flash_attn: str | None,
    unified_kv: bool,
    cache_type: str,
    cache_type_v: str | None,
    weights: str,
    nodes: int,
    seed: int,
    lib: str | None,
    listing: bool,
    projector: str | None,
    medium: Medium,
    output: Path | None,
) -> None:
    """Record what llama.cpp runs: MODEL.gguf, or --arch NAME with made-up weights, as a case file.

    With --projector NAME: what libmtmd computes of an image or a sound.
    """
    if listing:
        _list()
        return
    if sum(source is not None for source in (model, arch, projector)) != 1:
        raise UsageError(
            "capture: a model file, or --arch NAME, or --projector NAME expected; --list shows the architectures, "
            "conform cases --family projector the projectors"
        )
    if output is None:
        raise UsageError("capture: -o FILE.gguf is missing")
    if projector is not None:
        others = {
            "--set": settings,
            "--real": real,
            "--run": plan,
            "--nodes": nodes,
            "--weights": weights == "reference",
        }
        _refuse(others, "not with --projector")
        with Progress().of(since(f"libmtmd runs {projector}")):
            capture_projector(projector, medium, output, llama_of(lib), weight_type)
        _report(output, casefile.read_one(output))
        return
    plan = plan or f"p{prefill}" + (f".d{decode}" if decode else "")
    library = llama_of(lib)
    if model is not None:
        arch_only = {"--set": settings, "--real": real, "--weight-type": weight_type != "f32"}
        _refuse(arch_only, "only with --arch; a model file has its own")
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", model.stem)
        with Progress().of(since(f"llama.cpp runs {model.name}")):
            case = family.record_model(
                Request(
                    id=f"model/{stem}-seqs={sequences},run={plan}@{seed}",
                    stream=f"{stem}@{seed}",
                    model=str(model.resolve()),
                    lib=library,
                    plan=plan,
                    n_ctx=context,
                    n_seq_max=sequences,
                    n_ubatch=ubatch,
                    unified=unified_kv,
                    flash_attn=flash_attn != "off",
                    type_k=cache_type,
                    type_v=cache_type_v or cache_type,
                    nodes=nodes,
                    by_reference=weights == "reference",
                    family="model",
                    params={"model": model.name, "seqs": str(sequences), "run": plan},
                    seed=seed,
                    provenance={"model": model.name},
                )
            )
    else:
        if weights == "reference":
            raise UsageError("capture: --weights reference: only with a model file; --arch has weights as seeds anyway")
        values = {
            "seqs": sequences, "unified": "1" if unified_kv else "", "fa": _SWITCH[flash_attn],
            "cache": cache_type, "cache_v": cache_type_v, "ctx": context, "ubatch": ubatch, "w": weight_type,
            "real": int(real), "nodes": nodes, "set": _settings(settings), "run": plan,
        }  # fmt: skip
        with Progress().of(since(f"llama.cpp runs {arch}")):
            case = family.make(_zoo_id(str(arch), values, seed), library)
    casefile.write(output, case)
    _report(output, case)


def _refuse(given: Mapping[str, object], why: str) -> None:
    """UsageError if the user gave an option that says nothing here."""
    if wrong := [option for option, value in given.items() if value]:
        raise UsageError(f"capture: {', '.join(wrong)}: {why}")


def _zoo_id(arch: str, values: Mapping[str, object], seed: int) -> str:
    """The id of an architecture's case: keys that are empty, or have their default, are left out."""
    keys = [f"{key}={value}" for key, value in values.items() if value and value != family.KEYS[key].default]
    return f"zoo/{arch}{'-' if keys else ''}{','.join(keys)}@{seed}"


def _report(output: Path, case: Case) -> None:
    nodes = sum(len(s.graph) for s in case.steps)
    text = f"{output}: {case.id}, {len(case.steps)} steps, {nodes} nodes, {output.stat().st_size:,} bytes"
    if case.references:
        files = ", ".join(sorted({r.file for r in case.references.values()}))
        text += f"; {len(case.references)} weights are in {files}: keep it beside, or name its folder in {FOLDERS}"
    line(text)


def _settings(settings: Sequence[str]) -> str:
    """`--set` as an id has it: `KEY:VALUE` joined by `+`, a list's numbers joined by `/`."""
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


def _list() -> None:
    rows = [(a.name, _note(a), a.lacks or "runs") for a in architectures().values()]
    table(rows, ["architecture", "", "llama_decode"])
    line(f"{len(runnable(with_variants=True))} of {len(rows)} run")


def _note(arch: Architecture) -> str:
    return "encodes only" if arch.encodes else f"a variant of {arch.of}" if arch.of else ""


@click.command("make-model")
@_arch_option
@_set_option
@click.option("--type", "type_name", type=_TYPE, default="f32", show_default=True, help="Of the matrices.")
@_seed_option
@_lib_option
@_output_option
def make_model(
    arch: str | None, settings: Sequence[str], type_name: str, seed: int, lib: str | None, output: Path | None
) -> None:
    """Write a tiny model with made-up weights, in a GGUF file that llama.cpp loads."""
    if arch is None or output is None:
        raise UsageError("make-model: --arch NAME and -o MODEL.gguf expected")
    case_id = _zoo_id(arch, {"w": type_name, "set": _settings(settings)}, seed)
    request, name, keys, _ = family.read(case_id, llama_of(lib))
    family.make_model(output, request, name, keys)
    line(f"{output}: {name}, {output.stat().st_size:,} bytes")


@click.command("import-capture")
@click.argument("capture", type=ExistingFile)
@click.option("-o", "--output", required=True, type=File, metavar="FILE.gguf")
def import_capture(capture: Path, output: Path) -> None:
    """Turn a capture (JSON beside its .npz) into a case file with expected outputs."""
    case = captured.import_capture(capture)
    casefile.write(output, [case])
    line(f"{output}: {case.id}, {len(case.steps)} steps, {output.stat().st_size:,} bytes")
