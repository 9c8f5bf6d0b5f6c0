"""Failures without a graph are grouped by what they say."""

from __future__ import annotations

from conformance.causes.analyse import by_message
from conformance.judge.verdict import Result, Verdict


def test_live_failures_are_apart_if_they_say_other_things() -> None:
    """Numbers and shapes do not count, so one bug in two cases is one cause; another bug of the family is another."""
    notes = (
        "get_tensor (#2) of 512 bytes: not ordered",
        "get_tensor (#7) of 64 bytes: not ordered",
        "frees x too early",
    )
    results = [Result(f"order/streams-n={k}@1", "ggml", Verdict.FAIL).noted(note) for k, note in enumerate(notes)]
    assert [len(c.cases) for c in by_message(results)] == [2, 1]
