"""The family `phases`: what is timed, what the counters say, and what is never made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, cycle
from pathlib import Path

import numpy as np
import pytest
from commands import conform_here

from backends.cpu import CpuBackend
from backends.ggml import GgmlBackend
from backends.xdna2 import Xdna2Backend
from conformance.backend.interface import Backend, Session
from conformance.backend.kernel import KernelSession
from conformance.backend.registry import Named, Spec, define, defined
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.live import energy, phases
from conformance.llama.live.energy import Counter, Meter
from conformance.llama.live.phases import compared, left_out, measure, read
from conformance.perf.measure import Rounds, Values, play
from conformance.run.scheduler.backend import SchedBackend

PAIR = Pair("phases/x@1", "ggml")

TINY = "phases/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
UNUSED, USED = "xdna2:k=7", "xdna2:k=32"


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
    phase = read(f"{TINY},ubatch=8,pp=24@0")
    assert len(phase.case.steps) == 3
    result = measure(PAIR, backend, phase, None)
    assert backend.session is not None
    warm, *timed = backend.session.seen
    assert len(timed) == 3
    for t, data in warm[0].items():
        assert np.array_equal(timed[0][0][t], data)
    for t, data in warm[1].items():
        assert np.array_equal(timed[0][1][t], data)
    seconds = result.metrics["seconds"]
    assert result.metrics == {"tokens_per_second": 24 / seconds, "seconds": seconds, "share of watched": 1.0}


class _Changed(CpuBackend):
    """The reference, with something done to what each step gives."""

    def open(self, case: Case) -> KernelSession:
        """Its session, changed."""
        session = super().open(case)
        compute = session.compute

        def changed(g: Graph, i: Mapping[Tensor, Bytes], o: Sequence[Tensor]) -> Mapping[Tensor, Bytes]:
            return self.change(compute(g, i, o))

        session.compute = changed  # type: ignore[method-assign,assignment]  # another one on purpose
        return session

    def change(self, values: Mapping[Tensor, Bytes]) -> Mapping[Tensor, Bytes]:
        """What a step gives in place of `values`."""
        raise NotImplementedError


def test_energy_is_of_the_timed_steps() -> None:
    """J per token and W follow from what the counters rose by while steps were timed, not while one warmed up."""
    used = 0.0

    class Burning(_Changed):
        def change(self, values: Mapping[Tensor, Bytes]) -> Mapping[Tensor, Bytes]:
            nonlocal used
            used += 1
            return values

    counters = Meter([Counter("RAPL", "package-0", lambda: used), Counter("NVML", "0", lambda: 2 * used)])
    found = measure(PAIR, Burning(), read(f"{TINY},tg=4@0"), counters).metrics
    assert (found["joules of RAPL package-0"], found["joules of NVML 0"]) == (4.0, 8.0)
    assert (found["joules"], found["joules_per_token"]) == (12.0, 3.0)
    assert found["watts"] == pytest.approx(12.0 / found["seconds"])


def test_a_time_without_results_fails() -> None:
    """NaN in any step's logits."""

    class Spoilt(_Changed):
        def change(self, values: Mapping[Tensor, Bytes]) -> Mapping[Tensor, Bytes]:
            return {t: np.full(data.size // 4, np.nan, "<f4").view(np.uint8) for t, data in values.items()}

    result = measure(PAIR, Spoilt(), read(f"{TINY},tg=2@0"), None)
    assert (result.verdict, result.detail) == (Verdict.FAIL, "NaN or infinity in the logits")


def test_shares_are_of_the_timed_steps() -> None:
    """They add up to one, one for each device that computed, and splits are counted per graph."""
    named = {"xdna2": Xdna2Backend(k="32"), "cpu": CpuBackend()}
    backend = SchedBackend("xdna2,cpu").attach(lambda spec: named[spec.name])
    phase = read(f"{TINY},tg=3@0")
    found = measure(PAIR, backend, phase, None).metrics
    assert found["share of xdna2"] + found["share of cpu"] == pytest.approx(1)
    assert found["splits"] == len(backend.plan(phase.case).graphs[phase.case.steps[0].graph].assignment.splits)


def test_of_ggmls_own_scheduler_the_nodes_are_shared() -> None:
    """It tells who computed which node and into how many splits the last graph fell, and no time of each device."""
    found = measure(PAIR, GgmlBackend(mode="sched"), read(f"{TINY},tg=2@0"), None).metrics
    assert (found["share of nodes on CPU"], "share of CPU" in found) == (1.0, False)
    assert found["splits"] == 1


def test_the_command_shows_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens per second of each case and device; no counters give no energy, and a refusal its reason."""
    monkeypatch.setattr(energy.meter, "__defaults__", (tmp_path / "nothing", "libno-such.so"))
    out = tmp_path / "phases.json"
    words: list[str | Path] = ["--backend", "sched?devices=xdna2:k=32,cpu", "--backend", "xdna2", "--json", out]
    done = conform_here("run", "-v", *words, "--case", f"{TINY},pp=8@0", "--case", f"{TINY},tg=2@0")
    assert done.exit_code == 3, done.output  # nothing passed on xdna2 alone
    for said in ("tokens per second", "share of xdna2", "energy: not available (no RAPL counters", "no battery"):
        assert said in done.output
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [r["verdict"] for r in rows] == ["PASS", "PASS", "UNSUPPORTED", "UNSUPPORTED"]
    assert rows[0]["metrics"]["tokens_per_second"] > 0
    assert "joules" not in rows[0]["metrics"]
    assert "GET_ROWS embd" in rows[2]["detail"]
    assert "xdna2 has no kernel" in rows[2]["detail"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("pp=0", "pp=TOKENS or tg=TOKENS expected"), ("pp=x", "32-bit integer"), ("pp=4,tg=4", "pp=TOKENS or"),
        ("pp=4,unchanged=1", "without=DEVICE expected"), ("pp=4,speed=1", "key 'speed' is unknown"),
    ],
)  # fmt: skip
def test_wrong_ids_are_refused(keys: str, said: str) -> None:
    """With what was expected."""
    with pytest.raises(UsageError, match=said):
        read(f"{TINY},{keys}@0")
    assert len(read("phases/llama-tg=3@0").case.steps) == 3


# -- a device left out


def _sched(devices: str) -> Backend:
    def opener(spec: Spec) -> Backend:
        return CpuBackend() if spec.name == "cpu" else Xdna2Backend(**dict(spec.options))

    return SchedBackend(devices).attach(opener)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that a phase takes, by whether xdna2 is there; it is played for its values."""
    seconds = {"with": 1.0, "without": 1.0}

    def timed(session: Session, case: Case) -> tuple[float, Values]:
        return seconds["with" if "xdna2" in session.witness().device else "without"], play(session, case.steps)

    spent = count()
    monkeypatch.setattr(phases, "timed", timed)
    # A budget of one second is 50 pairs of rounds, however busy the machine is.
    monkeypatch.setattr(phases, "Rounds", partial(Rounds, clock=lambda: next(spent) * 0.02))
    return seconds


def _left(devices: str, *, unchanged: int = 0) -> Result:
    phase = read(f"{TINY},tg=2,without=xdna2,unchanged={unchanged}@0")
    return compared(PAIR, _sched(devices), _sched("cpu"), phase, 1.0)


def test_a_device_without_a_share_changes_nothing(clock: dict[str, float]) -> None:
    """No node has its K: the same work elsewhere, in the same time, to the bit."""
    found = _left(f"{UNUSED},cpu", unchanged=1)
    assert (found.verdict, found.detail) == (Verdict.PASS, "without xdna2: nothing changes")
    assert (found.metrics["share of xdna2"], found.metrics["nmse_without"]) == (0, 0)
    clock["without"] = 1.04
    assert "nothing changes" in _left(f"{UNUSED},cpu").detail


@pytest.mark.parametrize(("seconds", "answer"), [(1.1, "slower without it"), (0.9, "faster without it")])
def test_a_device_that_matters_is_seen(clock: dict[str, float], seconds: float, answer: str) -> None:
    """Its time, its share and its numbers: int8 is not float32; where nothing may change it fails."""
    clock["without"] = seconds
    found = _left(f"{USED},cpu")
    assert (found.verdict, found.detail) == (Verdict.PASS, f"without xdna2: {answer}")
    assert found.metrics["share of xdna2"] > 0
    assert found.metrics["nmse_without"] > 0
    assert found.metrics["ratio"] == pytest.approx(seconds)
    failed = _left(f"{USED},cpu", unchanged=1)
    assert (failed.verdict, failed.detail) == (Verdict.FAIL, answer)


def test_an_undecided_comparison_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times that vary too much prove nothing: no result, exit code 5, and no row among the results."""
    seconds, spent = cycle((1.0, 1.2, 0.8, 1.5, 0.7)), count()
    monkeypatch.setattr(phases, "timed", lambda session, case: (next(seconds), play(session, case.steps)))
    monkeypatch.setattr(phases, "Rounds", partial(Rounds, clock=lambda: next(spent) * 2.0))
    case = f"{TINY},tg=2,without=xdna2,unchanged=1@0"
    out, journal = tmp_path / "run.json", tmp_path / "journal"
    backend = f"sched?devices={USED},cpu"
    ended = conform_here("run", "--backend", backend, "--case", case, "--json", out, "--journal", journal)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert ended.exit_code == 5, ended.output
    assert record["results"] == []
    (missing,) = record["missing"]
    assert (missing["case"], missing["cause"]) == (case, "undecided")
    assert "the times vary too much" in missing["reason"]
    assert "UNSUPPORTED" not in ended.output


def test_a_device_that_nothing_replaces_is_needed() -> None:
    """What is left refuses a node: the reason."""
    phase = read(f"{TINY},tg=2,without=cpu@0")
    found = compared(PAIR, _sched(f"{USED},cpu"), Xdna2Backend(k="32"), phase, 1.0)
    assert found.detail.startswith("without cpu: needed: ")
    assert "xdna2 has no" in found.detail


def test_which_devices_can_be_left_out() -> None:
    """Of a scheduler all but the last, which takes what no other does; of ggml's own scheduler its device."""
    spec = Spec.parse("sched?devices=xdna2:k=64%252B32,xdna2:max_n=1,cpu&buffers=apart")
    assert str(left_out(spec, "xdna2#1")) == "sched?devices=xdna2:max_n=1,cpu&buffers=apart"
    assert str(left_out(spec, "xdna2#2")) == "sched?devices=xdna2:k=64%252B32,cpu&buffers=apart"
    with pytest.raises(UnavailableError, match="without=cpu: one of xdna2#1, xdna2#2 expected"):
        left_out(spec, "cpu")
    before = defined()
    try:
        define({"mine": Named("ggml", (("device", "Vulkan0"), ("mode", "sched")))})
        assert str(left_out(Spec("mine"), "Vulkan0")) == "mine?device=CPU"
    finally:
        define(before)
    for text in ("cpu", "ggml?device=Vulkan0", "ggml?mode=sched"):
        with pytest.raises(UnavailableError, match="devices that share graphs expected"):
            left_out(Spec.parse(text), "cpu")
