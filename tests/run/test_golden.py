"""Golden outputs: all are computed again, every backend is judged by them, and a changed or damaged one is named."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import conform
from sessions_of_pytest import session
from stand_in import Faulty, Tampered

from conformance import shipped
from conformance.backend.interface import Session
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import GGML_CPU, Arithmetic
from conformance.ggml.errors import CaseFileError, ConformanceError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.verdict import Golden, Totals, Verdict
from conformance.run import golden, stored
from conformance.run.runner import Runner
from conformance.suite import FAMILIES

MAX_BYTES = 25 * 2**20
FOLDER = shipped.golden()
CASES = {c.id: c for c in casefile.read(FOLDER / stored.OPS)}


def _first(start: str) -> str:
    return next(i for i in CASES if i.startswith(start))


EXACT, ROUNDED = _first("ops/RMS_NORM-f32-ne=2048x2"), _first("ops/MUL_MAT-q4_0+f32")
STORE = _first("ops/SET_ROWS-q8_0+f16")
"""Cases that ggml computes exactly, with rounded activations, and that store in blocks."""
BACKENDS = ("cpu", "ggml", "openvino-stateless")


def _changed(case: Case, factor: float = 1.001) -> Case:
    """The case with another last element of its stored value."""
    step = case.steps[0]
    (t, data), *others = step.expected.items()
    new = data.copy()
    new.view(np.float32)[-1] *= factor
    return replace(case, steps=[Step(step.graph, step.inputs, step.outputs, {t: new, **dict(others)})])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Golden outputs of a few cases, the values of two of them overwritten; all checksums are valid."""
    folder = tmp_path / "golden"
    folder.mkdir()
    cases = [CASES[STORE], _changed(CASES[EXACT]), _changed(CASES[ROUNDED]), CASES[_first("ops/ADD-f32")]]
    casefile.write(folder / stored.OPS, cases)
    return folder


def test_every_golden_value_is_computed_again() -> None:
    """The reference gives every stored value again, and the real ggml agrees with it within budget."""
    results = golden.verify()
    assert len(results) == 865 + 91  # with requantised weights
    assert {r.verdict for r in results} == {Verdict.PASS}, [r.sentence() for r in results if r.verdict != "PASS"][:5]


def test_golden_files_stay_small() -> None:
    """The pinned corpus takes at most 25 MiB of the repository."""
    assert sum(p.stat().st_size for p in FOLDER.rglob("*.gguf")) <= MAX_BYTES


def test_every_golden_value_says_where_it_comes_from() -> None:
    """Provenance names the reference, the ggml that agreed, and how near they were."""
    for case in CASES.values():
        assert {"reference", "agreed", "nmse", "budget_used"} <= set(case.provenance)
        assert case.steps[0].expected


@pytest.mark.parametrize("what", ["value", "input"])
def test_a_changed_value_is_seen(tmp_path: Path, what: str) -> None:
    """One changed element of a stored value, or of what it was computed from, fails its case alone."""
    cases = casefile.read(FOLDER / stored.OPS)[:100]
    victim = next(c for c in cases if c.id.startswith("ops/RMS_NORM-f32"))
    step = victim.steps[0]
    data = step.expected if what == "value" else step.inputs
    tensor, bytes_ = next((t, b) for t, b in data.items() if t.type.name == "f32")
    changed = bytes_.copy()
    changed.view(np.float32)[-1] += 1
    data[tensor] = changed
    casefile.write(tmp_path / stored.OPS, cases)
    failed = [r.case for r in golden.verify(tmp_path) if r.verdict is not Verdict.PASS]
    assert failed == [victim.id]


