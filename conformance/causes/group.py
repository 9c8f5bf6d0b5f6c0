"""Failures of one backend, grouped by cause.

The smallest failing case that no known form explains is shrunk, outside of all known forms: what is left is the form of
another cause, and every failure whose node meets it is explained. An explained failure may hide a second fault, so
variants of it that meet no known form run, too; one that still fails is shrunk likewise.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import inf
from operator import itemgetter
from typing import TypeVar

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import Result, Verdict
from conformance.run.divergence import GRAPH, KEPT, OUTPUT
from conformance.run.runner import Runner
from conformance.run.shrink import cuts, shrink, simplify
from conformance.run.signature import FLUSHED, Signature
from conformance.suite.relations import claim

from .cause import ANY_OF, Cause, Condition
from .failure import Failure, by_chance, failure_of, may_be, size
from .features import BESIDE, OP, Features, features, nodes_of
from .form import (
    SEVERAL,
    TYPE,
    Form,
    base_of,
    common,
    form_of,
    is_product_of,
    is_size,
    meets,
    of_any,
    of_flushed,
    of_one_error,
    of_one_function,
    of_part,
    of_shared_types,
    of_types,
    read_and_store,
    same_kernel,
    stores_among_several,
    twins,
    type_of,
    type_place,
    without,
)
from .needs import cure
from .needs.whole import of_relation, only_of_relation, said_alike, shared_by, tells_apart, whole_form

_T = TypeVar("_T")
EACH = 10.0
"""Seconds to shrink one case, where time is short."""
SHARE = 1 / 30
"""Of the time that is left, to shrink one case, where that is more: a form that nobody finished says too much."""
JOINED = 0.6
"""How much of the share of failures may be lost where two groups are joined."""
_OF_SHAPES = re.compile("shape|dimension", re.IGNORECASE)
"""What an error says where an operand is larger than its node knows."""
TELLS = 0.1
"""The share of failures below which a form explains no other failure."""
GONE = "not seen again in a process of its own, so what ran before may be at fault"
"""The message of failures that did not come again."""
UNSEEN = "not looked at, as time was over, and not of one cause that is known of its op"
"""The message of failures of which nobody can say more."""
AGAIN = 3
"""How often a crash gets the chance."""
FEW = 3
"""Right nodes without which nobody can say that a condition tells nothing."""
CURES = 2
"""Cases without what a form says that run of one failure."""
SETTLING = 0.15
"""Of the time, to ask of what is grouped whether a form of another group is what it needs."""
NEEDED = 8
"""Cases that run to know what a failure needs."""
VARIANTS = 12
"""Variants that run of one explained failure, those nearest to it first."""


@dataclass(slots=True)
class Group:
    """What one fault explains."""

    kind: tuple[str, str]
    """Of `proof`."""
    form: Form
    proof: Failure
    """The smallest case that shows it."""
    failures: list[Failure] = field(default_factory=list)
    needed: frozenset[Condition] = frozenset()
    """Conditions without each of which a failure of it passes."""
    more: frozenset[Condition] = frozenset()
    """Of these, what tells it from a group whose form holds for it, too: without it a failure passes there."""
    behind: bool = False
    """Whether another hid it: its smallest case met no form that was known then."""
    unsure: int = 0
    """Of the failures, those that nothing known explains: they are here as time was over, and this is the nearest."""

    def explains(self, failure: Failure) -> bool:
        """Whether the fault makes `failure`: at its node; or, of one without, wherever in it."""
        if not self.fails_as(failure):
            return False
        if not self.form.ops:
            return failure.kind == self.kind
        return self._holds_in(failure) if failure.at is None else self._holds_at(failure)

    def _holds_at(self, failure: Failure) -> bool:
        spreads = self.form.spreads and (failure.kind == self.kind or self.form.of_extent)
        return self.form.holds(failure.features) or (spreads and self.form.beside(failure.features))

    def _holds_in(self, failure: Failure) -> bool:
        kind = failure.signature.kind
        if kind.startswith(KEPT):  # right on a backend opened anew, so no kernel is at fault
            return False
        if kind.startswith(GRAPH) and not self.form.of_place:  # each node alone is right
            return False
        anywhere = self.form.spreads and (failure.result.verdict is Verdict.CRASH or self.form.of_in_place)
        return any(map(self.form.beside if anywhere else self.form.holds, failure.all))

    @property
    def of_kept(self) -> bool:
        """Whether a failure of it comes by what the backend kept."""
        return any(f.kept for f in (self.proof, *self.failures))

    @property
    def by_chance(self) -> bool:
        """Whether its failures are wrong numbers or damaged memory."""
        return by_chance(*self.kind)

    def fails_as(self, failure: Failure) -> bool:
        """Whether the fault may look like `failure`: by the same words; wrong numbers anywhere; damage of one op, or,
        where an extent is wrong, wrong numbers and damage.
        """
        if failure.kind == self.kind:
            return True
        if failure.by_chance and self.by_chance and self.form.of_extent:
            return True
        return self.kind[0] == failure.kind[0] and self.by_chance and failure.by_chance


class Search:
    """Groups the failures of `spec`; `seconds` bound all of it."""

    def __init__(
        self,
        runner: Runner,
        spec: Spec,
        *,
        seconds: float = 1800.0,
        progress: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self._spec, self._progress, self._clock = runner, spec, progress, clock
        self._whole_end = clock() + seconds
        self._end = self._whole_end - SETTLING * seconds
        self._many: frozenset[tuple[str, str]] = frozenset()
        """How failures fail that several ops share: such an error is one by itself, wherever its operands lie."""
        self._uncured: set[tuple[str, Form]] = set()
        """Cases that fail still without what a form says."""
        self._looked: set[frozenset[tuple[str, str]]] = set()
        self._apart: set[tuple[tuple[str, str], Form, tuple[str, str], Form]] = set()
        """Pairs of groups that are not one."""
        self._nodes: Nodes | None = None
        self.groups: list[Group] = []

    def run(self, failures: Sequence[Failure], nodes: Nodes) -> list[Group]:
        """The groups; each failure is in one of them at least. What nothing known explains comes first, as it is what
        time may not suffice for; then what a failure may hide.
        """
        self._nodes = nodes
        self._many = _of_many(failures)
        in_turn = _in_turn(failures)
        for n, failure in enumerate(in_turn, 1):
            self._interruptible(self._take, failure)
            self._join(nodes)
            self._progress(f"{n} of {len(failures)} failures, {len(self.groups)} forms: {failure.case.id}")
        for n, failure in enumerate(in_turn, 1):
            if self._late():
                break
            self._interruptible(self._look_behind, failure)
            self._join(nodes)
            self._progress(f"{n} of {len(in_turn)} looked behind, {len(self.groups)} forms: {failure.case.id}")
        self._end = max(self._end, self._whole_end if self._end > -inf else -inf)
        self._settle()
        return self._merged(nodes)

    def _interruptible(self, do: Callable[[Failure], _T], failure: Failure) -> _T:
        """What `do` gives of `failure`; Ctrl-C ends the time, and `do` gives what it can without."""
        try:
            return do(failure)
        except KeyboardInterrupt:
            self._end = self._whole_end = -inf
            self._progress("interrupted: the rest is grouped by what is known")
            return do(failure)

    def _take(self, failure: Failure) -> None:
        """Put `failure` into a group."""
        tested = failure.at is None and failure.by_chance and self._cured_by(failure)
        group = tested or self._explaining(failure) or self._widened(failure) or self._cured_by(failure)
        if group is None and self._late() and (group := self._nearest(failure)) is not None:
            group.unsure += 1
        if group is None:
            group = self._new(failure)
        group.failures.append(failure)

    def _look_behind(self, failure: Failure) -> None:
        """A group for each that an explained failure hides."""
        with suppress(ConformanceError):
            for hidden in self._hidden(failure):
                self._take_hidden(hidden, failure)
            group, more = self._lacking(failure)
            if group is not None:
                self._take_hidden(failure, failure, group, more)

    def _take_hidden(
        self, hidden: Failure, behind: Failure, but: Group | None = None, more: frozenset[Condition] = frozenset()
    ) -> None:
        proof, sizes = self._shrunk(hidden, but=but)
        if proof is None or self._explaining(proof, but) is not None or (but is None and self._widened(proof)):
            return
        form = self._with_sizes(_form(proof), told=sizes)
        if more <= form.says:
            self.groups.append(Group(proof.kind, form, proof, [behind], needed=more, more=more, behind=True))

    def _lacking(self, failure: Failure) -> tuple[Group | None, frozenset[Condition]]:
        """A group whose form holds for a node that passes without a view of which the form says nothing, with the same
        values of the same sizes: its fault is not what `failure` shows. And what it passes without.
        """
        group = None if failure.at is None or self._late() else self._explaining(failure)
        if group is None or not group.form.ops or not failure.by_chance:
            return None, frozenset()
        op = Condition(OP, failure.features[OP])
        own = {c for c in _form(failure).says if of_part(c) and c not in group.form.says}
        if not own or not self._is_new({**failure.features, "group": str(group.form)}):
            return None, frozenset()
        for case in cure.without(
            Form((op, *sorted(own, key=str))), self._recorded(failure.case), failure.result, failure.node
        ):
            rows = [f for k, _, n in nodes_of(case) for f in [features(case, k, n)] if f[OP] == op.value]
            if any(map(group.form.holds, rows)) and self._run(case).verdict is Verdict.PASS:
                return group, frozenset(c for c in own if not any(meets(c, f) for f in rows))
        return None, frozenset()

    def _late(self) -> bool:
        return self._clock() > self._end

    def _explaining(self, failure: Failure, but: Group | None = None) -> Group | None:
        """A group whose fault makes `failure`, not `but`; one about nodes only if its form tells something."""
        several = failure.at is None and failure.kind in self._many
        others = [g for g in self.groups if g is not but]
        found = (g for g in others if g.explains(failure) and (not g.form.ops or self._tells(g)))
        return next(found, None) or next((g for g in others if several and g.kind == failure.kind), None)

    def _widened(self, failure: Failure) -> Group | None:
        """A group of the same op whose form but for sizes holds for `failure`, from now on without these sizes, if it
        tells failures from right nodes nearly as well then.
        """
        if failure.at is None or self._nodes is None or self._late():
            return None
        for group in self.groups:
            alike = group.kind == failure.kind and failure.features[OP] in group.form.ops
            form = group.form.but_for_sizes(failure.features) if alike else None
            if form is not None and self._nodes.joins(form, group.form):
                group.form = form
                return group
        return None

    def _cured_by(self, failure: Failure) -> Group | None:
        """A group without whose form `failure`, whatever it says, is gone; else None."""
        return next((g for g in self.groups if self._may_need(failure, g) and self._cured(failure, g.form)), None)

    def _may_need(self, failure: Failure, group: Group) -> bool:
        """Whether the fault of `group`, no op's, may be what an error of one or two ops, or of a whole case, is."""
        if failure.kind == group.kind or failure.kind in self._many or claim.applies(failure.case):
            return False
        of_no_op = group.form.spreads or (group.by_chance and group.form.of_output)
        if failure.signature.kind.startswith(KEPT) or not of_no_op:
            return False
        nodes = failure.all if failure.at is None else [failure.features]
        return self._tells(group) and any(map(group.form.beside, nodes))

    def _cured(self, failure: Failure, form: Form) -> bool:
        """Whether the case passes, or fails as another known form says, as soon as no node meets `form`."""
        if self._late() or (failure.case.id, form) in self._uncured:
            return False
        with suppress(ConformanceError):
            node = None if failure.at is None else failure.node
            for case in itertools.islice(cure.without(form, self._recorded(failure.case), failure.result, node), CURES):
                if self._is_cured(failure, case):
                    return True
        self._uncured.add((failure.case.id, form))
        return False

    def _is_cured(self, failure: Failure, case: Case) -> bool:
        """Whether `case`, which is `failure` without something, passes, or fails as a known form says."""
        said = failure_of(case, result) if (result := self._run(case)).verdict is not Verdict.PASS else None
        if said is None or (said.kind == failure.kind and not said.by_chance):
            return result.verdict is Verdict.PASS
        found = failure_of(case, self._run(case, locates=True))
        return found is not None and found.kind != failure.kind and self._explaining(found) is not None

    def _run(self, case: Case, *, locates: bool = False) -> Result:
        """The result of one case, without opening the backend anew: that takes a second or more."""
        with self._runner.looking(locates=locates, tells_kept=False):
            return self._runner.run(self._spec, [case])[0]

    def _recorded(self, case: Case) -> cuts.Recorded:
        reference = self._runner.oracle.reference_in(self._runner.backend(self._spec).arithmetic_in(case))
        return cuts.record(case, reference)

    def _settle(self) -> None:
        """Failures that need what a form says which was not known when their turn came go to its group."""
        for group in [g for g in self.groups if not (g.form.ops and g.kind[0] == Verdict.FAIL)]:
            for failure in sorted(group.failures, key=size):
                to = self._interruptible(self._cured_by, failure)
                if to is None or to is group:
                    if group.form.ops:  # its proof stands for all of them
                        break
                    continue
                moved = group.failures if group.form.ops else [failure]
                to.failures += moved
                group.failures = [f for f in group.failures if f not in moved]
                if group.proof.case.id == failure.case.id and group.failures:
                    group.proof = min(group.failures, key=size)
                if group.form.ops:
                    break
            self._progress(f"asked what {len(group.failures)} failures need: {group.proof.case.id}")
        self.groups = [g for g in self.groups if g.failures]

    def _tells(self, group: Group) -> bool:
        """Whether the form of a group tells failures from right nodes."""
        return self._nodes is None or self._nodes.share(group.form) >= TELLS

    def _nearest(self, failure: Failure) -> Group | None:
        """Where nothing can be shrunk any more: the group that fails alike, at the same op if at one."""
        alike = [g for g in self.groups if g.kind == failure.kind and bool(g.form.ops) == (failure.at is not None)]
        if failure.at is None:
            return next(iter(alike), None)
        found = failure.features
        same = [g for g in alike if found[OP] in g.form.ops]
        if failure.by_chance:
            near = [g for g in same if all(meets(c, found) for c in g.form.says)]
            return near[0] if len(near) == 1 else self._unseen(failure) if same else None
        return max(same, key=lambda g: sum(meets(c, found) for c in g.form.rest), default=None)

    def _unseen(self, failure: Failure) -> Group:
        """The group of what there was no time for, unless it differs from one known cause in sizes alone."""
        kind = failure.result.verdict.value, UNSEEN
        group = next((g for g in self.groups if g.kind[1] == UNSEEN), None)
        if group is None:
            group = Group(kind, Form(()), failure)
            self.groups.append(group)
        return group

    def _outside(self, needs: cure.Needs, but: Group | None, case: Case, result: Result) -> bool:
        """Whether no known form `but` one explains the failure of `case`, which still has what is needed."""
        failure = failure_of(case, result)
        if failure is None or self._explaining(failure, but) is not None:
            return False
        return not needs.some_of or (failure.at is not None and needs.met(failure.features))

    def _needs(self, failure: Failure) -> cure.Needs:
        """What the failure needs of its node: what else makes the smaller case fail would be another fault."""
        if failure.at is None or failure.signature.kind == OUTPUT:
            return cure.Needs()
        left = NEEDED

        def passes(case: Case) -> bool | None:
            nonlocal left
            left -= 1
            if left < 0 or self._late():
                return None
            if (verdict := self._run(case).verdict) is Verdict.PASS:
                return True
            likewise = verdict is failure.result.verdict and (
                not _may_hide(failure) or self._fails_likewise(case, failure)
            )
            return False if likewise else None

        with suppress(ConformanceError):
            return cure.needs(_form(failure), self._recorded(failure.case), failure.result, failure.node, passes)
        return cure.Needs()

    def _fails_likewise(self, case: Case, failure: Failure) -> bool:
        """Whether `case`, which fails, does so at the op of `failure` and in its words."""
        found = failure_of(case, self._run(case, locates=True))
        if found is None or found.at is None:
            return False
        return found.kind == failure.kind and found.features[OP] == failure.features[OP]

    def _new(self, failure: Failure) -> Group:
        """The group of a failure that no other explains."""
        proof, needs, sizes = failure, cure.Needs(), False
        if not self._late():
            alone = self._alone(failure)
            if alone is None:
                return self._gone(failure)
            if not may_be(failure, alone):  # what ran before made it another
                if (group := self._explaining(alone)) is not None:
                    return group
                proof = failure = alone
            if claim.applies(failure.case):
                return self._of_relation(failure)
            needs = self._needs(failure)
            if (group := self._needing(failure, needs)) is not None:
                return group
            with suppress(ConformanceError):
                small, sizes = self._shrunk(failure, needs, fresh=True)
                proof = small or failure
        unknown = failure.signature.kind == OUTPUT
        known = failure.signature.covers(proof.signature) and not unknown
        form = _form(proof) if failure.at is None else _form(proof).but(needs.idle).with_types(failure.features)
        form = self._with_sizes(form, told=sizes)
        group = Group(failure.kind if known else proof.kind, form, proof, needed=needs.alone)
        if unknown and form.ops and not self._tells(group):  # it slipped to a node that is hardly ever wrong
            group = Group(failure.kind, Form(()), failure)
        self.groups.append(group)
        return group

    def _needing(self, failure: Failure, needs: cure.Needs) -> Group | None:
        """The group of the same op and words that needs what `failure` does, if what both say tells failures from right
        nodes nearly as well; or, where each of `SEVERAL` types is needed by itself, that of the types. Nothing need be
        shrunk then.
        """
        if failure.at is None or not needs.alone:
            return None
        form, op = _form(failure).but(needs.idle), failure.features[OP]
        alike = [g for g in self.groups if g.kind == failure.kind and op in g.form.ops]
        for group in alike:
            joint = common(group.form, form) if group.needed == needs.alone else None
            if joint is not None and (self._nodes is None or self._nodes.joins(joint, group.form)):
                group.form = joint
                return group
        typed = Form((Condition(OP, op), *needs.alone))
        own = type_of(typed)
        known = {t for g in alike for t in type_of(g.form).split(ANY_OF)} - {""}
        if not own or own.startswith("!= ") or len(known) < (SEVERAL if failure.by_chance else 2) - 1:
            return None
        mine = Group(failure.kind, typed, failure, needed=needs.alone)
        self.groups = _of_types([*self.groups, mine])
        if any(g is mine for g in self.groups):
            return mine
        same = (g for g in self.groups if g.kind == failure.kind and op in g.form.ops and not _read_and_store(g, mine))
        return next(g for g in same if own in type_of(g.form).split(ANY_OF))

    def _with_sizes(self, form: Form, *, told: bool) -> Form:
        """`form` without its sizes where nobody tried smaller ones to the end, if it tells failures from right nodes
        nearly as well.
        """
        loose = Form(tuple(c for c in form.conditions if not is_size(c) and c.key != BESIDE))
        if told or loose == form or self._nodes is None or not self._nodes.joins(loose, form):
            return form
        return loose

    def _of_relation(self, failure: Failure) -> Group:
        """The group of a relation: that of the first of its runs that fails by itself. Where each passes, what the
        relation does is needed.
        """
        form = Form(())
        with suppress(ConformanceError):
            verdicts = []
            for case in claim.cases_of(failure.case):
                (result,) = self._runner.run(self._spec, [case])
                found = failure_of(case, result)
                if found is not None:
                    return self._explaining(found) or self._cured_by(found) or self._new(found)
                verdicts.append(result.verdict)
            if set(verdicts) == {Verdict.PASS}:
                form = of_relation(failure.case)
        self.groups.append(Group(failure.kind, form, failure))
        return self.groups[-1]

    def _alone(self, failure: Failure) -> Failure | None:
        """How the case fails where nothing ran before, a crash after some times; None where it does not. An error that
        comes again where others ran is the case's own.
        """
        with suppress(ConformanceError):
            again = None if failure.by_chance else failure_of(failure.case, self._seen(failure))
            if again is not None and again.kind == failure.kind:
                return again
        self._runner.renew()
        for _ in range(AGAIN if failure.result.verdict is Verdict.CRASH else 1):
            try:
                result = self._seen(failure)
            except ConformanceError:  # nobody can say
                return failure
            if (found := failure_of(failure.case, result)) is not None:
                return found
        return None

    def _seen(self, failure: Failure) -> Result:
        return self._runner.run(self._spec, [failure.case])[0]

    def _gone(self, failure: Failure) -> Group:
        """The group of what did not come again: no form says why it failed, as what ran before it did."""
        kind = failure.result.verdict.value, GONE
        group = next((g for g in self.groups if g.kind[1] == GONE), None)
        if group is None:
            group = Group(kind, Form(()), failure)
            self.groups.append(group)
        return group

    def _shrunk(
        self, failure: Failure, needs: cure.Needs | None = None, but: Group | None = None, *, fresh: bool = False
    ) -> tuple[Failure | None, bool]:
        """The smallest case outside of all known forms `but` one that fails as `failure` does. Wrong numbers and damage
        are seen in a process where nothing ran before, which `fresh` says there is: a backend that damages memory makes
        cases fail in its process that are right. None where none was found. And whether all that is smaller was tried.
        ConformanceError if `failure` does not come again.
        """
        if needs is None:
            needs = self._needs(failure)
        if failure.by_chance and not fresh:
            self._runner.renew()
        left = self._end - self._clock()
        small = shrink(
            self._runner,
            self._spec,
            failure.case,
            time_budget=min(max(EACH, SHARE * left), left),
            accept=partial(self._outside, needs, but),
        )
        result = small.result
        if failure.by_chance:
            self._runner.renew()
            (result,) = self._runner.run(self._spec, [small.case])
        found = failure_of(small.case, result)
        return (found if found is not None and may_be(failure, found) else None), small.finished

    def _hidden(self, failure: Failure) -> Iterator[Failure]:
        """What fails beside an explained failure although nothing known explains it: of a trajectory any other node, of
        a single one a variant, unless one like it was looked at before.
        """
        if self._late() or failure.kind[1] == FLUSHED:  # so is each variant's
            return
        if _may_hide(failure):
            yield from self._beside(failure)
        elif failure.at is not None and self._is_new(failure.features):
            made = itertools.islice(self._variants(failure), VARIANTS)
            found = (failure_of(case, self._run(case, locates=True)) for case in made)
            alike = (f for f in found if f is not None and f.kind == failure.kind)
            yield from itertools.islice((f for f in alike if self._explaining(f) is None), 1)

    def _is_new(self, found: Features) -> bool:
        """Whether no node like it, but for sizes, was asked about before; it is from now on."""
        shape = frozenset((k, _coarse(v)) for k, v in found.items())
        new = shape not in self._looked
        self._looked.add(shape)
        return new

    def _beside(self, failure: Failure) -> Iterator[Failure]:
        """Each node that is wrong in the same run, by itself with what it read there, that nothing known explains."""
        wrong, ran = self._runner.divergent(self._spec, failure.case)
        for k, node in wrong:
            found = features(failure.case, k, node)
            known = any(g.by_chance and g.form.ops and g.form.holds(found) for g in self.groups)
            if known or self._late() or not self._is_new(found):
                continue
            with suppress(ConformanceError):
                case = cuts.keep(cuts.Recorded(failure.case, ran), {k: [*cuts.views_of(node), node]})
                alone = failure_of(case, self._run(case, locates=True))
                if alone is not None and alone.at is not None and self._explaining(alone) is None:
                    yield alone

    def _variants(self, failure: Failure) -> Iterator[Case]:
        """Cases a step simpler than the failing one, the largest first, that meet no known form where it fails."""
        recorded = self._recorded(failure.case)
        passes = (simplify.parameters, simplify.types, simplify.dims, cuts.nodes)
        made = [c for make in passes for c in itertools.islice(make(recorded, failure.result), 200)]
        for case in sorted(made, key=simplify.elements, reverse=True):
            if not any(g.form.holds(features(case, k, n)) for g in self.groups for k, _, n in nodes_of(case)):
                yield case

    def _join(self, nodes: Nodes, *, last: bool = False) -> None:
        """Join groups as long as what two forms share tells failures from passes nearly as well as they do. The `last`
        time also errors of one or two ops which nothing explains but an extent, as the words go by the op.
        """
        while (pair := self._alike(nodes, last=last)) is not None:
            a, b, form = pair
            first, second = sorted(
                (a, b), key=lambda g: (a.kind != b.kind and g.kind[0] != Verdict.FAIL, size(g.proof))
            )
            a.kind = next((g.kind for g in (a, b) if _flushes(g)), first.kind)
            a.proof, a.failures = first.proof, first.failures + second.failures
            a.form = form.anywhere()
            a.unsure, a.needed, a.behind = first.unsure + second.unsure, a.needed & b.needed, a.behind and b.behind
            self.groups.remove(b)

    def _alike(self, nodes: Nodes, *, last: bool) -> tuple[Group, Group, Form] | None:
        for a, b in itertools.combinations(self.groups, 2):
            key = (a.kind, a.form, b.kind, b.form)
            if key not in self._apart and (a.more == b.more or a.form.same_kernel(b.form)):
                form = _joint(a, b, last=last)
                if form is not None and (_one(a, b, last=last) or not (a.form.ops and b.form.ops)):
                    return a, b, form
                by_chance = [g.form for g in (a, b) if g.by_chance]  # an error of few nodes tells all of them
                rest = [g.form for g in self.groups if g is not a and g is not b and g.form.ops]
                others = rest if _both_wrong(a, b) else []  # an error tells itself by its words
                if form is not None and nodes.joins(form, *(by_chance or (a.form, b.form)), others=others):
                    return a, b, form
                if last and (form := self._of_shared_types(a, b, nodes)) is not None:
                    return a, b, form
                if last and (form := self._of_twins(a, b) or _of_what_is_kept(a, b)) is not None:
                    return a, b, form
                if (
                    (a.kind, a.form.ops) == (b.kind, b.form.ops)
                    and a.form.ops
                    and not (self._tells(a) or self._tells(b))
                ):
                    return a, b, a.form if len(a.form.rest) < len(b.form.rest) else b.form
                self._apart.add(key)
        return None

    def _of_twins(self, a: Group, b: Group) -> Form | None:
        """The form of wrong numbers of an op and its `_BACK`; where several may be it, of that with the most."""

        def of(x: Group, y: Group) -> Form | None:
            return twins(x.form, y.form) if x.kind == y.kind and x.by_chance else None

        if (form := of(a, b)) is None:
            return None
        plain, other = (a, b) if not a.form.says else (b, a)
        return form if len(other.failures) == max(len(g.failures) for g in self.groups if of(plain, g)) else None

    def _of_shared_types(self, a: Group, b: Group, nodes: Nodes) -> Form | None:
        """The form of both, if they are wrong with the same types: with `SEVERAL`, where an op of either fails with
        each that it was tried with, or where both store and one has all of the other's; or with one type, where as many
        ops fail with whatever type one of them fails with.
        """
        form = of_shared_types(a.form, b.form) if a.kind == b.kind and a.kind[0] == Verdict.FAIL else None
        if form is None or _read_and_store(a, b):
            return None
        if stores_among_several(a.form, b.form):
            return form
        alike = [g for g in self.groups if g.kind == a.kind and of_shared_types(g.form, form) is not None]
        ops = {base_of(op) for g in alike for op in g.form.ops}
        shared = {t for t in type_of(form).split(ANY_OF) if all(_says_type(g.form, t) for g in (a, b))}
        of_shared = (Condition(TYPE, ANY_OF.join(sorted(shared))),)
        each = [
            any(nodes.fail_with_each_type(Form((Condition(OP, op), *of_shared)), form) for op in g.form.ops)
            for g in (a, b)
        ]
        if len(shared) >= SEVERAL and all(each):
            return form
        return form if len(ops) >= SEVERAL and nodes.fail_with_each_type(form, form) else None

    def _absorb(self, *, last: bool = False) -> None:
        """A group whose smallest case another explains, whose form came later, is no cause of its own; the `last` time
        one that no other hid, that says little more than types, and that fails in the same words.
        """
        may_go = [g for g in self.groups if not (g.more or (last and (g.behind or not g.form.of_few_words)))]
        for group in sorted(may_go, key=lambda g: len(g.form.rest), reverse=True):
            others = (g for g in self.groups if g is not group and g.form.ops and self._tells(g))
            others = (g for g in others if not last or (g.kind == group.kind and g.form.spreads))
            to = next((g for g in others if len(g.form.rest) < len(group.form.rest) and g.explains(group.proof)), None)
            if to is not None:
                to.failures, to.unsure = to.failures + group.failures, to.unsure + group.unsure
                self.groups.remove(group)

    def _absorb_attention(self) -> None:
        """An attention that is wrong in the sizes of K and Q in which MUL_MAT is wrong is no cause of its own."""
        wrong = [g for g in self.groups if g.kind[0] == Verdict.FAIL]
        for group in wrong:
            to = next((g for g in wrong if g.kind == group.kind and is_product_of(group.form, g.form)), None)
            if to is not None:
                to.failures, to.unsure = to.failures + group.failures, to.unsure + group.unsure
                self.groups.remove(group)

    def _merged(self, nodes: Nodes) -> list[Group]:
        """The groups without conditions that tell nothing, joined once more."""
        self.groups = [g for g in self.groups if g.failures]
        self._absorb()
        for g in self.groups:
            g.form = without(g.form, partial(nodes.always, g.form.ops))
        self._join(nodes)
        self.groups = _of_types(self.groups)
        self._apart.clear()
        self._join(nodes, last=True)
        self.groups = _of_types(self.groups, siblings=True)
        self._absorb(last=True)
        self._absorb_attention()
        for g in self.groups:
            if not g.form.ops:
                g.form = shared_by(g.form, [f.case for f in g.failures])
        return self.groups


