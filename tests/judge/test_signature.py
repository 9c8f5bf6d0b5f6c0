"""Signatures: what wraps a message, numbers and shapes do not tell two failures apart; ops and messages do."""

from __future__ import annotations

from math import inf

import pytest

from conformance.judge.evidence import Error
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


def test_a_cell_of_an_audit_that_hangs_is_one_of_many() -> None:
    """Neither the build, nor its card, nor the cell tells two of them apart."""
    text = (
        "ggml?lib=npm:@a/linux-x64@3.12.{n}&card=/x/Vulkan0-{n}.toml&guard=on: computing steps[0] of "
        "weight_placement/llama-l=1@0#blk.{n}.attn_{k}.weight.in.Vulkan0: no answer within 36 s, its process was ended"
    )
    assert innermost(text.format(n=1, k="q")) == innermost(text.format(n=4, k="k"))
    assert innermost(text.format(n=1, k="q")) == "no answer within # s, its process was ended"


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
        signature_of(
            Result("c", "b", Verdict.OVERCLAIM, error=Error("no kernel"), place={"step": 0, "node": 0, "op": op})
        )
        for op in ("ADD", "MUL")
    )
    assert add != mul


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("ov::Exception: Node Scatter_12_x (view)#n7 of type Scatter Check 'i'", "std::exception: Scatter Check 'i'"),
        (
            "[CPU] Reshape node with name 'Qcur-0 (view)#n17' x",
            "[CPU] Reshape node with name 'Reshape_3_Qcur-12 (view)' x",
        ),
        (
            "While validating node 'opset8::Slice Slice_49 (a[0]:f32[2])' with friendly_name 'Slice_49': Axis 2",
            "While validating node 'opset8::Slice Slice_7 (b[0]:f32[9])' with friendly_name 'Slice_7': Axis 3",
        ),
        (
            "case: its process died (SIGABRT): malloc(): invalid size",
            "its process died (SIGABRT): corrupted size vs. x",
        ),
        ("no kernel; it threw in the second run, step 3", "no kernel"),
    ],
    ids=["node and type", "layer and views", "validated node", "heap", "side"],
)
def test_names_and_chance_tell_nothing(a: str, b: str) -> None:
    """A node's number, the layer and views of its name, the C library's words on a damaged heap, and the side of a
    relation are no part of a message.
    """
    assert innermost(a) == innermost(b)


def test_tensors_of_other_roles_are_other_failures() -> None:
    """Q and K that fail in a node of the same type fail by two faults."""
    q, k = (innermost(f"[CPU] Reshape node with name '{name}-1 (view)#n4' Check 'x'") for name in ("Qcur", "Kcur"))
    assert q != k


def test_an_op_behind_others_is_no_part_of_an_error() -> None:
    """Where no node fails by itself, the error is the whole graph's, and covers that of any node of it."""
    alone = {"step": 0, "node": 0, "op": "ADD"}
    at, behind = (
        signature_of(Result("c", "b", Verdict.OVERCLAIM, error=Error("no kernel"), place=place))
        for place in (alone, {**alone, "alone": False})
    )
    assert at is not None
    assert behind is not None
    assert behind.op == ""
    assert behind.covers(at)
    assert not at.covers(behind)


@pytest.mark.parametrize(
    ("expected", "found", "kind"),
    [
        (1.0, 2.0, "node"),
        (1.0, 0.0, "node"),
        (0.0, 0.0, "node"),
        (2.0**-130, 0.0, "node, subnormal numbers are zero"),
        (-(2.0**-126), -0.0, "node, subnormal numbers are zero"),
        (2.0**-130, 1.0, "node"),
        (2.0**-130, inf, "node, not finite"),
        (None, 0.0, "node"),
        (1.0, None, "node, not finite"),
    ],
)
def test_how_a_number_is_wrong_is_part_of_it(expected: float | None, found: float | None, kind: str) -> None:
    """A number that is none and a subnormal one that is zero are told from other wrong numbers."""
    first = {"kind": "node", "op": "ADD", "expected": expected, "found": found}
    signature = signature_of(Result("ops/A@0", "b", Verdict.FAIL, first_divergence=first))
    assert signature is not None
    assert signature.kind == kind


HOSTILE = ("[" + "-" * 8000, "error ( " + " " * 8000 + "!", "x" * 8000, "a/" * 4000, "with name 'A" + "_1" * 4000)


@pytest.mark.parametrize("said", [*HOSTILE, "its process died (SIGABRT): " + "pre-allocated tensor (" * 300])
def test_whatever_a_backend_says_has_a_signature(said: str) -> None:
    """Words of 8,192 letters, as many as are kept, end in a message: no expression tries every way to match them."""
    for words in (said, f"{said}]", f"{said}: {said}"):
        assert 0 < len(innermost(words)) <= 240
