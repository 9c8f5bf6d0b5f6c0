"""The family `audit`: what a library says of a weight in a buffer type is held against what it does with it there."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import faulty_ggml
import pytest
from click.testing import CliRunner, Result
from marks import needs_wheel
from planted_adapter import installed

from backends.cpu import CpuBackend
from conformance import shipped
from conformance.backend.interface import Support
from conformance.backend.registry import Spec, create
from conformance.case.case import Placement
from conformance.cli import main
from conformance.ggml.errors import BackendError, UnavailableError
from conformance.ggml.ops.op import DECLARATIONS, check_node
from conformance.ggml.tensor import computes
from conformance.judge import waivers
from conformance.judge.verdict import FAILURES, Verdict
from conformance.judge.verdict import Result as Verdicted
from conformance.llama.live.audit import CASES, Auditor, ids_of
from conformance.llama.live.uses import MADE_UP, made_up
from conformance.run.isolation.isolate import Isolation
from conformance.run.session.select import build, case_ids
from conformance.suite.varied import variations

openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
LLAMA, ALIBI = CASES[0], next(c for c in CASES if "alibi=8,norm" in c)
LFM2 = next(c for c in CASES if "lfm2" in c).replace(".d1", "")
SHORT = [LLAMA, next(c for c in CASES if "gpt-oss" in c)]
"""Of which the second has the sinks that the wheel takes in a buffer where it dies of them."""
SMALL = "weight_placement/both-w=q4_0@0"
"""A weight that is looked up and multiplies."""
ADDED = "weight_placement/added-w=f32@0"
"""A norm's weight and a bias."""


