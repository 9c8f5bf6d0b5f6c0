"""Runs the graphs that llama.cpp built for a prompt as one trajectory on a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from conformance.backend.interface import Backend, Session
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.tensor import Bytes, Tensor, pack
from conformance.judge.judge import Chain, Judged, judge_isolated, judge_step
from conformance.run.execute import computed_nodes, execute
from conformance.suite.batch import isolated_nodes

F32 = NDArray[np.float32]
Say = Callable[[str], None]
"""Reports progress."""
LOGITS = "result_output"
"""llama.cpp's name of the logits tensor."""


def silent(_: str) -> None:
    """Report nothing."""


@dataclass(slots=True)
class GraphOutputs:
    """A backend's results for the graphs, each started from the caches of the previous one."""

    outputs: list[Mapping[Tensor, Bytes]] = field(default_factory=list)
    """Outputs of each step."""
    caches: dict[Tensor, Bytes] = field(default_factory=dict)
    """Caches after the last step."""

    def logits(self, case: Case) -> F32:
        """Return the logits of all steps in order, `[rows, n_vocab]`; UsageError as `logits_of`."""
        rows = zip(case.steps, self.outputs, strict=False)
        return np.concatenate([_rows(t := logits_of(s), o[t]) for s, o in rows if s.outputs])


def logits_of(step: Step) -> Tensor:
    """Return the output that holds the logits; UsageError if there is none."""
    named = [t for t in step.outputs if t.name == LOGITS]
    if not named:
        raise UsageError(f"no output called {LOGITS} in llama.cpp's graph; it has {', '.join(map(str, step.outputs))}")
    return named[0]


def rows_of(step: Step) -> int:
    """Return the number of rows of logits, 0 for a shift of caches; UsageError as `logits_of`."""
    return logits_of(step).ne[1] if step.outputs else 0


def _rows(t: Tensor, data: Bytes) -> F32:
    return np.asarray(data.view("<f4").reshape(-1, t.ne[0]))


def run(backend: Backend, case: Case, *, say: Say = silent) -> GraphOutputs:
    """Run the steps in order; BackendError, with its step, if the backend fails."""
    *_, found = steps(backend, case, say)
    return found


def steps(backend: Backend, case: Case, say: Say = silent) -> Iterator[GraphOutputs]:
    """Run the steps in order; yield the results so far, one object, after each. Raises as `run`."""
    found = GraphOutputs()
    with backend.open(case) as session:
        for k, step in enumerate(case.steps):
            say(f"step {k + 1} of {len(case.steps)}")
            found.outputs.append(dict(compute(session, k, step)))
            if k + 1 == len(case.steps):
                found.caches = caches_of(session, case)
            yield found


def compute(session: Session, k: int, step: Step, nodes: tuple[Tensor, ...] = ()) -> Mapping[Tensor, Bytes]:
    """Return the outputs of step `k`, or the values of `nodes`; a BackendError gets the step."""
    try:
        return session.compute(step.graph, step.inputs, nodes or step.outputs)
    except BackendError as e:
        e.step = k
        raise


def caches_of(session: Session, case: Case) -> dict[Tensor, Bytes]:
    """Return the bytes of every cache that the session can read."""
    hidden = session.opaque()
    return {t: pack(session.read(t), t, 0) for t in case.caches() if t not in hidden}


def judge(case: Case, found: GraphOutputs, expected: GraphOutputs, arithmetic: Arithmetic) -> list[Judged]:
    """Judge all outputs of the common steps, and the final caches, by their chain of nodes.

    `expected` was computed in `arithmetic`.
    """
    chain = Chain(arithmetic)
    judged: list[Judged] = []
    plain = replace(case, tolerance={})
    last = len(case.steps) - 1
    for k, (got, want) in enumerate(zip(found.outputs, expected.outputs, strict=False)):
        ends = {t: x for t, x in expected.caches.items() if t in found.caches} if k == last else {}
        mine = {**got, **found.caches} if ends else got
        judged += judge_step(plain, k, {**want, **ends}, mine, arithmetic, chain)
    return judged


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step as a backend ran it, with the value of every node."""

    case: Case
    """A case of this step, with the backend's caches at the start, and its values."""
    step: int
    """Index of the step in the whole run."""

    def wrong(self, reference: Backend, found: Mapping[Tensor, Bytes] | None = None) -> list[Judged]:
        """Return the nodes that are wrong for the recorded inputs, in order.

        `reference` computes in the backend's arithmetic; `found` are values to judge in place of the recorded ones.
        """
        found = self.case.steps[0].expected if found is None else found
        alone, original = isolated_nodes(self.case, 0)
        arithmetic = reference.arithmetic()
        each = arithmetic.copied(original)
        right = execute(reference if each is arithmetic else reference.computing_in(each), alone).steps[0].outputs
        return [j for j in judge_isolated(alone, original, right, found, each) if j.used > 1]


def alone(case: Case, k: int, caches: Mapping[Tensor, Bytes], values: Mapping[Tensor, Bytes]) -> StepRun:
    """Make a case of step `k` alone, starting from `caches`, with the recorded `values`."""
    step = case.steps[k]
    used = set(step.graph.tensors())
    persistent = {t: data for t, data in {**case.persistent, **caches}.items() if t in used}
    only = Case(
        case.id.replace("@", f"-step={k}@"),
        persistent,
        [Step(step.graph, step.inputs, step.outputs, dict(values), step.note)],
        family=case.family,
        params={**case.params, "step": k},
        provenance=case.provenance,
        references={t: r for t, r in case.references.items() if t in used},
    )
    return StepRun(only, k)


def inspect(backend: Backend, case: Case, steps: list[int], *, say: Say = silent) -> list[StepRun]:
    """Run up to the last of `steps`; return these with the values of all their nodes."""
    found: list[StepRun] = []
    with backend.open(case) as session:
        for k, step in enumerate(case.steps[: max(steps) + 1]):
            if k not in steps:
                compute(session, k, step)
                continue
            say(f"every node of step {k + 1}")
            caches = caches_of(session, case)
            found.append(alone(case, k, caches, compute(session, k, step, tuple(computed_nodes(step)))))
    return found
