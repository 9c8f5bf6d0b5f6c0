"""Writes a case as a program: in Python, or as a `test_case` of test-backend-ops.

Both write each node as the call of its constructor (`call_of`). Names and ids from an untrusted case file appear in a
Python program only as ASCII literals: never in a comment, a docstring or a name.
"""

from __future__ import annotations

import base64
import math
import textwrap
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from conformance.case.case import Case, Step
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.fields import c_enum
from conformance.ggml.ops.op import DECLARATIONS, Form, Longs
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import (
    FIELDS,
    FLAG_PARAM,
    VIEW_OPS,
    ZERO_PARAMS,
    Bytes,
    Tensor,
    computes,
    contiguous_nb,
    nelements,
)
from conformance.ggml.types import F32, GGMLType

Argument = Tensor | GGMLType | float | int | bool | str | tuple[int, ...] | None
_B = Builder()


@dataclass(frozen=True, slots=True)
class Call:
    """A constructor of `ggml.h` without the context; `after` are calls on its result."""

    name: str
    args: tuple[Argument, ...]
    after: tuple[tuple[str, tuple[Argument, ...]], ...] = ()


def call_of(t: Tensor) -> Call | None:
    """Return the constructor call that makes `t` from its sources; None if none does."""
    for call in _proposals(t):
        with suppress(GraphError, ValueError, IndexError):
            made = perform(call)
            src = tuple(t if s is made else s for s in made.src)
            if (made.op, made.type, made.ne, made.nb, made.op_params, made.view_src, made.view_offs, src) == (
                *(t.op, t.type, t.ne, t.nb, t.op_params, t.view_src, t.view_offs),
                t.src,
            ):
                return call
    return None


def perform(call: Call) -> Tensor:
    """Make the tensor of a call; GraphError with the ggml assertion that the arguments violate."""
    made: Tensor = getattr(_B, call.name)(*call.args)
    for name, args in call.after:
        getattr(_B, name)(made, *args)
    return made


def _proposals(t: Tensor) -> Iterator[Call]:
    """Yield the calls that may have made `t`: specific ones first, plain ones before setters."""
    declared = DECLARATIONS.get(t.op)
    if declared is None:
        return
    after = tuple((setter, (_value(t, of), *rest)) for setter, of, rest in declared.after if _value(t, of))
    for form in declared.forms:
        if all(FIELDS[t.op][k](t.op_params) == v for k, v in form.fixed.items()):
            with suppress(KeyError, ValueError, OverflowError):
                call = Call(form.name, tuple(_argument(t, a, form) for a in form.arguments))
                yield call
                if after:
                    yield replace(call, after=after)


def _argument(t: Tensor, argument: str, form: Form) -> Any:  # noqa: ANN401  # an `Argument`
    """Return the argument of a constructor; KeyError if the node does not have it."""
    recover = form.recover.get(argument)
    return _value(t, argument.rstrip("_")) if recover is None else recover(t)


def _value(t: Tensor, name: str) -> Any:  # noqa: ANN401  # an `Argument`
    src = DECLARATIONS[t.op].src
    if name in src:
        i = src.index(name)
        return t.src[i] if i < len(t.src) else None
    if name in FIELDS[t.op]:
        return FIELDS[t.op][name](t.op_params)
    return {
        **{f"ne{d}": n for d, n in enumerate(t.ne)},
        **{f"nb{d}": n for d, n in enumerate(t.nb)},
        "type": t.type,
        "dst_type": t.type,
        "inplace": t.view_src is not None,
    }[name]


def named_views(t: Tensor, place: str, names: dict[Tensor, str]) -> list[tuple[Tensor, str]]:
    """Name node `t` and its sources that are new views; return these with their root's name."""
    views = []
    for j, s in enumerate(t.src):
        if s is not None and s is not t and s not in names and s.view_src is not None:
            names[s] = f"v{place}_{j}"
            views.append((s, names[s.view_src]))
    names[t] = f"n{place}"
    return views


