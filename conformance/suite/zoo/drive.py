"""llama.cpp at work: a model, a context, and a plan played on it by `llama_decode` and `llama_memory_seq_*`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.lib.layout import SET_TENSOR_DATA, Batch, GgufInitParams
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import TYPES
from conformance.suite.decoder.memory import Ubatch, split
from conformance.suite.plan import Part, parse

from .capture import Request

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
