"""Choose a standalone proof: a `test_case` for ggml, else a program, else a reason why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.causes.cause import ALWAYS
from conformance.ggml.arithmetic import GGML_CPU
from conformance.judge.budget import touches
from conformance.judge.verdict import Result, Verdict
from conformance.report.snippet import cpp, results
from conformance.run.blame import is_stale
from conformance.run.oracle import Expectation
from conformance.suite.relations import claim

from .program import MOST_DATA, Wanted, is_scheduled, program, size_of, wanted_of

DEFAULT_NMSE = 1e-7
"""The default NMSE limit of test-backend-ops."""
ROUNDED_NMSE = 5e-4
"""Its limit where one side rounds activations and the other does not."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The sources that show a failure; an empty one cannot show it."""

    test_case: str = ""
    program: str = ""
    why: str = ""
    """Why there is no `test_case`, and if there is no program either, why not."""


def proof_of(case: Case, result: Result, expectation: Expectation | None, seen: str = "") -> Proof:
    """Return the `test_case` if it fails as `case` does, else the program, else neither.

    A correct backend passes both. `expectation` is for `case` on the backend of `result`; None if nothing could compute
    it. `seen` is `Cause.seen`.
    """
    spec = Spec.parse(result.backend)
    wanted = wanted_of(case, expectation) if expectation is not None and not claim.applies(case) else []
    if why := next(_beyond_both(case, result, wanted, seen), ""):
        return Proof(why=f"Neither a test_case nor a program shows it: {why}.")
    assert expectation is not None
    allowed = _allowed(case, result, expectation, wanted)
    if why := next(_beyond_test_case(case, result, spec, allowed), ""):
        return Proof(program=program(case, wanted, spec), why=f"test-backend-ops cannot show it: {why}.")
    other = allowed if allowed != DEFAULT_NMSE and result.verdict is Verdict.FAIL else None
    return Proof(test_case=cpp(case, max_nmse=other))


def _beyond_both(case: Case, result: Result, wanted: Sequence[Wanted], seen: str) -> Iterator[str]:
    options = dict(resolve(Spec.parse(result.backend)).options)
    kept = is_stale(result) and len(case.steps) == 1
    if claim.applies(case):
        yield "two runs must agree here, and no value is wrong by itself"
    if options.get("guard") == "on":
        yield "what is wrong is memory beside a tensor, which only guard=on watches"
    if seen.startswith("after ") or (kept and seen != ALWAYS):
        yield "it fails only after other cases of the same process"
    if not wanted:
        yield "no output can be compared after its step"
    if (size := size_of(case, wanted)) > MOST_DATA:
        yield f"its values are {size:,} bytes, too many for a source file"


def _beyond_test_case(case: Case, result: Result, spec: Spec, allowed: float) -> Iterator[str]:
    options = dict(resolve(spec).options)
    if len(case.steps) > 1:
        yield f"it takes {len(case.steps)} steps, and a test_case there is one graph that runs once"
    if is_scheduled(spec):
        yield "a scheduler divides the graph, and a test_case there runs on one device, which must take every node"
    if options.get("buffer") or any(p.buffer for p in case.placement.values()):
        yield "weights lie in another buffer type than the device's default, the only one there"
    if len(results(case.steps[0])) > 1:
        yield "it has several results, and a test_case there gives back one"
    if result.verdict is not Verdict.FAIL:
        return
    if resolve(spec).name == "ggml" and (options.get("device") or "CPU").upper() == "CPU":
        yield "the CPU device is itself the reference there"
    if result.nmse is not None and result.nmse <= allowed:
        yield f"its NMSE of {result.nmse:.2g} is within the {allowed:.2g} that must be allowed there"


def _allowed(case: Case, result: Result, expectation: Expectation, wanted: Sequence[Wanted]) -> float:
    """Return the NMSE that a `test_case` must allow, because its reference is ggml's CPU device."""
    if touches(case, GGML_CPU) and expectation.arithmetic.name != GGML_CPU.name:
        return ROUNDED_NMSE
    if result.nmse is None or result.nmse > DEFAULT_NMSE:
        return DEFAULT_NMSE
    return min(DEFAULT_NMSE, max(w.budget.nmse for w in wanted))
