"""Where a run of llama.cpp computed its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.judge.verdict import Result, Verdict
from conformance.llama.live.arch import Player
from conformance.llama.live.placement import _nodes, witness
from conformance.report.runs import placement_lines
from conformance.run.isolation.isolate import Isolation

LOG = """
## SPLIT #0: CPU # 0 inputs
node #  0 (  GET_ROWS):                 embd ( 1K) [  CPU         ] use=1,c=1:
## SPLIT #0: CPU # 0 inputs
node #  0 (  GET_ROWS):                 embd ( 1K) [  CPU         ] use=1,c=1:
## SPLIT #1: Vulkan0 # 1 inputs: [embd ( 1K)]
node #  1 (  RMS_NORM):               norm-0 ( 1K) [Vulka         ] use=1,c=1:
node #  2 (   MUL_MAT):               Qcur-0 ( 1K) [Vulka         ] use=1,c=1:
node #  3 (   MUL_MAT):               Kcur-0 ( 1K) [Vulka         ] use=1,c=1:
"""


def test_the_last_graph_of_a_log_counts() -> None:
    """A scheduler logs each graph that it splits; names of devices come from the splits, where they are whole."""
    assert _nodes(LOG.splitlines()) == {"CPU": {"GET_ROWS": 1}, "Vulkan0": {"RMS_NORM": 1, "MUL_MAT": 2}}
    assert witness("Vulkan0", {}) is None


def test_a_line_names_the_first_op_that_fell_back() -> None:
    """Runs of one backend count together; without a fall back the line names none."""
    nodes = _nodes(LOG.splitlines())
    some = [Result(f"arch/{i}@1", "ggml", Verdict.PASS, witness=witness("Vulkan0", nodes)) for i in range(2)]
    assert placement_lines(some) == ["ggml: 6 of 8 nodes on Vulkan0, 2 of 8 nodes on CPU, first GET_ROWS"]
    whole = Result("arch/a@1", "ggml", Verdict.PASS, witness=witness("Vulkan0", {"Vulkan0": {"MUL_MAT": 3}}))
    assert placement_lines([whole]) == ["ggml: 3 of 3 nodes on Vulkan0"]
    assert placement_lines([Result("ops/a@1", "cpu", Verdict.PASS)]) == []


@pytest.fixture
def player() -> Iterator[Player]:
    """Two devices of the wheel behind a meta device."""
    it = Player(Spec.parse("ggml?device=CPU+CPU"), Isolation(), None)
    yield it
    it.close()


@needs_wheel
def test_a_run_of_llama_says_where_it_ran(player: Player) -> None:
    """The counts add up to the nodes of a graph, and some are on the device that was asked for."""
    found = player.play("arch/llama-real=1@1").witness
    assert found is not None
    placed = found["placed"]
    assert isinstance(placed, dict)
    assert all(isinstance(ops, dict) for ops in placed.values())
    assert found["nodes"] == sum(sum(ops.values()) for ops in placed.values())
    assert any("MUL_MAT" in ops for ops in placed.values())
