"""Voices from outside are held against llama.cpp and float64, and decide nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from marks import needs_wheel
from numpy.typing import NDArray

from conformance.cli import main
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import BackendError
from conformance.model import outside
from conformance.model.check import Check
from conformance.model.outside import AGREES, DISAGREES, NOT_HEARD, OUTSIDERS, Outsider
from conformance.model.voice import Voice
from conformance.suite.zoo.play import Device

pytestmark = needs_wheel
PROMPT = [3, 14, 15, 92, 65]
DECODE = 3
NAME = "stand-in"
F32 = NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of llama in Q8_0: llama.cpp rounds activations."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    made = CliRunner().invoke(main, ["make-model", "--arch", "llama", "--type", "q8_0", "-o", str(path)])
    assert made.exit_code == 0, made.output
    return path


@pytest.fixture(scope="module")
def check(model: Path) -> Iterator[Check]:
    """The model's check."""
    with closing(Voice(model, Device("llama.cpp"))) as voice:
        played, case = voice.record(PROMPT, DECODE)
        with closing(Check(model, case, PROMPT, played, lambda spec: Device(str(spec), "", "CPU"))) as it:
            yield it


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose packages are here, and whose module has no program."""
    monkeypatch.setitem(OUTSIDERS, NAME, Outsider("worker", ("json",), "pip install nothing"))


def _says(monkeypatch: pytest.MonkeyPatch, logits: F32) -> None:
    def heard(_name: str, _model: Path, prompt: Sequence[int], tokens: Sequence[int], _s: float) -> tuple[F32, None]:
        assert list(prompt) == PROMPT
        assert len(tokens) == DECODE
        return logits, None

    monkeypatch.setattr(outside, "heard", heard)


def _exact(check: Check) -> F32:
    return check.trajectory(EXACT).logits(check.case)


def test_what_is_as_near_as_float64_agrees(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence has the distance from llama.cpp, which rounds activations, and from float64."""
    _says(monkeypatch, _exact(check))
    found = check.opinion(NAME)
    assert found.verdict == AGREES, found.sentence()
    assert found.exact == 0.0
    assert found.figures is not None
    assert 0 < found.figures.kl_max < 1e-2
    assert found.sentence().startswith("agrees: KL ")


def _other_token(logits: F32) -> F32:
    logits[2, logits[2].argmin()] = logits[2].max() + 5
    return logits


@pytest.mark.parametrize("change", [_other_token, lambda logits: logits * 1.5])
def test_another_token_or_another_scale_disagrees(
    change: Callable[[F32], F32], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that float64 does not side with it; a wrong scale is seen although it changes no token."""
    _says(monkeypatch, change(_exact(check).copy()))
    found = check.opinion(NAME)
    assert found.verdict == DISAGREES
    assert found.sentence().endswith("it disagrees with float64, too")


def test_llama_alone_against_both_is_said(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a voice and float64 agree against llama.cpp, float64 is on its side."""
    exact = _exact(check)
    _says(monkeypatch, exact)
    monkeypatch.setattr(check, "reference", type(check.reference)(exact * 2, check.reference.tokens, None))
    monkeypatch.setattr("conformance.model.check.allowance", lambda *_: 1e-6)
    assert check.opinion(NAME).why == "float64 is on its side"


def test_another_vocabulary_is_not_heard(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of other tokens cannot be compared."""
    _says(monkeypatch, _exact(check)[:, :7])
    found = check.opinion(NAME)
    assert (found.verdict, found.why) == (NOT_HEARD, "logits of 128 tokens expected, of 7 found")


def test_a_program_that_fails_says_why(check: Check) -> None:
    """What it raises in its process is the reason; here its module has a protocol where the program should be."""
    found = check.opinion(NAME)
    assert found.verdict == NOT_HEARD
    assert "Protocols cannot be instantiated" in found.why


def test_a_program_that_is_not_installed_says_how_to_get_it(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process begins."""
    monkeypatch.setitem(OUTSIDERS, NAME, Outsider("worker", ("no_such_package",), "pip install it"))
    assert check.opinion(NAME).sentence() == "not heard: no_such_package is not installed: pip install it"


def test_no_opinion_changes_the_answer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A voice that fails is a line and part of the record; the exit code is the backends'."""

    def heard(*_: object) -> tuple[F32, None]:
        raise BackendError("it has no such architecture")

    monkeypatch.setattr(outside, "heard", heard)
    monkeypatch.setitem(OUTSIDERS, "transformers", Outsider("worker", ("json",), ""))
    out = tmp_path / "check.json"
    call = ["check-model", str(model), "--tokens", "3,14,15", "--decode", "1", "--backend", "ggml", "--json", str(out)]
    ran = CliRunner().invoke(main, [*call, "--voice", "transformers"])
    assert ran.exit_code == 0, ran.output
    assert "transformers, from outside: not heard: it has no such architecture" in ran.output
    assert json.loads(out.read_text())["voices"]["transformers"]["verdict"] == NOT_HEARD
    quiet = CliRunner().invoke(main, [*call, "--no-voices"])
    assert "from outside" not in quiet.output


@pytest.mark.parametrize("name", ["openvino-genai", "transformers"])
def test_a_program_reads_the_file_itself(name: str, check: Check) -> None:
    """Where it is installed, it gives logits of each row, or says that it does not read this model."""
    if missing := OUTSIDERS[name].lacks():
        pytest.skip(f"{missing} is not installed")
    found = check.opinion(name)
    assert found.verdict == AGREES or found.why, found.sentence()
