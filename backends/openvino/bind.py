"""Binding: what a compiled model reads and writes at each run, and the memory of persistent tensors between runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import Node
from openvino import Tensor as OvTensor

from conformance.backend.plan import Memory, Plan, Program
from conformance.backend.sym import evaluate
from conformance.cgraph.case import Case
from conformance.cgraph.errors import BackendError, UsageError
from conformance.cgraph.requant import Requant
from conformance.cgraph.tensor import Bytes, Tensor, is_empty, nbytes

from .compile import words
from .forms import VALUE, decode, encode, held, narrow, value
from .walk import Emitted
from .weights import WeightStore


class HostMemory(Memory):
    """Weights as bytes; caches as OpenVINO tensors, one per part, which each step reads and the next finds replaced."""

    def __init__(self, case: Case, requant: Requant | None = None) -> None:
        self.weights = WeightStore(requant)
        self._bytes = {t: data.copy() for t, data in case.persistent.items()}
        self.caches: dict[Tensor, dict[str, OvTensor]] = {}
        for t in case.caches():
            if not is_empty(t):
                self.write(t, self._bytes.pop(t))

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes.

        Raises:
            UsageError: not the tensor's size.
        """
        if data.nbytes != nbytes(tensor):
            raise UsageError(f"{tensor}: {nbytes(tensor)} bytes expected, {data.nbytes} given")
        if tensor in self._bytes:
            self._bytes[tensor] = data.copy()
            self.weights.forget(tensor)
        else:
            self.caches[tensor] = {n: OvTensor(a) for n, a in held(tensor, data).items()}

    def read(self, tensor: Tensor) -> Bytes:
        """The bytes, exact."""
        if tensor in self._bytes:
            return self._bytes[tensor].copy()
        return decode(tensor.type, {n: x.data for n, x in self.caches[tensor].items()}).copy()