def _one(a: Group, b: Group, *, last: bool) -> bool:
    """Whether two groups are one whatever their shares are: an error of one op that says the same; errors that differ
    in a word, one of which comes with less than the other; wrong numbers of ops of one kernel in the same conditions,
    or of any beside another node; or what is wrong by no more than that it is an output which others read, as was tried
    of both or all that both say.
    """
    error = a.kind == b.kind and not a.by_chance
    if last and error and a.form.ops == b.form.ops and len(a.form.ops) == 1:
        return True
    if (last and _both_wrong(a, b) and of_one_function(a.form, b.form)) or _flush(a, b):
        return True
    if _both_wrong(a, b) and (a.form.same_kernel(b.form) or (a.form.of_beside and b.form.of_beside)):
        return True
    fewer, more = sorted((a.form.says, b.form.says), key=len)
    if said_alike(a.kind, b.kind) and fewer and fewer <= more:
        return True
    if not (_both_wrong(a, b) and a.form.of_output and b.form.of_output):
        return False
    return bool(a.needed and b.needed) or a.form.says == b.form.says


def _joint(a: Group, b: Group, *, last: bool) -> Form | None:
    """What two groups share, if one fault may be both: they fail alike, or by chance of sizes as extents do. A type is
    what two ops share only at the `last`, when it is known which types each fails with.
    """
    if not (a.form.ops and b.form.ops):
        return _joint_wholes(a, b)
    if (flush := _flush(a, b)) or _read_and_store(a, b):
        return of_flushed(a.form, b.form) if flush else None
    if last and a.kind == b.kind and (form := _joint_types(a, b)) is not None:
        return form
    form = common(a.form, b.form, of_any_leaf=a.kind == b.kind and not a.by_chance)
    if form is None or _need_otherwise(a, b, form) or (not last and a.form.ops != b.form.ops and type_of(form)):
        return None
    if said_alike(a.kind, b.kind) and (a.form.says <= b.form.says or b.form.says <= a.form.says):
        return form
    either = a.form.same_but_sizes(b.form) or a.form.same_kernel(b.form) or form.of_what_is_held or form.of_output
    alike = a.kind == b.kind or (either and _both_wrong(a, b))
    return form if alike or _by_extent(a, b, form, last=last) else None


