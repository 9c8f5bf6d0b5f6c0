"""The engine of the declarations: what follows from declaring an op once."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.fields import Field
from conformance.ggml.ops.matmul import PREC
from conformance.ggml.ops.op import DECLARATIONS, Op, assertions, same_layout, set_param
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import VIEW_OPS, Tensor, bits_f32, dims, f32_bits, row_size
from conformance.ggml.types import F32, I32, OPS
from conformance.report.snippet import call_of
from conformance.suite import FAMILIES
from conformance.suite.ops import regimes
from conformance.suite.varied import variations

B = Builder()
PARAMETERS = [(op, f) for op, d in DECLARATIONS.items() for f in d.fields if f.name]

UNVARIED = {
    "a precision or hint allows other roundings and changes no exact number": {
        "prec",
        "prec_src1",
        "hint",
        "n_kv_max",
        "max_bias",
    },
    "decides the shape": {
        *("K", "stop", "dim", "k0", "k1", "s0", "s1", "p0", "p1", "d0", "d1", "is_2D", "gated"),
        *("stride0", "stride1", "pad0", "pad1", "dilation0", "dilation1"),
        *("s2", "p2", "d2", "c", "n", "oc", "IC", "stride", "npx", "npy", "w"),
    },
    "says where a view or a part lies": {"nb1", "nb2", "nb3", "inplace"},
}
"""Why an audit does not vary a parameter -> the parameters."""


def values(f: Field) -> st.SearchStrategy[Any]:
    """Legal values of a parameter."""
    if isinstance(f.members, tuple):
        return st.sampled_from(f.members)
    if f.members is not None:
        return st.sampled_from(list(f.members))
    if f.read is bool:
        return st.booleans()
    if f.read is bits_f32:
        return st.floats(width=32, allow_nan=False)
    if f.name == "offset":
        return st.integers(0, 2**31 - 1)
    word = st.integers(-(2**31), 2**31 - 1)
    return word if f.size == 1 else st.tuples(*[word] * f.size)


def blank(op: str) -> Tensor:
    """A node of `op` with nothing in it."""
    return Tensor(F32, dims(4), (4, 16, 16, 16), op)


@given(st.data())
def test_parameters_read_back_what_was_packed(data: st.DataObject) -> None:
    """All parameters of an op packed at once, and one stored later, are read by their names as they were given."""
    op = data.draw(st.sampled_from(sorted({op for op, _ in PARAMETERS})))
    declared = DECLARATIONS[op]
    given_ = {f.name: data.draw(values(f), f.name) for f in declared.fields if f.name}
    t = blank(op)
    t.op_params = declared.pack(given_)
    assert {name: getattr(t.params, name) for name in given_} == given_
    assert all(not f.problem(t.op_params) for f in declared.fields)
    f = data.draw(st.sampled_from([f for f in declared.fields if f.name]))
    value = data.draw(values(f))
    set_param(t, f.name, value)
    assert {name: getattr(t.params, name) for name in given_} == {**given_, f.name: value}


@given(
    st.sampled_from(list(ROPE_TYPE)),
    st.integers(0, 2**31 - 1),
    st.tuples(*[st.floats(width=32, allow_nan=False)] * 6),
    st.tuples(*[st.integers(0, 64)] * 4),
)
def test_parameters_are_the_constructors_arguments(
    mode: ROPE_TYPE, n_ctx_orig: int, floats: tuple[float, ...], sections: tuple[int, ...]
) -> None:
    """What a constructor was given stands under the names of its arguments."""
    a, b = B.new_tensor_3d(F32, 8, 2, 3), B.new_tensor_1d(I32, 12 if mode & ROPE_TYPE.MROPE else 3)
    p = B.rope_multi(a, b, None, 4, sections, mode, n_ctx_orig, *floats).params
    found = (p.freq_base, p.freq_scale, p.ext_factor, p.attn_factor, p.beta_fast, p.beta_slow)
    assert (p.n_dims, p.mode, p.n_ctx_orig, found) == (4, mode, n_ctx_orig, floats)
    assert p.sections == (sections if mode & ROPE_TYPE.MROPE else (0, 0, 0, 0))
    assert p.n_offs == 0


def test_elements_have_names_too() -> None:
    """A tuple of parameters that the constructor takes one by one is read whole and one by one."""
    t = B.permute(B.new_tensor_4d(F32, 2, 3, 4, 5), 2, 0, 3, 1)
    assert t.params.axes == (2, 0, 3, 1)
    assert (t.params.axis0, t.params.axis2) == (2, 3)


def test_a_wrong_name_is_refused_with_the_right_ones() -> None:
    """An op's parameters are listed where another is asked for; so is that it has none."""
    a = B.new_tensor_1d(F32, 4)
    with pytest.raises(AttributeError, match="SCALE has no parameter 'eps'; its parameters are s, b"):
        _ = B.scale(a, 2.0).params.eps
    with pytest.raises(AttributeError, match="SQR has no parameter 'eps'; it has no parameters"):
        _ = B.sqr(a).params.eps
    with pytest.raises(AttributeError, match="eps"):
        set_param(B.sqr(a), "eps", 1.0)


