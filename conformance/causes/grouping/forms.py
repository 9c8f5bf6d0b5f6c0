"""What two forms share, if one fault may be both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from conformance.causes.cause import ANY_OF, Condition
from conformance.causes.features import AND, BESIDE, IN_PLACE, OP, OUTPUT, PART
from conformance.causes.form import (
    ALWAYS_IN_PLACE,
    FED,
    GATES,
    HELD,
    OF_ANY,
    PRODUCT,
    SEVERAL,
    SHOWN,
    SOFT_MAX,
    TYPE,
    Form,
    base_of,
    blocks_of,
    but_for_casts,
    is_size,
    module_of,
    of_any,
    of_lying,
    of_matrices,
    of_type,
    of_values,
    type_of,
    type_place,
)


def common(a: Form, b: Form, *, of_any_leaf: bool = False) -> Form | None:
    """What two forms share: the ops of both, the lower of two borders, a type wherever it stands, and, `of_any_leaf`,
    a part of whatever leaf. None where that is nothing beside the op, or where ops of different kernels share no more
    than sizes; or ops of one kernel, of which one says more.
    """
    bases = {base_of(op) for op in (*a.ops, *b.ops)}
    if (not a.rest and not b.rest and bases in ({"UNARY"}, {"GLU"})) or of_one_function(a, b):
        return Form((Condition(OP, ANY_OF.join(dict.fromkeys((*a.ops, *b.ops)))),))
    shared = [c for x in a.rest for y in b.rest if (c := _shared(x, y, of_any_leaf=of_any_leaf)) is not None]
    if type_of(a) != type_of(b) and {*a.ops, *b.ops} <= ALWAYS_IN_PLACE and type_of(a) and type_of(b):
        return None  # which types a store is wrong with is what it says
    of_operand = any(c.key != IN_PLACE and (of_type(c) or of_values(c) or of_lying(c)) for c in shared)
    of_operand |= any(c.key == BESIDE for c in shared)
    of_operand |= any(c.key == IN_PLACE for c in shared) and _may_share_place(a, b)
    if not shared or not (set(a.ops) & set(b.ops) or of_operand or module_of(a) == module_of(b)):
        return None
    if not set(a.ops) & set(b.ops) and module_of(a) != module_of(b) and all(of_values(c) or is_size(c) for c in shared):
        return None  # values that arithmetic treats apart are no fault of two kernels
    if not set(a.ops) & set(b.ops) and all(map(is_size, shared)) and set(but_for_casts(a)) != set(but_for_casts(b)):
        return None
    ops = dict.fromkeys((*a.ops, *b.ops))
    return Form((Condition(OP, ANY_OF.join(ops)), *sorted(dict.fromkeys(shared), key=str)))


def _may_share_place(a: Form, b: Form) -> bool:
    """Whether that both write in place may say something of both: of a store only where it is all that is said."""
    stores = [f for f in (a, b) if not ALWAYS_IN_PLACE.isdisjoint(f.ops)]
    return stores != [a, b] and all(f.of_in_place for f in stores)


def of_one_function(a: Form, b: Form) -> bool:
    """Whether a function of UNARY and the GLU that gates by it are wrong whatever they read, if it is large enough."""
    pairs = [(x, y) for x in a.ops for y in b.ops]
    return not (a.says or b.says) and any(GATES.get(x) == y or GATES.get(y) == x for x, y in pairs)


def of_one_error(a: Form, b: Form) -> Form:
    """The form of an op that says the same of either: what both share, or any of their types, or the op alone."""
    if type_of(a) and type_of(b):
        return of_types([a, b])
    return common(a, b) or Form(tuple(c for c in a.conditions if c.key == OP))


def same_kernel(a: Form, b: Form) -> bool:
    """Whether the ops of both are computed in one place, and every type of one is among those of the other."""
    x, y = set(type_of(a).split(ANY_OF)), set(type_of(b).split(ANY_OF))
    return "" not in x | y and module_of(a) == module_of(b) and (x <= y or y <= x)


def is_product_of(attention: Form, product: Form) -> bool:
    """Whether FLASH_ATTN_EXT is wrong in no more than sizes of K and Q, and MUL_MAT in the same: the product of K,
    its src[0], and Q is at fault. What is said of the mask does not matter.
    """
    if attention.ops != ("FLASH_ATTN_EXT",) or product.ops != ("MUL_MAT",) or product.says:
        return False
    said = {c for c in attention.rest if not c.key.startswith("src[3]")}
    streams = "src[0].ne[3]"  # K and Q have as many
    sizes = {Condition(PRODUCT.get(c.key[:6], "") + c.key[6:] if c.key != streams else streams, c.value) for c in said}
    return bool(sizes) and all(map(is_size, said)) and sizes == product.rest


def is_soft_max_of(attention: Form, soft_max: Form) -> bool:
    """Whether FLASH_ATTN_EXT needs of its mask, its sinks or its bias what SOFT_MAX does, whatever the sizes: the soft
    max in it is at fault.
    """
    if attention.ops != ("FLASH_ATTN_EXT",) or soft_max.ops != ("SOFT_MAX",) or not soft_max.says:
        return False
    return {replace(c, key=SOFT_MAX.get(c.key[:6], c.key[:6]) + c.key[6:]) for c in attention.says} == soft_max.says


def stores_among_several(a: Form, b: Form) -> bool:
    """Whether ops that store are wrong with types of which one has `SEVERAL`, and the other none else."""
    x, y = sorted((set(type_of(f).split(ANY_OF)) for f in (a, b)), key=len)
    return {*a.ops, *b.ops} <= ALWAYS_IN_PLACE and "" not in x | y and x <= y and len(y) >= SEVERAL


def twins(a: Form, b: Form) -> Form | None:
    """The form of an op and of its `_BACK`, which one kernel computes, if one of them is wrong whatever it reads."""
    (x, *others), (y, *more) = a.ops or ("",), b.ops or ("",)
    short, long = sorted((x, y), key=len)
    if others or more or long != f"{short}_BACK" or module_of(a) != module_of(b) or (a.says and b.says):
        return None
    return Form((Condition(OP, ANY_OF.join((short, long))),))


def read_and_store(a: Form, b: Form) -> bool:
    """Whether one is about blocks that are read, and the other about blocks that are stored: no lines do both."""
    return {blocks_of(a), blocks_of(b)} == {"read", "stored"}


def of_shared_types(a: Form, b: Form) -> Form | None:
    """The form of nodes of any op and any type of two forms that have a type in common, and say of their nodes nothing
    but sizes, types and values; None where they do not.
    """
    said = [[c for c in f.says if not of_values(c)] for f in (a, b)]
    if not all(of_type(c) for c in chain(*said)):
        return None
    pairs = [(set(x.value.split(ANY_OF)), set(y.value.split(ANY_OF))) for x in said[0] for y in said[1]]
    x, y = max(pairs, key=lambda pair: len(pair[0] & pair[1]), default=(set(), set()))
    if not x & y:
        return None
    ops = dict.fromkeys((*a.ops, *b.ops))
    return Form((Condition(OP, ANY_OF.join(ops)), Condition(TYPE, ANY_OF.join(sorted(x | y)))))


def of_flushed(a: Form, b: Form) -> Form:
    """The form of nodes of any op for which subnormal numbers are zero: the types and values that both say."""
    said = [[replace(c, key=of_any(c.key)) for c in f.says if of_type(c) or of_values(c)] for f in (a, b)]
    shared = [c for x in said[0] for y in said[1] if (c := _shared(x, y, of_any_leaf=False)) is not None]
    ops = dict.fromkeys((*a.ops, *b.ops))
    return Form((Condition(OP, ANY_OF.join(ops)), *sorted(dict.fromkeys(shared), key=str)))


def of_types(forms: Sequence[Form]) -> Form:
    """The form of nodes of any op and any type of `forms`, at the place that all name, or wherever it stands."""
    ops = dict.fromkeys(op for f in forms for op in f.ops)
    types = dict.fromkeys(t for f in forms for t in type_of(f).split(ANY_OF))
    places = {type_place(f) for f in forms}
    place = min(places) if len(places) == 1 else TYPE
    return Form((Condition(OP, ANY_OF.join(ops)), Condition(place, ANY_OF.join(types))))


def _shared(a: Condition, b: Condition, *, of_any_leaf: bool) -> Condition | None:
    if a == b:
        return a
    key = a.key if a.key == b.key else of_matrices(a.key) if of_matrices(a.key) == of_matrices(b.key) else None
    if key is not None and a.value.startswith("> ") and b.value.startswith("> "):
        return replace(min(a, b, key=lambda c: int(c.value[2:])), key=key)
    if a.key == b.key == OUTPUT:
        return Condition(OUTPUT, ANY_OF.join(sorted({*a.value.split(ANY_OF), *b.value.split(ANY_OF)})))
    for key, end in OF_ANY.items():
        alike = all(x.key == key or x.key.endswith(end) for x in (a, b))
        if alike and (value := _both(a, b, end, of_any_leaf=of_any_leaf)):
            return Condition(a.key if a.key == b.key else key, value)
    return None


def _both(a: Condition, b: Condition, end: str, *, of_any_leaf: bool) -> str:
    """The value that holds wherever one of two does; empty where they have nothing in common."""
    if end == OF_ANY[HELD]:
        return AND.join(w for w in a.value.split(AND) if w in b.value.split(AND))
    either = {*a.value.split(ANY_OF), *b.value.split(ANY_OF)}
    parts = all(value.startswith(PART) for value in either)
    if end == OF_ANY[SHOWN] and (either <= FED or (of_any_leaf and parts)):  # weights and caches are kept
        return ANY_OF.join(sorted(either))
    return a.value if a.value == b.value else ""