def _flushes(g: Group) -> bool:
    return g.kind == (Verdict.FAIL.value, FLUSHED)


def _flush(a: Group, b: Group) -> bool:
    """Whether subnormal numbers are zero for both: how the processor computes is no op's fault."""
    either = _flushes(a) or _flushes(b)
    return either and _both_wrong(a, b) and all(_flushes(g) or g.form.of_subnormals for g in (a, b))


def _of_what_is_kept(a: Group, b: Group) -> Form | None:
    """The form of wrong numbers by what a backend kept, and of nodes that are wrong beside another."""
    whole, node = (a, b) if b.form.ops else (b, a)
    kept = whole.kind == (Verdict.FAIL.value, KEPT) and not whole.form.ops
    return whole.form if kept and node.form.is_beside and node.kind[0] == Verdict.FAIL else None


def _need_otherwise(a: Group, b: Group, form: Form) -> bool:
    """Whether wrong numbers of one need what the other has not, which says something else, and `form` says neither."""
    told = (a.needed or a.form.says, b.needed or b.form.says, form.says)
    mine, others, said = ({of_any(c.key) for c in conditions} for conditions in told)
    either = mine & others or (mine | others) & said
    return _both_wrong(a, b) and bool(a.needed or b.needed) and bool(mine) and bool(others) and not either


