"""The service of llama.cpp's processes, which a wrong metadata key or a device may end. Its requests, by their fields:

`record` (`capture.Request`'s fields): a case is written to the file that it names; without one the reply lists the
model's weights. `load` (the same) and `device` ("" for the CPU alone): a model to play on, as a user runs it. `run` (a
number i), `changes` (what differs from the request loaded), `folder`, and `watch`, null or `{"forced": file or null,
"values": bool}`: the plan is played; graphs run whole, on the devices that llama.cpp chose, and without a callback
unless `recorder.Watch` looks at what routers choose. The reply `{"batches": n, "notes": {…}, "spoilt": text}` comes
with `folder/i.npz` (an array of results per batch) and, where watched, `folder/choices-i.npz`; or it is
`{"failed": text, "complaints": […], "notes": {…}}`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.case.recipe import MAKEABLE, make
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import Tensor
from conformance.process.service import Frame, Service, failure

from . import choices
from .capture import Request
from .drive import Drive, Tokens, load_model, new_context
from .model import recipe
from .recorder import Recorder, Watch, references, step

TOLERANCE = {"nmse": 5e-4}
"""What a free run may differ by from a recording in ggml's arithmetic."""
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
    players: list[Player] = []

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            if "run" in header:
                return players[-1].reply(header), ()
            if "load" in header:
                players.append(Player(Request(**header["load"]), header["device"]))
                return {}, ()
            return record(Request(**header["record"])), ()
        except UnavailableError as e:
            return failure(e)
        except ConformanceError as e:
            return failure(e, UsageError.__name__)

    Service().serve(answer)
    os._exit(0)  # a library's own clean-up proves nothing, and there is nothing to save


def record(request: Request) -> dict[str, Any]:
    """Record a case and write it to its file.

    Raises:
        ConformanceError: the library is absent or of another layout, the model cannot be loaded, the plan not played.
    """
    library = Llama(request.lib)
    library.initialise(last_words)
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
        self._request = request
        self.notes: dict[str, int] = {}
        """Nodes and splits of the last context's graph, as llama.cpp says them."""
        self.library.initialise(last_words)

        def weight(t: Tensor, pointer: int) -> None:
            self.library.set(pointer, make(recipe(request.stream, t), t))

        self.model = load_model(self.library, request, device, weight)

    def reply(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to the request for a run."""
        try:
            return self.play(replace(self._request, **run["changes"]), Path(run["folder"]), run["run"], run["watch"])
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
