"""Build the runs of each relation from an id.

Some relate trajectories of one decoder: the same tokens in other batches, sequences, cells or caches. Trajectories of
one id have the same weights; their tokens are drawn here, one per sequence and position, independent of batches. A
step's note lists the token of each row.

The others relate a case to itself, or to a renamed copy: every output and cache of both runs, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.case import codec
from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Tensor
from conformance.suite import alias
from conformance.suite.decoder import Trajectory, trajectory_of
from conformance.suite.decoder.memory import Ubatch

from .relation import BITS, BUDGET, BUFFERS, FOLDER, OVERWRITTEN, PROCESS, THREADS, Link, Place, Relation, Run, combine

Token = tuple[int, int]
"""Sequence and position."""
MAX_POS = 4096


@dataclass(slots=True)
class Side:
    """One run: a trajectory, and the names of its sequences."""

    what: str
    trajectory: Trajectory
    names: Mapping[int, int] = field(default_factory=dict)
    """Sequence of this run -> sequence of the first run; identity if missing."""

    def logits(self) -> dict[Token, tuple[int, int]]:
        """Return step and row of each token's logits; the last one if a position was reused."""
        places: dict[Token, tuple[int, int]] = {}
        for k, step in enumerate(self.trajectory.steps):
            rows = [row for row in _token_rows(step) if row[3]]
            places |= {(self.names.get(seq, seq), pos): (k, i) for i, (_, pos, seq, _) in enumerate(rows)}
        return places

    def cells(self) -> dict[Token, int]:
        """Return the row, over all streams, of each token that is in the cache at the end."""
        cells = self.trajectory.memory.base
        rows: dict[Token, int] = {}
        for s in range(cells.n_stream):
            for i in np.flatnonzero(cells.pos[s] >= 0).tolist():
                for seq in range(self.trajectory.c.n_seq_max):
                    if int(cells.seq[s, i]) >> seq & 1:
                        rows[self.names.get(seq, seq), int(cells.pos[s, i])] = s * cells.n_ctx + i
        return rows

    def set_tokens(self, case_id: str) -> None:
        """Draw every token from its sequence, position and restart count, the same in all runs."""
        lives = self._lives()
        for k, step in enumerate(self.trajectory.steps):
            rows = _token_rows(step)
            if not rows:
                continue
            for i, row in enumerate(rows):
                seq = self.names.get(row[2], row[2])
                stream = Stream(case_id, f"tokens of sequence {seq}, life {lives[k, i]} from the last")
                row[0] = int(stream.integers(MAX_POS, 0, self.trajectory.h.n_vocab)[row[1]])
            (leaf,) = (t for t in step.inputs if t.name == "inp_tokens")
            step.inputs[leaf] = np.array([row[0] for row in rows], "<i4").view(np.uint8)

    def _lives(self) -> dict[tuple[int, int], int]:
        """Return for each step and row how often the sequence restarts at position 0 afterwards."""
        count: dict[int, int] = {}
        lives: dict[tuple[int, int], int] = {}
        rows = [(k, i, row) for k, s in enumerate(self.trajectory.steps) for i, row in enumerate(_token_rows(s))]
        for k, i, (_, pos, seq, _) in reversed(rows):
            lives[k, i] = count.get(seq, 0)
            if pos == 0:
                count[seq] = count.get(seq, 0) + 1
        return lives


def _token_rows(step: Step) -> list[list[int]]:
    """Return `[token, position, sequence, has logits]` of each token; empty for a shift step."""
    rows: list[list[int]] = step.note.get("tokens", [])
    return rows


def relate(request: Request) -> Case:
    """Compare logits, K and V of every token of the first run; UsageError if no token matches."""
    says, make = DECODERS[request.name]
    sides = make(request)
    runs: list[Run] = []
    for side in sides:
        side.set_tokens(request.id)
        first = runs[-1].last if runs else 0
        runs.append(Run(side.what, first, first + len(side.trajectory.steps)))
    links = [*_logits(sides), *_caches(sides)]
    if not links:
        raise UsageError(f"case {request.id!r}: no token has logits in both runs")
    cases = [side.trajectory.case(request.name, request.params, request.seed) for side in sides]
    relation = Relation(request.name, says, BUDGET, tuple(runs), links=tuple(links))
    return combine(request.id, relation, cases, request.params, request.seed)


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
    """Yield links of K rows, and V rows if not transposed, of tokens left in both caches."""
    sizes = [len(s.trajectory.weights) + len(s.trajectory.cache.tensors()) for s in sides]
    offsets = np.cumsum([0, *sizes]).tolist()
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