def _both_wrong(a: Group, b: Group) -> bool:
    return a.kind[0] == b.kind[0] == Verdict.FAIL


def _read_and_store(a: Group, b: Group) -> bool:
    """Whether both are wrong numbers, of blocks that one reads and the other stores."""
    return _both_wrong(a, b) and read_and_store(a.form, b.form)


def _by_extent(a: Group, b: Group, form: Form, *, last: bool) -> bool:
    """Whether one fault of extents may be both, which fail in other words: both by chance of sizes, as those of one op
    in the same conditions are, too; or, at the `last`, an error about shapes in the same conditions as damage, or in no
    other ones than those of several ops.
    """
    if a.by_chance and b.by_chance:
        return form.of_extent or (bool(a.form.says) and a.form.same_but_sizes(b.form))
    chance, error = sorted((a, b), key=lambda g: not g.by_chance)
    if not last or not chance.by_chance or _OF_SHAPES.search(error.kind[1]) is None:
        return False
    if chance.kind[0] == Verdict.CRASH:
        return a.form.same_but_sizes(b.form)
    return form.of_extent and chance.form.spreads and error.form.only_of_extent


def _joint_wholes(a: Group, b: Group) -> Form | None:
    """What two causes of no single node share, whose messages differ in names or in one word."""
    if a.kind == b.kind and not a.by_chance:
        whole, node = (a, b) if b.form.ops else (b, a)
        if any(f[OP] in node.form.ops for f in whole.proof.all):
            return node.form
        return whole.form if a.kind[0] == Verdict.CRASH else None  # an assertion has one place in the source
    shared = a.form.rest & b.form.rest
    alike = said_alike(a.kind, b.kind, named=True) or said_alike(a.kind, b.kind)
    if a.form.ops or b.form.ops or not alike:
        return None
    if only_of_relation(a.form) != only_of_relation(b.form):  # an error that comes without the relation, too
        return b.form if only_of_relation(a.form) else a.form
    if not (tells_apart(shared) or (a.of_kept and b.of_kept)):
        return None
    return Form(tuple(c for c in a.form.conditions if c in shared))


