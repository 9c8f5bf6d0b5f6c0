"""Judge cases with recorded values: the free run against the recording, and each node alone.

A recording has its own arithmetic, whose error depends on the graph: 1e-8 on a small float32 model, 6e-4 on twelve
layers of Q4_K. So the reference computes the graph in that arithmetic and in float64, and a correct backend may differ
from the recording by their distance. Neither the recording nor the backend under test affects it. A free run is also
compared with the reference in the backend's arithmetic, within the ordinary tolerances: for an exact backend these are
tight even if the recording has large errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt

from conformance.backend.interface import Backend
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, NAMED, Arithmetic
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.ggml.quants.requant import weight_form
from conformance.ggml.tensor import Bytes, Tensor, packed_nbytes
from conformance.judge.budget import Budget, free_running
from conformance.judge.cancellation import KnownValues
from conformance.judge.compare import compare
from conformance.judge.judge import Judged, how_wrong, judge_isolated, judge_node, judge_trajectory
from conformance.judge.verdict import Result, Verdict
from conformance.judge.wrong import Wrong
from conformance.suite.batch import isolated_nodes

from . import locate
from .attempt import UnderTest
from .execute import Execution, StepValues, computed_nodes, execute, with_values
from .oracle import Expectation

FACTOR = 4.0
"""Allowed multiple of an arithmetic's error, measured on few logits."""
WHOLE_BYTES = 1 << 28
"""Maximum bytes of a step's values, to judge it node by node without recorded nodes."""


@dataclass(frozen=True, slots=True)
class Recording(Expectation):
    """A recording as expected values, with the reference's values."""

    declared: Arithmetic
    """Arithmetic of the backend under test."""
    distances: list[dict[Tensor, Budget]] | None
    """Error of both arithmetics by step and tensor; None if the recorder's is unknown."""
    reference: list[StepValues] | None
    """The reference in the backend's arithmetic; None if the reference is under test."""

    @property
    def values(self) -> list[StepValues]:
        """Recorded values, and the reference's where none are recorded."""
        if self.reference is None:
            return self.steps
        return [
            StepValues({**mine.outputs, **recorded.outputs}, {**mine.caches, **recorded.caches})
            for mine, recorded in zip(self.reference, self.steps, strict=True)
        ]

    def judge(self, case: Case, execution: Execution) -> tuple[list[Judged], list[Judged]]:
        """Judge a free run by the recording, and by the reference in the backend's arithmetic.

        Caches that the backend cannot read are not compared.
        """
        found = [v.all for v in execution.steps]
        record = execution.comparable(self.steps)
        by_record = list(judge_trajectory(case, record, found, self.arithmetic, self.distances))
        if self.reference is None:
            return by_record, []
        plain = replace(case, tolerance={})
        want = execution.comparable(self.reference)
        return by_record, list(judge_trajectory(plain, want, found, self.declared, by_nodes=True))


def is_free_running(case: Case) -> bool:
    """Return True if the case is judged by its own recording."""
    return bool(case.tolerance) and all(s.expected for s in case.steps)


def judges(case: Case, arithmetic: Arithmetic) -> bool:
    """Return True if a free run is compared with the recording.

    If the backend requantises weights, it is compared with the reference, which uses the same weights.
    """
    return is_free_running(case) and not requantises(case, arithmetic)


def requantises(case: Case, arithmetic: Arithmetic) -> bool:
    """Return True if a backend in `arithmetic` converts a weight of `case` to another type."""
    return any(weight_form(n, arithmetic.at(n).weights, arithmetic.at(n).rows) for s in case.steps for n in s.graph)


def same_weights(case: Case, one: Arithmetic, other: Arithmetic) -> bool:
    """Return True if both arithmetics read each weight of `case` in the same form."""
    forms = ([weight_form(n, a.at(n).weights, a.at(n).rows) for s in case.steps for n in s.graph] for a in (one, other))
    return next(forms) == next(forms)


def has_nodes(case: Case) -> bool:
    """Return True if the recording of some step has every computed node."""
    return is_free_running(case) and any(_whole(case, k) for k in range(len(case.steps)))


