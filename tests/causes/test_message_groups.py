"""Failures without a graph are grouped by what they say."""

from __future__ import annotations

from conformance.causes.analyse import by_message
from conformance.judge.evidence import Error
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


def test_a_cause_says_the_message_of_its_first_case() -> None:
    """With its numbers: `#` stands for them only where messages are compared."""
    said = "ops.cpp:31: GGML_ASSERT(src0->nb0 == sizeof(float)) failed"
    died = Result("ops/SUM-f32-ne=5x3@1", "ggml", Verdict.CRASH, error=Error("", words=said, died="SIGABRT"))
    noted = Result("order/streams-n=2@1", "ggml", Verdict.FAIL).noted("get_tensor (#2) of 512 bytes:\n  not ordered")
    assert {c.sentence for c in by_message([died, noted])} == {
        f"SUM: CRASH: its process died (SIGABRT): {said} (1 case)",
        "order: FAIL: get_tensor (#2) of 512 bytes: not ordered (1 case)",
    }
