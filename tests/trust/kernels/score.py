"""Judge mutants by both suites; the journals in the tree's folder let a run continue."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from conformance.suite.ops import ids

from .curve import SHOWN, places
from .journal import appending, rows
from .ours import Ours, Reach
from .theirs import PATIENCE, Clean, Theirs
from .tree import Mutant, Tree

Suite = Literal["ours", "theirs"]
SUITES: tuple[Suite, ...] = get_args(Suite)
FEW = 24
"""`alone` skips a mutant that more cases of `smoke` reach."""
COMPARED = 200
"""Cases whose outputs are compared byte by byte, of a mutant that nothing noticed."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The cases of `smoke` that notice a mutant which few of them reach."""

    number: int
    cases: Sequence[str]


@dataclass(frozen=True, slots=True)
class First:
    """When runs of both suites notice a mutant."""

    number: int
    case: str
    """The first case of ours; empty if none does."""
    theirs: float | None
    """Processor seconds of theirs; None if it does not."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one suite for one mutant."""

    number: int
    suite: Suite
    reaching: int
    """Cases (`ours`) or ops (`theirs`) that reach it."""
    by: str = ""
    """The case that noticed it (`ours`: verdict and case), or how the process died; empty if none did."""
    level: str = ""
    """Level of that case (`ours`)."""
    ran: int = 0
    """Cases or ops that ran."""
    seconds: float = 0.0
    """Processor time; for `ours`, including the reference."""
    differs: str = ""
    """`ours`, if no case noticed it: a case whose output bytes differ."""


@dataclass(frozen=True, slots=True)
class Score:
    """The results of both suites for one mutant."""

    ours: Answer
    theirs: Answer

    @property
    def status(self) -> str:
        """Return `not reached`, `noticed`, `survived` or, if no byte was seen to differ, `undetermined`."""
        if not self.ours.reaching and not self.theirs.reaching:
            return "not reached"
        if self.ours.by or self.theirs.by:
            return "noticed"
        return "survived" if self.ours.differs else "undetermined"


