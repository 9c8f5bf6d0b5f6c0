"""The harness of API scenarios: a loaded model, and contexts on it with their calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from conformance.case.recipe import make
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.layout import Batch
from conformance.ggml.lib.llama import Llama
from conformance.ggml.quants import roundtrip
from conformance.ggml.tensor import Bytes, Tensor, new_tensor
from conformance.ggml.types import TYPES
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import EVENLY, LacksError, RefusedError, Split, load_model, new_context
from conformance.llama.zoo.model import open_writer, recipe, write_tensors

F32 = NDArray[np.float32]
Tokens = NDArray[np.int64]
Kind = Literal["attention", "recurrent", "hybrid", "encoder", "encoder-decoder"]
"""Memory of a model: KV cache, states, both, none, or KV cache and encoder output.

Models without memory give embeddings, or logits if they are diffusion models."""
Seqs: TypeAlias = "int | tuple[int, ...]"
"""A sequence, or several that share tokens."""
MROPE = (8, 40)
"""`LLAMA_ROPE_TYPE_MROPE` and `IMROPE`: a position has four parts."""
PROMPT, AFTER = 13, 3
"""Tokens of a default prompt, and steps after it."""

NUDGE = 4
"""Units in the last place, as many as sums of one product in two orders differ by."""


Together = Callable[[Sequence[Callable[[], F32]]], list[F32]]
"""Calls functions in a thread each and returns their results."""
AMPLIFIED = 4.0
"""Allowed ratio of the NMSE of logits to the NMSE of rounded keys."""


def by_rounding(noise: float) -> str:
    """Describe how `Harness.nudged` changes a model."""
    more = f" and noise of NMSE {noise:.2g}" if noise else ""
    return f"norm weights changed by up to {NUDGE} units in the last place{more}"


@cache
def rounding(name: str) -> float:
    """Return the NMSE of normal values after a round trip through a type."""
    x = Stream("rounding", name).normal(1 << 14, 1.0, 0.0).astype(np.float32).reshape(-1, 256)
    lost = (roundtrip(TYPES[name], x).astype(np.float64) - x) ** 2
    return float(lost.sum() / (x.astype(np.float64) ** 2).sum())


def in_threads(functions: Sequence[Callable[[], F32]]) -> list[F32]:
    """Call functions in a thread each; raises as the first that does."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]


def load(library: Llama, request: Request, device: str, split: Split = EVENLY) -> int:
    """Return the `llama_model *` of a generated model; raises as `load_model`."""

    def weight(t: Tensor, pointer: int) -> None:
        library.set(pointer, make(recipe(request.stream, t), t))

    return load_model(library, request, device, weight, split=split)


