"""Relations between trajectories of one decoder: the same tokens in other batches, sequences, cells or caches.

Two trajectories of one id have the same weights. Their tokens are told here: one per sequence and position, whatever
batch it comes in. What a step's note says of its tokens tells which row of the logits is whose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.suite.decoder.cells import Ubatch
from conformance.suite.decoder.grammar import trajectory_of
from conformance.suite.decoder.trajectory import Trajectory

from .claim import BUDGET, Claim, Link, Place, Run, combine

Token = tuple[int, int]
"""Sequence and position."""
MAX_POS = 4096


@dataclass(slots=True)
class Side:
    """One run: a trajectory, and whose tokens its sequences are."""

    what: str
    trajectory: Trajectory
    names: Mapping[int, int] = field(default_factory=dict)
    """Sequence of this run -> sequence of the run on the left; itself where it is not listed."""

    def tokens(self) -> Iterator[tuple[int, int, int, Token, bool]]:
        """Step, row in the step, row among its outputs, whose token it is, and whether it has logits."""
        for k, step in enumerate(self.trajectory.steps):
            out = 0
            for i, (_, pos, seq, wanted) in enumerate(rows_of(step)):
                yield k, i, out, (self.names.get(seq, seq), pos), bool(wanted)
                out += wanted

    def logits(self) -> dict[Token, tuple[int, int]]:
        """Step and row of each token's logits, of its last if a position was used again."""
        return {token: (k, out) for k, _, out, token, wanted in self.tokens() if wanted}

    def cells(self) -> dict[Token, int]:
        """Row in all streams' rows of each token that is in the cache at the end."""
        cells = self.trajectory.memory.base
        found: dict[Token, int] = {}
        for s in range(cells.n_stream):
            for i in np.flatnonzero(cells.pos[s] >= 0).tolist():
                for seq in range(self.trajectory.c.n_seq_max):
                    if int(cells.seq[s, i]) >> seq & 1:
                        found[self.names.get(seq, seq), int(cells.pos[s, i])] = s * cells.n_ctx + i
        return found

    def tell(self, case_id: str) -> None:
        """Give every token of the trajectory its value: that of its sequence, position, and life of the sequence."""
        lives = self._lives()
        for k, step in enumerate(self.trajectory.steps):
            rows = rows_of(step)
            if not rows:
                continue
            for i, row in enumerate(rows):
                seq = self.names.get(row[2], row[2])
                stream = Stream(case_id, f"tokens of sequence {seq}, life {lives[k, i]} from the last")
                row[0] = int(stream.integers(MAX_POS, 0, self.trajectory.h.n_vocab)[row[1]])
            (leaf,) = (t for t in step.inputs if t.name == "inp_tokens")
            step.inputs[leaf] = np.array([row[0] for row in rows], "<i4").view(np.uint8)

    def _lives(self) -> dict[tuple[int, int], int]:
        """Step and row -> how many times the sequence starts again at position 0 after that."""
        count: dict[int, int] = {}
        found: dict[tuple[int, int], int] = {}
        rows = [(k, i, row) for k, s in enumerate(self.trajectory.steps) for i, row in enumerate(rows_of(s))]
        for k, i, (_, pos, seq, _) in reversed(rows):
            found[k, i] = count.get(seq, 0)
            if pos == 0:
                count[seq] = count.get(seq, 0) + 1
        return found


def rows_of(step: Step) -> list[list[int]]:
    """Token, position, sequence and whether logits are wanted, of each token of a step; a shift has none."""
    rows: list[list[int]] = step.note.get("tokens", [])
    return rows


def relate(case_id: str, name: str, says: str, sides: Sequence[Side], params: Mapping[str, Any], seed: int) -> Case:
    """The relation that every token of the first side has the same logits and K and V on the others.

    Raises:
        UsageError: no token has logits on both sides.
    """
    for side in sides:
        side.tell(case_id)
    runs: list[Run] = []
    first = 0
    for side in sides:
        runs.append(Run(side.what, first, first + len(side.trajectory.steps)))
        first += len(side.trajectory.steps)
    links = [*_logits(sides), *_caches(sides)]
    if not links:
        raise UsageError(f"case {case_id!r}: no token has logits in both runs")
    cases = [side.trajectory.case(name, params, seed) for side in sides]
    claim = Claim(name, says, BUDGET, tuple(runs), links=tuple(links))
    return combine(case_id, claim, cases, params, seed)


def _logits(sides: Sequence[Side]) -> Iterator[Link]:
    left, others = sides[0].logits(), [s.logits() for s in sides[1:]]
    by_step: dict[int, list[tuple[Place, Place]]] = {}
    for token, (k, row) in left.items():
        for r, other in enumerate(others, 1):
            if token in other:
                j, at = other[token]
                pair = Place(0, k, "output", 0, (row,)), Place(r, j, "output", 0, (at,))
                by_step.setdefault(k, []).append(pair)
    for pairs in by_step.values():
        yield Link(tuple(p for p, _ in pairs), tuple(q for _, q in pairs))