def _joint_types(a: Group, b: Group) -> Form | None:
    """The form of one op that says the same of several types, or of one kernel that is wrong with the same types."""
    if not a.by_chance and a.form.ops == b.form.ops and len(a.form.ops) == 1:
        return of_one_error(a.form, b.form)
    return of_types([a.form, b.form]) if a.by_chance and same_kernel(a.form, b.form) else None


def _typed(found: Features, key: str) -> tuple[frozenset[tuple[str, str]], str]:
    """The types of a node beside that at `key`, where others may be the same, and the key."""
    own = found[key]
    others = ((k, "the same" if v == own else v) for k, v in found.items() if k.endswith(".type") and k != key)
    return frozenset(others), key


def _says_type(form: Form, type_: str) -> bool:
    return any(type_ in c.value.split(ANY_OF) for c in form.says if c.key == TYPE or c.key.endswith(".type"))


def _of_types(groups: Sequence[Group], *, siblings: bool = False) -> list[Group]:
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
        alike = [j for j in alike if _may_share_types(j.form, g.form) and not _read_and_store(j, g)]
        first = next(iter(alike), None) if type_of(g.form) else None
        if first is None:
            joined.append(g)
        else:
            first.form, first.failures = of_types([first.form, g.form]), first.failures + g.failures
            first.unsure += g.unsure
    return joined