def test_what_ggml_does_not_know_stays_a_number() -> None:
    """A value of a stranger's file that is no member of the enumeration is read as an int, and no legal node."""
    t = B.mul_mat(B.new_tensor_1d(F32, 4), B.new_tensor_1d(F32, 4))
    assert isinstance(t.params.prec, PREC)
    t.op_params = (7, *t.op_params[1:])
    assert type(t.params.prec) is int
    with pytest.raises(GraphError, match=r"prec=7 is not a ggml_prec \(DEFAULT=0, F32=10"):
        B.build_forward_expand(t).validate()


def test_gaps_stay_zero() -> None:
    """A word that no constructor sets is refused."""
    a, b = B.new_tensor_1d(F32, 4), B.new_tensor_1d(I32, 1)
    t = B.rope(a, b, 4, 0)
    t.op_params = (1, *t.op_params[1:])
    with pytest.raises(GraphError, match=r"op_params\[0\] must be 0, 1 found"):
        B.build_forward_expand(t).validate()


@pytest.mark.parametrize("args", [(), (1,), (1, 2, 3)])
def test_a_constructor_counts_its_arguments(args: tuple[Any, ...]) -> None:
    """Too few and too many arguments are a TypeError, as of any function."""
    with pytest.raises(TypeError, match="arguments a, s expected"):
        B.scale(*args)


def test_arguments_may_be_named() -> None:
    """By the names of `ggml.h`, with an underscore where that is a word of Python."""
    a = B.new_tensor_1d(F32, 4)
    t = B.clamp(a, min_=-1.0, max_=2.0)
    assert (t.params.min, t.params.max) == (-1.0, 2.0)
    assert B.clamp(a, -1.0, 2.0).op_params == t.op_params


def test_a_form_in_place_shares_the_bytes() -> None:
    """The derived `_inplace` and `_back` forms differ from their constructor in that only."""
    a, b = B.new_tensor_3d(F32, 8, 2, 3), B.new_tensor_1d(I32, 3)
    args = (a, b, None, 4, ROPE_TYPE.NEOX, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0)
    plain, inplace, back = B.rope_ext(*args), B.rope_ext_inplace(*args), B.rope_ext_back(*args)
    assert plain.op_params == inplace.op_params == back.op_params
    assert (plain.view_src, inplace.view_src, back.view_src) == (None, a, None)
    assert (plain.op, inplace.op, back.op) == ("ROPE", "ROPE", "ROPE_BACK")


def test_every_parameter_is_varied_or_said_why_not() -> None:
    """An audit varies each parameter that changes numbers."""
    exempt = set().union(*UNVARIED.values())
    assert exempt == {f.name for op, f in PARAMETERS if f.vary is None and op not in VIEW_OPS}
    assert not [(op, f.name) for op, f in PARAMETERS if f.members and f.vary is None and f.name not in exempt]


