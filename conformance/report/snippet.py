"""A case as a Python program that builds it with `conformance.ggml.ops.build`.

Whatever a case from a stranger's file is called is in the program only as an ASCII literal: never in a comment, a
docstring or a name.
"""

from __future__ import annotations

import base64
import math
import textwrap
import zlib
from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from conformance.case.case import Case, Step
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Bytes, Tensor, nelements
from conformance.ggml.types import GGMLType

from .calls import Argument, call_of

SPELLED_OUT = 64
"""Elements up to which a tensor's values are written as numbers."""

_HEAD = '''\
"""Builds the case whose id stands at the end."""

import base64
import zlib

import numpy as np

from conformance.ggml.ops.build import Builder
from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.placement import Placement
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
    """A program that leaves the same case in `case`, less its recorded values and where they came from.

    Raises:
        UsageError: what it takes no constructor of ggml for makes.
    """
    names: dict[Tensor, str] = {}
    lines = [_HEAD]
    for t in case.persistent:
        names[t] = f"p{len(names)}"
        lines.append(f"{names[t]} = {_leaf(t)}")
    pairs = ",\n".join(f"    {names[t]}: {_data(t, data)}" for t, data in case.persistent.items())
    lines.append("persistent = {\n" + pairs + (",\n}" if pairs else "}"))
    for k, step in enumerate(case.steps):
        lines += ["", f"# step {k}", *_step(k, step, names)]
    told = {"family": case.family, "params": case.params, "seed": case.seed, "demands": case.demands}
    rest = "".join(f",\n    {key}={value!a}" for key, value in told.items() if value)
    if case.placement:
        rest += ",\n    placement={" + ", ".join(f"{names[t]}: {p!a}" for t, p in case.placement.items()) + "}"
    steps = ", ".join(f"step{k}" for k in range(len(case.steps)))
    lines += ["", f"case = Case(\n    {case.id!a},\n    persistent,\n    [{steps}]{rest},\n)", "case.validate()", ""]
    return "\n".join(lines)


def _step(k: int, step: Step, names: dict[Tensor, str]) -> Iterator[str]:
    for i, t in enumerate(step.inputs):
        names[t] = f"x{k}_{i}"
        yield f"{names[t]} = {_leaf(t)}"
    for i, t in enumerate(step.graph):
        for j, s in enumerate(t.src):
            if s is not None and s is not t and s not in names and s.view_src is not None:  # a leaf that is a view
                names[s] = f"v{k}_{i}_{j}"
                yield f"{names[s]} = named(b.view_tensor({names[s.view_src]}), {s.name!a}, {s.flags})"
        names[t] = f"n{k}_{i}"
        yield f"{names[t]} = named({_made(t, names)}, {t.name!a}, {t.flags})"
        call = call_of(t)
        for name, args in call.after if call else ():
            yield f"b.{name}({names[t]}, {_arguments(args, names)})"
    inputs = ",\n".join(f"    {names[t]}: {_data(t, data)}" for t, data in step.inputs.items())
    yield f"inputs{k} = {{\n{inputs},\n}}" if inputs else f"inputs{k} = {{}}"
    nodes = ", ".join(names[t] for t in step.graph)
    outputs = "".join(f"{names[t]}, " for t in step.outputs)
    yield f"step{k} = Step(Graph([{nodes}]), inputs{k}, ({outputs.rstrip(' ')}))"


def _made(t: Tensor, names: dict[Tensor, str]) -> str:
    call = call_of(t)
    if call is not None:
        return f"b.{call.name}({_arguments(call.args, names)})"
    if t in t.src:
        raise UsageError(f"{t}: a node that is its own src can only be a cast")
    src = "".join(("None" if s is None else names[s]) + ", " for s in t.src)
    view = f", {names[t.view_src]}, {t.view_offs}" if t.view_src is not None else ""
    fields = f"TYPES[{t.type.name!r}], {t.ne}, {t.nb}, {t.op!r}, {t.op_params}, ({src.rstrip(' ')}){view}"
    return f"Tensor({fields})"


def _arguments(args: tuple[Argument, ...], names: dict[Tensor, str]) -> str:
    return ", ".join(_argument(a, names) for a in args)


def _argument(a: Argument, names: dict[Tensor, str]) -> str:
    if isinstance(a, Tensor):
        return names[a]
    if isinstance(a, GGMLType):
        return f"TYPES[{a.name!r}]"
    if isinstance(a, float) and not math.isfinite(a):
        return f'float("{a}")'
    return ascii(int(a) if isinstance(a, IntEnum) else a)


def _leaf(t: Tensor) -> str:
    if t.view_src is not None or t.op != "NONE":
        raise UsageError(f"{t}: a leaf that owns its bytes expected")
    ne = list(t.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    said = f", name={t.name!a}" if t.name else ""
    flags = f", flags={t.flags}" if t.flags else ""
    return f"new_tensor(TYPES[{t.type.name!r}], {', '.join(map(str, ne))}{said}{flags})"


def _data(t: Tensor, data: Bytes) -> str:
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
