"""A failing case with its signature and the node at fault."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from conformance.case.case import Case
from conformance.ggml.tensor import Tensor
from conformance.judge.evidence import Fault, Place
from conformance.judge.verdict import Result, Verdict
from conformance.run.shrink import simplify
from conformance.run.signature import Signature, by_damage, signature_of
from conformance.suite.relations import claim

from .features import Features, features, nodes_of


@dataclass(frozen=True)
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
            wrong, kind = self.result.verdict is Verdict.FAIL, self.signature.kind
            return self.result.verdict.value, kind.partition(",")[2].lstrip() if wrong else kind
        related = "relation, " if self.result.verdict is Verdict.FAIL and claim.applies(self.case) else ""
        return self.result.verdict.value, related + self.signature.kind

    @property
    def by_chance(self) -> bool:
        """Whether it is how a wrong extent shows, by chance of sizes: wrong numbers, or damaged memory."""
        return by_chance(*self.kind)

    @property
    def kept(self) -> bool:
        """Whether what the backend kept is at fault, and not how a step is computed."""
        return self.result.where is not None and self.result.where.fault is Fault.STALE

    @cached_property
    def node(self) -> Tensor:
        """The one at fault."""
        assert self.at is not None
        return self.case.steps[self.at[0]].graph.nodes[self.at[1]]

    @cached_property
    def features(self) -> Features:
        """Of the node at fault."""
        assert self.at is not None
        return features(self.case, self.at[0], self.node)

    @cached_property
    def all(self) -> Sequence[Features]:
        """Of every node that computes."""
        return [features(self.case, k, n) for k, _, n in nodes_of(self.case)]


def may_be(failure: Failure, found: Failure) -> bool:
    """Whether what was found may be the same failure: the same signature, or both go by chance of sizes."""
    by_chance = failure.by_chance and found.by_chance and found.at is not None
    return failure.signature.covers(found.signature) or by_chance


def by_chance(verdict: str, message: str) -> bool:
    """Whether it is how a wrong extent shows, by chance of sizes: wrong numbers, or damaged memory."""
    return verdict == Verdict.FAIL or (verdict == Verdict.CRASH and by_damage(message))


def failure_of(case: Case, result: Result) -> Failure | None:
    """`result` as a failure; None where it is none."""
    signature = signature_of(result)
    if signature is None:
        return None
    return Failure(case, result, signature, _at(case, result))


def _at(case: Case, result: Result) -> tuple[int, int] | None:
    """Step and index of the node at fault; the one that computes, where no other does."""
    found = result.where or Place(Fault.UNLOCATED)
    k, i = found.step, found.node
    if claim.applies(case) or found.fault in {Fault.STALE, Fault.EARLIER, Fault.HANDOVER}:
        return None
    if k is None or i is None or found.fault is not Fault.NODE:
        only = list(itertools.islice(nodes_of(case), 2)) if len(case.steps) == 1 else []
        return only[0][:2] if len(only) == 1 else None
    return (k, i) if k < len(case.steps) and i < len(case.steps[k].graph) else None


def size(failure: Failure) -> tuple[bool, bool, int, str]:
    """Single nodes first, then trajectories, then what no node is at fault in; of each the smallest."""
    case = failure.case
    return failure.at is None, len(case.steps) > 1, simplify.elements(case), case.id