def test_declarations_are_ops_of_ggml() -> None:
    """Each is in ggml's table under one name, and none has more words than a node."""
    assert set(DECLARATIONS) <= set(OPS)
    for op, declared in DECLARATIONS.items():
        assert op in declared.names
        assert sum(f.size for f in declared.fields) <= 16
        assert declared.n_src <= len(declared.src)


def test_a_wrong_declaration_says_what_to_mend() -> None:
    """A name that `OPS` lacks, and an assertion that is no expression."""
    before = dict(DECLARATIONS)
    with pytest.raises(ValueError, match=r"op SOFT_SHRINK: add the name to OPS in conformance/ggml/types\.py"):
        Op("SOFT_SHRINK", src="a", layout=same_layout)
    with pytest.raises(ValueError, match="cannot parse 'lambda >= 0'"):
        assertions("lambda >= 0", "", ["a"], 1, [])
    assert before == DECLARATIONS


def _words(op: Op) -> list[int]:
    return [i for f in op.fields for i in range(f.at, f.at + f.size)]


def test_fields_follow_one_another() -> None:
    """No word belongs to two parameters."""
    for declared in DECLARATIONS.values():
        assert _words(declared) == list(range(len(_words(declared))))


def test_every_node_of_every_op_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of smoke and a quarter of standard are recovered as the calls that make them.

    For each op the audit finds a node where it can change each parameter that it varies. No number is compared.
    """
    monkeypatch.setattr(regimes, "encode", lambda type_, _, ne, __: np.zeros(row_size(type_, math.prod(ne)), np.uint8))
    calls: Counter[str] = Counter()
    made: set[str] = set()
    ids = FAMILIES["ops"].ids
    for i in {*ids("smoke"), *ids("standard")[::4]}:
        case = FAMILIES["ops"].build(i)
        nodes = [n for s in case.steps for n in s.graph if n.op != "NONE"]  # but for parameters
        missing = [n for n in nodes if call_of(n) is None]
        assert not missing, i
        calls.update(n.op for n in nodes)
        made.update(v.name for v in variations(nodes))
    computing = set(DECLARATIONS) - VIEW_OPS
    assert computing <= set(calls)
    assert len(computing) == 91
    for op in computing - {"UNARY", "GLU"}:
        assert {f"{op} {f.name}" for f in DECLARATIONS[op].fields if f.vary} <= made
    assert {"XIELU alpha_n", "XIELU beta", "SILU op", "SWIGLU swapped", "SWIGLU_OAI alpha"} <= made


def test_floats_overflow_to_infinity() -> None:
    """As C converts a double to a float."""
    assert bits_f32(f32_bits(1e39)) == float("inf")


def test_an_assertion_is_its_text() -> None:
    """The words of `ggml.c` decide; an absent source asserts nothing, and a remainder by 0 fails."""
    text = "b->ne[0] % a->ne[0] == 0; !ggml_is_transposed(a); n > 1 || a->type == GGML_TYPE_F16"
    rows = dict(assertions(text, "n = a->ne[1]", ["a", "b"], 1, []))
    remainder, transposed, either = rows.values()
    a, b, none = B.new_tensor_2d(F32, 4, 2), B.new_tensor_1d(F32, 8), B.new_tensor_1d(F32, 0)

    def node(*src: Tensor) -> Tensor:
        return Tensor(F32, dims(1), (4, 4, 4, 4), "NONE", src=src)

    assert remainder(node(a, b))
    assert not remainder(node(b, a))
    assert not remainder(node(none, b))
    assert remainder(node(b))
    assert transposed(node(a))
    assert not transposed(node(B.transpose(a)))
    assert either(node(a))
    assert not either(node(b))
    with pytest.raises(KeyError):
        assertions("ggml_is_round(a)", "", ["a"], 1, [])


def test_a_broken_assertion_tells_what_came() -> None:
    """The parameters that an assertion names, and all sources."""
    a, b = B.new_tensor_2d(F32, 4, 2), B.new_tensor_2d(F32, 3, 2)
    with pytest.raises(GraphError, match=r"GGML_ASSERT\(ggml_can_mul_mat\(a, b\)\) failed: src\[0\]=f32\[4, 2, 1, 1\]"):
        B.mul_mat(a, b)
