"""Locates the first wrong step, layer and node, and saves the smallest case that shows it."""

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
from conformance.process import Deadline
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
from .graphs import Say, StepRun, caches_of, compute, inspect

Reopen = Callable[[], AbstractContextManager[Backend]]
"""Context manager that opens a fresh backend, and closes it."""
Inspected = tuple[StepRun, Sequence[Judged]]
"""A step with the values of every node, and its wrong nodes."""
WORDS = {Fault.NODE: "this node is wrong by itself", Fault.GRAPH: TOGETHER, Fault.STALE: STALE[Fault.STALE]}
SHARE = 1e-2
"""Minimum NMSE of a node, as a share of the largest, for the node to be named first.

Also the minimum share of the outputs' NMSE that a node must have to explain it, if nodes could not be judged in
place. The margin allows for nodes that make an error smaller or larger."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first wrong node, cache or output."""

    judged: Judged
    """Its error and budget in the only step of `run`."""
    run: StepRun
    fault: Fault | None
    """Fault of the step; None if there is only a `tie`."""
    tie: str = ""
    """Description of the expert choice."""
    similar: int = 0
    """Number of further wrong nodes of the same op and types, each run in its own graph."""
    minor: Sequence[Judged] = ()
    """Further wrong nodes whose error is too small to explain the result."""
    cut: Judged | None = None
    """If no node is wrong alone: the first wrong one if graphs end with it."""

    @property
    def node(self) -> Tensor:
        """The node at fault; for a cache the first node that writes it."""
        return _writer(self.judged.tensor, self.run.case.steps[0].graph)

    @property
    def words(self) -> str:
        """Description of the fault."""
        if self.fault is None:
            return self.tie
        if self.cut is not None:
            return f"{WORDS[self.fault]}; graphs that end earlier are wrong from {_node_words(self.cut)} on"
        if not self.similar:
            return WORDS[self.fault]
        types = ", ".join(s.type.name for s in self.judged.tensor.src if s is not None)
        return f"{WORDS[self.fault]}, and so are {self.similar} more {self.judged.tensor.op} of {types}"


