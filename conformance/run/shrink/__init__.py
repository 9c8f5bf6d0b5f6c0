"""Shrink a failing case to the smallest case that fails in the same way.

Each pass proposes smaller cases, largest reduction first. One that fails with the same signature replaces the case, and
all passes start again, until none has a smaller candidate. A candidate need not have the meaning of the case. It must
be valid, the reference must be able to compute it, and the backend must give another result.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from conformance.backend.registry import Spec
from conformance.case import codec
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError, GraphError, UsageError
from conformance.ggml.types import I64
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Result, Verdict, counted
from conformance.process import Deadline
from conformance.run.runner import Runner
from conformance.run.signature import Signature, signature_of

from . import cuts, simplify
from .cuts import Recorded, record
from .workers import Runners

SECONDS = 120.0
"""Seconds to shrink a case if no deadline is given."""
Pass = Callable[[Recorded, Result], Iterator[Case]]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("without its recording", cuts.plain),
    ("fewer steps", cuts.steps),
    ("fewer nodes", cuts.nodes),
    ("fewer views", simplify.shapes),
    ("fewer outputs", cuts.outputs),
    ("plainer parameters", simplify.parameters),
    ("smaller", simplify.dims),
    ("simpler types", simplify.types),
    ("simpler values", simplify.values),
)
"""Passes in order, with the text that describes a success."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of shrinking."""

    case: Case
    result: Result
    """Result of `case` on the backend."""
    signature: Signature
    tried: int
    """Number of candidates that ran."""
    seconds: float
    finished: bool
    """True if no pass has a candidate left; False if time ran out first."""
    passed: tuple[Case, ...] = ()
    """Candidates that passed on the backend, each one property or more from a failing case."""


def shrink(
    runner: Runner,
    spec: Spec,
    case: Case,
    *,
    deadline: Deadline | None = None,
    accept: Callable[[Case, Result], bool] = lambda _case, _result: True,
    progress: Callable[[str], None] = lambda _: None,
    workers: Runners | None = None,
) -> Shrunk:
    """Return the smallest case found that fails on `spec` as `case` does.

    After `deadline` (None: `SECONDS`) it returns the smallest case so far, and no run but the first takes longer.
    Only cases that `accept` takes, with their results, replace the case. `progress` receives a line per success.
    `workers` run candidates in parallel, if given. UsageError if `case` does not fail on `spec`, or exceeds the cost
    limits.
    """
    start = time.monotonic()
    deadline = Deadline.after(SECONDS) if deadline is None else deadline
    if why := runner.too_costly([case]):
        raise UsageError(f"{case.id} cannot be shrunk: {why}")
    (result,) = runner.run(spec, [case])
    signature = signature_of(result)
    if signature is None:
        raise UsageError(f"{case.id} does not fail on {spec}: {result.verdict}; there is nothing to shrink")
    search = _Search(runner, spec, signature, case, result, deadline, accept, workers)
    progress(f"{signature}: {size(case)}")
    finished = search.run(progress)
    return Shrunk(
        search.case, search.result, signature, search.tried, time.monotonic() - start, finished, tuple(search.passed)
    )


def size(case: Case) -> str:
    """Return the size of a case in words."""
    nodes, elements = sum(len(s.graph) for s in case.steps), counted(simplify.elements(case), "element")
    return f"{counted(len(case.steps), 'step')}, {counted(nodes, 'node')}, {elements} in leaves"


