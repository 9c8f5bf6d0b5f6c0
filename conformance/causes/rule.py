"""Rules: properties that the smallest failing case of a cause still has.

Shrinking tried to remove each view, type, optional source, parameter and dimension. Each remaining property is a
condition: without it the case passed, failed in another way, or was not a valid graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from conformance.case.case import Case
from conformance.ggml.ops.fields import Field
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import I64
from conformance.judge.cause import ANY_OF, Condition
from conformance.run.shrink.simplify import TURNED, may_be_simpler, neutral, optional_sources, parameters_of, rank

from .features import (
    AND,
    BARE,
    BROADCAST,
    CONTIGUOUS,
    FIRST,
    HOLDS,
    IN_PLACE,
    LAYOUT,
    OFFSET,
    OP,
    OUTPUT,
    PART,
    REPEATING,
    RESULT,
    SHARED,
    STEP,
    STORES,
    TYPE,
    VIEW,
    YES,
    Features,
    features,
    name_of,
    word,
)

BORDERS = (1, 2, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 65535, 65536)
"""Sizes that a condition names: kernels, blocks and caches change behaviour there."""
ANY, ANY_SOURCE = "any operand.", "any source."
"""Key prefixes for a property of any operand, including the result, or of any source."""
OF_ANY = (TYPE, VIEW, OFFSET, LAYOUT, HOLDS, SHARED)
"""Properties that can apply to any operand."""
GIVEN = "given"
"""Value for a present optional source; the meaning of its index depends on the op."""
MATRICES = "ne[2]*ne[3]"


@dataclass(frozen=True, slots=True)
class Rule:
    """A conjunction of conditions on one node; empty if there is no single failing node."""

    conditions: tuple[Condition, ...]

    @classmethod
    def of(cls, ops: Collection[str], rest: Collection[Condition]) -> Rule:
        """Return the rule for nodes of any of `ops` that meet all of `rest`."""
        return cls((Condition(OP, ANY_OF.join(sorted(ops))), *sorted(set(rest), key=str)))

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops to which the rule applies; empty if there is no single failing node."""
        return tuple(next((c.value.split(ANY_OF) for c in self.conditions if c.key == OP), ()))

    @property
    def rest(self) -> frozenset[Condition]:
        """Conditions other than the op."""
        return frozenset(c for c in self.conditions if c.key != OP)

    @property
    def says(self) -> frozenset[Condition]:
        """Conditions other than op and sizes."""
        return frozenset(c for c in self.rest if not is_size(c))

    def holds(self, found: Features) -> bool:
        """Return True if a node with these features meets all conditions."""
        return all(meets(c, found) for c in self.conditions)

    def holds_for_any_op(self, found: Features) -> bool:
        """Return True if a node with these features meets all conditions other than the op."""
        return all(meets(c, found) for c in self.rest)

    def but(self, gone: Collection[Condition]) -> Rule:
        """Return the rule without the conditions in `gone`."""
        return Rule(tuple(c for c in self.conditions if c not in gone))


def is_size(condition: Condition) -> bool:
    """Return True if the condition is about the size of an operand."""
    return ".ne[" in condition.key


def property_of(condition: Condition) -> str:
    """Return the property name without the operand: `offset view` for `src[1].offset view`."""
    operand, dot, name = condition.key.rpartition(".")
    return name if dot and operand.startswith(("src[", "any ", "result")) else condition.key


def meets(condition: Condition, found: Features) -> bool:
    """Return True if a node with these features meets the condition."""
    if condition.key.startswith((ANY, ANY_SOURCE)):
        name, among = property_of(condition), ("src[", "result") if condition.key.startswith(ANY) else ("src[",)
        own = (v for k, v in found.items() if k.endswith(f".{name}") and k.startswith(among))
        return any(_is(condition.value, v, name) for v in own)
    value = found.get(condition.key)
    if value is None:
        return False
    if condition.value.startswith("> "):
        return int(value) > int(condition.value[2:])
    if condition.value.startswith("!= "):
        return value != condition.value[3:]
    return _is(condition.value, value, condition.key)


def _is(wanted: str, value: str, key: str) -> bool:
    """Return True if `value` is one of `wanted`, or for `holds`, includes all of them."""
    if key.endswith(HOLDS):
        return set(wanted.split(AND)) <= set(value.split(AND))
    return value in wanted.split(ANY_OF)


def rule_of(case: Case, k: int, node: Tensor) -> Rule:
    """Return the rule of a minimal case that fails at `node` in step `k`."""
    return Rule((Condition(OP, name_of(node)), *_conditions(node, features(case, k, node))))