@dataclass(frozen=True, slots=True)
class LostOutput:
    """A node whose value changes if other outputs are requested: its output gets lost."""

    judged: Judged
    """Its error with every node of the step requested; right if requested alone."""
    run: StepRun
    ends: bool
    """True if it is right only in a graph that ends with it."""
    named: Judged | None = None
    """Its error if it is requested alone and is wrong there, too, but differently."""
    minor: Sequence[Judged] = ()
    """Nodes that are wrong when run alone, but whose error is too small to explain the result."""

    @property
    def words(self) -> str:
        """Description of both requests and their results."""
        alone = "alone, in a graph that ends with it" if self.ends else "alone"
        said = sentence(self.judged, self.run.case)
        is_ = "it is right" if self.named is None else f"it is off by NMSE {self.named.difference.nmse:.2g}"
        return f"probe: requested with every other node, {said}; requested {alone}, {is_}: outputs are lost"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two methods that name different nodes: nodes alone, and graphs that end earlier."""

    replayed: Judged | None
    """The first wrong node with recorded inputs; None if none explains the result."""
    cut: Judged | None
    """The first wrong node at the end of a graph; None if there is none."""
    run: StepRun
    minor: Sequence[Judged] = ()
    """Nodes whose error is too small to explain the result."""

    @property
    def words(self) -> str:
        """Description of both answers."""
        one, other = ("no node" if j is None else sentence(j, self.run.case) for j in (self.replayed, self.cut))
        return f"two methods disagree: each node alone, with its own inputs: {one}; graphs that end earlier: {other}"


Unplaced = LostOutput | Contradiction
"""Why no node is named."""


def _node_words(judged: Judged) -> str:
    return f"{judged.tensor.op} {judged.tensor.name} (NMSE {judged.difference.nmse:.2g})"


def _writer(t: Tensor, graph: Graph) -> Tensor:
    if t in graph.nodes:
        return t
    return next((n for n in graph if writes_in_place(n) and n.root is t), t)


def first(
    backend: Backend,
    reference: Backend,
    case: Case,
    inspected: Sequence[Inspected],
    reopen: Reopen,
    say: Say,
) -> Culprit | Unplaced | None:
    """Return the first wrong node, cache or output of a run; None if every step is right.

    A node is returned if two methods agree: it is wrong alone, with recorded inputs, and at the end of a graph, while
    its sources are right at the ends of theirs. A cache or output is returned if each node alone is right. Other
    results are a choice of experts at a near-tie (`TIE`) that explains the error, `LostOutput` if lost outputs hide
    which node is wrong, and a `Contradiction`.

    `inspected`: steps with their wrong nodes. `reference` computes in the backend's arithmetic. BackendError if either
    fails.
    """
    found = _first(backend, reference, case, inspected, reopen, say)
    if not isinstance(found, Culprit) or found.fault is not Fault.NODE:
        return found
    say("checking the node with graphs that end earlier")
    probe, least = _probe(backend, reference, found.run, ()), SHARE * _weight([found.judged])
    if probe.ends(found.judged, least):
        return found
    start = next(iter(_wrong_outputs(backend, reference, found.run)), found.judged)
    return Contradiction(found.judged, probe.traced(start, least), found.run, found.minor)


def _first(
    backend: Backend, reference: Backend, case: Case, inspected: Sequence[Inspected], reopen: Reopen, say: Say
) -> Culprit | Unplaced | None:
    seen = next((alone(backend, reference, run, _culprit(wrong)) for run, wrong in inspected if wrong), None)
    upto = seen.run.step if isinstance(seen, Culprit) else len(case.steps)
    step = _first_step(backend, reference, case, upto, say)
    if step is None:
        return seen
    (run,) = inspect(backend, case, [step.run.step], say=say)
    lost = None
    if wrong := run.wrong(reference):
        found = alone(backend, reference, run, _culprit(wrong))
        if isinstance(found, Culprit):
            return found
        one_by_one = _one_by_one(backend, reference, run, step, say)
        if isinstance(one_by_one, (Culprit, Contradiction)):
            return one_by_one
        lost = replace(found, minor=one_by_one)
    elif tie := _tie(run, reference):
        return seen or replace(step, fault=None, tie=tie)
    bare = step.run
    with reopen() as fresh:
        right = not any(j.used > 1 for j in _judge(bare.case, reference, _values(fresh, bare.case)))
    if right or lost:
        return replace(step, fault=Fault.STALE) if right else lost
    say("each node alone is right: trying graphs that end earlier")
    cut = _probe(backend, reference, run, ()).traced(step.judged)
    return replace(step, fault=Fault.GRAPH, cut=cut)


def _culprit(wrong: Sequence[Judged]) -> Judged:
    """Return the first wrong node whose own error is near the largest.

    Each node's inputs are right or the backend's own values, so an earlier node slightly over budget does not explain a
    larger error of a later node.
    """
    enough = SHARE * max(_weight([j]) for j in wrong)
    return next(j for j in wrong if _weight([j]) >= enough)


def alone(backend: Backend, reference: Backend, run: StepRun, judged: Judged) -> Culprit | LostOutput:
    """Request a wrong node alone: `Culprit` if it is wrong by the same error, else `LostOutput`."""
    probe = _probe(backend, reference, run, _wrong_outputs(backend, reference, run))
    named = probe.named(judged)
    if named is judged:
        return Culprit(judged, run, Fault.NODE)
    ends = named is None and probe.judged(0, judged.tensor, run.case.steps[0].graph.nodes[-1]) is not None
    return LostOutput(judged, run, ends, named)


def _wrong_outputs(backend: Backend, reference: Backend, run: StepRun) -> list[Judged]:
    """Return the outputs and caches that are wrong when nothing else is requested."""
    bare = _bare(run.case)
    return [j for j in _judge(bare, reference, _values(backend, bare)) if j.used > 1]


def _probe(backend: Backend, reference: Backend, run: StepRun, off: Sequence[Judged]) -> Probe:
    outputs = {(0, j.tensor) for j in off}
    return Probe(outputs, [StepValues(dict(run.case.steps[0].expected))], backend, reference, _bare(run.case))


def _one_by_one(
    backend: Backend, reference: Backend, run: StepRun, step: Culprit, say: Say
) -> Culprit | Contradiction | Sequence[Judged]:
    """Locate the fault if requesting every node gives no usable values.

    Runs each node in its own graph with right inputs. Returns the worst node of the op and types whose errors together
    explain the wrong outputs; else a `Contradiction` with the node behind the wrong value of `step` that graphs that
    end earlier show; else the nodes whose errors are too small.
    """
    off = _wrong_outputs(backend, reference, run)
    if not off:
        return ()
    enough = SHARE * max(_weight([j]) for j in off)
    right = execute(reference, _bare(run.case), every_node=[0]).steps[0].outputs
    fed = replace(run, case=replace(run.case, steps=[replace(run.case.steps[0], expected=dict(right))]))
    kinds: dict[tuple[object, ...], list[Judged]] = {}
    for j in fed.wrong(reference, _values_apart(backend, fed, say)):
        kinds.setdefault((j.tensor.op, *(s.type for s in j.tensor.src if s is not None)), []).append(j)
    heaviest = max(kinds.values(), key=_weight, default=[])
    minor = [j for kind in kinds.values() for j in kind if _weight(kind) < enough]
    if heaviest and _weight(heaviest) >= enough:
        return Culprit(_culprit(heaviest), fed, Fault.NODE, similar=len(heaviest) - 1, minor=minor)
    say("no single node explains it: trying graphs that end earlier")
    traced = _probe(backend, reference, run, off).traced(step.judged, enough)
    return Contradiction(None, traced, run, minor) if traced else minor


def _weight(wrong: Sequence[Judged]) -> float:
    """Return the sum of the NMSE, each at most 1."""
    return sum(min(1.0, j.difference.nmse) for j in wrong)


def _values_apart(backend: Backend, run: StepRun, say: Say) -> dict[Tensor, Bytes]:
    """Return each node's value from a separate graph; the recorded value if that run fails."""
    found = dict(run.case.steps[0].expected)
    every, original = isolated_nodes(run.case, 0)
    for i, (copy, node) in enumerate(original.items()):
        say(f"outputs are lost: node {i + 1} of {len(original)} alone")
        with suppress(BackendError):
            found[node] = execute(backend, _apart(every, copy, run.case.id)).steps[0].outputs[copy]
    return found


