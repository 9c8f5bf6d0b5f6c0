"""Where a wrong backend goes wrong first: step, layer and node; and the smallest case that shows it, saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Expansion
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.text import shell
from conformance.judge.judge import Judged, judge_step
from conformance.report.runfile import write_text
from conformance.report.snippet import cpp, python
from conformance.run.blame import SECOND, TOGETHER
from conformance.run.divergence import GRAPH, KEPT, NODE, OPS, Told, near_tie, sentence
from conformance.run.execute import StepValues, execute
from conformance.run.isolation.isolate import Isolation
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
TIE = "tie"
"""Kind of a divergence that is none: another choice of experts, at scores closer than they round."""
WORDS = {NODE: "this node is wrong by itself", GRAPH: TOGETHER, KEPT: SECOND}


@dataclass(frozen=True, slots=True)
class Found:
    """The first thing that is wrong."""

    judged: Judged
    """As of the only step of `run`."""
    run: StepRun
    kind: str
    """As of a divergence, or `TIE`."""
    tie: str = ""
    """The choice in words."""

    @property
    def node(self) -> Tensor:
        """The node at fault; of a cache the first node that writes it."""
        return _writer(self.judged.tensor, self.run.case.steps[0].graph)

    @property
    def words(self) -> str:
        """What kind of fault it is."""
        return self.tie or WORDS[self.kind]


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that is wrong only as it is asked for: the library computes it, and loses the value that it hands out."""

    judged: Judged
    """Beside every other node of the step; where it alone is asked for, it is right."""
    run: StepRun
    ends: bool
    """Whether it is right only where the graph ends with it."""

    @property
    def words(self) -> str:
        """The probe."""
        alone = "alone, in a graph that ends with it" if self.ends else "alone"
        said = sentence(self.judged, self.run.case)
        return f"probe: asked for beside every other node, {said}; asked for {alone}, it is right: outputs get lost"


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
    seen = next((alone(backend, reference, run, _worst(wrong)) for run, wrong in looked if wrong), None)
    upto = seen.run.step if isinstance(seen, Found) else len(case.steps)
    step = _first_step(backend, reference, case, upto, say)
    if step is None:
        return seen
    (run,) = look(backend, case, [step.run.step], say=say)
    lost = None
    if wrong := run.wrong(reference):
        found = alone(backend, reference, run, _worst(wrong))
        if isinstance(found, Found):
            return found
        say("outputs get lost: asking for one node at a time")
        if (traced := _told(backend, reference, run).traced(step.judged)) is not None:
            return Found(traced, run, NODE)
        lost = found
    elif tie := _tie(run, reference):
        return seen or replace(step, kind=TIE, tie=tie)
    bare = step.run
    with anew() as fresh:
        right = not any(j.used > 1 for j in _judge(bare.case, reference, _values(fresh, bare.case)))
    return replace(step, kind=KEPT) if right else lost or replace(step, kind=GRAPH)


def _worst(wrong: Sequence[Judged]) -> Judged:
    """The node with the largest error of its own, the first of several: what is fed to each is the backend's own value,
    so an earlier node that is a little over its budget does not explain what a later one does.
    """
    return max(wrong, key=lambda j: j.difference.nmse)


def alone(backend: Backend, reference: Backend, run: StepRun, judged: Judged) -> Found | Lost:
    """A node that is wrong where each node of a step is asked for, asked for alone: wrong, too, or lost."""
    told = _told(backend, reference, run)
    if (named := told.named(judged)) is not None:
        return Found(named, run, NODE)
    return Lost(judged, run, told.judged(0, judged.tensor, run.case.steps[0].graph.nodes[-1]) is not None)


def _told(backend: Backend, reference: Backend, run: StepRun) -> Told:
    bare = _bare(run.case)
    outputs = {(0, j.tensor) for j in _judge(bare, reference, _values(backend, bare)) if j.used > 1}
    return Told(outputs, [StepValues(dict(run.case.steps[0].expected))], backend, reference, bare)


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
                return Found(min(wrong, key=lambda j: nodes.index(_writer(j.tensor, step.graph))), run, GRAPH)
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
    if found.kind == KEPT:
        return whole[1:]
    return [*([_node(found)] if found.kind == NODE else []), *whole]


def _bare(case: Case) -> Case:
    return replace(case, steps=[_without(s) for s in case.steps])


def _without(step: Step) -> Step:
    return Step(step.graph, step.inputs, step.outputs)


def _node(found: Found) -> Case:
    """The node alone: each source a leaf with the bytes that the backend fed it."""
    every, original = isolated_nodes(found.run.case, 0)
    copy = next(c for c, n in original.items() if n is found.judged.tensor)
    growing = Expansion()
    growing.expand(copy)
    graph = growing.graph()
    used = set(graph.tensors())
    inputs = {t: data for t, data in every.steps[0].inputs.items() if t in used}
    persistent = {t: data for t, data in every.persistent.items() if t in used}
    return Case(found.run.case.id, persistent, [Step(graph, inputs, (copy,))], family=every.family, params=every.params)