def _places(g: Group) -> list[tuple[tuple[str, str], str, str]]:
    """How a group fails, each of its ops, and the operand whose type is all it says."""
    return [(g.kind, op, type_place(g.form)) for op in g.form.ops]


def _siblings(a: Form, b: Form) -> bool:
    """Whether two forms of types are of the same ops, `SEVERAL`, and of types with as many bits in as large blocks."""
    stems = {t.rstrip("01") for f in (a, b) for t in type_of(f).split(ANY_OF)}
    return a.ops == b.ops and len(a.ops) >= SEVERAL and len(stems) == 1


def _may_share_types(a: Form, b: Form) -> bool:
    """Whether two forms of types are of the same ops at the same place, or of a type that both know."""
    x, y = (set(type_of(f).split(ANY_OF)) for f in (a, b))
    return (a.ops == b.ops and type_place(a) == type_place(b)) or bool(x & y)


class Nodes:
    """The nodes of failures, and those of cases that pass, by op."""

    def __init__(self, failures: Iterable[Failure], passed: Iterable[Case]) -> None:
        self._failed = _by_op(f.features for f in failures if f.at is not None)
        self._passed = _by_op(features(case, k, n) for case in passed for k, _, n in nodes_of(case))

    def always(self, ops: Sequence[str], condition: Condition) -> bool:
        """Whether every node of `ops` meets the condition, and enough of them are right to say so."""
        right = [f for op in ops for f in self._passed.get(op, ())]
        wrong = [f for op in ops for f in self._failed.get(op, ())]
        return len(right) >= FEW and all(meets(condition, f) for f in (*right, *wrong))

    def share(self, form: Form, others: Collection[Form] = ()) -> float:
        """Failures that none of `others` explains among the nodes that meet `form`."""
        failed = sum(
            form.holds(f) and not any(o.holds(f) for o in others) for op in form.ops for f in self._failed.get(op, ())
        )
        return failed / max(1, failed + self.passed(form))

    def joins(self, form: Form, *parts: Form, others: Collection[Form] = ()) -> bool:
        """Whether `form` tells failures from right nodes nearly as well as each of its `parts`, without `others`; of
        the ops of each part, where it says nothing but sizes, or those of one op would hide that the other is right.
        A part whose failures `others` explain all is no witness.
        """
        if others and all(map(is_size, form.rest)):
            shares = [(self.share(form.of_ops(p), others), self.share(p, others)) for p in parts]
            return all(alone > 0 and joint >= JOINED * alone for joint, alone in shares)
        return self.share(form, others) >= JOINED * max(self.share(p, others) for p in parts)

    def fail_with_each_type(self, form: Form, whole: Form) -> bool:
        """Whether each op of `form` fails with every type of it that it has where it has one of a failure; whatever a
        store writes, where `whole`, of which it is a part, is about blocks that are read.
        """
        types = set(type_of(form).split(ANY_OF))
        for op in form.ops:
            failed, right = ([whole.as_read(f) for f in side.get(op, ())] for side in (self._failed, self._passed))
            wrong = {_typed(f, k): f[k] for f in failed for k in f if k.endswith(".type") and f[k] in types}
            known = set(wrong.values())
            if any(f.get(k) in types - known and _typed(f, k) in wrong for f in right for _, k in [*wrong] if k in f):
                return False
        return True

    def count(self, form: Form, side: Mapping[str, Sequence[Features]]) -> int:
        """Nodes of one side that meet `form`."""
        return sum(form.holds(f) for op in form.ops for f in side.get(op, ()))

    def passed(self, form: Form) -> int:
        """Nodes that meet `form` and are right."""
        return self.count(form, self._passed)


