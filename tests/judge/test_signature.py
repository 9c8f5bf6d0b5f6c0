"""Signatures: what wraps a message, numbers and shapes do not tell two failures apart; ops and messages do."""

from __future__ import annotations

import pytest

from conformance.judge.verdict import Result, Verdict
from conformance.run.signature import innermost, signature_of

OPENVINO = (
    "openvino: computing steps[{k}] of ops/A-f32@{k}: Exception from src/inference/src/cpp/core.cpp:{n}: "
    "Exception from src/inference/src/dev/plugin.cpp:{n}: "
    "Check 'shape.compatible({n})' failed at src/core/src/op/add.cpp:{n}: "
    "Requested output shape [{n},2,256,512] is no match; where: step {k}: ADD node_{n} f32[1, 1, 1, 1] fails by itself"
)


def test_what_wraps_a_message_is_no_part_of_it() -> None:
    """The same error from another line, case and shape is the same; its innermost words remain."""
    one, other = (innermost(OPENVINO.format(k=k, n=n)) for k, n in ((0, 7), (3, 4096)))
    assert one == other
    assert "shape.compatible" in one
    assert "Requested output shape # is no match" in one
    assert "Exception" not in one
    assert "core.cpp" not in one


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("no kernel for type q4_0", "no kernel for op ADD"),
        ("Check 'a' failed at x.cpp:1: b", "Check 'c' failed at x.cpp:1: b"),
    ],
)
def test_other_messages_are_other_failures(a: str, b: str) -> None:
    """What the innermost message says tells failures apart."""
    assert innermost(a) != innermost(b)


def test_an_op_is_part_of_an_error() -> None:
    """The same words at another op are another failure."""
    add, mul = (
        signature_of(Result("c", "b", Verdict.OVERCLAIM, detail="no kernel", place={"step": 0, "node": 0, "op": op}))
        for op in ("ADD", "MUL")
    )
    assert add != mul
