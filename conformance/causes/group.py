"""Failures of one backend, grouped by cause.

The smallest failing case that no known form explains is shrunk, outside of all known forms: what is left is the form of
another cause, and every failure whose node meets it is explained. An explained failure may hide a second fault, so
variants of it that meet no known form run, too; one that still fails is shrunk likewise.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import inf
from operator import itemgetter

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import Result, Verdict
from conformance.run.divergence import KEPT, NODE
from conformance.run.runner import Runner
from conformance.run.shrink import cuts, shrink, simplify
from conformance.run.signature import Signature, signature_of
from conformance.suite.relations import claim

from .cause import Cause, Condition
from .features import OP, STEP, Features, features, nodes_of
from .form import Form, common, form_of, meets, of_types, type_of, without

EACH = 10.0
"""Seconds to shrink one case."""
JOINED = 0.6
"""How much of the share of failures may be lost where two groups are joined."""
FEW = 3
"""Right nodes without which nobody can say that a condition tells nothing."""
SEVERAL = 3
"""Types from which on what they share is at fault, and not each."""
VARIANTS = 12
"""Variants that run of one explained failure, those nearest to it first."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing case with the node at fault, where one is."""

    case: Case
    result: Result
    signature: Signature
    at: tuple[int, int] | None
    """Step and index of the node."""

    @property
    def kind(self) -> tuple[str, str]:
        """Failures of another kind have another cause."""
        if self.at is not None:
            message = "" if self.result.verdict is Verdict.FAIL else self.signature.kind
            return self.result.verdict.value, message
        related = "relation, " if claim.applies(self.case) else ""
        return self.result.verdict.value, related + self.signature.kind

    def features(self) -> Features:
        """Of the node at fault."""
        assert self.at is not None
        k, i = self.at
        return features(self.case, k, self.case.steps[k].graph.nodes[i])


@dataclass(slots=True)
class Group:
    """What one fault explains."""

    kind: tuple[str, str]
    form: Form
    proof: Failure
    """The smallest case that shows it."""
    failures: list[Failure] = field(default_factory=list)

    def explains(self, failure: Failure) -> bool:
        """Whether the fault makes `failure`: at its node; or, of one without, wherever in it."""
        if failure.at is not None:
            return failure.kind == self.kind and self.form.holds(failure.features())
        if failure.kind == self.kind and not self.form.ops:
            return True
        if not self.form.ops or not self.kind[0] == failure.result.verdict == Verdict.FAIL:
            return False
        if failure.signature.kind.startswith(KEPT):  # right on a backend opened anew, so no kernel is at fault
            return False
        case = failure.case
        return any(self.form.holds(features(case, k, n)) for k, _, n in nodes_of(case))


def failure_of(case: Case, result: Result) -> Failure | None:
    """`result` as a failure; None where it is none."""
    signature = signature_of(result)
    if signature is None:
        return None
    return Failure(case, result, signature, _at(case, result))


