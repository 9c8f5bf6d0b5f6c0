"""Whether two groups are of one fault, and the form of both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from conformance.causes.cause import ANY_OF
from conformance.causes.features import OP, OUTPUT
from conformance.causes.form import SEVERAL, TYPE, Form, of_any, of_lying, type_of, type_place
from conformance.causes.needs.whole import (
    AN_OUTPUT,
    begin_alike,
    differ_in_op,
    of_one_place,
    only_of_relation,
    said_alike,
    tells_apart,
)
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Verdict
from conformance.run.signature import FLUSHED, NOT_FINITE

from . import forms
from .group import Group

_OF_SHAPES = re.compile(r"shape|dimension|\brows\b", re.IGNORECASE)
"""What an error says where an operand is larger than its node knows, or shows other numbers, which count rows."""


def one(a: Group, b: Group, *, last: bool) -> bool:
    """Whether two groups are one whatever their shares are: an error of one op that says the same; errors that differ
    in a word, one of which comes with less than the other; wrong numbers of ops of one kernel in the same conditions,
    or of any beside another node; or what is wrong by no more than that it is an output which others read, as was tried
    of both or all that both say.
    """
    error = a.kind == b.kind and not a.by_chance
    of_one_op = error and a.form.ops == b.form.ops and len(a.form.ops) == 1
    if last and (of_one_op or _damaged(a, b) or _in_fewer_conditions(a, b)):
        return True
    if (last and both_wrong(a, b) and forms.of_one_function(a.form, b.form)) or _flush(a, b):
        return True
    if both_wrong(a, b) and (a.form.same_kernel(b.form) or (a.form.of_beside and b.form.of_beside)):
        return True
    fewer, more = sorted((a.form.says, b.form.says), key=len)
    if said_alike(a.kind, b.kind) and fewer and fewer <= more:
        return True
    if not (both_wrong(a, b) and a.form.of_output and b.form.of_output):
        return False
    return bool(a.needed and b.needed) or all({c.key for c in g.form.says} == {OUTPUT} for g in (a, b))


def joint(a: Group, b: Group, *, last: bool) -> Form | None:
    """What two groups share, if one fault may be both: they fail alike, or by chance of sizes as extents do. A type is
    what two ops share only at the `last`, when it is known which types each fails with.
    """
    if not (a.form.ops and b.form.ops):
        return _joint_wholes(a, b)
    if (flush := _flush(a, b)) or read_and_store(a, b):
        return forms.of_flushed(a.form, b.form) if flush else None
    if last and (form := _joint_types(a, b) or _of_damage_and_error(a, b)) is not None:
        return form
    form = forms.common(a.form, b.form, of_any_leaf=a.kind == b.kind and not a.by_chance)
    if form is None or _need_otherwise(a, b, form) or (not last and a.form.ops != b.form.ops and type_of(form)):
        return None
    if said_alike(a.kind, b.kind) and (a.form.says <= b.form.says or b.form.says <= a.form.says):
        return form
    either = a.form.same_but_sizes(b.form) or a.form.same_kernel(b.form) or form.of_what_is_held or form.of_output
    either |= form.of_what_is_written
    alike = a.kind == b.kind or (either and both_wrong(a, b))
    return form if alike or _by_extent(a, b, form, last=last) else None


def flushes(g: Group) -> bool:
    """Whether it is wrong by no more than that subnormal numbers are zero."""
    return g.kind == (Verdict.FAIL.value, FLUSHED)


def _flush(a: Group, b: Group) -> bool:
    """Whether subnormal numbers are zero for both: how the processor computes is no op's fault."""
    either = flushes(a) or flushes(b)
    return either and both_wrong(a, b) and all(flushes(g) or g.form.of_subnormals for g in (a, b))


def of_what_is_kept(a: Group, b: Group) -> Form | None:
    """The form of wrong numbers by what a backend kept, and of nodes that are wrong beside another."""
    whole, node = (a, b) if b.form.ops else (b, a)
    kept = whole.kind == (Verdict.FAIL.value, Fault.STALE) and not whole.form.ops
    return whole.form if kept and node.form.is_beside and node.kind[0] == Verdict.FAIL else None


def of_whole(a: Group, b: Group) -> Form | None:
    """The form of a cause of single nodes and of one of whole cases that are one; None where they are not."""
    return of_what_is_kept(a, b) or of_lost_output(a, b)