def _by_op(rows: Iterable[Features]) -> Mapping[str, Sequence[Features]]:
    """Different ones, by their op."""
    different = {frozenset(f.items()): f for f in rows}.values()
    return {op: list(fs) for op, fs in itertools.groupby(sorted(different, key=itemgetter(OP)), itemgetter(OP))}


def _in_turn(failures: Sequence[Failure]) -> list[Failure]:
    """Single nodes, then trajectories, then what no node is at fault in; of each the first of every signature, then the
    second of every one, and so on, wrong numbers before errors that may need the same, the smallest first: time may end
    before all are looked at.
    """
    ranks: Counter[Signature] = Counter()
    turns = []
    for failure in sorted(failures, key=size):
        ranks[failure.signature] += 1
        turns.append((size(failure)[:2], ranks[failure.signature], failure.result.verdict is not Verdict.FAIL, failure))
    return [failure for *_, failure in sorted(turns, key=itemgetter(0, 1, 2))]


def _of_many(failures: Sequence[Failure]) -> frozenset[tuple[str, str]]:
    """The kinds of errors with which several ops fail, each at a node of it."""
    ops: dict[tuple[str, str], set[str]] = {}
    for f in failures:
        if f.at is not None and not f.by_chance:
            ops.setdefault(f.kind, set()).add(f.features[OP])
    return frozenset(kind for kind, found in ops.items() if len(found) >= SEVERAL)


