"""Judging what a case gave against what it should have given: which tensor took how much of which budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Bytes, Tensor

from .budget import Budget, budget_of, free_running
from .chain import Chain
from .compare import Difference, compare


@dataclass(frozen=True, slots=True)
class Judged:
    """One tensor after one step."""

    step: int
    tensor: Tensor
    difference: Difference
    budget: Budget

    @property
    def used(self) -> float:
        """Fraction of the budget taken; over 1 is wrong."""
        return self.budget.used(self.difference)


def judge_node(
    node: Tensor, expected: Bytes, found: Bytes, arithmetic: Arithmetic, *, step: int = 0, same: bool = True
) -> Judged:
    """Judge one node's value, all its sources being right; `arithmetic` and `same` as in `budget_of`."""
    difference = compare(node, expected, found, unordered=node.op == "TOP_K")
    return Judged(step, node, difference, budget_of(node, arithmetic, same=same))


def judge_step(
    case: Case,
    k: int,
    expected: Mapping[Tensor, Bytes],
    found: Mapping[Tensor, Bytes],
    arithmetic: Arithmetic,
    chain: Chain | None = None,
    worth: Mapping[Tensor, float] | None = None,
) -> Iterator[Judged]:
    """Judge outputs and caches after step `k`.

    A tensor that one node alone computed has that node's budget; one that a chain computed has the chain's.

    Args:
        case: says how far a trajectory may be off where it states a tolerance.
        k: which step.
        expected: packed bytes of outputs and caches.
        found: the same of the backend.
        arithmetic: in which `expected` was computed.
        chain: has followed the steps before; none where this one started from right caches.
        worth: of a recording, NMSE that the arithmetics of both sides are worth in a tensor of this step; what the case
            states is the least that is allowed.
    """
    chain = chain or Chain(arithmetic)
    chain.enter(case.steps[k].graph)
    stated = free_running(case.tolerance["nmse"]) if "nmse" in case.tolerance else None
    for t, want in expected.items():
        budget = chain.stated(t, stated) if stated else chain.budget(t)
        if worth is not None:
            budget = max(budget, chain.beside(t, worth.get(t, 0.0)), key=lambda b: b.nmse)
        yield Judged(k, t, compare(t, want, found[t], unordered=t.op == "TOP_K"), budget)


def judge_trajectory(
    case: Case,
    expected: Iterable[Mapping[Tensor, Bytes]],
    found: Iterable[Mapping[Tensor, Bytes]],
    arithmetic: Arithmetic,
    worth: Sequence[Mapping[Tensor, float]] | None = None,
    *,
    by_nodes: bool = False,
) -> Iterator[Judged]:
    """Judge every step of a free run, in which errors feed back through the caches.

    Arguments are those of `judge_step`, and `by_nodes` that of `Chain`.
    """
    chain = Chain(arithmetic, by_nodes=by_nodes)
    for k, (want, got) in enumerate(zip(expected, found, strict=True)):
        yield from judge_step(case, k, want, got, arithmetic, chain, None if worth is None else worth[k])
