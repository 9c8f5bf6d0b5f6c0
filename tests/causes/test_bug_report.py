"""What is handed over: a folder per cause, C++ that shows the failure, texts that nobody can break out of."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prove import headers_in, prove

from conformance.backend.interface import DeviceInfo
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.causes.bug_report import alike, write_report
from conformance.causes.bug_report.proof import plain_devices, proof_of
from conformance.ggml.arithmetic import EXACT, GGML_CPU
from conformance.ggml.errors import CaseFileError, UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.lib import files
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, new_tensor
from conformance.ggml.types import F32, I64
from conformance.judge.cause import Cause, Condition
from conformance.judge.evidence import Fault, Place
from conformance.judge.verdict import Result, Verdict
from conformance.run.execute import StepValues
from conformance.run.oracle import Expectation, Oracle
from conformance.run.recorded import Recording
from conformance.run.runner import Runner
from conformance.run.session import failures
from conformance.run.session.select import build

ONE = "ops/MUL_MAT-f16+f32-a=7x9,b=7x5@318"
QUANTISED = "ops/MUL_MAT-q4_0+f32-a=32x7,b=32x3@998"
STEPS = "random/nodes=6,steps=4,d=16,w=q4_0,cache=f32@117"
PLACED = "weight_placement/input-w=q4_0,buffer=1@720"
RECORDED = "captured/llama-fa-4seq-streams@0"
WRONG = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
"""What ggml's CPU device gets wrong, docs/measurements/findings/ggml.md."""
GPU = "ggml?device=Vulkan0"
INFO = DeviceInfo("ggml", "Vulkan0", "a GPU", {"ggml": "0.26.0", "commit": "abc123"})


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """Expected values."""
    with closing(Oracle()) as oracle:
        yield oracle


def _cause(case: Case, verdict: Verdict = Verdict.FAIL) -> Cause:
    return Cause(
        "mul_mat-ne2", "MUL_MAT gives wrong numbers where src[1].ne[2] is over 1: 12 cases fail.", GPU, verdict,
        "MUL_MAT", "", (Condition("src[1].ne[2]", "> 1"),), (case.id,), "always",
        {"architectures": 41, "failed": 12, "passed": 0},
    )  # fmt: skip


def _growing() -> Case:
    """A cache of three rows, one written in each of two steps, read whole by a product with a weight."""
    b = Builder()
    cache, weight = new_tensor(F32, 4, 3, name="cache"), new_tensor(F32, 4, 2, name="weight")
    steps = []
    for k in range(2):
        row, at = new_tensor(F32, 4, 1, name="row"), new_tensor(I64, 1, name="at")
        written = b.set_rows(cache, row, at)
        whole = b.reshape_2d(written, 4, 3)
        out = b.mul_mat(weight, whole)
        inputs = {row: np.full(4, k + 1, "<f4").view(np.uint8), at: np.array([k], "<i8").view(np.uint8)}
        nodes = [written, whole, out]
        for n in nodes:
            n.flags = FLAG_COMPUTE
        steps.append(Step(Graph(nodes), inputs, (out,)))
    case = Case(
        "made/growing@1", {cache: np.zeros(48, np.uint8), weight: np.arange(8, dtype="<f4").view(np.uint8)}, steps
    )
    case.validate()
    return case


def _result(case: Case, backend: str = GPU, verdict: Verdict = Verdict.FAIL, nmse: float | None = 0.5) -> Result:
    return Result(case.id, backend, verdict, nmse=nmse, notes=("MUL_MAT node_1 diverges",))


def _expected(oracle: Oracle, case: Case) -> Expectation:
    return oracle.expect([case], EXACT)[0]


