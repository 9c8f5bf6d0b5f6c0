"""`conform audit`: what a library says of a weight in a buffer type is held against what it does with it there."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from marks import needs_wheel

from backends.cpu import CpuBackend
from conformance import shipped
from conformance.backend.interface import Support
from conformance.backend.registry import Spec, adapter, create
from conformance.case import casefile
from conformance.case.case import Placement
from conformance.cli import main
from conformance.ggml.errors import BackendError, UnavailableError
from conformance.ggml.ops.op import DECLARATIONS, check_node
from conformance.ggml.tensor import computes
from conformance.judge import waivers
from conformance.run.audit import CASES, Cell, Finding, audit, strict
from conformance.run.audit.cells import MADE_UP, made_up
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.select import build, case_ids
from conformance.suite.varied import variations

openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
LLAMA, ALIBI = CASES[0], next(c for c in CASES if "alibi=8,norm" in c)
LFM2 = next(c for c in CASES if "lfm2" in c).replace(".d1", "")
SMALL = "weight_placement/both-w=q4_0@0"
"""A weight that is looked up and multiplies."""
ADDED = "weight_placement/added-w=f32@0"
"""A norm's weight and a bias."""


@pytest.fixture(autouse=True)
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An adapter called `faulty-ggml`, found by its entry point here and in workers."""
    info = tmp_path / "faulty_ggml-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-ggml\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[conformance.backends]\nfaulty-ggml = faulty_ggml:FaultyGgml\n")
    paths = (str(tmp_path), str(Path(__file__).parents[1] / "helpers" / "graphs"), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(tmp_path)
    adapter.cache_clear()
    yield
    adapter.cache_clear()


def audited(
    spec: str,
    ids: Sequence[str],
    save: Path | None = None,
    time_limit: float = 120.0,
    memory_limit: int | None = None,
) -> list[Cell]:
    """Every cell."""
    runner = Runner(isolation=Isolation(isolate=True, time_limit=time_limit, memory_limit=memory_limit))
    try:
        return list(audit(runner, strict(runner, Spec.parse(spec)), [build(i) for i in ids], save))
    finally:
        runner.close()


def found(cells: Sequence[Cell]) -> list[Cell]:
    """Those in which something is wrong."""
    return [c for c in cells if c.finding not in {Finding.AGREED, Finding.UNRUN}]


def conform(*args: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(main, list(args), catch_exceptions=False)


def same_as_saved(cell: Cell) -> None:
    """`conform repro` of what was saved gives the same."""
    assert cell.saved is not None
    again = conform("repro", cell.saved)
    assert "as saved" in again.output, again.output
    assert "not as saved" not in again.output, again.output


# -- libraries with a fault ------------------------------------------------------------------------------------------


@needs_wheel
def test_a_library_without_a_fault_agrees() -> None:
    """Every weight in both buffer types, and every op_param; what it says yes to ran."""
    cells = audited("faulty-ggml?fault=none", [LLAMA])
    assert found(cells) == []
    assert {c.buffer for c in cells} == {"CPU", "CPU_REPACK"}
    assert {c.subject for c in cells} == {"trajectory", "weight", "op_param"}
    assert all(c.ran == c.taken for c in cells)


@needs_wheel
def test_support_that_depends_on_the_batch_is_unsound(tmp_path: Path) -> None:
    """Sequences of a short convolution are in another dimension than the tokens that llama.cpp asks about."""
    cells = found(audited("faulty-ggml?fault=batch", [LFM2], tmp_path))
    assert {(c.finding, c.buffer) for c in cells} == {(Finding.UNSOUND, "CPU_REPACK")}
    assert "blk.0.shortconv.in_proj.weight" in {c.name for c in cells}
    cell = next(c for c in cells if "in_proj" in c.name)
    assert cell.ran == cell.taken < cell.uses
    assert ", 1, 1], not MUL_MAT" in cell.detail
    assert "f32[64, 2, 4, 1]: " in cell.detail
    same_as_saved(cell)


@needs_wheel
def test_writing_past_the_output_is_found(tmp_path: Path) -> None:
    """The guards name the tensor behind whose end it wrote, in every cell that multiplies."""
    cells = found(audited("faulty-ggml?fault=past", [SMALL], tmp_path))
    whole = next(c for c in cells if c.subject == "trajectory")
    assert whole.finding is Finding.OVERCLAIM
    assert "16 bytes behind the end of MUL_MAT" in whole.detail
    same_as_saved(whole)


@needs_wheel
def test_an_assertion_in_a_buffer_type_costs_its_cells_only(tmp_path: Path) -> None:
    """CPU_REPACK aborts as soon as it holds something: its own words are in the cell, and CPU's cells agree."""
    cells = audited("faulty-ggml?fault=asserts", [SMALL], tmp_path)
    (bad,) = found(cells)
    assert (bad.finding, bad.buffer, bad.taken) == (Finding.OVERCLAIM, "CPU_REPACK", 2)
    assert "GGML_ASSERT(there is room) failed" in bad.detail
    assert [(c.finding, c.taken) for c in cells if c.buffer == "CPU" and c.subject == "weight"] == [(Finding.AGREED, 4)]
    same_as_saved(bad)


