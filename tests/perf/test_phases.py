"""`conform phases`: what is timed, what the counters say, and what is never made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from backends.cpu import CpuBackend
from backends.ggml import GgmlBackend
from backends.xdna2 import Xdna2Backend
from conformance.backend.interface import Session
from conformance.backend.kernel import KernelSession
from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.errors import UnavailableError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.perf.phases import energy
from conformance.perf.phases.energy import Counter, Meter
from conformance.perf.phases.phase import MODEL, generation, measure, prompt
from conformance.run.scheduler.backend import SchedBackend

TINY = "llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"


class _Watched(KernelSession):
    """Remembers what caches and results were."""

    def __init__(self, case: Case) -> None:
        backend = CpuBackend()
        super().__init__("watched", backend.kernels(), case)
        self.case = case
        self.seen: list[tuple[dict[Tensor, Bytes], dict[Tensor, Bytes]]] = []

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """As the reference."""
        before = {t: self.read(t) for t in self.case.caches()}
        found = super().compute(graph, inputs, outputs)
        self.seen.append((before, dict(found)))
        return found


class _Watching(CpuBackend):
    def __init__(self) -> None:
        super().__init__()
        self.session: _Watched | None = None

    def open(self, case: Case) -> Session:  # type: ignore[override]  # another session on purpose
        """The watched session."""
        self.session = _Watched(case)
        return self.session


def test_what_is_timed_starts_from_empty_caches() -> None:
    """The first step warms up; the timed ones then begin where a fresh run begins, and give what it gives."""
    backend = _Watching()
    case = prompt(TINY, 24, ubatch=8)
    assert len(case.steps) == 3
    phase = measure(backend, case, "pp24", 24, None)
    assert backend.session is not None
    warm, *timed = backend.session.seen
    assert len(timed) == 3
    for t, data in warm[0].items():
        assert np.array_equal(timed[0][0][t], data)
    for t, data in warm[1].items():
        assert np.array_equal(timed[0][1][t], data)
    assert phase.rate == 24 / phase.seconds
    assert (phase.joules, phase.joules_per_token, phase.watts) == (None, None, None)
    assert phase.shares == {"watched": 1.0}
    assert phase.nodes * 4 == backend.session.witness().nodes * 3


def test_energy_is_of_the_timed_steps() -> None:
    """J per token and W follow from what the counters rose by while steps were timed, not while one warmed up."""
    used = 0.0

    class Burning(CpuBackend):
        def open(self, case: Case) -> KernelSession:
            session = super().open(case)
            compute = session.compute

            def burn(g: Graph, i: Mapping[Tensor, Bytes], o: Sequence[Tensor]) -> Mapping[Tensor, Bytes]:
                nonlocal used
                used += 1
                return compute(g, i, o)

            session.compute = burn  # type: ignore[method-assign,assignment]  # counts its own energy
            return session

    meter = Meter([Counter("RAPL", "package-0", lambda: used), Counter("NVML", "0", lambda: 2 * used)])
    phase = measure(Burning(), generation(TINY, 4), "tg4", 4, meter)
    assert phase.energy == {"RAPL package-0": 4.0, "NVML 0": 8.0}
    assert (phase.joules, phase.joules_per_token) == (12.0, 3.0)
    assert phase.watts == pytest.approx(12.0 / phase.seconds)


def test_shares_are_of_the_timed_steps() -> None:
    """They add up to one, one for each device that computed, and splits are counted per graph."""
    named = {"xdna2": Xdna2Backend(k="32"), "cpu": CpuBackend()}
    backend = SchedBackend("xdna2,cpu").attach(lambda spec: named[spec.name])
    phase = measure(backend, generation(TINY, 3), "tg3", 3, None)
    assert set(phase.shares) == {"xdna2", "cpu"}
    assert sum(phase.shares.values()) == pytest.approx(1)
    case = generation(TINY, 3)
    assert phase.splits == len(backend.plan(case).graphs[case.steps[0].graph].assignment.splits)


def test_of_ggmls_own_scheduler_the_nodes_are_shared() -> None:
    """It tells who computed which node and into how many splits the last graph fell, and no time of each device."""
    phase = measure(GgmlBackend(mode="sched"), generation(TINY, 2), "tg2", 2, None)
    assert (phase.nodes_on, phase.shares, phase.splits) == ({"CPU": 1.0}, {"CPU": 1.0}, 1)


def test_a_backend_that_cannot_is_said() -> None:
    """The node and the backend's reason."""
    with pytest.raises(UnavailableError, match=r"GET_ROWS embd .*xdna2 has no kernel"):
        measure(Xdna2Backend(k="32"), prompt(TINY, 8), "pp8", 8, None)


def test_the_default_model_fits_its_context() -> None:
    """Any size runs, and the preset alone is a model."""
    assert len(prompt(MODEL, 1024).steps) == 2
    assert len(generation("llama", 3).steps) == 3


def test_the_command_prints_and_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row per size and backend; without counters every energy is said to be missing, with the reason."""
    monkeypatch.setattr(energy.meter, "__defaults__", (None, tmp_path / "nothing", "libno-such.so"))
    out = tmp_path / "phases.json"
    specs = ["--backend", "sched?devices=xdna2:k=32,cpu", "--backend", "xdna2"]
    done = CliRunner().invoke(main, ["phases", *specs, "--model", TINY, "--pp", "8", "--tg", "2", "--json", str(out)])
    assert done.exit_code == 0, done.output
    for words in ("pp8", "tg2", "xdna2", "not available", "energy not available: no RAPL counters", "no battery"):
        assert words in done.output
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["energy"].startswith("no RAPL counters")
    first, second = document["backends"].values()
    assert [p["name"] for p in first["phases"]] == ["pp8", "tg2"]
    assert first["phases"][0]["joules_per_token"] is None
    assert first["phases"][0]["tokens_per_second"] > 0
    assert "xdna2 has no kernel" in second["phases"][0]["reason"]
    assert "no hardware" in first["description"]


def test_wrong_sizes_are_refused() -> None:
    """One line, exit code 2."""
    for args in (["--pp", "0"], ["--pp", "x"], ["--pp", "", "--tg", ""]):
        done = CliRunner().invoke(main, ["phases", "--backend", "cpu", *args])
        assert done.exit_code == 2, done.output


def test_splits_shows_the_table() -> None:
    """Every node that computes with its device; only a scheduler has one."""
    case = f"kv_growth/{TINY},run=p5@0"
    done = CliRunner().invoke(main, ["splits", case, "--backend", "sched?devices=xdna2:k=32,cpu&buffers=apart"])
    assert done.exit_code == 0, done.output
    assert "xdna2" in done.output
    assert "FLASH_ATTN_EXT" in done.output
    refused = CliRunner().invoke(main, ["splits", case, "--backend", "cpu"])
    assert refused.exit_code == 2
    assert "a scheduler such as" in refused.output
