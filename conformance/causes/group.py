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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from conformance.run.divergence import KEPT, NODE, OUTPUT
from conformance.run.runner import Runner
from conformance.run.shrink import cuts, shrink, simplify
from conformance.run.signature import Signature, signature_of
from conformance.suite.relations import claim

from .cause import Cause, Condition
from .features import OP, Features, features, nodes_of
from .form import SEVERAL, Form, common, form_of, meets, of_types, type_of, without

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
AGAIN = 3
"""How often a crash gets the chance."""
FEW = 3
"""Right nodes without which nobody can say that a condition tells nothing."""
BY_CHANCE = frozenset({Verdict.FAIL, Verdict.CRASH})
"""How a wrong extent shows, by chance of sizes."""
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
            wrong = self.result.verdict is Verdict.FAIL
            message = self.signature.kind.removeprefix(NODE).lstrip(", ") if wrong else self.signature.kind
            return self.result.verdict.value, message
        related = "relation, " if self.result.verdict is Verdict.FAIL and claim.applies(self.case) else ""
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
    """Of `proof`."""
    form: Form
    proof: Failure
    """The smallest case that shows it."""
    failures: list[Failure] = field(default_factory=list)
    unsure: int = 0
    """Of the failures, those that nothing known explains: they are here as time was over, and this is the nearest."""

    def explains(self, failure: Failure) -> bool:
        """Whether the fault makes `failure`: at its node; or, of one without, wherever in it."""
        if not self.fails_as(failure):
            return False
        if failure.at is not None:
            if not self.form.ops:
                return failure.kind == self.kind
            found = failure.features()
            spreads = self.form.spreads and (failure.kind == self.kind or self.form.of_extent)
            return self.form.holds(found) or (spreads and self.form.beside(found))
        if not self.form.ops:
            return failure.kind == self.kind
        if failure.signature.kind.startswith(KEPT):  # right on a backend opened anew, so no kernel is at fault
            return False
        anywhere = self.form.spreads and failure.result.verdict is Verdict.CRASH
        holds = self.form.beside if anywhere else self.form.holds
        return any(holds(features(failure.case, k, n)) for k, _, n in nodes_of(failure.case))

    def fails_as(self, failure: Failure) -> bool:
        """Whether the fault may look like `failure`: by the same words; wrong numbers anywhere; or, where an extent is
        wrong, wrong numbers and damage.
        """
        if failure.kind == self.kind or (self.form.of_extent and {self.kind[0], failure.kind[0]} <= BY_CHANCE):
            return True
        return self.kind[0] == failure.kind[0] == Verdict.FAIL


def failure_of(case: Case, result: Result) -> Failure | None:
    """`result` as a failure; None where it is none."""
    signature = signature_of(result)
    if signature is None:
        return None
    return Failure(case, result, signature, _at(case, result))