@needs_wheel
def test_an_ignored_op_param_is_named(tmp_path: Path) -> None:
    """Also where the trajectory itself has the very values that the library has built in."""
    cells = found(audited("faulty-ggml?fault=freq_base eps softcap", [LLAMA], tmp_path))
    assert {c.name for c in cells} == {"ROPE freq_base", "RMS_NORM eps", "FLASH_ATTN_EXT logit_softcap"}
    assert {(c.subject, c.finding) for c in cells} == {("op_param", Finding.OVERCLAIM)}
    assert all(f"so {c.name.split()[1]} is ignored" in c.detail for c in cells)
    same_as_saved(cells[0])


@needs_wheel
def test_an_op_param_that_only_some_models_use_is_named() -> None:
    """ALiBi's max_bias says something to a mask with distances only, and then the trajectory is wrong as well."""
    cells = {c.name: c for c in found(audited("faulty-ggml?fault=max_bias", [ALIBI]))}
    assert "so max_bias is ignored" in cells["FLASH_ATTN_EXT max_bias"].detail
    assert "FLASH_ATTN_EXT" in cells[""].detail


@needs_wheel
def test_a_refusal_of_equal_work_is_an_underclaim(tmp_path: Path) -> None:
    """K's projection is taken and V's is not: both are named."""
    (cell,) = found(audited("faulty-ggml?fault=whim", [LLAMA], tmp_path))
    assert (cell.finding, cell.name, cell.buffer) == (Finding.UNDERCLAIM, "blk.0.attn_v.weight", "CPU_REPACK")
    assert "attn_k" in cell.detail or "q4_0[64, 32, 1, 1]" in cell.detail


@needs_wheel
def test_a_library_that_hangs_still_gives_a_whole_table() -> None:
    """Two cells cost the time limit, the others of that buffer type say that they were not asked."""
    cells = audited("faulty-ggml?fault=hangs", [LLAMA], time_limit=4.0)
    weights = [c for c in cells if c.subject == "weight"]
    assert len(weights) == 2 * len({c.name for c in weights})
    assert {c.buffer for c in weights if c.finding is Finding.OVERCLAIM} == {"CPU_REPACK"}
    assert {c.finding for c in weights if c.buffer == "CPU"} == {Finding.AGREED}
    assert any("not asked" in c.detail for c in weights)


@needs_wheel
def test_a_library_that_takes_all_memory_costs_its_cells_only() -> None:
    """Its process is ended, and the cell says how much it held."""
    cells = audited("faulty-ggml?fault=hoards", [SMALL], memory_limit=600 << 20)
    (bad,) = found(cells)
    assert (bad.finding, bad.buffer) == (Finding.OVERCLAIM, "CPU_REPACK")
    assert "CRASH" in bad.detail
    assert "memory" in bad.detail


