"""The service that runs llama.cpp with a model on a device, which may crash the process.

Its requests, by their fields:

`load` (the fields of `llama.zoo.family.Request`), `device` ("" for the CPU alone) and `rpc` (as of a `Device`): load a
model, as a user would; `placed` of the reply has the nodes of a graph, device -> op -> count. Each later request has
`changes`, the fields of the request that it sets:

- `run`, the file to write, and `watch`, null or `{"forced": file or null, "values": bool}`: run the plan; graphs run
  as a whole on the devices that llama.cpp chose, without a callback unless `recorder.Watch` records router choices. The
  reply is `{"notes": {...}, "spoilt": text}`; the file has an array of results per batch, and `choices-FILE` the
  choices of a watched run.
- `scenario` (a name of `scenarios.table`), `part` and `folder`: run a part of the scenario. The reply is `{"more":
  bool, "comparisons": [...]}`, with `folder/SCENARIO.npz`. `nudge`, if present, has the arguments of
  `Harness.nudged`: run it on such a copy of the model.
- `settings` (two of them, the fields of `scenarios.settings.Setting`) and `folder`: compare them. The reply is that
  of a scenario, with `folder/settings.npz`; with `limit` it is `{"first": null or the fields of `Divergence`}`.
  With `choices` the first setting uses the experts of the second; the reply has `notes` and `wrong` of `with_choices`.

Both may reply `{"unsupported": text}` or `{"failed": text, "complaints": [...]}`. `memory` (the fields of a request),
`grows`, `device` and `rpc`: the reply is that of `held.measure`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.echo import ECHO
from conformance.ggml.lib.llama import Llama
from conformance.ggml.lib.rpc import attach
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import EVENLY, LacksError, RefusedError, Split, UnloadableError, new_context
from conformance.llama.zoo.recorder import Watch, load_choices, save_choices
from conformance.llama.zoo.worker import Drive, last_words
from conformance.process.service import Frame, Service, failure
from conformance.suite.decoder.memory import Ubatch

from .comparison import Comparison
from .held import measure
from .placement import Placed, placed
from .scenarios.harness import Harness, Together, in_threads, load
from .scenarios.settings import Setting, compare, first_difference, with_choices
from .scenarios.table import SCENARIOS

_SIZE = re.compile(r"graph: nodes = (\d+), splits = (\d+)")
_COMPLAINT = re.compile(r"xception|rror|[Ff]ailed|ASSERT|nsupported|Check '")
_NOISE = re.compile(
    r"^(llama_decode|llama_encode|decode|encode|process_ubatch): (failed|removing)|sched_graph_compute_async failed"
)
LONGEST = 700
"""Maximum characters of one message."""
F32 = NDArray[np.float32]


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    models: list[DeviceModel] = []
    answers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "run": lambda header: models[-1].reply(header),  # noqa: PLW0108  # the last one of then
        "scenario": lambda header: models[-1].scenario(header),  # noqa: PLW0108  # as above
        "settings": lambda header: models[-1].settings(header),  # noqa: PLW0108  # as above
        "load": lambda header: _load(models, header),
        "memory": _memory,
    }

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            return next(answer_to(header) for name, answer_to in answers.items() if name in header), ()
        except UnavailableError as e:
            return failure(e)
        except ConformanceError as e:
            return failure(e, UsageError.__name__)

    service, ECHO.on = Service(), True
    service.serve(answer)
    os._exit(0)  # a library's own clean-up proves nothing, and there is nothing to save


def _load(models: list[DeviceModel], header: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = open_model(Request(**header["load"]), header["device"], header["rpc"])
    except (LacksError, RefusedError) as e:
        return {"unsupported": str(e)}
    models.append(model)
    devices = map(model.library.devices.by_name, filter(None, model.device.split("+")))
    return {"emulated": any(device.software for device in devices), "placed": model.placed()}


def _memory(header: Mapping[str, Any]) -> dict[str, Any]:
    request = Request(**header["memory"])
    library = Llama(request.lib)
    library.initialise(last_words)
    attach(library, header["rpc"])
    return measure(library, request, header["device"], grows=header["grows"])


class DeviceModel:
    """A model on a device ("" for the CPU alone), which may be behind an RPC server.

    Several devices, joined by `+`, share it as `split` says.

    Raises:
        ConformanceError: there is no such library or device, or the model cannot be loaded.
    """

    def __init__(self, request: Request, device: str, rpc: str = "", split: Split = EVENLY) -> None:
        self.library = Llama(request.lib)
        self._request = request
        self.library.initialise(last_words)
        self._server = attach(self.library, rpc)

        self.device = device
        self.model = load(self.library, request, device, split)

    def placed(self) -> Placed:
        """Return the nodes of a graph by device and op; none on the CPU, or without a context."""
        with suppress(ConformanceError):
            return {} if self.device in ("", "CPU") else placed(self.library, self.model, self._request)
        return {}

    def reply(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request for a run."""
        try:
            return self._run(replace(self._request, **ask["changes"]), Path(ask["run"]), ask["watch"])
        except ConformanceError as e:
            return {"failed": str(e), "complaints": self.complaints()}

    def scenario(self, ask: Mapping[str, Any], together: Together = in_threads) -> dict[str, Any]:
        """Answer a request for a part of a scenario; `together` calls functions in threads."""
        it = SCENARIOS[ask["scenario"]]

        def run(harness: Harness) -> dict[str, Any]:
            if harness.kind not in it.kinds:
                return {"unsupported": f"does not apply to a model of kind {harness.kind}"}
            played = harness.nudged(**ask["nudge"]) if "nudge" in ask else harness
            reply = _compared(list(it.play(played)), harness.folder / f"{it.name}.npz")
            return {"more": it.parts > ask["part"] + 1, **reply}

        return self._with_harness(ask, run, together)

    def settings(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request to compare two settings, or to name the first node in which they differ."""
        two = [Setting(**each) for each in ask["settings"]]

        def run(harness: Harness) -> dict[str, Any]:
            if "limit" in ask:
                first = first_difference(harness, two, ask["limit"])
                return {"first": first and asdict(first)}
            file = harness.folder / "settings.npz"
            if "choices" in ask:
                comparisons, notes, wrong = with_choices(harness, two)
                return {"notes": notes, "wrong": wrong, **_compared(comparisons, file)}
            played = harness.nudged(**ask["nudge"]) if "nudge" in ask else harness
            return _compared(list(compare(played, two)), file)

        return self._with_harness(ask, run)

    def _with_harness(
        self, ask: Mapping[str, Any], run: Callable[[Harness], dict[str, Any]], together: Together = in_threads
    ) -> dict[str, Any]:
        """Return the reply of `run`, or why there is none."""
        self.library.log.lines.clear()
        request = replace(self._request, **ask["changes"])
        folder, part = Path(ask["folder"]), ask.get("part", 0)
        harness = Harness(self.library, self.model, request, folder, part, self.device, together)
        try:
            with harness.clean():
                return run(harness)
        except LacksError as e:
            return {"unsupported": str(e)}
        except RefusedError as e:
            return {"unsupported": f"refused: {e}"}
        except ConformanceError as e:
            return {"failed": str(e), "complaints": self.complaints()}

    def _run(self, request: Request, file: Path, watch: dict[str, Any] | None) -> dict[str, Any]:
        """Run the request's plan on a new context and write the results of each batch.

        Raises:
            ConformanceError: no context can be made, or a part of the plan fails.
        """
        self.library.log.lines.clear()
        forced = load_choices(Path(watch["forced"])) if watch and watch["forced"] else None
        looker = Watch(self.library, forced, values=watch["values"]) if watch else None
        context = new_context(self.library, self.model, request, looker.callback if looker else None)
        sizes = [m for line in self.library.log.lines if (m := _SIZE.search(line))]
        notes = {"nodes": int(sizes[-1][1]), "splits": int(sizes[-1][2])} if sizes else {}
        results: list[F32] = []

        def each(batch: Ubatch) -> None:
            results.append(self._results(context, batch, request))
            if looker:
                looker.batch = len(results)

        try:
            Drive(self.library, self.model, context, request, each=each).run(request.plan)
        finally:
            self.library.llama.free(context)
        np.savez(file, *results)
        if looker:
            save_choices(file.with_name(f"choices-{file.name}"), looker.choices)
        return {"notes": notes, "spoilt": looker.spoilt if looker else ""}

    def free(self) -> None:
        """Free the model; LacksError if this library cannot."""
        if self.library.llama.model_free is None:
            raise LacksError("llama_model_free")
        self.library.llama.model_free(self.model)

    def complaints(self) -> list[str]:
        """Return the last errors of the log, without the generic line that llama.cpp always adds."""
        lines = [" ".join(text.split()) for text in self.library.log.lines]
        return [t[:LONGEST] for t in lines if _COMPLAINT.search(t) and not _NOISE.search(t)][-2:]

    def _results(self, context: int, batch: Ubatch, request: Request) -> F32:
        """Return logits or embeddings, `[tokens, n]`, of tokens that request output."""
        llama = self.library.llama
        tokens = np.flatnonzero(batch.outputs).tolist()
        if request.embeddings:
            n = llama.model_n_embd(self.model)
            if llama.pooling_type(context) > 0:
                at = [llama.get_embeddings_seq(context, s) for s in sorted(set(batch.seqs.tolist()))]
            else:
                at = [llama.get_embeddings_ith(context, i) for i in tokens]
        else:
            n = llama.vocab_n_tokens(llama.model_get_vocab(self.model))
            at = [llama.get_logits_ith(context, i) for i in tokens]
        rows = [np.frombuffer(ctypes.string_at(p, 4 * n), np.float32) for p in at if p]
        return np.stack(rows) if rows else np.zeros((0, n), np.float32)


def _compared(comparisons: Sequence[Comparison], file: Path) -> dict[str, Any]:
    """Return the reply that describes comparisons, and write their values to a file."""
    arrays = {f"{k}{i}": getattr(p, k) for i, p in enumerate(comparisons) for k in ("actual", "expected")}
    np.savez(file, **arrays)
    return {"comparisons": [p.record() for p in comparisons]}


def open_model(request: Request, device: str, rpc: str = "", split: Split = EVENLY) -> DeviceModel:
    """Load a generated model on a device.

    Raises:
        RefusedError: this library does not load it on the CPU alone either, so the model does not fit the library.
        ConformanceError: as `DeviceModel`.
    """
    try:
        return DeviceModel(request, device, rpc, split)
    except UnloadableError as e:
        if device:
            try:
                DeviceModel(request, "").free()
            except UnloadableError:
                pass
            else:
                raise
        raise RefusedError(f"no model: {e}") from None


if __name__ == "__main__":
    main()
