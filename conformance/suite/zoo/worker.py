"""A service that records one case with llama.cpp: a wrong metadata key ends its process.

The request has the fields of `Request`; the case is written to the file that it names.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.case.recipe import MAKEABLE, make
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import TYPES
from conformance.process.service import Frame, Service, failure

from . import weights
from .drive import Drive, Tokens
from .layout import ABORT_CALLBACK, SET_TENSOR_DATA, TENSOR, ContextParams, GgufInitParams
from .library import Library
from .model_weights import references
from .recorder import Recorder, step
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
    library = Library(request.lib)
    abort = ABORT_CALLBACK(lambda message: os.write(2, b"\n" + (message or b"") + b"\n") and None)
    library.c.ggml_set_abort_callback(abort)
    library.c.llama_backend_init()
    model, tensors = _model(library, request)
    if not request.output:
        return {"weights": [[t.name, t.type.name, list(t.ne)] for t in tensors]}
    recorder = Recorder(library, whole=request.nodes)
    context = _context(library, model, request, recorder)
    steps: list[Step] = []

    def each(batch: Tokens) -> None:
        recorder.flush()
        steps.extend(noted([step(r) for r in recorder.graphs], batch))
        recorder.graphs.clear()

    drive = Drive(
        library,
        model,
        context,
        n_seq_max=request.n_seq_max,
        unified=request.unified,
        n_ubatch=request.n_ubatch,
        stream=request.stream,
        begin=recorder.begin,
        each=each,
    )
    drive.run(request.plan)
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
        case.recipes = {t: weights.recipe(request.stream, t) for t in recorder.is_weight if t.type.name in MAKEABLE}
    if request.by_reference:
        held = {t: recorder.persistent[t] for t in recorder.is_weight}
        case.references = references(Path(request.model), held)
    casefile.write(Path(request.output), case)
    return {}


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


def _model(library: Library, request: Request) -> tuple[int, list[Tensor]]:
    c = library.c
    params = c.llama_model_default_params()
    params.use_extra_bufts = 0  # weights as they are, not repacked
    params.n_gpu_layers = 0
    # The CPU alone: beside another device the callback would see a scheduler's split graph.
    nobody = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.cast(nobody, ctypes.c_void_p)
    tensors: list[Tensor] = []
    errors: list[ConformanceError] = []

    def set_data(pointer: int, _data: int | None) -> None:
        try:
            raw = TENSOR.unpack(ctypes.string_at(pointer, TENSOR.size))
            name = raw[41].split(b"\0", 1)[0].decode(errors="replace")
            t = Tensor(library.types[raw[0]], raw[2:6], raw[6:10], name=name)
            tensors.append(t)
            if request.output:
                data = make(weights.recipe(request.stream, t), t)
                c.ggml_backend_tensor_set(pointer, data.ctypes.data, 0, data.nbytes)
        except ConformanceError as e:
            errors.append(e)

    if not request.from_file:
        metadata = c.gguf_init_from_file(os.fsencode(request.model), GgufInitParams(True, None))
        if not metadata:
            raise UsageError(f"{request.model}: llama.cpp cannot read this metadata: {said(library)}")
        model = c.llama_model_init_from_user(metadata, SET_TENSOR_DATA(set_data), None, params)
    else:
        model = c.llama_model_load_from_file(os.fsencode(request.model), params)
    if errors:
        raise errors[0]
    if not model:
        raise UsageError(f"llama.cpp cannot load the model: {said(library)}")
    return model, tensors


def _context(library: Library, model: int, request: Request, recorder: Recorder) -> int:
    c = library.c
    params: ContextParams = c.llama_context_default_params()
    params.n_ctx = request.n_ctx * (1 if request.unified else request.n_seq_max)
    params.n_batch = params.n_ctx
    params.n_ubatch = min(request.n_ubatch, params.n_ctx)
    params.n_seq_max = request.n_seq_max
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = int(request.flash_attn)
    params.type_k, params.type_v = TYPES[request.type_k].id, TYPES[request.type_v].id
    params.kv_unified = int(request.unified)
    params.swa_full = int(request.swa_full)
    params.embeddings = int(request.embeddings)
    params.cb_eval = ctypes.cast(recorder.callback, ctypes.c_void_p)
    context = c.llama_init_from_model(model, params)
    if not context:
        raise UsageError(f"llama.cpp cannot make a context: {said(library)}")
    return int(context)


def said(library: Library) -> str:
    """What llama.cpp last complained of."""
    lines = [line for line in library.log if "rror" in line or "fail" in line or "nsupported" in line]
    return " / ".join(lines[-2:]) or " / ".join(list(library.log)[-2:]) or "it did not say why"


if __name__ == "__main__":
    main()