def _caches(sides: Sequence[Side]) -> Iterator[Link]:
    """Rows of K, and of V where they are rows, of tokens in the cache at the end of both runs."""
    offsets = np.cumsum([0, *(_persistent(s) for s in sides)]).tolist()
    left = sides[0].cells()
    last = len(sides[0].trajectory.steps) - 1
    for r, side in enumerate(sides[1:], 1):
        cells = side.cells()
        tokens = [t for t in left if t in cells]
        if not tokens:
            continue
        ours, theirs = tuple(left[t] for t in tokens), tuple(cells[t] for t in tokens)
        for i in _rows(sides[0]):
            a = Place(0, last, "cache", i, ours)
            b = Place(r, len(side.trajectory.steps) - 1, "cache", offsets[r] + i, theirs)
            yield Link((a,), (b,))


def _persistent(side: Side) -> int:
    return len(side.trajectory.weights) + len(side.trajectory.cache.tensors())


def _rows(side: Side) -> list[int]:
    """Places, among the persistent tensors, of caches whose rows are tokens in the cells of full attention."""
    t = side.trajectory
    kept = [*t.cache.k.items(), *(() if t.c.v_trans else t.cache.v.items())]
    whole = {tensor for il, tensor in kept if not t.h.is_swa(il)}
    return [len(t.weights) + i for i, tensor in enumerate(t.cache.tensors()) if tensor in whole]


@dataclass(frozen=True, slots=True)
class Told:
    """What an id says: a model, a context and a plan."""

    id: str
    arch: str
    values: Mapping[str, Any]
    """Keys of `models.grammar` and of the relation."""
    params: Mapping[str, Any]
    seed: int

    def trajectory(self, **values: Any) -> Trajectory:  # noqa: ANN401  # keys of an id
        """An empty one in the model and context that the id says, but for `values`."""
        return trajectory_of(self.id, self.arch, {**self.values, **values})

    def side(self, what: str, run: str, **values: Any) -> Side:  # noqa: ANN401  # as above
        """A run of a plan."""
        made = self.trajectory(**values)
        made.run(run)
        return Side(what, made)


def retold(told: Told, left: Side, what: str, chosen: Mapping[int, int], **values: Any) -> Side:  # noqa: ANN401  # keys of an id
    """The tokens of some sequences of `left`, step by step as there, under other sequence ids.

    Args:
        told: the id.
        left: the run to follow.
        what: the new run, in words.
        chosen: sequence of `left` -> its id in the new run; the others take no part.
        values: keys of the id that are others in the new run.
    """
    made = told.trajectory(**values)
    for step in left.trajectory.steps:
        rows = [(chosen[row[2]], *row) for row in rows_of(step) if row[2] in chosen]
        if not rows:
            continue
        rows.sort(key=lambda row: (row[0], row[2]))
        for seq in {row[0] for row in rows}:
            start = min(row[2] for row in rows if row[0] == seq)
            if start <= made.memory.seq_pos_max(seq):
                made.memory.seq_rm(seq, start)
        ids, tokens, pos, _, outputs = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        made.decode(Ubatch(tokens, pos, ids, outputs.astype(np.bool_)))
    return Side(what, made, {theirs: ours for ours, theirs in chosen.items()})


def chunked(told: Told) -> Case:
    """A prompt in one piece, and in pieces."""
    sides = [told.side("whole", told.values["run"]), told.side("in chunks", told.values["to"])]
    return relate(told.id, "chunked", "whole prefill = chunked prefill", sides, told.params, told.seed)


def batch(told: Told) -> Case:
    """Sequences together, and each alone."""
    left = told.side("the batch", told.values["run"])
    alone = {"seqs": 1, "unified": "0"}
    sides = [retold(told, left, f"sequence {seq} alone", {seq: 0}, **alone) for seq in range(told.values["seqs"])]
    says = "batch of N sequences = N single runs"
    return relate(told.id, "batch", says, [left, *sides], told.params, told.seed)


def permuted(told: Told) -> Case:
    """Sequences under their ids, and under each other's."""
    left = told.side("the sequences as they are", told.values["run"])
    n = told.values["seqs"]
    turned = {seq: (seq + 1) % n for seq in range(n)}
    sides = [left, retold(told, left, "the sequences under other ids", turned)]
    return relate(told.id, "permuted", "permuted sequence ids = same result", sides, told.params, told.seed)


def reset(told: Told) -> Case:
    """A context that is emptied, and one that is new."""
    run = told.values["run"]
    sides = [told.side("after a reset", f"{told.values['before']}.reset.{run}"), told.side("fresh", run)]
    return relate(told.id, "reset", "reset = fresh", sides, told.params, told.seed)


def rewound(told: Told) -> Case:
    """Tokens forgotten and decoded again, and decoded once."""
    n, run = told.values["back"], told.values["run"]
    sides = [told.side("rewound and decoded again", f"{run}.back{n}.p{n}"), told.side("decoded once", run)]
    return relate(told.id, "rewound", "rewound and decoded again = decoded once", sides, told.params, told.seed)


def exact_n_kv(told: Told) -> Case:
    """n_kv padded to a multiple of 256, and as many cells as there are tokens."""
    left = told.side("padded n_kv", told.values["run"])
    cells = max(len(np.flatnonzero(row >= 0)) for row in left.trajectory.memory.base.pos)
    sides = [left, told.side("exact n_kv", told.values["run"], ctx=cells)]
    return relate(told.id, "exact_n_kv", "padded n_kv = exact n_kv", sides, told.params, told.seed)
