"""Caches in a model's variables: the emitting context, the host's record, and the requests.

A variable is read at its first use and assigned at the end of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Node, Output, PartialShape, Type
from openvino import Tensor as OvTensor
from openvino.op.util import Variable, VariableInfo

from backends.openvino.bind import HostMemory, Request
from backends.openvino.compile import CompiledModel
from backends.openvino.emit.attention import remembered, sdpa
from backends.openvino.emit_context import ROUND, EmitContext, src
from backends.openvino.emitted import EmittedGraph, InputBinding
from backends.openvino.nodes import TYPES, Constants, Shape, Value, ancestors, reshape, transpose
from backends.openvino.roots import Held, Roots
from backends.openvino.storage import NUMBER, VALUE, decode, encode, part_shape, parts
from backends.openvino.translating.plan import AnyMemory, Emitter, Plan
from backends.openvino.translating.template import Sym
from conformance.case.case import Case
from conformance.ggml.errors import BackendError
from conformance.ggml.quants.requant import Requant
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.types import F16

from .append_log import NOTHING, Appending, Logged, Table, is_logged, logs, to_load

LOG = "log"
"""Form of a cache stored as a log: float32 (streams, heads, positions, head size).

Its -0 become +0, see `MINUS`."""
MINUS = "-"
"""Suffix of a form: a variable for each float32 one, with the signs of zeros.

