"""A relation: its runs and the values that must be equal, as data of the case.

A relation is a case with the steps of all its runs, one run after the other; `params["relation"]` lists where each
begins and what is compared. So it is saved, read, shown and rerun like any other case. Nothing runs here.

    {"name": "chunked", "says": "whole prefill = chunked prefill", "equal": "budget",
     "runs": [{"what": "whole", "first": 0, "last": 2}, {"what": "chunks", "first": 2, "last": 5}],
     "whole": [[0, 1]], "links": [{"left": [[0, 1, "output", 0, [2, 3]]], "right": [[1, 2, "output", 0, [0, 1]]]}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.case.case import JSON, Case, Step
from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Bytes, Tensor

KEY = "relation"

PLAIN, OVERWRITTEN, BUFFERS, PROCESS = "plain", "overwritten", "buffers", "process"
RESTORED, WRITTEN, UNREAD, HANDED_OVER, REUSED = "restored", "written", "unread", "handed", "reused"
THREADS, BY_NODE = "threads", "apart"
HOW: dict[str, str] = {
    PLAIN: "each step's graph in its own memory",
    OVERWRITTEN: "each step's graph rebuilt in the memory of the previous one, as llama.cpp does",
    BUFFERS: "once for each further buffer type that the backend offers for weights",
    PROCESS: "in a separate process",
    THREADS: "with the number of threads in `options`, if the backend has that option",
    RESTORED: "caches saved after step `at`, and written back after the next, as llama_state_set_data does",
    WRITTEN: "weights and caches written after step `at`, with the initial bytes of the first run",
    UNREAD: "no cache is read before the end",
    HANDED_OVER: "like UNREAD; after step `at` every other cache is overwritten with its bytes in the first run",
    BY_NODE: "each computing node in its own graph and session, from the values of earlier nodes",
    REUSED: "the first of equal graphs computed again, as llama.cpp reuses graphs",
}
"""Ways to run a trajectory."""

FOLDER = "{folder}"
BITS, BUDGET = "bits", "budget"


@dataclass(frozen=True, slots=True)
class Run:
    """One trajectory in its own session."""

    what: str
    """Description for messages."""
    first: int
    last: int
    """End of the run's steps: `steps[first:last]` of the case."""
    opening: int = 0
    """Number of the opened backend that runs share; 0 is the suite's regular one."""
    how: str = PLAIN
    options: Mapping[str, str] = field(default_factory=dict)
    """Backend options for this opening, if its adapter has them.

    FOLDER stands for an initially empty folder that all openings of the relation share."""
    at: int = 0
    """Step, relative to the run's first, after which `how` acts; omitted from the JSON if 0."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of one tensor after one step of one run."""

    run: int
    step: int
    """Index of the step, relative to the run's first step."""
    kind: str
    """`output` or `cache`."""
    index: int
    """Index among the step's outputs, or the case's persistent tensors."""
    rows: tuple[int, ...] | None = None
    """Rows of `ne[0]` elements; None for all."""

    def tensor(self, case: Case, relation: Relation) -> Tensor:
        """Return its tensor."""
        if self.kind == "cache":
            return list(case.persistent)[self.index]
        return case.steps[relation.runs[self.run].first + self.step].outputs[self.index]


