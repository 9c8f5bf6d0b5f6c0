"""Demands of a witness: each form is asked as it reads, of whom it is asked, and malformed ones are one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.backend.interface import Witness
from conformance.backend.measure import Peak, resident
from conformance.backend.registry import Spec
from conformance.case import casefile, codec
from conformance.case.case import Case
from conformance.case.demands import FIELDS, parse
from conformance.cli import main
from conformance.ggml.errors import CaseFileError, GraphError
from conformance.judge.verdict import Verdict
from conformance.run.judgement import unmet
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite import FAMILIES

CASE = FAMILIES["ops"].ids("smoke")[0]
OPENVINO = Spec("openvino-stateless")
WITNESS = Witness(
    "CPU",
    "cached",
    compiles=2,
    kernels={"RMS": 3, "RoPE": 0},
    notes=["4 views read by slice"],
    state="fused",
    views={"slice": 4},
    bytes={"constants": 4096},
    counters={"programs": 2},
)


@pytest.fixture
def runner() -> Iterator[Runner]:
    """A runner of its own."""
    runner = Runner()
    yield runner
    runner.close()


def _case(demands: dict[str, Any]) -> Case:
    return Case("test/demands@0", {}, [], demands=demands)


def test_every_field_of_a_witness_can_be_demanded() -> None:
    """The grammar knows the fields that a witness has, but not what a clock says, nor which device ran a node."""
    assert set(FIELDS) == {f.name for f in fields(Witness)} - {"seconds", "placed"}


@pytest.mark.parametrize(
    ("demands", "met"),
    [
        ({}, True),
        ({"compiles": "<=2"}, True),
        ({"compiles": "<=1"}, False),
        ({"compiles": ">=3"}, False),
        ({"compiles": "==2"}, True),
        ({"compiles": 2}, True),
        ({"compiles": 1}, False),
        ({"kernels": ["RMS"]}, True),
        ({"kernels": ["R*"]}, True),
        ({"kernels": ["RMS", "FullyConnected"]}, False),
        ({"kernels": {"RMS": ">=1", "Convolution": 0}}, True),
        ({"kernels": {"RMS": "<=2"}}, False),
        ({"kernels": {"R*": "==3"}}, True),
        ({"kernels": {"*": "<=2"}}, False),
        ({"kernels": {"RMS": ">=1*programs"}}, True),
        ({"kernels": {"RMS": ">=2*programs"}}, False),
        ({"views": {"gather": 0}}, True),
        ({"views": {"slice": "<=3"}}, False),
        ({"bytes": {"constants": "<=4096"}}, True),
        ({"state": "fused"}, True),
        ({"state": "slots"}, False),
        ({"device": "C*"}, True),
        ({"notes": ["*views read by slice"]}, True),
        ({"notes": ["*gather*"]}, False),
        ({"peak_compile_bytes": "<=100000000"}, False),
        ({"compiles": "<=2", "kernels": ["RMS"], "state": "fused"}, True),
        ({"compiles": "<=2", "kernels": ["RMS"], "state": "slots"}, False),
        ({"openvino-*": {"compiles": "<=1"}}, False),
        ({"openvino-stateless[?]device=GPU*": {"compiles": "<=1"}}, True),
        ({"ggml*": {"compiles": "<=1"}, "*": {"compiles": 2}}, True),
    ],
)
def test_a_demand_is_asked_as_it_reads(demands: dict[str, Any], met: bool) -> None:
    """Numbers compare, names must be there, texts match, and a glob over backends limits whom a demand is asked of.

    What the witness has no answer to is unmet: an absent proof is no proof.
    """
    assert (unmet(_case(demands), OPENVINO, WITNESS) == "") is met


def test_an_unmet_demand_says_both_sides() -> None:
    """The sentence holds what was demanded and what the witness has."""
    said = unmet(_case({"kernels": {"RMS": "<=2"}}), OPENVINO, WITNESS)
    assert "kernels[RMS] <=2" in said
    assert said.endswith("has 3")


MALFORMED = [
    {"compiles": "few"},
    {"compiles": "<2"},
    {"compiles": "<=2*nodes"},
    {"compiles": -1},
    {"compiles": True},
    {"compiles": None},
    {"compiles": 1.5},
    {"compiles": ["<=2"]},
    {"compiles": "<=" + "9" * 5000},
    {"compiles": 10**400},
    {"kernels": "RMS"},
    {"kernels": []},
    {"kernels": [1]},
    {"kernels": {"RMS": "many"}},
    {"state": 1},
    {"state": {"fused": 1}},
    {"device": "*a" * 500},
    {"compile": "<=2"},
    {"openvino-*": "<=2"},
    {"openvino-*": {"compile": "<=2"}},
    {"openvino-*": {"openvino-*": {"compiles": 1}}},
    {"": {"compiles": 1}},
    {"a: b\n": 1},
]


@pytest.mark.parametrize("demands", MALFORMED)
def test_malformed_demands_are_one_line_that_names_the_field(demands: dict[str, Any]) -> None:
    """A document with them is refused by the reader with their place and what was expected, short enough to read."""
    case = build(CASE)
    case.demands = {}
    doc, blobs = codec.dump(case)
    doc["demands"] = demands
    with pytest.raises(CaseFileError) as e:
        codec.load(doc, blobs)
    assert e.value.field.startswith("demands.")
    assert "expected" in str(e.value)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 500


def test_a_malformed_demand_in_a_file_exits_with_2(tmp_path: Path) -> None:
    """A stranger's file with a demand that nobody can meet is bad input to every command, never a verdict."""
    case = build(CASE)
    case.demands = {"compiles": "few"}
    path = tmp_path / "c.gguf"
    casefile.write(path, [case])
    for command in ("run", "repro", "show"):
        result = CliRunner().invoke(main, [command, str(path)], catch_exceptions=False)
        assert result.exit_code == 2
        assert "demands.compiles: a number" in result.output
        assert len(result.output.strip().splitlines()) == 1


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["<=2", "RMS"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*FIELDS, "x*"]), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(demands=st.dictionaries(st.sampled_from([*FIELDS, "openvino-*", "?", ""]), _json, max_size=3))
def test_whatever_is_demanded_is_refused_or_asked(demands: dict[str, Any]) -> None:
    """Any JSON is either malformed, with a message that opens with its field, or can be asked of any witness."""
    try:
        parse(demands)
    except GraphError as e:
        assert str(e).partition(": ")[0].startswith("demands.")  # noqa: PT017  # either way is right
    else:
        for witness in (WITNESS, Witness("none", "eager")):
            assert isinstance(unmet(_case(demands), OPENVINO, witness), str)