def _at(case: Case, result: Result) -> tuple[int, int] | None:
    found = result.first_divergence or result.place or {}
    k, i = found.get("step"), found.get("node")
    if k is None or i is None or found.get("kind", NODE) != NODE or claim.applies(case):
        return None
    return (k, i) if k < len(case.steps) and i < len(case.steps[k].graph) else None


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
        self._end = clock() + seconds
        self._looked: set[frozenset[tuple[str, str]]] = set()
        self.groups: list[Group] = []

    def run(self, failures: Sequence[Failure], nodes: Nodes) -> list[Group]:
        """The groups; each failure is in one of them at least."""
        for n, failure in enumerate(sorted(failures, key=_size), 1):
            try:
                self._take(failure)
            except KeyboardInterrupt:
                self._end = -inf
                self._progress("interrupted: the rest is grouped by what is known")
                self._take(failure)
            self._progress(f"{n} of {len(failures)} failures, {len(self.groups)} forms: {failure.case.id}")
        return self._merged(nodes)

    def _take(self, failure: Failure) -> None:
        group = self._explaining(failure)
        if group is None:
            group = self._new(failure)
        elif (variant := self._hidden(failure)) is not None:
            self._new(variant).failures.append(failure)
        group.failures.append(failure)

    def _late(self) -> bool:
        return self._clock() > self._end

    def _explaining(self, failure: Failure) -> Group | None:
        return next((g for g in self.groups if g.explains(failure)), None)

    def _outside(self, case: Case, result: Result) -> bool:
        """Whether no known form explains the failure of `case`."""
        failure = failure_of(case, result)
        return failure is not None and self._explaining(failure) is None

    def _new(self, failure: Failure) -> Group:
        """The group of a failure that no other explains."""
        proof = failure
        if not self._late():
            with suppress(ConformanceError):
                small = shrink(
                    self._runner, self._spec, failure.case, time_budget=min(EACH, self._end - self._clock()),
                    accept=self._outside,
                )  # fmt: skip
                proof = failure_of(small.case, small.result) or failure
        group = Group(failure.kind, _form(proof), proof)
        self.groups.append(group)
        return group

    def _hidden(self, failure: Failure) -> Failure | None:
        """A variant of an explained failure that fails although nothing known explains it; None where none was found,
        or one like it was looked at before.
        """
        if failure.at is None or self._late():
            return None
        shape = frozenset((k, _coarse(v)) for k, v in failure.features().items())
        if shape in self._looked:
            return None
        self._looked.add(shape)
        with suppress(ConformanceError):
            for case in itertools.islice(self._variants(failure), VARIANTS):
                (result,) = self._runner.run(self._spec, [case])
                found = failure_of(case, result)
                if found is not None and found.kind == failure.kind and self._explaining(found) is None:
                    return found
        return None

    def _variants(self, failure: Failure) -> Iterator[Case]:
        """Cases a step simpler than the failing one, the largest first, that meet no known form where it fails."""
        reference = self._runner.oracle.reference_in(self._runner.backend(self._spec).arithmetic_in(failure.case))
        recorded = cuts.record(failure.case, reference)
        passes = (simplify.parameters, simplify.types, simplify.dims, cuts.nodes)
        made = [c for make in passes for c in itertools.islice(make(recorded, failure.result), 200)]
        for case in sorted(made, key=simplify.elements, reverse=True):
            if not any(g.form.holds(features(case, k, n)) for g in self.groups for k, _, n in nodes_of(case)):
                yield case

    def _merged(self, nodes: Nodes) -> list[Group]:
        """Groups, joined as long as what two forms share tells failures from passes nearly as well as they do."""
        groups = [g for g in self.groups if g.failures]
        for g in groups:
            g.form = without(g.form, partial(nodes.always, g.form.ops))
        found = True
        while found:
            found = False
            for a, b in itertools.combinations(groups, 2):
                form = common(a.form, b.form) if a.kind == b.kind else None
                if form is not None and nodes.share(form) >= JOINED * min(nodes.share(a.form), nodes.share(b.form)):
                    a.form, a.failures, found = form, a.failures + b.failures, True
                    groups.remove(b)
                    break
        return _of_types(groups)


def _of_types(groups: Sequence[Group]) -> list[Group]:
    """Groups of `SEVERAL` types, each of which fails by itself, are one: what these types share is at fault."""
    kinds = Counter(g.kind for g in groups if type_of(g.form))
    joined: list[Group] = []
    for g in groups:
        first = next((j for j in joined if j.kind == g.kind and type_of(j.form)), None)
        if first is None or not type_of(g.form) or kinds[g.kind] < SEVERAL:
            joined.append(g)
        else:
            first.form, first.failures = of_types([first.form, g.form]), first.failures + g.failures
    return joined


class Nodes:
    """The nodes of failures, and those of cases that pass, by op."""

    def __init__(self, failures: Iterable[Failure], passed: Iterable[Case]) -> None:
        self._failed = _by_op(f.features() for f in failures if f.at is not None)
        self._passed = _by_op(features(case, k, n) for case in passed for k, _, n in nodes_of(case))

    def always(self, ops: Sequence[str], condition: Condition) -> bool:
        """Whether every node of `ops` meets the condition, and enough of them are right to say so."""
        right = [f for op in ops for f in self._passed.get(op, ())]
        wrong = [f for op in ops for f in self._failed.get(op, ())]
        return len(right) >= FEW and all(meets(condition, f) for f in (*right, *wrong))

    def share(self, form: Form) -> float:
        """Failures among the nodes that meet `form`."""
        failed, passed = (self.count(form, side) for side in (self._failed, self._passed))
        return failed / max(1, failed + passed)

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


def _size(failure: Failure) -> tuple[bool, bool, int, str]:
    case = failure.case
    return failure.at is None, len(case.steps) > 1, simplify.elements(case), case.id


def _coarse(value: str) -> str:
    return ("1" if value == "1" else "n") if value.isdigit() else value


def _form(proof: Failure) -> Form:
    if proof.at is None:
        steps = len(proof.case.steps)
        return Form((Condition(STEP, "first"),) if steps == 1 else ())
    k, i = proof.at
    return form_of(proof.case, k, proof.case.steps[k].graph.nodes[i])


def cause_of(group: Group, backend: str, nodes: Nodes, seen: str = "") -> Cause:
    """The record of a group; `seen` says how it came again."""
    result, form = group.proof.result, group.form
    failed = sorted(group.failures, key=_size)
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
    how = "wrong numbers" if verdict == Verdict.FAIL else f"{verdict}: {message}"
    return f"{what}{where}: {how} ({failed} fail; {passed} such nodes are right)"
