"""Counting architectures: bounded in time, kept for the code that laid them out, never taken from a broken file."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.causes import rank
from conformance.causes.features import OP, Features
from conformance.judge.cause import Cause, Condition
from conformance.judge.verdict import Verdict
from conformance.process import Deadline


class _Family:
    """Three architectures of one block each."""

    def ids(self, level: str) -> list[str]:
        """Ids of blocks."""
        del level
        return [f"blocks/{name}-attn,run=1@1" for name in ("one", "two", "three")]


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The blocks that were laid out, in order; the file is in `tmp_path`."""
    made: list[str] = []

    def lay_out(case_ids: list[str]) -> list[Features]:
        made.extend(case_ids)
        return [{"op": "ADD"}]

    monkeypatch.setattr(rank, "_nodes", lay_out)
    monkeypatch.setattr(rank, "FAMILIES", {rank.BLOCKS: _Family()})
    monkeypatch.setattr(rank, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(rank, "_digest", lambda: "a")
    return made


def _count(seconds: float = 1e9, passed: int = 0) -> tuple[dict[str, int], str]:
    found = {"failed": 1, "passed": passed}
    cause = Cause("ADD-1", "ADD", "cpu", Verdict.FAIL, "ADD", "", (Condition(OP, "ADD"),), ("ops/ADD@1",), "", found)
    ticks = iter(range(100))
    (counted,) = rank.count_architectures([cause], Deadline.after(seconds, lambda: float(next(ticks))))
    return {k: v for k, v in counted.rank.items() if k not in found}, counted.hits


def test_architectures_are_laid_out_once(laid_out: list[str]) -> None:
    """The second process reads what the first one kept, other code does not."""
    assert _count() == _count() == ({"architectures": 3, "counted": 3, "of": 3}, "3 architectures have such a node")
    assert len(laid_out) == 3


def test_as_many_as_fit_are_counted(laid_out: list[str]) -> None:
    """The number says of how many it is; the next call goes on."""
    few = {"architectures": 2, "counted": 2, "of": 3}
    assert _count(seconds=3) == (few, "2 of 2 checked architectures have such a node (3 in total)")
    assert _count()[0]["counted"] == 3
    assert len(laid_out) == 3


def test_other_code_lays_out_anew(laid_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of other code is not read."""
    _count()
    monkeypatch.setattr(rank, "_digest", lambda: "b")
    assert _count()[0]["architectures"] == 3
    assert len(laid_out) == 6


@pytest.mark.parametrize("text", ["", "{", "[]", '{"one": 1}', '{"one": [1]}', '{"one": [{"op": 1}]}', '{"x": []}'])
def test_a_broken_table_is_laid_out_anew(laid_out: list[str], tmp_path: Path, text: str) -> None:
    """Whatever stands in the file, the answer is the table, and the file is right afterwards."""
    (tmp_path / "nodes-a.json").write_text(text)
    assert _count() == _count()
    assert len(laid_out) == 3


@pytest.mark.parametrize(("passed", "counted"), [(0, True), (9, True), (10, False)])
def test_a_rule_that_nearly_all_right_nodes_meet_hits_nobody_known(
    laid_out: list[str], passed: int, *, counted: bool
) -> None:
    """It would come before all others, as every architecture holds such a node."""
    found, hits = _count(passed=passed)
    assert bool(found) == bool(hits) == bool(laid_out) == counted