def _may_hide(failure: Failure) -> bool:
    """Whether the case has nodes beside the first wrong one, and they ran."""
    if failure.result.verdict is not Verdict.FAIL or claim.applies(failure.case):
        return False
    return len(list(itertools.islice(nodes_of(failure.case), 2))) > 1


def _coarse(value: str) -> str:
    return ("1" if value == "1" else "n") if value.isdigit() else value


def _form(proof: Failure) -> Form:
    if proof.at is None:
        return whole_form(proof.case) if proof.case.id.startswith(cuts.PREFIX) else Form(())
    form = form_of(proof.case, proof.at[0], proof.node)
    another = _may_hide(proof) if form.says_nothing else _needs_another(proof)
    return form.beside_another() if another and proof.case.id.startswith(cuts.PREFIX) else form


def _needs_another(proof: Failure) -> bool:
    """Whether the smallest case has a node still that the failing one does not read, nor the other way round."""
    node = proof.node
    others = [n for _, _, n in nodes_of(proof.case) if n is not node]
    read = {n.root for n in cuts.views_of(node)} | {s.root for s in node.src if s is not None}
    return any(n.root not in read and node.root not in {s.root for s in n.src if s is not None} for n in others)


def cause_of(group: Group, backend: str, nodes: Nodes, seen: str = "") -> Cause:
    """The record of a group; `seen` says how it came again."""
    result, form = group.proof.result, group.form
    failed = sorted(group.failures, key=size)
    passed = nodes.passed(form)
    key = "\n".join((backend.partition("?")[0], *group.kind, *map(str, form.conditions)))
    name = "+".join(form.ops[:2]) or group.kind[0]
    return Cause(
        f"{name}-{sha256(key.encode()).hexdigest()[:8]}",
        _sentence(group, len(failed), passed),
        backend,
        result.verdict,
        form.ops[0] if len(form.ops) == 1 else "",
        "" if result.verdict is Verdict.FAIL else group.proof.signature.kind,
        form.conditions,
        tuple(dict.fromkeys(f.case.id for f in failed)),
        seen,
        rank={"failed": len(failed), "passed": passed},
    )


def _sentence(group: Group, failed: int, passed: int) -> str:
    rest = [c for c in group.form.conditions if c.key != OP]
    what = " and ".join(group.form.ops) or group.kind[1] or "a case as a whole"
    where = f" with {', '.join(map(str, rest))}" if rest else ""
    verdict, message = group.kind
    how = f"wrong numbers{f' ({message})' if message else ''}" if verdict == Verdict.FAIL else f"{verdict}: {message}"
    unsure = f"; {group.unsure} of them put here as time was over" if group.unsure else ""
    return f"{what}{where}: {how} ({failed} fail{unsure}; {passed} such nodes are right)"