@dataclass(frozen=True, slots=True)
class Link:
    """Values that must be equal: the places of each side, concatenated."""

    left: tuple[Place, ...]
    right: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A parsed relation."""

    name: str
    says: str
    """The relation in words: `whole prefill = chunked prefill`."""
    equal: str
    """`bits`, or `budget`: each side may have an error within its budget."""
    runs: tuple[Run, ...]
    whole: tuple[tuple[int, int], ...] = ()
    """Pairs of runs whose outputs and caches must all be equal, step by step."""
    links: tuple[Link, ...] = ()

    def to_json(self) -> JSON:
        """Return the JSON object stored in a case."""
        runs = [
            {f: getattr(r, f) for f in Run.__slots__ if f != "at" or r.at} | {"options": dict(r.options)}
            for r in self.runs
        ]
        links = [{"left": [_place(p) for p in k.left], "right": [_place(p) for p in k.right]} for k in self.links]
        whole = [list(pair) for pair in self.whole]
        return {
            "name": self.name, "says": self.says, "equal": self.equal, "runs": runs, "whole": whole, "links": links,
        }  # fmt: skip


def _place(p: Place) -> JSON:
    return [p.run, p.step, p.kind, p.index, None if p.rows is None else list(p.rows)]


def applies(case: Case) -> bool:
    """Return True if `case` is a relation."""
    return KEY in case.params


def combine(case_id: str, relation: Relation, cases: Sequence[Case], params: Mapping[str, JSON], seed: int) -> Case:
    """Return a case with the steps and tensors of `cases`, in order, and their relation.

    The cases share no tensor. The relation counts steps through all of `cases`; several runs may use the same steps.
    """
    persistent: dict[Tensor, Bytes] = {}
    steps: list[Step] = []
    for c in cases:
        persistent |= c.persistent
        steps += c.steps
    return Case(
        case_id, persistent, steps, family=case_id.partition("/")[0], params={**params, KEY: relation.to_json()},
        seed=seed, generator=max(c.generator for c in cases),
    )  # fmt: skip


def read(case: Case) -> Relation:
    """Return the relation of `case`; GraphError if it has none or an invalid one."""
    doc: Any = case.params.get(KEY)
    try:
        runs = tuple(Run(**r) for r in doc["runs"])
        links = tuple(Link(_places(k["left"]), _places(k["right"])) for k in doc["links"])
        whole = tuple((int(a), int(b)) for a, b in doc["whole"])
        relation = Relation(str(doc["name"]), str(doc["says"]), str(doc["equal"]), runs, whole, links)
        _check(case, relation)
    except (TypeError, KeyError, ValueError, IndexError) as e:
        raise GraphError(f"{case.id}: params.{KEY}: a relation of runs expected, a malformed one found: {e}") from None
    return relation


def _places(listed: Any) -> tuple[Place, ...]:  # noqa: ANN401  # JSON
    return tuple(Place(r, s, k, i, None if rows is None else tuple(rows)) for r, s, k, i, rows in listed)


def _check(case: Case, relation: Relation) -> None:
    """Raise ValueError if a reference of the relation is invalid."""
    if relation.equal not in {BITS, BUDGET}:
        raise ValueError(f"equal: {BITS} or {BUDGET} expected, {relation.equal!r} found")
    if not relation.runs or not (relation.whole or relation.links):
        raise ValueError("runs and comparisons expected")
    for r in relation.runs:
        if r.how not in HOW or not 0 <= r.first < r.last <= len(case.steps) or not 0 <= r.at < r.last - r.first:
            raise ValueError(f"run {r} does not fit this case of {len(case.steps)} steps")
        _check_after_first(case, relation, r)
    for a, b in relation.whole:
        left, right = case_of(case, relation, a), case_of(case, relation, b)
        if [len(s.outputs) for s in left.steps] != [len(s.outputs) for s in right.steps]:
            raise ValueError(f"runs {a} and {b} have other steps or outputs than each other: no comparison is possible")
    for p in (p for link in relation.links for p in (*link.left, *link.right)):
        run = relation.runs[p.run]
        t = p.tensor(case, relation)
        n = t.ne[1] * t.ne[2] * t.ne[3]
        if p.run < 0 or not 0 <= p.step < run.last - run.first or p.kind not in {"output", "cache"} or p.index < 0:
            raise ValueError(f"{p} is nowhere in this case")
        if any(not 0 <= i < n for i in p.rows or ()):
            raise ValueError(f"{p}: {t} has {n} rows")


def _check_after_first(case: Case, relation: Relation, r: Run) -> None:
    """Raise ValueError if `r` takes bytes from the first run that it does not have."""
    first = relation.runs[0]
    if r.how in {WRITTEN, HANDED_OVER} and first.how != PLAIN:
        raise ValueError(f"the first run, {first}, must be {PLAIN} for another to take bytes from it")
    if r.how == HANDED_OVER and (r.first, r.last) != (first.first, first.last):
        raise ValueError(f"run {r} has other steps than the first and takes caches from it")
    if r.how == WRITTEN:
        sizes = [
            [d.nbytes for d in case_of(case, relation, relation.runs.index(x)).persistent.values()] for x in (first, r)
        ]
        if sizes[0] != sizes[1]:
            raise ValueError(f"run {r} has other weights and caches than the first and takes bytes from it")


def cases_of(case: Case) -> list[Case]:
    """Return the cases of a relation's runs, or `case` itself; GraphError if invalid."""
    if not applies(case):
        return [case]
    relation = read(case)
    return [case_of(case, relation, i) for i in range(len(relation.runs))]


def case_of(case: Case, relation: Relation, run: int) -> Case:
    """Return the case of one run: its steps and persistent tensors; IndexError if unknown."""
    if run < 0:
        raise IndexError(f"run {run}")
    r = relation.runs[run]
    steps = case.steps[r.first : r.last]
    used = {t for s in steps for t in s.graph.tensors()}
    persistent = {t: d for t, d in case.persistent.items() if t in used}
    params = {k: v for k, v in case.params.items() if k != KEY}
    recipes = {t: made for t, made in case.recipes.items() if t in used}
    return replace(case, id=f"{case.id}#{r.what}", persistent=persistent, steps=steps, params=params, recipes=recipes)
