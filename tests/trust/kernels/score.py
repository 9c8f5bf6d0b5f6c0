"""Judge mutants by both suites, one after the other; the journal in the tree's folder goes on where it was cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .journal import appending, rows
from .ours import Ours, Reach
from .theirs import Clean, Theirs
from .tree import Mutant, Tree

PATIENCE = 900.0
"""Seconds per mutant and suite, after which a survivor's remaining cases are left out."""
FEW = 24
"""A mutant that more cases of `smoke` reach is not the business of one of them."""
COMPARED = 200
"""Cases whose outputs are compared byte by byte, of a mutant that nothing noticed."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The cases of `smoke` that notice a mutant which few of them reach."""

    number: int
    cases: Sequence[str]


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one mutant."""

    number: int
    reaching: int
    """Our cases that reach it."""
    ops: int
    """Ops of test-backend-ops that reach it."""
    ours: str = ""
    """The case that noticed it, and its verdict; empty if none."""
    level: str = ""
    """The level of that case."""
    ran: int = 0
    seconds: float = 0.0
    """Processor time of ours, the reference's included."""
    theirs: str = ""
    """The case of test-backend-ops that noticed it, or how its process died."""
    theirs_ran: int = 0
    """Ops that ran."""
    theirs_seconds: float = 0.0
    differs: str = ""
    """Of a survivor of both: a case of ours with other bytes."""

    @property
    def status(self) -> str:
        """Return `not reached`, `noticed`, `survived` or, if no byte was seen to differ, `undetermined`."""
        if not self.reaching and not self.ops:
            return "not reached"
        if self.ours or self.theirs:
            return "noticed"
        return "survived" if self.differs else "undetermined"


class Scores:
    """The journal of a tree, and what each case reaches there."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.path = tree.folder / "scores.jsonl"
        self.ours, self.theirs = Ours(tree), Theirs(tree)

    @cached_property
    def reached(self) -> Sequence[Reach]:
        """Return our cases with no active mutant; runs what is missing."""
        return self.ours.reach(self.tree.folder / "reach-ours.jsonl")

    @cached_property
    def clean(self) -> dict[str, Clean]:
        """Return the ops of test-backend-ops with no active mutant; runs what is missing."""
        return dict(self.theirs.reach(self.tree.folder / "reach-theirs.jsonl"))

    def read(self) -> dict[int, Score]:
        """Return the scores so far."""
        return {s.number: s for s in (Score(**row) for row in rows(self.path))}

    def run(self, mutants: Sequence[Mutant], say: Callable[[str], None]) -> None:
        """Judge `mutants` that have no score; each is in the journal as soon as it is judged."""
        done = self.read()
        with appending(self.path) as add:
            for m in mutants:
                if m.number in done:
                    continue
                score = self.judge(m)
                add(score)
                found = f"ours: {score.ours or '-'}, theirs: {score.theirs or '-'}"
                say(f"{m.number} {m.place} {m.edit.kind}: {score.status}; {found}")

    def alone(self, say: Callable[[str], None]) -> list[Alone]:
        """Run every case of `smoke` that reaches a mutant it notices, where at most `FEW` do."""
        path = self.tree.folder / "alone.jsonl"
        done = {a.number: a for a in (Alone(**row) for row in rows(path))}
        scores = self.read()
        with appending(path) as add:
            for m in self.tree.mutants:
                score = scores.get(m.number)
                if m.number in done or score is None or score.level != "smoke" or not score.ours:
                    continue
                reaching = [r for r in self.reached if r.level == "smoke" and m.number in r.seen]
                if len(reaching) <= FEW:
                    done[m.number] = Alone(m.number, self.ours.failing(m, reaching))
                    add(done[m.number])
                    say(f"{m.number} {m.place}: {len(done[m.number].cases)} of {len(reaching)} cases notice it")
        return list(done.values())

    def judge(self, m: Mutant) -> Score:
        """Judge one mutant."""
        reaching = [r for r in self.reached if m.number in r.seen]
        ops = sum(m.number in c.seen for c in self.clean.values())
        if not reaching and not ops:
            return Score(m.number, 0, 0)
        start = _spent()
        noticed, ran = self.ours.hunt(m, reaching, PATIENCE)
        middle = _spent()
        theirs, theirs_ran = self.theirs.hunt(m, self.clean, PATIENCE)
        end = _spent()
        differs = "" if noticed or theirs else self.ours.differs(m, reaching, COMPARED)
        by = "" if noticed is None else f"{noticed.verdict} {noticed.case}".strip()
        level = "" if noticed is None else noticed.level
        spent = round(middle - start, 2), round(end - middle, 2)
        return Score(m.number, len(reaching), ops, by, level, ran, spent[0], theirs, theirs_ran, spent[1], differs)


def sample(mutants: Sequence[Mutant], n: int, seed: int) -> list[Mutant]:
    """Return `n` of them in an order that the seed draws."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(mutants))
    return [mutants[i] for i in order[:n]]


def _spent() -> float:
    """Return processor seconds of this process and of its ended children."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system