def _rows(side: Side) -> list[int]:
    """Return indices of persistent tensors that are caches with token rows of full attention."""
    t = side.trajectory
    caches = [*t.cache.k.items(), *(() if t.c.v_trans else t.cache.v.items())]
    whole = {tensor for il, tensor in caches if not t.h.is_swa(il)}
    return [len(t.weights) + i for i, tensor in enumerate(t.cache.tensors()) if tensor in whole]


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed relation id: a model, a context and a plan."""

    id: str
    name: str
    """Name of the relation."""
    arch: str
    values: Mapping[str, Any]
    """Keys of a decoder's id and of the relation."""
    params: Mapping[str, Any]
    seed: int

    def trajectory(self, **values: Any) -> Trajectory:  # noqa: ANN401  # keys of an id
        """Return an empty trajectory of the id's model and context; `values` override its keys."""
        return trajectory_of(self.id, self.arch, {**self.values, **values})

    def side(self, what: str, run: str, **values: Any) -> Side:  # noqa: ANN401  # as above
        """Return the run of a plan."""
        trajectory = self.trajectory(**values)
        trajectory.run(run)
        return Side(what, trajectory)


def _follow(request: Request, left: Side, what: str, ids: Mapping[int, int], **values: Any) -> Side:  # noqa: ANN401  # as above
    """Return a run with the tokens of some sequences of `left`; `ids` maps them to new ids."""
    trajectory = request.trajectory(**values)
    for step in left.trajectory.steps:
        rows = [(ids[row[2]], *row) for row in _token_rows(step) if row[2] in ids]
        if not rows:
            continue
        rows.sort(key=lambda row: (row[0], row[2]))
        for seq in {row[0] for row in rows}:
            start = min(row[2] for row in rows if row[0] == seq)
            if start < trajectory.n_past(seq):
                trajectory.seq_rm(seq, start)
        seqs, tokens, pos, _, outputs = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        trajectory.decode(Ubatch(tokens, pos, seqs, outputs.astype(np.bool_)))
    return Side(what, trajectory, {theirs: ours for ours, theirs in ids.items()})


def _chunked(request: Request) -> list[Side]:
    return [request.side("whole", request.values["run"]), request.side("in chunks", request.values["to"])]


def _batch(request: Request) -> list[Side]:
    left = request.side("the batch", request.values["run"])
    seqs, alone = range(request.values["seqs"]), {"seqs": 1, "unified": "0"}
    return [left, *(_follow(request, left, f"sequence {seq} alone", {seq: 0}, **alone) for seq in seqs)]


def _permuted(request: Request) -> list[Side]:
    left = request.side("the sequences as they are", request.values["run"])
    n = request.values["seqs"]
    return [left, _follow(request, left, "the sequences under other ids", {seq: (seq + 1) % n for seq in range(n)})]


def _reset(request: Request) -> list[Side]:
    run = request.values["run"]
    return [request.side("after a reset", f"{request.values['before']}.reset.{run}"), request.side("fresh", run)]


def _rewound(request: Request) -> list[Side]:
    n, run = request.values["back"], request.values["run"]
    return [request.side("rewound and decoded again", f"{run}.back{n}.p{n}"), request.side("decoded once", run)]


def _exact_n_kv(request: Request) -> list[Side]:
    left = request.side("padded n_kv", request.values["run"])
    cells = max(len(np.flatnonzero(row >= 0)) for row in left.trajectory.memory.base.pos)
    return [left, request.side("exact n_kv", request.values["run"], ctx=cells)]


DECODERS: dict[str, tuple[str, Callable[[Request], list[Side]]]] = {
    "chunked": ("whole prefill = chunked prefill", _chunked),
    "batch": ("batch of N sequences = N single runs", _batch),
    "permuted": ("permuted sequence ids = same result", _permuted),
    "reset": ("reset = fresh", _reset),
    "rewound": ("rewound and decoded again = decoded once", _rewound),
    "exact_n_kv": ("padded n_kv = exact n_kv", _exact_n_kv),
}
"""Relation between trajectories of one decoder -> its description, and its builder."""

NAMINGS = {"other": "t{}", "none": "", "one": "x"}
"""Naming scheme -> name of the i-th tensor; `swapped` gives each the name of another."""


def copied(case: Case) -> Case:
    """Return the same case with new tensors."""
    return codec.load(*codec.dump(case))


