"""The builder against the real ggml: the same calls to both, and everything they leave is equal; or both refuse."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from itertools import combinations

import pytest
from build_program import Program
from build_programs import answers, programs, random_graph
from ggml_ctypes import run_programs

from conformance.ggml.errors import GraphError
from conformance.ggml.lib.constructors import CONSTRUCTORS, SETTERS
from conformance.ggml.ops import attention, build, elementwise, matmul, op, recurrent, rope, rows, views, windows
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.media import conv, images, signals
from conformance.ggml.ops.training import gradients, steps
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor
from conformance.ggml.types import F32, GLU_OPS, TYPES, UNARY_OPS

B = Builder()

STRICTER = ("ggml_blck_size(type) == 0", "ne must not be negative", "would take", "has no end")
"""Refusals that ggml's release build lacks: it checks blocks only in a debug build, and never a sign, an overflow of
bytes or an endless range."""


def assertion(text: str) -> str:
    """The condition in an abort's message or an error's text."""
    found = re.search(r"GGML_ASSERT\((.*)\) failed", text)
    return found.group(1) if found else text


SAME = {
    "ggml_nelements(a) == ne0": "ggml_nelements(a) == ne0*ne1*ne2*ne3",
    "ggml_nelements(a) == ne0*ne1": "ggml_nelements(a) == ne0*ne1*ne2*ne3",
    "ggml_nelements(a) == ne0*ne1*ne2": "ggml_nelements(a) == ne0*ne1*ne2*ne3",
    "ggml_nelements(a) == ggml_nelements(b)": "ggml_nelements(a) == ne0*ne1*ne2*ne3",
    "can_repeat": "ggml_can_repeat(a, b)",
    "a->ne[3] == (int64_t) c * oc": "a->ne[3] == c*oc",
    "b->ne[3] == (int64_t) c * n": "b->ne[3] == c*n",
}
"""Assertions that ggml writes in several ways, and the one of our rule."""


def test_every_program_leaves_what_ggml_leaves() -> None:
    """Where both accept, ne, nb, type, op, op_params, src, view_src, view_offs, flags and name are equal."""
    equal: Counter[str] = Counter()
    for (f, p), theirs in zip(programs(), answers(), strict=True):
        if p.error is None and isinstance(theirs, list):
            assert theirs == p.answer(), p.calls
            equal[f] += 1
    assert min(equal[f] for f in CONSTRUCTORS) >= 5, equal
    assert equal.total() >= 3000


def test_each_constructor_is_compared() -> None:
    """None of the builder's is absent from the programs, and each op and sub-op is in what ggml left of some."""
    public = {name for name in dir(Builder) if not name.startswith("_")}
    assert public - {"build_forward_expand"} == CONSTRUCTORS.keys() | SETTERS.keys()
    taken = [p for (_, p), theirs in zip(programs(), answers(), strict=True) if isinstance(theirs, list)]
    made = [t for p in taken for t in p.made if t is not None]
    assert {t.op for t in made} == op.DECLARATIONS.keys()
    assert {t.params.op for t in made if t.op in {"UNARY", "GLU"}} == {*UNARY_OPS, *GLU_OPS}


def test_builder_raises_exactly_where_ggml_aborts() -> None:
    """No false refusal, no missed one, on arguments of which some are off; and the assertion named is ggml's."""
    refused = 0
    for (_, p), theirs in zip(programs(), answers(), strict=True):
        if p.error is None:
            assert isinstance(theirs, list), f"ggml aborts, the builder does not: {theirs} {p.calls}"
        elif any(s in p.error for s in STRICTER):
            continue
        else:
            assert isinstance(theirs, dict), f"the builder refuses, ggml does not: {p.error} {p.calls}"
            if theirs["abort"] != "SIGFPE":
                text = assertion(theirs["abort"])
                assert assertion(p.error) in {text, SAME.get(text)}, p.calls
            refused += 1
    assert refused >= 200


def test_stricter_refusals_are_what_they_say() -> None:
    """Where only the builder refuses, ggml left a tensor without sense, or aborted a step later."""
    for (_, p), theirs in zip(programs(), answers(), strict=True):
        if p.error is None or not any(s in p.error for s in STRICTER) or isinstance(theirs, dict):
            continue
        t = theirs[len(p.made)]
        blck = TYPES[t["type"]].blck_size
        senseless = min(t["ne"]) < 0 or t["ne"][0] % blck or t["nb"][3] != t["nb"][2] * t["ne"][2]
        assert senseless or max(t["ne"]) > 2**30, (p.error, p.calls)


MODULES = (
    op,
    elementwise,
    rows,
    views,
    matmul,
    attention,
    rope,
    recurrent,
    windows,
    conv,
    images,
    signals,
    gradients,
    steps,
    build,
)


