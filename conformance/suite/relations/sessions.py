"""Relations within a session: caches, outputs and graphs used differently between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from conformance.case.case import Case, Step
from conformance.ggml.errors import UsageError

from .pairs import copied
from .relation import (
    BUDGET,
    BY_NODE,
    HANDED_OVER,
    RESTORED,
    REUSED,
    UNREAD,
    WRITTEN,
    Link,
    Place,
    Relation,
    Run,
    combine,
)


def apart(case_id: str, case: Case, seed: int) -> Case:
    """Compare each node in its own graph with all nodes in one graph."""
    n = len(case.steps)
    runs = (Run("each node in a graph of its own", 0, n, how=BY_NODE), Run("all nodes in one graph", 0, n))
    relation = Relation("apart", "node by node = in one graph", BUDGET, runs, ((0, 1),))
    return combine(case_id, relation, [case], case.params, seed)


def restored(case_id: str, case: Case, at: int, seed: int) -> Case:
    """Save the caches after step `at`, run a step with other tokens, restore them, and compare."""
    n = len(case.steps)
    if not 0 <= at < n - 1:
        raise UsageError(f"restored: at: a step with another after it expected, {at} of {n} found")
    other = _other_tokens(case.steps[at])
    which, its = ("the first step", "its") if at == 0 else (f"step {at}", "the")
    says = f"{which}, another in its place, {its} caches written back, and the others"
    runs = (Run("the steps one after the other", 0, n), Run(says, n, 2 * n + 1, 1, RESTORED, at=at))
    links = tuple(link for k in range(at + 1, n) for link in _links(case, k, 1, k + 1))
    relation = Relation("restored", "caches saved and written back = undisturbed", BUDGET, runs, links=links)
    steps = [*case.steps, *case.steps[: at + 1], other, *case.steps[at + 1 :]]
    return combine(case_id, relation, [replace(case, steps=steps)], case.params, seed)


def _other_tokens(step: Step) -> Step:
    """Return the step with its tokens permuted; a single one becomes the next of the vocabulary."""
    leaf = next((t for t in step.inputs if t.name == "inp_tokens"), None)
    rows = next((n.src[0] for n in step.graph if n.op == "GET_ROWS" and n.src[1] is leaf), None)
    if leaf is None or rows is None:
        raise UsageError("restored: a step with tokens as input expected")
    tokens = step.inputs[leaf].view("<i4")
    others = np.roll(tokens, 1) if tokens.size > 1 else (tokens + 1) % np.int32(rows.ne[1])
    return replace(step, inputs={**step.inputs, leaf: others.view(np.uint8)})


def _links(case: Case, left: int, run: int, right: int, *, caches: bool = True, shift: int = 0) -> Iterator[Link]:
    """Link outputs and caches of step `left` of the first run to those of step `right` of `run`.

    Persistent tensors of `run` are offset by `shift`.
    """
    held = case.caches() if caches else []
    for i in range(len(case.steps[left].outputs)):
        yield Link((Place(0, left, "output", i),), (Place(run, right, "output", i),))
    for i in [i for i, t in enumerate(case.persistent) if t in held]:
        yield Link((Place(0, left, "cache", i),), (Place(run, right, "cache", i + shift),))


def weights(case_id: str, case: Case, seed: int) -> Case:
    """Compare runs with these weights from the start, and written after a run with others."""
    n, held = len(case.steps), set(case.caches())
    other = copied(case)
    for t, own in zip(other.persistent, case.persistent, strict=True):
        if own not in held:
            other.persistent[t] = np.roll(case.persistent[own], own.type.type_size)
    again = replace(other, steps=other.steps * 2)
    says = "the steps with others, then these weights and fresh caches, and the steps again"
    runs = (Run("these weights from the start", 0, n), Run(says, n, 3 * n, 1, WRITTEN, at=n - 1))
    links = tuple(link for k in range(n) for link in _links(case, k, 1, n + k, shift=len(case.persistent)))
    relation = Relation(
        "weights", "weights written in mid-session = the same from the start", BUDGET, runs, links=links
    )
    return combine(case_id, relation, [case, again], case.params, seed)


def unread(case_id: str, case: Case, seed: int) -> Case:
    """Compare runs that read no cache before the end, or write unread ones, with full reads."""
    n = len(case.steps)
    if n < 2 or not case.caches():
        raise UsageError("unread: caches and at least two steps expected")
    runs = [Run("every cache read after every step", 0, n), Run("no cache read before the end", 0, n, how=UNREAD)]
    if len(case.caches()) > 1:
        at = (n - 1) // 2
        runs.append(Run("the same, every other cache written with what it holds", 0, n, how=HANDED_OVER, at=at))
    links = [x for r in range(1, len(runs)) for k in range(n) for x in _links(case, k, r, k, caches=k == n - 1)]
    relation = Relation(
        "unread", "caches read at the end = read after each step", BUDGET, tuple(runs), links=tuple(links)
    )
    return combine(case_id, relation, [case], case.params, seed)


def reused(case_id: str, case: Case, seed: int) -> Case:
    """Compute equal graphs again, also with outputs requested in every second step only."""
    n = len(case.steps)
    if len({s.graph.key(case.persistent) for s in case.steps}) == n:
        raise UsageError("reused: two steps of one graph expected")
    steps = [s if k % 2 == 0 else replace(s, outputs=()) for k, s in enumerate(case.steps)]
    runs = (
        Run("a graph for each step", 0, n),
        Run("one graph for all steps that it is equal in", 0, n, how=REUSED),
        Run("the same, asked for outputs in every other step", n, 2 * n, how=REUSED),
    )
    links = [link for r in (1, 2) for k in range(n) for link in _links(case, k, r, k) if steps[k].outputs or r == 1]
    relation = Relation("reused", "one graph computed again = a graph for each step", BUDGET, runs, links=tuple(links))
    return combine(case_id, relation, [replace(case, steps=[*case.steps, *steps])], case.params, seed)
