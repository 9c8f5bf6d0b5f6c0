"""The language of docs, help texts, docstrings and messages: `ci/style.py` finds no phrase of its table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

STYLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "ci" / "style.py"))
REWRITTEN = (
    "Hold what a backend says of weights against a run.",
    "mine takes 763 cases not (UNSUPPORTED), by its reason:",
    "615 cases: the time was used",
    "nothing passed, so nothing is proven",
    "nothing was executed: 1 case UNSUPPORTED",
    "a run that executed nothing",
    "q counts something else than its mask's rows",
    "b2 has it, b3 has it no more",
    "remove it, or mend its glob",
    "no budget allows it",
    "transformers, from outside: not heard",
    "Whom a cause hurts: the architectures of which some block matches.",
    "to tell a kernel's fault from what the backend kept",
    "it misses a fault, or it cries over none",
    "Whether the case runs.",
    "What a worker loads.",
    "Of the text model.",
    "As there.",
    "the voice of a device",
    "the values are handed over",
    "the file is written anew",
)
"""Sentences of the kind that the table is for."""


def test_no_text_needs_another_word() -> None:
    """Each finding names file, line, sentence and what to write instead."""
    assert STYLE["findings"]() == []


@pytest.mark.parametrize("sentence", REWRITTEN)
def test_the_table_matches(sentence: str) -> None:
    """A sentence that was rewritten is found if it comes back."""
    assert any(pattern.search(sentence) for pattern, _ in STYLE["COMPILED"])


def test_all_kinds_of_text_are_read() -> None:
    """Docs, help texts, docstrings and messages are each found in their hundreds, so that no reader went blind."""
    assert len(list(STYLE["documents"]())) > 1000
    assert len(list(STYLE["helps"]())) > 200
    kinds = [text.kind for text in STYLE["sources"]()]
    assert kinds.count("docstring") > 5000
    assert kinds.count("message") > 1000


def test_a_long_summary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller limit the first line of some docstring is too long."""
    monkeypatch.setitem(STYLE["summaries"].__globals__, "SUMMARY", 80)
    assert any("characters, 80 allowed" in line for line in STYLE["summaries"](STYLE["sources"]()))
