"""One model on one device in a process of its own, as a user runs it: `python -m conformance.suite.zoo.play_worker`.

Nothing is recorded and no callback is set, so graphs run whole, on the devices that llama.cpp chose; but where `watch`
is asked for, `choices.Watch` looks at what the run chooses. Standard input has one JSON object: `request` (`Request`'s
fields), `device` ("" for the CPU alone), `runs` (a list of what differs from the request), `folder`, and `watch`: null,
or `{"forced": file or null, "values": bool}`; choices are then written to `folder/choices-i.npz`. Each run is answered
with a line of JSON: `{"run": i, "batches": n, "notes": {…}, "spoilt": text}` beside `folder/i.npz` (one array of
results per batch), or `{"run": i, "error": text}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.recipe import make
from conformance.ggml.errors import ConformanceError
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import Tensor

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
    """Answer on what was standard output; whatever a library prints goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.loads(sys.stdin.read())
    request, folder = Request(**asked["request"]), Path(asked["folder"])
    try:
        player = Player(request, asked["device"])
    except ConformanceError as e:
        answer.write(json.dumps({"error": str(e)}) + "\n")
        answer.flush()
        os._exit(0)
    for i, changes in asked["runs"]:
        try:
            reply = player.play(replace(request, **changes), folder, i, asked.get("watch"))
        except ConformanceError as e:
            reply = {"error": str(e), "said": player.complaints(), "notes": player.notes}
        answer.write(json.dumps({"run": i, **reply}) + "\n")
        answer.flush()
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
        told = [" ".join(text.split()) for text in self.library.log]
        return [t[:LONGEST] for t in told if _COMPLAINT.search(t) and not _NOISE.search(t)][-2:]

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
    with contextlib.suppress(BrokenPipeError):
        main()