def _at(case: Case, result: Result) -> tuple[int, int] | None:
    found = result.first_divergence or result.place or {}
    k, i = found.get("step"), found.get("node")
    whole = found.get("kind", NODE) != NODE or not found.get("alone", True) or claim.applies(case)
    if k is None or i is None or whole:
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
        self._apart: set[tuple[tuple[str, str], Form, tuple[str, str], Form]] = set()
        """Pairs of groups that are not one."""
        self._nodes: Nodes | None = None
        self.groups: list[Group] = []

    def run(self, failures: Sequence[Failure], nodes: Nodes) -> list[Group]:
        """The groups; each failure is in one of them at least. What nothing known explains comes first, as it is what
        time may not suffice for; then what an explained failure may hide.
        """
        self._nodes = nodes
        explained = []
        for n, failure in enumerate(_in_turn(failures), 1):
            if self._interruptible(self._take, failure):
                explained.append(failure)
            self._join(nodes)
            self._progress(f"{n} of {len(failures)} failures, {len(self.groups)} forms: {failure.case.id}")
        for n, failure in enumerate(explained, 1):
            if self._late():
                break
            self._interruptible(self._look_behind, failure)
            self._join(nodes)
            self._progress(f"{n} of {len(explained)} looked behind, {len(self.groups)} forms: {failure.case.id}")
        return self._merged(nodes)

    def _interruptible(self, do: Callable[[Failure], _T], failure: Failure) -> _T:
        """What `do` gives of `failure`; Ctrl-C ends the time, and `do` gives what it can without."""
        try:
            return do(failure)
        except KeyboardInterrupt:
            self._end = -inf
            self._progress("interrupted: the rest is grouped by what is known")
            return do(failure)

    def _take(self, failure: Failure) -> bool:
        """Put `failure` into a group; whether one that was known explains it."""
        group = self._explaining(failure)
        explained = group is not None
        if group is None and self._late() and (group := self._nearest(failure)) is not None:
            group.unsure += 1
        if group is None:
            group = self._new(failure)
        group.failures.append(failure)
        return explained

    def _look_behind(self, failure: Failure) -> None:
        """A group for what an explained failure hides."""
        variant = self._hidden(failure)
        if variant is None:
            return
        with suppress(ConformanceError):
            proof = self._shrunk(variant)
            if proof is not None and self._explaining(proof) is None:
                self.groups.append(Group(proof.kind, _form(proof), proof, [failure]))

    def _late(self) -> bool:
        return self._clock() > self._end

    def _explaining(self, failure: Failure) -> Group | None:
        """A group whose fault makes `failure`; at a node, one whose form tells something."""
        return next((g for g in self.groups if g.explains(failure) and (failure.at is None or self._tells(g))), None)

    def _tells(self, group: Group) -> bool:
        """Whether the form of a group tells failures from right nodes."""
        return self._nodes is None or self._nodes.share(group.form) >= TELLS

    def _nearest(self, failure: Failure) -> Group | None:
        """Where nothing can be shrunk any more: the group that fails alike, at the same op if at one."""
        alike = [g for g in self.groups if g.kind == failure.kind and bool(g.form.ops) == (failure.at is not None)]
        if failure.at is None:
            return next(iter(alike), None)
        found = failure.features()
        same = [g for g in alike if found[OP] in g.form.ops]
        return max(same, key=lambda g: sum(meets(c, found) for c in g.form.rest), default=None)

    def _outside(self, case: Case, result: Result) -> bool:
        """Whether no known form explains the failure of `case`."""
        failure = failure_of(case, result)
        return failure is not None and self._explaining(failure) is None

    def _new(self, failure: Failure) -> Group:
        """The group of a failure that no other explains."""
        proof = failure
        if not self._late():
            alone = self._alone(failure)
            if alone is None:
                return self._gone(failure)
            if not _may_be(failure, alone):  # what ran before made it another
                if (group := self._explaining(alone)) is not None:
                    return group
                proof = failure = alone
            with suppress(ConformanceError):
                proof = self._shrunk(failure) or failure
        known = failure.signature.covers(proof.signature) and failure.signature.kind != OUTPUT
        form = _form(proof) if failure.at is None else _form(proof).with_types(failure.features())
        group = Group(failure.kind if known else proof.kind, form, proof)
        self.groups.append(group)
        return group

    def _alone(self, failure: Failure) -> Failure | None:
        """How the case fails where nothing ran before, a crash after some times; None where it does not."""
        self._runner.renew()
        for _ in range(AGAIN if failure.result.verdict is Verdict.CRASH else 1):
            try:
                (result,) = self._runner.run(self._spec, [failure.case])
            except ConformanceError:  # nobody can say
                return failure
            if (found := failure_of(failure.case, result)) is not None:
                return found
        return None

    def _gone(self, failure: Failure) -> Group:
        """The group of what did not come again: no form says why it failed, as what ran before it did."""
        kind = failure.result.verdict.value, GONE
        group = next((g for g in self.groups if g.kind == kind), None)
        if group is None:
            group = Group(kind, Form(()), failure)
            self.groups.append(group)
        return group

    def _shrunk(self, failure: Failure) -> Failure | None:
        """The smallest case outside of all known forms that fails as `failure` does, in a process where nothing ran
        before: a backend that damages memory makes cases fail in its process that are right. None where none was found;
        ConformanceError if `failure` does not come again.
        """
        self._runner.renew()
        left = self._end - self._clock()
        small = shrink(
            self._runner, self._spec, failure.case, time_budget=min(max(EACH, SHARE * left), left), accept=self._outside
        )
        self._runner.renew()
        (result,) = self._runner.run(self._spec, [small.case])
        found = failure_of(small.case, result)
        return found if found is not None and _may_be(failure, found) else None

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

    def _join(self, nodes: Nodes, *, last: bool = False) -> None:
        """Join groups as long as what two forms share tells failures from passes nearly as well as they do. The `last`
        time also errors of one or two ops which nothing explains but an extent, as the words go by the op.
        """
        while (pair := self._alike(nodes, last=last)) is not None:
            a, b, form = pair
            first, second = sorted(
                (a, b), key=lambda g: (a.kind != b.kind and g.kind[0] != Verdict.FAIL, _size(g.proof))
            )
            a.kind, a.proof, a.form, a.failures = first.kind, first.proof, form, first.failures + second.failures
            a.unsure = first.unsure + second.unsure
            self.groups.remove(b)

    def _alike(self, nodes: Nodes, *, last: bool) -> tuple[Group, Group, Form] | None:
        for a, b in itertools.combinations(self.groups, 2):
            key = (a.kind, a.form, b.kind, b.form)
            if key not in self._apart:
                form = _joint(a, b, last=last)
                least = JOINED * max(nodes.share(a.form), nodes.share(b.form))
                if form is not None and nodes.share(form) >= least:
                    return a, b, form
                if (
                    (a.kind, a.form.ops) == (b.kind, b.form.ops)
                    and a.form.ops
                    and not (self._tells(a) or self._tells(b))
                ):
                    return a, b, a.form if len(a.form.rest) < len(b.form.rest) else b.form
                self._apart.add(key)
        return None

    def _merged(self, nodes: Nodes) -> list[Group]:
        """The groups without conditions that tell nothing, joined once more."""
        self.groups = [g for g in self.groups if g.failures]
        for g in self.groups:
            g.form = without(g.form, partial(nodes.always, g.form.ops))
        self._join(nodes)
        self.groups = _of_types(self.groups)
        self._apart.clear()
        self._join(nodes, last=True)
        return self.groups