@pytest.fixture(autouse=True)
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An adapter called `faulty-ggml`, found by its entry point here and in workers."""
    with installed(tmp_path, monkeypatch, "faulty-ggml", "faulty_ggml:FaultyGgml", faulty_ggml.__file__):
        yield


def audited(
    spec: str,
    cases: Sequence[str],
    save: Path | None = None,
    time_limit: float = 120.0,
    memory_limit: int | None = None,
    only: str = "*",
) -> dict[str, Verdicted]:
    """Map each audited subject that `only` matches to its result; the trajectory itself has an empty name."""
    auditor = Auditor(Spec.parse(spec), Isolation(time_limit=time_limit, memory_limit=memory_limit), save)
    try:
        subjects = {i: i.partition("#")[2] for c in cases for i in ids_of(c)}
        return {s: auditor.play(i) for i, s in subjects.items() if fnmatchcase(s, only)}
    finally:
        auditor.close()


def found(results: Mapping[str, Verdicted]) -> dict[str, Verdicted]:
    """Those in which something is wrong."""
    return {k: r for k, r in results.items() if r.verdict in FAILURES}


def conform(*args: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(main, list(args), catch_exceptions=False)


def same_as_saved(result: Verdicted) -> None:
    """`conform repro` of what was saved gives the same."""
    assert result.saved is not None
    again = conform("repro", result.saved)
    assert "as saved" in again.output, again.output
    assert "not as saved" not in again.output, again.output


# -- libraries with a fault ------------------------------------------------------------------------------------------


@needs_wheel
def test_a_library_without_a_fault_agrees() -> None:
    """Every weight in both buffer types, and every op_param; what it says yes to ran."""
    results = audited("faulty-ggml?fault=none", [LLAMA])
    assert found(results) == {}
    assert {"", "token_embd.weight", "ROPE.freq_base"} <= set(results)
    placed = [r.metrics for r in results.values() if r.metrics]
    assert {b for m in placed for b in m} >= {"taken in CPU", "taken in CPU_REPACK"}
    assert all(m[f"ran in {b}"] == m[f"taken in {b}"] for m in placed for b in ("CPU", "CPU_REPACK"))


@needs_wheel
def test_support_that_depends_on_the_batch_is_unsound() -> None:
    """Sequences of a short convolution are in another dimension than the tokens that llama.cpp asks about."""
    results = found(audited("faulty-ggml?fault=batch", [LFM2], only="*shortconv*"))
    assert {r.verdict for r in results.values()} == {Verdict.FAIL}
    result = results["blk.0.shortconv.in_proj.weight"]
    assert result.metrics["ran in CPU_REPACK"] == result.metrics["taken in CPU_REPACK"] < result.metrics["uses"]
    assert ", 1, 1], not MUL_MAT" in result.detail
    assert "f32[64, 2, 4, 1]: " in result.detail
    assert "in CPU_REPACK" in result.notes


@needs_wheel
def test_writing_past_the_output_is_found(tmp_path: Path) -> None:
    """The guards name the tensor behind whose end it wrote, wherever something multiplies."""
    whole = found(audited("faulty-ggml?fault=past", [SMALL], tmp_path))[""]
    assert whole.verdict is Verdict.OVERCLAIM
    assert "16 bytes behind the end of MUL_MAT" in whole.detail
    same_as_saved(whole)


@needs_wheel
def test_an_assertion_in_a_buffer_type_costs_that_one_only(tmp_path: Path) -> None:
    """CPU_REPACK aborts as soon as it holds something: its own words are in the result, and in CPU all uses ran."""
    (bad,) = found(audited("faulty-ggml?fault=asserts", [SMALL], tmp_path)).values()
    assert (bad.verdict, bad.metrics["taken in CPU_REPACK"]) == (Verdict.CRASH, 2)
    assert "in CPU_REPACK" in bad.notes
    assert "GGML_ASSERT(there is room) failed" in bad.detail
    assert (bad.metrics["taken in CPU"], bad.metrics["ran in CPU"]) == (4, 4)
    same_as_saved(bad)


@needs_wheel
def test_an_ignored_op_param_is_named(tmp_path: Path) -> None:
    """Also where the trajectory itself has the very values that the library has built in."""
    results = found(audited("faulty-ggml?fault=freq_base eps softcap", [LLAMA], tmp_path))
    assert set(results) == {"ROPE.freq_base", "RMS_NORM.eps", "FLASH_ATTN_EXT.logit_softcap"}
    assert {r.verdict for r in results.values()} == {Verdict.FAIL}
    assert all(f"so {name.split('.')[1]} is ignored" in r.detail for name, r in results.items())
    same_as_saved(results["RMS_NORM.eps"])


@needs_wheel
def test_an_op_param_that_only_some_models_use_is_named() -> None:
    """ALiBi's max_bias says something to a mask with distances only, and then the trajectory is wrong as well."""
    results = found(audited("faulty-ggml?fault=max_bias", [ALIBI]))
    assert "so max_bias is ignored" in results["FLASH_ATTN_EXT.max_bias"].detail
    assert "FLASH_ATTN_EXT" in results[""].detail


@needs_wheel
def test_a_refusal_of_equal_work_is_found() -> None:
    """K's projection is taken and V's is not: both are named."""
    ((name, result),) = found(audited("faulty-ggml?fault=whim", [LLAMA])).items()
    assert (result.verdict, name, result.notes[-1]) == (Verdict.FAIL, "blk.0.attn_v.weight", "in CPU_REPACK")
    assert "attn_k" in result.detail or "q4_0[64, 32, 1, 1]" in result.detail


@needs_wheel
def test_a_library_that_hangs_still_gives_every_result() -> None:
    """Two questions cost the time limit, the others of that buffer type say that they were not asked."""
    results = audited("faulty-ggml?fault=hangs", [LLAMA], time_limit=8.0)
    bad = found(results).values()
    assert {r.notes[-1] for r in bad} == {"in CPU_REPACK"}
    assert all(r.metrics["ran in CPU"] == r.metrics["taken in CPU"] for r in bad)
    assert any("not asked" in r.detail for r in bad)


@needs_wheel
def test_a_library_that_takes_all_memory_costs_that_buffer_only() -> None:
    """Its process is ended, and the result says how much it held."""
    (bad,) = found(audited("faulty-ggml?fault=hoards", [SMALL], memory_limit=600 << 20)).values()
    assert (bad.verdict, bad.notes[-1]) == (Verdict.CRASH, "in CPU_REPACK")
    assert "memory" in bad.detail


