"""Choose a standalone proof: a `test_case` for ggml, else a program, else a reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.ggml import quants
from conformance.ggml.arithmetic import GGML_CPU, limit_at
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, computes
from conformance.judge.budget import touches
from conformance.judge.cause import ALWAYS
from conformance.judge.verdict import Result, Verdict
from conformance.report.snippet import cpp
from conformance.run.contiguous import contiguous
from conformance.run.locate import is_stale
from conformance.run.oracle import Expectation
from conformance.run.scheduler.assign import read_devices
from conformance.suite.relations import relation

from .program import MOST_DATA, Wanted, is_scheduled, program, size_of, wanted_of

DEFAULT_NMSE = 1e-7
"""The default NMSE limit of test-backend-ops."""
ROUNDED_NMSE = 5e-4
"""The limit if one side rounds activations and the other does not."""
DRAWS = 4
"""Number of random draws with which a case must fail to be reported with random data."""
MOST_LINES = 60
"""Maximum lines of a `test_case`."""
Run = Callable[[Case], Result]
"""Function that runs a case on the backend."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The sources that show a failure; an empty one cannot show it."""

    test_case: str = ""
    program: str = ""
    why: str = ""
    """Why there is no `test_case`, and if there is no program either, why not."""
    limit: str = ""
    """Sentence on whether the error is within the limit of test-backend-ops; empty if unknown."""


def plain_devices(spec: Spec) -> list[Spec]:
    """Return the devices of a scheduler as separate backends."""
    spec = resolve(spec)
    options = dict(spec.options)
    if spec.name == "sched":
        return read_devices(options.get("devices", "cpu"))
    if options.pop("mode", "") == "sched":
        return [Spec(spec.name, tuple(options.items()))]
    return []


def proof_of(
    case: Case, result: Result, expectation: Expectation | None, seen: str = "", run: Run | None = None
) -> Proof:
    """Return the `test_case` if it fails as `case` does, else the program, else neither.

    A correct backend passes both. `expectation` is for `case` on the backend of `result`; None if nothing could compute
    it. `seen` is `Cause.seen`. `run` tries variants of the case, so that the `test_case` gets simpler.
    """
    spec = Spec.parse(result.backend)
    wanted = wanted_of(case, expectation) if expectation is not None and not relation.applies(case) else []
    limit = _limit(case, result)
    if why := next(_beyond_both(case, result, wanted, seen), ""):
        return Proof(why=f"Neither a test_case nor a program shows it: {why}.", limit=limit)
    assert expectation is not None
    allowed = _allowed(case, result, expectation, wanted)
    why = next(_beyond_test_case(case, result, spec, allowed), "")
    copies = _differs_from_copies(case, result, spec, run) if not why else None
    if not why and copies is None and result.verdict is Verdict.FAIL and _is_reference(spec):
        why = "the CPU device is itself the reference there"
    text = ""
    if not why:
        drawn = _drawn(case, result, run, allowed)
        other = allowed if allowed != DEFAULT_NMSE and result.verdict is Verdict.FAIL else None
        text = cpp(case, max_nmse=other, drawn=drawn, copies=copies)
        if (n := text.count("\n")) > MOST_LINES:
            why = f"a test_case has {n} lines, too many to read"
    if not why:
        return Proof(test_case=text, limit=limit)
    return Proof(program=program(case, wanted, spec), why=f"No test_case for test-backend-ops: {why}.", limit=limit)


def _limit(case: Case, result: Result) -> str:
    """Return a sentence on whether wrong numbers are within upstream's own limit."""
    where = result.where
    if result.verdict is not Verdict.FAIL or result.nmse is None or where is None or where.node is None:
        return ""
    node = case.steps[where.step or 0].graph.nodes[where.node]
    allowed = limit_at(node)
    if not isfinite(result.nmse):
        return "NaN, Inf, or numbers instead of zeros: test-backend-ops would fail."
    if not result.nmse:
        return "Only bits differ, such as the sign of a zero: test-backend-ops does not compare them."
    verb = "is within" if result.nmse <= allowed else "exceeds"
    return f"test-backend-ops allows an NMSE of {allowed:.2g} for {node.op}; {result.nmse:.2g} {verb} this limit."