def _may_be(failure: Failure, found: Failure) -> bool:
    """Whether what was found may be the same failure: the same signature, or both go by chance of sizes."""
    by_chance = {failure.result.verdict, found.result.verdict} <= BY_CHANCE
    return failure.signature.covers(found.signature) or (by_chance and found.at is not None)


def _joint(a: Group, b: Group, *, last: bool) -> Form | None:
    """What two groups share, if one fault may be both: they fail alike, or by chance of sizes as extents do. A type is
    what two ops share only at the `last`, when it is known which types each fails with.
    """
    form = common(a.form, b.form)
    if form is None or (not last and a.form.ops != b.form.ops and type_of(form)):
        return None
    verdicts = {a.kind[0], b.kind[0]}
    if a.kind == b.kind or (a.form.same_but_sizes(b.form) and verdicts == {Verdict.FAIL}):
        return form
    wrong, error = sorted((a, b), key=lambda g: g.kind[0] != Verdict.FAIL)
    of_shapes = error.form.only_of_extent and _OF_SHAPES.search(error.kind[1]) is not None
    by_words = last and wrong.kind[0] == Verdict.FAIL and wrong.form.spreads and of_shapes
    return form if form.of_extent and (verdicts <= BY_CHANCE or by_words) else None


def _of_types(groups: Sequence[Group]) -> list[Group]:
    """Groups of one op and of `SEVERAL` types, each of which fails by itself, are one: what these types share is at
    fault. Two do where an error says the same.
    """
    kinds = Counter((g.kind, op) for g in groups if type_of(g.form) for op in g.form.ops)
    joined: list[Group] = []
    for g in groups:
        many = {op for op in g.form.ops if kinds[g.kind, op] >= (SEVERAL if g.kind[0] == Verdict.FAIL else 2)}
        alike = (j for j in joined if j.kind == g.kind and type_of(j.form) and many.intersection(j.form.ops))
        first = next(alike, None) if type_of(g.form) else None
        if first is None:
            joined.append(g)
        else:
            first.form, first.failures = of_types([first.form, g.form]), first.failures + g.failures
            first.unsure += g.unsure
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


def _in_turn(failures: Sequence[Failure]) -> list[Failure]:
    """Single nodes, then trajectories, then what no node is at fault in; of each the first of every signature, then the
    second of every one, and so on, the smallest first: time may end before all are looked at.
    """
    ranks: Counter[Signature] = Counter()
    turns = []
    for failure in sorted(failures, key=_size):
        ranks[failure.signature] += 1
        turns.append((_size(failure)[:2], ranks[failure.signature], failure))
    return [failure for *_, failure in sorted(turns, key=itemgetter(0, 1))]


def _size(failure: Failure) -> tuple[bool, bool, int, str]:
    case = failure.case
    return failure.at is None, len(case.steps) > 1, simplify.elements(case), case.id


def _coarse(value: str) -> str:
    return ("1" if value == "1" else "n") if value.isdigit() else value


def _form(proof: Failure) -> Form:
    if proof.at is None:
        return Form(())
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
    how = f"wrong numbers{f' ({message})' if message else ''}" if verdict == Verdict.FAIL else f"{verdict}: {message}"
    unsure = f"; {group.unsure} of them put here as time was over" if group.unsure else ""
    return f"{what}{where}: {how} ({failed} fail{unsure}; {passed} such nodes are right)"