It is 1 where the other has 0 and the cache has -0. The CPU plugin (2026.4.1) makes zeros and subnormals +0 whenever
it loads a variable of float32. The plugin may convert a variable of float16 to float32, and then drops the rounding
between the two. So there are no float16 variables, and values are rounded before they are written."""
FLOATS = ("<f4", "<f2")


class StateRoots(Roots):
    """Roots with caches as variables: one per part, and one for the signs of its zeros."""

    bound = False

    def __init__(self, plan: Plan, memory: HostMemory, *, constants: Constants | None = None) -> None:
        super().__init__(plan, memory, constants=constants)
        self._own: dict[InputBinding, tuple[Variable, Value]] = {}
        self._assigned: set[InputBinding] = set()

    def parameter(self, t: Tensor, form: str, dtype: str, shape: Shape) -> Value:
        """Return a part of a leaf; that of a cache is read from its variable."""
        if not self.is_cache(t) or form == VALUE:
            return super().parameter(t, form, dtype, shape)
        index = self._plan.index[t]
        if dtype not in FLOATS:
            return self._variable(InputBinding(index, form), dtype, shape)
        x = self._variable(InputBinding(index, form), "<f4", shape)
        minus = self._variable(InputBinding(index, form + MINUS), "|u1", shape)
        return o.select(o.convert(minus, Type.boolean), self.c.f32(-0.0), x)

    def _variable(self, feed: InputBinding, dtype: str, shape: Shape) -> Value:
        if feed not in self._own:
            info = VariableInfo()
            info.data_shape, info.data_type = PartialShape([_dim(n) for n in shape]), TYPES[dtype]
            info.variable_id = name(feed)
            variable = Variable(info)
            # the host sets it before the first run; with an initial constant, the CPU plugin (2026.4.1) takes the read
            # value for a constant too, and packs garbage if it is the second operand of a product
            self._own[feed] = variable, self.c.shaped(o.read_value(variable), shape)
            self.out.variables.append(feed)
        return self._own[feed][1]

    def set(self, root: Tensor, held: Held) -> None:
        """Replace the contents of `root`; a cache is never assigned a bare parameter, see `_bare`."""
        super().set(root, held)
        if not self.is_cache(root):
            return
        old = self.leaf(root, whole=True)
        for p in parts(root.type):
            if _bare(held.parts[p.name]):
                held.parts[p.name] = _over(self.c, old.parts[p.name], held.parts[p.name], part_shape(root, p))

    def assign(self, feed: InputBinding, x: Value) -> None:
        """Store `x` in a variable at the end of a run."""
        minus = InputBinding(feed.index, feed.form + MINUS)
        if minus in self._own:
            x = o.convert(x, Type.f32)
            self.assign(minus, o.convert(o.equal(o.divide(self.c.f32(1.0), x), self.c.f32(-math.inf)), Type.u8))
        node = x.get_node() if isinstance(x, Output) else x
        if node.get_output_size() > 1:  # `assign` takes nodes only
            node = o.concat([x], 0)
        self.out.sinks.append(o.assign(node, self._own[feed][0]))
        self._assigned.add(feed)

    def finish(self) -> None:
        """Assign variables that are only read their own value, and let each be read.

        The plugin drops the Assign of a variable that nothing reads; a result of one element reads it.
        """
        for feed, (variable, value) in self._own.items():
            if feed not in self._assigned:
                self.out.sinks.append(o.assign(value, variable))
        read = ancestors([*self.out.results, *self.out.sinks])
        first = self.c.i64(0)
        for _, x in self._own.values():
            if x.get_name() not in read:
                flat = o.reshape(x, self.c.i64(-1), False)
                self.out.results.append(o.result(o.gather(flat, first, self.c.axis(0))))


def _over(c: Constants, old: Value, x: Value, shape: Shape) -> Value:
    """Return `x` in place of `old`."""
    flat = [reshape(c, v, (math.prod(shape),)) for v in (old, x)]
    y = o.slice_scatter(*flat, c.i64(0), c.i64(math.prod(shape)), c.i64(1), c.i64(0))
    return reshape(c, y, shape)


class StateContext(EmitContext):
    """Emits logs in the fused form, grown by concatenation, and other caches as variables."""

    def __init__(self, plan: Plan, roots: StateRoots) -> None:
        super().__init__(plan, roots)
        self._variables = roots
        self._whole: dict[Tensor, Value] = {}
        self._logs = _logs(plan)
        self._log_of = {t: i for i, log in enumerate(self._logs) for t in log.caches}
        self._beams = [o.parameter([_dim(log.streams)], Type.i32) for log in self._logs]
        self._masks = [_mask_parameter(log) for log in self._logs]
        self._laid: dict[int, Value] = {}

    def read_again(self, node: Tensor) -> bool:
        """Return True also for caches, which the next step reads."""
        return self._roots.is_cache(node.root) or super().read_again(node)

    def _cache(self, t: Tensor, index: int) -> None:
        self._out.written.add(index)
        for p in parts(t.type):  # an Assign needs the ReadValue of its variable
            self._roots.parameter(t, p.name, p.dtype, part_shape(t, p))
        held = self._roots.settled(t, whole=True)
        if not held.rounded:
            held.parts[NUMBER], held.rounded = ROUND[t.type](self.c, held.parts[NUMBER]), True
        first = len(self._out.results)
        super()._cache(t, index)
        for result, (i, form) in zip(self._out.results[first:], self._out.outputs[first:], strict=True):
            self._variables.assign(InputBinding(i, form), result.input_value(0))
        del self._out.results[first:], self._out.outputs[first:]

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
        feed = InputBinding(self._plan.index[cache], LOG)
        beam, variable = self._beams[self._log_of[cache]], self._log_name(cache)
        self._whole[cache], assign = remembered(self.c, new, beam, variable, int(log.heads), int(log.head_size))
        self._out.sinks.append(assign)
        self._out.variables.append(feed)
        self._out.written.add(feed.index)

    def _log_name(self, cache: Tensor) -> str:
        return name(InputBinding(self._plan.index[cache], LOG))

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

    def run(self, emitters: Mapping[str, Emitter]) -> EmittedGraph:
        """Emit as the base, then assign caches that are only read their own value.

        The parameters of logs, a beam and a mask each, are between those of feeds and those of symbols.
        """
        out = super().run(emitters)
        self._variables.finish()
        extra = [p for pair in zip(self._beams, self._masks, strict=True) for p in pair]
        out.parameters[len(out.feeds) : len(out.feeds)] = extra
        return out


def _logs(plan: Plan) -> list[Logged]:
    if not any(is_logged(n) for n in plan.graph):
        return []
    own_logs = logs(plan.graph, plan.roles, plan.outputs)
    if isinstance(own_logs, str):
        raise BackendError(f"the graph does not have the fused form: {own_logs}")
    return own_logs


def _bare(x: Value) -> bool:
    """Return True if `x` is a parameter (cast, reshaped, concatenated) or constant.

    The CPU plugin (2026.4.1) assigns garbage for such a parameter, and never assigns a constant.
    """
    node = x if isinstance(x, Node) else x.get_node()
    kind = node.get_type_name()
    if kind == "Concat":
        return any(map(_bare, node.input_values()))
    if kind in ("Convert", "Reshape", "Broadcast"):
        return _bare(node.input_value(0))
    return kind == "Parameter" or _is_constant(node)


def _is_constant(node: Node) -> bool:
    """Return True if a node depends on no parameter and no variable."""
    stack, seen = [node], set[str]()
    while stack:
        node = stack.pop()
        if node.get_type_name() in ("Parameter", "ReadValue"):
            return False
        if node.get_name() not in seen:
            seen.add(node.get_name())
            stack += [v.get_node() for v in node.input_values()]
    return True


def name(feed: InputBinding) -> str:
    """Return the name of the variable with a cache's part."""
    return f"{feed.index}.{feed.form}"