class Request(Program):
    """A compiled model with its one infer request."""

    def __init__(
        self,
        compiled: Any,  # noqa: ANN401  # an openvino.CompiledModel
        emitted: Emitted,
        peak: int | None = None,
    ) -> None:
        self.compiled = compiled
        self.peak = peak
        self.notes = emitted.notes
        self._feeds = emitted.feeds
        self._outputs = emitted.outputs
        self._first_cache = emitted.first_cache
        self._commits = emitted.commits
        self._symbols = list(emitted.symbols)
        self._bindings: tuple[int, ...] | None = None
        self._request = compiled.create_infer_request() if compiled is not None else None
        self._set: dict[int, OvTensor] = {}
        self._spare: dict[int, OvTensor] = {}
        self._tables: dict[int, tuple[OvTensor, NDArray[Any]]] = {}
        self._moved = {i for i, r in enumerate(emitted.results) if _is_parameter(r)}
        self._values = np.zeros(len(self._symbols), np.int64)
        if self._request is not None:
            for k in range(len(self._symbols)):
                one = OvTensor(self._values[k : k + 1], shared_memory=True)
                self._request.set_input_tensor(len(emitted.parameters) - len(self._symbols) + k, one)

    def bind(self, bindings: tuple[int, ...]) -> None:
        """Compute what depends on the template's symbols."""
        if bindings != self._bindings:
            self._values[:] = [evaluate(e, bindings) for e in self._symbols]
            self._bindings = bindings

    def run(self, plan: Plan, memory: HostMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Bind, infer, collect.

        Raises:
            BackendError: OpenVINO's own words, or a row outside its cache.
        """
        found: dict[int, dict[str, NDArray[Any]]] = {}
        if self._request is not None:
            try:
                self._feed(plan, memory, inputs)
                self._request.infer()
            except RuntimeError as e:
                raise BackendError(f"OpenVINO failed to run: {words(e)}") from e
            for i, (index, form) in enumerate(self._outputs[: self._first_cache]):
                found.setdefault(index, {})[form] = self._request.get_output_tensor(i).data
        empty = np.empty(0, np.uint8)
        # before the caches change: a result that is a plain parameter lies in the cache's own memory
        values = {
            t: decode(t.type, found[plan.index[t]]).copy() if plan.index[t] in found else empty for t in plan.outputs
        }
        if self._request is not None:
            self._keep(plan, memory)
            self._commit(plan, memory)
        return values

    def _feed(self, plan: Plan, memory: HostMemory, inputs: Mapping[Tensor, Bytes]) -> None:
        assert self._request is not None  # a program without results has nothing to bind
        coded: dict[int, dict[str, NDArray[Any]]] = {}
        for i, feed in enumerate(self._feeds):
            t = plan.tensors[feed.index]
            cache = plan.roles[t] == "cache"
            if cache and feed.form != VALUE:
                bound = memory.caches[t][feed.form]
                if self._set.get(i) is not bound:
                    self._request.set_input_tensor(i, bound)
                    self._set[i] = bound
                continue
            if feed.form == VALUE:
                array = value(t, memory.read(t) if cache else inputs[t])
            else:
                array = coded.setdefault(feed.index, encode(t, inputs[t]) if feed.index not in coded else {})[feed.form]
            self._request.set_input_tensor(i, OvTensor(np.ascontiguousarray(array)))
        for i in range(self._first_cache, len(self._outputs)):
            if i in self._moved:
                continue
            # never the tensor that is being read: a program may read a cache after it has written it
            index, form = self._outputs[i]
            kept = memory.caches[plan.tensors[index]][form]
            if i not in self._spare or self._spare[i] is kept:
                self._spare[i] = OvTensor(kept.element_type, kept.shape)
            self._request.set_output_tensor(i, self._spare[i])

    def _keep(self, plan: Plan, memory: HostMemory) -> None:
        """New contents become the cache; what was the cache is written to next time."""
        assert self._request is not None  # as above
        for i in range(self._first_cache, len(self._outputs)):
            index, form = self._outputs[i]
            t = plan.tensors[index]
            kept = memory.caches[t]
            if narrow(t.type, form):
                with np.errstate(over="ignore"):
                    kept[form].data[...] = self._request.get_output_tensor(i).data.astype("<f2")
            elif i in self._moved:
                kept[form] = OvTensor(self._request.get_output_tensor(i).data.copy())
            else:
                kept[form], self._spare[i] = self._spare[i], kept[form]

    def _commit(self, plan: Plan, memory: HostMemory) -> None:
        """New rows go into the caches."""
        assert self._request is not None  # as above
        given: dict[int, NDArray[Any]] = {}
        for k, c in enumerate(self._commits):
            bound = memory.caches[plan.tensors[c.index]][c.form]
            known = self._tables.get(k)
            if known is None or known[0] is not bound:
                known = self._tables[k] = (bound, bound.data.reshape(c.extents))
            if c.ids not in given:
                given[c.ids] = self._request.get_output_tensor(c.ids).data
            rows = self._request.get_output_tensor(c.rows).data
            try:
                if narrow(plan.tensors[c.index].type, c.form):
                    with np.errstate(over="ignore"):  # what is too large becomes infinite
                        rows = rows.astype("<f2")
                known[1][(slice(None),) * c.axis + (given[c.ids],)] = rows
            except IndexError as e:
                raise BackendError(f"{plan.tensors[c.index]}: a row is written that it does not have: {e}") from e


def _is_parameter(result: Node) -> bool:
    """Whether nothing but casts and shapes lies between a parameter and `result`.

    The CPU plugin (2026.4.1) never fills a tensor that was set for such an output.
    """
    node = result.input_value(0).get_node()
    while node.get_type_name() in ("Convert", "Reshape"):
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Parameter")


def layers(compiled: Any) -> dict[str, int]:  # noqa: ANN401  # an openvino.CompiledModel
    """Type of each executed layer -> how many, as the device's runtime model names them."""
    found: dict[str, int] = {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        name = info["layerType"].astype(str) if "layerType" in info else node.get_type_name()
        found[name] = found.get(name, 0) + 1
    return found