def of_lost_output(a: Group, b: Group) -> Form | None:
    """The form of nodes that are wrong by no more than what kind of output they are, and of cases that are wrong as a
    whole and have such an output.
    """
    whole, node = (a, b) if b.form.ops else (b, a)
    if whole.form.ops or not (both_wrong(a, b) and node.form.of_output):
        return None
    kinds = {c.value for c in node.form.says if c.key == OUTPUT}
    return node.form if any(c.key == AN_OUTPUT and c.value in kinds for c in whole.form.rest) else None


def _need_otherwise(a: Group, b: Group, form: Form) -> bool:
    """Whether wrong numbers of one need what the other has not, which says something else, and `form` says neither."""
    told = (a.needed or a.form.says, b.needed or b.form.says, form.says)
    mine, others, said = ({of_any(c.key) for c in conditions} for conditions in told)
    either = mine & others or (mine | others) & said
    return both_wrong(a, b) and bool(a.needed or b.needed) and bool(mine) and bool(others) and not either


def both_wrong(a: Group, b: Group) -> bool:
    """Whether both are wrong numbers."""
    return a.kind[0] == b.kind[0] == Verdict.FAIL


def _damaged(a: Group, b: Group) -> bool:
    """Whether memory is damaged by one op with two types, which signal comes of it by chance."""
    damage = a.by_chance and b.by_chance and a.kind[0] == b.kind[0] == Verdict.CRASH
    return damage and a.form.ops == b.form.ops and len(a.form.ops) == 1 and all(type_of(g.form) for g in (a, b))


def read_and_store(a: Group, b: Group) -> bool:
    """Whether both are wrong numbers, of blocks that one reads and the other stores."""
    return both_wrong(a, b) and forms.read_and_store(a.form, b.form)


def _by_extent(a: Group, b: Group, form: Form, *, last: bool) -> bool:
    """Whether one fault of extents may be both, which fail in other words: both by chance of sizes, as those of one op
    in the same conditions are, too; or, at the `last`, an error about shapes in the same conditions as damage, or in no
    other ones than those of several ops.
    """
    if a.by_chance and b.by_chance:
        alike = bool(a.form.says) and a.form.same_but_sizes(b.form)
        return form.of_extent or alike or _dies_in_more_conditions(a, b)
    chance, error = sorted((a, b), key=lambda g: not g.by_chance)
    if not last or not chance.by_chance or _OF_SHAPES.search(error.kind[1]) is None:
        return False
    if chance.kind[0] == Verdict.CRASH:
        return _in_fewer_conditions(a, b) or a.form.same_but_sizes(b.form)
    return form.of_extent and chance.form.spreads and error.form.only_of_extent


def _in_fewer_conditions(a: Group, b: Group) -> bool:
    """Whether an error of an op about shapes needs no more than a part of what damages memory there needs."""
    chance, error = sorted((a, b), key=lambda g: not g.by_chance)
    damage = chance.by_chance and chance.kind[0] == Verdict.CRASH and not error.by_chance
    fewer = bool(error.form.says) and error.form.ops == chance.form.ops and error.form.says < chance.form.says
    return damage and fewer and _OF_SHAPES.search(error.kind[1]) is not None


def _dies_in_more_conditions(a: Group, b: Group) -> bool:
    """Whether an op is wrong where an operand lies as it does, and damages memory in these and more conditions."""
    wrong, damage = sorted((a, b), key=lambda g: g.kind[0] == Verdict.CRASH)
    apart = wrong.kind[0] != damage.kind[0] and wrong.form.ops == damage.form.ops
    return apart and wrong.form.says < damage.form.says and any(map(of_lying, wrong.form.says))


def of_garbage(a: Group, b: Group) -> Form | None:
    """The form of wrong numbers of an op with some types, and of numbers that are not finite with types among these, or
    with others where they are `SEVERAL`: what is read as something else is NaN by chance.
    """
    kinds = {a.kind[1], b.kind[1]}
    few, many = sorted((a, b), key=lambda g: len(type_of(g.form).split(ANY_OF)))
    if not both_wrong(a, b) or kinds != {"", NOT_FINITE} or not set(few.form.ops) <= set(many.form.ops):
        return None
    x, y = (set(type_of(g.form).split(ANY_OF)) for g in (few, many))
    place = type_place(many.form) in (TYPE, type_place(few.form))
    if "" in x | y or not place or read_and_store(a, b) or not (x <= y or len(y) >= SEVERAL):
        return None
    return forms.of_types([many.form, few.form])