def _conditions(node: Tensor, found: Features) -> Iterator[Condition]:
    yield from (Condition(f"src[{i}]", GIVEN) for i in optional_sources(node))
    yield from (c for i, s in enumerate(node.src) if s is not None for c in _of_operand(node, i, found))
    yield from (Condition(f.name, _value(f, f.of(node.op_params), found)) for f in parameters_of(node))
    read = [s for i, s in enumerate(node.src) if s is not None and i != STORES.get(node.op)]
    if (rank(node.type) or node.type is I64) and all(s.type is not node.type for s in read):
        yield Condition(RESULT, node.type.name)
    if (found[IN_PLACE] == YES) != (node.op in STORES):
        yield Condition(IN_PLACE, found[IN_PLACE])
    if OUTPUT in found:
        yield Condition(OUTPUT, found[OUTPUT])
    if found[STEP] != FIRST:
        yield Condition(STEP, found[STEP])


def mixes_types(node: Tensor) -> bool:
    """Return True if the two operands of an elementwise op have two types."""
    a, b = node.src[:2] if node.op in REPEATING else (None, None)
    return a is not None and b is not None and a.type is not b.type


def _of_operand(node: Tensor, i: int, found: Features) -> Iterator[Condition]:
    src, t = f"src[{i}].", node.src[i]
    assert t is not None
    simpler = (rank(t.type) or t.type is I64) and may_be_simpler(node, i)
    if src + TYPE in found and (simpler or mixes_types(node)):
        yield Condition(src + TYPE, t.type.name)
    if found[src + LAYOUT] != CONTIGUOUS:
        yield Condition(src + LAYOUT, found[src + LAYOUT])
    if found.get(src + VIEW, "").startswith(PART):
        yield Condition(src + VIEW, found[src + VIEW])
    for key in (OFFSET, BARE, SHARED, HOLDS, BROADCAST):
        if src + key in found:
            yield Condition(src + key, found[src + key])
    for d, n in enumerate(t.ne):
        said = any(s is not None and s.ne[d] == n for s in node.src[:i])  # usually the same dimension
        if n > (t.type.blck_size if d == 0 else 1) and not said:
            yield Condition(f"{src}ne[{d}]", f"> {max(b for b in BORDERS if b < n)}")


def _value(parameter: Field, value: object, found: Features) -> str:
    """Return the value for a condition: an enum member's name, or `!=` the neutral number."""
    if parameter.name == TURNED:
        return found[TURNED]
    if parameter.members is not None or not isinstance(value, (int, float)):
        return word(value)
    return f"!= {word(type(value)(neutral(parameter.name)))}"


def kernels(*ops: Collection[str]) -> set[str]:
    """Return the kernels of ops: sub-ops, and an op and its gradient, share one."""
    return {op.partition(".")[0].removesuffix("_BACK") for op in itertools.chain(*ops)}


def common(a: Rule, b: Rule) -> Rule | None:
    """Return the rule that covers both: the shared conditions and the ops of both.

    A property may be shared at different operands. The lower of two sizes is shared; so are two types of the same op,
    and two layouts if the rules share an op. Returns None if rules of different ops share only sizes, given sources and
    the step.
    """
    same = a.ops == b.ops
    either = {TYPE} if same else set()  # types may differ for the same ops, layouts for a common op
    either |= {LAYOUT} if set(a.ops) & set(b.ops) else set()
    shared = {c for x in a.rest for y in b.rest if (c := _both(x, y, either)) is not None}
    named = {property_of(c) for c in shared if not c.key.startswith("any ")}
    shared = {c for c in shared if not (c.key.startswith("any ") and property_of(c) in named)}
    if len(kernels(a.ops, b.ops)) > 1 and all(is_size(c) or c.value == GIVEN or c.key == STEP for c in shared):
        return None
    return Rule.of({*a.ops, *b.ops}, shared)


def _both(a: Condition, b: Condition, either: Collection[str]) -> Condition | None:
    """Return the condition common to `a` and `b`, or None; values of `either` may differ."""
    if a == b:
        return a
    if is_size(a) and is_size(b):
        key = a.key if a.key == b.key else f"{a.key.partition('.')[0]}.{MATRICES}"
        are_outer = a.key[-5:] in ("ne[2]", "ne[3]") and b.key[-5:] in ("ne[2]", "ne[3]") and a.key[:6] == b.key[:6]
        lower = min(a, b, key=lambda c: int(c.value[2:]))
        return Condition(key, lower.value) if a.key == b.key or are_outer else None
    name = property_of(a)
    if name != property_of(b) or (a.key != b.key and name not in OF_ANY):
        return None
    x, y = set(a.value.split(ANY_OF)), set(b.value.split(ANY_OF))
    of_sources = all(c.key.startswith(("src[", ANY_SOURCE)) for c in (a, b))
    key = a.key if a.key == b.key else (ANY_SOURCE if of_sources else ANY) + name
    if name == HOLDS:
        held = [w for w in a.value.split(AND) if w in b.value.split(AND)]
        return Condition(key, AND.join(held)) if held else None
    if x & y or (name in either and a.key == b.key):
        return Condition(key, ANY_OF.join(sorted(x | y)))
    return None