def test_a_folder_has_what_a_maintainer_needs(oracle: Oracle, tmp_path: Path) -> None:
    """The case with its result, the command, a program in Python, a test_case, a draft with every heading filled."""
    case = build(ONE)
    expectation = _expected(oracle, case)
    folder = write_report(tmp_path, _cause(case), case, _result(case), expectation=expectation, info=INFO)
    assert folder == tmp_path / "mul_mat-ne2"
    assert sorted(p.name for p in folder.iterdir()) == ["case.gguf", "case.py", "issue.md", "test_case.cpp"]
    record = failures.record_of(casefile.read_one(folder / "case.gguf", None))
    assert record is not None
    assert (record["backend"], record["verdict"]) == (GPU, "FAIL")
    assert runpy.run_path(str(folder / "case.py"))["case"].id == case.id
    draft = (folder / "issue.md").read_text()
    for part in ("# MUL\\_MAT: silent wrong results when src1.ne\\[2\\] &gt; 1", "Vulkan0", "0.26.0", "abc123",
                 "41 architectures have such a node", "`src1.ne[2] > 1`", "test_case",
                 "MUL_MAT f32[9, 5, 1, 1] of f16[7, 9, 1, 1], f32[7, 5, 1, 1]"):  # fmt: skip
        assert part in draft


def test_a_recording_is_handed_over() -> None:
    """A recording says nothing of caches; the reference does, and a program has the bytes of both."""
    case = build(RECORDED)
    with closing(Runner()) as runner:
        expectation = runner.expectation(Spec("ggml"), case)
    assert isinstance(expectation, Recording)
    values = expectation.values
    assert set(case.caches()) <= set(values[-1].caches)
    recorded = expectation.steps[-1].outputs
    assert all(np.array_equal(values[-1].outputs[t], data) for t, data in recorded.items())
    assert proof_of(case, _result(case), expectation).why


@pytest.mark.parametrize(
    ("case_id", "backend", "verdict", "why"),
    [
        (STEPS, GPU, Verdict.FAIL, "4 steps"),
        (ONE, "ggml?device=Vulkan0&mode=sched", Verdict.FAIL, "no device alone fails like this"),
        (ONE, "sched?devices=xdna2,cpu", Verdict.OVERCLAIM, "no device alone fails like this"),
        (ONE, "ggml?buffer=CPU_REPACK", Verdict.CRASH, "another buffer type"),
        (ONE, "ggml", Verdict.FAIL, "the CPU device is itself the reference"),
    ],
)
def test_what_a_test_case_cannot_show_a_program_does(
    oracle: Oracle, case_id: str, backend: str, verdict: Verdict, why: str
) -> None:
    """Steps, schedulers, buffer types and the CPU device itself; it says why."""
    case = build(case_id)
    what = proof_of(case, _result(case, backend, verdict), _expected(oracle, case))
    assert not what.test_case
    assert why in what.why
    assert what.program.count("static Step step") == len(case.steps)
    assert f"SCHED = {'true' if 'sched' in backend else 'false'};" in what.program


def test_crash_and_error_of_one_step_are_test_cases(oracle: Oracle) -> None:
    """On the CPU device a crash shows, though it is the reference."""
    case = build(ONE)
    for backend, verdict in (("ggml", Verdict.CRASH), (GPU, Verdict.OVERCLAIM), ("openvino-stateless", Verdict.FAIL)):
        what = proof_of(case, _result(case, backend, verdict), _expected(oracle, case))
        assert what.test_case
        assert (what.program, what.why) == ("", "")