@dataclass
class Harness:
    """A model and the state that scenarios share."""

    library: Llama
    model: int
    """`llama_model *`."""
    request: Request
    folder: Path
    part: int = 0
    """Index of this process among the scenario's parts."""
    device: str = ""
    """Name of the device, or of several joined by `+`; "" for the CPU alone."""
    together: Together = in_threads
    contexts: list[int] = field(default_factory=list)
    """`llama_context *` of each context; freed by `clean`."""
    models: list[int] = field(default_factory=list)
    """`llama_model *` of models loaded beside this one; freed by `clean`."""

    @cached_property
    def kind(self) -> Kind:
        """The model's memory."""
        if self.request.embeddings or not self._remembers():
            return "encoder"
        if self.call("model_has_encoder")(self.model):
            return "encoder-decoder"
        if self.call("model_is_recurrent")(self.model):
            return "recurrent"
        is_hybrid = self.library.llama.model_is_hybrid  # absent before b6400 or so
        return "hybrid" if is_hybrid and is_hybrid(self.model) else "attention"

    def _remembers(self) -> bool:
        """Return True if a context has a memory; encoders and diffusion models have none."""
        context = new_context(self.library, self.model, replace(self.request, n_seq_max=1))
        try:
            return bool(self.call("get_memory")(context))
        finally:
            self.library.llama.free(context)

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary."""
        return int(self.call("vocab_n_tokens")(self.call("model_get_vocab")(self.model)))

    @property
    def n_embd(self) -> int:
        """Number of elements of a row between layers."""
        return int(self.call("model_n_embd")(self.model))

    @cached_property
    def keeps_order(self) -> bool:
        """True if a loaded state has the cells of the saved one.

        States omit cells that no window reaches.
        """
        fields = GGUFReader(self.request.model).fields.items()
        windows = [int(f.contents()) for name, f in fields if name.endswith("attention.sliding_window")]
        return min(windows, default=PROMPT + AFTER) >= PROMPT + AFTER

    def larger(self, times: int, **changes: Any) -> Context:  # noqa: ANN401  # as of `context`
        """Make a context with more cells; RefusedError if that changes the model itself."""
        if any("rope_factors_long" in t.name for t in GGUFReader(self.request.model).tensors):
            raise RefusedError("the rotations of this model depend on the number of cells")
        return self.context(n_ctx=times * self.request.n_ctx, **changes)

    def turned(self, times: int) -> float:
        """Return the extra NMSE for keys that were read, rotated and stored `times` times."""
        return times * AMPLIFIED * rounding(self.request.type_k)

    def call(self, name: str) -> Callable[..., Any]:
        """Return `llama_NAME`; LacksError if this library does not export it."""
        function: Callable[..., Any] | None = getattr(self.library.llama, name)
        if function is None:
            raise LacksError(f"llama_{name}")
        return function

    def tokens(self, n: int, name: str = "prompt") -> Tokens:
        """Return `n` tokens, the same ones for each name."""
        return Stream(self.request.stream, f"verb {name}").integers(n, 0, self.n_vocab)

    def context(
        self,
        n_seq_max: int = 1,
        *,
        unified: bool | None = None,
        more: Mapping[str, object] | None = None,
        callback: Any = None,  # noqa: ANN401  # ctypes' own
        **changes: Any,  # noqa: ANN401  # fields of a request
    ) -> Context:
        """Make a context; `changes` are fields of `Request`, `more` of `llama_context_params`.

        The caller keeps `callback`, an `EVAL_CALLBACK`, alive.

        `unified`: all sequences share one stream of cells; default: one stream each if the architecture allows it.
        RefusedError if the architecture cannot have `unified=False`.
        """
        if unified is False and self.request.unified:
            raise RefusedError("this architecture runs in one stream of cells only")
        one = self.request.unified if unified is None else unified
        request = replace(self.request, **{"n_seq_max": n_seq_max, "unified": one, **changes})
        pointer = new_context(self.library, self.model, request, callback, more)
        self.contexts.append(pointer)
        return Context(self, pointer, request)

    def another(self, path: Path | None = None, device: str | None = None, split: Split = EVENLY) -> Harness:
        """Load another model, by default the same one, on other devices.

        `clean` of either harness frees its contexts.

        Raises:
            LacksError: this library cannot free a model.
            UsageError: llama.cpp cannot load it.
        """
        self.call("model_free")
        request = self.request if path is None else replace(self.request, model=str(path))
        model = load(self.library, request, self.device if device is None else device, split)
        self.models.append(model)
        return replace(self, model=model, request=request)

    def rewrite(self, name: str, data: Callable[[Tensor, Bytes], Bytes | None]) -> Path:
        """Write the model's file with other weights.

        `data` returns a weight's bytes, None to leave it out.

        RefusedError if the file holds no weights.
        """
        reader = GGUFReader(self.request.model)
        if not self.request.from_file or not reader.tensors:
            raise RefusedError("the model's file holds no weights: the scenario needs real=1")
        by_id = {t.id: t for t in TYPES.values()}
        held = {t.name: np.ascontiguousarray(t.data).view(np.uint8).reshape(-1) for t in reader.tensors}
        tensors = [new_tensor(by_id[int(t.tensor_type)], *map(int, t.shape), name=t.name) for t in reader.tensors]
        new = {t.name: bytes_ for t in tensors if (bytes_ := data(t, held[t.name])) is not None}
        path = self.folder / f"{name}.gguf"
        keys = self.request.provenance["keys"]
        writer = open_writer(path, str(self.request.params["arch"]), keys)
        write_tensors(writer, [t for t in tensors if t.name in new], lambda t: new[t.name])
        return path

    def nudged(self, draw: int, noise: float = 0.0) -> Harness:
        """Load a copy whose norm weights differ by up to `NUDGE` units in the last place.

        With `draw` 0 none differs. `noise`: also by normal values of this NMSE. Raises as `rewrite` and `another`.
        """

        def data(t: Tensor, held: Bytes) -> Bytes:
            if not draw or t.type is not TYPES["f32"] or "norm" not in t.name:
                return held
            values = held.view(np.float32)
            units = Stream(self.request.stream, f"nudge {draw} {t.name}").integers(values.size, 0, 2 * NUDGE + 1)
            coarse = Stream(self.request.stream, f"noise {draw} {t.name}").normal(values.size, noise**0.5, 0.0)
            new = values * (1 + coarse) + (units - NUDGE) * np.spacing(values)
            return new.astype(np.float32).view(np.uint8)

        return self.another(self.rewrite("nudged", data))

    @contextmanager
    def clean(self) -> Iterator[None]:
        """Free all contexts and further models at the end of the block."""
        try:
            yield
        finally:
            while self.contexts:
                self.library.llama.free(self.contexts.pop())
            while self.models:
                self.library.llama.model_free(self.models.pop())


class Context:
    """One context and the next position of each sequence."""

    def __init__(self, harness: Harness, pointer: int, request: Request) -> None:
        self.harness, self.pointer, self.request = harness, pointer, request
        self.next = [0] * request.n_seq_max
        """Sequence -> position of its next token."""
        self.kind = harness.kind
        owned = harness.call("get_memory")(pointer) if self.kind != "encoder" else 0
        self.memory: int = owned or 0
        """`llama_memory_t`."""
        self.encode_source()

    def encode_source(self) -> None:
        """Encode a text for each sequence, if the model has an encoder beside its decoder."""
        if self.kind == "encoder-decoder":
            source = self.harness.tokens(7, "source")
            self.encode(*((seq, source) for seq in range(self.request.n_seq_max)))

    def feed(self, *spans: tuple[Seqs, Sequence[int] | Tokens | F32], every: bool = False) -> F32:
        """Decode (or encode) new tokens of sequences in one batch, each at its next position.

        A span's tokens may be embeddings, `[n, n_embd]`.

        Returns the logits, or embeddings, of each span's last token, or of every token.

        Raises:
            UsageError: llama.cpp returned an error.
        """
        encodes = self.kind == "encoder"
        self._run("encode" if encodes else "decode", spans, every=every or encodes or self.pooled)
        lengths = [len(values) for _, values in spans]
        n, ends = sum(lengths), np.cumsum(lengths) - 1
        if self.pooled:
            owners = sorted({s for seqs, _ in spans for s in (seqs if isinstance(seqs, tuple) else (seqs,))})
            return self.results("get_embeddings_seq", owners, self.harness.n_embd)
        at = list(range(n)) if every else ends.tolist()
        if self.request.embeddings:
            return self.results("get_embeddings_ith", at, self.harness.n_embd)
        return self.results("get_logits_ith", at, self.harness.n_vocab)

    def decode(self, *spans: tuple[Seqs, Sequence[int] | Tokens | F32]) -> None:
        """Decode (or encode) as `feed`, without waiting for the results."""
        encodes = self.kind == "encoder"
        self._run("encode" if encodes else "decode", spans, every=encodes)

    def encode(self, *spans: tuple[Seqs, Sequence[int] | Tokens | F32]) -> None:
        """Encode the texts of sequences in one batch, each from position 0; UsageError as `feed`."""
        self._run("encode", spans, every=True)

    def steps(self, seq: int = 0, n: int = AFTER, name: str = "after") -> F32:
        """Decode `n` tokens one by one, an encoder in one batch; return `[n, n_vocab]`."""
        tokens = self.harness.tokens(n, name)
        if self.kind == "encoder":
            return self.feed((seq, tokens))
        return np.concatenate([self.feed((seq, tokens[i : i + 1])) for i in range(n)])

    @property
    def pooled(self) -> bool:
        """True if a sequence has one result for all its tokens."""
        return self.request.embeddings and self.harness.call("pooling_type")(self.pointer) > 0

    def _run(self, function: str, spans: Sequence[tuple[Seqs, Any]], *, every: bool) -> None:
        ids = [s if isinstance(s, tuple) else (s,) for s, _ in spans]
        pos: list[int] = []
        outputs: list[bool] = []
        seqs: list[tuple[int, ...]] = []
        for owners, (_, values) in zip(ids, spans, strict=True):
            begin = self.next[owners[0]] if function == "decode" else 0
            pos += range(begin, begin + len(values))
            outputs += [every] * (len(values) - 1) + [True]
            seqs += [owners] * len(values)
            for seq in owners if function == "decode" else ():
                self.next[seq] = begin + len(values)
        values = np.concatenate([np.asarray(v) for _, v in spans])
        status = self._send(function, values, pos, seqs, outputs)
        if status:
            raise UsageError(
                f"llama_{function} of {len(pos)} tokens returned {status}: {self.harness.library.reason()}"
            )

    def offer(self, tokens: Sequence[int], at: Sequence[int], seq: int) -> bool:
        """Decode tokens of a sequence at any positions; return False if llama.cpp returns an error."""
        n = len(tokens)
        return self._send("decode", np.array(tokens, np.int32), at, [(seq,)] * n, [True] * n) == 0

    def _send(
        self,
        function: str,
        values: Tokens | F32 | NDArray[np.int32],
        pos: Sequence[int],
        seqs: Sequence[tuple[int, ...]],
        outputs: Sequence[bool],
    ) -> int:
        """Call `llama_decode` or `llama_encode` and return its status.

        `values`: tokens `[n]` or embeddings `[n, n_embd]`.
        """
        embeds = values.ndim > 1
        data: NDArray[Any] = np.ascontiguousarray(values, np.float32 if embeds else np.int32)
        n = len(pos)
        parts = (
            [pos, pos, pos, [0] * n]
            if embeds and self.harness.call("model_rope_type")(self.harness.model) in MROPE
            else [pos]
        )
        at = np.array(parts, np.int32)
        flat = np.array([s for owners in seqs for s in owners], np.int32)
        counts = np.array([len(owners) for owners in seqs], np.int32)
        starts = (flat.ctypes.data + 4 * (np.cumsum(counts) - counts).astype(np.uint64)).astype(np.uint64)
        wants = np.array(outputs, np.int8)
        a = [ctypes.c_void_p(x.ctypes.data) for x in (data, at, counts, starts, wants)]
        token, embd = (None, a[0]) if embeds else (a[0], None)
        return int(self.harness.call(function)(self.pointer, Batch(n, token, embd, *a[1:])))

    def results(self, name: str, at: Sequence[int], n: int) -> F32:
        """Read rows of `n` elements with a getter of llama.cpp; UsageError if it returns NULL."""
        pointers = [self.harness.call(name)(self.pointer, i) for i in at]
        if not all(pointers):
            raise UsageError(f"llama_{name} returned NULL for {at[pointers.index(None)]}")
        return np.stack([np.frombuffer(ctypes.string_at(p, 4 * n), np.float32) for p in pointers])

    # --- memory

    def rm(self, seq: int, p0: int = -1, p1: int = -1, *, may_refuse: bool = False) -> None:
        """Call `llama_memory_seq_rm`; `seq` -1 for all sequences.

        Raises:
            RefusedError: it returned false, and `may_refuse` allows that.
            UsageError: it returned false.
        """
        if not self.harness.call("memory_seq_rm")(self.memory, seq, p0, p1):
            error = RefusedError if may_refuse else UsageError
            raise error(f"llama_memory_seq_rm({seq}, {p0}, {p1}) returned false")
        if p1 < 0:
            for s in range(len(self.next)) if seq < 0 else [seq]:
                self.next[s] = min(self.next[s], max(0, p0))

    def cp(self, source: int, to: int) -> None:
        """Call `llama_memory_seq_cp` for all tokens."""
        self.harness.call("memory_seq_cp")(self.memory, source, to, -1, -1)
        self.next[to] = self.next[source]

    def keep(self, seq: int) -> None:
        """Call `llama_memory_seq_keep`."""
        self.harness.call("memory_seq_keep")(self.memory, seq)
        self.next = [p if s == seq else 0 for s, p in enumerate(self.next)]

    def add(self, seq: int, delta: int, p0: int = 0, p1: int = -1) -> None:
        """Call `llama_memory_seq_add`; RefusedError if `llama_memory_can_shift` returns false."""
        can_shift = self.harness.call("memory_can_shift")
        if not can_shift(self.memory):
            raise RefusedError("llama_memory_can_shift returned false")
        self.harness.call("memory_seq_add")(self.memory, seq, p0, p1, delta)
        if p1 < 0 or p1 >= self.next[seq]:
            self.next[seq] += delta

    def clear(self, *, data: bool = False) -> None:
        """Call `llama_memory_clear`."""
        self.harness.call("memory_clear")(self.memory, data)
        self.next = [0] * len(self.next)


def joined(*parts: F32) -> F32:
    """Stack the rows of several results."""
    return np.concatenate(parts)
