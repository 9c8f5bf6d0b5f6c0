"""Binding of a compiled model's inputs and outputs, and memory of persistent tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import Tensor as OvTensor

from backends.openvino.translating.plan import Memory, Plan, Program
from backends.openvino.translating.template import Sym, evaluate, expr_of
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.quants.requant import Requant
from conformance.ggml.tensor import Bytes, Tensor, is_empty, nbytes

from .cache_window import Order
from .compile import CompiledModel, words
from .emitted import CacheWrite, EmittedGraph, InputBinding
from .nodes import origin
from .storage import NUMBER, VALUE, decode, encode, held, narrow, value
from .weights import WeightStore


class HostMemory(Memory):
    """Weights as bytes; caches as OpenVINO tensors, one per part, replaced by each step."""

    def __init__(self, case: Case, requant: Requant | None = None) -> None:
        self.weights = WeightStore(requant)
        self._bytes = dict(case.persistent)  # the case's own arrays, until others are written
        self.caches: dict[Tensor, dict[str, OvTensor]] = {}
        self.stamp = object()
        """An object that is replaced whenever a cache becomes another OpenVINO tensor."""
        self._orders: dict[tuple[Tensor, str], Order] = {}
        """Axis order of cache parts that differs from ggml's."""
        self.moved = 0
        """Bytes that programs wrote to caches, in the caches' own types."""
        for t in case.caches():
            if not is_empty(t):
                self.write(t, self._bytes.pop(t))

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a weight or cache; UsageError for another size than the tensor's."""
        if data.nbytes != nbytes(tensor):
            raise UsageError(f"{tensor}: {nbytes(tensor)} bytes expected, {data.nbytes} given")
        if tensor in self._bytes:
            self._bytes[tensor] = data.copy()
            self.weights.forget(tensor)
        else:
            self.caches[tensor] = {n: self._laid(tensor, n, a) for n, a in held(tensor, data).items()}
            self.stamp = object()

    def ordered(self, cache: Tensor, form: str, order: Order | None) -> OvTensor:
        """Store a part of a cache in `order` from now on (None: ggml's), and return it."""
        if self._orders.get((cache, form)) != order:
            x = self.table(cache, form)
            self._orders.pop((cache, form), None)
            if order is None:
                x = np.ascontiguousarray(x).reshape(cache.shape)
            else:
                x, self._orders[cache, form] = order.ordered(x), order
            self.caches[cache][form] = OvTensor(x)
            self.stamp = object()
        return self.caches[cache][form]

    def _laid(self, cache: Tensor, form: str, x: NDArray[Any]) -> OvTensor:
        order = self._orders.get((cache, form))
        return OvTensor(x if order is None else order.ordered(x))

    def table(self, cache: Tensor, form: str) -> NDArray[Any]:
        """Return a part of a cache in ggml's order, over its own memory."""
        order, x = self._orders.get((cache, form)), self.caches[cache][form].data
        return x if order is None else order.table(x)

    def read(self, tensor: Tensor) -> Bytes:
        """Return the exact bytes."""
        look = self.look(tensor)
        return look.copy() if tensor in self._bytes else look

    def counted(self, cache: Tensor, form: str) -> int:
        """Return bytes of a cache to count if a program returns all of a part; 0 after the first."""
        return nbytes(cache) if form == next(iter(self.caches[cache])) else 0

    def look(self, tensor: Tensor) -> Bytes:
        """Return the bytes; a weight's are not copied."""
        if tensor in self._bytes:
            return self._bytes[tensor]
        return decode(tensor.type, {n: self.table(tensor, n) for n in self.caches[tensor]}).copy()


