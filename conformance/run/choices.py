"""A choice of experts that went the other way at a near-tie, told apart from a wrong number.

Two right backends may take different experts where two scores of a router are closer than they round. What follows is
then other values altogether, and no budget of the free run holds. It is no fault if the first thing that differs is the
choice, its scores are within their budget, the margin is within what they differ by, and each node by itself is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.graph import Graph
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.tensor import Bytes, Tensor, computes
from conformance.judge.chain import Chain
from conformance.judge.compare import Difference, compare, values

OPS = frozenset({"ARGSORT", "TOP_K"})


def near_tie(
    case: Case, found: Sequence[Mapping[Tensor, Bytes]], right: Sequence[Mapping[Tensor, Bytes]], arithmetic: Arithmetic
) -> str:
    """The first choice that differs, with its margin; empty where something else differs first, or no tie explains it.

    Args:
        case: has a choice.
        found: every computed node of each step, in a backend's free run.
        right: the same in the reference's.
        arithmetic: in which both compute.
    """
    chain = Chain(arithmetic)
    for k, (step, mine, wanted) in enumerate(zip(case.steps, found, right, strict=False)):
        chain.enter(step.graph)
        for node in filter(computes, step.graph):
            if node.op in OPS:
                flips = _flips(step.graph, node, mine, wanted)
                if flips is None or (flips and chain.budget(_scores(node)).used(_apart(node, mine, wanted)) > 1):
                    return ""
                if flips:
                    more = f" and {len(flips) - 1} more" if len(flips) > 1 else ""
                    return f"step {k}: {flips[0]}{more}"
            elif chain.budget(node).used(compare(node, wanted[node], mine[node])) > 1:
                return ""
    return ""


def _scores(node: Tensor) -> Tensor:
    scores = node.src[0]
    if scores is None:
        raise ValueError(f"{node} has no scores")
    return scores


def _apart(node: Tensor, mine: Mapping[Tensor, Bytes], right: Mapping[Tensor, Bytes]) -> Difference:
    return compare(_scores(node), right[_scores(node)], mine[_scores(node)])


def _flips(graph: Graph, node: Tensor, mine: Mapping[Tensor, Bytes], right: Mapping[Tensor, Bytes]) -> list[str] | None:
    """What tokens chose otherwise, in words; None where one did by more than its scores differ."""
    scores = _scores(node)
    if scores not in mine:
        return []
    used = [n.ne[0] for n in graph if n.op == "VIEW" and n.view_src is node]
    k = max(used, default=node.ne[0])
    chosen, wanted = (values(node, v[node]).reshape(-1, node.ne[0])[:, :k] for v in (mine, right))
    a, b = (values(scores, v[scores]).reshape(-1, scores.ne[0]) for v in (mine, right))
    if node.op == "ARGSORT" and node.params.order == SORT_ORDER.ASC:
        a, b = -a, -b
    said = []
    for row, (got, want) in enumerate(zip(chosen.tolist(), wanted.tolist(), strict=True)):
        taken, left = sorted(set(got) - set(want)), sorted(set(want) - set(got))
        if not taken:
            continue
        margin = float(b[row, left].max() - b[row, taken].min())
        apart = float(np.abs(a[row] - b[row]).max())
        if not margin <= 2 * apart:
            return None
        one, other = (" and ".join(map(str, e)) for e in (taken, left))
        said.append(
            f"expert {one} for {other} at {node.name}, token {row}: margin {margin:.2g}, scores differ by {apart:.2g}"
        )
    return said
