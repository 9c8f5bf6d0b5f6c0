"""The search for causes: failures of one backend, one after another.

The smallest failing case that no known form explains is shrunk, outside of all known forms: what is left is the form of
another cause, and every failure whose node meets it is explained. An explained failure may hide a second fault, so
variants of it that meet no known form run, too; one that still fails is shrunk likewise.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from typing import TypeVar

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.causes.cause import ANY_OF, Condition
from conformance.causes.failure import Failure, failure_of, may_be, size
from conformance.causes.features import BESIDE, OP, Features, features, nodes_of
from conformance.causes.form import SEVERAL, Form, form_of, is_size, meets, of_part, type_of
from conformance.causes.needs import cure
from conformance.causes.needs.whole import of_relation, relation_of, whole_form
from conformance.ggml.errors import ConformanceError
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Result, Verdict
from conformance.run.runner import Runner
from conformance.run.shrink import Shrunk, cuts, shrink, simplify
from conformance.run.shrink.lanes import Lanes
from conformance.run.signature import FLUSHED, Signature
from conformance.suite.relations import claim

from . import pair
from .forms import common
from .group import GONE, UNSEEN, Group
from .groups import Groups
from .nodes import Nodes

_T = TypeVar("_T")
EACH = 10.0
"""Seconds to shrink one case, where time is short."""
SHARE = 1 / 30
"""Of the time that is left, to shrink one case, where that is more: a form that nobody finished says too much."""
AGAIN = 3
"""How often a crash gets the chance."""
CURES = 2
"""Cases without what a form says that run of one failure."""
SETTLING = 0.15
"""Of the time, to ask of what is grouped whether a form of another group is what it needs."""
NEEDED = 8
"""Cases that run to know what a failure needs."""
VARIANTS = 12
"""Variants that run of one explained failure, those nearest to it first."""


@dataclass(frozen=True, slots=True)
class _Smallest:
    """What is left of a failing case."""

    case: Case
    proof: Failure | None
    """That it fails as before; None where it does not."""
    finished: bool
    """Whether all that is smaller was tried."""
    right: bool
    """Whether it is smaller, and right where nothing ran before."""


class Search:
    """Groups the failures of `spec`; `seconds` bound all of it. `lanes` run cases at the same time, where given."""

    def __init__(
        self,
        runner: Runner,
        spec: Spec,
        nodes: Nodes,
        *,
        seconds: float = 1800.0,
        progress: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        lanes: Lanes | None = None,
    ) -> None:
        self._lanes = lanes
        self._runner, self._spec, self._progress, self._clock = runner, spec, progress, clock
        self._whole_end = clock() + seconds
        self._end = self._whole_end - SETTLING * seconds
        self._many: frozenset[tuple[str, str]] = frozenset()
        """How failures fail that several ops share: such an error is one by itself, wherever its operands lie."""
        self._uncured: set[tuple[str, Form]] = set()
        """Cases that fail still without what a form says."""
        self._looked: set[frozenset[tuple[str, str]]] = set()
        self.groups = Groups(nodes)

    def run(self, failures: Sequence[Failure]) -> list[Group]:
        """The groups; each failure is in one of them at least. What nothing known explains comes first, as it is what
        time may not suffice for; then what a failure may hide.
        """
        self._many = _of_many(failures)
        in_turn = _in_turn(failures)
        for n, failure in enumerate(in_turn, 1):
            self._interruptible(self._take, failure)
            self.groups.join()
            self._progress(f"{n} of {len(failures)} failures, {len(self.groups.all)} forms: {failure.case.id}")
        for n, failure in enumerate(in_turn, 1):
            if self._late():
                break
            self._interruptible(self._look_behind, failure)
            self.groups.join()
            self._progress(f"{n} of {len(in_turn)} looked behind, {len(self.groups.all)} forms: {failure.case.id}")
        self._end = max(self._end, self._whole_end if self._end > -inf else -inf)
        self._settle()
        return self.groups.merged()

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
        small = self._shrunk(hidden, but=but)
        proof = small.proof
        if proof is None or self._explaining(proof, but) is not None or (but is None and self._widened(proof)):
            return
        form = self._with_sizes(_form(proof), told=small.finished)
        if more <= form.says:
            self.groups.all.append(Group(proof.kind, form, proof, [behind], needed=more, more=more, behind=True))

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
        others = [g for g in self.groups.all if g is not but]
        found = (g for g in others if g.explains(failure) and (not g.form.ops or self.groups.tells(g)))
        alike = (g for g in others if several and g.kind == failure.kind and g.may_be_in(failure))
        return next(found, None) or next(alike, None)

    def _widened(self, failure: Failure) -> Group | None:
        """A group of the same op whose form but for sizes holds for `failure`, from now on without these sizes, if it
        tells failures from right nodes nearly as well then.
        """
        if failure.at is None or self._late():
            return None
        for group in self.groups.all:
            alike = group.kind == failure.kind and failure.features[OP] in group.form.ops
            form = group.form.but_for_sizes(failure.features) if alike else None
            if form not in (None, group.form) and self.groups.nodes.joins(form, group.form):
                group.form = form
                return group
        return None

    def _cured_by(self, failure: Failure) -> Group | None:
        """A group without whose form `failure`, whatever it says, is gone; else None."""
        return next((g for g in self.groups.all if self._may_need(failure, g) and self._cured(failure, g.form)), None)

    def _may_need(self, failure: Failure, group: Group) -> bool:
        """Whether the fault of `group`, no op's, may be what an error of one or two ops, or of a whole case, is."""
        if failure.kind == group.kind or failure.kind in self._many or claim.applies(failure.case):
            return False
        of_no_op = group.form.spreads or (group.by_chance and group.form.of_output)
        if failure.signature.kind.startswith((Fault.STALE, Fault.EARLIER)) or not of_no_op:
            return False
        nodes = failure.all if failure.at is None else [failure.features]
        return self.groups.tells(group) and any(map(group.form.beside, nodes))

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
        for group in [g for g in self.groups.all if not (g.form.ops and g.kind[0] == Verdict.FAIL)]:
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
        self.groups.all = [g for g in self.groups.all if g.failures]

    def _nearest(self, failure: Failure) -> Group | None:
        """Where nothing can be shrunk any more: the group that fails alike, at the same op if at one."""
        alike = [g for g in self.groups.all if g.kind == failure.kind and bool(g.form.ops) == (failure.at is not None)]
        if failure.at is None:
            return next((g for g in alike if relation_of(g.proof.case) == relation_of(failure.case)), None)
        found = failure.features
        same = [g for g in alike if found[OP] in g.form.ops]
        if failure.by_chance:
            near = [g for g in same if all(meets(c, found) for c in g.form.says)]
            return near[0] if len(near) == 1 else self.groups.of_words(failure, UNSEEN) if same else None
        return max(same, key=lambda g: sum(meets(c, found) for c in g.form.rest), default=None)

    def _outside(self, needs: cure.Needs, but: Group | None, case: Case, result: Result) -> bool:
        """Whether no known form `but` one explains the failure of `case`, which still has what is needed."""
        failure = failure_of(case, result)
        if failure is None or self._explaining(failure, but) is not None:
            return False
        return not needs.some_of or (failure.at is not None and needs.met(failure.features))

    def _needs(self, failure: Failure) -> cure.Needs:
        """What the failure needs of its node: what else makes the smaller case fail would be another fault."""
        if failure.at is None or failure.signature.kind == Fault.OUTPUT:
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
        proof, needs, finished = failure, cure.Needs(), False
        if not self._late():
            alone = self._alone(failure)
            if alone is None:
                return self.groups.of_words(failure, GONE)  # no form says why: what ran before did
            if (group := self._explaining(alone)) is not None:  # what ran before made it another
                return group
            if not may_be(failure, alone):
                proof = failure = alone
            if claim.applies(failure.case):
                return self._of_relation(failure)
            needs = self._needs(failure)
            if (group := self._needing(failure, needs)) is not None:
                return group
            with suppress(ConformanceError):
                small = self._shrunk(failure, needs, fresh=True)
                if small.right and self._is_right(small.case):  # so the backend keeps something between sessions
                    return self.groups.of_words(failure, Fault.STALE)
                proof, finished = small.proof or failure, small.finished
        unknown = failure.signature.kind == Fault.OUTPUT
        known = failure.signature.covers(proof.signature) and not unknown
        if claim.applies(failure.case):  # time was over before its runs were asked
            form = of_relation(failure.case)
        else:
            form = _form(proof) if failure.at is None else _form(proof).but(needs.idle).with_types(failure.features)
        form = self._with_sizes(form, told=finished)
        group = Group(failure.kind if known else proof.kind, form, proof, needed=needs.alone)
        if unknown and form.ops and not self.groups.tells(group):  # it slipped to a node that is hardly ever wrong
            group = Group(failure.kind, Form(()), failure)
        self.groups.all.append(group)
        return group

    def _needing(self, failure: Failure, needs: cure.Needs) -> Group | None:
        """The group of the same op and words that needs what `failure` does, if what both say tells failures from right
        nodes nearly as well; or, where each of `SEVERAL` types is needed by itself, that of the types. Nothing need be
        shrunk then.
        """
        if failure.at is None or not needs.alone:
            return None
        form, op = _form(failure).but(needs.idle), failure.features[OP]
        alike = [g for g in self.groups.all if g.kind == failure.kind and op in g.form.ops]
        for group in alike:
            joint = common(group.form, form) if group.needed == needs.alone else None
            if joint is not None and self.groups.nodes.joins(joint, group.form):
                group.form = joint
                return group
        typed = Form((Condition(OP, op), *needs.alone))
        own = type_of(typed)
        known = {t for g in alike for t in type_of(g.form).split(ANY_OF)} - {""}
        if not own or own.startswith("!= ") or len(known) < (SEVERAL if failure.by_chance else 2) - 1:
            return None
        mine = Group(failure.kind, typed, failure, needed=needs.alone)
        self.groups.all = pair.join_types([*self.groups.all, mine])
        if any(g is mine for g in self.groups.all):
            return mine
        same = (
            g
            for g in self.groups.all
            if g.kind == failure.kind and op in g.form.ops and not pair.read_and_store(g, mine)
        )
        return next(g for g in same if own in type_of(g.form).split(ANY_OF))

    def _with_sizes(self, form: Form, *, told: bool) -> Form:
        """`form` without its sizes where nobody tried smaller ones to the end, if it tells failures from right nodes
        nearly as well.
        """
        loose = Form(tuple(c for c in form.conditions if not is_size(c) and c.key != BESIDE))
        if told or loose == form or not self.groups.nodes.joins(loose, form):
            return form
        return loose

    def _of_relation(self, failure: Failure) -> Group:
        """The group of a relation: that of the first of its runs that fails by itself. Where each passes, or is wrong
        by the same numbers although one does more than compute, what the relation does is needed: a wrong kernel gives
        unlike runs unlike numbers.
        """
        form = Form(())
        with suppress(ConformanceError):
            runs = [(case, self._runner.run(self._spec, [case])[0]) for case in claim.cases_of(failure.case)]
            found = next((f for case, result in runs if (f := failure_of(case, result))), None)
            if found is not None:
                group = self._explaining(found) or self._cured_by(found) or self._new(found)
                does_more = any(run.how != claim.PLAIN for run in claim.read(failure.case).runs)
                if not (group.form.ops and does_more and _same([result for _, result in runs])):
                    return group
                group.failures.append(failure)  # each of them alone, and then they differ
            if found is not None or {result.verdict for _, result in runs} == {Verdict.PASS}:
                form = of_relation(failure.case)
        self.groups.all.append(Group(failure.kind, form, failure))
        return self.groups.all[-1]

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
                result = self._seen_alone(failure.case)
            except ConformanceError:  # nobody can say
                return failure
            if (found := failure_of(failure.case, result)) is not None:
                return found
        return None

    def _seen(self, failure: Failure) -> Result:
        return self._runner.run(self._spec, [failure.case])[0]

    def _shrunk(
        self, failure: Failure, needs: cure.Needs | None = None, but: Group | None = None, *, fresh: bool = False
    ) -> _Smallest:
        """The smallest case outside of all known forms `but` one that fails as `failure` does. Wrong numbers and damage
        are seen in a process where nothing ran before, which `fresh` says there is: a backend that damages memory makes
        cases fail in its process that are right, and so does one that keeps what smaller cases left. ConformanceError
        if `failure` does not come again.
        """
        if needs is None:
            needs = self._needs(failure)
        if failure.by_chance:
            self._renew_lanes()
            if not fresh:
                self._runner.renew()
        outside = partial(self._outside, needs, but)
        small, result = self._shrink(failure, outside)
        if result.verdict is Verdict.PASS and not failure.by_chance:  # it failed behind the larger ones alone

            def afresh(case: Case, result: Result) -> bool:
                return outside(case, result) and self._afresh(case).verdict is result.verdict

            small, result = self._shrink(failure, afresh)
        found = failure_of(small.case, result)
        right = failure.result.verdict is Verdict.FAIL and result.verdict is Verdict.PASS
        proof = found if found is not None and may_be(failure, found) else None
        return _Smallest(small.case, proof, small.finished, right and small.case is not failure.case)

    def _shrink(self, failure: Failure, accept: Callable[[Case, Result], bool]) -> tuple[Shrunk, Result]:
        """The smallest case that fails as `failure` does and that `accept` takes, and its result where nothing ran
        before; an error of a single node is the case's own.
        """
        left = self._end - self._clock()
        seconds = min(max(EACH, SHARE * left), left)
        with self._runner.looking(locates=True, tells_kept=len(failure.case.steps) > 1 or not failure.by_chance):
            small = shrink(
                self._runner, self._spec, failure.case, time_budget=seconds, accept=accept, lanes=self._lanes
            )
        if not failure.by_chance and failure.at is not None:
            return small, small.result
        return small, self._afresh(small.case)

    def _afresh(self, case: Case) -> Result:
        """The result of a case where nothing ran before."""
        self._runner.renew()
        return self._seen_alone(case)

    def _renew_lanes(self) -> None:
        if self._lanes is not None:
            self._lanes.renew()

    def _seen_alone(self, case: Case) -> Result:
        """The result of a case before which nothing ran: of a single step nobody need ask what earlier ones left."""
        with self._runner.looking(locates=True, tells_kept=len(case.steps) > 1):
            return self._runner.run(self._spec, [case])[0]

    def _is_right(self, case: Case) -> bool:
        """Whether `case` passes each of `AGAIN` times where nothing ran before."""
        for _ in range(AGAIN):
            self._runner.renew()
            if self._run(case).verdict is not Verdict.PASS:
                return False
        return True

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
            known = any(g.by_chance and g.form.ops and g.form.holds(found) for g in self.groups.all)
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
        for case in filter(cuts.is_legal, sorted(made, key=simplify.elements, reverse=True)):
            if not any(g.form.holds(features(case, k, n)) for g in self.groups.all for k, _, n in nodes_of(case)):
                yield case


def _in_turn(failures: Sequence[Failure]) -> list[Failure]:
    """Single nodes, then what no node is at fault in, there wrong numbers first, as errors tell themselves by their
    words; in each of these one step before several, then the first of every signature and relation, then the second of
    every one, and so on, the smallest first: time may end before all are looked at.
    """
    ranks: Counter[tuple[Signature, str]] = Counter()
    turns = []
    for failure in sorted(failures, key=size):
        alike = failure.signature, relation_of(failure.case)
        ranks[alike] += 1
        error = failure.result.verdict is not Verdict.FAIL
        whole, several = size(failure)[:2]
        turns.append((whole, whole and error, several, ranks[alike], error, failure))
    return [failure for *_, failure in sorted(turns, key=itemgetter(0, 1, 2, 3, 4))]


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


def _same(results: Sequence[Result]) -> bool:
    """Whether all are wrong by the same number in the same place."""
    first = results[0].where
    return first is not None and all(r.where == first for r in results)


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