def _first_step(backend: Backend, reference: Backend, case: Case, upto: int, say: Say) -> Culprit | None:
    """Return the first of `upto` steps that is wrong from the backend's own caches.

    It names the step's first wrong tensor in order of computation.
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
                return Culprit(min(wrong, key=lambda j: nodes.index(_writer(j.tensor, step.graph))), run, Fault.GRAPH)
    return None


def _tie(run: StepRun, reference: Backend) -> str:
    """Return the expert choice at a near-tie that explains a wrong step, or an empty text."""
    if not any(n.op in OPS for n in run.case.steps[0].graph):
        return ""
    mine = run.case.steps[0].expected
    right = execute(reference, _bare(run.case), every_node=[0]).steps[0].outputs
    return near_tie(run.case, [mine], [right], reference.arithmetic())


def _judge(case: Case, reference: Backend, values: Mapping[Tensor, Bytes]) -> list[Judged]:
    """Judge the outputs of a one-step case, and those caches that have values."""
    want = {t: x for t, x in _values(reference, case).items() if t in values}
    return list(judge_step(case, 0, want, values, reference.arithmetic()))


def _values(backend: Backend, case: Case) -> dict[Tensor, Bytes]:
    return execute(backend, case).steps[0].all


# -- the case that shows it -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved case file that shows the fault."""

    path: Path
    words: str
    """Size of the saved case, and the command that runs it."""


def save(spec: Spec, found: Culprit, case: Case, folder: Path, isolation: Isolation, budget: float, say: Say) -> Saved:
    """Shrink the smallest failing case within `budget` seconds and save it in `folder`.

    Candidates are the node alone, its step, and all steps up to it. If none fails, the step is saved unshrunk.
    CaseFileError if the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / failures.file_name(f"{found.run.case.id}_{spec}")
    again = shell(["conform", "repro", str(path), "--backend", str(spec)])
    with closing(Runner(isolation=isolation)) as runner:
        for candidate in _candidates(found, case):
            try:
                small = shrink(
                    runner,
                    spec,
                    candidate,
                    deadline=Deadline.after(budget),
                    progress=lambda text: say(f"shrinking: {text}"),
                )
            except UsageError:  # it does not fail, or is too large to run
                continue
            casefile.write(path, [failures.with_result(small.case, small.result)])
            write_text(path.with_suffix(".py"), python(small.case), "-o")
            write_text(path.with_suffix(".cpp"), cpp(small.case), "-o")
            return Saved(path, f"{size(small.case)}: {again}")
    casefile.write(path, [_bare(found.run.case)])
    return Saved(path, f"not shrunk, since no part of the run fails by itself: {again}")


def _candidates(found: Culprit, case: Case) -> list[Case]:
    whole = [_bare(found.run.case), replace(case, steps=[_without(s) for s in case.steps[: found.run.step + 1]])]
    if found.fault == Fault.STALE:
        return whole[1:]
    return [*([_node(found)] if found.fault == Fault.NODE else []), *whole]


def _bare(case: Case) -> Case:
    return replace(case, steps=[_without(s) for s in case.steps])


def _without(step: Step) -> Step:
    return Step(step.graph, step.inputs, step.outputs)


def _node(found: Culprit) -> Case:
    """Make a case of the node alone: each source is a leaf with the recorded bytes."""
    every, original = isolated_nodes(found.run.case, 0)
    return _apart(every, next(c for c, n in original.items() if n is found.judged.tensor), found.run.case.id)


def _apart(every: Case, copy: Tensor, name: str) -> Case:
    """Cut one of the isolated nodes `every` out as a case."""
    growing = Expansion()
    growing.expand(copy)
    graph = growing.graph()
    used = set(graph.tensors())
    inputs = {t: data for t, data in every.steps[0].inputs.items() if t in used}
    persistent = {t: data for t, data in every.persistent.items() if t in used}
    return Case(name, persistent, [Step(graph, inputs, (copy,))], family=every.family, params=every.params)
