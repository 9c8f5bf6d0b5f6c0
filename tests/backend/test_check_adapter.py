"""`check_adapter`: a right adapter gets no sentence, each broken one the sentence about its fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from backends.cpu import CpuBackend
from conformance.backend import interface, registry
from conformance.backend.contract import CHECKS, Shape, check_adapter
from conformance.backend.interface import YES, Backend, DeviceInfo, Session, Support, Witness, no
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, nbytes

SHAPES = {"xdna2": Shape(k=2048)}
"""Where an adapter takes few shapes only, one that it takes."""


class Inner(Session):
    """A right session, from which each broken one differs in one method."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.real = CpuBackend().open(case)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set bytes."""
        self.real.write(tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """Give bytes."""
        return self.real.read(tensor)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run."""
        return self.real.compute(graph, inputs, outputs)

    def witness(self) -> Witness:
        """What ran."""
        return self.real.witness()

    def close(self) -> None:
        """End."""
        self.real.close()


class Right(Backend):
    """A right adapter."""

    session: type[Session] = Inner

    def info(self) -> DeviceInfo:
        """What executes."""
        return DeviceInfo("right", "CPU", "the reference, one call away", {"numpy": np.__version__})

    def supports_op(self, node: Tensor) -> Support:
        """What the reference takes."""
        return CpuBackend().supports_op(node)

    def open(self, case: Case) -> Session:
        """A session of this file."""
        return self.session(case)  # type: ignore[call-arg]  # all of this file's sessions take a case


def with_session(**methods: Any) -> type[Backend]:  # noqa: ANN401  # functions of any signature
    """A right adapter whose sessions have other methods."""
    return type("Broken", (Right,), {"session": type("BrokenSession", (Inner,), methods)})


def with_backend(**methods: Any) -> type[Backend]:  # noqa: ANN401  # as above
    """A right adapter with other methods."""
    return type("Broken", (Right,), methods)


def _values(self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]) -> dict[Tensor, Any]:
    return dict(self.real.compute(graph, inputs, outputs))


def _unpacked(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    return {t: v.view(np.float32).reshape(t.shape) for t, v in _values(self, graph, inputs, outputs).items()}


def _transposed_as_it_lies(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    sources = [t.src[0] if t.op == "TRANSPOSE" and t.src[0] is not None else t for t in outputs]
    found = self.real.compute(graph, inputs, sources)
    return {t: found[s] for t, s in zip(outputs, sources, strict=True)}


def _scaled(self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]) -> dict[Tensor, Any]:
    return {
        t: (v.view(np.float32) * 2).view(np.uint8) if t.type.name == "f32" else v
        for t, v in _values(self, graph, inputs, outputs).items()
    }


def _none(self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]) -> dict[Tensor, Any]:
    _values(self, graph, inputs, outputs)
    return {}


def _writes_inputs(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    for data in inputs.values():
        data[:] = data[::-1]
    return _values(self, graph, inputs, outputs)


def _forgets_caches(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    kept = {t: self.real.read(t) for t in self.case.persistent}
    found = _values(self, graph, inputs, outputs)
    for t, data in kept.items():
        self.real.write(t, data)
    return found


def _writes_all_of_a_cache(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    found = _values(self, graph, inputs, outputs)
    for node in graph:
        if node.op == "CPY" and node.view_src in self.case.persistent and node.flags & 16:
            root = node.view_src
            self.real.write(root, np.tile(found[node], nbytes(root) // found[node].size))
    return found


def _computes_all(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    flags = {n: n.flags for n in graph}
    for n in graph:
        n.flags |= 16
    try:
        return _values(self, graph, inputs, outputs)
    finally:
        for n, f in flags.items():
            n.flags = f


def _outputs_at_the_end(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    found = _values(self, graph, inputs, [*outputs, graph.nodes[-1]])
    last = graph.nodes[-1]
    return {t: found[last] if last.view_src is t else found[t] for t in outputs}


def _one_buffer(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    found = _values(self, graph, inputs, outputs)
    held = self.__dict__.setdefault("held", {})
    for t in outputs:
        buffer = held.setdefault(t, np.zeros_like(found[t]))
        buffer[:] = found[t]
        found[t] = buffer
    return found


def _first_inputs_again(
    self: Inner, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
) -> dict[Tensor, Any]:
    return _values(self, graph, self.__dict__.setdefault("first", inputs), outputs)


def _keeps_the_array(self: Inner, tensor: Tensor, data: Bytes) -> None:
    self.__dict__.setdefault("mine", {})[tensor] = data


def _gives_the_array(self: Inner, tensor: Tensor) -> Bytes:
    mine: dict[Tensor, Bytes] = self.__dict__.setdefault("mine", {})
    return mine.setdefault(tensor, self.real.read(tensor))


def _kept_or_real(self: Inner, tensor: Tensor) -> Bytes:
    data: Bytes | None = self.__dict__.get("mine", {}).get(tensor)
    return self.real.read(tensor) if data is None else data.copy()


def _kept_write(self: Inner, tensor: Tensor, data: Bytes) -> None:
    self.__dict__.setdefault("mine", {})[tensor] = data.copy()


SHARED: dict[Tensor, Bytes] = {}


def _shared_write(self: Inner, tensor: Tensor, data: Bytes) -> None:
    SHARED[tensor] = data.copy()
    self.real.write(tensor, data)


def _shared_read(self: Inner, tensor: Tensor) -> Bytes:
    return SHARED.get(tensor, self.real.read(tensor)).copy()


def _witness(**changes: object) -> Any:  # noqa: ANN401  # a method
    def witness(self: Inner) -> Witness:
        found = self.real.witness()
        for k, v in changes.items():
            setattr(found, k, v)
        return found

    return witness


def _raises_for_the_unknown(_: Backend, node: Tensor) -> Support:
    if node.op == "OP_OF_TOMORROW":
        raise KeyError(node.op)
    return CpuBackend().supports_op(node)


class Fickle(Right):
    """Refuses what it is asked about a second time."""

    def __init__(self) -> None:
        self.seen: set[Tensor] = set()

    def supports_op(self, node: Tensor) -> Support:
        """Yes once."""
        if node in self.seen:
            return no("seen before")
        self.seen.add(node)
        return CpuBackend().supports_op(node)


class NeedsLibrary(Right):
    """Cannot do without an argument."""

    def __init__(self, lib: str) -> None:
        self.lib = lib


class Absent(Right):
    """A device that is not here."""

    def __init__(self) -> None:
        raise UnavailableError("no such device; plug one in")


BROKEN: dict[str, tuple[Any, str]] = {
    "no class": (CpuBackend(), "is not a class that derives from conformance.backend.interface.Backend"),
    "no backend": (dict, "dict is not a class that derives"),
    "no open": (
        type("NoOpen", (Backend,), {"info": Right.info, "supports_op": Right.supports_op}),
        "has no method `open`",
    ),
    "an argument": (NeedsLibrary, "the constructor must work without arguments"),
    "not here": (Absent, "Absent() raised UnavailableError: no such device; plug one in; the constructor"),
    "info of another kind": (with_backend(info=lambda _: {"device": "x"}), "info returned a dict; it must return"),
    "info without device": (with_backend(info=lambda _: DeviceInfo("b", "", "d")), "info has '' as `device`"),
    "versions as numbers": (
        with_backend(info=lambda _: DeviceInfo("b", "d", "d", {"x": 1})),  # type: ignore[dict-item]  # the fault
        "as `versions`; it must map names",
    ),
    "supports_op raises": (with_backend(supports_op=_raises_for_the_unknown), "raised KeyError: 'OP_OF_TOMORROW' for"),
    "supports_op says True": (with_backend(supports_op=lambda *_: True), "returned a bool for"),
    "no without reason": (with_backend(supports_op=lambda *_: Support(False)), "without a reason"),
    "all is supported": (with_backend(supports_op=lambda *_: YES), "accepts OP_OF_TOMORROW"),
    "one yes for all": (
        with_backend(supports=lambda _, graph: [Support(any(n.op == "ADD" for n in graph), "no ADD") for _ in graph]),
        "among other nodes",
    ),
    "another answer later": (Fickle, "answered ADD a ADD f32[64, 16, 1, 1] differently"),
    "nothing supported": (
        with_backend(supports_op=lambda *_: no("not today")),
        "nothing can be computed; it says: not today",
    ),
    "open gives nothing": (with_backend(open=lambda *_: None), "open returned None; it must return a Session"),
    "open raises": (with_backend(open=lambda *_: 1 / 0), "raised ZeroDivisionError: division by zero; `open` must"),
    "read as floats": (with_session(read=lambda s, t: s.real.read(t).view(np.float32)), "an array of float32"),
    "read of zeros": (
        with_session(read=lambda s, t: s.real.read(t) * 0),
        "after open differs from what was written at byte",
    ),
    "write does nothing": (with_session(write=lambda *_: None), "after write differs from what was written at byte"),
    "write keeps the array": (
        with_session(write=_keeps_the_array, read=_kept_or_real),
        "after the caller reused the array",
    ),
    "read gives its own": (
        with_session(read=_gives_the_array, write=_kept_write),
        "writing into the array that `read` returned changed the session",
    ),
    "no output": (with_session(compute=_none), "compute did not give the output"),
    "not packed": (with_session(compute=_unpacked), "outputs must be packed"),
    "wrong value": (with_session(compute=_scaled), "as element"),
    "changes its inputs": (
        with_session(compute=_writes_inputs),
        "the arrays of `inputs` and of the case are read-only",
    ),
    "first inputs for ever": (with_session(compute=_first_inputs_again), "In the second compute of a session"),
    "one output buffer": (with_session(compute=_one_buffer), "each output must be a new array"),
    "transpose as it lies": (with_session(compute=_transposed_as_it_lies), "packed from its strides"),
    "forgets caches": (with_session(compute=_forgets_caches), "CPY into a view of a cache left it as it was"),
    "writes all rows": (with_session(compute=_writes_all_of_a_cache), "it must write that row only"),
    "computes what is not flagged": (with_session(compute=_computes_all), "a CPY without FLAG_COMPUTE wrote"),
    "outputs at the end": (with_session(compute=_outputs_at_the_end), "as it was right after its node ran"),
    "sessions share": (with_session(write=_shared_write, read=_shared_read), "a write in one session changed another"),
    "witness of nothing": (with_session(witness=lambda _: None), "witness returned None"),
    "witness without device": (with_session(witness=_witness(device="")), "the witness names no device"),
    "witness of another path": (
        with_session(witness=_witness(path="fast")),
        "has 'fast' as `path`; it must be one of eager",
    ),
    "witness counts nothing": (with_session(witness=_witness(nodes=0)), "counts 0 nodes"),
    "close raises": (with_backend(close=lambda _: 1 / 0), "division by zero; Sessions and the backend must close"),
}
"""Fault -> an adapter that has it, and what its sentence says."""


@pytest.mark.parametrize("name", registry.names())
def test_our_own_adapters_hold_the_interface(name: str) -> None:
    """Every adapter that is installed and can be opened here gets no sentence."""
    try:
        adapter = registry.adapter(name)
        adapter().close()
    except UnavailableError as e:
        pytest.skip(str(e))
    assert check_adapter(adapter, SHAPES.get(name, Shape())) == []


def test_a_right_adapter_gets_no_sentence() -> None:
    """What the broken ones are made from holds all."""
    assert check_adapter(Right) == []


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_adapter_gets_the_sentence_about_its_fault(fault: str) -> None:
    """The first sentence is about the fault, in words that end like a sentence; it names the adapter."""
    SHARED.clear()
    adapter, says = BROKEN[fault]
    found = check_adapter(adapter)
    assert found, "nothing was noticed"
    assert says in found[0]
    for sentence in found:
        assert sentence.endswith(".")
        assert sentence[0].isupper() or sentence.split(".")[0].split()[0] in {"dict", "<backends"}
        assert "\n" not in sentence


def test_a_missing_method_is_told_with_what_it_is_for() -> None:
    """Each method that the class lacks is one sentence, with the first line of its contract."""
    found = check_adapter(type("Empty", (Backend,), {}))
    asked = "by op, types, shapes, strides and op_params, never by data"
    assert found == [
        "Empty has no method `info`; write it: Return what executes, with versions.",
        "Empty has no method `open`; write it: Allocate and fill the case's persistent tensors.",
        f"Empty has no method `supports_op`; write it: Decide {asked}, if `node` can run.",
    ]


def test_every_check_says_what_it_asks_for() -> None:
    """The docstring that a raised error is told with is a full sentence."""
    for check in CHECKS:
        assert check.__doc__ is not None
        assert check.__doc__.endswith(".")


def test_an_adapter_of_another_version_is_told_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version in between adds a sentence; a later one asks for a newer release; this one is no fault."""
    monkeypatch.setattr(interface, "API_VERSION", 3)
    monkeypatch.setattr(interface, "API_CHANGES", {2: "rename `close` to `free`.", 3: "return `Support`."})

    def faults(version: object) -> list[str]:
        return [f for f in check_adapter(type("Old", (CpuBackend,), {"api_version": version})) if "version" in f]

    assert faults(1) == [
        "Old was written for version 1 of the interface; for 2: rename `close` to `free`.",
        "Old was written for version 2 of the interface; for 3: return `Support`.",
    ]
    assert faults(3) == []
    assert faults(4) == ["Old needs version 4 of the interface, this is 3; upgrade ggml-conformance."]
    assert faults("1") == ["Old has '1' as `api_version`; it must be a whole number from 1."]


def test_each_version_of_the_interface_says_what_changed() -> None:
    """No version is without a sentence, the first excepted."""
    assert list(interface.API_CHANGES) == list(range(2, interface.API_VERSION + 1))
