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
from conformance.run.examine import divergent
from conformance.run.runner import Runner
from conformance.run.shrink import cuts, shrink, simplify
from conformance.run.shrink.workers import ShrinkWorkers
from conformance.run.signature import Signature
from conformance.suite.relations import relation

from . import ablate
from .ablate import Needs
from .failure import Failure, failure_of, size
from .features import BESIDE, BLOCK, OP, TAIL, YES, features, nodes_of
from .group import GONE, SEVERAL, UNSEEN, Apart, Group, Nodes, join_all, needing_alike, relation_rule
from .rule import Rule, is_size, meets, rule_of

EACH = 10.0
"""Minimum seconds to shrink one case."""
SHARE = 1 / 30
"""Share of the remaining time to shrink one case."""
AGAIN = 3
"""Attempts to reproduce a crash."""
NEEDED = 12
"""Maximum number of cases that run to find the necessary conditions of a failure."""
ALIKE = 3
"""Number of failures of one shape to shrink.

If all give the same rule, other failures of the shape get it without a search."""
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
        workers: ShrinkWorkers | None = None,
    ) -> None:
        self._workers = workers
        self._runner, self._spec, self._progress = runner, spec, progress
        self._whole = deadline
        self._deadline = deadline.within((1 - SPLITTING) * deadline.left())
        """That of the current phase."""
        self._needs_of: dict[frozenset[tuple[str, str]], Needs] = {}
        """Shape of a failure -> its necessary conditions."""
        self._shrunk_of: dict[frozenset[tuple[str, str]], list[Failure]] = {}
        """Shape of a failure -> the failures of that shape that were shrunk."""
        self._looked: set[frozenset[tuple[str, str]]] = set()
        self._apart: Apart = set()
        self.nodes = nodes
        self.groups: list[Group] = []

    def run(self, failures: Sequence[Failure]) -> list[Group]:
        """Return the groups; each failure is in at least one of them."""
        in_turn = _in_turn(failures)
        for words, do in (("failures", self._take), ("checked for hidden bugs", self._look_behind)):
            for n, failure in enumerate(in_turn, 1):
                try:
                    do(failure)
                except KeyboardInterrupt:
                    self._deadline = self._whole = OVER
                    self._progress("interrupted: the rest is grouped by what is known")
                    do(failure)
                found = counted(len(self.groups), "cause")
                self._progress(f"{n} of {len(in_turn)} {words}, {found}: {failure.case.id}")
        self._deadline = self._whole
        for group in [g for g in self.groups if g.failures]:
            self._split(group)
        self._join()
        self.groups = join_all(self.groups, self.nodes, set(), needing_alike)
        for g in self.groups:
            g.rule = self.nodes.simplest(g.rule, g.needs.alone)
        self._join()
        return self.groups

    def _late(self) -> bool:
        return self._deadline.is_over()

    def _join(self) -> None:
        self.groups = join_all([g for g in self.groups if g.failures], self.nodes, self._apart)

    def _take(self, failure: Failure) -> None:
        """Assign `failure` to a group."""
        group = self._explaining(failure) or self._cured_by(failure) or self._alike(failure)
        if group is None and self._late() and (group := self._nearest(failure)) is not None:
            group.unsure += 1
        (group or self._new(failure)).take(failure)
        if group is None:
            self._join()

    def _explaining(self, failure: Failure, apart: Needs | None = None) -> Group | None:
        """Return a group that explains `failure` and does not conflict with `apart`."""
        found = (g for g in self.groups if g.explains(failure, self.nodes))
        return next((g for g in found if apart is None or not apart.conflicts(g.needs)), None)

    def _alike(self, failure: Failure) -> Group | None:
        """Return the group of failures of the same shape if the first few are all in it."""
        known = self._shrunk_of.get(failure.shape, ())
        if len(known) < ALIKE:
            return None
        return next((g for g in self.groups if all(any(f is k for f in g.failures) for k in known)), None)

    def _cured_by(self, failure: Failure) -> Group | None:
        """Return a group of several ops whose rule, if removed, makes `failure` pass."""
        if failure.kind[1].startswith((Fault.STALE, Fault.EARLIER)) or relation.applies(failure.case):
            return None
        rows = failure.all if failure.at is None else [failure.features]
        return next((
            g
            for g in self.groups
            if len(g.rule.ops) >= SEVERAL and g.kind != failure.kind and any(map(g.rule.beside_op, rows))
            and g.rule.says and self._cured(failure, g.rule)
        ), None)  # fmt: skip

    def _cured(self, failure: Failure, rule: Rule) -> bool:
        """Return True if the case passes once no node meets `rule`."""
        if self._late():
            return False
        with suppress(ConformanceError):
            node = None if failure.at is None else failure.node
            made = ablate.drop(rule, self._recorded(failure.case), failure.result, node)
            return any(self._run(case).verdict is Verdict.PASS for case in made)
        return False

    def _run(self, case: Case, *, locates: bool = False) -> Result:
        """Return the result of one case in the current process."""
        with self._runner.quick(locates=locates, checks_stale_state=False):
            return self._runner.run(self._spec, [case])[0]

    def _recorded(self, case: Case) -> cuts.Recorded:
        reference = self._runner.oracle.reference_in(self._runner.backend(self._spec).arithmetic_in(case))
        return cuts.record(case, reference)

    def _nearest(self, failure: Failure) -> Group | None:
        """Return the only group with the same error, op and non-size conditions, else a catch-all."""
        alike = [g for g in self.groups if g.kind == failure.kind]
        if failure.at is None:
            return next((g for g in alike if not g.rule.ops), None)
        found = failure.features
        same = [g for g in alike if found[OP] in g.rule.ops]
        near = [g for g in same if all(meets(c, found) for c in g.rule.says)]
        return near[0] if len(near) == 1 else self._row(failure, UNSEEN) if same else None

    def _row(self, failure: Failure, message: str) -> Group:
        """Return the group of failures of which only `message` is known."""
        kind = (failure.result.verdict.value, message)
        group = next((g for g in self.groups if g.kind == kind), None)
        if group is None:
            group = Group(kind, Rule(()), failure, cut=message == UNSEEN)
            self.groups.append(group)
        return group

    def _needs(self, failure: Failure) -> Needs:
        """Find the conditions that a failure needs, once per shape; passing variants are evidence."""
        if failure.at is None or failure.signature.kind == Fault.OUTPUT:
            return Needs()
        if failure.shape in self._needs_of or self._late():
            return self._needs_of.get(failure.shape, Needs())
        left = NEEDED

        def passes(case: Case) -> bool | None:
            nonlocal left
            left -= 1
            if left < 0 or self._late():
                return None
            if (result := self._run(case)).verdict is Verdict.PASS:
                return True if self._learn([case]) else None
            likewise = result.verdict is failure.result.verdict
            return False if likewise and (not _may_hide(failure) or self._fails_likewise(case, failure)) else None

        found = Needs()
        with suppress(ConformanceError):
            own = rule_of(failure.case, failure.at[0], failure.node)
            tails = [
                Condition(f"src[{i}].{TAIL}", YES)
                for i, s in enumerate(failure.node.src[:1])
                if s is not None and s.ne[0] > BLOCK and s.ne[0] % BLOCK and len(failure.all) == 1
            ]
            rule = Rule.of(own.ops, [*own.rest, *tails])
            found = ablate.needs(rule, self._recorded(failure.case), failure.result, failure.node, passes)
            self.nodes.add_passed(found.right)
        self._needs_of[failure.shape] = found
        return found

    def _learn(self, passed: Sequence[Case]) -> bool:
        """Add the nodes of passing experiments that tell something; return True if there are any.

        Those whose expected values are all zero do not: a backend that writes nothing also gives zeros.
        """
        telling = [case for case in passed if self._tells(case)]
        self.nodes.add_near(features(case, k, n) for case in telling for k, _, n in nodes_of(case))
        return bool(telling)

    def _tells(self, case: Case) -> bool:
        with suppress(ConformanceError):
            arithmetic = self._runner.backend(self._spec).arithmetic_in(case)
            (expected,) = self._runner.oracle.expect([case], arithmetic)
            return any(x.any() for step in expected.steps for x in (*step.outputs.values(), *step.caches.values()))
        return False

    def _fails_likewise(self, case: Case, failure: Failure) -> bool:
        """Return True if `case` fails at the op of `failure` with the same error."""
        found = failure_of(case, self._run(case, locates=True))
        if found is None or found.at is None:
            return False
        return found.kind == failure.kind and found.features[OP] == failure.features[OP]

    def _new(self, failure: Failure) -> Group:
        """Return the group of a failure that no other group explains."""
        if self._late():
            rule = Rule(()) if failure.at is None else rule_of(failure.case, failure.at[0], failure.node)
            return self._add(Group(failure.kind, Rule.of(rule.ops, rule.says) if rule.ops else rule, failure, cut=True))
        alone = self._alone(failure)
        if alone is None:
            return self._row(failure, GONE)
        if (group := self._explaining(alone)) is not None:  # earlier cases had changed the error
            return group
        if relation.applies(failure.case):
            return self._of_relation(failure)
        needs = self._needs(alone)
        return self._needing(alone, needs) or self._shrunk(alone, needs)

    def _needing(self, failure: Failure, needs: Needs) -> Group | None:
        """Return the group of the same op, rule (without sizes) and necessary conditions."""
        if failure.at is None or not needs.alone:
            return None
        found = failure.features
        alike = (g for g in self.groups if found[OP] in g.rule.ops and g.fails_as(failure.kind))
        return next((
            g for g in alike if needs.alone == g.needs.alone and all(meets(c, found) for c in g.rule.says)
        ), None)  # fmt: skip

    def _add(self, group: Group) -> Group:
        self.groups.append(group)
        return group

    def _of_relation(self, failure: Failure) -> Group:
        """Return the group of the first run that fails alone; the relation's own if each passes."""
        with suppress(ConformanceError):
            for case in relation.cases_of(failure.case):
                found = failure_of(case, self._runner.run(self._spec, [case])[0])
                if found is not None:
                    return self._explaining(found) or self._new(found)
        return self._add(Group(failure.kind, relation_rule(relation.read(failure.case).name), failure))

    def _shrunk(self, failure: Failure, needs: Needs) -> Group:
        """Return the group of the smallest case outside all known rules that fails like `failure`."""
        proof, finished = failure, False
        with suppress(ConformanceError):
            proof, finished = self._smallest(failure, partial(self._outside, needs))
        same = proof.kind == failure.kind or (proof.is_flaky and failure.is_flaky)
        if not same and (known := self._explaining(proof)) is not None:
            return known
        rule = self._rule(proof, needs, finished)
        group = self._add(Group(proof.kind, rule, proof, needs=needs, cut=not finished))
        self._shrunk_of.setdefault(failure.shape, []).append(failure)
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
            more.add(Condition(BESIDE, YES))
        rule = Rule.of(rule.ops, rule.rest | more)
        loose = rule.but([c for c in rule.rest if is_size(c)])
        return rule if finished or not self.nodes.separates(loose, rule) else loose

    def _smallest(self, failure: Failure, outside: Callable[[Case, Result], bool]) -> tuple[Failure, bool]:
        """Shrink `failure`; return a smallest case that fails alike when fresh, True if finished.

        Wrong numbers and memory corruption depend on what ran before, so a smallest case that passes alone is no proof.
        """
        if failure.is_flaky:
            self._runner.restart()
            if self._workers is not None:
                self._workers.restart()
        deadline = self._deadline.within(max(EACH, SHARE * self._deadline.left()))
        with self._runner.quick(locates=True, checks_stale_state=len(failure.case.steps) > 1 or not failure.is_flaky):
            small = shrink(
                self._runner, self._spec, failure.case, deadline=deadline, accept=outside, workers=self._workers
            )
        self._learn(small.passed)
        result = small.result if not failure.is_flaky and failure.at is not None else self._afresh(small.case)
        found = failure_of(small.case, result)
        if found is None or not (failure.signature.covers(found.signature) or (found.is_flaky and failure.is_flaky)):
            return failure, False
        return found, small.finished

    def _outside(self, needs: Needs, case: Case, result: Result) -> bool:
        """Return True if no known rule explains `case` and it has the necessary conditions."""
        failure = failure_of(case, result)
        if failure is None or self._explaining(failure, needs) is not None:
            return False
        return not needs.some_of or (failure.at is not None and needs.met(failure.features))

    def _alone(self, failure: Failure) -> Failure | None:
        """Return how the case fails in a fresh process, a crash after some tries; None if it passes."""
        self._runner.restart()
        for _ in range(AGAIN if failure.result.verdict is Verdict.CRASH else 1):
            try:
                found = failure_of(failure.case, self._seen_alone(failure.case))
            except ConformanceError:  # the run proves nothing, so the failure stands
                return failure
            if found is not None:
                return found
        return None

    def _afresh(self, case: Case) -> Result:
        """Return the result of a case in a fresh process."""
        self._runner.restart()
        return self._seen_alone(case)

    def _seen_alone(self, case: Case) -> Result:
        with self._runner.quick(locates=True, checks_stale_state=len(case.steps) > 1):
            return self._runner.run(self._spec, [case])[0]

    def _split(self, group: Group) -> None:
        """Move failures whose necessary conditions conflict with those of the proof to new groups."""
        parts: list[tuple[Needs, list[Failure]]] = []
        for failure in sorted(group.failures, key=size):
            needs = self._needs(failure)
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
                proof, finished = self._smallest(hidden, partial(self._outside, needs := self._needs(hidden)))
                if self._explaining(proof) is None:
                    rule = self._rule(proof, needs, finished)
                    self._add(Group(proof.kind, rule, proof, [failure], needs, cut=not finished))
                    self._join()

    def _hidden(self, failure: Failure) -> Iterator[Failure]:
        """Yield unexplained failures near an explained one: other nodes of its case, or a variant."""
        if self._late():
            return
        if _may_hide(failure):
            yield from self._beside(failure)
        elif failure.at is not None and self._is_new(failure):
            made = itertools.islice(self._variants(failure), VARIANTS)
            found = (failure_of(case, self._run(case, locates=True)) for case in made)
            alike = (f for f in found if f is not None and f.kind == failure.kind)
            yield from itertools.islice((f for f in alike if self._explaining(f) is None), 1)

    def _is_new(self, failure: Failure) -> bool:
        """Return True if no failure of this shape was examined before; marks the shape as examined."""
        new = failure.shape not in self._looked
        self._looked.add(failure.shape)
        return new

    def _beside(self, failure: Failure) -> Iterator[Failure]:
        """Yield other nodes that are wrong alone on the run's values and that no rule explains."""
        wrong, ran = divergent(self._runner.tested(self._spec), failure.case)
        for k, node in wrong:
            index = failure.case.steps[k].graph.nodes.index(node)
            at = Failure(failure.case, failure.result, failure.signature, (k, index))
            known = any(g.is_flaky and g.rule.holds(at.features) for g in self.groups if g.rule.ops)
            if known or self._late() or not self._is_new(at):
                continue
            with suppress(ConformanceError):
                case = cuts.keep(cuts.Recorded(failure.case, ran), {k: [*cuts.views_of(node), node]})
                alone = failure_of(case, self._run(case, locates=True))
                if alone is not None and alone.at is not None and self._explaining(alone) is None:
                    yield alone

    def _variants(self, failure: Failure) -> Iterator[Case]:
        """Yield cases one step simpler than the failing one, largest first, that meet no known rule."""
        recorded = self._recorded(failure.case)
        passes = (simplify.parameters, simplify.types, simplify.dims, cuts.nodes)
        made = [c for make in passes for c in itertools.islice(make(recorded, failure.result), 200)]
        for case in filter(cuts.is_legal, sorted(made, key=simplify.elements, reverse=True)):
            rows = [features(case, k, n) for k, _, n in nodes_of(case)]
            if not any(g.rule.ops and any(map(g.rule.holds, rows)) for g in self.groups):
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


def _may_hide(failure: Failure) -> bool:
    """Return True if the case has other nodes than the first wrong one, and they ran."""
    if failure.result.verdict is not Verdict.FAIL or relation.applies(failure.case):
        return False
    return len(list(itertools.islice(nodes_of(failure.case), 2))) > 1


def _needs_another(proof: Failure) -> bool:
    """Return True if the smallest case has a node independent of the failing one."""
    node = proof.node
    others = [n for _, _, n in nodes_of(proof.case) if n is not node]
    read = {n.root for n in cuts.views_of(node)} | {s.root for s in node.src if s is not None}
    return any(n.root not in read and node.root not in {s.root for s in n.src if s is not None} for n in others)
