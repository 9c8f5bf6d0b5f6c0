"""The walk of a model that holds its caches in variables: read at the first use, assigned at the end of the graph."""

from __future__ import annotations

import math
from collections.abc import Mapping

import openvino.opset15 as o
from openvino import Node, Output, PartialShape, Type
from openvino.op.util import Variable, VariableInfo

from backends.openvino.emit.attention import remembered, sdpa
from backends.openvino.forms import VALUE, part_shape, parts
from backends.openvino.nodes import TYPES, Shape, Value, ancestors, reshape, transpose
from backends.openvino.walk import ROUND, Emitted, Feed, Walk, Weights, src
from conformance.backend.translating.plan import Emitter, Plan
from conformance.backend.translating.sym import Sym
from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16

from .log import Logged, is_logged, logs

LOG = "log"
"""The form of a cache held as a log: float32 (streams, heads, positions, head size). Its -0 become +0, see `MINUS`."""
MINUS = "-"
"""After a form: a variable beside each of float32, 1 where that shows 0 and the cache holds -0.

The CPU plugin (2026.4.1) makes zeros and subnormals +0 whenever it loads a variable of float32. One of float16 it may
make float32, and then drops the rounding between the two: so there are none, and what is written is rounded before.
"""
FLOATS = ("<f4", "<f2")


class StateWalk(Walk):
    """Caches of logs grow by concatenation and are attended to in the fused form; all others are whole variables."""

    bound = False

    def __init__(self, plan: Plan, memory: Weights) -> None:
        super().__init__(plan, memory)
        self._own: dict[Feed, tuple[Variable, Value]] = {}
        self._assigned: set[Feed] = set()
        self._whole: dict[Tensor, Value] = {}
        self._logs = _logs(plan)
        self._log_of = {t: i for i, log in enumerate(self._logs) for t in log.caches}
        self._beams = [o.parameter([_dim(log.streams)], Type.i32) for log in self._logs]
        self._masks = [_mask_parameter(log) for log in self._logs]
        self._laid: dict[int, Value] = {}

    # -- whole variables ------------------------------------------------------------------------------------------

    def _parameter(self, t: Tensor, form: str, dtype: str, shape: Shape) -> Value:
        if self._plan.roles[t] != "cache" or form == VALUE:
            return super()._parameter(t, form, dtype, shape)
        index = self._plan.index[t]
        if dtype not in FLOATS:
            return self._variable(Feed(index, form), dtype, shape)
        x, minus = (
            self._variable(Feed(index, form), "<f4", shape),
            self._variable(Feed(index, form + MINUS), "|u1", shape),
        )
        return o.select(o.convert(minus, Type.boolean), self.c.f32(-0.0), x)

    def _variable(self, feed: Feed, dtype: str, shape: Shape) -> Value:
        if feed not in self._own:
            info = VariableInfo()
            info.data_shape, info.data_type, info.variable_id = PartialShape(list(shape)), TYPES[dtype], name(feed)
            variable = Variable(info)
            zero = o.broadcast(o.convert(o.constant(0), TYPES[dtype]), self.c.i64(*shape))
            self._own[feed] = variable, o.read_value(zero, variable)
            self._out.variables.append(feed)
        return self._own[feed][1]

    def _assign(self, feed: Feed, x: Value) -> None:
        minus = Feed(feed.index, feed.form + MINUS)
        if minus in self._own:
            x = o.convert(x, Type.f32)
            self._assign(minus, o.convert(o.equal(o.divide(self.c.f32(1.0), x), self.c.f32(-math.inf)), Type.u8))
        node = x.get_node() if isinstance(x, Output) else x
        if node.get_output_size() > 1:  # `assign` takes nodes only
            node = o.concat([x], 0)
        self._out.sinks.append(o.assign(node, self._own[feed][0]))
        self._assigned.add(feed)

    def store(self, node: Tensor, x: Value, *, exact: bool = False) -> None:
        """As the base; a cache is never assigned a bare parameter, see `_bare`."""
        super().store(node, x, exact=exact)
        self._copied(node.root)

    def store_parts(self, node: Tensor, new: Mapping[str, Value]) -> None:
        """As `store`."""
        super().store_parts(node, new)
        self._copied(node.root)

    def read_again(self, node: Tensor) -> bool:
        """Also by the next step."""
        return self._cached(node) or super().read_again(node)

    def _copied(self, root: Tensor) -> None:
        if self._plan.roles.get(root) != "cache":
            return
        held, old = self._held[root], self._leaf(root, whole=True)
        if held.number is not None and _bare(held.number):
            held.number = self._over(old.number, held.number, root.shape)
        for p in parts(root.type):
            if held.parts is not None and old.parts is not None and _bare(held.parts[p.name]):
                held.parts[p.name] = self._over(old.parts[p.name], held.parts[p.name], part_shape(root, p))

    def _over(self, old: Value, x: Value, shape: Shape) -> Value:
        """`x` in the place of `old`."""
        flat = [reshape(self.c, v, (math.prod(shape),)) for v in (old, x)]
        y = o.slice_scatter(*flat, self.c.i64(0), self.c.i64(math.prod(shape)), self.c.i64(1), self.c.i64(0))
        return reshape(self.c, y, shape)

    def _cache(self, t: Tensor, index: int) -> None:
        self._out.written.add(index)
        for p in parts(t.type):  # an Assign needs the ReadValue of its variable
            self._parameter(t, p.name, p.dtype, part_shape(t, p))
        held = self._current(t, whole=True)
        if not held.rounded:
            held.number, held.rounded = ROUND[t.type](self.c, held.number), True
        before = len(self._out.results)
        super()._cache(t, index)
        for result, (i, form) in zip(self._out.results[before:], self._out.outputs[before:], strict=True):
            self._assign(Feed(i, form), result.input_value(0))
        del self._out.results[before:], self._out.outputs[before:]

    # -- logs -----------------------------------------------------------------------------------------------------

    def _emit_node(self, emitters: Mapping[str, Emitter], node: Tensor) -> None:
        if not is_logged(node):
            super()._emit_node(emitters, node)
        elif node.op == "FLASH_ATTN_EXT":
            self._attend(node)
        else:
            self._append(node)

    def _append(self, node: Tensor) -> None:
        cache, rows = node.root, src(node, 0)
        log = self._logs[self._log_of[cache]]
        new = reshape(self.c, self.number(rows), (log.streams, log.tokens, log.heads, log.head_size))
        if cache.type in ROUND and rows.type is not cache.type:
            shape = self.c.shape(new)
            new = ROUND[cache.type](self.c, new)
            new = new if shape is None else self.c.shaped(new, shape)
        new = transpose(self.c, new, (0, 2, 1, 3))
        feed = Feed(self._plan.index[cache], LOG)
        beam, variable = self._beams[self._log_of[cache]], self._log_name(cache)
        self._whole[cache], assign = remembered(self.c, new, beam, variable, int(log.heads), int(log.head_size))
        self._out.sinks.append(assign)
        self._out.variables.append(feed)
        self._out.written.add(feed.index)

    def _log_name(self, cache: Tensor) -> str:
        return name(Feed(self._plan.index[cache], LOG))

    def _attend(self, node: Tensor) -> None:
        q, k, v = (src(node, i) for i in range(3))
        i = self._log_of[k.root]
        if i not in self._laid:
            self._laid[i] = o.convert(self._masks[i], Type.f32)
        caches = self._whole[k.root], self._whole[v.root]
        heads = int(q.ne[2]), int(self._logs[i].heads)
        y = sdpa(self.c, self.number(q), *caches, self._laid[i], *heads, node.params.scale)
        self.store(node, transpose(self.c, self.c.shaped(y, q.shape), (0, 2, 1, 3)))

    # -- all ------------------------------------------------------------------------------------------------------

    def run(self, emitters: Mapping[str, Emitter]) -> Emitted:
        """As the base; then caches that are only read are assigned their own value.

        The parameters of logs, a beam and a mask each, stand between those of feeds and those of symbols.

        Raises:
            BackendError: a node cannot be expressed.
        """
        out = super().run(emitters)
        for feed, (variable, value) in self._own.items():
            if feed not in self._assigned:
                self._out.sinks.append(o.assign(value, variable))
        self._revive()
        extra = [p for pair in zip(self._beams, self._masks, strict=True) for p in pair]
        out.parameters[len(out.feeds) : len(out.feeds)] = extra
        return out

    def _revive(self) -> None:
        """Give a variable whose old contents nothing reads a result of one element.

        Without a ReadValue among its operations the plugin drops the Assign as well.
        """
        read = ancestors([*self._out.results, *self._out.sinks])
        first = self.c.i64(0)
        for _, x in self._own.values():
            if x.get_name() not in read:
                flat = o.reshape(x, self.c.i64(-1), False)
                self._out.results.append(o.result(o.gather(flat, first, self.c.axis(0))))


