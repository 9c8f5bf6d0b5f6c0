"""Write the tables: `python tests/benchmarks/attention_table.py --into docs/measurements/attention.md`.

Each attention form, compiled with static and with dynamic shapes, decoding and taking a prompt: the least time of one
layer in many runs, the memory that running it took beyond the compiled model and its inputs, whether scores and softmax
were fused, and the layers that did the work. Every figure comes from a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention_forms as forms
import click
import numpy as np
from attention_forms import layers
from numpy.typing import NDArray

from backends.openvino import OpenVinoStateless
from backends.openvino.emit.attention import remembered
from backends.openvino.nodes import Constants

HEADS = forms.Heads(32, 8, 64**-0.5)
SIZE = 64
FORMS = (*forms.FORMS, "stateful")
PROPERTIES = {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_NUM_THREADS": 2}
MOVED = ("Broadcast", "Transpose", "Tile", "Gather")
WORK = ("ScaledDotProductAttention", "Subgraph", "MatMul", "Softmax", *MOVED)
"""Layers worth naming; the rest is reshapes and elementwise."""
WHOLE = {"ScaledDotProductAttention": "kernel", "Subgraph": "snippets"}
"""Layer that can hold a whole attention -> what the table calls it."""
KINDS = (
    *(("decode", 1, past, streams) for streams in (1, 4) for past in (512, 1024, 4096)),
    *(("prefill", 512 // streams, past, streams) for streams in (1, 4) for past in (0, 1024)),
)
"""What, tokens of each stream, cells before them, streams."""
BEGIN, END = "<!-- attention_table.py -->", "<!-- end -->"
"""What a document has before and after the tables."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one process found."""

    ms: float
    mb: float
    layers: str
    fused: str


def measured(form: str, tokens: int, past: int, streams: int, dynamic: bool) -> Row:
    """Compile, run, and say how long and with how much memory."""
    import openvino as ov  # noqa: PLC0415  # after the adapter's package, and only where it is used
    import openvino.opset15 as o  # noqa: PLC0415  # as above

    assert OpenVinoStateless is not None  # imported because it keeps openvino's telemetry from the network
    c, total = Constants(), past + tokens

    def parameter(*dims: int, fixed: tuple[int, ...] = (), type_: Any = ov.Type.f32) -> Any:  # noqa: ANN401  # a Node
        free = [-1 if dynamic and i not in fixed else n for i, n in enumerate(dims)]
        return o.parameter(ov.PartialShape(free), type_)

    stateful = form == "stateful"
    shapes = _shapes(streams, tokens, tokens if stateful else total)
    given = [*(parameter(*s, fixed=(1, 3)) for s in shapes), parameter(streams, 1, tokens, total, fixed=(1,))]
    mask = forms.mask(c, given[3])
    if stateful:
        beam = parameter(streams, type_=ov.Type.i32)
        kept = [remembered(c, x, beam, str(i), HEADS.kv, SIZE) for i, x in enumerate(given[1:3])]
        y = forms.sdpa(c, HEADS, given[0], kept[0][0], kept[1][0], mask, None)
        model = ov.Model([o.result(y)], [x for _, x in kept], [*given, beam])
    else:
        model = ov.Model([o.result(forms.FORMS[form](c, HEADS, given[0], given[1], given[2], mask, None))], given)
    compiled = ov.Core().compile_model(model, "CPU", PROPERTIES)
    request = compiled.create_infer_request()
    if stateful:
        request.set_input_tensor(4, ov.Tensor(np.arange(streams, dtype=np.int32)))

    def run(tokens: int, past: int) -> float:
        inputs = _inputs(streams, tokens, past, tokens if stateful else past + tokens)
        for i, x in enumerate(inputs):
            request.set_input_tensor(i, ov.Tensor(x))
        start = time.perf_counter()
        request.infer()
        return (time.perf_counter() - start) * 1e3

    _inputs(streams, tokens, past, total)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, cells = [], (streams, HEADS.kv, past, SIZE)
    for i in range(40 if tokens == 1 else 8):
        if stateful and (i == 0 or tokens > 1):
            request.reset_state()
            for state in request.query_state() if past else ():
                state.state = ov.Tensor(np.random.default_rng(i).standard_normal(cells, np.float32))
        # the cache of the stateful form grows as it decodes; a few cells more cost nothing that can be seen
        times.append(run(tokens, past + i if stateful and tokens == 1 else past))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    names = layers(compiled)
    return Row(min(times), used / 1024, ", ".join(f"{names[n]} {n}" for n in WORK if n in names), _fused(names))


