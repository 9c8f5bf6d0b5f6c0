"""The form of a fault: what the smallest failing case still has.

Shrinking has tried to take everything away: views, types, sources that an op need not have, parameters, dimensions.
What is left is a condition: without it the case passed, failed in another way, or was no legal graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from conformance.case.case import Case
from conformance.ggml.ops.fields import Field
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Tensor
from conformance.run.shrink.simplify import neutral, optional_sources, parameters_of, rank

from .cause import ANY_OF, Condition
from .features import CONTIGUOUS, FIRST, IN_PLACE, LAYOUT, OFFSET, OP, STEP, Features, features, name_of, word

BORDERS = (1, 2, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 65535, 65536)
"""Sizes that a condition names: kernels, blocks and caches change there."""
TYPE = "a type"
"""Of any operand."""


@dataclass(frozen=True, slots=True)
class Form:
    """A conjunction of conditions on one node."""

    conditions: tuple[Condition, ...]

    @property
    def ops(self) -> tuple[str, ...]:
        """Those that it is about; none where no single node is at fault."""
        return tuple(next((c.value.split(ANY_OF) for c in self.conditions if c.key == OP), ()))

    @property
    def rest(self) -> frozenset[Condition]:
        """The conditions beside the op."""
        return frozenset(c for c in self.conditions if c.key != OP)

    def holds(self, found: Features) -> bool:
        """Whether a node with these features meets all conditions."""
        return all(meets(c, found) for c in self.conditions)


def meets(condition: Condition, found: Features) -> bool:
    """Whether a node with these features has the property."""
    if condition.key == TYPE:
        named = condition.value.split(ANY_OF)
        return any(key.endswith(".type") and value in named for key, value in found.items())
    value = found.get(condition.key)
    if value is None:
        return False
    if condition.value.startswith("> "):
        return int(value) > int(condition.value[2:])
    if condition.value.startswith("!= "):
        return value != condition.value[3:]
    return value in condition.value.split(ANY_OF)


def form_of(case: Case, k: int, node: Tensor) -> Form:
    """The form of a case that is as small as can be, and fails at `node` of step `k`."""
    return Form((Condition(OP, name_of(node)), *_conditions(node, features(case, k, node))))


def _conditions(node: Tensor, found: Features) -> Iterator[Condition]:
    yield from (Condition(f"src[{i}]", "given") for i in optional_sources(node))
    yield from (c for i, s in enumerate(node.src) if s is not None for c in _of_operand(node, i, found))
    yield from (Condition(f.name, _value(f, f.of(node.op_params))) for f in parameters_of(node))
    if found[IN_PLACE] == "yes" and node.op not in _ALWAYS_IN_PLACE:
        yield Condition(IN_PLACE, "yes")
    if found[STEP] != FIRST:
        yield Condition(STEP, found[STEP])


def _of_operand(node: Tensor, i: int, found: Features) -> Iterator[Condition]:
    src, t = f"src[{i}]", node.src[i]
    assert t is not None
    if rank(t.type):
        yield Condition(f"{src}.type", t.type.name)
    if found[f"{src}.{LAYOUT}"] != CONTIGUOUS:
        yield Condition(f"{src}.{LAYOUT}", found[f"{src}.{LAYOUT}"])
    if t.view_offs:
        yield Condition(f"{src}.{OFFSET}", "yes")
    for d, n in enumerate(t.ne):
        said = any(s is not None and s.ne[d] == n for s in node.src[:i])  # mostly the same dimension
        if n > (t.type.blck_size if d == 0 else 1) and not said:
            yield Condition(f"{src}.ne[{d}]", f"> {max(b for b in BORDERS if b < n)}")


def _value(parameter: Field, value: object) -> str:
    """A member of an enumeration by its name; a number as not neutral."""
    if parameter.members is not None or not isinstance(value, (int, float)):
        return word(value)
    return f"!= {word(type(value)(neutral(parameter.name)))}"


_ALWAYS_IN_PLACE = frozenset({"SET_ROWS", "CPY"})


def without(form: Form, always: Callable[[Condition], bool]) -> Form:
    """`form` without the conditions that every node of its op meets."""
    return Form(tuple(c for c in form.conditions if c.key == OP or not always(c)))


def common(a: Form, b: Form) -> Form | None:
    """What two forms share: the ops of both, the lower of two borders, a type wherever it stands. None where that is
    nothing beside the op, or where ops of different kernels share no more than sizes.
    """
    shared = [c for x in a.rest for y in b.rest if (c := _shared(x, y)) is not None]
    of_operand = any(c.key.endswith((TYPE, ".type", LAYOUT, OFFSET)) for c in shared)
    if not shared or not (set(a.ops) & set(b.ops) or of_operand or _module(a) == _module(b)):
        return None
    ops = dict.fromkeys((*a.ops, *b.ops))
    return Form((Condition(OP, ANY_OF.join(ops)), *sorted(dict.fromkeys(shared), key=str)))


def type_of(form: Form) -> str:
    """The type that is all a form says beside its ops; empty where it says something else."""
    values = [c.value for c in form.rest if c.key == TYPE or c.key.endswith(".type")]
    return values[0] if len(values) == len(form.rest) == 1 else ""


def of_types(forms: Sequence[Form]) -> Form:
    """The form of nodes of any op and any type of `forms`."""
    ops = dict.fromkeys(op for f in forms for op in f.ops)
    types = dict.fromkeys(type_of(f) for f in forms)
    return Form((Condition(OP, ANY_OF.join(ops)), Condition(TYPE, ANY_OF.join(types))))


def _shared(a: Condition, b: Condition) -> Condition | None:
    if a == b:
        return a
    if a.key == b.key and a.value.startswith("> ") and b.value.startswith("> "):
        return min(a, b, key=lambda c: int(c.value[2:]))
    if a.value == b.value and all(x.key == TYPE or x.key.endswith(".type") for x in (a, b)):
        return Condition(TYPE, a.value)
    return None


def _module(form: Form) -> str:
    declared = DECLARATIONS.get(form.ops[0].partition(".")[0]) if form.ops else None
    return declared.rule.__module__ if declared else ""