def _mask_parameter(log: Logged) -> Node:
    shape = PartialShape([_dim(log.mask.ne[3]), 1, _dim(log.tokens), -1])
    return o.parameter(shape, Type.f16 if log.mask.type is F16 else Type.f32)


def _dim(n: int) -> int:
    return -1 if isinstance(n, Sym) else n


# -- what the host knows, and the requests that hold the rest ----------------------------------------------------------
Arrays = dict[str, NDArray[Any]]
"""Form of a variable -> its contents."""


@dataclass(slots=True)
class Log:
    """Caches whose newest rows are in the variables of one request."""

    logged: Logged
    table: Table
    holder: StatefulRequest


class StateMemory(HostMemory):
    """Bytes on the host; a request may have newer ones of a cache, whole or as a log."""

    def __init__(self, case: Case, requant: Requant | None = None) -> None:
        super().__init__(Case(case.id, dict(case.persistent), []), requant)
        self._bytes.update({t: self._bytes[t].copy() for t in case.caches()})  # rows are written into them
        self.appending: Sequence[Appending] = ()
        """Effect on logs of the step that is about to run."""
        self._logs: dict[Tensor, Log] = {}
        self._wholes: dict[Tensor, StatefulRequest] = {}
        self._newer: set[Tensor] = set()
        """Caches of which the host's bytes are outdated."""

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes; no request has the tensor afterwards."""
        self.settle(tensor)
        super().write(tensor, data)

    def look(self, tensor: Tensor) -> Bytes:
        """Return the bytes, fetched from the request that has them."""
        self._fetch(tensor)
        return super().look(tensor)

    def settle(self, t: Tensor) -> None:
        """Move `t`, and the caches in one log with it, from requests to the host."""
        self._fetch(t)
        if t in self._logs:
            for cache in self._logs[t].logged.caches:
                del self._logs[cache]
        self._wholes.pop(t, None)

    def _fetch(self, t: Tensor) -> None:
        if t not in self._newer:
            return
        log = self._logs.get(t)
        if log is None:
            self._bytes[t] = decode(t.type, _joined(self._wholes[t].pull(t))).copy()
            self._newer.discard(t)
            return
        for cache in log.logged.caches:
            self._rows(cache, log)
        log.table.settled = log.table.length
        self._newer.difference_update(log.logged.caches)

    def _rows(self, cache: Tensor, log: Log) -> None:
        """Write the rows that were appended since the last call into their cells."""
        table, logged = log.table, log.logged
        cells = table.cells[:, table.settled :]
        stream, i = np.nonzero(cells != NOTHING)
        held = log.holder.pull(cache)[LOG][:, :, table.settled :]
        rows = decode(cache.type, {NUMBER: held.transpose(0, 2, 1, 3)[stream, i]}).reshape(len(i), -1)
        self._bytes[cache].reshape(-1, cache.nb[1])[(logged.first + stream) * logged.size + cells[stream, i]] = rows

    def release(self, request: StatefulRequest, kept: Mapping[int, Tensor]) -> None:
        """Fetch the contents of variables of `request` that will store another cache than in `kept`."""
        for index, t in list(request.holds.items()):
            if kept.get(index) is not t:
                self.settle(t)
                del request.holds[index]

    def lend(self, t: Tensor, request: StatefulRequest) -> None:
        """Move the whole of `t` into variables of `request`."""
        holder = self._wholes.get(t)
        if holder is request:
            return
        if holder is not None and request.variables(t).keys() == holder.variables(t).keys():
            request.push(t, holder.pull(t))
        else:
            self.settle(t)
            request.push(t, _parted(encode(t, self._bytes[t])))
            self.moved += self._bytes[t].nbytes
        self._wholes[t] = request

    def append(self, a: Appending, request: StatefulRequest) -> Table:
        """Move the log that `a` continues into `request`; lay it out again if it no longer fits.

        The kernel multiplies hidden rows of V by 0, so NaN among them would reach every query.
        """
        caches = a.log.caches
        row = sum(t.nb[1] for t in caches)
        self.moved += row * a.cells.size
        log = self._logs.get(caches[0])
        if log is not None and log.logged.key == a.log.key and log.table.serves(a) and not _leaks(log, a):
            if log.holder is not request:
                for t in caches:
                    request.push(t, log.holder.pull(t))
                log.holder = request
            return log.table
        for t in caches:
            self.settle(t)
        cells = to_load(a)
        self.moved += row * int((cells != NOTHING).sum())
        log = Log(a.log, Table.of(cells, a.log.size), request)
        at = (a.log.first + np.arange(len(cells))[:, None]) * a.log.size + np.maximum(cells, 0)
        log.table.endless = np.zeros(cells.shape, np.bool_)
        for t in caches:
            rows = encode(t, self._bytes[t])[NUMBER].reshape(-1, a.log.heads, a.log.head_size)[at]
            rows[cells == NOTHING] = 0
            log.table.endless |= ~np.isfinite(rows).all(axis=(2, 3))
            request.push(t, {LOG: rows.transpose(0, 2, 1, 3).astype("<f4")})
            self._logs[t] = log
        return log.table

    def newer(self, caches: Iterable[Tensor]) -> None:
        """Record that requests have changed `caches`."""
        self._newer.update(caches)


class StatefulRequest(Request):
    """A compiled model with one infer request; its variables store caches of one session."""

    def __init__(self, compiled: CompiledModel | None, emitted: EmittedGraph, peak: int | None = None) -> None:
        super().__init__(compiled, emitted, peak)
        self.holds: dict[int, Tensor] = {}
        """Index of a cache in a plan -> cache whose contents are in the variables."""
        self._owner: ReferenceType[StateMemory] | None = None
        self._variables = emitted.variables
        self._written = emitted.written
        self._first_extra = len(emitted.feeds)
        self._states = {} if self._request is None else {s.name: s for s in self._request.query_state()}

    def variables(self, t: Tensor) -> dict[str, Any]:
        """Return form -> the variable that stores `t` in this form."""
        return {f.form: self._states[name(f)] for f in self._variables if self.holds[f.index] is t}

    def pull(self, t: Tensor) -> Arrays:
        """Copy the contents of the variables of `t`."""
        return {form: np.array(v.state.data) for form, v in self.variables(t).items()}

    def push(self, t: Tensor, parts: Mapping[str, NDArray[Any]]) -> None:
        """Set the variables to `parts` of `t`."""
        for form, v in self.variables(t).items():
            v.state = OvTensor(np.ascontiguousarray(parts[form]))

    def run(self, plan: Plan, memory: AnyMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Run; first fetch caches from other requests, and lay out masks."""
        if self._request is None:
            return super().run(plan, memory, inputs)
        self._take(plan, memory)
        at = self._first_extra
        for a in memory.appending:
            table = memory.append(a, self)
            table.append(a.cells)
            self._take_in(at, np.arange(a.log.streams, dtype=np.int32))
            self._request.set_input_tensor(at + 1, OvTensor(np.ascontiguousarray(table.laid(a.mask))))
            at += 2
        values = super().run(plan, memory, inputs)
        memory.newer(plan.tensors[i] for i in self._written)
        return values

    def _take(self, plan: Plan, memory: StateMemory) -> None:
        """Release caches of other plans and sessions; take this plan's whole caches."""
        wanted = {feed.index: plan.tensors[feed.index] for feed in self._variables}
        last = None if self._owner is None else self._owner()
        if last is not None:
            last.release(self, wanted if last is memory else {})
        self._owner, self.holds = ref(memory), wanted
        logged = {t for a in memory.appending for t in a.log.caches}
        for t in [t for t in wanted.values() if t not in logged]:
            memory.lend(t, self)


