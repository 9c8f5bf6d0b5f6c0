"""`conform capture`, `conform make-model`, `conform import-capture`: what llama.cpp runs, as case files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from conformance.case import casefile
from conformance.case.case import Case
from conformance.case.reference import FOLDERS
from conformance.ggml.errors import UsageError
from conformance.ggml.text import printable
from conformance.ggml.types import TYPES
from conformance.report.progress import Progress, since
from conformance.suite import captured
from conformance.suite.zoo import capture as recording
from conformance.suite.zoo import family as zoo
from conformance.suite.zoo import model
from conformance.suite.zoo.capture import Request

from .options import ExistingFile, File

_TYPE = click.Choice(list(TYPES))
_arch_option = click.option("--arch", metavar="NAME", help="An architecture; --list shows them.")
_set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A metadata key of the architecture; repeatable."
)
_seed_option = click.option("--seed", type=click.IntRange(0, 10**18 - 1), default=0, show_default=True)
_lib_option = click.option("--lib", type=ExistingFile, help="A library with all of llama.cpp; default: the wheel's.")
_output_option = click.option("-o", "--output", type=File, metavar="FILE.gguf")


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
@click.option("--context", type=click.IntRange(1), default=256, show_default=True, help="Cells of one stream.")
@click.option("--ubatch", type=click.IntRange(1), default=512, show_default=True, help="Tokens of one graph, at most.")
@click.option("--flash-attn", type=click.Choice(["on", "off"]), help="Default: on, where the architecture can.")
@click.option("--unified-kv", is_flag=True, help="All sequences share one stream of cells.")
@click.option("--cache-type", type=_TYPE, default="f16", show_default=True)
@click.option("--cache-type-v", type=_TYPE, help="Where V's is another.")
@click.option("--weights", type=click.Choice(["embedded", "reference"]), default="embedded", show_default=True,
              help="Of MODEL.gguf: in the case file, or left in MODEL.gguf, named there with digests.")  # fmt: skip
@click.option("--nodes", type=click.IntRange(0), default=0, help="Record every node of this many graphs.")
@_seed_option
@_lib_option
@click.option("--list", "listing", is_flag=True, help="Show every architecture and whether it runs.")
@_output_option
def capture(  # click shows the options' help
    model: Path | None,
    arch: str | None,
    settings: Sequence[str],
    weight_type: str,
    real: bool,  # a click flag
    plan: str | None,
    prefill: int,
    decode: int,
    sequences: int,
    context: int,
    ubatch: int,
    flash_attn: str | None,
    unified_kv: bool,  # a click flag
    cache_type: str,
    cache_type_v: str | None,
    weights: str,
    nodes: int,
    seed: int,
    lib: Path | None,
    listing: bool,  # a click flag
    output: Path | None,
) -> None:
    """Record what llama.cpp runs: MODEL.gguf, or --arch NAME with made-up weights, as a case file."""
    if listing:
        _list()
        return
    if (model is None) == (arch is None):
        raise UsageError("capture: a model file, or --arch NAME, expected; --list shows the architectures")
    if output is None:
        raise UsageError("capture: -o FILE.gguf is missing")
    plan = plan or f"p{prefill}" + (f".d{decode}" if decode else "")
    library = str(lib) if lib else ""
    if model is not None:
        only = {"--set": settings, "--real": real, "--weight-type": weight_type != "f32"}
        if said := [option for option, given in only.items() if given]:
            raise UsageError(f"capture: {', '.join(said)}: only with --arch; a model file has its own")
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", model.stem)
        with Progress().of(since(f"llama.cpp runs {model.name}")):
            case = recording.record_model(
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
        fa = {"on": "1", "off": "0"}.get(flash_attn or "")
        values = {
            "seqs": sequences, "unified": "1" if unified_kv else "", "fa": fa,
            "cache": cache_type, "cache_v": cache_type_v, "ctx": context, "ubatch": ubatch, "w": weight_type,
            "real": int(real), "nodes": nodes, "set": _settings(settings), "run": plan,
        }  # fmt: skip
        given = [f"{key}={value}" for key, value in values.items() if value and value != zoo.KEYS[key].default]
        with Progress().of(since(f"llama.cpp runs {arch}")):
            case = zoo.make(f"zoo/{arch}{'-' if given else ''}{','.join(given)}@{seed}", library)
    casefile.write(output, case)
    click.echo(_sentence(output, case))


def _sentence(output: Path, case: Case) -> str:
    nodes = sum(len(s.graph) for s in case.steps)
    said = f"{output}: {printable(case.id)}, {len(case.steps)} steps, {nodes} nodes, {output.stat().st_size:,} bytes"
    if not case.references:
        return said
    files = ", ".join(sorted({r.file for r in case.references.values()}))
    return f"{said}; {len(case.references)} weights are in {files}: keep it beside, or name its folder in {FOLDERS}"


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
    rows = [(a.name, "encodes only" if a.encodes else "", a.lacks or "runs") for a in model.table().values()]
    click.echo(tabulate(rows, ["architecture", "", "llama_decode"]))
    click.echo(f"{len(model.runnable())} of {len(rows)} run")


@click.command("make-model")
@_arch_option
@_set_option
@click.option("--type", "type_name", type=_TYPE, default="f32", show_default=True, help="Of the matrices.")
@_seed_option
@_lib_option
@_output_option
def make_model(
    arch: str | None, settings: Sequence[str], type_name: str, seed: int, lib: Path | None, output: Path | None
) -> None:
    """Write a tiny model with made-up weights, in a GGUF file that llama.cpp loads."""
    if arch is None or output is None:
        raise UsageError("make-model: --arch NAME and -o MODEL.gguf expected")
    said = {"w": type_name if type_name != "f32" else "", "set": _settings(settings)}
    given = [f"{key}={value}" for key, value in said.items() if value]
    request, name, keys, _ = zoo.read(f"zoo/{arch}{'-' if given else ''}{','.join(given)}@{seed}", str(lib or ""))
    recording.make_model(output, request, name, keys)
    click.echo(f"{output}: {name}, {output.stat().st_size:,} bytes")


@click.command("import-capture")
@click.argument("capture", type=ExistingFile)
@click.option("-o", "--output", required=True, type=File, metavar="FILE.gguf")
def import_capture(capture: Path, output: Path) -> None:
    """Turn a capture (JSON beside its .npz) into a case file with expected outputs."""
    case = captured.import_capture(capture)
    casefile.write(output, [case])
    click.echo(f"{output}: {printable(case.id)}, {len(case.steps)} steps, {output.stat().st_size:,} bytes")