def _whole(case: Case, k: int) -> bool:
    step = case.steps[k]
    return all(n in step.expected for n in computed_nodes(step))


def expectation(tested: UnderTest, case: Case) -> Recording:
    """Return recording and reference as expected values; ConformanceError if the latter fails."""
    oracle, caches = tested.oracle, case.caches()
    steps = [
        StepValues({t: s.expected[t] for t in s.outputs}, {t: s.expected[t] for t in caches if t in s.expected})
        for s in case.steps
    ]
    made = arithmetic_of(case)
    declared = tested.backend.arithmetic_in(case)
    distances, own = None, None
    if not has_nodes(case):
        oracle.whole(case, made or EXACT if tested.is_reference else declared, _held(case))
    exact = oracle.expect([case], EXACT)[0].steps
    if not tested.is_reference:
        own = oracle.expect([case], declared)[0].steps
    if made is not None:
        there = oracle.expect([case], made)[0].steps
        distances = _distances(exact, there, there if own is None else own)
    # The chain has float32, stores and rounded products; `distances` has the activations' rounding on both sides.
    limits = replace(EXACT, products=declared.products)
    return Recording(steps, exact, limits, declared, distances, own)


def _distances(
    exact: Sequence[StepValues], there: Sequence[StepValues], own: Sequence[StepValues]
) -> list[dict[Tensor, Budget]]:
    """Return `FACTOR` times the error of both arithmetics in each tensor, per step.

    It is the maximum of all steps so far: each is a sample of few values, and caches carry errors of earlier steps.
    """
    most: dict[str, float] = {}
    found = []
    for right, *others in zip(exact, there, own, strict=True):
        here = {}
        for t, value in right.all.items():
            root = 0.0
            for i, values in enumerate(others):
                nmse = compare(t, value, values.all[t], unordered=t.op == "TOP_K").nmse
                key = f"{i} {t.name}"
                most[key] = max(most.get(key, 0.0), nmse if isfinite(nmse) else 0.0)
                root += sqrt(FACTOR * most[key])
            here[t] = free_running(root * root)
        found.append(here)
    return found


def arithmetic_of(case: Case) -> Arithmetic | None:
    """Return the arithmetic of the recording, if the case names a known one."""
    said = case.provenance.get("arithmetic")
    return NAMED.get(said) if isinstance(said, str) else None


def imitating(tested: UnderTest, case: Case) -> UnderTest:
    """Return what to run; the reference imitates the arithmetic of the recording."""
    arithmetic = arithmetic_of(case)
    if tested.is_reference and arithmetic is not None:
        return replace(tested, backend=tested.oracle.reference_in(arithmetic))
    return tested


# -- node by node -----------------------------------------------------------------------------------------------------


def judge_nodes(result: Result, tested: UnderTest, case: Case) -> Result:
    """Return `result` of the free run with nodes judged one by one, given right sources.

    The node with the largest error counts. Steps with all nodes recorded use the recorded values; without such steps,
    the first step of each layout uses the reference's. Steps that cannot be judged are named in a note and keep the
    verdict.
    """
    if has_nodes(case):
        steps = [k for k in range(len(case.steps)) if _whole(case, k)]
        judge = _by_record
    else:
        steps, judge = layouts(case), _by_reference
    missed: dict[str, list[int]] = {}
    equal = result.nmse == 0
    for k in steps:
        try:
            judged, same = judge(tested, case, k)
        except Exception as e:  # noqa: BLE001  # an adapter may raise anything; the free run keeps its verdict
            missed.setdefault(reason(e).replace(f"{case.id}#{k}", case.id), []).append(k)
            continue
        equal = equal and same
        result = _with_nodes(result, judged, case)
    for why, at in missed.items():
        result = result.noted(f"node by node: not judged at step{'s' * (len(at) > 1)} {', '.join(map(str, at))}: {why}")
    if equal and not missed and has_nodes(case):
        result = result.noted("bit-identical to the recording, freely and node by node")
    return result


