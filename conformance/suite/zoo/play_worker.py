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
from conformance.ggml.errors import ConformanceError
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import Tensor
from conformance.process.service import Closed, Service, failure

from . import choices
from .drive import Drive, Tokens, load_model, new_context
from .model import recipe
from .recorder import Watch
from .request import Request
from .worker import last_words

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
        self.library = Llama(request.lib)
        self.notes: dict[str, int] = {}
        """Nodes and splits of the last context's graph, as llama.cpp says them."""
        self.library.start(last_words)

        def weight(t: Tensor, pointer: int) -> None:
            self.library.set(pointer, make(recipe(request.stream, t), t))

        self.model = load_model(self.library, request, device, weight)

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
        self.library.log.clear()
        self.notes = {}
        forced = choices.load(Path(watch["forced"])) if watch and watch["forced"] else None
        looker = Watch(self.library, forced, values=watch["values"]) if watch else None
        context = new_context(self.library, self.model, request, looker.callback if looker else None)
        sizes = [m for line in self.library.log if (m := _SIZE.search(line))]
        self.notes = {"nodes": int(sizes[-1][1]), "splits": int(sizes[-1][2])} if sizes else {}
        results: list[F32] = []

        def each(batch: Tokens) -> None:
            results.append(self._results(context, batch, request))
            if looker:
                looker.batch = len(results)

        Drive(self.library, self.model, context, request, each=each).run(request.plan)
        np.savez(folder / f"{number}.npz", *results)
        self.library.llama.free(context)
        if looker:
            choices.save(folder / f"choices-{number}.npz", looker.choices)
        return {"batches": len(results), "notes": self.notes, "spoilt": looker.spoilt if looker else ""}

    def complaints(self) -> list[str]:
        """What the libraries last said went wrong, without what llama.cpp says of every failure."""
        lines = [" ".join(text.split()) for text in self.library.log]
        return [t[:LONGEST] for t in lines if _COMPLAINT.search(t) and not _NOISE.search(t)][-2:]

    def _results(self, context: int, batch: Tokens, request: Request) -> F32:
        """Logits, or embeddings, of every token that wants them, in order: `[tokens, n]`."""
        llama = self.library.llama
        wanted = np.flatnonzero(batch.outputs).tolist()
        if request.embeddings:
            n = llama.model_n_embd(self.model)
            if llama.pooling_type(context) > 0:
                at = [llama.get_embeddings_seq(context, s) for s in sorted(set(batch.seqs.tolist()))]
            else:
                at = [llama.get_embeddings_ith(context, i) for i in wanted]
        else:
            n = llama.vocab_n_tokens(llama.model_get_vocab(self.model))
            at = [llama.get_logits_ith(context, i) for i in wanted]
        rows = [np.frombuffer(ctypes.string_at(p, 4 * n), np.float32) for p in at if p]
        return np.stack(rows) if rows else np.zeros((0, n), np.float32)


if __name__ == "__main__":
    main()
