"""The form of a fault: what the smallest failing case still has.

Shrinking has tried to take everything away: views, types, sources that an op need not have, parameters, dimensions.
What is left is a condition: without it the case passed, failed in another way, or was no legal graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from conformance.case.case import Case
from conformance.ggml.ops.fields import Field
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import I64, TYPES
from conformance.run.shrink.simplify import TURNED, may_be_simpler, neutral, optional_sources, parameters_of, rank

from .cause import ANY_OF, Condition
from .features import (
    AND,
    ANOTHER,
    BESIDE,
    BROADCAST,
    CONTIGUOUS,
    FIRST,
    HOLDS,
    IN_PLACE,
    LAYOUT,
    MATRICES,
    OFFSET,
    OP,
    OUTPUT,
    PART,
    RESULT,
    SHOWS,
    STEP,
    SUBNORMAL,
    VIEW,
    WRITTEN,
    Features,
    features,
    name_of,
    word,
)

SEVERAL = 3
"""Ops, or types, from which on what they share is at fault, and not each."""
BORDERS = (1, 2, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 65535, 65536)
"""Sizes that a condition names: kernels, blocks and caches change there."""
STORED = {"SET_ROWS": "src[2]", "CPY": "src[1]"}
"""Ops that store blocks, and where: a source that their result is a view of, or has the type of."""
ALWAYS_IN_PLACE = frozenset(STORED)
"""Ops that store: SET_ROWS always, CPY but where it is a cast."""
BLOCKS = frozenset(t.name for t in TYPES.values() if t.is_quantized)
TYPE, SHOWN, HELD, CHANGED = "a type", "an operand shows", "an operand holds", "an operand is written"
SHIFTED = "an operand's offset"  # ends as that of one operand does
"""Of any operand."""
GATES = {
    "GLU.REGLU": "UNARY.RELU",
    "GLU.GEGLU": "UNARY.GELU",
    "GLU.SWIGLU": "UNARY.SILU",
    "GLU.GEGLU_ERF": "UNARY.GELU_ERF",
    "GLU.GEGLU_QUICK": "UNARY.GELU_QUICK",
}
"""Sub-op of GLU -> the function by which it gates."""
PRODUCT = {"src[0]": "src[1]", "src[1]": "src[0]"}
"""Source of FLASH_ATTN_EXT -> that of the MUL_MAT of K and Q."""
SOFT_MAX = {"src[3]": "src[1]", "src[4]": "src[2]"}
"""Source of FLASH_ATTN_EXT -> that of the SOFT_MAX in it."""
FED = frozenset({f"{PART}an input", f"{PART}a leaf written in place"})
"""What views show of leaves that a backend is given for a step."""
OF_ANY = {TYPE: ".type", SHOWN: f".{SHOWS}", HELD: f".{HOLDS}", CHANGED: f".{WRITTEN}", SHIFTED: f".{OFFSET}"}
"""Such a key -> how that of one operand ends."""


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
        return all(meets(c, self.as_read(found)) for c in self.conditions)

    def of_ops(self, other: Form) -> Form:
        """The same of the ops of `other`."""
        return Form((Condition(OP, ANY_OF.join(other.ops)), *(c for c in self.conditions if c.key != OP)))

    @property
    def spreads(self) -> bool:
        """Whether it is about so many ops that none of them is at fault, but a type, what an operand shows, or where
        the result lies.
        """
        told = (c.key in (OUTPUT, IN_PLACE) or _of_operand_itself(c.key) for c in self.rest)
        return len(self.ops) >= SEVERAL and any(told)

    @property
    def of_extent(self) -> bool:
        """Whether it is about an operand that shows a part of something: who takes all of it has wrong numbers, or
        writes where nobody looks, or damages the heap, as sizes have it.
        """
        return any(c.value.startswith(PART) or c.key == SHIFTED for c in self.rest)

    @property
    def of_what_is_held(self) -> bool:
        """Whether it is about values that arithmetic treats apart."""
        return any(map(of_values, self.rest))

    @property
    def of_subnormals(self) -> bool:
        """Whether all it says, beside sizes and types, is that an operand holds subnormal numbers."""
        said = [c for c in self.says if not of_type(c)]
        return bool(said) and all(of_values(c) and c.value == SUBNORMAL for c in said)

    @property
    def of_output(self) -> bool:
        """Whether all it says, beside sizes and parameters, is that the node is an output which others read."""
        return {c.key for c in self.says if c.key == OUTPUT or c.key in OF_ANY or "[" in c.key} == {OUTPUT}

    @property
    def of_what_is_written(self) -> bool:
        """Whether it is about an operand that a node before writes."""
        return any(of_any(c.key) == CHANGED for c in self.rest)

    @property
    def of_in_place(self) -> bool:
        """Whether all it says, beside sizes, is that the node writes into what another tensor owns."""
        return {c.key for c in self.says} == {IN_PLACE}

    @property
    def of_beside(self) -> bool:
        """Whether all it says is that another node computes, too."""
        return {c.key for c in but_for_casts(self)} == {BESIDE}

    @property
    def of_few_words(self) -> bool:
        """Whether it says no more than types, sizes, which sources are given, and that the node writes in place."""
        return all(of_type(c) or c.key == IN_PLACE or c.value == "given" for c in self.says)

    @property
    def of_place(self) -> bool:
        """Whether it is about where an operand or a result lies: a node by itself, of other leaves, is right then."""
        return any(c.key == STEP or of_lying(c) for c in self.rest) or self.of_extent

    @property
    def says(self) -> frozenset[Condition]:
        """What it says beside ops and sizes."""
        return frozenset(c for c in self.rest if not is_size(c))

    @property
    def only_of_extent(self) -> bool:
        """Whether it says nothing else of its few ops."""
        said = all(c.key.endswith((SHOWS, OFFSET, LAYOUT)) for c in self.rest if not is_size(c))
        return self.of_extent and said and len(self.ops) < SEVERAL

    def same_kernel(self, other: Form) -> bool:
        """Whether it says the same, and something, of ops that are computed in one place."""
        return bool(self.rest) and self.rest == other.rest and module_of(self) == module_of(other)

    def but_for_sizes(self, found: Features) -> Form | None:
        """The same without the sizes that a node with these features does not have; None if it lacks something else."""
        met = tuple(c for c in self.conditions if meets(c, found))
        return Form(met) if all(is_size(c) for c in self.conditions if c not in met) else None

    def same_but_sizes(self, other: Form) -> bool:
        """Whether it says what `other` says, of an op of its own, whatever the sizes."""
        mine, theirs = ({c for c in f.rest if not is_size(c)} for f in (self, other))
        return mine == theirs and bool(set(self.ops) & set(other.ops))

    def anywhere(self) -> Form:
        """The same without sizes, where several ops share what it says of an operand."""
        return Form(tuple(c for c in self.conditions if not is_size(c))) if self.spreads and self.of_extent else self

    @property
    def is_beside(self) -> bool:
        """Whether it says that another node computes, too."""
        return any(c.key == BESIDE for c in self.rest)

    @property
    def says_nothing(self) -> bool:
        """Whether it says no more of a node than sizes."""
        return not but_for_casts(self)

    def beside_another(self) -> Form:
        """The same of a node that is right unless another computes, too."""
        return Form((*self.conditions, Condition(BESIDE, ANOTHER)))

    def but(self, idle: Collection[Condition]) -> Form:
        """The same without conditions that do not matter."""
        return Form(tuple(c for c in self.conditions if c not in idle))

    def with_types(self, found: Features) -> Form:
        """The same for the types of a node from which the smallest case was shrunk, too: it fails with either."""
        return Form(tuple(
            replace(c, value=ANY_OF.join([c.value, found[c.key]]))
            if c.key.endswith(OF_ANY[TYPE]) and c.key in found and not meets(c, found) and not c.value.startswith("!= ")
            else c
            for c in self.conditions
        ))  # fmt: skip

    def beside(self, found: Features) -> bool:
        """Whether a node of any op meets the rest."""
        return all(meets(c, self.as_read(found)) for c in self.rest)

    def as_read(self, found: Features) -> Features:
        """`found` without the type that a store writes, where the form is about blocks that are read."""
        stored = STORED.get(found[OP])
        if stored is None or blocks_of(self) != "read":
            return found
        return {k: v for k, v in found.items() if k not in (f"{stored}.type", RESULT)}


def of_lying(condition: Condition) -> bool:
    """Whether it is about where an operand or the result lies: all else is the same without it."""
    key = condition.key
    return key in (OUTPUT, IN_PLACE, SHOWN, CHANGED) or key.endswith((SHOWS, OFFSET, LAYOUT, VIEW, WRITTEN))


def of_part(condition: Condition) -> bool:
    """Whether it is about an operand that shows a part of something."""
    return condition.key == SHOWN or condition.key.endswith((SHOWS, OFFSET))


def is_size(condition: Condition) -> bool:
    """Whether it is about how large an operand is."""
    return ".ne[" in condition.key


def _of_operand_itself(key: str) -> bool:
    return key in OF_ANY or key.endswith(tuple(OF_ANY.values()))


def of_matrices(key: str) -> str:
    """The key that says how many matrices an operand has, if `key` says how many along one dimension; else itself."""
    return re.sub(r"\.ne\[[23]\]$", f".{MATRICES}", key)


def of_any(key: str) -> str:
    """The key that says the same of any operand; itself where there is none."""
    return next((k for k, end in OF_ANY.items() if key.endswith(end)), key)


def meets(condition: Condition, found: Features) -> bool:
    """Whether a node with these features has the property."""
    if condition.key in OF_ANY:
        end = OF_ANY[condition.key]
        return any(key.endswith(end) and _is(condition.value, value, end) for key, value in found.items())
    value = found.get(condition.key)
    if value is None:
        return False
    if condition.value.startswith("> "):
        return int(value) > int(condition.value[2:])
    if condition.value.startswith("!= "):
        return value != condition.value[3:]
    return _is(condition.value, value, condition.key)


def _is(wanted: str, value: str, key: str) -> bool:
    """Whether `value` is any of those `wanted`; what an operand holds, whether it is among all that it holds."""
    if key.endswith(OF_ANY[HELD]):
        return set(wanted.split(AND)) <= set(value.split(AND))
    return value in wanted.split(ANY_OF)


def form_of(case: Case, k: int, node: Tensor) -> Form:
    """The form of a case that is as small as can be, and fails at `node` of step `k`."""
    return Form((Condition(OP, name_of(node)), *_conditions(node, features(case, k, node))))


def _conditions(node: Tensor, found: Features) -> Iterator[Condition]:
    yield from (Condition(f"src[{i}]", "given") for i in optional_sources(node))
    yield from (c for i, s in enumerate(node.src) if s is not None for c in _of_operand(node, i, found))
    yield from (Condition(f.name, _value(f, f.of(node.op_params), found)) for f in parameters_of(node))
    if (rank(node.type) or node.type is I64) and all(s is None or s.type is not node.type for s in node.src):
        yield Condition(RESULT, node.type.name)
    if found[IN_PLACE] == "yes" or node.op in ALWAYS_IN_PLACE:
        yield Condition(IN_PLACE, found[IN_PLACE])
    if OUTPUT in found:
        yield Condition(OUTPUT, found[OUTPUT])
    if found[STEP] != FIRST:
        yield Condition(STEP, found[STEP])


def _of_operand(node: Tensor, i: int, found: Features) -> Iterator[Condition]:
    src, t = f"src[{i}]", node.src[i]
    assert t is not None
    if (rank(t.type) or t.type is I64) and may_be_simpler(node, i):
        yield Condition(f"{src}.type", t.type.name)
    if found[f"{src}.{LAYOUT}"] != CONTIGUOUS:
        yield Condition(f"{src}.{LAYOUT}", found[f"{src}.{LAYOUT}"])
    if t.view_offs:
        yield Condition(f"{src}.{OFFSET}", "yes")
    if found.get(f"{src}.{SHOWS}", "").startswith(PART):
        yield Condition(f"{src}.{SHOWS}", found[f"{src}.{SHOWS}"])
    for key in (f"{src}.{VIEW}", f"{src}.{WRITTEN}", f"{src}.{HOLDS}", f"{src}.{BROADCAST}"):
        if key in found:
            yield Condition(key, found[key])
    for d, n in enumerate(t.ne):
        said = any(s is not None and s.ne[d] == n for s in node.src[:i])  # mostly the same dimension
        if n > (t.type.blck_size if d == 0 else 1) and not said:
            yield Condition(f"{src}.ne[{d}]", f"> {max(b for b in BORDERS if b < n)}")


def _value(parameter: Field, value: object, found: Features) -> str:
    """A member of an enumeration by its name, how much is turned as the features have it; a number as not neutral."""
    if parameter.name == TURNED:
        return found[TURNED]
    if parameter.members is not None or not isinstance(value, (int, float)):
        return word(value)
    return f"!= {word(type(value)(neutral(parameter.name)))}"


def without(form: Form, always: Callable[[Condition], bool]) -> Form:
    """`form` without the conditions that every node of its op meets."""
    return Form(tuple(c for c in form.conditions if c.key == OP or not always(c)))


def blocks_of(form: Form) -> str:
    """Whether the block types of a form are "read" or "stored"; empty where it says none, or not of which operand."""
    said = [c for c in form.rest if of_type(c) and set(c.value.split(ANY_OF)) <= BLOCKS]
    if not said or (any(c.key == TYPE for c in said) and set(form.ops) <= ALWAYS_IN_PLACE):
        return ""
    stored = {f"{STORED[op]}.type" for op in form.ops if op in STORED} | {"type"}
    return "stored" if any(c.key in stored for c in said) else "read"


def type_of(form: Form) -> str:
    """The type that is all a form says beside its ops and sizes, and whether a store is a cast; empty where it says
    something else.
    """
    said = but_for_casts(form)
    return said[0].value if len(said) == 1 and of_type(said[0]) else ""


def type_place(form: Form) -> str:
    """Which operand has the type that is all a form says; empty where it says something else."""
    said = but_for_casts(form)
    return said[0].key if len(said) == 1 and of_type(said[0]) else ""


def but_for_casts(form: Form) -> list[Condition]:
    """What a form says, but whether a store has a tensor of its own."""
    stores = set(form.ops) <= ALWAYS_IN_PLACE
    return [c for c in form.says if not (stores and c.key == IN_PLACE)]


def of_type(condition: Condition) -> bool:
    """Whether it is about a type."""
    return condition.key == TYPE or condition.key.endswith(OF_ANY[TYPE])


def of_values(condition: Condition) -> bool:
    """Whether it is about values that arithmetic treats apart."""
    return condition.key == HELD or condition.key.endswith(HOLDS)


def module_of(form: Form) -> str:
    """The module of ops, as ggml has its kernels, of the first op; empty where there is none."""
    declared = DECLARATIONS.get(base_of(form.ops[0])) if form.ops else None
    return declared.module if declared else ""


def base_of(op: str) -> str:
    """An op without its sub-op."""
    return op.partition(".")[0]