@pytest.mark.parametrize(
    ("case_id", "backend", "expects", "why"),
    [
        (ONE, "ggml?guard=on", True, "memory beside a tensor"),
        (ONE, GPU, False, "no output can be compared"),
        (STEPS, GPU, True, "too many for a source file"),
    ],
)
def test_what_nothing_shows_says_so(
    oracle: Oracle, case_id: str, backend: str, expects: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no stub that could not fail."""
    monkeypatch.setattr("conformance.causes.bug_report.proof.MOST_DATA", 1 << 10)
    case = build(case_id)
    what = proof_of(case, _result(case, backend, Verdict.OVERCLAIM), _expected(oracle, case) if expects else None)
    assert (what.test_case, what.program) == ("", "")
    assert why in what.why


def test_a_draft_fits_a_screen_and_says_what_upstream_allows(tmp_path: Path) -> None:
    """A wrong node of ggml's CPU is compared with itself over contiguous copies, and needs no values of its own."""
    with closing(Runner()) as runner:
        case, spec = build(WRONG), Spec("ggml")
        (result,) = runner.run(spec, [case])
        folder = write_report(
            tmp_path, _cause(case), case, result, expectation=runner.expectation(spec, case), info=INFO,
            run=lambda variant: runner.run(spec, [variant])[0],
        )  # fmt: skip
    draft, test_case = ((folder / name).read_text() for name in ("issue.md", "test_case.cpp"))
    assert len(draft.splitlines()) <= 80
    assert test_case in draft.replace("```", "")
    assert "test-backend-ops allows an NMSE of 1e-07 for GET\\_ROWS" in draft
    assert "### First Bad Commit\nNot known: `conform build bisect RUN.json mul_mat-ne2 BUILD…` finds it." in draft
    assert "ggml_cont(ctx, " in test_case
    assert "return a[0];" in test_case
    assert re.findall(r"const std::vector<(\w+)>", test_case) == ["int32_t"]


def test_a_scheduler_has_devices_that_may_fail_alone() -> None:
    """Each is tried without it."""
    both = plain_devices(Spec.parse("sched?devices=xdna2:k=64,cpu"))
    assert list(map(str, both)) == ["xdna2?k=64", "cpu"]
    assert list(map(str, plain_devices(Spec.parse("ggml?device=X&mode=sched")))) == ["ggml?device=X"]
    assert plain_devices(Spec("ggml")) == []


def test_what_another_case_left_is_not_shown(oracle: Oracle) -> None:
    """Neither stub would fail by itself."""
    case = build(ONE)
    for seen, fault in (("after ops/X@1", Fault.NODE), ("", Fault.STALE), ("", Fault.EARLIER)):
        result = replace(_result(case), where=Place(fault))
        what = proof_of(case, result, _expected(oracle, case), seen)
        assert (what.test_case, what.program) == ("", "")
        assert "after other cases" in what.why


def test_a_test_case_allows_what_a_right_device_needs(oracle: Oracle) -> None:
    """Less than ggml's default only where the failure is below it; more where one side alone rounds activations."""
    plain, rounded = build("ops/RMS_NORM-f32-ne=33x4,eps=0.0@426"), build(QUANTISED)
    small = proof_of(plain, _result(plain, nmse=1e-9), _expected(oracle, plain))
    (allowed,) = re.findall(r"max_nmse_err\(\) override { return (\S+); }", small.test_case)
    assert 0 < float(allowed) < 1e-9
    assert (
        "max_nmse_err() override { return 0.0005; }"
        in proof_of(rounded, _result(rounded), _expected(oracle, rounded)).test_case
    )
    hidden = proof_of(rounded, _result(rounded, nmse=1e-5), _expected(oracle, rounded))
    assert hidden.program
    assert "within the 0.0005" in hidden.why
    same = oracle.expect([rounded], GGML_CPU)[0]
    assert "max_nmse_err" not in proof_of(rounded, _result(rounded), same).test_case


def test_a_folder_is_written_whole(oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run takes its place; one that fails leaves what was there; a stranger's folder stays."""
    case = build(ONE)
    expectation = _expected(oracle, case)

    def write() -> Path:
        return write_report(tmp_path / "deep/er", _cause(case), case, _result(case), expectation=expectation)

    folder = write()
    (folder / "program.cpp").write_text("old")
    assert not (write() / "program.cpp").exists()

    def broken(*_: object) -> None:
        raise CaseFileError("case.gguf", "no")

    with monkeypatch.context() as patch:
        patch.setattr(casefile, "write", broken)
        with pytest.raises(CaseFileError):
            write()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    (folder / "case.gguf").unlink()
    with pytest.raises(UsageError, match="another file is there"):
        write()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(tmp_path / "file", _cause(case), case, _result(case))


@pytest.mark.parametrize("name", ["../../out", "..", ".", "/etc/x", "a/b", "a\nb", "con\0", "x" * 400])
def test_no_id_leaves_the_folder(tmp_path: Path, name: str) -> None:
    """A cause is called what it likes; its folder is one below the given one."""
    case = build(ONE)
    made = write_report(tmp_path / "in", replace(_cause(case), id=name), case, _result(case))
    assert made.parent == tmp_path / "in"
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert [p.name for p in made.parent.iterdir()] == [made.name]


NASTY = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    [
        "```\n# Owned\n```", "~~~\n<script>", "`x` @everyone #1 https://x.invalid", "-->", "<!-- @a -->", "|\n|---|",
        '"; system("id"); //', "*/ ??/", "\\", "//\\\n#error", "%s%n", "\u202e\u2028", "a\n# Owned", "\n```\n@x",
        '"""\nboom()\n"""', "'); boom(); ('", "//CASE//\n#error", '??/"', "$(id)`id`", "\0\r\x1b[2J",
    ]
)  # fmt: skip
"""Texts that end a literal, a comment, a fence, a span or a line."""


def _nasty(case_id: str, texts: list[str]) -> tuple[Case, Cause, Result]:
    case = build(case_id)
    case.id = texts[0]
    for i, t in enumerate([*case.persistent, *(t for s in case.steps for t in s.graph.tensors())]):
        t.name = texts[i % len(texts)].encode()[:60].decode("utf-8", "ignore")
    cause = replace(
        _cause(case), sentence=texts[1], op=texts[2], message=texts[3], seen=texts[4],
        conditions=(Condition(texts[5], texts[0]), Condition(texts[1], texts[2])),
    )  # fmt: skip
    result = _result(case, f"ggml?device={texts[3]}" if "&" not in texts[3] and "=" not in texts[3] else GPU)
    return case, cause, replace(result, notes=(texts[4],))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(NASTY, min_size=6, max_size=6))
