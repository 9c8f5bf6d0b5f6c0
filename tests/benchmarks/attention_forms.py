"""Forms of attention to compare, with any batch, tokens and cells: docs/measurements/attention.md.

`f(c, heads, q, k, v, mask, sinks)`: q (batch, heads, tokens, size), k and v (batch, kv_heads, kv, size or size_v),
sinks (1, heads, 1, 1), all float32; gives (batch, heads, tokens, size_v). The batch may be dynamic, and differ from 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.openvino import OpenVinoStateless  # first: it keeps openvino's telemetry from the network
from backends.openvino.compile import CompiledModel, executed
from backends.openvino.emit import attention
from backends.openvino.nodes import Constants, Value

import openvino.opset15 as o  # isort: skip
from openvino import Node, Type  # isort: skip
from openvino.utils.node_factory import NodeFactory  # isort: skip

assert OpenVinoStateless is not None  # imported for what importing it does

HIDDEN = float(np.finfo(np.float32).min) / 2
"""What stands for minus infinity in a mask: a row of it is a row of equal weights, not of NaN."""


def layers(compiled: CompiledModel) -> Counter[str]:
    """Type of each executed layer -> how many."""
    return Counter(kind for kind, _ in executed(compiled))


@dataclass(frozen=True, slots=True)
class Heads:
    """What of an attention a model fixes."""

    q: int
    """Query heads; `kv` divides it."""
    kv: int
    scale: float
    softcap: float = 0.0
    """0 for none: `softcap * tanh(score / softcap)` otherwise."""

    @property
    def group(self) -> int:
        """Query heads that share a K and V head."""
        return self.q // self.kv


@dataclass(frozen=True, slots=True)
class Mask:
    """What is added to the scores, made once for all layers that share it."""

    added: Value
    """float32 (batch or 1, heads or 1, tokens, kv), nowhere minus infinity."""
    alive: Value | None
    """float32 (batch or 1, heads or 1, tokens, 1): 0 for a row that hides everything, else 1; None where none does."""


def mask(c: Constants, x: Value, slopes: NDArray[np.float32] | None = None) -> Mask:
    """From a mask as ggml has it, float32 (batch or 1, heads or 1, tokens, kv), and ALiBi's slope per head.

    ggml gives zeros for a row that is minus infinity throughout; OpenVINO's softmax would give NaN.
    """
    seen = o.greater(o.reduce_max(x, c.i64(3), True), c.f32(HIDDEN))
    if slopes is not None:
        x = o.multiply(x, o.constant(slopes.reshape(1, -1, 1, 1)))
    return Mask(o.maximum(x, c.f32(HIDDEN)), o.convert(seen, Type.f32))


Form = Callable[[Constants, Heads, Value, Value, Value, "Mask | None", "Value | None"], Value]


def _alive(y: Value, m: Mask | None) -> Value:
    return y if m is None or m.alive is None else o.multiply(y, m.alive)


def _capped(c: Constants, heads: Heads, scores: Value) -> Value:
    return o.multiply(o.tanh(scores), c.f32(heads.softcap)) if heads.softcap else scores


def _weights(c: Constants, scores: Value, m: Mask | None, sinks: Value | None) -> Value:
    """Softmax of 4-D scores plus mask, where a sink takes its share and gives nothing."""
    x = scores if m is None else o.add(scores, m.added)
    if sinks is None:
        return o.softmax(x, -1)
    top = o.maximum(o.reduce_max(x, c.i64(3), True), sinks)
    w = o.exp(o.subtract(x, top))
    return o.divide(w, o.add(o.reduce_sum(w, c.i64(3), True), o.exp(o.subtract(sinks, top))))


def manual(c: Constants, heads: Heads, q: Value, k: Value, v: Value, m: Mask | None, sinks: Value | None) -> Value:
    """Two MatMuls that multiply the rows of a whole group of heads with K and V, which stay at their own heads.

    The scale is on Q: on the scores the plugin would move it to K.
    """
    scale = heads.scale / heads.softcap if heads.softcap else heads.scale
    rows, count = c.i64(0, heads.kv, -1), o.gather(o.shape_of(k), c.i64(2), c.axis(0))
    grouped = o.reshape(o.multiply(q, c.f32(scale)), o.concat([rows, c.i64(_width(q))], 0), True)
    scores = o.reshape(o.matmul(grouped, k, False, True), o.concat([c.i64(0, heads.q, -1), count], 0), True)
    w = _weights(c, _capped(c, heads, scores), m, sinks)
    y = o.matmul(o.reshape(w, o.concat([rows, count], 0), True), v, False, False)
    return _alive(o.reshape(y, c.i64(0, heads.q, -1, _width(v)), True), m)


def manual5d(c: Constants, heads: Heads, q: Value, k: Value, v: Value, m: Mask | None, sinks: Value | None) -> Value:
    """Two 5-D MatMuls that broadcast K and V to a group of heads without repeating them in memory."""
    scale = heads.scale / heads.softcap if heads.softcap else heads.scale
    scores: Value = o.matmul(_grouped(c, heads, o.multiply(q, c.f32(scale))), o.unsqueeze(k, c.i64(2)), False, True)
    if m is None and sinks is None:
        w = o.softmax(_capped(c, heads, scores), -1)
    else:
        count = o.gather(o.shape_of(k), c.i64(2), c.axis(0))
        flat = o.reshape(scores, o.concat([c.i64(0, heads.q, -1), count], 0), True)
        w = _weights(c, _capped(c, heads, flat), m, sinks)
        w = o.reshape(w, o.concat([c.i64(0, heads.kv, heads.group, -1), count], 0), True)
    y = o.matmul(w, o.unsqueeze(v, c.i64(2)), False, False)
    return _alive(o.reshape(y, c.i64(0, heads.q, -1, _width(v)), True), m)


def sdpa(c: Constants, heads: Heads, q: Value, k: Value, v: Value, m: Mask | None, sinks: Value | None) -> Value:
    """The ScaledDotProductAttention op on K and V repeated for every head: what `openvino-stateful` emits.

    Stateless, the plugin really repeats. Cannot carry a softcap, nor sinks without a mask.
    """
    if m is not None and sinks is None:
        return _alive(attention.sdpa(c, q, k, v, m.added, heads.q, heads.kv, heads.scale), m)
    k, v = (attention.repeated(c, x, heads.q, heads.kv) for x in (k, v))
    return _alive(_op(c, heads, q, k, v, None if m is None else m.added, sinks), m)


def sdpa5d(c: Constants, heads: Heads, q: Value, k: Value, v: Value, m: Mask | None, sinks: Value | None) -> Value:
    """The ScaledDotProductAttention op in 5-D, where K and V are broadcast to a group and not repeated.

    Cannot carry a softcap or sinks.
    """
    added: Value = None
    if m is not None:
        shared = _heads_of(m.added) == 1
        added = o.unsqueeze(m.added, c.i64(2)) if shared else _grouped_mask(c, heads, m.added)
    y = _op(c, heads, _grouped(c, heads, q), o.unsqueeze(k, c.i64(2)), o.unsqueeze(v, c.i64(2)), added, sinks)
    return _alive(o.reshape(y, c.i64(0, heads.q, -1, _width(v)), True), m)


FORMS: dict[str, Form] = {"manual": manual, "manual5d": manual5d, "sdpa": sdpa, "sdpa5d": sdpa5d}
"""Name of an attention form, as the option of the adapter has it."""


def carries(form: str, *, masked: bool, softcap: bool, sinks: bool) -> bool:
    """Whether a form can express it; the manual ones express everything."""
    return form.startswith("manual") or not (softcap or (sinks and (form == "sdpa5d" or not masked)))


def _op(c: Constants, heads: Heads, q: Value, k: Value, v: Value, added: Value | None, sinks: Value | None) -> Value:
    """The op itself, by the factory because the Python function does not take sinks.

    Without a mask the scale goes to Q, because it stands behind the mask in the op's inputs. A mask of zeros would not
    do: the stateful kernel (2026.4.1) reads one of a single element beyond its end, and one as wide as K breaks fusion.
    """
    given = [q, k, v]
    if added is None:
        # the op itself multiplies with 1 / sqrt(size)
        rest = heads.scale * math.sqrt(_width(q, -1))
        given[0] = q if math.isclose(rest, 1.0, rel_tol=1e-7) else o.multiply(q, c.f32(rest))
    else:
        given += [added, c.f32(heads.scale), *([] if sinks is None else [sinks])]
    values = [x.output(0) if isinstance(x, Node) else x for x in given]
    return FACTORY.create("ScaledDotProductAttention", values, {"causal": False})


FACTORY: Any = NodeFactory("opset13")


def _grouped(c: Constants, heads: Heads, q: Value) -> Value:
    """The batch is copied (0), never written as 1: there may be several sequences."""
    return o.reshape(q, c.i64(0, heads.kv, heads.group, -1, _width(q)), True)


def _grouped_mask(c: Constants, heads: Heads, added: Value) -> Value:
    count = o.gather(o.shape_of(added), c.i64(3), c.axis(0))
    return o.reshape(added, o.concat([c.i64(0, heads.kv, heads.group, -1), count], 0), True)


def _shape(x: Value) -> Any:  # noqa: ANN401  # an openvino.PartialShape
    return x.get_output_partial_shape(0) if isinstance(x, Node) else x.get_partial_shape()


def _width(x: Value, axis: int = 3) -> int:
    return int(_shape(x)[axis].get_length())


def _heads_of(x: Value) -> int:
    return int(_shape(x)[1].get_length())
