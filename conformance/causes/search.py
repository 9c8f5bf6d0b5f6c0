"""Search for the causes of one backend's failures, one failure after another.

A failure that no known rule explains runs again without each of its properties and is shrunk outside all known rules;
what remains is the rule of another cause. An explained failure may hide a second bug, so variants that meet no known
rule run too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError
from conformance.judge.cause import Condition
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Result, Verdict, counted
from conformance.process import FOREVER, OVER, Deadline
from conformance.run.runner import Runner
from conformance.run.shrink import cuts, simplify
from conformance.run.shrink.workers import Runners
from conformance.run.signature import Signature
from conformance.suite.relations import relation

from .ablate import Needs
from .experiment import Experiments
from .failure import Failure, Shape, failure_of, size
from .features import BLOCK, OTHER_NODE, TAIL, YES, features, nodes_of
from .group import GONE, SEVERAL, Group, Groups, Nodes, relation_rule
from .rule import Rule, is_size, meets, rule_of

VARIANTS = 12
"""Maximum number of variants that run per explained failure, nearest first."""
SPLITTING = 0.15
"""Share of the time reserved to find the necessary conditions of each group."""


class Search:
    """Groups the failures of `spec` in time; `workers` run cases in parallel, if given."""

    def __init__(
        self,
        runner: Runner,
        spec: Spec,
        nodes: Nodes,
        *,
        deadline: Deadline = FOREVER,
        progress: Callable[[str], None] = lambda _: None,
        workers: Runners | None = None,
    ) -> None:
        self._progress, self._nodes, self._whole = progress, nodes, deadline
        first = deadline.within((1 - SPLITTING) * deadline.left())
        self._try = Experiments(runner, spec, nodes, first, workers)
        self._groups = Groups(nodes)
        self._looked: set[Shape] = set()

    def run(self, failures: Sequence[Failure]) -> list[Group]:
        """Return the groups; each failure is in at least one of them."""
        in_turn = _in_turn(failures)
        for what, do in (("failure", self._take), ("looking for a second bug behind failure", self._look_behind)):
            for n, failure in enumerate(in_turn, 1):
                try:
                    do(failure)
                except KeyboardInterrupt:
                    self._try.deadline = self._whole = OVER
                    self._progress("interrupted: the rest is grouped by what is known")
                    do(failure)
                found = counted(len(self._groups.all), "cause")
                self._progress(f"{what} {n} of {len(in_turn)}, {found} so far: {failure.case.id}")
        self._try.deadline = self._whole
        for group in [g for g in self._groups.all if g.failures]:
            self._split(group)
        self._groups.simplify()
        return self._groups.all

    def _take(self, failure: Failure) -> None:
        """Assign `failure` to a group."""
        group = self._groups.explaining(failure) or self._cured_by(failure) or self._groups.of_shape(failure)
        if group is None and self._try.late() and (group := self._groups.nearest(failure)) is not None:
            group.unsure += 1
        (group or self._new(failure)).take(failure)
        if group is None:
            self._groups.join()

    def _cured_by(self, failure: Failure) -> Group | None:
        """Return a group of several ops whose rule, if removed, makes `failure` pass."""
        if failure.kind[1].startswith((Fault.STALE, Fault.EARLIER)) or relation.applies(failure.case):
            return None
        rows = failure.all if failure.at is None else [failure.features]
        return next((
            g
            for g in self._groups.all
            if len(g.rule.ops) >= SEVERAL and g.kind != failure.kind and any(map(g.rule.holds_for_any_op, rows))
            and g.rule.says and self._try.cures(failure, g.rule)
        ), None)  # fmt: skip

    def _new(self, failure: Failure) -> Group:
        """Return the group of a failure that no other group explains."""
        if self._try.late():
            rule = Rule(()) if failure.at is None else rule_of(failure.case, failure.at[0], failure.node)
            return self._groups.add(
                Group(failure.kind, Rule.of(rule.ops, rule.says) if rule.ops else rule, failure, cut=True)
            )
        alone = self._try.alone(failure)
        if alone is None:
            return self._groups.row(failure, GONE)
        if (group := self._groups.explaining(alone)) is not None:  # earlier cases had changed the error
            return group
        if relation.applies(failure.case):
            return self._of_relation(failure)
        needs = self._try.needs(alone)
        return self._groups.needing(alone, needs) or self._shrunk(alone, needs)

    def _of_relation(self, failure: Failure) -> Group:
        """Return the group of the first run that fails alone; the relation's own if each passes."""
        with suppress(ConformanceError):
            for case in relation.cases_of(failure.case):
                found = failure_of(case, self._try.result(case))
                if found is not None:
                    return self._groups.explaining(found) or self._new(found)
        return self._groups.add(Group(failure.kind, relation_rule(relation.read(failure.case).name), failure))

    def _shrunk(self, failure: Failure, needs: Needs) -> Group:
        """Return the group of the smallest case outside all known rules that fails like `failure`."""
        proof, finished = failure, False
        with suppress(ConformanceError):
            proof, finished = self._try.smallest(failure, partial(self._outside, needs))
        same = proof.kind == failure.kind or (proof.is_flaky and failure.is_flaky)
        if not same and (known := self._groups.explaining(proof)) is not None:
            return known
        rule = self._rule(proof, needs, finished)
        group = self._groups.add(Group(proof.kind, rule, proof, needs=needs, cut=not finished))
        self._groups.was_shrunk(failure)
        return group

    def _rule(self, proof: Failure, needs: Needs, finished: bool) -> Rule:
        """Return the rule of the smallest case without the conditions shown to be unnecessary."""
        if proof.at is None:
            return Rule(())
        rule = rule_of(proof.case, proof.at[0], proof.node).but(needs.idle)
        found, more = proof.features, {c for c in needs.alone if c.key.endswith(TAIL) and meets(c, proof.features)}
        if any(int(found[f"{c.key.partition('.')[0]}.ne[0]"]) > BLOCK for c in more):
            more = set()  # a size condition implies it
        if needs.alone and not needs.alone <= rule.rest:  # the type may have become a similar one
            more |= {c for c in needs.alone if meets(c, found)}
        if proof.case.id.startswith(cuts.PREFIX) and _needs_another(proof):
            more.add(Condition(OTHER_NODE, YES))
        rule = Rule.of(rule.ops, rule.rest | more)
        loose = rule.but([c for c in rule.rest if is_size(c)])
        return rule if finished or not self._nodes.separates(loose, rule) else loose

    def _outside(self, needs: Needs, case: Case, result: Result) -> bool:
        """Return True if no known rule explains `case` and it has the necessary conditions."""
        failure = failure_of(case, result)
        if failure is None or self._groups.explaining(failure, needs) is not None:
            return False
        return not needs.some_of or (failure.at is not None and needs.met(failure.features))

    def _split(self, group: Group) -> None:
        """Move failures whose necessary conditions conflict with those of the proof to new groups."""
        parts: list[tuple[Needs, list[Failure]]] = []
        for failure in sorted(group.failures, key=size):
            needs = self._try.needs(failure)
            part = next((fs for n, fs in parts if not n.conflicts(needs)), None)
            if part is None:
                parts.append((needs, [failure]))
            else:
                part.append(failure)
        if len(parts) < 2:
            return
        group.failures = []
        own = next((fs for n, fs in parts if not n.conflicts(group.needs)), None)
        for needs, failures in parts:
            if failures is own:
                group.failures = own
            else:
                self._shrunk(failures[0], needs).failures.extend(failures)

    def _look_behind(self, failure: Failure) -> None:
        """Add a group for each failure hidden behind an explained one."""
        with suppress(ConformanceError):
            for hidden in self._hidden(failure):
                proof, finished = self._try.smallest(hidden, partial(self._outside, needs := self._try.needs(hidden)))
                if self._groups.explaining(proof) is None:
                    rule = self._rule(proof, needs, finished)
                    self._groups.add(Group(proof.kind, rule, proof, [failure], needs, cut=not finished))
                    self._groups.join()

    def _hidden(self, failure: Failure) -> Iterator[Failure]:
        """Yield unexplained failures near an explained one: other nodes of its case, or a variant."""
        if self._try.late():
            return
        if failure.may_hide:
            yield from self._others(failure)
        elif failure.at is not None and self._is_new(failure):
            made = itertools.islice(self._variants(failure), VARIANTS)
            found = (failure_of(case, self._try.run(case, locates=True)) for case in made)
            similar = (f for f in found if f is not None and f.kind == failure.kind)
            yield from itertools.islice((f for f in similar if self._groups.explaining(f) is None), 1)

    def _is_new(self, failure: Failure) -> bool:
        """Return True if no failure of this shape was examined before; marks the shape as examined."""
        new = failure.shape not in self._looked
        self._looked.add(failure.shape)
        return new

    def _others(self, failure: Failure) -> Iterator[Failure]:
        """Yield other nodes that are wrong alone on the run's values and that no rule explains."""
        wrong, ran = self._try.wrong_alone(failure.case)
        for k, node in wrong:
            index = failure.case.steps[k].graph.nodes.index(node)
            at = Failure(failure.case, failure.result, failure.signature, (k, index))
            known = any(g.is_flaky and g.rule.holds(at.features) for g in self._groups.all if g.rule.ops)
            if known or self._try.late() or not self._is_new(at):
                continue
            with suppress(ConformanceError):
                case = cuts.keep(cuts.Recorded(failure.case, ran), {k: [*cuts.views_of(node), node]})
                alone = failure_of(case, self._try.run(case, locates=True))
                if alone is not None and alone.at is not None and self._groups.explaining(alone) is None:
                    yield alone

    def _variants(self, failure: Failure) -> Iterator[Case]:
        """Yield cases one step simpler than the failing one, largest first, that meet no known rule."""
        recorded = self._try.recorded(failure.case)
        passes = (simplify.parameters, simplify.types, simplify.dims, cuts.nodes)
        made = [c for make in passes for c in itertools.islice(make(recorded, failure.result), 200)]
        for case in filter(cuts.is_legal, sorted(made, key=simplify.elements, reverse=True)):
            rows = [features(case, k, n) for k, _, n in nodes_of(case)]
            if not any(g.rule.ops and any(map(g.rule.holds, rows)) for g in self._groups.all):
                yield case


def _in_turn(failures: Sequence[Failure]) -> list[Failure]:
    """Sort failures: single nodes first, then trajectories, then cases without a failing node.

    The first of every signature precedes the second of any, because time may run out.
    """
    ranks: Counter[Signature] = Counter()
    turns = []
    for failure in sorted(failures, key=size):
        ranks[failure.signature] += 1
        error = failure.result.verdict is not Verdict.FAIL
        whole, several = size(failure)[:2]
        turns.append((whole, whole and error, several, ranks[failure.signature], error, failure))
    return [failure for *_, failure in sorted(turns, key=itemgetter(0, 1, 2, 3, 4))]


def _needs_another(proof: Failure) -> bool:
    """Return True if the smallest case has a node independent of the failing one."""
    node = proof.node
    others = [n for _, _, n in nodes_of(proof.case) if n is not node]
    read = {n.root for n in cuts.views_of(node)} | {s.root for s in node.src if s is not None}
    return any(n.root not in read and node.root not in {s.root for s in n.src if s is not None} for n in others)