def _assertions() -> set[str]:
    """Every assertion that a constructor or a setter can raise, from the source."""
    found = {f"axis{i} >= 0 && axis{i} < GGML_MAX_DIMS" for i in range(4)}
    found |= {f"axis{i} != axis{j}" for i, j in combinations(range(4), 2)}
    found |= {f"a->op == GGML_OP_{op}" for op in ("SOFT_MAX", "FLASH_ATTN_EXT")}
    found |= {f"a->src[{i}] == NULL" for i in (2, 4)}
    found |= {text for d in op.DECLARATIONS.values() for text, _ in d.asserts}
    for module in MODULES:
        for fn in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(fn, ast.FunctionDef) and not fn.name.endswith("_limits"):
                for node in ast.walk(fn):
                    found |= _texts(node)
    return found


def _texts(node: ast.AST) -> set[str]:
    """The assertion in a call of `violated` or `failed`, or in a row `(condition, assertion)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"violated", "failed"}:
        given = node.args[1 if node.func.id == "violated" else 0]
    elif (
        isinstance(node, ast.Tuple)
        and len(node.elts) == 2
        and isinstance(node.elts[0], ast.Compare | ast.Call | ast.BoolOp)
    ):
        given = node.elts[1]
    else:
        return set()
    return {given.value} if isinstance(given, ast.Constant) and isinstance(given.value, str) else set()


def test_every_assertion_of_the_rules_is_provoked() -> None:
    """Each assertion that the rules know was broken by some program, and ggml aborted there too."""
    provoked = {assertion(p.error) for _, p in programs() if p.error}
    assert _assertions() - provoked == set()


def test_graphs_have_ggmls_order_flags_and_names() -> None:
    """build_forward_expand and _select: the same nodes in the same order, the same COMPUTE flags, the same names."""
    graphs = [Program(f"graph/{k}") for k in range(400)]
    for p in graphs:
        random_graph(p)
    for p, theirs in zip(graphs, run_programs(p.calls for p in graphs), strict=True):
        assert theirs == p.answer(), p.calls


def test_expansion_is_not_recursive() -> None:
    """A chain deeper than Python's stack expands."""
    x = B.new_tensor_1d(F32, 4)
    for _ in range(5000):
        x = B.silu(x)
    g = B.build_forward_expand(x)
    assert len(g) == 5000
    assert all(n.flags & FLAG_COMPUTE for n in g)
    g.validate()


def test_built_nodes_pass_validate() -> None:
    """Whatever the builder makes, Graph.validate accepts, except what ggml itself refuses when it computes."""
    accepted = 0
    runs = {text for d in op.DECLARATIONS.values() for text, _ in d.runs}
    for _, p in programs():
        t = p.made[-1] if p.made else None
        if p.error is None and isinstance(t, Tensor) and t.op != "NONE":
            problem = _problem(t)
            assert problem is None or assertion(problem) in runs or BEYOND.search(problem), p.calls
            accepted += problem is None
    assert accepted >= 3000


def _problem(t: Tensor) -> str | None:
    try:
        B.build_forward_expand(t).validate()
    except GraphError as e:
        return str(e)
    return None


BEYOND = re.compile(
    r"rows of \d+ of \d+ batches|"
    r"of a block type must be|ne\[0\] must be a multiple|data_size \+ view_offs|n_dims|n_offs|not a ggml_|sections"
    r"|is_contiguous\(src0\)|src0->type|src1->type|nb10|nbytes\(dst\)|ggml_op_pool|op_params\[4\]"
    r"|swapped is|only XIELU|has no op_params|must be 0|sub-ops"
    r"|windows of|ggml_can_repeat\(b, a\)|weights, gradient"
)
"""What ggml accepts at construction, and asserts or reads past the end when it computes."""


def test_text_arguments_name_the_legal_values() -> None:
    """An unknown unary or glu op is refused with the list of those that are."""
    x = B.new_tensor_1d(F32, 4)
    with pytest.raises(GraphError, match=r"one of ABS, SGN.*'SWISH' found"):
        B.unary(x, "SWISH")
    with pytest.raises(GraphError, match=r"one of REGLU.*'SWISH' found"):
        B.glu(x, "SWISH", False)
    with pytest.raises(GraphError, match="4 numbers expected"):
        B.rope_multi(x, x, None, 4, (1, 2), 8, 0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def test_names_never_end_in_half_a_character() -> None:
    """A name that is too long is cut to at most 63 bytes of whole characters."""
    x = B.set_name(B.new_tensor_1d(F32, 4), "é" * 40)
    assert x.name == "é" * 31
    assert len(B.cont(x).name.encode()) <= 63
