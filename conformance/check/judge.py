"""Judging what a case gave against what it should have given: which tensor took how much of which budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from conformance.cgraph.arithmetic import Arithmetic
from conformance.cgraph.case import Case, writes_in_place
from conformance.cgraph.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor

from .budget import Budget, budget_of, free_running, propagated
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
    case: Case, k: int, expected: Mapping[Tensor, Bytes], found: Mapping[Tensor, Bytes], arithmetic: Arithmetic
) -> Iterator[Judged]:
    """Judge outputs and caches after step `k` of a free run.

    A tensor that one node alone computed has that node's budget; one that a chain computed has the chain's.
    """
    for t, want in expected.items():
        budget = free_running(case.tolerance["nmse"]) if "nmse" in case.tolerance else _budget(case, k, t, arithmetic)
        yield Judged(k, t, compare(t, want, found[t], unordered=t.op == "TOP_K"), budget)


def _budget(case: Case, k: int, t: Tensor, arithmetic: Arithmetic) -> Budget:
    nodes = list(_makers(case, k, t))
    if len(nodes) == 1 or not nodes:
        return budget_of(nodes[0] if nodes else t, arithmetic)
    return propagated(t, nodes, arithmetic)


def _makers(case: Case, k: int, t: Tensor) -> dict[Tensor, None]:
    """Every node of steps 0 to `k` whose rounding can reach `t`."""
    graph = case.steps[k].graph
    if len(case.steps) > 1 and k:
        return dict.fromkeys(n for s in case.steps[: k + 1] for n in s.graph if _computes(n))
    if len(graph) == 1:
        return dict.fromkeys(n for n in graph if _computes(n))
    reached: dict[Tensor, None] = {}
    stack = [t]
    writers: dict[Tensor, list[Tensor]] = {}
    for n in graph:
        if writes_in_place(n) and n.view_src is not None:
            writers.setdefault(n.view_src, []).append(n)
    seen: set[Tensor] = set()
    while stack:
        cur = stack.pop()
        if cur in seen:
            continue
        seen.add(cur)
        if _computes(cur):
            reached[cur] = None
        stack.extend(s for s in (*cur.src, cur.view_src) if s is not None)
        stack.extend(writers.get(cur, ()))
    return reached


def _computes(n: Tensor) -> bool:
    return n.op not in VIEW_OPS and bool(n.flags & FLAG_COMPUTE)
