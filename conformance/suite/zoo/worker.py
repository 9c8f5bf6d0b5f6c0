"""The service of llama.cpp's processes, which a wrong metadata key or a device may end. Its requests, by their fields:

`record` (`family.Request`'s fields): a case is written to the file that it names; without one the reply lists the
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.case.recipe import MAKEABLE, make
from conformance.case.streams import Stream
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.layout import SET_TENSOR_DATA, Batch, GgufInitParams
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import TYPES
from conformance.process.service import Frame, Service, failure
from conformance.suite.decoder.memory import Ubatch, split
from conformance.suite.plan import Part, parse

from .family import Request
from .model import recipe
from .recorder import Recorder, Watch, load_choices, references, save_choices, step

ALL_LAYERS = 999
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch: one entry per token."""

    tokens: I32
    pos: I32
    seqs: I32
    outputs: NDArray[np.int8]
    """Whether a token's logits are wanted."""

    def rows(self) -> list[list[int]]:
        """`[token, position, sequence, wants_logits]` of each token: the note of a step."""
        rows: list[list[int]] = np.stack([self.tokens, self.pos, self.seqs, self.outputs], axis=1).astype(int).tolist()
        return rows


def load_model(
    library: Llama, request: Request, device: str = "", weight: Callable[[Tensor, int], None] | None = None
) -> int:
    """The model of a request: a `llama_model *`.

    Args:
        library: llama.cpp.
        request: `model`, and `from_file`: with the file's own weights.
        device: as `ggml_backend_dev_name` has it; "" for the CPU and nothing beside it, where a callback would see a
            scheduler's split graph, and weights as they are, not repacked.
        weight: called with each weight and its address where the file has metadata alone, to set its bytes.

    Raises:
        UsageError: there is no such device, or llama.cpp cannot load the model.
        ConformanceError: what `weight` raised.
    """
    llama = library.llama
    params = llama.model_default_params()
    handle = library.ggml.backend_dev_by_name(device.encode()) if device else None
    if device and not handle:
        raise UsageError(f"{library.title} has no device {device!r}")
    devices = (ctypes.c_void_p * 2)(handle, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.n_gpu_layers = ALL_LAYERS if device else 0
    if not device:
        params.use_extra_bufts = 0
    errors: list[ConformanceError] = []

    def set_data(pointer: int, _data: int | None) -> None:
        try:
            if weight is not None:
                weight(library.leaf(pointer), pointer)
        except ConformanceError as e:
            errors.append(e)

    path = os.fsencode(request.model)
    if request.from_file:
        model = llama.model_load_from_file(path, params)
    else:
        metadata = library.gguf.init_from_file(path, GgufInitParams(True, None))
        if not metadata:
            raise UsageError(f"{request.model}: llama.cpp cannot read this metadata: {library.reason()}")
        model = llama.model_init_from_user(metadata, SET_TENSOR_DATA(set_data), None, params)
    if errors:
        raise errors[0]
    if not model:
        raise UsageError(f"llama.cpp cannot load the model: {library.reason()}")
    return int(model)


def new_context(library: Llama, model: int, request: Request, callback: Any = None) -> int:  # noqa: ANN401  # ctypes' own
    """A context as a request says: a `llama_context *`.

    Args:
        library: llama.cpp.
        model: `llama_model *`.
        request: sizes, types, flash attention and the like.
        callback: an `EVAL_CALLBACK`; whoever gives it keeps it alive.

    Raises:
        UsageError: llama.cpp cannot make it.
    """
    params = library.llama.context_default_params()
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
    if callback is not None:
        params.cb_eval = ctypes.cast(callback, ctypes.c_void_p)
    context = library.llama.init_from_model(model, params)
    if not context:
        raise UsageError(f"llama.cpp cannot make a context: {library.reason()}")
    return int(context)


class Drive:
    """Plays plans on one context.

    Args:
        library: llama.cpp.
        model: `llama_model *`.
        context: `llama_context *`.
        request: what the context was made of; all its sequences are active at first.
        begin: called before each batch with the name of the function that computes it.
        each: called after each batch.
    """

    def __init__(
        self,
        library: Llama,
        model: int,
        context: int,
        request: Request,
        *,
        begin: Callable[[str], None] = lambda _: None,
        each: Callable[[Tokens], None],
    ) -> None:
        self._library, self._c = library, library.llama
        self._context = context
        self._memory = self._c.get_memory(context)
        self._n_ctx = int(self._c.n_ctx(context))
        self._request = request
        self._begin, self._each = begin, each
        self._n_vocab = self._c.vocab_n_tokens(self._c.model_get_vocab(model))
        self._encodes = bool(self._c.model_has_encoder(model))
        self._decodes = bool(self._c.model_has_decoder(model))
        self._tokens = Stream(request.stream, "inp_tokens")
        self._next = [0] * request.n_seq_max
        """Sequence -> the position of its next token."""
        self.active = list(range(request.n_seq_max))

    def run(self, plan: str) -> None:
        """Play all parts.

        Raises:
            UsageError: names the part that cannot be done, with what llama.cpp said.
        """
        for part in parse(plan):
            _VERBS[part.verb](self, part)

    def decode(self, n_tokens: Sequence[int], *, every: bool = False) -> None:
        """Decode new tokens of the active sequences: `n_tokens` has one number for all, or one each."""
        if len(n_tokens) == 1:
            n_tokens = list(n_tokens) * len(self.active)
        if len(n_tokens) != len(self.active) or not sum(n_tokens):
            raise UsageError(f"run: one number of tokens, or {len(self.active)}, expected; {list(n_tokens)} found")
        seqs = np.repeat(np.array(self.active, np.int32), n_tokens)
        firsts = [self._next[s] for s in self.active]
        pos = np.concatenate([np.arange(p, p + n) for p, n in zip(firsts, n_tokens, strict=True)])
        outputs = np.full(len(seqs), int(every), np.int8)
        outputs[[end - 1 for end, n in zip(np.cumsum(n_tokens), n_tokens, strict=True) if n]] = 1
        tokens = self._tokens.integers(len(seqs), 0, self._n_vocab).astype(np.int32)
        self._want_results(seqs, outputs)
        batch = Tokens(tokens, pos.astype(np.int32), seqs, outputs)
        if self._encodes and not self._decodes:
            outputs[:] = 1
            self._call("encode", batch)
            self._each(batch)
            return
        if self._encodes and not any(self._next):
            self._call("encode", Tokens(tokens, batch.pos, seqs, np.ones_like(outputs)))
            self._each(batch)
        self._call("decode", batch)
        for s, n in zip(self.active, n_tokens, strict=True):
            self._next[s] += n
        self._each(batch)

    def _want_results(self, seqs: I32, outputs: NDArray[np.int8]) -> None:
        """Every graph has a result: where a batch is split, that of a part's last token if it would have none."""
        everyone = np.arange(len(seqs), dtype=np.int64)
        batch = Ubatch(everyone, everyone, seqs.astype(np.int64), outputs.astype(np.bool_))
        for part in split(batch, self._request.n_ubatch, unified=self._request.unified or self._request.n_seq_max == 1):
            if not part.outputs.any():
                outputs[part.tokens[-1]] = 1

    def _call(self, function: str, b: Tokens) -> None:
        self._begin(function)
        n = len(b.tokens)
        if n > self._n_ctx:
            raise UsageError(f"run: a batch of {n} tokens, where there are {self._n_ctx} cells; take a larger ctx")
        ids = np.ascontiguousarray(b.seqs)
        counts = np.ones(n, np.int32)
        pointers = (ids.ctypes.data + 4 * np.arange(n, dtype=np.uint64)).astype(np.uint64)
        arrays: list[NDArray[Any]] = [np.ascontiguousarray(a) for a in (b.tokens, b.pos, counts, pointers, b.outputs)]
        at = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        status = getattr(self._c, function)(self._context, Batch(n, at[0], None, at[1], at[2], at[3], at[4]))
        if status:
            log = " / ".join(line for line in list(self._library.log)[-3:] if line)
            raise UsageError(f"run: llama_{function} of {n} tokens returned {status}: {log}")

    def back(self, n: int) -> None:
        """Remove the last `n` tokens of every sequence."""
        for s in self.active:
            self._next[s] = max(0, self._next[s] - n)
            self._remove(s, self._next[s], -1)

    def shift(self, n: int) -> None:
        """Remove the first `n` tokens of every sequence and move the others up."""
        if not self._memory or not self._c.memory_can_shift(self._memory):
            raise UsageError("run: the memory of this architecture cannot shift positions")
        for s in self.active:
            self._remove(s, 0, n)
            self._c.memory_seq_add(self._memory, s, n, -1, -n)
            self._next[s] = max(0, self._next[s] - n)

    def remove(self, seq: int) -> None:
        """Remove a sequence; it takes no part any more."""
        self._forget(seq)
        self.active = [s for s in self.active if s != seq]
        if not self.active:
            raise UsageError(f"run: rm{seq} leaves no sequence")

    def add(self, seq: int) -> None:
        """Let a sequence take part (again), from position 0."""
        self._forget(seq)
        self.active = sorted({*self.active, seq})

    def share(self, seq: int) -> None:
        """Replace the tokens of all other active sequences by those of `seq`."""
        if not self._request.unified:
            raise UsageError("run: cp: sequences have a stream each, and llama.cpp copies bytes; take unified=1")
        for other in self.active:
            if other != seq:
                self._forget(other)
                self._c.memory_seq_cp(self._memory, seq, other, 0, self._next[seq])
                self._next[other] = self._next[seq]

    def reset(self) -> None:
        """Empty all cells; their bytes stay."""
        if self._memory:
            self._c.memory_clear(self._memory, False)  # C's signature
        self._next = [0] * self._request.n_seq_max

    def _forget(self, seq: int) -> None:
        if seq >= self._request.n_seq_max:
            raise UsageError(f"run: sequence {seq} of {self._request.n_seq_max} is unknown")
        self._remove(seq, 0, -1)
        self._next[seq] = 0

    def _remove(self, seq: int, p0: int, p1: int) -> None:
        if self._memory and not self._c.memory_seq_rm(self._memory, seq, p0, p1):
            raise UsageError(f"run: the memory of this architecture cannot forget positions {p0} to {p1} of a sequence")


def _start(_drive: Drive, part: Part) -> None:
    raise UsageError(f"run: {part}: llama.cpp cannot start with made-up caches; decode a prompt first")


def _singles(drive: Drive, part: Part) -> None:
    for _ in range(part.number):
        drive.decode([1])


_VERBS: dict[str, Callable[[Drive, Part], None]] = {
    "at": _start,
    "p": lambda d, p: d.decode(p.numbers),
    "o": lambda d, p: d.decode(p.numbers, every=True),
    "d": _singles,
    "back": lambda d, p: d.back(p.number),
    "shift": lambda d, p: d.shift(p.number),
    "rm": lambda d, p: d.remove(p.number),
    "add": lambda d, p: d.add(p.number),
    "cp": lambda d, p: d.share(p.number),
    "reset": lambda d, _: d.reset(),
}


TOLERANCE = {"nmse": 5e-4}
"""Tolerance of a free run against a recording in ggml's arithmetic."""
_SIZE = re.compile(r"graph: nodes = (\d+), splits = (\d+)")
_COMPLAINT = re.compile(r"xception|rror|[Ff]ailed|ASSERT|nsupported|Check '")
_NOISE = re.compile(
    r"^(llama_decode|llama_encode|decode|encode|process_ubatch): (failed|removing)|sched_graph_compute_async failed"
)
LONGEST = 700
"""Characters of one message."""
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
        steps.extend(with_tokens([step(r) for r in recorder.graphs], batch))
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
        weights = {t: recorder.persistent[t] for t in recorder.is_weight}
        case.references = references(Path(request.model), weights)
    casefile.write(Path(request.output), case)
    return {}


def last_words(message: bytes) -> None:
    """Write what ggml says before it ends the process, on a line of its own."""
    os.write(2, b"\n" + message + b"\n")


def with_tokens(steps: list[Step], batch: Tokens) -> list[Step]:
    """Note in each step of a batch its own tokens, as its inputs tell; a step without tokens has none."""
    left = batch.rows()
    for s in steps:
        inputs = {t.name: data.view(np.int32) for t, data in s.inputs.items() if t.name in {"inp_tokens", "inp_pos"}}
        rows = []
        for token, pos in zip(inputs.get("inp_tokens", ()), inputs.get("inp_pos", ()), strict=False):
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
        """Nodes and splits of the last context's graph, from llama.cpp's log."""
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
        forced = load_choices(Path(watch["forced"])) if watch and watch["forced"] else None
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
            save_choices(folder / f"choices-{number}.npz", looker.choices)
        return {"batches": len(results), "notes": self.notes, "spoilt": looker.spoilt if looker else ""}

    def complaints(self) -> list[str]:
        """The last errors of the log, without llama.cpp's own line about every failure."""
        lines = [" ".join(text.split()) for text in self.library.log]
        return [t[:LONGEST] for t in lines if _COMPLAINT.search(t) and not _NOISE.search(t)][-2:]

    def _results(self, context: int, batch: Tokens, request: Request) -> F32:
        """Logits, or embeddings, of every token that wants them, in order: `[tokens, n]`."""
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


if __name__ == "__main__":
    main()
