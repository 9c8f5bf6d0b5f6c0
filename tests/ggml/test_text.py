"""Texts of others on a terminal: nothing in them moves a cursor, forges a line or changes a command."""

from __future__ import annotations

import subprocess
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.ggml.text import printable, printable_lines, shell
from conformance.judge.verdict import Result, Verdict


@given(st.text(st.characters()))
def test_printable_holds_no_control(text: str) -> None:
    """Whatever came, what is shown has no control, line break, direction mark or half of a pair, and can be encoded."""
    shown = printable(text)
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not any(
        unicodedata.bidirectional(c) in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "PDI"} for c in shown
    )
    shown.encode()
    assert len(printable(text, 5)) <= 5


def test_ordinary_text_stays() -> None:
    """Letters of any language, spaces and backslashes are as they were."""
    text = "Grüße, 世界, שלום, \\x1b, 😀"
    assert printable(text) == text
    assert printable("a\x1b[2Jb\nPASS \u202e \ud800") == r"a\x1b[2Jb\x0aPASS \u202e \ud800"
    assert printable_lines("a\nb\x1b") == "a\nb\\x1b"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=3))
def test_a_command_can_be_typed(words: list[str]) -> None:
    """A shell reads back the very words, printable or not, and runs nothing else."""
    shown = shell(["printf", "%s\\0", *words])
    assert printable(shown) == shown
    done = subprocess.run(["bash", "-c", shown], capture_output=True, check=True, timeout=20)
    assert done.stdout.decode().split("\0")[:-1] == words


def test_a_result_is_one_line() -> None:
    """An id with a line break forges no second result."""
    result = Result("a\nPASS b on c", "d\x1b[1A", Verdict.FAIL, notes=("x\r\nPASS e on f",))
    assert len(result.sentence().splitlines()) == 1
    assert result.sentence() == r"FAIL a\x0aPASS b on c on d\x1b[1A: x PASS e on f"


@pytest.mark.parametrize("word", ["a'b", "$(touch x)", "`x`", "a;b", "\x1b'\\$x", "é\x9b"])
def test_quotes_hold(word: str) -> None:
    """Nothing in a word is run by a shell."""
    done = subprocess.run(["bash", "-c", shell(["printf", "%s", word])], capture_output=True, check=True, timeout=20)
    assert done.stdout.decode() == word
