"""Signatures: what wraps a message, numbers and shapes do not tell two failures apart; ops and messages do."""

from __future__ import annotations

from math import inf, nan

import pytest

from conformance.judge.evidence import Error, Fault, Numbers, Place
from conformance.judge.message import innermost
from conformance.judge.verdict import Result, Verdict
from conformance.run.signature import signature_of

OPENVINO = (
    "Exception from src/inference/src/cpp/core.cpp:{n}: "
    "Exception from src/inference/src/dev/plugin.cpp:{n}: "
    "Check 'shape.compatible({n})' failed at src/core/src/op/add.cpp:{n}: "
    "Requested output shape [{n},2,256,512] is no match"
)


def _said(words: str, asked: str = "") -> str:
    return innermost(Error(f"{asked}: {words}" if asked else words, words if asked else ""))


def _died(words: str, how: str = "SIGABRT") -> str:
    return innermost(Error(f"x: computing steps[0] of f/a@1: its process died ({how}): {words}", words, how))


def test_what_wraps_a_message_is_no_part_of_it() -> None:
    """The same error from another line, case and shape is the same; its innermost words remain."""
    one, other = (_said(OPENVINO.format(n=n), f"openvino: steps[{k}] of ops/A-f32@{k}") for k, n in ((0, 7), (3, 4096)))
    assert one == other
    assert "shape.compatible" in one
    assert "Requested output shape # is no match" in one
    assert "Exception" not in one
    assert "core.cpp" not in one


def test_a_cell_of_an_audit_that_hangs_is_one_of_many() -> None:
    """Neither the build, nor its profile, nor the cell tells two of them apart."""
    asked = (
        "ggml?lib=npm:@a/linux-x64@3.12.{n}&profile=/x/Vulkan0-{n}.toml&guard=on: computing steps[0] of "
        "weight_placement/llama-l=1@0#blk.{n}.attn_{k}.weight.in.Vulkan0"
    )
    said = {_said("no answer", asked.format(n=n, k=k)) for n, k in ((1, "q"), (4, "k"))}
    assert said == {"no answer"}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("no kernel for type q4_0", "no kernel for op ADD"),
        ("Check 'a' failed at x.cpp:1: b", "Check 'c' failed at x.cpp:1: b"),
    ],
)
def test_other_messages_are_other_failures(a: str, b: str) -> None:
    """What the innermost message says tells failures apart."""
    assert _said(a) != _said(b)


def test_an_abort_without_words_is_known_by_its_line() -> None:
    """Two lines that say `fatal error` are two failures; of an assertion its words tell, so its line does not."""
    here, there = (_died(f"/work/ggml/src/ggml-cpu/ops.cpp:{n}: fatal error") for n in (304, 720))
    assert here == "its process died (SIGABRT): ops.cpp:304: fatal error"
    assert here != there
    one, other = (_died(f"/work/ggml/src/ggml-cpu/ops.cpp:{n}: GGML_ASSERT(nb0 == 4) failed") for n in (304, 720))
    assert one == other


def test_an_op_is_part_of_an_error() -> None:
    """The same words at another op are another failure."""
    add, mul = (
        signature_of(Result("c", "b", Verdict.OVERCLAIM, where=Place(Fault.NODE, 0, 0, op), error=Error("no kernel")))
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
    ],
    ids=["node and type", "layer and views", "validated node"],
)
def test_names_and_chance_tell_nothing(a: str, b: str) -> None:
    """A node's number, and the layer and views of its name, are no part of a message."""
    assert _said(a) == _said(b)


def test_how_a_process_died_is_part_of_its_message() -> None:
    """With the first telling line of its last words; the C library's words on a damaged heap go by chance."""
    newer = "Fatal glibc error: malloc assertion failure in _int_malloc: (unsigned long) (size) >= (unsigned long) (nb)"
    heap = {
        _died(words)
        for words in ("malloc(): invalid size", "corrupted size vs. x", "hm\ndouble free or corruption", newer)
    }
    assert heap == {"its process died (SIGABRT): the heap is damaged"}
    asserts = {_died(f"hm\na.c:{n}: GGML_ASSERT(n > {n}) failed") for n in (4, 12)}
    assert asserts == {"its process died (SIGABRT): a.c:#: GGML_ASSERT(n > #) failed"}
    assert _died("") == "its process died (SIGABRT)"
    assert _died("", "SIGSEGV") == "its process died (SIGSEGV)"


def test_where_a_relation_failed_is_no_part_of_a_message() -> None:
    """The same error in the second run of a relation is the same failure."""
    where = Place(Fault.UNLOCATED, 3)
    one, other = (Error("no kernel", side=side) for side in ("", "the second run"))
    a, b = (signature_of(Result("c", "b", Verdict.OVERCLAIM, where=where, error=e)) for e in (one, other))
    assert a == b


def test_tensors_of_other_roles_are_other_failures() -> None:
    """Q and K that fail in a node of the same type fail by two faults."""
    q, k = (_said(f"[CPU] Reshape node with name '{name}-1 (view)#n4' Check 'x'") for name in ("Qcur", "Kcur"))
    assert q != k


def test_an_op_behind_others_is_no_part_of_an_error() -> None:
    """Where no node fails by itself, the error is the whole graph's, and covers that of any node of it."""
    at, behind = (
        signature_of(Result("c", "b", Verdict.OVERCLAIM, where=Place(fault, 0, 0, "ADD"), error=Error("no kernel")))
        for fault in (Fault.NODE, Fault.GRAPH)
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
        (nan, 0.0, "node"),
        (1.0, nan, "node, not finite"),
    ],
)
def test_how_a_number_is_wrong_is_part_of_it(expected: float, found: float, kind: str) -> None:
    """A number that is none and a subnormal one that is zero are told from other wrong numbers."""
    where = Place(Fault.NODE, 0, 0, "ADD", numbers=Numbers((0, 0, 0, 0), expected, found, 1.0, 1e-6))
    signature = signature_of(Result("ops/A@0", "b", Verdict.FAIL, where=where))
    assert signature is not None
    assert signature.kind == kind


HOSTILE = ("[" + "-" * 8000, "error ( " + " " * 8000 + "!", "x" * 8000, "a/" * 4000, "with name 'A" + "_1" * 4000)


@pytest.mark.parametrize("said", [*HOSTILE, "pre-allocated tensor (" * 300])
def test_whatever_a_backend_says_has_a_signature(said: str) -> None:
    """Words of 8,192 letters, as many as are kept, end in a message: no expression tries every way to match them."""
    for words in (said, f"{said}]", f"{said}: {said}"):
        assert 0 < len(_said(words)) <= 240
        assert 0 < len(_died(words)) <= 240
