"""The groups that are known, and which of them are one."""

from __future__ import annotations

import itertools
from functools import partial

from conformance.causes.cause import ANY_OF, Condition
from conformance.causes.failure import Failure, size
from conformance.causes.features import OP
from conformance.causes.form import SEVERAL, TYPE, Form, base_of, type_of, without
from conformance.causes.needs.whole import shared_by
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Verdict

from . import forms, pair
from .group import Group
from .nodes import JOINED, TELLS, Nodes


class Groups:
    """What is known of a run: groups, and the `nodes` that their forms are held against."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.all: list[Group] = []
        self._apart: set[tuple[tuple[str, str], Form, tuple[str, str], Form]] = set()
        """Pairs of groups that are not one."""

    def tells(self, group: Group) -> bool:
        """Whether the form of a group tells failures from right nodes."""
        return self.nodes.share(group.form) >= TELLS

    def of_words(self, failure: Failure, message: str) -> Group:
        """The group of failures of which no more is known than `message`; begun with `failure` where there is none."""
        group = next((g for g in self.all if g.kind[1] == message and not g.form.ops), None)
        if group is None:
            group = Group((failure.result.verdict.value, message), Form(()), failure)
            self.all.append(group)
        return group

    def join(self, *, last: bool = False) -> None:
        """Join groups as long as what two forms share tells failures from passes nearly as well as they do. The `last`
        time also errors of one or two ops which nothing explains but an extent, as the words go by the op.
        """
        while (found := self._alike(last=last)) is not None:
            a, b, form = found
            first, second = sorted((a, b), key=partial(_place, form, alike=a.kind == b.kind))
            a.kind = next((g.kind for g in (a, b) if pair.flushes(g)), first.kind)
            a.proof, a.failures = first.proof, first.failures + second.failures
            a.form = form.anywhere()
            a.unsure, a.needed, a.behind = first.unsure + second.unsure, a.needed & b.needed, a.behind and b.behind
            self.all.remove(b)

    def merged(self) -> list[Group]:
        """The groups without conditions that tell nothing, joined once more."""
        self.all = [g for g in self.all if g.failures]
        self._absorb()
        for g in self.all:
            g.form = without(g.form, partial(self.nodes.always, g.form.ops))
        self.join()
        self.all = pair.join_types(self.all)
        self._apart.clear()
        self.join(last=True)
        self.all = pair.join_types(self.all, siblings=True)
        self._absorb(last=True)
        self._absorb_attention()
        self._absorb_unknown()
        for g in self.all:
            if not g.form.ops:
                g.form = shared_by(g.form, [f.case for f in g.failures])
                g.kind = g.most_said
        return self.all

    def _alike(self, *, last: bool) -> tuple[Group, Group, Form] | None:
        for a, b in itertools.combinations(self.all, 2):
            key = (a.kind, a.form, b.kind, b.form)
            if key not in self._apart and (a.more == b.more or a.form.same_kernel(b.form)):
                form = pair.joint(a, b, last=last)
                if form is not None and not self.nodes.show_alike(form):
                    form = None
                if form is not None and (pair.one(a, b, last=last) or not (a.form.ops and b.form.ops)):
                    return a, b, form
                by_chance = [g.form for g in (a, b) if g.by_chance]  # an error of few nodes tells all of them
                rest = [g.form for g in self.all if g is not a and g is not b and g.form.ops]
                others = rest if pair.both_wrong(a, b) else []  # an error tells itself by its words
                if form is not None and self.nodes.joins(form, *(by_chance or (a.form, b.form)), others=others):
                    return a, b, form
                if last and (form := self._of_shared_types(a, b)) is not None:
                    return a, b, form
                if last and (form := self._of_twins(a, b) or pair.of_whole(a, b) or pair.of_garbage(a, b)) is not None:
                    return a, b, form
                alike = a.kind == b.kind and a.form.ops == b.form.ops and a.form.says == b.form.says
                if alike and a.form.ops and not (self.tells(a) or self.tells(b)):
                    return a, b, a.form if len(a.form.rest) < len(b.form.rest) else b.form
                self._apart.add(key)
        return None

    def _of_twins(self, a: Group, b: Group) -> Form | None:
        """The form of wrong numbers of an op and its `_BACK`; where several may be it, of that with the most."""

        def of(x: Group, y: Group) -> Form | None:
            return forms.twins(x.form, y.form) if x.kind == y.kind and x.by_chance else None

        if (form := of(a, b)) is None:
            return None
        plain, other = (a, b) if not a.form.says else (b, a)
        return form if len(other.failures) == max(len(g.failures) for g in self.all if of(plain, g)) else None

    def _of_shared_types(self, a: Group, b: Group) -> Form | None:
        """The form of both, if they are wrong with the same types: with `SEVERAL`, where an op of either fails with
        each that it was tried with, or where both store and one has all of the other's; or with one type, where as many
        ops fail with whatever type one of them fails with.
        """
        form = forms.of_shared_types(a.form, b.form) if a.kind == b.kind and a.kind[0] == Verdict.FAIL else None
        if form is None or pair.read_and_store(a, b):
            return None
        if forms.stores_among_several(a.form, b.form):
            return form
        alike = [g for g in self.all if g.kind == a.kind and forms.of_shared_types(g.form, form) is not None]
        ops = {base_of(op) for g in alike for op in g.form.ops}
        shared = {t for t in type_of(form).split(ANY_OF) if all(pair.says_type(g.form, t) for g in (a, b))}
        of_shared = (Condition(TYPE, ANY_OF.join(sorted(shared))),)
        each = [
            any(self.nodes.fail_with_each_type(Form((Condition(OP, op), *of_shared)), form) for op in g.form.ops)
            for g in (a, b)
        ]
        if len(shared) >= SEVERAL and all(each):
            return form
        return form if len(ops) >= SEVERAL and self.nodes.fail_with_each_type(form, form) else None

    def _absorb(self, *, last: bool = False) -> None:
        """A group whose smallest case another explains, whose form came later, is no cause of its own; the `last` time
        one that no other hid, that says little more than types, and that fails in the same words.
        """
        may_go = [g for g in self.all if not (g.more or (last and (g.behind or not g.form.of_few_words)))]
        for group in sorted(may_go, key=lambda g: len(g.form.rest), reverse=True):
            others = (g for g in self.all if g is not group and g.form.ops and self.tells(g))
            if last:  # what shows few words may be a second fault, of which the smallest case shows the first, too
                others = (g for g in others if g.kind == group.kind and g.form.spreads and _explains_most(g, group))
            to = next((g for g in others if len(g.form.rest) < len(group.form.rest) and g.explains(group.proof)), None)
            if to is not None:
                to.take(group)
                self.all.remove(group)

    def _absorb_unknown(self) -> None:
        """Wrong outputs of which nobody knows the first wrong node, nor anything else, are one row."""
        unknown = [g for g in self.all if g.kind == (Verdict.FAIL, Fault.OUTPUT) and not g.form.conditions]
        for group in unknown[1:]:
            unknown[0].take(group)
            self.all.remove(group)

    def _absorb_attention(self) -> None:
        """An attention that is wrong in the sizes of K and Q in which MUL_MAT is wrong, or with the mask with which
        SOFT_MAX is, is no cause of its own.
        """
        wrong = [g for g in self.all if g.kind[0] == Verdict.FAIL]
        for group in wrong:
            parts = (g for g in wrong if g.kind == group.kind)
            of_it = (forms.is_product_of, forms.is_soft_max_of)
            to = next((g for g in parts if any(of(group.form, g.form) for of in of_it)), None)
            if to is not None:
                to.take(group)
                self.all.remove(group)


def _place(form: Form, group: Group, *, alike: bool) -> tuple[object, ...]:
    """Of two groups that join in `form`, that whose words and smallest case stand for both comes first: one of whole
    cases where the form is of no op; of two that do not fail `alike`, wrong numbers; the smaller.
    """
    return len(group.form.ops) > len(form.ops), not alike and group.kind[0] != Verdict.FAIL, size(group.proof)


def _explains_most(group: Group, other: Group) -> bool:
    """Whether a group explains the failures of single nodes of another nearly all."""
    of_nodes = [f for f in other.failures if f.at is not None]
    return sum(map(group.explains, of_nodes)) >= JOINED * len(of_nodes)
