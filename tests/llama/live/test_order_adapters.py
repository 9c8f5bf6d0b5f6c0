"""Our own scheduler and adapters on lazy devices: nothing races, and bugs injected into them are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from marks import needs_wheel

from backends.ggml import GgmlBackend
from backends.ggml.session import GgmlSession, Plan
from conformance.backend.interface import Backend, Support, no
from conformance.backend.registry import Spec
from conformance.ggml.graph import Graph
from conformance.ggml.lib.devices import Devices
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.llama.live.lazy.device import Machine
from conformance.llama.live.lazy.run import Setting
from conformance.run.scheduler.backend import SchedBackend, _SchedSession
from conformance.suite import decoder

CASE = "kv_growth/llama-l=2,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p5.d3@7"
SPLIT = "ggml:device=LAZY0,ggml:device=LAZY1,ggml"
Patch = Callable[[pytest.MonkeyPatch], None]


class Picky(GgmlBackend):
    """A device that refuses ops, so that a scheduler splits graphs."""

    refused: frozenset[str] = frozenset()

    def supports(self, graph: Graph) -> list[Support]:
        """Return the device's answers, and no for the refused ops."""
        return [
            no("refused") if n.op in self.refused else s for n, s in zip(graph, super().supports(graph), strict=True)
        ]


REFUSED = {"LAZY0": {"FLASH_ATTN_EXT"}, "LAZY1": {"SET_ROWS", "RMS_NORM"}, "CPU": {"FLASH_ATTN_EXT"}}
"""One device writes the caches, another reads them."""


def split() -> Backend:
    """Return our scheduler over two lazy devices and the CPU."""

    def opened(spec: Spec) -> Backend:
        backend = Picky(**dict(spec.options))
        backend.refused = frozenset(REFUSED[backend.info().device])
        return backend

    return SchedBackend(SPLIT, "apart").attach(opened)


SETUPS: Mapping[str, Callable[[], Backend]] = {
    "graph": lambda: GgmlBackend(device="LAZY0"),
    "sched": lambda: GgmlBackend(device="LAZY0", mode="sched"),
    "split": split,
}


@pytest.fixture(scope="module")
def made() -> Machine:
    """Lazy devices of the wheel's library."""
    return Machine(Library())