@needs_wheel
def test_waivers_are_of_audited_weights(tmp_path: Path) -> None:
    """What fails as a waiver says is XFAIL and fails nothing; what is right in spite of one is XPASS and does."""

    def said(glob: str) -> tuple[int, dict[str, str]]:
        path, out = tmp_path / "w.toml", tmp_path / "a.json"
        path.write_text(
            f'[[waiver]]\ncase = "audit/{SMALL}{glob}"\nverdict = "CRASH"\n'
            'reason = "r"\nlink = "https://x.org"\nexpiry = 9999-01-01\n'
        )
        given = ("--case", f"audit/{SMALL}*", "--waivers", str(path), "--json", str(out))
        done = conform("run", "--backend", "faulty-ggml?fault=asserts", *given)
        rows = json.loads(out.read_text())["results"]
        return done.exit_code, {r["case"].partition("#")[2]: r["verdict"] for r in rows}

    assert said("#w.weight") == (0, {"": "PASS", "w.weight": "XFAIL"})
    assert said("*") == (1, {"": "XPASS", "w.weight": "XFAIL"})


# -- the wheel itself ------------------------------------------------------------------------------------------------


@needs_wheel
def test_the_audit_of_the_wheel_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result for the trajectory, each weight and each op_param of each case, whatever happened in it.

    What is known of it is all there is: the waivers that come along cover each failure.
    """
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "audit.json"
    globs = [word for case_id in SHORT for word in ("--case", f"audit/{case_id}*")]
    done = conform(
        "run", "--backend", "ggml", *globs, "--json", str(out), "--save-failures", str(tmp_path / "failures")
    )
    document = json.loads(out.read_text())
    assert (document["kind"], document["missing"]) == ("conformance", [])
    rows = {r["case"]: r for r in document["results"]}
    assert list(rows) == [i for case_id in SHORT for i in ids_of(case_id)]
    for case_id in SHORT:
        case = build(case_id)
        for t in set(case.persistent) - set(case.caches()):
            if uses := len(case.uses(t)):
                assert rows[f"audit/{case_id}#{t.name}"]["metrics"]["uses"] == uses
    known = waivers.parse(shipped.path("waivers", "ggml.toml").read_text(encoding="utf-8"), "ggml.toml")
    bad = [r for r in rows.values() if Verdict(r["verdict"]) in FAILURES]
    assert done.exit_code == (1 if bad else 0)
    for r in bad:
        (waiver,) = [w for w in known.entries if w.covers(r["case"])]
        assert (r["verdict"], Path(r["saved"]).is_file()) == (waiver.verdict, True)


# -- what it asks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case_id", CASES)
def test_made_up_nodes_are_nodes(case_id: str) -> None:
    """llama.cpp's node for each kind of use keeps ggml's own rules and reads the weight whole."""
    case = build(case_id)
    for weight in case.persistent:
        for node in made_up(weight, case.uses(weight)):
            check_node(node)
            assert node.op in MADE_UP
            assert weight in node.src


RARE = {"ROPE": {"n_ctx_orig", "ext_factor", "beta_fast", "beta_slow", "sections", "n_offs"}}
"""Op -> op_params that are changed only where they matter: with YaRN, several positions per token, narrow rows."""


def test_every_op_param_that_changes_numbers_is_changed() -> None:
    """The cases of the audit have a node for every op_param of the ops that are in them."""
    nodes = [n for i in CASES for s in build(i).steps for n in s.graph if computes(n)]
    made = {v.name for v in variations(nodes)}
    for op in {n.op for n in nodes} - {"GLU", "UNARY"}:
        varied = {f.name for f in DECLARATIONS[op].fields if f.vary}
        assert {f"{op} {name}" for name in varied - RARE.get(op, set())} <= made
    assert {"SWIGLU op", "SWIGLU_OAI limit", "SWIGLU_OAI alpha", "TANH op"} <= made


def test_uses_are_the_nodes_that_read_a_weight() -> None:
    """Every node with a src in the weight's bytes, and no view of it."""
    case = build(LLAMA)
    for t in case.persistent:
        reading = [n for s in case.steps for n in s.graph if any(x is not None and x.root is t for x in n.src)]
        assert case.uses(t) == [n for n in reading if n.op not in {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE"}]


@pytest.mark.parametrize(
    ("spec", "buffers"),
    [
        ("cpu", {"default"}),
        ("xdna2?k=64+48", {"host", "slot K=64", "slot K=48"}),
        pytest.param("openvino-stateless", {"constant", "shared"}, marks=openvino),
    ],
)
def test_backends_without_a_library_are_audited(spec: str, buffers: set[str]) -> None:
    """In each kind of memory that they have; what a partial backend takes runs by itself; nothing is found."""
    results = [r for c in (SMALL, ADDED) for r in audited(spec, [c]).values()]
    assert [r for r in results if r.verdict in FAILURES] == []
    placed = [r.metrics for r in results if r.metrics]
    assert {name.removeprefix("taken in ") for m in placed for name in m if name.startswith("taken")} == buffers
    assert any(m[f"ran in {b}"] for m in placed for b in buffers)
    assert all(not m.get("taken in slot K=48") for m in placed)


def test_what_a_version_cannot_have_is_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without the type of a weight, or an op, has nothing to answer: UNSUPPORTED, with the reason."""

    def lacks(*_: object) -> list[Support]:
        raise UnavailableError("type mxfp4 is not in this library")

    monkeypatch.setattr(CpuBackend, "supports_placed", lacks)
    results = {k: r for k, r in audited("cpu", [SMALL]).items() if r.metrics}
    assert {(r.verdict, r.detail) for r in results.values()} == {
        (Verdict.UNSUPPORTED, "type mxfp4 is not in this library")
    }


def test_a_shared_weight_is_no_constant() -> None:
    """OpenVINO's two kinds of memory are two ways to a model: a quantised weight can only be a constant."""
    backend = create(Spec("openvino-stateless"))
    for case_id, role in ((ADDED, "input"), (SMALL, "weight")):
        case = build(case_id)
        for t in case.persistent:
            case.placement = {t: Placement(1, must=True)}
            assert backend.role_of(case, t) == role  # type: ignore[attr-defined]  # of a translating backend
            case.placement = {t: Placement(0, must=True)}
            assert backend.role_of(case, t) == "weight"  # type: ignore[attr-defined]  # as above
    backend.close()


def test_a_weight_that_must_lie_in_a_slot_of_another_k_is_refused() -> None:
    """A slot takes weights of its K only."""
    case = build(SMALL)
    (weight,) = case.persistent
    case.placement = {weight: Placement(2, must=True)}
    backend = create(Spec.parse("xdna2?k=64+48"))
    with pytest.raises(BackendError, match="has K=64 and does not fit the slot of K=48"):
        backend.open(case)


def test_an_audit_runs_only_where_it_is_named(tmp_path: Path) -> None:
    """`conform run` takes it by family or glob, has it in its journal, and never by a glob that begins with `*`."""
    assert not any(i.startswith("audit/") for i in [*case_ids([], [], "smoke"), *case_ids([], ["*llama*"], "smoke")])
    assert case_ids(["audit"], [], "smoke") == ids_of(LLAMA)
    one = f"audit/{SMALL}#w.weight"
    words = ("run", "--backend", "cpu", "--case", one, "--journal", str(tmp_path / "j"))
    assert "1 PASS" in conform(*words).output
    assert (tmp_path / "j").read_text().count('"verdict"') == 1
    assert "1 PASS" in conform(*words).output
    assert (tmp_path / "j").read_text().count('"verdict"') == 1
    assert conform("run", "--backend", "cpu", "--case", f"audit/{SMALL}#none").exit_code == 2