def test_texts_stay_in_their_places(oracle: Oracle, tmp_path: Path, texts: list[str]) -> None:
    """Ids, names and messages end no comment or literal of a program, no fence or span of a draft, call nobody."""
    case, cause, result = _nasty(ONE, texts)
    info = DeviceInfo("ggml", texts[5], texts[0], {texts[1]: texts[2]})
    made = write_report(tmp_path, cause, case, result, expectation=_expected(oracle, case), info=info)
    outside = _outside(made / "issue.md")
    assert "Owned" not in [line.strip("# ") for line in outside.split("\n")]
    assert not re.search(r"(?<![\w`&])[@#](?=\w)|://|(?<!&lt;!)-->|<script", outside.replace("```", ""))
    sched = replace(result, backend="ggml?mode=sched")
    found = proof_of(case, sched, _expected(oracle, case)).program
    plain, _, _ = _nasty(ONE, ["x"] * 6)
    other = proof_of(plain, sched, _expected(oracle, plain)).program
    for line, same in zip(found.split("\n"), other.split("\n"), strict=True):
        assert line.isascii()
        assert _bare(line) == _bare(same)
        assert "??" not in line


def _abort(op: str, line: int, **changed: object) -> Cause:
    said = (Condition("op", op), Condition("src[0].type", "bf16"))
    message = f"its process died (SIGABRT): ops.cpp:{line}: fatal error"
    cause = Cause(f"{op}-1", "", "ggml", Verdict.CRASH, op, message, said, (f"ops/{op}-bf16-ne=8x2@1",))
    return replace(cause, **changed)  # type: ignore[arg-type]  # fields of a cause


def test_ops_that_lack_one_type_are_one_report(tmp_path: Path) -> None:
    """One abort in several ops, at several lines, under one condition, is one draft with a row per op."""
    ops = ("SCALE", "GLU.GEGLU", "GLU.REGLU", "UNARY.SILU", "UNARY.GELU", "GLU.SWIGLU")
    aborts = [_abort(op, 100 + i) for i, op in enumerate(ops)]
    others = [
        _abort("SQR", 7, conditions=(Condition("op", "SQR"), Condition("src[0].type", "f16"))),
        _abort("SQRT", 8, conditions=(Condition("op", "SQRT"),)),
        _abort("SIN", 9, verdict=Verdict.FAIL, message=""),
        _abort("COS", 9, verdict=Verdict.FAIL, message=""),
    ]
    causes = [*aborts[:2], *others, *aborts[2:]]
    assert alike(causes) == [[0, 1, 6, 7, 8, 9], [2], [3], [4], [5]]
    cases = [build(f"ops/{op}-bf16-ne=8x2{',s=0.7' * (op == 'SCALE')}@1") for op in ops]
    results = [Result(c.id, "ggml", Verdict.CRASH) for c in cases]
    first, *also = zip(aborts, cases, results, strict=True)
    made = write_report(tmp_path, *first, also=also)
    text = (made / "issue.md").read_text(encoding="utf-8")
    assert "# SCALE, GLU.GEGLU, GLU.REGLU, UNARY.SILU and 2 more ops: crash when src0 is bf16\n" in text
    assert len(re.findall(r"^\| \S+ \| 1 \| `its process died", text, re.MULTILINE)) == len(ops)
    assert len(text.splitlines()) <= 60
    assert [c.id for c in casefile.read(made / "case.gguf")] == [c.id for c in cases]


