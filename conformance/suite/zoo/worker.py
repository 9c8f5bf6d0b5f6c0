"""A service that records one case with llama.cpp: a wrong metadata key ends its process.

The request has the fields of `Request`; the case is written to the file that it names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.case.recipe import MAKEABLE, make
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import Tensor
from conformance.process.service import Frame, Service, failure

from .drive import Drive, Tokens, load_model, new_context
from .model import recipe
from .recorder import Recorder, references, step
from .request import Request

TOLERANCE = {"nmse": 5e-4}
"""What a free run may differ by from a recording in ggml's arithmetic."""


def main() -> None:
    """Answer one request."""
    service = Service()
    service.serve(_answer)
    os._exit(0)  # llama.cpp's own clean-up has nothing to save


def _answer(header: dict[str, Any], _: object) -> Frame:
    try:
        return record(Request(**header)), ()
    except UnavailableError as e:
        return failure(e)
    except ConformanceError as e:
        return failure(e, UsageError.__name__)


def record(request: Request) -> dict[str, Any]:
    """Record a case and write it to its file.

    Raises:
        ConformanceError: the library is absent or of another layout, the model cannot be loaded, the plan not played.
    """
    library = Llama(request.lib)
    library.start(last_words)
    tensors: list[Tensor] = []

    def weight(t: Tensor, pointer: int) -> None:
        tensors.append(t)
        if request.output:
            library.set(pointer, make(recipe(request.stream, t), t))

    model = load_model(library, request, weight=weight)
    if not request.output:
        return {"weights": [[t.name, t.type.name, list(t.ne)] for t in tensors]}
    recorder = Recorder(library, whole=request.nodes)
    context = new_context(library, model, request, recorder.callback)
    steps: list[Step] = []

    def each(batch: Tokens) -> None:
        recorder.flush()
        steps.extend(noted([step(r) for r in recorder.graphs], batch))
        recorder.graphs.clear()

    Drive(library, model, context, request, begin=recorder.begin, each=each).run(request.plan)
    provenance = {
        **request.provenance,
        "source": f"{library.path.name.split('.')[0]} ggml {library.version}",
        "arithmetic": GGML_CPU.name,
    }
    case = Case(
        request.id,
        recorder.persistent,
        steps,
        family=request.family,
        params=request.params,
        seed=request.seed,
        tolerance=dict(TOLERANCE),
        provenance=provenance,
    )
    if request.recipes:
        case.recipes = {t: recipe(request.stream, t) for t in recorder.is_weight if t.type.name in MAKEABLE}
    if request.by_reference:
        held = {t: recorder.persistent[t] for t in recorder.is_weight}
        case.references = references(Path(request.model), held)
    casefile.write(Path(request.output), case)
    return {}


def last_words(message: bytes) -> None:
    """Write what ggml says before it ends the process, on a line of its own."""
    os.write(2, b"\n" + message + b"\n")


def noted(steps: list[Step], batch: Tokens) -> list[Step]:
    """The steps of a batch, each with its own tokens: found by what its inputs say; a step without tokens has none."""
    left = batch.rows()
    for s in steps:
        given = {t.name: data.view(np.int32) for t, data in s.inputs.items() if t.name in {"inp_tokens", "inp_pos"}}
        rows = []
        for token, pos in zip(given.get("inp_tokens", ()), given.get("inp_pos", ()), strict=False):
            row = next((r for r in left if r[0] == token and r[1] == pos), None)
            if row is not None:
                left.remove(row)
                rows.append(row)
        s.note = {"tokens": batch.rows() if len(steps) == 1 else rows}
    return steps


if __name__ == "__main__":
    main()