# --- Python

SPELLED_OUT = 64
"""Maximum elements of a tensor whose values are written as numbers."""

_HEAD = '''\
"""Builds the case whose id stands at the end."""

import base64
import zlib

import numpy as np

from conformance.ggml.ops.build import Builder
from conformance.case.case import Case, Placement, Step
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor, new_tensor
from conformance.ggml.types import TYPES


def named(tensor, name, flags):
    """`tensor` with its name and flags."""
    tensor.name, tensor.flags = name, flags
    return tensor


def raw(text, size):
    """`size` bytes that were packed into `text`."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8, size)


b = Builder()
'''


def python(case: Case) -> str:
    """Return a program that builds `case`, without recorded values and provenance.

    Raises:
        UsageError: the case needs a tensor that no constructor of ggml makes.
    """
    names: dict[Tensor, str] = {}
    lines = [_HEAD]
    for t in case.persistent:
        names[t] = f"p{len(names)}"
        lines.append(f"{names[t]} = {_python_leaf(t)}")
    pairs = ",\n".join(f"    {names[t]}: {_python_data(t, data)}" for t, data in case.persistent.items())
    lines.append("persistent = {\n" + pairs + (",\n}" if pairs else "}"))
    for k, step in enumerate(case.steps):
        lines += ["", f"# step {k}", *_python_step(k, step, names)]
    told = {"family": case.family, "params": case.params, "seed": case.seed, "demands": case.demands}
    rest = "".join(f",\n    {key}={value!a}" for key, value in told.items() if value)
    if case.placement:
        rest += ",\n    placement={" + ", ".join(f"{names[t]}: {p!a}" for t, p in case.placement.items()) + "}"
    steps = ", ".join(f"step{k}" for k in range(len(case.steps)))
    lines += ["", f"case = Case(\n    {case.id!a},\n    persistent,\n    [{steps}]{rest},\n)", "case.validate()", ""]
    return "\n".join(lines)


def _python_step(k: int, step: Step, names: dict[Tensor, str]) -> Iterator[str]:
    for i, t in enumerate(step.inputs):
        names[t] = f"x{k}_{i}"
        yield f"{names[t]} = {_python_leaf(t)}"
    for i, t in enumerate(step.graph):
        if t in names:  # a parameter: a leaf that ggml counts among the nodes
            continue
        for s, root in named_views(t, f"{k}_{i}", names):
            yield f"{names[s]} = named(b.view_tensor({root}), {s.name!a}, {s.flags})"
        call = call_of(t)
        made = _python_by_hand(t, names) if call is None else f"b.{call.name}({_python_arguments(call.args, names)})"
        yield f"{names[t]} = named({made}, {t.name!a}, {t.flags})"
        for name, args in call.after if call else ():
            yield f"b.{name}({names[t]}, {_python_arguments(args, names)})"
    inputs = ",\n".join(f"    {names[t]}: {_python_data(t, data)}" for t, data in step.inputs.items())
    yield f"inputs{k} = {{\n{inputs},\n}}" if inputs else f"inputs{k} = {{}}"
    nodes = ", ".join(names[t] for t in step.graph)
    outputs = "".join(f"{names[t]}, " for t in step.outputs)
    yield f"step{k} = Step(Graph([{nodes}]), inputs{k}, ({outputs.rstrip(' ')}))"


def _python_by_hand(t: Tensor, names: dict[Tensor, str]) -> str:
    if t in t.src:
        raise UsageError(f"{t}: a node that is its own src can only be a cast")
    src = "".join(("None" if s is None else names[s]) + ", " for s in t.src)
    view = f", {names[t.view_src]}, {t.view_offs}" if t.view_src is not None else ""
    fields = f"TYPES[{t.type.name!r}], {t.ne}, {t.nb}, {t.op!r}, {t.op_params}, ({src.rstrip(' ')}){view}"
    return f"Tensor({fields})"