def test_a_scoped_demand_is_not_asked_of_other_backends(runner: Runner) -> None:
    """What only a translating backend can answer, said for those, costs a kernel-level backend nothing."""
    case = build(CASE)
    case.demands = {"openvino-*": {"compiles": 7}}
    (eager,) = runner.run(Spec("ggml"), [case])
    (translated,) = runner.run(OPENVINO, [case])
    assert eager.verdict is Verdict.PASS
    assert translated.verdict is Verdict.VACUOUS
    assert "demands compiles 7; the witness has 1" in translated.detail


def test_demands_travel_with_the_case(tmp_path: Path) -> None:
    """A file keeps them, scopes included."""
    case = build(CASE)
    case.demands = {"compiles": "<=2", "openvino-*": {"kernels": ["RMS"], "views": {"gather": 0}}}
    path = tmp_path / "c.gguf"
    casefile.write(path, [case])
    assert casefile.read(path)[0].demands == case.demands


PEAKS = """
import numpy as np
from conformance.backend.measure import Peak
with Peak() as big:
    held = np.ones(64 << 20, np.uint8)
    del held
with Peak() as small:
    pass
print(big.bytes, small.bytes or 0)
"""
"""For a process of its own: the memory of this one falls when the garbage of earlier tests goes."""


def test_the_peak_of_a_block_is_seen() -> None:
    """A block that touches 64 MiB and lets it go rises by about that; one that allocates nothing by almost nothing."""
    if resident() is None:
        with Peak() as unknown:
            pass
        assert unknown.bytes is None
        return
    done = subprocess.run([sys.executable, "-c", PEAKS], check=True, capture_output=True, text=True)
    big, small = map(int, done.stdout.split())
    assert 60 << 20 <= big <= 100 << 20
    assert small <= 8 << 20


def test_a_platform_that_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the system's files there is no number, and no error either."""
    monkeypatch.setattr("conformance.backend.measure._STATUS", tmp_path / "status")
    monkeypatch.setattr("conformance.backend.measure._CLEAR", tmp_path / "no" / "clear_refs")
    with Peak() as peak:
        pass
    assert peak.bytes is None
    assert resident() is None
