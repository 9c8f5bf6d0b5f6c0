"""`conform phases --without`: what a device is good for, and when nothing changes without it."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from backends.cpu import CpuBackend
from backends.xdna2 import Xdna2Backend
from conformance.backend.interface import Backend, Session
from conformance.backend.registry import Named, Spec, define, defined
from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.perf.measure import Rounds, Values, play
from conformance.perf.phases import without
from conformance.perf.phases.phase import generation
from conformance.perf.phases.without import Difference, differences, left_out
from conformance.run.scheduler.backend import SchedBackend

TINY = "llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
UNUSED, USED = "xdna2:k=7", "xdna2:k=32"


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
    monkeypatch.setattr(without, "timed", timed)
    # A budget of one second is 50 pairs of rounds, however busy the machine is.
    monkeypatch.setattr(without, "Rounds", partial(Rounds, clock=lambda: next(spent) * 0.02))
    return seconds


def _left(devices: str) -> Difference:
    whole, less = _sched(devices), _sched("cpu")
    return differences(whole, less, "xdna2", generation(TINY, 2), "tg2", 1.0)


def test_a_device_without_a_share_changes_nothing(clock: dict[str, float]) -> None:
    """No node has its K: the same work elsewhere, in the same time, to the bit."""
    found = _left(f"{UNUSED},cpu")
    assert (found.answer, found.share, found.nmse) == ("nothing changes", 0.0, 0.0)
    clock["without"] = 1.04
    assert _left(f"{UNUSED},cpu").answer == "nothing changes"


@pytest.mark.parametrize(("seconds", "answer"), [(1.1, "slower without it"), (0.9, "faster without it")])
def test_a_device_that_matters_is_seen(clock: dict[str, float], seconds: float, answer: str) -> None:
    """Its time, its share and its numbers: int8 is not float32."""
    clock["without"] = seconds
    found = _left(f"{USED},cpu")
    assert found.answer == answer
    assert found.share is not None
    assert found.share > 0
    assert found.nmse > 0
    assert found.ratio is not None
    assert found.ratio.estimate == pytest.approx(seconds)


def test_a_device_that_nothing_replaces_is_needed() -> None:
    """What is left refuses a node: the reason."""
    found = differences(_sched(f"{USED},cpu"), Xdna2Backend(k="32"), "cpu", generation(TINY, 2), "tg2", 1.0)
    assert found.answer == "needed"
    assert "xdna2 has no" in found.reason


def test_which_devices_can_be_left_out() -> None:
    """Of a scheduler all but the last, which takes what no other does; of ggml's own scheduler its device."""
    spec = Spec.parse("sched?devices=xdna2:k=64%252B32,xdna2:max_n=1,cpu&buffers=apart")
    assert {name: str(s) for name, s in left_out(spec).items()} == {
        "xdna2#1": "sched?devices=xdna2:max_n=1,cpu&buffers=apart",
        "xdna2#2": "sched?devices=xdna2:k=64%252B32,cpu&buffers=apart",
    }
    before = defined()
    try:
        define({"mine": Named("ggml", (("device", "Vulkan0"), ("mode", "sched")))})
        assert {name: str(s) for name, s in left_out(Spec("mine")).items()} == {"Vulkan0": "mine?device=CPU"}
    finally:
        define(before)
    for text in ("cpu", "ggml?device=Vulkan0", "ggml?mode=sched"):
        with pytest.raises(UsageError, match="devices that share graphs expected"):
            left_out(Spec.parse(text))


def test_the_command_tells_and_judges(tmp_path: Path, clock: dict[str, float]) -> None:
    """A row for each phase and device; `--unchanged` makes it a gate, whose figures the file keeps."""
    out = tmp_path / "phases.json"
    words = ["phases", "--model", TINY, "--pp", "", "--tg", "2", "--without", "each", "--unchanged", "--budget", "1"]
    done = CliRunner().invoke(main, [*words, "--backend", f"sched?devices={UNUSED},cpu", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "nothing changes" in done.output
    (row,) = json.loads(out.read_text(encoding="utf-8"))["without"]
    assert (row["device"], row["name"], row["answer"], row["nmse"]) == ("xdna2", "tg2", "nothing changes", 0)
    clock["without"] = 2.0
    done = CliRunner().invoke(main, [*words, "--backend", f"sched?devices={USED},cpu"])
    assert done.exit_code == 1, done.output
    assert "slower without it" in done.output


def test_bad_words_are_refused() -> None:
    """A device that is not there, a backend of one device, a gate over nothing: one line, exit code 2."""
    sched = f"sched?devices={USED},cpu"
    for words in (["--without", "npu"], ["--unchanged"]):
        done = CliRunner().invoke(main, ["phases", "--backend", sched, "--tg", "2", "--pp", "", *words])
        assert done.exit_code == 2, done.output
    done = CliRunner().invoke(main, ["phases", "--backend", "cpu", "--without", "each"])
    assert done.exit_code == 2, done.output
    assert "devices that share graphs expected" in done.output