def _fused(names: Mapping[str, int]) -> str:
    """What holds the whole attention: the plugin's kernel, a compiled subgraph, or nothing.

    A product or softmax of its own means that the scores stood in memory between layers.
    """
    if {"MatMul", "Softmax"} & set(names):
        return "no"
    return next((word for layer, word in WHOLE.items() if layer in names), "no")


def _shapes(streams: int, tokens: int, length: int) -> list[tuple[int, int, int, int]]:
    return [(streams, n, m, SIZE) for n, m in ((HEADS.q, tokens), (HEADS.kv, length), (HEADS.kv, length))]


def _inputs(streams: int, tokens: int, past: int, length: int) -> list[NDArray[Any]]:
    """q, k and v with `length` cells, and a causal mask."""
    rng = np.random.default_rng(0)
    hidden = np.arange(past + tokens) > past + np.arange(tokens)[:, None]
    mask = np.where(hidden, -np.inf, 0).astype(np.float32)
    arrays = [rng.standard_normal(s, np.float32) for s in _shapes(streams, tokens, length)]
    return [*arrays, np.broadcast_to(mask, (streams, 1, *mask.shape)).copy()]


def found(*case: Any) -> Row | None:  # noqa: ANN401  # what `measured` takes
    """`measured` in a process of its own; None where the form has no such model."""
    if case[0] == "stateful" and not case[-1]:
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, case)


@click.command()
@click.option("--forms", default=",".join(FORMS), help="which, joined by commas")
@click.option("--into", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="a document to put it into")
def main(forms: str, into: Path | None) -> None:
    """Print what each form runs as and its figures, as Markdown; with --into, put the figures into a document."""
    layers, figures = tables(forms.split(","))
    click.echo("\n".join((*layers, "", *figures)))
    if into is not None:
        before, _, rest = into.read_text(encoding="utf-8").partition(BEGIN)
        _, mark, after = rest.partition(END)
        if not mark:
            raise click.UsageError(f"{into}: {BEGIN} and, behind it, {END} expected")
        into.write_text("\n".join([before + BEGIN, *figures, mark + after]), encoding="utf-8")


def tables(forms: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines of the table of what each form runs as, and of those of its ms and its MB, static / dynamic."""
    rows = {(kind, form): _both(form, kind) for kind in KINDS for form in forms}

    def either(form: str, field: str) -> str:
        return " / ".join(dict.fromkeys(getattr(r, field) for kind in KINDS for r in rows[kind, form]))

    def figures(kind: tuple[str, int, int, int], field: str) -> list[str]:
        return [" / ".join(f"{getattr(r, field):.2f}" for r in rows[kind, form]) for form in forms]

    layers = _markdown(("form", "fused", "layers"), [(f, either(f, "fused"), either(f, "layers")) for f in forms])
    head = ("tokens", "past", "streams", *forms)
    ms, mb = (
        _markdown((unit, *head), [(*kind, *figures(kind, unit.lower())) for kind in KINDS]) for unit in ("ms", "MB")
    )
    return layers, [*ms, "", *mb]


def _both(form: str, kind: tuple[str, int, int, int]) -> list[Row]:
    """What a form found with static shapes, where it has such a model, and with dynamic ones."""
    click.echo(f"{form}: {' '.join(map(str, kind))}", err=True)
    return [row for dynamic in (False, True) if (row := found(form, *kind[1:], dynamic)) is not None]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    main()
