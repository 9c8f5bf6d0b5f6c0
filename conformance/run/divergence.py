"""The first divergent node: a failing case is run again with every intermediate value, and each node is judged from
the values that the backend itself fed it, so that one wrong node is named and not all that follow from it.
"""

from __future__ import annotations

from conformance.backend.interface import Backend
from conformance.case.case import JSON, Case, Step
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.judge import Judged, judge_node
from conformance.suite.batch import isolated_nodes

from .execute import execute

NODE, GRAPH = "node", "graph"
"""Kinds of divergence: a node that is wrong by itself; a value that is wrong though each node by itself is right."""


def describe(judged: Judged, case: Case, kind: str = NODE) -> dict[str, JSON]:
    """A wrong tensor as the `first_divergence` of a result."""
    graph = case.steps[judged.step].graph
    t, d = judged.tensor, judged.difference
    return {
        "kind": kind,
        "step": judged.step,
        "node": graph.nodes.index(t) if t in graph.nodes else None,
        "op": t.op,
        "name": t.name,
        "index": list(d.index),
        "expected": d.expected,
        "found": d.found,
        "nmse": d.nmse,
        "budget": judged.budget.nmse,
    }


def sentence(judged: Judged, case: Case) -> str:
    """The same for a person."""
    t = judged.tensor
    where = f"step {judged.step}: " if len(case.steps) > 1 else ""
    name = f" {t.name}" if t.name else ""
    what = t.op if t.op != "NONE" else "cache"
    budget = f"budget {judged.budget.nmse:.2g}" if judged.budget.nmse else "must be equal to the bit"
    return f"{where}{what}{name} {t.type}{list(t.ne)} diverges {judged.difference}, {budget}"


def first_divergent(backend: Backend, reference: Backend, case: Case, upto: int) -> Judged | None:
    """The first node of steps 0 to `upto` that `backend` computes wrongly from its own sources.

    Args:
        backend: the one that failed.
        reference: computes in the arithmetic that `backend` declares.
        case: failed freely at step `upto`.
        upto: index of the first step with a wrong output or cache.

    Returns:
        The node, or None where every node is right once intermediate values are asked for (a fault of fusion, or of
        state that a fresh run does not have).

    Raises:
        BackendError: either backend failed.
    """
    ran = execute(backend, case, every_node=range(upto + 1))
    arithmetic = reference.arithmetic()
    recorded = _recorded(case, [{**v.outputs, **v.caches} for v in ran.steps[: upto + 1]])
    for k in range(upto + 1):
        found = recorded.steps[k].expected
        right = run_isolated(reference, recorded, k, arithmetic)
        judged = (judge_node(node, want, found[node], arithmetic, step=k) for node, want in right.items())
        wrong = next((j for j in judged if j.used > 1), None)
        if wrong is not None:
            return wrong
    return None


def _recorded(case: Case, values: list[dict[Tensor, Bytes]]) -> Case:
    steps = [Step(s.graph, s.inputs, s.outputs, found) for s, found in zip(case.steps, values, strict=False)]
    return Case(case.id, case.persistent, steps)


def run_isolated(reference: Backend, recorded: Case, k: int, arithmetic: Arithmetic) -> dict[Tensor, Bytes]:
    """Every computed node of step `k`, each run by itself on `reference` and fed from recorded values.

    Args:
        reference: runs the isolated nodes.
        recorded: holds the value of every computed node of step `k` and of the caches after each step.
        k: the step.
        arithmetic: of the nodes of the case, in which `reference` computes; where devices share them, each copy as its
            node.
    """
    alone, original = isolated_nodes(recorded, k)
    each = arithmetic.copied(original)
    ran = execute(reference if each is arithmetic else reference.computing_in(each), alone).steps[0].outputs
    return {node: ran[copy] for copy, node in original.items()}