class _Search:
    def __init__(
        self,
        runner: Runner,
        spec: Spec,
        signature: Signature,
        case: Case,
        result: Result,
        deadline: Deadline,
        accept: Callable[[Case, Result], bool],
        workers: Runners | None,
    ) -> None:
        self.case, self.result = case, result  # the smallest so far
        self.tried = 0
        self.passed: list[Case] = []
        self._runner, self._spec, self._signature, self._deadline = runner, spec, signature, deadline
        self._accept, self._workers = accept, workers
        self._seen: set[bytes] = set()
        self._started: deque[bytes] = deque()
        """Digests in `_seen` whose results were not examined yet."""
        self._of_node = self._signature.kind.partition(",")[0] == Fault.NODE
        self._of_message = self._signature.verdict is not Verdict.FAIL and not self._signature.op
        self._unwritten = _may_be_unwritten(result)
        self._unlike = self._is_unlike(case)

    def run(self, progress: Callable[[str], None]) -> bool:
        """Search until nothing gets smaller (True) or time is up (False)."""
        again = True
        while again:
            again = False
            for words, candidates in PASSES:
                if self._late():
                    return False
                progress(f"trying: {words}")
                while self._step(candidates):
                    again = True
                    progress(f"{words}: {size(self.case)}")
        finished = not self._late()
        self._look_closer()
        return finished

    def _look_closer(self) -> None:
        """Run the smallest case again to locate its failure, if that was skipped and time remains."""
        if (self._of_node or self._of_message) and not self._late():
            with suppress(ConformanceError), self._runner.within(self._deadline):
                (result,) = self._runner.run(self._spec, [self.case])
                if not self._late() and self._signature.covers(signature_of(result)):
                    self.result = result

    def _late(self) -> bool:
        return self._deadline.is_over()

    def _step(self, candidates: Pass) -> bool:
        if self._late():
            return False
        reference = self._runner.oracle.reference_in(self._runner.backend(self._spec).arithmetic_in(self.case))
        now = measure(self.case)
        smaller = (c for c in candidates(record(self.case, reference), self.result) if _is_smaller(c, now))
        try:
            for candidate, result in self._ran(smaller):
                self._started.popleft()
                self.tried += 1
                if self._late():
                    return False
                if result is not None and result.verdict is Verdict.PASS:
                    self.passed.append(candidate)
                elif result is not None and self._takes(candidate, result):
                    return True
            return False
        finally:
            self._seen.difference_update(self._started)  # they ran ahead; their results were not examined
            self._started.clear()

    def _ran(self, candidates: Iterator[Case]) -> Iterator[tuple[Case, Result | None]]:
        """Yield valid and new candidates with their results; None if a run was impossible."""
        new = (c for c in candidates if not self._late() and self._is_new(c))
        if self._workers is None:
            return ((c, self._run(self._runner, c)) for c in new)
        return self._workers.ahead(self._run, new)

    def _is_new(self, candidate: Case) -> bool:
        try:
            digest = _digest(candidate)
            if digest in self._seen:
                return False
            self._seen.add(digest)
            candidate.validate()
        except GraphError:  # an invalid graph, or one that lacks a tensor with bytes
            return False
        self._started.append(digest)
        return True

    def _run(self, runner: Runner, candidate: Case) -> Result | None:
        if self._late():
            return None
        locates, checks_stale_state = (
            self._runner.locates and not self._of_message,
            self._runner.checks_stale_state and not self._of_node,
        )
        try:
            with runner.within(self._deadline), runner.quick(locates=locates, checks_stale_state=checks_stale_state):
                return runner.run(self._spec, [candidate])[0]
        except ConformanceError:
            return None

    def _takes(self, candidate: Case, result: Result) -> bool:
        """Return True if `candidate` fails like the case; then it becomes the smallest case."""
        same = self._signature.covers(signature_of(result))
        unlike = same and self._is_unlike(candidate)
        if not same or (self._unlike and not unlike) or not self._accept(candidate, result):
            return False
        self.case, self.result, self._unlike = candidate, result, unlike
        return True

    def _is_unlike(self, case: Case) -> bool:
        """Return True if unwritten memory is wrong in every output and cache, even if all zeros.

        A test that checks only values, as test-backend-ops does, sees nothing else of a backend that gave up.
        """
        if not self._unwritten:
            return False
        try:
            arithmetic = self._runner.backend(self._spec).arithmetic_in(case)
            steps = self._runner.oracle.expect([case], arithmetic)[0].steps
        except ConformanceError:
            return False
        outputs = (x for v in steps for x in v.outputs.values())
        kept = (np.array_equal(case.persistent[t], x) for t, x in steps[-1].caches.items())
        return all(x.any() for x in outputs if x.size) and not any(kept)


def _may_be_unwritten(result: Result) -> bool:
    """Return True for an error, or fill values of an adapter's memory: NaN, or -1 in integers."""
    numbers = None if result.where is None else result.where.numbers
    return result.verdict is Verdict.OVERCLAIM or (
        numbers is not None and (math.isnan(numbers.found) or numbers.found == -1)
    )


def measure(case: Case) -> tuple[int, ...]:
    """Return the size of a case, most important part first; it decreases with every success."""
    return (*_rough(case), _plainness(case))


def _is_smaller(case: Case, than: tuple[int, ...]) -> bool:
    """Return True if `case` is smaller than the size `than`; only ties need the slow plainness."""
    rough = _rough(case)
    return rough < than[:-1] or (rough == than[:-1] and _plainness(case) < than[-1])


def _rough(case: Case) -> tuple[int, ...]:
    return (
        int(bool(case.demands)),
        int(any(s.expected or s.note is not None for s in case.steps) or bool(case.tolerance)),
        len(case.steps),
        sum(len(s.graph) for s in case.steps),
        sum(len(s.outputs) for s in case.steps),
        simplify.words(case),
        simplify.elements(case),
        sum(simplify.rank(t.type) + (t.type is I64) for t in simplify.leaves_of(case)),
    )


def _plainness(case: Case) -> int:
    return sum(simplify.plainness(t, data) for t, data in simplify.leaves_of(case).items())


def _digest(case: Case) -> bytes:
    document, blobs = codec.dump(case)
    digest = sha256(json.dumps(document, sort_keys=True).encode())
    for name, data in blobs.items():
        digest.update(name.encode() + b"=")
        digest.update(data.data)
    return digest.digest()