# -- backends are judged ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwritten_values_fail_in_repro(corpus: Path, backend: str) -> None:
    """Stored values without a tolerance count: `conform repro` names file and case of the two, and no other."""
    done = conform("repro", corpus / stored.OPS, "--backend", backend)
    _names_both(done.stdout, corpus / stored.OPS, backend)
    assert done.returncode == 1
    assert "golden: 4 compared, 2 differ" in done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwritten_values_fail_in_verify(corpus: Path, backend: str, tmp_path: Path) -> None:
    """`conform golden verify --backend` says the same, and counts it in the record."""
    out = tmp_path / "r.json"
    done = conform("golden-verify", "--backend", backend, "--corpus", corpus, "--json", out)
    _names_both(done.stdout, corpus / stored.OPS, backend)
    assert done.returncode == 1
    assert json.loads(out.read_text())["totals"]["golden"] == {"compared": 2, "differs": 2, "not comparable": 0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwritten_values_fail_in_a_run(
    corpus: Path, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases that a run makes by their ids are judged by the golden outputs, and a saved one says the same again."""
    monkeypatch.setenv(shipped.GOLDEN, str(corpus))
    words = ("--backend", backend, "--save-failures", tmp_path / "saved", "--case", EXACT, "--case", ROUNDED)
    done = conform("run", *words, "--case", STORE)
    _names_both(done.stdout, corpus / stored.OPS, backend)
    assert done.returncode == 1
    again = conform("repro", min((tmp_path / "saved").iterdir()))
    assert again.returncode == 1
    assert "as saved" in again.stdout
    assert "not as saved" not in again.stdout


def _names_both(text: str, file: Path, backend: str) -> None:
    failed = [line for line in text.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 2, text
    for case in (EXACT, ROUNDED):
        assert any(
            line.startswith(
                f"FAIL {case} on {backend}: {file}: {case}: stored value differs from the recomputed reference"
            )
            for line in failed
        ), text


@pytest.mark.parametrize("backend", [*BACKENDS, "xdna2"])
def test_untouched_values_fail_on_no_backend(backend: str, tmp_path: Path) -> None:
    """No stored value is a false alarm. Those of smoke, and recordings, are judged in `pytest conformance`."""
    smoke = set(FAMILIES["ops"].ids("smoke"))
    cases = [case for i, case in CASES.items() if i not in smoke]
    casefile.write(tmp_path / stored.OPS, cases)
    results = list(golden.judge([Spec(backend)], tmp_path))
    assert len(results) == len(cases) > 100
    assert not [r.sentence() for r in results if r.fails_run]
    totals = Totals.of(results)
    executed = totals.executed
    assert totals.golden[Golden.COMPARED] + totals.golden[Golden.NOT_COMPARABLE] == executed
    assert (totals.golden[Golden.NOT_COMPARABLE] > 0) == (backend == "xdna2")  # it requantises weights


def test_a_run_finds_the_golden_outputs_by_itself() -> None:
    """No option is needed: the record and the totals say what was compared."""
    done = conform("run", "--backend", "ggml", "--case", EXACT, "--case", ROUNDED, "-q")
    assert done.stdout.strip() == "ggml: 2 PASS; golden: 2 compared"
    other = f"{EXACT.rpartition('@')[0]}@987654"
    assert conform("run", "--backend", "ggml", "--case", other, "-q").stdout.strip() == "ggml: 1 PASS"


def test_requantised_weights_are_not_comparable() -> None:
    """Where no output with requantised weights is stored, a result is no failure, and is counted apart."""
    runner = Runner()
    try:
        weights, plain = runner.run(Spec("npu"), [runner.case(_first("ops/GET_ROWS-iq4_nl")), runner.case(EXACT)])
    finally:
        runner.close()
    assert (weights.verdict, weights.golden) == (Verdict.PASS, Golden.NOT_COMPARABLE)
    assert (plain.verdict, plain.golden) == (Verdict.PASS, Golden.COMPARED)
    assert weights.to_json()["golden"] == "not comparable"
    assert str(Totals.of([weights, plain])) == "2 PASS; golden: 1 compared, 1 not comparable"


class Other(Faulty):
    """Changes what it gives, and counts the cases that it computes."""

    batch = 8

    def __init__(self, factor: float, arithmetic: Arithmetic) -> None:
        super().__init__(self._change)
        self._arithmetic, self._factor = arithmetic, factor
        self.computed: Counter[int] = Counter()

    def arithmetic(self) -> Arithmetic:
        """As the test wants it."""
        return self._arithmetic

    def open(self, case: Case) -> Session:
        """A session that counts."""
        return Tampered(self.inner.computing_in(self._arithmetic).open(case), self.tamper)

    def _change(self, _: Graph, found: dict[Tensor, Bytes]) -> None:
        self.computed.update(map(id, found))
        for t, data in found.items():
            if t.type.name == "f32":
                data.view(np.float32)[-1] *= self._factor


class Alone(Other):
    """The same, a case at a time."""

    batch = 1


def _run(other: Other, cases: Sequence[Case]) -> list[str]:
    """What came of the cases: verdict and comparison of each."""
    runner = Runner()
    runner._backends[Spec("other")] = other
    try:
        return [f"{r.verdict} {r.golden}" for r in runner.run(Spec("other"), cases)]
    finally:
        runner.close()


def test_a_stored_value_that_the_backend_shares_names_the_reference() -> None:
    """Backend and stored value agree, and the reference gives something else: it has changed."""
    case = _changed(CASES[EXACT])
    runner = Runner()
    runner._backends[Spec("other")] = Other(1.001, Arithmetic())
    try:
        (result,) = runner.run(Spec("other"), [case])
    finally:
        runner.close()
    assert (result.verdict, result.golden) == (Verdict.FAIL, Golden.DIFFERS)
    assert f"{case.id}: stored value differs from the recomputed reference" in result.detail
    assert "other agrees with the stored value" in result.detail


def test_a_wrong_backend_does_not_accuse_the_stored_value() -> None:
    """Where reference and stored value agree, the failure is the backend's."""
    assert _run(Other(1.001, Arithmetic()), [CASES[EXACT]]) == ["FAIL compared"]
    assert _run(Other(1.1, GGML_CPU), [CASES[ROUNDED]]) == ["FAIL compared"]


@pytest.mark.parametrize("arithmetic", [Arithmetic(), GGML_CPU], ids=["exact", "ggml"])
def test_no_case_runs_twice(arithmetic: Arithmetic) -> None:
    """The comparison takes what the backend gave once, for right and for wrong stored values, in batches and alone."""
    for other in (Other(1.0, arithmetic), Alone(1.0, arithmetic)):
        cases = [CASES[STORE], CASES[EXACT], _changed(CASES[ROUNDED]), CASES[_first("ops/ADD-f32")]]
        assert _run(other, cases) == ["PASS compared", "PASS compared", "FAIL differs", "PASS compared"]
        assert set(other.computed.values()) == {1}


def test_values_of_any_case_file_count(tmp_path: Path) -> None:
    """A trajectory with stored outputs and caches and no tolerance is judged by them at every step."""
    case = FAMILIES["kv_growth"].build(FAMILIES["kv_growth"].ids("smoke")[0])
    runner = Runner()
    try:
        values = runner.oracle.expect([case], Arithmetic())[0].steps
        good = stored.with_values(case, stored.Stored("", [v.all for v in values]))
        (result,) = runner.run(Spec("ggml"), [good])
        assert (result.verdict, result.golden) == (Verdict.PASS, Golden.COMPARED)
    finally:
        runner.close()
    step = good.steps[-1]
    last = step.outputs[-1]
    wrong = step.expected[last].copy()
    wrong.view(np.float32)[-1] += 1
    good.steps[-1] = Step(step.graph, step.inputs, step.outputs, {**step.expected, last: wrong})
    path = tmp_path / "case.gguf"
    casefile.write(path, good)
    done = conform("repro", path, "--backend", "ggml")
    assert done.returncode == 1
    assert f"{path}: {case.id}: stored value differs from the recomputed reference: step {len(case.steps) - 1}: " in (
        done.stdout
    )


def test_pytest_checks_the_corpus(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pytest conformance` computes the golden outputs again, and judges the cases that it runs by them."""
    monkeypatch.setenv(shipped.GOLDEN, str(corpus))
    run = session("--backend", "ggml", "-k", "test_golden")
    assert run.returncode == 1, run.stdout
    file = corpus / stored.OPS
    assert f"FAIL {EXACT} on golden: {file}: {EXACT}: stored value differs" in run.stdout
    run = session("--backend", "ggml", "--case", EXACT, "--level", "standard")
    assert f"FAIL {EXACT} on ggml: {file}: {EXACT}: stored value differs" in run.stdout


# -- damaged files ----------------------------------------------------------------------------------------------------


def _damage(path: Path, ids: Sequence[str]) -> None:
    """Flip a bit of the stored value of each case, and leave its checksum as it is."""
    whole = bytearray(path.read_bytes())
    for case in casefile.read(path):
        if case.id in ids:
            data = next(iter(case.steps[0].expected.values())).tobytes()
            at = bytes(whole).index(data)
            whole[at] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("command", ["repro", "golden-verify", "run"])
def test_damaged_values_are_all_named(corpus: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each damaged tensor, with file, case and tensor; exit code 2, and no backend is blamed."""
    monkeypatch.setenv(shipped.GOLDEN, str(corpus))
    path = corpus / stored.OPS
    _damage(path, [EXACT, ROUNDED])
    words = {
        "repro": (path, "--backend", "ggml"),
        "golden-verify": ("--corpus", corpus, "--backend", "ggml"),
        "run": ("--case", EXACT, "--backend", "ggml"),
    }[command]
    done = conform(command, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    for case in (EXACT, ROUNDED):
        (line,) = (x for x in done.stderr.splitlines() if f"'{case}'" in x)
        assert str(path) in line
        assert "expected value of node_0 (s0/e" in line
        assert "CRC-32 differs" in line


def test_damage_of_several_files_is_named_at_once(corpus: Path) -> None:
    """Recordings beside the single ops are checked too."""
    shutil.copytree(FOLDER / "captured", corpus / "captured")
    broken = sorted((corpus / "captured").iterdir())
    for path in broken:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    _damage(corpus / stored.OPS, [EXACT])
    with pytest.raises(CaseFileError) as e:
        golden.verify(corpus)
    named = {error.file for error in (e.value, *e.value.others)}
    assert named == {str(p) for p in (corpus / stored.OPS, *broken)}


def test_bytes_that_cases_share_are_counted(tmp_path: Path) -> None:
    """Equal bytes are stored once: the message says how many other cases have them."""
    case = CASES[EXACT]
    path = tmp_path / "a.gguf"
    casefile.write(path, [case, replace(case, id=f"{case.id}1")])
    _damage(path, [EXACT])
    with pytest.raises(
        CaseFileError, match=r"expected value of node_0 \(s0/e[0-9]+\) and 1 more: its bytes are damaged"
    ):
        casefile.read(path)


def test_no_golden_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying nothing is no success, and neither is a run that should be judged by a corpus that is not there."""
    with pytest.raises(ConformanceError, match="no golden outputs"):
        golden.verify(tmp_path)
    monkeypatch.setenv(shipped.GOLDEN, str(tmp_path))
    done = conform("run", "--case", EXACT, "--backend", "ggml")
    assert done.returncode == 2
    assert "no golden outputs here" in done.stderr


# -- the list of cases ------------------------------------------------------------------------------------------------


def test_a_level_rewrites_no_golden_byte(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of golden cases is the file's own, whatever a level has; equal values keep their bytes."""
    path = corpus / stored.OPS
    casefile.write(path, [CASES[STORE], CASES[EXACT], CASES[ROUNDED]])
    before = path.read_bytes()
    monkeypatch.setattr(type(FAMILIES["ops"]), "ids", lambda *_: [_first("ops/ADD-f32")])
    assert [(r.case, r.verdict) for r in golden.update(corpus)] == [(i, "PASS") for i in (STORE, EXACT, ROUNDED)]
    assert path.read_bytes() == before


def test_cases_are_added_and_removed_by_name(corpus: Path) -> None:
    """An update mends a value that is wrong, and takes and gives up cases only where it is told to."""
    added = _first("ops/SUM-f32")
    path = corpus / stored.OPS
    held = casefile.index(path)
    golden.update(corpus, add=[added], remove=["ops/SET_ROWS-*"])
    cases = {c.id: c for c in casefile.read(path)}
    assert list(cases) == [*(i for i in held if i != STORE), added]
    for i, case in cases.items():
        values = zip(case.steps[0].expected.values(), CASES[i].steps[0].expected.values(), strict=True)
        assert all(np.array_equal(a, b) for a, b in values)
    with pytest.raises(UsageError, match="no case of"):
        golden.update(corpus, remove=["ops/NOPE-*"])


def test_an_update_keeps_what_nobody_can_compute(corpus: Path) -> None:
    """A case whose id is no longer known fails, and its value stays until it is given up by name."""
    gone = replace(CASES[EXACT], id="ops/NO_SUCH_OP-f32@1")
    casefile.write(corpus / stored.OPS, [gone, CASES[STORE]])
    assert [r.verdict for r in golden.update(corpus)] == [Verdict.FAIL, Verdict.PASS]
    assert casefile.index(corpus / stored.OPS) == [gone.id, STORE]


def test_where_nothing_can_be_written_nothing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`golden update` says where it writes, and refuses at once, in one line, an installation it cannot write to."""
    assert golden.writable(tmp_path) == tmp_path / stored.OPS
    monkeypatch.setattr(golden, "build", None)
    with pytest.raises(UsageError, match="cannot be written; golden outputs are updated in a checkout"):
        golden.update(tmp_path / "nowhere")
