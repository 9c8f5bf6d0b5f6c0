"""One comparison says if a result is worse than the base's, for every command that compares."""

from __future__ import annotations

from itertools import product

import pytest

from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.outcome import judge
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.judge.worse import SEVERITY, Seen, worse
from conformance.judge.wrong import Wrong
from conformance.llama.release.causes import fails, in_states
from conformance.report.compare import State

RIGHT = Result("ops/right@1", "x", Verdict.PASS)


def _died(words: str, died: str = "SIGABRT") -> Result:
    return Result("ops/a@1", "x", Verdict.CRASH, error=Error(words, words, died))


def _wrong(kind: str = "numbers", nmse: float = 1e-4, op: str = "ADD") -> Result:
    place = Place(Fault.NODE, 0, 0, op)
    return Result("ops/a@1", "x", Verdict.FAIL, wrong=Wrong(kind, nmse), where=place)  # type: ignore[arg-type]


ASSERTION = "/home/a/ggml.c:12: GGML_ASSERT(a == b) failed"


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        pytest.param(_wrong(), _died(ASSERTION), "CRASH where it was FAIL", id="aborts"),
        pytest.param(_died(ASSERTION), _wrong(), "", id="aborted"),
        pytest.param(_died(ASSERTION), _died("/b/ggml.c:99: GGML_ASSERT(a == b) failed"), "", id="a line moved"),
        pytest.param(_died("/a/ops.cpp:7: fatal error"), _died("/b/ops.cpp:9: fatal error"), "", id="it has no words"),
        pytest.param(
            _died(ASSERTION), _died("/b/ops.c:7: GGML_ASSERT(n > 0) failed"), "CRASH with another message", id="asserts"
        ),
        pytest.param(_died(ASSERTION), _died("", "SIGSEGV"), "CRASH with another message", id="segfaults"),
        pytest.param(_died("", "SIGSEGV"), _died("double free or corruption"), "", id="a damaged heap dies at random"),
        pytest.param(_died("", "SIGSEGV"), _died(ASSERTION), "", id="an assertion where it had no message"),
        pytest.param(_wrong(), _wrong(nmse=9e-4), "", id="nine times the error"),
        pytest.param(_wrong(), _wrong(nmse=2e-3), "NMSE 0.002, 0.0001 before", id="twenty times the error"),
        pytest.param(_wrong(), _wrong("zeros"), "zeros instead of numbers", id="zeros"),
        pytest.param(_wrong(), _wrong("not finite"), "NaN or Inf instead of numbers", id="not finite"),
        pytest.param(_wrong(), _wrong(op="MUL"), "FAIL at MUL, at ADD before", id="another node"),
        pytest.param(_wrong(), _wrong(), "", id="the same"),
    ],
)
def test_every_gate_calls_the_same_result_worse(before: Result, after: Result, how: str) -> None:
    """`run --against` fails and `build test` calls it new exactly if the result is worse."""
    assert str(worse(Seen.of(before), Seen.of(after)) or "").startswith(how)
    outcome = judge([after, RIGHT], before={("x", "ops/a@1"): before})
    assert outcome.exit_code == (1 if how else 0)
    assert not how or how in outcome.lines()[0]
    assert bool(list(filter(fails, in_states([after], [before])[State.NEW]))) is bool(how)


def test_no_failing_verdict_is_milder_than_one_it_is_worse_than() -> None:
    """The comparison knows every failing verdict, and two verdicts of different severity are worse one way only."""
    assert SEVERITY.keys() == FAILURES
    for a, b in product(FAILURES, FAILURES):
        each = worse(Seen(a), Seen(b)), worse(Seen(b), Seen(a))
        assert sum(map(bool, each)) == (0 if a is b else 2 if SEVERITY[a] == SEVERITY[b] else 1)


def test_failures_that_became_crashes_fail_the_comparison() -> None:
    """Twelve known failures that crash now are reported as worse, with exit code 1."""
    before = {("x", f"ops/{n}@1"): Result(f"ops/{n}@1", "x", Verdict.FAIL) for n in range(12)}
    found = judge([Result(case, "x", Verdict.CRASH) for _, case in before], before=before)
    assert found.exit_code == 1
    assert found.lines()[0].startswith("worse on x: CRASH where it was FAIL: 12 cases: ")
