"""Relations between a case and itself, or itself told otherwise: every output and cache of both runs, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from conformance.case import codec
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Tensor
from conformance.suite import alias

from .claim import BITS, BUDGET, BUFFERS, FOLDER, OVERWRITTEN, PROCESS, RESTORED, Claim, Link, Place, Run, combine

NAMINGS: dict[str, Callable[[int, int], str]] = {
    "other": lambda i, _n: f"t{i}",
    "none": lambda _i, _n: "",
    "one": lambda _i, _n: "x",
}
"""What tensors are called instead -> name of the i-th of n; `swapped`, beside these, gives each the name of another."""


def copied(case: Case) -> Case:
    """The same case of other tensors."""
    return codec.load(*codec.dump(case))


def renamed(case_id: str, case: Case, how: str, seed: int) -> Case:
    """Names say nothing: the case, and the same with other names, all alike, none, or each other's."""
    other = copied(case)
    tensors: dict[Tensor, None] = dict.fromkeys(other.persistent)
    for step in other.steps:
        tensors |= dict.fromkeys(step.graph.tensors())
    names = [t.name for t in tensors]
    for i, t in enumerate(tensors):
        t.name = names[-1 - i] if how == "swapped" else NAMINGS[how](i, len(names))
    n = len(case.steps)
    runs = (Run("the case as it is", 0, n, opening=1), Run("the case with other names", n, 2 * n, opening=2))
    claim = Claim("renamed", "renamed tensors = same result", BITS, runs, ((0, 1),))
    return combine(case_id, claim, [case, other], {**case.params, "how": how}, seed)


def memory(case_id: str, case: Case, seed: int) -> Case:
    """Addresses say nothing."""
    n = len(case.steps)
    runs = (
        Run("each graph at addresses of its own", 0, n, opening=1, options={"memory": "fresh"}),
        Run("every graph in the memory of the one before", 0, n, 2, OVERWRITTEN, {"memory": "reused"}),
    )
    claim = Claim("memory", "graphs at fresh addresses = graphs in the same memory", BITS, runs, ((0, 1),))
    return combine(case_id, claim, [case], case.params, seed)


def warm(case_id: str, case: Case, seed: int) -> Case:
    """What a backend keeps says nothing: in its memory, or, where it has `cache_dir`, on disk for another process."""
    n, kept = len(case.steps), {"cache_dir": FOLDER}
    runs = (
        Run("the first run", 0, n, opening=1, options=kept),
        Run("the second run on the same backend", 0, n, opening=1, options=kept),
        Run("a run of the same tensors made anew", n, 2 * n, opening=1, options=kept),
        Run("a run in a new process", 0, n, opening=2, how=PROCESS, options=kept),
    )
    claim = Claim("warm", "cold = warm = new process", BUDGET, runs, ((0, 1), (0, 2), (0, 3)))
    return combine(case_id, claim, [case, copied(case)], case.params, seed)


def buffers(case_id: str, case: Case, seed: int) -> Case:
    """Where weights lie says nothing."""
    n = len(case.steps)
    runs = (
        Run("weights in the default buffer type", 0, n),
        Run("weights in another", 0, n, opening=1, how=BUFFERS),
    )
    claim = Claim("buffers", "weight in any buffer type = same result", BUDGET, runs, ((0, 1),))
    return combine(case_id, claim, [case], case.params, seed)


def restored(case_id: str, case: Case, seed: int) -> Case:
    """A state that was saved is the state: another prompt in the same cells between saving and writing back."""
    first, *rest = case.steps
    tokens = {t: np.roll(d.view("<i4"), 1).view(np.uint8) for t, d in first.inputs.items() if t.name == "inp_tokens"}
    if not rest or not tokens:
        raise UsageError("restored: a prompt of tokens and steps after it expected")
    other = replace(first, inputs={**first.inputs, **tokens})
    n = len(case.steps)
    runs = (
        Run("the steps one after the other", 0, n),
        Run("the first step, another in its place, its caches written back, and the others", n, 2 * n + 1, 1, RESTORED),
    )
    caches = case.caches()
    at = [i for i, t in enumerate(case.persistent) if t in caches]
    links = tuple(
        Link((Place(0, k, kind, i),), (Place(1, k + 1, kind, i),))
        for k in range(1, n)
        for kind, places in (("output", range(len(case.steps[k].outputs))), ("cache", at))
        for i in places
    )
    claim = Claim("restored", "caches saved and written back = undisturbed", BUDGET, runs, links=links)
    whole = replace(case, steps=[*case.steps, first, other, *rest])
    return combine(case_id, claim, [whole], case.params, seed)


def after(case_id: str, read: alias.Read) -> Case:
    """What ran before says nothing: B alone, and B after an A whose tensors have the same names."""
    b = alias.alone(case_id, alias.DIFFERS[read.differs], read.tokens)
    a = alias.alone(case_id, alias.Traits(), read.tokens)
    n = len(b.steps)
    runs = (
        Run("B alone", 0, n, opening=1),
        Run("A before B", n, 2 * n, opening=2),
        Run("B after A", 0, n, opening=2),
    )
    claim = Claim("after", "A then B = B alone", BUDGET, runs, ((0, 2),))
    return combine(case_id, claim, [b, a], read.params, read.seed)
