"""A case as a `test_case` for ggml's own tests/test-backend-ops.cpp.

That file runs one graph and compares every node of it on two backends, so the steps of a case stand in one graph, one
after the other, and where several results are to be seen their sums are added up at the end.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from enum import IntEnum

from conformance.case.case import Case
from conformance.ggml.ops.op import c_enum
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import ZERO_PARAMS, Bytes, Tensor, computes
from conformance.ggml.types import F32, GGMLType

from .calls import Argument, call_of

MOST_DATA = 1 << 18
"""Bytes of leaves that a source file can take; beyond, values are drawn."""

LONGEST = 400
"""Characters of an id or a name that are kept."""


def cpp(case: Case, name: str = "test_shrunk") -> str:
    """`struct NAME : public test_case` with vars(), build_graph and initialize_tensors, and the line that adds it."""
    names: dict[Tensor, str] = {}
    leaves = {**case.persistent, **{t: data for s in case.steps for t, data in s.inputs.items()}}
    for t in leaves:
        names[t] = f"x{len(names)}"
    drawn = sum(data.nbytes for data in leaves.values()) > MOST_DATA
    body = [*_leaves(leaves, names), *_nodes(case, names)]
    if drawn:
        init = ["for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {"]
        init += ["    init_tensor_uniform(t);  // the case's own values are too many for a source file", "}"]
    else:
        init = [line for t, data in leaves.items() for line in _filled(names[t], data)]
    return "\n".join(
        [
            f"// {_plain(case.id)}",
            f"struct {name} : public test_case {{",
            "    std::string vars() override {",
            f'        return "{_plain(case.id)}";',
            "    }",
            "",
            "    ggml_tensor * build_graph(ggml_context * ctx) override {",
            *(f"        {line}" for line in body),
            "    }",
            "",
            "    void initialize_tensors(ggml_context * ctx) override {",
            *(f"        {line}" for line in init),
            "    }",
            "};",
            "",
            f"// in make_test_cases_eval(): test_cases.emplace_back(new {name}());",
            "",
        ]
    )


def _plain(text: str) -> str:
    """`text` for a comment or a literal: ASCII without quotes, without a backslash that would join the next line, and
    without the question marks that trigraphs are made of.
    """
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\?' else "_" for c in text[:LONGEST])


def _leaves(leaves: dict[Tensor, Bytes], names: dict[Tensor, str]) -> Iterator[str]:
    for t in leaves:
        yield f"ggml_tensor * {names[t]} = {_new(t)};  // {_plain(t.name)}"
        yield f'ggml_set_name({names[t]}, "{names[t]}");'


def _new(t: Tensor) -> str:
    return f"ggml_new_tensor_4d(ctx, {_type(t.type)}, {', '.join(map(str, t.ne))})"


def _nodes(case: Case, names: dict[Tensor, str]) -> Iterator[str]:
    sinks: list[Tensor] = []
    for k, step in enumerate(case.steps):
        read = {s for n in step.graph for s in n.src if s is not n}
        for i, t in enumerate(step.graph):
            for j, s in enumerate(t.src):
                if s is not None and s is not t and s not in names and s.view_src is not None:  # a leaf that is a view
                    names[s] = f"v{k}_{i}_{j}"
                    yield f"ggml_tensor * {names[s]} = ggml_view_tensor(ctx, {names[s.view_src]});"
            names[t] = f"n{k}_{i}"
            yield from _made(t, names)
        seen = [t for t in step.graph if computes(t) and (t not in read or t in step.outputs)]
        sinks += seen
    if len(sinks) == 1:
        yield f"return {names[sinks[0]]};"
        return
    yield "// earlier results first: what they store is read by later ones"
    for i, t in enumerate(sinks):
        value = names[t] if t.type is F32 else f"ggml_cast(ctx, {names[t]}, GGML_TYPE_F32)"
        total = f"ggml_sum(ctx, ggml_cont(ctx, {value}))"
        yield f"ggml_tensor * out{i} = {total if not i else f'ggml_add(ctx, out{i - 1}, {total})'};"
    yield f"return out{len(sinks) - 1};"


def _made(t: Tensor, names: dict[Tensor, str]) -> Iterator[str]:
    call = call_of(t)
    if call is None:
        yield from _by_hand(t, names)
        return
    yield f"ggml_tensor * {names[t]} = ggml_{call.name}({', '.join(['ctx', *_words(t, call.args, names)])});"
    for name, args in call.after:
        yield f"ggml_{name}({', '.join([names[t], *_words(t, args, names)])});"


def _by_hand(t: Tensor, names: dict[Tensor, str]) -> Iterator[str]:
    """A node whose constructor is not known, field by field."""
    first = next((names[s] for s in t.src if s is not None and s.root is t.view_src), "")
    yield f"ggml_tensor * {names[t]} = {f'ggml_view_tensor(ctx, {first})' if first else _new(t)};"
    yield f"{names[t]}->op = GGML_OP_{t.op};"
    for i, s in enumerate(t.src):
        if s is not None:
            yield f"{names[t]}->src[{i}] = {names[s]};"
    if t.op_params != ZERO_PARAMS:
        params = ", ".join(map(str, t.op_params))
        yield f"{{ const int32_t params[] = {{ {params} }}; memcpy({names[t]}->op_params, params, sizeof(params)); }}"


def _words(t: Tensor, args: tuple[Argument, ...], names: dict[Tensor, str]) -> Iterator[str]:
    return (f"GGML_{t.op}_OP_{a}" if isinstance(a, str) else _argument(a, names) for a in args)


def _argument(a: Argument, names: dict[Tensor, str]) -> str:
    if isinstance(a, Tensor):
        return names[a]
    if isinstance(a, GGMLType):
        return _type(a)
    if isinstance(a, IntEnum):
        return str(int(a)) if isinstance(a, ROPE_TYPE) else f"({c_enum(type(a))}) {int(a)}"  # a mode is an int in C
    if isinstance(a, bool):
        return "true" if a else "false"
    if isinstance(a, float):
        if math.isfinite(a):
            return f"{a!r}f"
        return "NAN" if math.isnan(a) else "INFINITY" if a > 0 else "-INFINITY"
    if isinstance(a, tuple):
        return f"std::vector<int>{{ {', '.join(map(str, a))} }}.data()"
    return "nullptr" if a is None else str(a)


def _type(t: GGMLType) -> str:
    return f"GGML_TYPE_{t.name.upper()}"


def _filled(name: str, data: Bytes) -> Iterator[str]:
    if not data.any():
        yield f"const std::vector<uint8_t> {name}({data.nbytes}, 0);"
    else:
        text = ", ".join(map(str, data.tolist()))
        yield f"const std::vector<uint8_t> {name} = {{"
        yield from (f"    {line}" for line in textwrap.wrap(text, 100))
        yield "};"
    yield f'ggml_backend_tensor_set(ggml_get_tensor(ctx, "{name}"), {name}.data(), 0, {name}.size());'
