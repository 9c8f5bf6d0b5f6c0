"""Decoders written by hand for OpenVINO: the yardsticks that the adapters are measured against.

One decoder, llama's: RMS norm, grouped-query attention with rotary embedding, a gated feed-forward part. Four ways to
keep its past: inside the model (`stateful`), in slots of caches that are inputs and outputs over the same memory
(`slots`), as tensors that each step makes one longer (`concat`), and in slots that are inputs alone, where the model
gives only what is new and the host stores it (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import attention_forms as forms
import numpy as np
from numpy.typing import NDArray

from backends.openvino import OpenVinoStateless  # first: it keeps openvino's telemetry from the network
from backends.openvino.emit.attention import remembered
from backends.openvino.emit.rope import rope_neox, rope_normal
from backends.openvino.emit.rows import rms
from backends.openvino.nodes import Constants

import openvino as ov  # isort: skip
import openvino.opset15 as o  # isort: skip

assert OpenVinoStateless is not None  # imported for what importing it does

F32 = NDArray[np.float32]
EPS = 1e-5
BASE = 10000.0
Value = Any
Rope = Literal["normal", "neox"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    head: int = 64
    ffn: int = 512
    vocab: int = 64
    n_ctx: int = 1024
    rope: Rope = "normal"

    @property
    def kv(self) -> int:
        """Elements of K per token."""
        return self.kv_heads * self.head

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name of a layer's weight -> rows and columns."""
        q = self.heads * self.head
        return {
            "q": (q, self.hidden), "k": (self.kv, self.hidden), "v": (self.kv, self.hidden), "o": (self.hidden, q),
            "gate": (self.ffn, self.hidden), "up": (self.ffn, self.hidden), "down": (self.hidden, self.ffn),
        }  # fmt: skip