def _leaks(log: Log, a: Appending) -> bool:
    """Return True if a log position that no query of a step sees has NaN or infinity.

    Rows are checked when they are first hidden, all existing rows at once; so with a sliding window there is one check
    for as many steps as the window is wide.
    """
    hidden = log.table.hidden(a)
    if hidden[:, log.table.endless.shape[1] :].any():
        held = (log.holder.pull(t)[LOG] for t in log.logged.caches)
        log.table.endless = np.logical_or.reduce([~np.isfinite(x).all(axis=(1, 3)) for x in held])
    known = log.table.endless
    return bool((hidden[:, : known.shape[1]] & known).any())


def _parted(parts: Mapping[str, NDArray[Any]]) -> Arrays:
    """Convert a cache's parts to the contents of variables."""
    out: Arrays = {}
    for form, x in parts.items():
        out[form] = x
        if x.dtype.kind == "f":
            out[form], out[form + MINUS] = x.astype("<f4"), ((x == 0) & np.signbit(x)).astype(np.uint8)
    return out


def _joined(held: Arrays) -> Arrays:
    """Convert the contents of variables to a cache's parts."""
    minus = {form: held[form + MINUS] != 0 for form in held if form + MINUS in held}
    plain = {form: x for form, x in held.items() if not form.endswith(MINUS)}
    return {form: np.where(minus[form], np.float32(-0.0), x) if form in minus else x for form, x in plain.items()}
