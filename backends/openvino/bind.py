"""Binding: what a compiled model reads and writes at each run, and the memory of persistent tensors between runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import Node
from openvino import Tensor as OvTensor

from conformance.backend.translating import Memory, Plan, Program
from conformance.cgraph.case import Case
from conformance.cgraph.errors import BackendError, UsageError
from conformance.cgraph.tensor import Bytes, Tensor, is_empty, nbytes

from .compile import words
from .forms import VALUE, decode, encode, value
from .walk import Emitted


class HostMemory(Memory):
    """Weights as bytes; caches as OpenVINO tensors, one per part, which each step reads and the next finds replaced."""

    def __init__(self, case: Case) -> None:
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
        else:
            self.caches[tensor] = {n: OvTensor(np.ascontiguousarray(a)) for n, a in encode(tensor, data).items()}

    def read(self, tensor: Tensor) -> Bytes:
        """The bytes, exact."""
        if tensor in self._bytes:
            return self._bytes[tensor].copy()
        return decode(tensor.type, {n: x.data for n, x in self.caches[tensor].items()}).copy()


class Request(Program):
    """A compiled model with its one infer request."""

    def __init__(self, compiled: Any, emitted: Emitted) -> None:  # noqa: ANN401  # an openvino.CompiledModel
        self.compiled = compiled
        self.notes = emitted.notes
        self._feeds = emitted.feeds
        self._outputs = emitted.outputs
        self._first_cache = len(emitted.outputs) - emitted.caches
        self._request = compiled.create_infer_request() if compiled is not None else None
        self._spare: dict[int, OvTensor] = {}
        self._moved = {i for i, r in enumerate(emitted.results) if _is_parameter(r)}

    def run(self, plan: Plan, memory: HostMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Bind, infer, collect.

        Raises:
            BackendError: OpenVINO's own words.
        """
        found: dict[int, dict[str, NDArray[Any]]] = {}
        if self._request is not None:
            try:
                self._bind(plan, memory, inputs)
                self._request.infer()
            except RuntimeError as e:
                raise BackendError(f"OpenVINO failed to run: {words(e)}") from e
            for i, (index, form) in enumerate(self._outputs[: self._first_cache]):
                found.setdefault(index, {})[form] = self._request.get_output_tensor(i).data
            self._keep(plan, memory)
        empty = np.empty(0, np.uint8)
        return {
            t: decode(t.type, found[plan.index[t]]).copy() if plan.index[t] in found else empty for t in plan.outputs
        }

    def _bind(self, plan: Plan, memory: HostMemory, inputs: Mapping[Tensor, Bytes]) -> None:
        assert self._request is not None  # a program without results has nothing to bind
        coded: dict[int, dict[str, NDArray[Any]]] = {}
        for i, feed in enumerate(self._feeds):
            t = plan.tensors[feed.index]
            cache = plan.roles[t] == "cache"
            if cache and feed.form != VALUE:
                self._request.set_input_tensor(i, memory.caches[t][feed.form])
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
            if i not in self._spare:
                index, form = self._outputs[i]
                held = memory.caches[plan.tensors[index]][form]
                self._spare[i] = OvTensor(held.element_type, held.shape)
            self._request.set_output_tensor(i, self._spare[i])

    def _keep(self, plan: Plan, memory: HostMemory) -> None:
        """New contents become the cache; what was the cache is written to next time."""
        assert self._request is not None  # as above
        for i in range(self._first_cache, len(self._outputs)):
            index, form = self._outputs[i]
            held = memory.caches[plan.tensors[index]]
            if i in self._moved:
                held[form] = OvTensor(self._request.get_output_tensor(i).data.copy())
            else:
                held[form], self._spare[i] = self._spare[i], held[form]


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
