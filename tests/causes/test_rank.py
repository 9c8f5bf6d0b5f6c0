"""The table of the nodes of all blocks: laid out once for the code that makes it, never taken from a broken file."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.causes import rank
from conformance.causes.cause import Cause, Condition
from conformance.causes.features import OP
from conformance.judge.verdict import Verdict

TABLE = {"one": [{"op": "ADD", "step": "first"}], "two": []}


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """An item for each time that the table is made; it is kept in `tmp_path`."""
    made: list[int] = []

    def lay_out() -> dict[str, list[dict[str, str]]]:
        made.append(1)
        return TABLE

    monkeypatch.setattr(rank, "_laid_out", lay_out)
    monkeypatch.setattr(rank, "default_folder", lambda: tmp_path)
    rank._architectures.cache_clear()
    monkeypatch.setattr(rank, "_digest", lambda: "a")
    return made


def table() -> object:
    """The table, as a process that has just started has it."""
    rank._architectures.cache_clear()
    return rank._architectures()


def test_a_table_is_laid_out_once(laid_out: list[int]) -> None:
    """The second process reads what the first one kept."""
    assert table() == table() == TABLE
    assert len(laid_out) == 1
    rank._architectures.cache_clear()


def test_other_code_lays_out_anew(laid_out: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of other code is not read."""
    table()
    monkeypatch.setattr(rank, "_digest", lambda: "b")
    assert table() == TABLE
    assert len(laid_out) == 2
    rank._architectures.cache_clear()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"one": 1}', '{"one": [1]}', '{"one": [{"op": 1}]}', "\x00"])
def test_a_broken_table_is_laid_out_anew(laid_out: list[int], tmp_path: Path, text: str) -> None:
    """Whatever stands in the file, the answer is the table, and the file is right afterwards."""
    (tmp_path / "nodes-a.json").write_text(text)
    assert table() == table() == TABLE
    assert len(laid_out) == 1
    rank._architectures.cache_clear()


@pytest.mark.parametrize(("passed", "counted"), [(0, True), (9, True), (10, False)])
def test_a_form_that_nearly_all_right_nodes_meet_hurts_nobody_known(
    laid_out: list[int], passed: int, *, counted: bool
) -> None:
    """It would come before all others, as every architecture holds such a node."""
    del laid_out
    found = {"failed": 1, "passed": passed}
    cause = Cause("ADD-1", "ADD", "cpu", Verdict.FAIL, "ADD", "", (Condition(OP, "ADD"),), ("ops/ADD@1",), "", found)
    assert rank.rank(cause).rank == (found | {"architectures": 1} if counted else found)
    rank._architectures.cache_clear()