def _python_arguments(args: tuple[Argument, ...], names: dict[Tensor, str]) -> str:
    return ", ".join(_python_argument(a, names) for a in args)


def _python_argument(a: Argument, names: dict[Tensor, str]) -> str:
    if isinstance(a, Tensor):
        return names[a] if a in names else _python_leaf(a)
    if isinstance(a, GGMLType):
        return f"TYPES[{a.name!r}]"
    if isinstance(a, float) and not math.isfinite(a):
        return f'float("{a}")'
    return ascii(int(a) if isinstance(a, IntEnum) else a)


def _python_leaf(t: Tensor) -> str:
    if t.view_src is not None or t.op != "NONE":
        raise UsageError(f"{t}: a leaf that owns its bytes expected")
    ne = list(t.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    said = f", name={t.name!a}" if t.name else ""
    flags = f", flags={t.flags}" if t.flags else ""
    return f"new_tensor(TYPES[{t.type.name!r}], {', '.join(map(str, ne))}{said}{flags})"


def _python_data(t: Tensor, data: Bytes) -> str:
    if not data.any():
        return f"np.zeros({data.nbytes}, np.uint8)"
    if t.type.dtype is not None and nelements(t) <= SPELLED_OUT:
        values = data.view(t.type.dtype)
        spelled = [x.item() for x in values]
        if np.array_equal(np.array(spelled, t.type.dtype).view(np.uint8), data) and np.isfinite(values).all():
            return f"np.array({spelled}, {t.type.dtype.str!r}).view(np.uint8)"
    packed = base64.b85encode(zlib.compress(data.tobytes(), 9)).decode()
    text = "\n".join(f"        {part!r}" for part in textwrap.wrap(packed, 100))
    return f"raw(\n{text},\n        {data.nbytes},\n    )"


# --- C++

MOST_DATA = 1 << 18
"""Maximum bytes of leaves in a source file; beyond that, values are random."""

LONGEST = 400
"""Maximum characters of an id or a name."""


def cpp(
    case: Case,
    name: str = "test_shrunk",
    *,
    max_nmse: float | None = None,
    drawn: Collection[Tensor] = (),
    copies: Tensor | None = None,
) -> str:
    """Return a `test_case` for ggml's tests/test-backend-ops.cpp, and the line that adds it.

    That file runs one graph, so all steps of a case become one graph. A graph of several nodes runs as a whole, and its
    results are compared.

    Args:
        case: the case to build.
        name: of the struct.
        max_nmse: allowed error; ggml's default if None.
        drawn: leaves with that file's own random values instead of those of the case.
        copies: a node to compare with itself over contiguous copies of its sources, on one device.
    """
    names: dict[Tensor, str] = {}
    leaves = {**case.persistent, **{t: data for s in case.steps for t, data in s.inputs.items()}}
    if sum(data.nbytes for t, data in leaves.items() if t not in drawn) > MOST_DATA:
        drawn = leaves  # too many for a source file
    body = []
    for t in leaves:
        names[t] = f"x{len(names)}"
        body.append(f"ggml_tensor * {names[t]} = {cpp_leaf(t)};{f'  // {plain(t.name)}' if t.name else ''}")
        body += [] if t in drawn else [f'ggml_set_name({names[t]}, "{names[t]}");']
        body += [f"ggml_set_param({names[t]});"] if t.flags & FLAG_PARAM else []
    whole = sum(computes(n) and n.op not in VIEW_OPS for s in case.steps for n in s.graph) > 1
    body += _cpp_nodes(case, names, whole=whole, copies=copies)
    init = [line for t, data in leaves.items() if t not in drawn for line in _cpp_data(names[t], t, data)]
    allowed = [] if max_nmse is None else [f"double max_nmse_err() override {{ return {max_nmse!r}; }}"]
    if copies is not None:
        allowed = [
            "double err(const float * a, const float *, size_t) override { return a[0]; }",
            "bool run_whole_graph() override { return true; }",
            f'std::string op_desc(ggml_tensor *) override {{ return "{copies.op}"; }}',
        ]
    elif whole:
        allowed += [
            "std::vector<ggml_tensor *> outs;",
            "bool run_whole_graph() override { return true; }",
            "std::vector<ggml_tensor *> fusion_test_nodes() override { return outs; }",
        ]
    init = ["void initialize_tensors(ggml_context * ctx) override {", "    test_case::initialize_tensors(ctx);",
            *(f"    {line}" for line in init), "}"] if init else []  # fmt: skip
    parts = (
        [f'std::string vars() override {{ return "{plain(case.id)}"; }}'], allowed,
        ["ggml_tensor * build_graph(ggml_context * ctx) override {", *(f"    {line}" for line in body), "}"], init,
    )  # fmt: skip
    inside = [f"    {line}" for part in parts for line in part]
    end = f"// in make_test_cases_eval(): test_cases.emplace_back(new {name}());"
    return "\n".join([f"struct {name} : public test_case {{", *inside, "};", end, ""])


def plain(text: str) -> str:
    """Sanitise `text` for C++: ASCII without quotes, backslashes or trigraphs."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\?' else "_" for c in text[:LONGEST])


def cpp_leaf(t: Tensor, context: str = "ctx") -> str:
    """Return the call that makes a leaf of this type and shape."""
    return f"ggml_new_tensor_4d({context}, {_cpp_type(t.type)}, {', '.join(map(str, t.ne))})"


def _cpp_nodes(case: Case, names: dict[Tensor, str], *, whole: bool, copies: Tensor | None) -> Iterator[str]:
    sinks: list[Tensor] = []
    for k, step in enumerate(case.steps):
        for i, t in enumerate(step.graph):
            if t in names:
                continue
            for s, root in named_views(t, f"{k}_{i}", names):
                yield f"ggml_tensor * {names[s]} = ggml_view_tensor(ctx, {root});"
            yield from cpp_node(t, names)
            if t is copies:
                yield from _against_copies(t, names)
                return
            if whole and t in step.outputs and t not in _unread(step):
                yield f"ggml_set_output({names[t]});"
        sinks += results(step)
    if whole:
        yield f"outs = {{ {', '.join(names[t] for t in sinks)} }};"
    if len(sinks) == 1:
        yield f"return {names[sinks[0]]};"
        return
    yield "// earlier results first: what they store is read by later ones"
    for i, t in enumerate(sinks):
        value = names[t] if t.type is F32 else f"ggml_cast(ctx, {names[t]}, GGML_TYPE_F32)"
        total = f"ggml_sum(ctx, ggml_cont(ctx, {value}))"
        yield f"ggml_tensor * out{i} = {total if not i else f'ggml_add(ctx, out{i - 1}, {total})'};"
    yield f"return out{len(sinks) - 1};"


def _against_copies(t: Tensor, names: dict[Tensor, str]) -> Iterator[str]:
    """Yield the node over contiguous copies, and the squared difference as the result."""
    yield "// the same over contiguous copies"
    also = dict(names)
    for i, s in enumerate(t.src):
        if s is not None and s.nb != contiguous_nb(s.type, s.ne):
            also[s] = f"c{i}"
            yield f"ggml_tensor * c{i} = ggml_cont(ctx, {names[s]});"
    also[t] = "same"
    yield from cpp_node(t, also)
    one, other = (n if t.type is F32 else f"ggml_cast(ctx, {n}, GGML_TYPE_F32)" for n in (names[t], "same"))
    yield f"return ggml_sum(ctx, ggml_sqr(ctx, ggml_sub(ctx, {one}, {other})));  // 0 if both are equal"


def results(step: Step) -> list[Tensor]:
    """Return the nodes to compare: outputs, and nodes without readers."""
    unread = _unread(step)
    return [t for t in step.graph if computes(t) and (t in unread or t in step.outputs)]


def _unread(step: Step) -> set[Tensor]:
    return set(step.graph) - {s for n in step.graph for s in n.src if s is not n}


def cpp_node(t: Tensor, names: dict[Tensor, str]) -> Iterator[str]:
    """Yield lines that declare a node under its name and make it in `ctx`."""
    call = call_of(t)
    if call is None:
        yield from _by_hand(t, names)
        return
    yield f"ggml_tensor * {names[t]} = ggml_{call.name}({', '.join(['ctx', *_cpp_arguments(t, call.args, names)])});"
    for name, args in call.after:
        yield f"ggml_{name}({', '.join([names[t], *_cpp_arguments(t, args, names)])});"


def _by_hand(t: Tensor, names: dict[Tensor, str]) -> Iterator[str]:
    """Yield lines that make a node field by field, since its constructor is not known."""
    first = next((names[s] for s in t.src if s is not None and s.root is t.view_src), "")
    yield f"ggml_tensor * {names[t]} = {f'ggml_view_tensor(ctx, {first})' if first else cpp_leaf(t)};"
    yield f"{names[t]}->op = GGML_OP_{t.op};"
    for i, s in enumerate(t.src):
        if s is not None:
            yield f"{names[t]}->src[{i}] = {names[s]};"
    if t.op_params != ZERO_PARAMS:
        params = ", ".join(map(str, t.op_params))
        yield f"{{ const int32_t params[] = {{ {params} }}; memcpy({names[t]}->op_params, params, sizeof(params)); }}"


def _cpp_arguments(t: Tensor, args: tuple[Argument, ...], names: dict[Tensor, str]) -> Iterator[str]:
    return (f"GGML_{t.op}_OP_{a}" if isinstance(a, str) else _cpp_argument(a, names) for a in args)


def _cpp_argument(a: Argument, names: dict[Tensor, str]) -> str:
    if isinstance(a, Tensor):
        return names[a] if a in names else cpp_leaf(a)
    if isinstance(a, GGMLType):
        return _cpp_type(a)
    if isinstance(a, tuple):
        kind = "int64_t" if isinstance(a, Longs) else "int"
        return f"std::vector<{kind}>{{ {', '.join(map(str, a))} }}.data()"
    return "nullptr" if a is None else _cpp_number(a)


def _cpp_number(a: float | str) -> str:
    if isinstance(a, IntEnum):
        return str(int(a)) if isinstance(a, ROPE_TYPE) else f"({c_enum(type(a))}) {int(a)}"  # a mode is an int in C
    if isinstance(a, float):
        infinite = "NAN" if math.isnan(a) else "INFINITY" if a > 0 else "-INFINITY"
        return f"{a!r}f" if math.isfinite(a) else infinite
    return str(a).lower()


def _cpp_type(t: GGMLType) -> str:
    return f"GGML_TYPE_{t.name.upper()}"


def cpp_bytes(name: str, data: Bytes) -> Iterator[str]:
    """Yield lines that declare `name` and fill it."""
    if not data.any():
        yield f"const std::vector<uint8_t> {name}({data.nbytes}, 0);"
        return
    yield f"const std::vector<uint8_t> {name} = {{"
    yield from (f"    {line}" for line in textwrap.wrap(", ".join(map(str, data.tolist())), 100))
    yield "};"


def _cpp_data(name: str, t: Tensor, data: Bytes) -> Iterator[str]:
    kind = {"f32": "float", "i32": "int32_t", "i64": "int64_t"}.get(t.type.name)
    values = data.view(t.type.dtype) if kind and t.type.dtype is not None else data
    if kind and data.any() and np.isfinite(values).all():
        spelled = ", ".join(f"{x}f" if kind == "float" else str(x) for x in values)
        yield f"const std::vector<{kind}> {name} = {{"
        yield from (f"    {line}" for line in textwrap.wrap(spelled, 100))
        yield "};"
    else:
        yield from cpp_bytes(name, data)
    yield f'ggml_backend_tensor_set(ggml_get_tensor(ctx, "{name}"), {name}.data(), 0, {data.nbytes});'
