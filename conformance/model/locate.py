"""Where a wrong backend goes wrong first: step, layer and node; and the smallest case that shows it, saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Expansion
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.text import shell
from conformance.judge.evidence import Fault
from conformance.judge.judge import Judged, judge_step
from conformance.judge.text import STALE
from conformance.report.runfile import write_text
from conformance.report.snippet import cpp, python
from conformance.run.execute import StepValues, execute
from conformance.run.isolation.isolate import Isolation
from conformance.run.locate import OPS, TOGETHER, Probe, near_tie, sentence
from conformance.run.runner import Runner
from conformance.run.session import failures
from conformance.run.shrink import shrink, size
from conformance.suite.batch import isolated_nodes

from . import graphs
from .graphs import Say, StepRun, caches_of, compute, look

Anew = Callable[[], AbstractContextManager[Backend]]
"""Opens the backend once more, and closes it."""
Looked = tuple[StepRun, Sequence[Judged]]
"""A step every node of which was asked for, and those that are wrong."""
WORDS = {Fault.NODE: "this node is wrong by itself", Fault.GRAPH: TOGETHER, Fault.STALE: STALE[Fault.STALE]}
SHARE = 1e-2
"""Share that an own NMSE must reach: of the largest of a run, to be named before it; and of that of the outputs, to
explain it, where nodes could not be judged as they ran. It is room for what the rest of a model makes of an error."""


@dataclass(frozen=True, slots=True)
class Found:
    """The first thing that is wrong."""

    judged: Judged
    """As of the only step of `run`."""
    run: StepRun
    fault: Fault | None
    """None: it is none, but `tie`."""
    tie: str = ""
    """The choice in words."""
    alike: int = 0
    """How many more nodes of the same op and types are wrong, each in a graph of its own."""
    lesser: Sequence[Judged] = ()
    """Nodes that are wrong, too, by too little to explain the result."""

    @property
    def node(self) -> Tensor:
        """The node at fault; of a cache the first node that writes it."""
        return _writer(self.judged.tensor, self.run.case.steps[0].graph)

    @property
    def words(self) -> str:
        """What kind of fault it is."""
        if self.fault is None:
            return self.tie
        if not self.alike:
            return WORDS[self.fault]
        types = ", ".join(s.type.name for s in self.judged.tensor.src if s is not None)
        return f"{WORDS[self.fault]}, and so are {self.alike} more {self.judged.tensor.op} of {types}"


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that has another value where others are asked for, too: it is computed, and what is handed out is lost."""

    judged: Judged
    """Beside every other node of the step; where it alone is asked for, it is right."""
    run: StepRun
    ends: bool
    """Whether it is right only where the graph ends with it."""
    named: Judged | None = None
    """Where it alone is asked for, and wrong there, too, otherwise."""
    lesser: Sequence[Judged] = ()
    """Nodes that are wrong by themselves, by too little to explain the result."""

    @property
    def words(self) -> str:
        """The probe."""
        alone = "alone, in a graph that ends with it" if self.ends else "alone"
        said = sentence(self.judged, self.run.case)
        is_ = "it is right" if self.named is None else f"it is off by NMSE {self.named.difference.nmse:.2g}"
        return f"probe: asked for beside every other node, {said}; asked for {alone}, {is_}: outputs get lost"


def _writer(t: Tensor, graph: Graph) -> Tensor:
    if t in graph.nodes:
        return t
    return next((n for n in graph if writes_in_place(n) and n.root is t), t)


def first(
    backend: Backend,
    reference: Backend,
    case: Case,
    looked: Sequence[Looked],
    anew: Anew,
    say: Say,
) -> Found | Lost | None:
    """The first wrong node of a run, or the first wrong cache or output where each node by itself is right, or a choice
    of experts at a near-tie (`TIE`) that explains it; a `Lost` node where the backend hides which is wrong; None where
    nothing is wrong step by step.

    `looked` are steps whose nodes were judged, each with the wrong ones. `reference` computes in the backend's
    arithmetic. BackendError if either fails.
    """
    seen = next((alone(backend, reference, run, _culprit(wrong)) for run, wrong in looked if wrong), None)
    upto = seen.run.step if isinstance(seen, Found) else len(case.steps)
    step = _first_step(backend, reference, case, upto, say)
    if step is None:
        return seen
    (run,) = look(backend, case, [step.run.step], say=say)
    lost = None
    if wrong := run.wrong(reference):
        found = alone(backend, reference, run, _culprit(wrong))
        if isinstance(found, Found):
            return found
        one_by_one = _one_by_one(backend, reference, run, step, say)
        if isinstance(one_by_one, Found):
            return one_by_one
        lost = replace(found, lesser=one_by_one)
    elif tie := _tie(run, reference):
        return seen or replace(step, fault=None, tie=tie)
    bare = step.run
    with anew() as fresh:
        right = not any(j.used > 1 for j in _judge(bare.case, reference, _values(fresh, bare.case)))
    return replace(step, fault=Fault.STALE) if right else lost or replace(step, fault=Fault.GRAPH)