def _outside(path: Path) -> str:
    """A text less its comment, fences and spans; a fence ends with as many backticks as it began with."""
    text = re.sub(r"<!-- A draft.*? -->", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"^(`{3,})[a-z]*\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "```" not in text
    return re.sub(r"\\[^\w\s]|`[^`\n]+`", "", text)


def _bare(line: str) -> str:
    """A line of C++ without what its literals and its comment hold."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', line).partition("//")[0]


# --- compiled and run

Run = Callable[[str, str], tuple[int, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Compile a program against the installed ggml and run it: how it ends, and what it says."""
    source = os.environ.get("GGML_SOURCE", "")
    if not (source and shutil.which("g++")):
        pytest.skip("set GGML_SOURCE to a checkout of llama.cpp or ggml, for its headers, and have g++")
    shared = Path(sysconfig.get_config_var("LIBDIR") or "") / str(sysconfig.get_config_var("LDLIBRARY"))
    if not (shared.is_file() and ".so" in shared.suffixes):
        pytest.skip("this Python is no shared library, and the ggml of the wheel needs one outside of Python")
    try:
        headers, ggml = headers_in(Path(source)), files.find()
    except UnavailableError as e:
        pytest.skip(str(e))
    path = tmp_path_factory.mktemp("program") / "program.cpp"

    def compiled(text: str, device: str) -> tuple[int, str]:
        path.write_text(text, encoding="utf-8")
        proof = prove(path, headers=headers, libraries=[ggml, shared], args=[device])
        return proof.code, proof.said

    return compiled


def test_a_program_ends_with_1_where_ggml_is_wrong(run: Run) -> None:
    """What the CPU device gets wrong, by the values that the reference expects."""
    with closing(Runner()) as runner:
        case = build(WRONG)
        (result,) = runner.run(Spec("ggml"), [case])
        what = proof_of(case, result, runner.expectation(Spec("ggml"), case))
    assert result.verdict is Verdict.FAIL
    code, said = run(what.program, "CPU")
    assert (code, said.partition(", element")[0]) == (1, "wrong: step 0, GET_ROWS node_1")


@pytest.mark.parametrize("backend", ["ggml?mode=sched", "ggml?memory=fresh"])
def test_a_program_ends_with_0_where_ggml_is_right(run: Run, backend: str) -> None:
    """Steps, caches and placed weights, freely and behind a scheduler, whatever nodes are called."""
    case, expectation = _of_ggml(_growing() if "sched" in backend else build(PLACED), Spec.parse(backend))
    for t in (t for s in case.steps for t in s.graph):
        t.name = '"\\?/%s\n*/'
    code, said = run(proof_of(case, _result(case, backend), expectation).program, "CPU")
    assert (code, said.strip().splitlines()[-1]) == (0, f"right: {len(case.steps)} step(s) on CPU")


def test_one_wrong_bit_in_the_last_step_shows(run: Run) -> None:
    """Every step is compared."""
    case, expectation = _of_ggml(_growing(), Spec("ggml"))
    steps = [StepValues(dict(v.outputs), dict(v.caches)) for v in expectation.steps]
    t, data = next(iter(steps[-1].caches.items()))
    steps[-1].caches[t] = np.concatenate([data[:3], data[3:4] ^ 0x40, data[4:]])
    code, said = run(proof_of(case, _result(case), replace(expectation, steps=steps)).program, "CPU")
    assert (code, said.strip().splitlines()[-1][:13]) == (1, f"wrong: step {len(case.steps) - 1}")


def _of_ggml(case: Case, spec: Spec) -> tuple[Case, Expectation]:
    with closing(Runner()) as runner:
        return case, runner.expectation(spec, case)
