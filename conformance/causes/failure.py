"""A failing case with its signature and failing node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from conformance.case.case import Case
from conformance.ggml.tensor import Tensor
from conformance.judge.evidence import Fault, Place
from conformance.judge.message import by_damage
from conformance.judge.verdict import Result, Verdict
from conformance.run.shrink import simplify
from conformance.run.signature import Signature, signature_of
from conformance.suite.relations import relation

from .features import OP, Features, features, nodes_of

Kind = tuple[str, str]
"""How a case fails: the verdict, and the error message or the kind of wrong numbers."""


Shape = frozenset[tuple[str, str]]
"""Kind and node properties of a failure, without sizes; one shape is probably one rule."""


@dataclass(frozen=True)
class Failure:
    """A failing case with its failing node, if there is one."""

    case: Case
    result: Result
    signature: Signature
    at: tuple[int, int] | None
    """Step index and node index of the failing node."""

    @property
    def kind(self) -> Kind:
        """The verdict and message; wrong numbers of a relation include its name."""
        wrong, kind = self.result.verdict is Verdict.FAIL, self.signature.kind
        if wrong and self.at is not None:
            kind = kind.partition(",")[2].lstrip()
        elif wrong and relation.applies(self.case):
            kind = f"relation {relation.read(self.case).name}, {kind}"
        elif wrong and self.among:
            kind = f"{kind}, first at {self.among}"
        return self.result.verdict.value, kind

    @property
    def among(self) -> str:
        """Op of the first wrong node if no node alone is wrong; empty if unknown."""
        where = self.result.where
        graph = where is not None and where.fault is Fault.GRAPH and self.at is None
        return where.op if where is not None and graph and where.op != "NONE" else ""

    @property
    def is_flaky(self) -> bool:
        """True for wrong numbers and memory corruption."""
        return is_flaky(*self.kind)

    @property
    def may_hide(self) -> bool:
        """True if the case has other nodes than the first wrong one, and they ran."""
        if self.result.verdict is not Verdict.FAIL or relation.applies(self.case):
            return False
        return len(list(itertools.islice(nodes_of(self.case), 2))) > 1

    @cached_property
    def node(self) -> Tensor:
        """The failing node."""
        assert self.at is not None
        return self.case.steps[self.at[0]].graph.nodes[self.at[1]]

    @cached_property
    def features(self) -> Features:
        """Properties of the failing node."""
        assert self.at is not None
        return features(self.case, self.at[0], self.node)

    @cached_property
    def all(self) -> Sequence[Features]:
        """Properties of every node that computes."""
        return [features(self.case, k, n) for k, _, n in nodes_of(self.case)]

    @property
    def shape(self) -> Shape:
        """The kind and node properties (or all ops), without sizes; equal for similar failures."""
        rows = ({(OP, f[OP]) for f in self.all} if self.at is None else self.features.items()) | {self.kind}
        return frozenset((k, v if not v.isdigit() else "1" if v == "1" else "n") for k, v in rows)


def is_flaky(verdict: str, message: str) -> bool:
    """Return True for wrong numbers and memory corruption; a bug may show as either, at random."""
    return verdict == Verdict.FAIL or (verdict == Verdict.CRASH and by_damage(message))


def failure_of(case: Case, result: Result) -> Failure | None:
    """Return `result` as a failure; None if it did not fail."""
    signature = signature_of(result)
    return None if signature is None else Failure(case, result, signature, _at(case, result))


def _at(case: Case, result: Result) -> tuple[int, int] | None:
    """Return step and node index of the failing node, or else of the only computing node."""
    found = result.where or Place(Fault.UNLOCATED)
    k, i = found.step, found.node
    if relation.applies(case) or found.fault in {Fault.STALE, Fault.EARLIER, Fault.HANDOVER}:
        return None
    if k is None or i is None or found.fault is not Fault.NODE:
        only = list(itertools.islice(nodes_of(case), 2)) if len(case.steps) == 1 else []
        return only[0][:2] if len(only) == 1 else None
    return (k, i) if k < len(case.steps) and i < len(case.steps[k].graph) else None


def size(failure: Failure) -> tuple[bool, bool, int, str]:
    """Return a sort key: failing nodes first, those of one step before others; then by size."""
    case = failure.case
    return failure.at is None, len(case.steps) > 1, simplify.elements(case), case.id