def _culprit(wrong: Sequence[Judged]) -> Judged:
    """The first of the wrong nodes whose own error comes near the largest. What is fed to each is right, or the
    backend's own value, so an earlier node that is a little over its budget does not explain what a later one does.
    """
    enough = SHARE * max(_weight([j]) for j in wrong)
    return next(j for j in wrong if _weight([j]) >= enough)


def alone(backend: Backend, reference: Backend, run: StepRun, judged: Judged) -> Found | Lost:
    """A node that is wrong where each node of a step is asked for, asked for alone: wrong by the same, or lost."""
    told = _told(backend, reference, run, _off(backend, reference, run))
    named = told.named(judged)
    if named is judged:
        return Found(judged, run, Fault.NODE)
    ends = named is None and told.judged(0, judged.tensor, run.case.steps[0].graph.nodes[-1]) is not None
    return Lost(judged, run, ends, named)


def _off(backend: Backend, reference: Backend, run: StepRun) -> list[Judged]:
    """The outputs and caches that are wrong where nothing else is asked for."""
    bare = _bare(run.case)
    return [j for j in _judge(bare, reference, _values(backend, bare)) if j.used > 1]


def _told(backend: Backend, reference: Backend, run: StepRun, off: Sequence[Judged]) -> Probe:
    outputs = {(0, j.tensor) for j in off}
    return Probe(outputs, [StepValues(dict(run.case.steps[0].expected))], backend, reference, _bare(run.case))


def _one_by_one(backend: Backend, reference: Backend, run: StepRun, step: Found, say: Say) -> Found | Sequence[Judged]:
    """Where a run in which every node is asked for tells nothing: the nodes of an op and types that are wrong each in a
    graph of its own, fed with right values, and whose errors together explain the wrong outputs, by one of them;
    else the node behind the wrong value `step`, by graphs that end earlier; else the nodes with too small errors.
    """
    off = _off(backend, reference, run)
    if not off:
        return ()
    enough = SHARE * max(_weight([j]) for j in off)
    right = execute(reference, _bare(run.case), every_node=[0]).steps[0].outputs
    fed = replace(run, case=replace(run.case, steps=[replace(run.case.steps[0], expected=dict(right))]))
    kinds: dict[tuple[object, ...], list[Judged]] = {}
    for j in fed.wrong(reference, _each(backend, fed, say)):
        kinds.setdefault((j.tensor.op, *(s.type for s in j.tensor.src if s is not None)), []).append(j)
    heaviest = max(kinds.values(), key=_weight, default=[])
    lesser = [j for kind in kinds.values() for j in kind if _weight(kind) < enough]
    if heaviest and _weight(heaviest) >= enough:
        return Found(_culprit(heaviest), fed, Fault.NODE, alike=len(heaviest) - 1, lesser=lesser)
    say("no node by itself explains it: asking for graphs that end earlier")
    traced = _told(backend, reference, run, off).traced(step.judged)
    return Found(traced, run, Fault.NODE, lesser=lesser) if traced and _weight([traced]) >= enough else lesser


def _weight(wrong: Sequence[Judged]) -> float:
    """The NMSE of all, each at most 1: no value is more wrong than altogether."""
    return sum(min(1.0, j.difference.nmse) for j in wrong)


def _each(backend: Backend, run: StepRun, say: Say) -> dict[Tensor, Bytes]:
    """The value of each node in a graph of its own, fed with the recorded values; the recorded one where the backend
    fails there, which tells nothing.
    """
    found = dict(run.case.steps[0].expected)
    every, original = isolated_nodes(run.case, 0)
    for i, (copy, node) in enumerate(original.items()):
        say(f"outputs get lost: node {i + 1} of {len(original)} in a graph of its own")
        with suppress(BackendError):
            found[node] = execute(backend, _apart(every, copy, run.case.id)).steps[0].outputs[copy]
    return found