@needs_wheel
def test_waivers_are_of_cells(tmp_path: Path) -> None:
    """What fails as a waiver says is XFAIL and fails nothing; what is right in spite of one is XPASS and does."""

    def said(buffer: str) -> tuple[int, set[tuple[str, str]]]:
        path, out = tmp_path / "w.toml", tmp_path / "a.json"
        path.write_text(
            f'[[waiver]]\ncase = "{SMALL}#*.in.{buffer}*"\nverdict = "CRASH"\n'
            'reason = "r"\nlink = "https://x.org"\nexpiry = 9999-01-01\n'
        )
        given = ("--case", SMALL, "--waivers", str(path), "--json", str(out))
        done = conform("audit", "--backend", "faulty-ggml?fault=asserts", *given)
        (cells,) = json.loads(out.read_text())["backends"].values()
        return done.exit_code, {(c["buffer"], c["finding"]) for c in cells if c["finding"] not in {"agreed", "UNRUN"}}

    assert said("CPU_REPACK") == (0, {("CPU_REPACK", "XFAIL")})
    assert said("*") == (1, {("CPU_REPACK", "XFAIL"), ("CPU", "XPASS")})


# -- the wheel itself ------------------------------------------------------------------------------------------------


@needs_wheel
def test_the_audit_of_the_wheel_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell for each weight and buffer type of each case, whatever happened in it; JSON says what the table says.

    What is known of it is all there is: with the waivers that come along its exit code is 0.
    """
    known = waivers.parse(shipped.path("waivers", "ggml.toml").read_text(encoding="utf-8"), "ggml.toml")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "audit.json"
    result = conform("audit", "--backend", "ggml", "--json", str(out), "--save-failures", str(tmp_path / "kept"))
    document = json.loads(out.read_text())
    assert document["kind"] == "audit"
    (cells,) = document["backends"].values()
    buffers = {c["buffer"] for c in cells}
    for case_id in CASES:
        case = build(case_id)
        names = {t.name for t in case.persistent if t not in frozenset(case.caches()) and case.uses(t)}
        asked = {(c["name"], c["buffer"]) for c in cells if c["case"] == case_id and c["subject"] == "weight"}
        assert asked == {(n, b) for n in names for b in buffers}
    for c in cells:
        assert c["finding"] in result.output
        assert c["finding"] != "OVERCLAIM" or Path(c["saved"]).is_file()
    bad = [c for c in cells if c["finding"] not in {"agreed", "UNRUN"}]
    assert result.exit_code == (1 if bad else 0)
    for c in bad:
        (waiver,) = [w for w in known.entries if w.covers(f"{c['case']}#{c['name']}.in.{c['buffer']}")]
        assert c["detail"].startswith(f"{waiver.verdict}: ")
    for c in bad:
        (kept,) = casefile.read(Path(c["saved"]))
        assert kept.provenance["audit"]["name"] == c["name"]


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
    cells = audited(spec, [SMALL, ADDED])
    assert found(cells) == []
    assert {c.buffer for c in cells} == buffers
    assert any(c.ran for c in cells if c.subject == "weight")
    assert {c.taken for c in cells if c.buffer == "slot K=48"} <= {0}


@openvino
def test_what_a_version_cannot_have_is_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without the type of a weight, or an op, has nothing to answer: the cell is UNRUN, and says why."""

    def lacks(*_: object) -> list[Support]:
        raise UnavailableError("type mxfp4 is not in this library")

    monkeypatch.setattr(CpuBackend, "supports_placed", lacks)
    runner = Runner()
    cells = [c for c in audit(runner, Spec("cpu"), [build(CASES[0])]) if c.subject == "weight"]
    runner.close()
    assert {(c.finding, c.detail) for c in cells} == {(Finding.UNRUN, "type mxfp4 is not in this library")}


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
    with pytest.raises(BackendError, match="has K=64 and is for no slot of K=48"):
        backend.open(case)


def test_nothing_ran_exits_with_3() -> None:
    """A backend that takes nothing of the cases proves nothing."""
    result = conform("audit", "--backend", "xdna2?k=7", "--case", LLAMA)
    assert result.exit_code == 3
    assert "0 of" in result.output


def test_ids_of_the_default_set_can_be_chosen() -> None:
    """They are ids like any other."""
    assert case_ids([], [LLAMA], "smoke") == [LLAMA]