class Scores:
    """The journals of a tree, and what each case reaches there."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.ours, self.theirs = Ours(tree), Theirs(tree)

    @cached_property
    def reached(self) -> Sequence[Reach]:
        """Return our cases with no active mutant; runs what is missing."""
        return self.ours.reach(self._reach)

    @cached_property
    def plain(self) -> Sequence[Reach]:
        """Return our cases of `ops` on the plain device with no active mutant; runs what is missing."""
        return self.ours.reach(self._reach, plain=True)

    @cached_property
    def clean(self) -> dict[str, Clean]:
        """Return the ops of test-backend-ops with no active mutant; runs what is missing."""
        return dict(self.theirs.reach(self.tree.folder / "reach-theirs.jsonl"))

    def read(self) -> dict[int, Score]:
        """Return the scores of the mutants that both suites have judged."""
        ours, theirs = ({a.number: a for a in self._answers(suite)} for suite in SUITES)
        return {n: Score(ours[n], theirs[n]) for n in sorted(ours.keys() & theirs.keys())}

    def run(self, mutants: Sequence[Mutant], suites: Sequence[Suite], say: Callable[[str], None]) -> None:
        """Judge `mutants` that have no answer; each answer is in the journal at once."""
        for suite in suites:
            done = {a.number for a in self._answers(suite)}
            with appending(self._path(suite)) as add:
                for m in mutants:
                    if m.number not in done:
                        answer = self.judge(m, suite)
                        add(answer)
                        say(f"{suite}: {m.number} {m.place} {m.edit.kind}: {answer.by or 'not noticed'}")

    def judge(self, m: Mutant, suite: Suite) -> Answer:
        """Judge one mutant by one suite."""
        if suite == "theirs":
            ops = sum(m.number in c.seen for c in self.clean.values())
            start = _spent()
            by, ran = self.theirs.hunt(m, self.clean, PATIENCE)
            return Answer(m.number, suite, ops, by, "", ran, round(_spent() - start, 2))
        reaching = [r for r in self.reached if m.number in r.seen]
        start = _spent()
        noticed, ran = self.ours.hunt(m, reaching, PATIENCE)
        spent = round(_spent() - start, 2)
        if noticed is None:
            return Answer(m.number, suite, len(reaching), "", "", ran, spent, self.ours.differs(m, reaching, COMPARED))
        by = f"{noticed.verdict} {noticed.case}".strip()
        return Answer(m.number, suite, len(reaching), by, noticed.level, ran, spent)

    def reaching(self, mutants: Sequence[Mutant]) -> dict[Mutant, list[Reach]]:
        """Return those of `mutants` that a case of `ops` reaches which passes, in their order, and these cases."""
        return {m: own for m in mutants if (own := [r for r in self.plain if r.passes and m.number in r.seen])}

    def sample(self, mutants: Sequence[Mutant], say: Callable[[str], None]) -> None:
        """Run drawn cases on each of `mutants`, for `weights`; continue an earlier call."""
        path = self.tree.folder / "sampled.jsonl"
        done = {row["number"] for row in rows(path)}
        with appending(path) as add:
            for m, own in self.reaching(mutants).items():
                if m.number not in done:
                    found = self.ours.sampled(m, own)
                    add(found)
                    say(f"{m.number} {m.place}: {len(found.noticing)} of {len(found.noticing) + len(found.others)}")

    def curves(self, mutants: Sequence[Mutant], say: Callable[[str], None]) -> dict[str, list[float | None]]:
        """Return suite -> processor seconds until a run of it notices each of `mutants`; continue an earlier call.

        A mutant that no suite notices is left out; None is one that only the other suite notices.
        """
        path = self.tree.folder / "curve.jsonl"
        at = places(order := ids("standard"))
        place = {i: k for k, i in enumerate(order)}
        line = self.theirs.timeline(self.tree.folder / "timeline.jsonl", SHOWN[-1])
        done = {f.number: f for f in (First(**row) for row in rows(path))}
        with appending(path) as add:
            for m, own in self.reaching([m for m in mutants if m.number not in done]).items():
                case = self.ours.first(m, sorted(own, key=lambda r: place[r.case]), PATIENCE)
                ops = {part for r in own for part in r.case.partition("/")[2].partition("-")[0].split(".")}
                done[m.number] = First(m.number, case, self.theirs.first(m, ops, line))
                add(done[m.number])
                say(f"{m.number} {m.place}: ours {case or 'nothing'}, theirs {done[m.number].theirs}")
        noticed = [f for m in mutants if (f := done[m.number]).case or f.theirs is not None]
        return {"ops": [at.get(f.case) for f in noticed], "test-backend-ops": [f.theirs for f in noticed]}

    def alone(self, say: Callable[[str], None]) -> list[Alone]:
        """Run every case of `smoke` that reaches a mutant it notices, where at most `FEW` do."""
        path = self.tree.folder / "alone.jsonl"
        done = {a.number: a for a in (Alone(**row) for row in rows(path))}
        answers = {a.number: a for a in self._answers("ours")}
        with appending(path) as add:
            for m in self.tree.mutants:
                answer = answers.get(m.number)
                if m.number in done or answer is None or answer.level != "smoke":
                    continue
                reaching = [r for r in self.reached if r.level == "smoke" and m.number in r.seen]
                if len(reaching) <= FEW:
                    done[m.number] = Alone(m.number, sorted(self.ours.failing(m, reaching)))
                    add(done[m.number])
                    say(f"{m.number} {m.place}: {len(done[m.number].cases)} of {len(reaching)} cases notice it")
        return list(done.values())

    @property
    def _reach(self) -> Path:
        return self.tree.folder / "reach-ours.jsonl"

    def _path(self, suite: Suite) -> Path:
        return self.tree.folder / f"{suite}.jsonl"

    def _answers(self, suite: Suite) -> list[Answer]:
        return [Answer(**row) for row in rows(self._path(suite))]


def sample(mutants: Sequence[Mutant], n: int, seed: int) -> list[Mutant]:
    """Return `n` of them in an order that the seed draws."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(mutants))
    return [mutants[i] for i in order[:n]]


def _spent() -> float:
    """Return processor seconds of this process and of its ended children."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system