def _first_step(backend: Backend, reference: Backend, case: Case, upto: int, say: Say) -> Found | None:
    """The first of the first `upto` steps that is wrong though the reference starts it from the backend's own caches,
    with its first wrong tensor in the order in which they are computed.
    """
    with backend.open(case) as session:
        for k, step in enumerate(case.steps[:upto]):
            say(f"step {k + 1} of {upto} from its own caches")
            before = caches_of(session, case)
            values = {**compute(session, k, step), **caches_of(session, case)}
            run = graphs.alone(case, k, before, {})
            wrong = [j for j in _judge(run.case, reference, values) if j.used > 1]
            if wrong:
                nodes = step.graph.nodes
                return Found(min(wrong, key=lambda j: nodes.index(_writer(j.tensor, step.graph))), run, Fault.GRAPH)
    return None


def _tie(run: StepRun, reference: Backend) -> str:
    """The choice of experts at a near-tie that explains what is wrong in a step each of whose nodes is right alone."""
    if not any(n.op in OPS for n in run.case.steps[0].graph):
        return ""
    mine = run.case.steps[0].expected
    right = execute(reference, _bare(run.case), every_node=[0]).steps[0].outputs
    return near_tie(run.case, [mine], [right], reference.arithmetic())


def _judge(case: Case, reference: Backend, values: Mapping[Tensor, Bytes]) -> list[Judged]:
    """A case of one step: its outputs and those caches that have values."""
    want = {t: x for t, x in _values(reference, case).items() if t in values}
    return list(judge_step(case, 0, want, values, reference.arithmetic()))


def _values(backend: Backend, case: Case) -> dict[Tensor, Bytes]:
    return execute(backend, case).steps[0].all


# -- the case that shows it -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A case file that shows the fault."""

    path: Path
    words: str
    """How large it is, and the command that runs it."""


def save(spec: Spec, found: Found, case: Case, folder: Path, isolation: Isolation, budget: float, say: Say) -> Saved:
    """Shrink the smallest of these that fails, within `budget` seconds, and save it in `folder`: the node alone, its
    step, the steps up to it. Where none fails by itself, the step is saved as it is. CaseFileError if it cannot be
    written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / failures.file_name(f"{found.run.case.id}_{spec}")
    again = shell(["conform", "repro", str(path), "--backend", str(spec)])
    with closing(Runner(isolation=isolation)) as runner:
        for candidate in _candidates(found, case):
            try:
                small = shrink(
                    runner, spec, candidate, time_budget=budget, progress=lambda text: say(f"shrinking: {text}")
                )
            except UsageError:  # it does not fail, or is too large to run
                continue
            casefile.write(path, [failures.with_result(small.case, small.result)])
            write_text(path.with_suffix(".py"), python(small.case), "-o")
            write_text(path.with_suffix(".cpp"), cpp(small.case), "-o")
            return Saved(path, f"{size(small.case)}: {again}")
    casefile.write(path, [_bare(found.run.case)])
    return Saved(path, f"not shrunk, since no part of the run fails by itself: {again}")


def _candidates(found: Found, case: Case) -> list[Case]:
    whole = [_bare(found.run.case), replace(case, steps=[_without(s) for s in case.steps[: found.run.step + 1]])]
    if found.fault == Fault.STALE:
        return whole[1:]
    return [*([_node(found)] if found.fault == Fault.NODE else []), *whole]


def _bare(case: Case) -> Case:
    return replace(case, steps=[_without(s) for s in case.steps])


def _without(step: Step) -> Step:
    return Step(step.graph, step.inputs, step.outputs)


def _node(found: Found) -> Case:
    """The node alone: each source a leaf with the bytes that it was fed with."""
    every, original = isolated_nodes(found.run.case, 0)
    return _apart(every, next(c for c, n in original.items() if n is found.judged.tensor), found.run.case.id)


def _apart(every: Case, copy: Tensor, name: str) -> Case:
    """One of the isolated nodes `every` in a case of its own."""
    growing = Expansion()
    growing.expand(copy)
    graph = growing.graph()
    used = set(graph.tensors())
    inputs = {t: data for t, data in every.steps[0].inputs.items() if t in used}
    persistent = {t: data for t, data in every.persistent.items() if t in used}
    return Case(name, persistent, [Step(graph, inputs, (copy,))], family=every.family, params=every.params)
