"""Requantised weights, which reference and backends share, are held against outputs that another program computed."""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import independent_requant
import numpy as np
import pytest
from commands import conform

from conformance import shipped
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.ggml.arithmetic import REQUANTISING
from conformance.ggml.quants import requant
from conformance.ggml.quants.requant import FORMS, Form, weight_form
from conformance.ggml.types import F16, F32
from conformance.judge.verdict import Golden, Result, Verdict
from conformance.run import golden, stored
from conformance.run.runner import Runner

FOLDER = shipped.own_golden()
OUTPUTS = json.loads((FOLDER / stored.REQUANT).read_text())["outputs"]
CASES = {c.id: c for c in casefile.read(FOLDER / stored.OPS) if any(c.id in of for of in OUTPUTS.values())}
CASE = next(i for i in OUTPUTS["requant-npu"] if i.startswith("ops/MUL_MAT-q4_0+f32-a=256x16"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The part of the golden outputs that has requantised values."""
    folder = tmp_path / "golden"
    folder.mkdir()
    casefile.write(folder / stored.OPS, list(CASES.values()))
    (folder / stored.REQUANT).write_bytes((FOLDER / stored.REQUANT).read_bytes())
    return folder


def _failed(folder: Path) -> list[Result]:
    return [r for r in golden.verify(folder) if r.verdict is not Verdict.PASS]


def test_the_file_has_what_the_independent_program_computes() -> None:
    """Each stored byte comes from plain Python floats and the package `gguf`, not from the framework's quantisers."""
    assert independent_requant.text(independent_requant.document()) == (FOLDER / stored.REQUANT).read_text()
    tree = ast.parse(Path(independent_requant.__file__).read_text())
    used = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [name for name in used if "quants" in name and name.startswith("conformance")]


def test_every_form_is_covered() -> None:
    """Some stored output depends on each form in which devices store weights, with rows of several groups."""
    forms = set()
    for name, outputs in OUTPUTS.items():
        for case in map(CASES.__getitem__, outputs):
            forms |= {weight_form(n, REQUANTISING[name].weights, REQUANTISING[name].rows) for n in case.steps[0].graph}
    assert forms == set(FORMS)


def test_an_untouched_implementation_agrees(corpus: Path) -> None:
    """The values are no false alarm."""
    assert not _failed(corpus)


PLANTED: Mapping[str, tuple[str, Form | None, Sequence[str]]] = {
    "groups of 64": ("q4_0x128", Form(4, 64), ["golden requant-npu"]),
    "groups of 32 in a row": ("q8_0xrow", Form(8, 32), ["golden requant-npu", "golden requant-channel8"]),
    "unrounded scales": ("q8_0xrow", Form(8, 0, F32), ["golden requant-npu", "golden requant-channel8"]),
    "rounded scales": ("int8xrow", Form(8, 0, F16), ["golden requant-int8xrow"]),
    "eight bits for floats": ("f16", Form(8, 0), ["golden requant-npu"]),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_changed_form_fails_the_shipped_check(what: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that reference and adapters share is found by `golden verify`, and the message names the weights."""
    name, form, where = PLANTED[what]
    monkeypatch.setitem(FORMS, name, form)
    failed = _failed(corpus)
    assert {r.backend for r in failed} == set(where)
    assert all("requantised weights (requant-" in r.detail and "stored value differs" in r.detail for r in failed)


def test_a_changed_rounding_fails_the_shipped_check(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves to even instead of away from zero is a difference in few quants; truncation one in most."""
    monkeypatch.setattr(requant, "roundf", np.floor)
    assert {r.backend for r in _failed(corpus)} == {f"golden {name}" for name in OUTPUTS}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_changed_table_fails_the_shipped_check(name: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that is no longer requantised is found, although backend and reference still agree."""
    weights = {k: v for k, v in REQUANTISING[name].weights.items() if k != "q5_K"}
    monkeypatch.setitem(REQUANTISING, name, replace(REQUANTISING[name], weights=weights))
    failed = _failed(corpus)
    assert failed
    assert all("q5_K" in r.case and r.backend == f"golden {name}" for r in failed)


@pytest.mark.parametrize(
    ("backend", "case"),
    [("npu", CASE), ("openvino-stateless?requant=channel8", next(i for i in CASES if i.startswith("ops/MUL_MAT-q6_K"))),
     ("xdna2", next(i for i in OUTPUTS["requant-int8xrow"] if "f16+f32-a=2048x4" in i))],
)  # fmt: skip
def test_a_backend_that_requantises_is_compared(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are golden, too; a shared fault in the form fails the case on it."""
    assert _run(backend, case) == ("PASS", Golden.COMPARED)
    for name in ("q4_0x128", "q8_0xrow", "int8xrow"):
        form = FORMS[name]
        assert form is not None
        monkeypatch.setitem(FORMS, name, replace(form, group=64))
    assert _run(backend, case) == ("FAIL", Golden.DIFFERS)


def _run(backend: str, case: str) -> tuple[str, Golden | None]:
    runner = Runner()
    try:
        (result,) = runner.run(Spec.parse(backend), [runner.case(case)])
    finally:
        runner.close()
    return str(result.verdict), result.golden


def _changed(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the stored output of `CASE` for an NPU."""
    document = json.loads((folder / stored.REQUANT).read_text())
    outputs = document["outputs"]["requant-npu"]
    outputs[CASE] = base64.b64encode(change(base64.b64decode(outputs[CASE]))).decode()
    (folder / stored.REQUANT).write_text(json.dumps(document))


def test_an_overwritten_value_fails_in_a_run_and_again_from_its_file(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved case has the requantised value and names its arithmetic, so that `conform repro` says the same."""
    _changed(corpus, lambda data: np.frombuffer(data, np.float32).__add__(1).astype(np.float32).tobytes())
    monkeypatch.setenv(shipped.GOLDEN, str(corpus))
    done = conform("run", "--backend", "npu", "--case", CASE, "--save-failures", tmp_path / "saved")
    assert done.returncode == 1
    assert f"{corpus / stored.REQUANT}: {CASE}: stored value differs from the recomputed reference" in done.stdout
    assert "npu agrees with the reference" in done.stdout
    again = conform("repro", min((tmp_path / "saved").iterdir()))
    assert again.returncode == 1, again.stdout
    assert "as saved" in again.stdout
    assert "not as saved" not in again.stdout


def test_values_that_do_not_fit_their_case_fail_it(corpus: Path) -> None:
    """A value of another size, and one of a case that the corpus lacks."""
    _changed(corpus, lambda data: data[4:])
    casefile.write(corpus / stored.OPS, [c for i, c in CASES.items() if "q6_K" not in i])
    details = [r.detail for r in _failed(corpus)]
    assert sum("its output has another size" in d for d in details) == 1
    assert sum("it is not in ops.gguf" in d for d in details) == sum("q6_K" in i for of in OUTPUTS.values() for i in of)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged"),
        ('{"schema": 2, "outputs": {}}', "is damaged"),
        ('{"schema": 1, "outputs": {"exact": {}}}', "requant-int8xrow expected, 'exact' found"),
        ('{"schema": 1, "outputs": {"requant-npu": {"a": "?"}}}', "is damaged"),
    ],
)
def test_a_damaged_file_is_an_error(text: str, says: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 with the file and what is wrong."""
    (corpus / stored.REQUANT).write_text(text)
    monkeypatch.setenv(shipped.GOLDEN, str(corpus))
    done = conform("run", "--backend", "npu", "--case", CASE)
    assert (done.returncode, says in done.stderr) == (2, True), done.stdout + done.stderr