class Request(Program):
    """A compiled model with its single infer request."""

    def __init__(self, compiled: CompiledModel | None, emitted: EmittedGraph, peak: int | None = None) -> None:
        self.compiled = compiled
        self.peak = peak
        self.notes = emitted.notes
        self._feeds = emitted.feeds
        self._outputs = emitted.outputs
        self._first_cache = emitted.first_cache
        self._commits = emitted.commits
        self._symbols = list(emitted.symbols)
        self._bindings: tuple[int, ...] | None = None
        self._orders = emitted.orders
        self._inside = emitted.inside
        self._resized = any(isinstance(n, Sym) for c in emitted.commits for n in c.extents)
        """True if caches of other sizes can be served."""
        self.otherwise: Callable[[Plan, HostMemory], Request] | None = None
        """Function that makes the program for a plan with indices beyond a window."""
        self._other: tuple[Hashable, Request] | None = None
        """The program for whole caches, and the key of its plan."""
        self._request: Any = None if compiled is None else compiled.create_infer_request()
        self._set: dict[int, OvTensor] = {}
        self._taken: dict[int, NDArray[Any]] = {}
        """Memory for inputs that change at every run."""
        self._rows: dict[int, NDArray[Any]] = {}
        """Results of new rows, written to memory of the host."""
        self._spare: dict[int, OvTensor] = {}
        self._bound: tuple[object, tuple[Tensor, ...]] = (None, ())
        """The memory's stamp when its caches were last bound, and these caches."""
        self._targets: list[Target] = []
        """Destinations of new rows."""
        leaves = {c.ids for c in emitted.commits if c.given} | {index for index, _ in emitted.inside}
        self._leaves = sorted(leaves)
        """Leaves of the plan with positions in caches."""
        # results that are a parameter, up to casts and reshapes: the CPU plugin (2026.4.1) never fills a tensor that
        # was set for one, and returns the memory of the input if nothing is in between
        self._moved = {i for i, r in enumerate(emitted.results) if origin(r).get_type_name() == "Parameter"}
        self._values = np.zeros(len(self._symbols), np.int64)
        if self._request is not None:
            for k in range(len(self._symbols)):
                one = OvTensor(self._values[k : k + 1], shared_memory=True)
                self._request.set_input_tensor(len(emitted.parameters) - len(self._symbols) + k, one)
            for i in {c.rows for c in emitted.commits} - self._moved:
                x = emitted.results[i].input_value(0)
                if x.get_partial_shape().is_static:
                    fixed = OvTensor(x.get_element_type(), x.get_shape())
                    self._request.set_output_tensor(i, fixed)
                    self._rows[i] = fixed.data

    def bind(self, bindings: tuple[int, ...]) -> None:
        """Compute the data that depends on the template's symbols."""
        if bindings != self._bindings:
            self._values[:] = [evaluate(e, bindings) for e in self._symbols]
            self._bindings = bindings
            if self._resized:
                self._bound = (None, ())

    def run(self, plan: Plan, memory: HostMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Bind, infer, collect; BackendError with OpenVINO's message, or for a row out of range."""
        places = {i: value(t, inputs[t]) for i in self._leaves for t in [plan.tensors[i]]}
        if not all(places[i].max() < self._number(limit) for i, limit in self._inside):
            return self._whole(plan, memory).run(plan, memory, inputs)
        parts: dict[int, dict[str, NDArray[Any]]] = {}
        if self._request is not None:
            try:
                self._feed(plan, memory, inputs)
                self._request.infer()
            except RuntimeError as e:
                raise BackendError(f"OpenVINO failed to run: {words(e)}") from e
            for i, (index, form) in enumerate(self._outputs[: self._first_cache]):
                parts.setdefault(index, {})[form] = self._request.get_output_tensor(i).data
        empty = np.empty(0, np.uint8)
        # before the caches change: a result that is a plain parameter lies in the cache's own memory
        values = {
            t: decode(t.type, parts[plan.index[t]]).copy() if plan.index[t] in parts else empty for t in plan.outputs
        }
        if self._request is not None:
            self._keep(plan, memory)
            if self._commits:
                self._commit(memory, places)
        return values

    def _whole(self, plan: Plan, memory: HostMemory) -> Request:
        """Return the program that reads whole caches for `plan`."""
        if self._other is None or self._other[0] != plan.key:
            assert self.otherwise is not None  # emitters of windows provide the alternative
            self._other = plan.key, self.otherwise(plan, memory)
            self.notes["models for rows beyond the cells that are read"] += 1
        return self._other[1]

    def _number(self, n: int) -> int:
        return evaluate(expr_of(n), self._bindings or ())

    def _feed(self, plan: Plan, memory: HostMemory, inputs: Mapping[Tensor, Bytes]) -> None:
        if self._bound[0] is not memory.stamp or self._bound[1] != plan.caches:
            self._attach(plan, memory)
        coded: dict[int, dict[str, NDArray[Any]]] = {}
        for i, feed in enumerate(self._feeds):
            if i in self._set:
                continue
            t = plan.tensors[feed.index]
            if feed.form == VALUE:
                array = value(t, memory.read(t) if plan.roles[t] == "cache" else inputs[t])
            else:
                array = coded.setdefault(feed.index, encode(t, inputs[t]) if feed.index not in coded else {})[feed.form]
            self._take_in(i, array)
        for i in range(self._first_cache, len(self._outputs)):
            index, form = self._outputs[i]
            current = memory.ordered(plan.tensors[index], form, None)  # its new contents are in ggml's order
            if i in self._moved:
                continue
            # never the tensor being read: a program may read a cache after writing it
            if i not in self._spare or self._spare[i] is current:
                self._spare[i] = OvTensor(current.element_type, current.shape)
            self._request.set_output_tensor(i, self._spare[i])

    def _take_in(self, i: int, array: NDArray[Any]) -> None:
        """Copy `array` into input `i`; make and bind a new tensor only if the shape changes."""
        own = self._taken.get(i)
        if own is None or own.shape != array.shape:
            tensor = OvTensor(np.ascontiguousarray(array))
            self._request.set_input_tensor(i, tensor)
            self._taken[i] = tensor.data
        else:
            own[...] = array

    def _attach(self, plan: Plan, memory: HostMemory) -> None:
        """Bind this session's caches to the model, and find the destinations of new rows."""
        for i, feed in enumerate(self._feeds):
            t = plan.tensors[feed.index]
            if plan.roles[t] == "cache" and feed.form != VALUE:
                bound = memory.ordered(t, feed.form, self._orders.get(feed))
                if self._set.get(i) is not bound:
                    self._request.set_input_tensor(i, bound)
                    self._set[i] = bound
        self._targets = [self._target(plan, memory, c) for c in self._commits]
        self._bound = memory.stamp, plan.caches

    def _target(self, plan: Plan, memory: HostMemory, c: CacheWrite) -> Target:
        cache = plan.tensors[c.index]
        table = memory.table(cache, c.form)
        if InputBinding(c.index, c.form) not in self._orders:
            table = table.reshape([self._number(n) for n in c.extents])
        exact = c.exact and c.form == NUMBER  # a scale is as wide as the model computed it
        return Target(c, cache, table, narrow(cache.type, c.form) and not exact, memory.counted(cache, c.form))

    def _keep(self, plan: Plan, memory: HostMemory) -> None:
        """Swap each cache with its new contents' tensor; the next run writes into the old one."""
        for i in range(self._first_cache, len(self._outputs)):
            index, form = self._outputs[i]
            t = plan.tensors[index]
            cache = memory.caches[t]
            memory.moved += memory.counted(t, form)
            if narrow(t.type, form):
                with np.errstate(over="ignore"):
                    cache[form].data[...] = self._request.get_output_tensor(i).data.astype("<f2")
            elif i in self._moved:
                cache[form] = OvTensor(self._request.get_output_tensor(i).data.copy())
            else:
                cache[form], self._spare[i] = self._spare[i], cache[form]
            if not narrow(t.type, form):
                memory.stamp = object()

    def _commit(self, memory: HostMemory, given: Mapping[int, NDArray[Any]]) -> None:
        """Write new rows into the caches at the positions of results or leaves (`given`)."""
        # copy results that lie in the memory of a cache before any cache changes
        copies = {i: self._request.get_output_tensor(i).data.copy() for i in self._moved if i >= len(self._outputs)}
        places: dict[tuple[bool, int, int], slice | NDArray[Any]] = {}
        with np.errstate(over="ignore"):  # too large values become infinite
            for to in self._targets:
                c, table = to.commit, to.table
                at = c.given, c.ids, table.shape[c.axis]
                try:
                    if at not in places:
                        places[at] = _places(given[c.ids] if c.given else self._out(c.ids, copies), at[2])
                    rows = self._out(c.rows, copies)
                    memory.moved += to.nbytes * rows.size // table.size
                    if c.axis:
                        table[(*[slice(None)] * c.axis, places[at])] = rows.astype("<f2") if to.narrow else rows
                    else:
                        rows = rows.reshape(-1, *table.shape[1:])
                        table[places[at]] = rows.astype("<f2") if to.narrow else rows
                except IndexError as e:
                    raise BackendError(f"{to.cache}: row index out of range: {e}") from e

    def _out(self, i: int, copies: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
        data: NDArray[Any] | None = self._rows.get(i)
        if data is None:
            data = copies[i] if i in copies else self._request.get_output_tensor(i).data
        return data


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of the rows of a commit."""

    commit: CacheWrite
    cache: Tensor
    table: NDArray[Any]
    """The cache, in the commit's shape, over its own memory."""
    narrow: bool
    """True if rows must be rounded to the cache's type."""
    nbytes: int
    """Bytes of the whole cache; 0 if another part of it counts them."""


def _places(ids: NDArray[Any], size: int) -> slice | NDArray[Any]:
    """Return `ids` as a slice if consecutive, which costs a tenth; IndexError beyond `size`."""
    ids = ids.reshape(-1)
    if not len(ids):
        return slice(0, 0)
    first, last = (int(ids[0]),) * 2 if len(ids) == 1 else (int(ids.min()), int(ids.max()))
    if first < 0 or last >= size:
        msg = f"rows {first} to {last} of {size}"
        raise IndexError(msg)
    follows = last - first + 1 == len(ids) and (len(ids) == 1 or bool((np.diff(ids) == 1).all()))
    return slice(first, last + 1) if follows else ids