TINY = Sizes(layers=2, hidden=64, heads=4, kv_heads=2, head=32, ffn=96, vocab=32, n_ctx=32)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight, exact in both: Q4_0's parts, or float32."""

    q: NDArray[np.int8] | None
    """(rows, columns), -8 to 7."""
    d: NDArray[np.float16] | None
    """(rows, columns / 32)."""
    f: F32 | None

    def floats(self) -> F32:
        """The float32 values."""
        if self.f is not None:
            return self.f
        assert self.q is not None
        assert self.d is not None
        blocks = self.q.reshape(*self.d.shape, 32) * self.d[..., None].astype(np.float32)
        return np.asarray(blocks.reshape(self.q.shape), np.float32)

    def node(self) -> Value:
        """Shape (rows, columns), compressed where it is Q4_0."""
        if self.f is not None:
            return o.constant(self.f, shared_memory=True)  # one copy for all forms
        assert self.q is not None
        assert self.d is not None
        rows, blocks = self.d.shape
        packed = ov.Tensor(ov.Type.i4, ov.Shape([rows, blocks, 32]))
        nibbles = (self.q & 15).astype(np.uint8).reshape(-1, 2)
        packed.data.reshape(-1).view(np.uint8)[:] = nibbles[:, 0] | nibbles[:, 1] << 4
        q = o.convert(ov.op.Constant(packed), ov.Type.f32)
        d = o.convert(o.constant(self.d[..., None]), ov.Type.f32)
        return o.reshape(o.multiply(q, d), o.constant(np.array([rows, blocks * 32])), False)


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a decoder."""

    embedding: F32
    layers: list[dict[str, Matrix]]
    norms: list[tuple[F32, F32]]
    """Per layer: before attention, before the feed-forward part."""
    norm: F32
    output: Matrix

    @classmethod
    def random(cls, s: Sizes, *, q4_0: bool, seed: int = 0) -> Weights:
        """Numbers that keep activations near 1."""
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> Matrix:
            if not q4_0:
                return Matrix(None, None, rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5))
            q = rng.integers(-8, 8, (rows, columns), np.int8)
            d = rng.uniform(0.5, 1.0, (rows, columns // 32)) * columns**-0.5 / 4
            return Matrix(q, d.astype(np.float16), None)

        def norm() -> F32:
            return rng.uniform(0.5, 1.5, s.hidden).astype(np.float32)

        embedding = rng.standard_normal((s.vocab, s.hidden), np.float32)
        layers = [{n: matrix(*shape) for n, shape in s.shapes().items()} for _ in range(s.layers)]
        return cls(embedding, layers, [(norm(), norm()) for _ in range(s.layers)], norm(), matrix(s.vocab, s.hidden))


class Writer:
    """What all three forms share."""

    def __init__(self, s: Sizes, w: Weights) -> None:
        self.s, self.w, self.c = s, w, Constants()
        self.heads = forms.Heads(s.heads, s.kv_heads, s.head**-0.5)
        self.ids, self.positions = _parameter("ids", ov.Type.i32, -1), _parameter("positions", ov.Type.i32, -1)
        self.mask = _parameter("mask", ov.Type.f32, 1, 1, -1, -1)
        self.tokens = _parameter("tokens", ov.Type.i64, 1)
        self.turns = self._turns()

    def inputs(self) -> list[Value]:
        """What every form is given."""
        return [self.ids, self.positions, self.mask, *([self.tokens] if self.s.rope == "normal" else [])]

    def _turns(self) -> tuple[Value, ...]:
        """Sine and cosine as the rotary form takes them."""
        half = np.arange(self.s.head // 2)
        frequencies = (BASE ** (-2.0 * half / self.s.head)).astype(np.float32)
        p = o.convert(self.positions, ov.Type.f32)
        if self.s.rope == "neox":
            theta = o.multiply(o.reshape(p, self.c.i64(-1, 1, 1, 1), False), o.constant(np.tile(frequencies, 2)))
            return o.cos(theta), o.sin(theta)
        theta = o.multiply(o.reshape(p, self.c.i64(-1, 1), False), o.constant(frequencies))
        return o.concat([o.sin(theta), o.cos(theta)], 1), self.tokens

    def rope(self, x: Value, heads: int) -> Value:
        """(1, tokens, heads, head)."""
        form: Callable[..., Value] = rope_neox if self.s.rope == "neox" else rope_normal
        return form(self.c, x, *self.turns, heads, self.s.head, self.s.head)

    def matmul(self, x: Value, m: Matrix) -> Value:
        """`x` times the transposed matrix."""
        return o.matmul(x, m.node(), False, True)

    def norm(self, x: Value, weight: F32) -> Value:
        """RMS norm with its weight."""
        return o.multiply(rms(self.c, x, EPS), o.constant(weight.reshape(1, 1, 1, -1)))

    def split(self, x: Value, heads: int) -> Value:
        """(1, tokens, heads, head) from anything."""
        return o.reshape(x, self.c.i64(1, -1, heads, self.s.head), False)

    def body(self, attention: Callable[[int, Value, Value, Value], Value]) -> Value:
        """Logits, shape (1, 1, tokens, vocab).

        Args:
            attention: of layer, q, k, v, each (1, tokens, heads, head), q and k turned; gives (1, heads, tokens, head).
        """
        s, c = self.s, self.c
        x: Value = o.gather(o.constant(self.w.embedding.reshape(1, 1, s.vocab, -1)), self.ids, c.axis(2))
        for i, (w, (first, second)) in enumerate(zip(self.w.layers, self.w.norms, strict=True)):
            y = self.norm(x, first)
            q, k, v = (self.matmul(y, w[n]) for n in "qkv")
            y = attention(i, self.rope(q, s.heads), self.rope(k, s.kv_heads), self.split(v, s.kv_heads))
            y = o.reshape(swap(c, y), c.i64(1, 1, -1, s.heads * s.head), False)
            x = o.add(x, self.matmul(y, w["o"]))
            y = self.norm(x, second)
            x = o.add(
                x, self.matmul(o.multiply(o.swish(self.matmul(y, w["gate"])), self.matmul(y, w["up"])), w["down"])
            )
        return self.matmul(self.norm(x, self.w.norm), self.w.output)


def _parameter(name: str, type_: Any, *dims: int) -> Value:  # noqa: ANN401  # an openvino.Type
    p = o.parameter(ov.PartialShape(list(dims)), type_)
    p.output(0).set_names({name})
    return p


def swap(c: Constants, x: Value) -> Value:
    """Tokens and heads change places."""
    return o.transpose(x, c.i64(0, 2, 1, 3))


def feeds(s: Sizes, ids: NDArray[np.int32], past: int, n_kv: int) -> dict[str, NDArray[Any]]:
    """What every form is given for new tokens of one sequence: ids, positions, mask (1, 1, tokens, n_kv), tokens."""
    positions = np.arange(past, past + len(ids), dtype=np.int32)
    mask = np.where(np.arange(n_kv) > positions[:, None], np.float32(forms.HIDDEN), np.float32(0))[None, None]
    given = {"ids": ids, "positions": positions, "mask": mask}
    return given | ({"tokens": np.array([len(ids)])} if s.rope == "normal" else {})


def stateful(s: Sizes, w: Weights) -> ov.Model:
    """Inputs as `feeds`, and beam; output logits; K and V are variables."""
    e, beam, assigns = Writer(s, w), _parameter("beam", ov.Type.i32, -1), []

    def attention(i: int, q: Value, k: Value, v: Value) -> Value:
        kept = []
        for name, x in (("k", k), ("v", v)):
            whole, assign = remembered(e.c, swap(e.c, x), beam, f"{name}{i}", s.kv_heads, s.head)
            kept.append(whole)
            assigns.append(assign)
        return forms.sdpa(e.c, e.heads, swap(e.c, q), kept[0], kept[1], forms.Mask(e.mask, None), None)

    y = e.body(attention)
    return ov.Model([o.result(y)], assigns, [*e.inputs(), beam])


def slots(s: Sizes, w: Weights) -> ov.Model:
    """Inputs as `feeds`, slots, n_kv, then per layer K and V (1, n_ctx, kv); outputs logits and each cache."""
    e = Writer(s, w)
    where, n_kv = _parameter("slots", ov.Type.i32, -1), _parameter("n_kv", ov.Type.i64, 1)
    caches, written = [], []

    def attention(i: int, q: Value, k: Value, v: Value) -> Value:
        kept = []
        for name, x in (("k", k), ("v", v)):
            cache = _parameter(f"{name}{i}", ov.Type.f32, 1, s.n_ctx, s.kv)
            rows = o.reshape(x, e.c.i64(1, -1, s.kv), False)
            cache_ = o.scatter_update(cache, where, rows, e.c.axis(1))
            seen = o.slice(cache_, e.c.i64(0), n_kv, e.c.i64(1), e.c.i64(1))
            kept.append(swap(e.c, e.split(seen, s.kv_heads)))
            caches.append(cache)
            written.append(o.result(cache_))
        return forms.manual(e.c, e.heads, swap(e.c, q), kept[0], kept[1], forms.Mask(e.mask, None), None)

    y = e.body(attention)
    return ov.Model([o.result(y), *written], [*e.inputs(), where, n_kv, *caches])


def concat(s: Sizes, w: Weights) -> ov.Model:
    """Inputs as `feeds`, then per layer K and V (1, heads, past, head); outputs logits and each K and V grown."""
    e = Writer(s, w)
    caches, written = [], []

    def attention(i: int, q: Value, k: Value, v: Value) -> Value:
        kept = []
        for name, x in (("k", k), ("v", v)):
            cache = _parameter(f"{name}{i}", ov.Type.f32, 1, s.kv_heads, -1, s.head)
            kept.append(o.concat([cache, swap(e.c, x)], 2))
            caches.append(cache)
            written.append(o.result(kept[-1]))
        return forms.manual(e.c, e.heads, swap(e.c, q), kept[0], kept[1], forms.Mask(e.mask, None), None)

    y = e.body(attention)
    return ov.Model([o.result(y), *written], [*e.inputs(), *caches])


def rows(s: Sizes, w: Weights) -> ov.Model:
    """Model of a decoder; it changes only its own copy of K and V.

    Inputs as `feeds`, slots, then per layer K and V (1, heads, n_kv, head); outputs logits and per layer the K and
    V of the new tokens, (1, heads, tokens, head).
    """
    e = Writer(s, w)
    where = _parameter("slots", ov.Type.i32, -1)
    caches, written = [], []

    def attention(i: int, q: Value, k: Value, v: Value) -> Value:
        kept = []
        for name, x in (("k", k), ("v", v)):
            cache, new = _parameter(f"{name}{i}", ov.Type.f32, 1, s.kv_heads, -1, s.head), swap(e.c, x)
            kept.append(o.scatter_update(cache, where, new, e.c.axis(2)))
            caches.append(cache)
            written.append(o.result(new))
        return forms.manual(e.c, e.heads, swap(e.c, q), kept[0], kept[1], forms.Mask(e.mask, None), None)

    y = e.body(attention)
    return ov.Model([o.result(y), *written], [*e.inputs(), where, *caches])


def reference(s: Sizes, w: Weights, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Logits of every token of one sequence, in float64."""
    x = w.embedding.astype(np.float64)[ids]
    n = len(ids)
    theta = np.arange(n)[:, None] * BASE ** (-2.0 * np.arange(s.head // 2) / s.head)
    cos, sin = np.cos(theta)[:, None], np.sin(theta)[:, None]
    hidden = np.triu(np.full((n, n), -np.inf), 1)

    def rope(y: NDArray[np.float64]) -> NDArray[np.float64]:
        half = s.head // 2
        a, b = (slice(0, half), slice(half, None)) if s.rope == "neox" else (slice(0, None, 2), slice(1, None, 2))
        out = np.empty_like(y)
        out[..., a], out[..., b] = y[..., a] * cos - y[..., b] * sin, y[..., b] * cos + y[..., a] * sin
        return out

    def norm(y: NDArray[np.float64], weight: F32) -> NDArray[np.float64]:
        return np.asarray(y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * weight)

    for layer, (first, second) in zip(w.layers, w.norms, strict=True):
        m = {name: x_.floats().astype(np.float64) for name, x_ in layer.items()}
        y = norm(x, first)
        q = rope((y @ m["q"].T).reshape(n, s.heads, -1))
        k, v = (np.repeat((y @ m[i].T).reshape(n, s.kv_heads, -1), s.heads // s.kv_heads, 1) for i in "kv")
        k = np.repeat(rope((y @ m["k"].T).reshape(n, s.kv_heads, -1)), s.heads // s.kv_heads, 1)
        scores = np.einsum("shd,lhd->hsl", q, k) * s.head**-0.5 + hidden
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hsl,lhd->shd", weights, v).reshape(n, -1) @ m["o"].T
        y = norm(x, second)
        gate = y @ m["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ m["up"].T)) @ m["down"].T
    return np.asarray(norm(x, w.norm) @ w.output.floats().astype(np.float64).T)
