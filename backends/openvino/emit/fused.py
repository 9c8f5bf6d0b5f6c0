"""The forms of RMS, rotary embedding and attention that OpenVINO's CPU plugin runs as one kernel, or runs best.

Every function takes and gives Values, works with dynamic dimensions, and needs as plain numbers only what a model
fixes: head counts and sizes. Which form fuses when, and what each costs: `docs/openvino-forms.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Node, PartialShape, Type
from openvino.op.util import Variable, VariableInfo
from openvino.utils.node_factory import NodeFactory

from backends.openvino.nodes import Constants, Value

HIDDEN = float(np.finfo(np.float32).min) / 2
"""What stands for minus infinity in a mask: a row of it is a row of equal weights, not of NaN."""
ALL = 2**31 - 1
"""The end of a slice that takes everything, as the plugin's pattern has it."""


def rms(c: Constants, x: Value, eps: float) -> Value:
    """Divide x by sqrt(mean(x * x) + eps) along the last of 4 axes: one RMS layer.

    A multiplication with a weight of one row that follows fuses in.
    """
    power = o.reduce_mean(o.multiply(x, x), c.i64(3), True)
    return o.multiply(x, o.divide(c.f32(1.0), o.sqrt(o.add(power, c.f32(eps)))))


def rope_neox(c: Constants, x: Value, cos: Value, sin: Value, heads: int, head_size: int, n_dims: int) -> Value:
    """Turn channel i with channel i + n_dims / 2 (`GGML_ROPE_TYPE_NEOX`): one RoPE layer.

    Tokens stand in the batch dimension: the plugin takes cosines that are broadcast over dimension 1 only, and a
    reshape moves nothing.

    Args:
        c: the model's constants.
        x: shape (…, tokens, heads, head_size) of any rank.
        cos: shape (tokens, 1, 1, n_dims), the second half equal to the first.
        sin: as `cos`, neither negated.
        heads: how many.
        head_size: elements per head.
        n_dims: channels that turn; the rest is left alone.

    Returns:
        Shape (1, tokens, heads, head_size).
    """
    rows: Value = o.reshape(x, c.i64(-1, heads, 1, head_size), False)
    parts = [rows]
    if n_dims != head_size:
        parts = o.variadic_split(rows, c.axis(3), c.i64(n_dims, head_size - n_dims)).outputs()
    halves = o.variadic_split(parts[0], c.axis(3), c.i64(n_dims // 2, n_dims // 2))
    turned = o.concat([o.multiply(halves.output(1), c.f32(-1.0)), halves.output(0)], -1)
    y: Value = o.add(o.multiply(parts[0], cos), o.multiply(turned, sin))
    if n_dims != head_size:
        y = o.concat([y, parts[1]], -1)
    return o.reshape(y, c.i64(1, -1, heads, head_size), False)


def rope_normal(
    c: Constants, x: Value, turns: Value, tokens: Value, heads: int, head_size: int, n_dims: int, count: int = -1
) -> Value:
    """Turn channel 2i with channel 2i + 1 (`GGML_ROPE_TYPE_NORMAL`): one RoPE layer where `tokens` is not a constant.

    The plugin knows this rotation only as GPT-J writes it, with channels left over at the end of each head, and only
    while none of its Unsqueezes has become a Reshape. So every dimension that a shape could decide is hidden from the
    compiler: the batch of 1, and the width of the rest, which may be 0.

    Args:
        c: the model's constants.
        x: shape (…, tokens, heads, head_size) of any rank.
        turns: shape (tokens, n_dims): the sines of all pairs, then their cosines.
        tokens: how many, i64 of shape (1), known only at run time.
        heads: how many.
        head_size: elements per head.
        n_dims: channels that turn; the rest is left alone.
        count: the number of tokens where it is one in every graph: what follows then has a shape that is known.

    Returns:
        Shape (1, tokens, heads, head_size).
    """
    one = o.minimum(tokens, c.i64(1))
    rows = o.reshape(x, o.concat([tokens, one, c.i64(heads), c.i64(-1)], 0), False)
    table = o.variadic_split(o.reshape(turns, o.concat([tokens, one, c.i64(n_dims)], 0), False),
                             c.axis(-1), c.i64(n_dims // 2, -1))  # fmt: skip
    twice = o.constant(np.repeat(np.arange(n_dims // 2, dtype=np.int32), 2))
    sin, cos = (o.gather(o.unsqueeze(half, c.axis(2)), twice, c.axis(3)) for half in table.outputs())
    turning, rest = o.variadic_split(rows, c.axis(3), c.i64(n_dims, -1)).outputs()
    even, odd = (o.slice(turning, c.i64(i), c.i64(ALL), c.i64(2), c.i64(3)) for i in range(2))
    pairs = [o.unsqueeze(part, c.axis(-1)) for part in (o.multiply(odd, c.f32(-1.0)), even)]
    turned = o.reshape(o.concat(pairs, -1), c.i64(0, 0, 0, -1), True)
    y = o.concat([o.add(o.multiply(turning, cos), o.multiply(turned, sin)), rest], -1)
    return o.reshape(y, c.i64(1, count, heads, head_size), False)


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
"""`f(c, heads, q, k, v, mask, sinks)`: attention.

q (batch, heads, tokens, size), k and v (batch, heads_kv, kv, size or size_v), sinks (1, heads, 1, 1), all float32;
gives (batch, heads, tokens, size_v). The batch is never looked at: it may be dynamic, and differ from 1.
"""


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
    """The ScaledDotProductAttention op on K and V repeated for every head.

    The form that fuses to a stateful kernel (`remembered`); stateless, the plugin really repeats. Cannot carry a
    softcap, nor sinks without a mask.
    """
    k, v = (_repeated(c, heads, x) for x in (k, v))
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


def remembered(c: Constants, new: Value, beam: Value, name: str, heads: int, size: int) -> tuple[Value, Value]:
    """A cache that lives in the model and grows by `new` at each run.

    With `sdpa` on what it gives this fuses to one kernel with its own cache: it needs the Gather by `beam`, the initial
    value and the layout, and breaks when what it gives is an output of the model.

    Args:
        c: the model's constants.
        new: float32 (batch, heads, tokens, size).
        beam: i32 Parameter of shape (batch), which sequence's past each one continues: normally 0, 1, 2, …
        name: the variable's.
        heads: K and V heads.
        size: elements per head.

    Returns:
        float32 (batch, heads, past + tokens, size), and the Assign, which belongs to the model's sinks.
    """
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = PartialShape([-1, heads, -1, size]), Type.f32, name
    variable = Variable(info)
    shape = o.concat([o.shape_of(beam), c.i64(heads, 0, size)], 0)
    past = o.read_value(o.broadcast(c.f32(0.0), shape), variable)
    whole = o.concat([o.gather(past, beam, c.axis(0)), new], 2)
    return whole, o.assign(whole, variable)


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


def _repeated(c: Constants, heads: Heads, x: Value) -> Value:
    """K or V for every query head: the Unsqueeze, Broadcast, Reshape that the plugin looks for."""
    if heads.group == 1:
        return x
    wide = o.broadcast(o.unsqueeze(x, c.i64(2)), c.i64(1, 1, heads.group, 1, 1), broadcast_spec="BIDIRECTIONAL")
    return o.reshape(wide, c.i64(0, heads.q, -1, _width(x)), True)


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