def _is_reference(spec: Spec) -> bool:
    spec = resolve(spec)
    return spec.name == "ggml" and (dict(spec.options).get("device") or "CPU").upper() == "CPU"


def _beyond_both(case: Case, result: Result, wanted: Sequence[Wanted], seen: str) -> Iterator[str]:
    options = dict(resolve(Spec.parse(result.backend)).options)
    if relation.applies(case):
        yield "two runs must agree here, and no value is wrong by itself"
    if options.get("guard") == "on":
        yield "memory beside a tensor is wrong, which only guard=on detects"
    if seen.startswith("after ") or (is_stale(result) and len(case.steps) == 1 and seen != ALWAYS):
        yield "it fails only after other cases of the same process"
    if not wanted:
        yield "no output can be compared after its step"
    if (size := size_of(case, wanted)) > MOST_DATA:
        yield f"its values are {size:,} bytes, too many for a source file"


def _beyond_test_case(case: Case, result: Result, spec: Spec, allowed: float) -> Iterator[str]:
    if len(case.steps) > 1:
        yield f"it takes {len(case.steps)} steps, and a test_case is one graph that runs once"
    if is_scheduled(spec):
        yield "no device alone fails like this, and a test_case runs on one device"
    if dict(resolve(spec).options).get("buffer") or any(p.buffer for p in case.placement.values()):
        yield "weights lie in another buffer type than the device's default, which a test_case cannot choose"
    if result.verdict is Verdict.FAIL and result.nmse is not None and result.nmse <= allowed:
        yield f"its NMSE of {result.nmse:.2g} is within the {allowed:.2g} that test-backend-ops allows"


def _allowed(case: Case, result: Result, expectation: Expectation, wanted: Sequence[Wanted]) -> float:
    """Return the NMSE that a `test_case` must allow, because its reference is ggml's CPU device."""
    if touches(case, GGML_CPU) and expectation.arithmetic.name != GGML_CPU.name:
        return ROUNDED_NMSE
    if result.nmse is None or result.nmse > DEFAULT_NMSE:
        return DEFAULT_NMSE
    return min(DEFAULT_NMSE, max(w.budget.nmse for w in wanted))


def _differs_from_copies(case: Case, result: Result, spec: Spec, run: Run | None) -> Tensor | None:
    """Return the only node if the CPU is wrong at it and right over contiguous sources."""
    nodes = [n for n in case.steps[0].graph if computes(n) and n.op not in VIEW_OPS]
    if result.verdict is not Verdict.FAIL or not _is_reference(spec) or run is None or len(nodes) != 1:
        return None
    copied = contiguous(case) if nodes[0].view_src is None else None
    return nodes[0] if copied is not None and run(copied[0]).verdict is Verdict.PASS else None


def _drawn(case: Case, result: Result, run: Run | None, allowed: float) -> list[Tensor]:
    """Return the leaves whose values do not matter: with random ones the case fails each time."""
    leaves = {**case.persistent, **case.steps[0].inputs}
    free = [t for t in leaves if t.type.is_quantized or t.type.name in {"f32", "f16", "bf16"}]
    if run is None or not free:
        return []
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        data: dict[Tensor, Bytes] = {
            t: quants.from_float(t.type, rng.uniform(-1, 1, t.shape).astype(np.float32)).reshape(-1).view(np.uint8)
            for t in free
        }
        (step,) = case.steps
        drawn = replace(
            case,
            id=f"{case.id}#{seed}",
            persistent={t: data.get(t, x) for t, x in case.persistent.items()},
            steps=[replace(step, inputs={t: data.get(t, x) for t, x in step.inputs.items()}, expected={})],
            recipes={},
        )
        found = run(drawn)
        if found.verdict is not result.verdict or (found.nmse is not None and found.nmse <= max(allowed, DEFAULT_NMSE)):
            return []
    return free