def reason(error: BaseException) -> str:
    """Return the message of an error, with its class if it is not ours."""
    return str(error) if isinstance(error, ConformanceError) else f"{type(error).__name__}: {error}"


def _by_record(tested: UnderTest, case: Case, k: int) -> tuple[list[Judged], bool]:
    """Judge nodes of step `k` given recorded sources; True if all equal the recording.

    Each is compared with the recording (within the distance of two arithmetics), if that applies to this arithmetic.
    Unless the recording has the backend's arithmetic, each is also compared with the reference in that arithmetic
    (within rounding).
    """
    backend, recording = tested.backend, arithmetic_of(case)
    by_record = judges(case, backend.arithmetic_in(case))
    alone, original = isolated_nodes(case, k)
    found = _alone(backend, alone)
    declared = backend.arithmetic_in(alone)
    same = recording is not None and recording == declared
    record = case.steps[k].expected
    judged = []
    if by_record:
        known = KnownValues(alone, 0, alone.steps[0].expected)
        for copy, n in original.items():
            limits = replace(recording or declared.at(copy), products=declared.at(copy).products)
            at = judge_node(copy, record[n], found[copy], limits, step=k, same=same, known=known)
            judged.append(replace(at, tensor=n))
    equal = by_record and not any(j.difference.raw for j in judged)
    if not same:
        right = execute(tested.oracle.reference_in(declared), alone).steps[0].outputs
        judged += judge_isolated(alone, original, right, found, declared, step=k)
    return judged, equal


def _by_reference(tested: UnderTest, case: Case, k: int) -> tuple[list[Judged], bool]:
    """Judge nodes of step `k` given the reference's values; for the reference, by the real ggml."""
    size = _size(case, k)
    if size > WHOLE_BYTES:
        raise BackendError(f"its nodes' values take {size:,} bytes, and {WHOLE_BYTES:,} are allowed")
    arithmetic = tested.backend.arithmetic_in(case)
    values = tested.oracle.whole(case, arithmetic, _held(case))
    alone, original = isolated_nodes(with_values(case, values), k)
    right: Mapping[Tensor, Bytes] = alone.steps[0].expected
    if tested.is_reference:
        found, right = right, _alone(tested.oracle.second_opinion(), alone)
    else:
        found = _alone(tested.backend, alone)
    each = arithmetic.copied(original)
    return list(judge_isolated(alone, original, right, found, each, step=k)), False


def layouts(case: Case) -> list[int]:
    """Return the first step of each distinct graph."""
    first: dict[tuple[object, ...], int] = {}
    for k, step in enumerate(case.steps):
        kind = tuple(
            (n.op, n.op_params, n.type.name, n.ne, tuple(s and s.type.name for s in n.src)) for n in step.graph
        )
        first.setdefault(kind, k)
    return list(first.values())


def _held(case: Case) -> list[int]:
    """Return the layouts whose nodes' values fit into `WHOLE_BYTES`."""
    return [k for k in layouts(case) if _size(case, k) <= WHOLE_BYTES]


def _size(case: Case, k: int) -> int:
    return sum(packed_nbytes(n) for n in computed_nodes(case.steps[k]))


def _alone(backend: Backend, alone: Case) -> Mapping[Tensor, Bytes]:
    return execute(backend, alone).steps[0].outputs


def _with_nodes(result: Result, judged: list[Judged], case: Case) -> Result:
    worst = max(judged, key=lambda j: j.used, default=None)
    if worst is None:
        return result
    result = replace(result, budget_used=max(result.budget_used or 0.0, worst.used))
    wrong = next((j for j in judged if j.used > 1), None)
    if wrong is None or not result.unlocated:
        return result
    how = Wrong.worst(w for w in (result.wrong, how_wrong(judged)) if w is not None)
    fed = "recorded values" if has_nodes(case) else "the reference's values"
    found = replace(result, verdict=Verdict.FAIL, wrong=how, where=locate.describe(wrong, case), notes=())
    return found.noted(f"inputs: {fed}")
