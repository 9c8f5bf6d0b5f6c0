"""A witness is judged by what it counts: one that contradicts itself, or counts nothing that it declares, fails."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from trust.faults import FOLDER, read
from trust.inject import Injector

from conformance.backend.interface import Witness
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.judge.verdict import Verdict
from conformance.run.judgement import unmet
from conformance.run.session.select import build
from conformance.run.witness import contradiction

FUSED = Witness("NPU", "eager", state="fused", kernels={"ScaledDotProductAttention": 1, "MatMul": 4})
FAULTS = {f.name: f for f in read([FOLDER]) if f.kind == "evidence"}


def test_a_state_that_is_fused_needs_an_attention_layer() -> None:
    """By any maker's name for one; without it, the message says what is claimed, what is missing and what there is."""
    assert not contradiction(FUSED)
    for name in ("flash_attn", "scaled_dot_product_attention", "SDPA"):
        assert not contradiction(replace(FUSED, kernels={name: 2}))
    for kernels, there in (({"MatMul": 4, "SDPA": 0}, "MatMul"), ({}, "it counts none")):
        said = contradiction(replace(FUSED, state="fused, slots", kernels=kernels))
        assert "state=fused, slots, but its kernels hold no attention layer" in said
        assert said.endswith(there)


@pytest.mark.parametrize(("path", "count"), [("cached", "cache_hits"), ("split", "splits")])
def test_a_path_needs_its_count(path: str, count: str) -> None:
    """A program that was reused is a hit; a graph that was split has splits."""
    witness = Witness("NPU", path)
    assert f"path={path}, but {count} is 0" in contradiction(witness)
    setattr(witness, count, 1)
    assert not contradiction(witness)


@pytest.mark.parametrize(
    ("promise", "demand", "counted"),
    [
        ("appends", {"cache_bytes": "<=8192"}, {"cache_bytes": 64}),
        ("lifts", {"compiles": "<=4"}, {"cache_hits": 1}),
        ("lifts", {"compiles": "<=4"}, {"compiles": 1}),
        ("packs", {"bytes": {"constants": "<=8192"}}, {"bytes": {"constants": 64}}),
        ("tiles", {"counters": {"columns": "<=16"}}, {"counters": {"columns": 4}}),
    ],
)
def test_a_limit_on_what_is_declared_is_not_met_by_silence(
    promise: str, demand: dict[str, Any], counted: dict[str, Any]
) -> None:
    """A backend that declares an ability and counts nothing has proven nothing; one that declares none owes nothing."""
    case = Case("test/silence@0", {}, [], demands={promise: demand})
    silent, spec = Witness("NPU", "eager", promises=[promise]), Spec("third")
    assert f"of a backend that declares {promise}; the witness counts none" in unmet(case, spec, silent)
    assert not unmet(case, spec, replace(silent, **counted))
    assert not unmet(case, spec, replace(silent, promises=[]))


def test_layers_are_demanded_of_every_program() -> None:
    """Two of four in one program are not made good by another; without a count of programs nothing is met."""
    case = Case("test/layers@0", {}, [], demands={"kernels": {"RoPE": ">=2*programs"}})

    def said(layers: int, programs: int) -> str:
        counters = {"programs": programs} if programs else {}
        return unmet(case, Spec("third"), Witness("NPU", "eager", kernels={"RoPE": layers}, counters=counters))

    assert not said(4, 2)
    assert "kernels[RoPE] >=2*programs; the witness has 2 in 2 programs" in said(2, 2)
    assert said(4, 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ov-state-attention-unfused", "state=fused, but its kernels hold no attention layer"),
        ("ov-rope-unfused", "kernels[RoPE] >=2*programs; the witness has 0 in 3 programs"),
        ("ov-state-rope-unfused", "kernels[RoPE] >=2*programs; the witness has 0 in 2 programs"),
        ("xdna2-max-n-ignored", "kernels[*K=2048 TILE_N=256] <=0; the witness has 1 (a demand on *max_n=1[!0-9]*)"),
        ("xdna2-max-n-ignored-alone", "kernels[*K=2048 TILE_N=256] <=0; the witness has 1 (a demand on *max_n=1)"),
        ("xdna2-decoding-left-out", "kernels[*K=2048 TILE_N=64] ==1; the witness has 0"),
        ("xdna2-prompts-on-decode-tile", "kernels[*K=2048 TILE_N=64] <=1; the witness has 2"),
    ],
)
def test_what_no_number_shows_is_seen_by_counts(name: str, says: str) -> None:
    """Unfused layers, a wrong tile and a wrong route are VACUOUS in a shipped case, which says what was counted."""
    fault = FAULTS[name]
    if fault.of.startswith("openvino"):
        pytest.importorskip("openvino")
    with closing(Injector([fault])) as runner:
        (result,) = runner.run(fault.spec, [runner.case(fault.case)])
    assert result.verdict is Verdict.VACUOUS
    assert says in result.detail


def test_every_fault_of_evidence_has_its_message_here() -> None:
    """One that is added to the list is added above."""
    assert len(FAULTS) == 7


@pytest.mark.parametrize(
    ("spec", "rows", "lengths"),
    [
        ("sched?devices=xdna2,cpu", {1, 65}, {2048, 4096, 5632, 14336}),
        ("sched?devices=xdna2:max_n=1,cpu", {1}, {2048, 4096, 5632, 14336}),
        ("sched?devices=xdna2:k=2048:max_n=1,cpu", {1}, {2048}),
        ("sched?devices=xdna2:min_n=65,cpu", {65}, {2048, 4096, 5632, 14336}),
    ],
)
def test_each_way_of_routing_is_entitled_to_its_launches(spec: str, rows: set[int], lengths: set[int]) -> None:
    """Products go where they were asked to go, and no demand counts those that another device runs."""
    case = build(FAULTS["xdna2-max-n-ignored"].case)
    expected = {f"xdna2: K={k} TILE_N={64 if n <= 64 else 256}": 1 for k in lengths for n in rows}
    with closing(Injector([])) as runner:
        (result,) = runner.run(Spec.parse(spec), [case])
    assert result.verdict is Verdict.PASS, result.detail
    kernels: Any = (result.witness or {})["kernels"]
    assert {name: n for name, n in kernels.items() if "TILE_N" in name} == expected