def _logs(plan: Plan) -> list[Logged]:
    if not any(is_logged(n) for n in plan.graph):
        return []
    own_logs = logs(plan.graph, plan.roles, plan.outputs)
    if isinstance(own_logs, str):
        raise BackendError(f"a graph of the fused form is none: {own_logs}")
    return own_logs


def _bare(x: Value) -> bool:
    """Whether nothing but casts, shapes and concatenations lies between a parameter or a constant and `x`.

    The CPU plugin (2026.4.1) assigns garbage to a variable that is given such a value.
    """
    node = x if isinstance(x, Node) else x.get_node()
    kind = node.get_type_name()
    if kind == "Concat":
        return any(map(_bare, node.input_values()))
    if kind in ("Convert", "Reshape", "Broadcast"):
        return _bare(node.input_value(0))
    return kind in ("Parameter", "Constant")


def name(feed: Feed) -> str:
    """The name of the variable that holds a cache's part."""
    return f"{feed.index}.{feed.form}"


def _mask_parameter(log: Logged) -> Node:
    shape = PartialShape([_dim(log.mask.ne[3]), 1, _dim(log.tokens), -1])
    return o.parameter(shape, Type.f16 if log.mask.type is F16 else Type.f32)


def _dim(n: int) -> int:
    return -1 if isinstance(n, Sym) else n
