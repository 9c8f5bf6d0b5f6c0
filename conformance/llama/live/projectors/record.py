"""Records libmtmd's encoding of an image or a sound as a case, a step per chunk."""

from __future__ import annotations

from pathlib import Path

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.case.recipe import MAKEABLE
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import computes
from conformance.llama.zoo.recorder import GraphRecord, Recorder
from conformance.llama.zoo.worker import TOLERANCE

from .encoder import Encoder, Medium
from .files import weight_recipe

_EVERY = 1 << 30
"""Record every node of a graph, since libmtmd flags no node as an output."""


def record(e: Encoder, medium: Medium, output: Path) -> None:
    """Encode a medium on the CPU and write the computed values as a case file.

    Raises:
        ConformanceError: libmtmd fails, or a tensor cannot be read.
    """
    recorder = Recorder(e.library, whole=_EVERY)
    context = e.context(callback=recorder.callback)
    steps: list[Step] = []
    for chunk in e.chunks(context, e.medium(medium)):
        recorder.begin("encode")
        e.encode(context, chunk)
        recorder.flush()
        steps.extend(_step(graph) for graph in recorder.graphs)
        recorder.graphs.clear()
    name = e.load.projector
    case = Case(
        f"model/clip_{name}-media={medium}@1",
        recorder.persistent,
        steps,
        family="model",
        params={"projector": name, "media": medium},
        seed=1,
        tolerance=dict(TOLERANCE),
        provenance={
            "projector": name,
            "source": f"libmtmd ggml {e.library.version}",
            "arithmetic": GGML_CPU.name,
        },
    )
    case.recipes = {t: weight_recipe(e.load.stream, t) for t in recorder.is_weight if t.type.name in MAKEABLE}
    casefile.write(output, case)


def _step(graph: GraphRecord) -> Step:
    """Make a step whose output is the last computing node, of which a view may follow."""
    whole = Graph(graph.nodes)
    used = set(whole.tensors())
    inputs = {t: data for t, data in graph.inputs.items() if t in used}
    result = next(node for node in reversed(graph.nodes) if computes(node))
    return Step(whole, inputs, (result,), graph.values)