def _of_damage_and_error(a: Group, b: Group) -> Form | None:
    """The form of an op that damages memory with some types, and says something about shapes of others."""
    chance, error = sorted((a, b), key=lambda g: not g.by_chance)
    damage = chance.by_chance and chance.kind[0] == Verdict.CRASH and bool(type_of(chance.form))
    if not damage or error.by_chance or error.form.ops != chance.form.ops or not _OF_SHAPES.search(error.kind[1]):
        return None
    place = type_place(chance.form)
    said = [Form((*(c for c in error.form.conditions if c.key == OP), c)) for c in error.form.says if c.key == place]
    return forms.of_types([chance.form, *said]) if said else None


def _joint_wholes(a: Group, b: Group) -> Form | None:
    """What two causes of no single node share, whose messages differ in names or in one word."""
    if a.kind == b.kind and not a.by_chance:
        whole, node = (a, b) if b.form.ops else (b, a)
        if node.may_be_in(whole.proof):
            return node.form
        return whole.form if a.kind[0] == Verdict.CRASH else None  # an assertion has one place in the source
    shared = a.form.rest & b.form.rest
    of_place = of_one_place(a.kind, b.kind)
    of_one = of_place and begin_alike(a.kind, b.kind)
    of_ops = differ_in_op(a.kind, b.kind) and (a.form == b.form or not (a.is_shrunk and b.is_shrunk))
    alike = of_one or of_ops or (of_place and said_alike(a.kind, b.kind, named=True)) or said_alike(a.kind, b.kind)
    if a.form.ops or b.form.ops or not alike:
        return None
    if only_of_relation(a.form) != only_of_relation(b.form):  # an error that comes without the relation, too
        return b.form if only_of_relation(a.form) else a.form
    if not (of_one or of_ops or tells_apart(shared) or (a.of_kept and b.of_kept)):
        return None
    return Form(tuple(c for c in a.form.conditions if c in shared))


def _joint_types(a: Group, b: Group) -> Form | None:
    """The form of one op that says the same of several types, or of one kernel that is wrong with the same types."""
    if a.kind != b.kind and not _damaged(a, b):
        return None
    if not a.by_chance and a.form.ops == b.form.ops and len(a.form.ops) == 1:
        return forms.of_one_error(a.form, b.form)
    if _damaged(a, b):
        return forms.of_types([a.form, b.form])
    return forms.of_types([a.form, b.form]) if a.by_chance and forms.same_kernel(a.form, b.form) else None


def says_type(form: Form, type_: str) -> bool:
    """Whether a type is among those that the form names."""
    return any(type_ in c.value.split(ANY_OF) for c in form.says if c.key == TYPE or c.key.endswith(".type"))


def join_types(groups: Sequence[Group], *, siblings: bool = False) -> list[Group]:
    """Groups of one op and of `SEVERAL` types, each of which fails by itself, are one: what these types share is at
    fault. Two do where an error says the same, or where they are Q4_0 and Q4_1 or the like and as many ops are wrong;
    of `siblings`, no others.
    """
    known = {(*at, t) for g in groups for t in type_of(g.form).split(ANY_OF) if t for at in _places(g)}
    types = Counter(k[:-1] for k in known)
    joined: list[Group] = []
    for g in groups:
        enough = SEVERAL if g.kind[0] == Verdict.FAIL else 2
        many = {op for kind, op, place in _places(g) if types[kind, op, place] >= enough and not siblings}
        alike = [
            j
            for j in joined
            if j.kind == g.kind and type_of(j.form) and (many.intersection(j.form.ops) or _siblings(j.form, g.form))
        ]
        alike = [j for j in alike if may_share_types(j.form, g.form) and not read_and_store(j, g)]
        first = next(iter(alike), None) if type_of(g.form) else None
        if first is None:
            joined.append(g)
        else:
            first.form = forms.of_types([first.form, g.form])
            first.take(g)
    return joined


def _places(g: Group) -> list[tuple[tuple[str, str], str, str]]:
    """How a group fails, each of its ops, and the operand whose type is all it says."""
    return [(g.kind, op, type_place(g.form)) for op in g.form.ops]


def _siblings(a: Form, b: Form) -> bool:
    """Whether two forms of types are of the same ops, `SEVERAL`, and of types with as many bits in as large blocks."""
    stems = {t.rstrip("01") for f in (a, b) for t in type_of(f).split(ANY_OF)}
    return a.ops == b.ops and len(a.ops) >= SEVERAL and len(stems) == 1


def may_share_types(a: Form, b: Form) -> bool:
    """Whether two forms of types are of the same ops at the same place, or of a type that both know."""
    x, y = (set(type_of(f).split(ANY_OF)) for f in (a, b))
    return (a.ops == b.ops and type_place(a) == type_place(b)) or bool(x & y)
