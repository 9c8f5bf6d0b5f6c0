"""Which constructor of ggml made a node, and with which arguments: what a snippet in any language is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS, Form
from conformance.ggml.tensor import FIELDS, Tensor
from conformance.ggml.types import GGMLType

Argument = Tensor | GGMLType | float | int | bool | str | tuple[int, ...] | None
_B = Builder()


@dataclass(frozen=True, slots=True)
class Call:
    """One constructor as `ggml.h` has it, without the context; `after` are calls that take the result first."""

    name: str
    args: tuple[Argument, ...]
    after: tuple[tuple[str, tuple[Argument, ...]], ...] = ()


def call_of(t: Tensor) -> Call | None:
    """The constructor that gives `t` over its src; None where none is known to give exactly it."""
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
    """Make the call: a tensor.

    Raises:
        GraphError: with the assertion of ggml that the arguments break.
    """
    made: Tensor = getattr(_B, call.name)(*call.args)
    for name, args in call.after:
        getattr(_B, name)(made, *args)
    return made


def _proposals(t: Tensor) -> Iterator[Call]:
    """The constructors that may have made `t`, the special before the general, without setters where these do."""
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
    """What `argument` of a constructor was.

    Raises:
        KeyError: the node does not tell.
    """
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