def renamed(case_id: str, case: Case, how: str, seed: int) -> Case:
    """Compare the case with a copy whose tensors have other, equal, empty or exchanged names."""
    other = copied(case)
    tensors: dict[Tensor, None] = dict.fromkeys(other.persistent)
    for step in other.steps:
        tensors |= dict.fromkeys(step.graph.tensors())
    names = [t.name for t in tensors]
    for i, t in enumerate(tensors):
        t.name = names[-1 - i] if how == "swapped" else NAMINGS[how].format(i)
    n = len(case.steps)
    runs = (Run("the case as it is", 0, n, opening=1), Run("the case with other names", n, 2 * n, opening=2))
    relation = Relation("renamed", "renamed tensors = same result", BITS, runs, ((0, 1),))
    return combine(case_id, relation, [case, other], {**case.params, "how": how}, seed)


def memory(case_id: str, case: Case, seed: int) -> Case:
    """Compare graphs at fresh addresses with graphs in reused memory."""
    n = len(case.steps)
    runs = (
        Run("each graph at addresses of its own", 0, n, opening=1, options={"memory": "fresh"}),
        Run("every graph in the memory of the one before", 0, n, 2, OVERWRITTEN, {"memory": "reused"}),
    )
    relation = Relation("memory", "graphs at fresh addresses = graphs in the same memory", BITS, runs, ((0, 1),))
    return combine(case_id, relation, [case], case.params, seed)


def warm(case_id: str, case: Case, seed: int) -> Case:
    """Compare cold, warm, rebuilt and new-process runs; `cache_dir` adds the disk cache."""
    n, options = len(case.steps), {"cache_dir": FOLDER}
    runs = (
        Run("the first run", 0, n, opening=1, options=options),
        Run("the second run on the same backend", 0, n, opening=1, options=options),
        Run("a run of the same tensors made anew", n, 2 * n, opening=1, options=options),
        Run("a run in a new process", 0, n, opening=2, how=PROCESS, options=options),
    )
    relation = Relation("warm", "cold = warm = new process", BUDGET, runs, ((0, 1), (0, 2), (0, 3)))
    return combine(case_id, relation, [case, copied(case)], case.params, seed)


def buffers(case_id: str, case: Case, seed: int) -> Case:
    """Compare the buffer types of weights."""
    n = len(case.steps)
    runs = (
        Run("weights in the default buffer type", 0, n),
        Run("weights in another", 0, n, opening=1, how=BUFFERS),
    )
    relation = Relation("buffers", "weight in any buffer type = same result", BUDGET, runs, ((0, 1),))
    return combine(case_id, relation, [case], case.params, seed)


MANY = 8
ATTENTION = ("FLASH_ATTN_EXT", "SOFT_MAX")
"""Ops whose `src[0]` has the heads in `ne[2]`."""


def threads(case_id: str, case: Case, seed: int) -> Case:
    """Compare runs with one thread, eight, and one more than there are heads."""
    attended = [n.src[0] for s in case.steps for n in s.graph if n.op in ATTENTION]
    heads = max((x.ne[2] for x in attended if x is not None), default=2)
    counts = sorted({1, heads + 1, MANY})
    n = len(case.steps)
    runs = tuple(Run(f"threads={k}", 0, n, i, THREADS, {"threads": str(k)}) for i, k in enumerate(counts, 1))
    whole = tuple((0, i) for i in range(1, len(runs)))
    relation = Relation("threads", "one thread = as many as heads and one more = eight", BUDGET, runs, whole)
    return combine(case_id, relation, [case], case.params, seed)


def after(case_id: str, values: Mapping[str, Any], params: Mapping[str, str], seed: int) -> Case:
    """Compare B alone with B after an A whose tensors have the same names."""
    if values["of"] != "sublayer" or values["shared"] != "0":
        raise UsageError(f"case {case_id!r}: after: of=sublayer and shared=0 expected")
    b = alias.alone(case_id, replace(alias.DIFFERS[values["differs"]], row=values["k"]), values["tokens"])
    a = alias.alone(case_id, alias.Traits(row=values["k"]), values["tokens"])
    n = len(b.steps)
    runs = (
        Run("B alone", 0, n, opening=1),
        Run("A before B", n, 2 * n, opening=2),
        Run("B after A", 0, n, opening=2),
    )
    relation = Relation("after", "A then B = B alone", BUDGET, runs, ((0, 2),))
    return combine(case_id, relation, [b, a], params, seed)