@pytest.fixture
def machine(made: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The devices, which each library finds by name."""
    found = Devices.registered
    own = dict(zip(("LAZY0", "LAZY1", "LAZY2"), made.devices, strict=True))
    monkeypatch.setattr(Devices, "registered", lambda self: found(self) | {n: self.at(h) for n, h in own.items()})
    return made


def results(backend: Backend) -> list[Bytes]:
    """Return the outputs of each step of `CASE`, then the caches."""
    case = decoder.make(CASE)
    with closing(backend), closing(backend.open(case)) as session:
        values = [data for s in case.steps for data in session.compute(s.graph, s.inputs, s.outputs).values()]
        return values + [session.read(t) for t in case.caches()]


@pytest.fixture(scope="module")
def expected() -> list[Bytes]:
    """The results of the CPU alone."""
    return results(GgmlBackend())


def found(machine: Machine, setup: str, expected: Sequence[Bytes]) -> tuple[list[str], list[int]]:
    """Return the races, and the results that are missing or differ from those of the CPU alone."""
    machine.begin(Setting(("last",)))
    actual = results(SETUPS[setup]())
    wrong = [i for i, e in enumerate(expected) if i >= len(actual) or not np.array_equal(actual[i], e)]
    return [str(race) for race in machine.check()], wrong


@needs_wheel
@pytest.mark.parametrize("setup", SETUPS)
def test_a_trajectory_is_right(machine: Machine, setup: str, expected: Sequence[Bytes]) -> None:
    """To the bit, without a race, and nothing stays allocated."""
    assert found(machine, setup, expected) == ([], [])
    assert machine.run.calls["graph_compute"]
    assert machine.alive == 0


# bugs of the adapter


def _asynchronous(function: str, patch: pytest.MonkeyPatch) -> None:
    """Compute graphs without waiting for them."""
    start = Library.__init__

    def init(self: Library, where: str = "") -> None:
        start(self, where)
        setattr(self.ggml, function, getattr(self.ggml, f"{function}_async"))

    patch.setattr(Library, "__init__", init)


def _before(patch: pytest.MonkeyPatch, act: Callable[[GgmlSession, Plan], None]) -> None:
    """Do something between queueing a graph and waiting for it."""

    def run(self: GgmlSession, plan: Plan) -> dict[Tensor, Bytes]:
        for part, _ in plan.parts:
            self._ggml.backend_graph_compute_async(self._backend, part)
        act(self, plan)
        self._ggml.backend_synchronize(self._backend)
        return {t: self._packed(plan.at[t], t) for t in plan.outputs}

    patch.setattr(GgmlSession, "_run", run)


def _new_input(session: GgmlSession, plan: Plan) -> None:
    t = plan.leaves[0]
    session._library.set(plan.at[t], session._library.get(plan.at[t], nbytes(t)))


def _clear_cache(session: GgmlSession, _: Plan) -> None:
    session._ggml.backend_buffer_clear(session._persistent.stores[-1].buffer, 0)


def _free_graph(session: GgmlSession, plan: Plan) -> None:
    session._ggml.gallocr_free(session._galloc)
    session._galloc = session._ggml.gallocr_new(session._buft)
    plan.outputs = ()  # they are gone


# bugs of the scheduler


def _bring(patch: pytest.MonkeyPatch, change: Callable[[_SchedSession, Tensor, int], Bytes | None]) -> None:
    """Copy other bytes of a cache to a device, or none."""

    def bring(self: _SchedSession, t: Tensor, device: int) -> None:
        if device not in self._fresh[t] and (data := change(self, t, device)) is not None:
            self._sessions[device].write(t, data)
        self._fresh[t].add(device)

    patch.setattr(_SchedSession, "_bring", bring)


def _stale(session: _SchedSession, t: Tensor, device: int) -> Bytes:
    return session._sessions[device].read(t)


def _half(session: _SchedSession, t: Tensor, device: int) -> Bytes:
    data, old = session.read(t), session._sessions[device].read(t)
    data[: data.size // 2] = old[: data.size // 2]
    return data


def _other(session: _SchedSession, t: Tensor, _: int) -> Bytes:
    return session.read(next(other for other in session._holders if other is not t and other.name.startswith("cache")))


def _run(patch: pytest.MonkeyPatch, change: Callable[[dict[int, Bytes], Bytes], Bytes]) -> None:
    """Change the values that a split hands on; the first argument lasts for the session."""
    run, kept = _SchedSession._run, dict[int, Bytes]()

    def changed(self: _SchedSession, *arguments: Any) -> Mapping[Tensor, Bytes]:  # noqa: ANN401
        return {t: change(kept, data) for t, data in run(self, *arguments).items()}

    patch.setattr(_SchedSession, "_run", changed)


def _staged(kept: dict[int, Bytes], data: Bytes) -> Bytes:
    """Return a buffer that later values of this size overwrite."""
    kept.setdefault(data.size, data.copy())[:] = data
    return kept[data.size]


def _late(kept: dict[int, Bytes], data: Bytes) -> Bytes:
    """Return the last value of this size."""
    last, kept[data.size] = kept.get(data.size, data), data
    return last


FAULTS: Mapping[str, tuple[str, Patch]] = {
    "adapter: no wait for a graph": ("graph", lambda p: _asynchronous("backend_graph_compute", p)),
    "adapter: no wait for a scheduler": ("sched", lambda p: _asynchronous("backend_sched_graph_compute", p)),
    "adapter: no wait for a split": ("split", lambda p: _asynchronous("backend_graph_compute", p)),
    "adapter: inputs of the next step written too early": ("graph", lambda p: _before(p, _new_input)),
    "adapter: caches cleared too early": ("graph", lambda p: _before(p, _clear_cache)),
    "adapter: memory of a graph freed too early": ("graph", lambda p: _before(p, _free_graph)),
    "scheduler: a cache is not copied": ("split", lambda p: _bring(p, lambda *_: None)),
    "scheduler: a cache is copied from a stale device": ("split", lambda p: _bring(p, _stale)),
    "scheduler: half a cache is copied": ("split", lambda p: _bring(p, _half)),
    "scheduler: another cache is copied": ("split", lambda p: _bring(p, _other)),
    "scheduler: a buffer of values is reused too early": ("split", lambda p: _run(p, _staged)),
    "scheduler: a value of the split before": ("split", lambda p: _run(p, _late)),
}
"""Bug -> the backend, and what injects it."""
RACES = "adapter: "
"""Beginning of the bugs that are races; the others give wrong values."""


@needs_wheel
@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_bug_is_found(
    machine: Machine, fault: str, expected: Sequence[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same way each time: a missing wait as a race, a wrong copy by its values."""
    setup, inject = FAULTS[fault]
    with monkeypatch.context() as patch:
        inject(patch)
        races, wrong = found(machine, setup, expected)
        assert races if fault.startswith(RACES) else wrong
    with monkeypatch.context() as patch:
        inject(patch)
        assert found(machine, setup, expected) == (races, wrong)
