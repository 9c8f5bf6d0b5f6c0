"""A service that runs one model on one device, as a user runs it.

Nothing is recorded and no callback is set, so graphs run whole, on the devices that llama.cpp chose; but where `watch`
is given, `choices.Watch` looks at what the run chooses.

The first request has `request` (`Request`'s fields) and `device` ("" for the CPU alone). Each later one is a run: `run`
(its number i), `changes` (what differs from the request), `folder`, and `watch`: null, or
`{"forced": file or null, "values": bool}`. Its reply `{"batches": n, "notes": {…}, "spoilt": text}` comes with
`folder/i.npz` (an array of results per batch) and, where watched, `folder/choices-i.npz`; or it is
`{"failed": text, "complaints": […], "notes": {…}}`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.recipe import make
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import TYPES
from conformance.process.service import Closed, Service, failure

from . import choices, weights
from .drive import Drive, Tokens
from .layout import ABORT_CALLBACK, SET_TENSOR_DATA, TENSOR, GgufInitParams
from .library import Library
from .request import Request
from .worker import said

ALL_LAYERS = 999
_SIZE = re.compile(r"graph: nodes = (\d+), splits = (\d+)")
_COMPLAINT = re.compile(r"xception|rror|[Ff]ailed|ASSERT|nsupported|Check '")
_NOISE = re.compile(
    r"^(llama_decode|llama_encode|decode|encode|process_ubatch): (failed|removing)|sched_graph_compute_async failed"
)
LONGEST = 700
"""Characters of one message that are kept."""
F32 = NDArray[np.float32]


def main() -> None:
    """Answer requests to their end."""
    service = Service()
    with suppress(Closed):
        header, _ = service.receive()
        request = Request(**header["request"])
        try:
            player = Player(request, header["device"])
        except ConformanceError as e:
            service.send(*failure(e))
        else:
            service.send({})
            service.serve(lambda run, _: (player.reply(request, run), ()))
    os._exit(0)  # a library's own clean-up proves nothing


class Player:
    """A model on a device.

    Args:
        request: which model.
        device: as `ggml_backend_dev_name` has it; "" for the CPU and nothing beside it.

    Raises:
        ConformanceError: there is no such library or device, or the model cannot be loaded.
    """

    def __init__(self, request: Request, device: str) -> None:
        self.library = library = Library(request.lib)
        self.notes: dict[str, int] = {}
        """Nodes and splits of the last context's graph, as llama.cpp says them."""
        c = library.c
        self._abort = ABORT_CALLBACK(lambda message: os.write(2, b"\n" + (message or b"") + b"\n") and None)
        c.ggml_set_abort_callback(self._abort)
        c.llama_backend_init()
        params = c.llama_model_default_params()
        chosen = c.ggml_backend_dev_by_name(device.encode()) if device else None
        if device and not chosen:
            raise UsageError(f"{library.title} has no device {device!r}")
        self._devices = (ctypes.c_void_p * 2)(chosen, None)
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.n_gpu_layers = ALL_LAYERS if device else 0
        if not device:
            params.use_extra_bufts = 0  # weights as they are, not repacked
        if request.from_file:
            self.model = c.llama_model_load_from_file(os.fsencode(request.model), params)
        else:
            metadata = c.gguf_init_from_file(os.fsencode(request.model), GgufInitParams(True, None))
            if not metadata:
                raise UsageError(f"{request.model}: llama.cpp cannot read this metadata: {said(library)}")
            self._request = request
            self.model = c.llama_model_init_from_user(metadata, SET_TENSOR_DATA(self._set_data), None, params)
        if not self.model:
            raise UsageError(f"llama.cpp cannot load the model: {said(library)}")

    def _set_data(self, pointer: int, _data: int | None) -> None:
        raw = TENSOR.unpack(ctypes.string_at(pointer, TENSOR.size))
        name = raw[41].split(b"\0", 1)[0].decode(errors="replace")
        t = Tensor(self.library.types[raw[0]], raw[2:6], raw[6:10], name=name)
        data = make(weights.recipe(self._request.stream, t), t)
        self.library.c.ggml_backend_tensor_set(pointer, data.ctypes.data, 0, data.nbytes)

    def reply(self, request: Request, run: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to the request for a run."""
        try:
            return self.play(replace(request, **run["changes"]), Path(run["folder"]), run["run"], run["watch"])
        except ConformanceError as e:
            return {"failed": str(e), "complaints": self.complaints(), "notes": self.notes}

    def play(self, request: Request, folder: Path, number: int, watch: dict[str, Any] | None) -> dict[str, Any]:
        """Play the request's plan on a context of its own and write what each batch gave, as run `number`.

        Raises:
            ConformanceError: no context can be made, or a part of the plan cannot be done.
        """
        c = self.library.c
        self.library.log.clear()
        self.notes = {}
        params = c.llama_context_default_params()
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
        forced = choices.load(Path(watch["forced"])) if watch and watch["forced"] else None
        looker = choices.Watch(self.library, forced, values=watch["values"]) if watch else None
        if looker:
            params.cb_eval = ctypes.cast(looker.callback, ctypes.c_void_p)
        context = c.llama_init_from_model(self.model, params)
        if not context:
            raise UsageError(f"llama.cpp cannot make a context: {said(self.library)}")
        sizes = [m for line in self.library.log if (m := _SIZE.search(line))]
        self.notes = {"nodes": int(sizes[-1][1]), "splits": int(sizes[-1][2])} if sizes else {}
        results: list[F32] = []

        def each(batch: Tokens) -> None:
            results.append(self._results(context, batch, request))
            if looker:
                looker.batch = len(results)

        drive = Drive(
            self.library,
            self.model,
            context,
            n_seq_max=request.n_seq_max,
            unified=request.unified,
            n_ubatch=request.n_ubatch,
            stream=request.stream,
            begin=lambda _: None,
            each=each,
        )
        drive.run(request.plan)
        np.savez(folder / f"{number}.npz", *results)
        c.llama_free(context)
        if looker:
            choices.save(folder / f"choices-{number}.npz", looker.choices)
        return {"batches": len(results), "notes": self.notes, "spoilt": looker.spoilt if looker else ""}

    def complaints(self) -> list[str]:
        """What the libraries last said went wrong, without what llama.cpp says of every failure."""
        lines = [" ".join(text.split()) for text in self.library.log]
        return [t[:LONGEST] for t in lines if _COMPLAINT.search(t) and not _NOISE.search(t)][-2:]

    def _results(self, context: int, batch: Tokens, request: Request) -> F32:
        """Logits, or embeddings, of every token that wants them, in order: `[tokens, n]`."""
        c = self.library.c
        wanted = np.flatnonzero(batch.outputs).tolist()
        if request.embeddings:
            n = c.llama_model_n_embd(self.model)
            if c.llama_pooling_type(context) > 0:
                at = [c.llama_get_embeddings_seq(context, s) for s in sorted(set(batch.seqs.tolist()))]
            else:
                at = [c.llama_get_embeddings_ith(context, i) for i in wanted]
        else:
            n = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
            at = [c.llama_get_logits_ith(context, i) for i in wanted]
        rows = [np.frombuffer(ctypes.string_at(p, 4 * n), np.float32) for p in at if p]
        return np.stack(rows) if rows else np.zeros((0, n), np.float32)


if __name__ == "__main__":
    main()
