"""Golden outputs: expected values of a pinned corpus, accepted only where the reference and the real ggml agree.

`ops.gguf` in `conformance/golden` holds the smoke level of family `ops` with its expected values; `captured/` there
holds trajectories that llama.cpp recorded. `verify` computes all of them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from conformance import __version__, shipped
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.judge.budget import Budget
from conformance.judge.compare import compare
from conformance.judge.verdict import Result, Verdict
from conformance.suite import FAMILIES

from .oracle import REFERENCE, SECOND_OPINION, Oracle
from .runner import Runner
from .session.select import build

ROOT = shipped.path("golden")
OPS = "ops.gguf"
AGAIN = Budget(2.0**-44, 2.0**-20, "the same computation on another machine: a last bit may round the other way")
LARGEST = 1 << 19
"""Bytes of a case and its values, above which the corpus, which goes with every installation, leaves it out."""
_BATCH = 128


def verify(root: Path = ROOT) -> list[Result]:
    """Compute every golden value again, on the reference and on the real ggml; one result per value's case. UsageError
    if there are no golden files, CaseFileError if one is damaged.
    """
    path = root / OPS
    if not path.is_file():
        raise UsageError(f"{path}: no golden outputs here; {shipped.AGAIN}")
    stored = casefile.read(path)
    with closing(Runner()) as runner:
        again = _computed(runner, [_bare(c) for c in stored])
        results = [_compare(c, now, agreed) for c, (now, agreed) in zip(stored, again, strict=True)]
        captured = [c for p in sorted((root / "captured").glob("*.gguf")) for c in casefile.read(p)]
        return results + [r for c in captured for r in runner.run(Spec(REFERENCE), [c])]


def update(root: Path = ROOT) -> list[Result]:
    """Make `ops.gguf` in `root` anew and give one result per case of the corpus; a case that fails is left out.
    UsageError if it cannot be written there.
    """
    writable(root)
    with closing(Runner()) as runner:
        cases = [c for c in map(build, FAMILIES["ops"].ids("smoke")) if _size(c) <= LARGEST]
        results: list[Result] = []
        accepted: list[Case] = []
        for case, (values, agreed) in zip(cases, _computed(runner, cases), strict=True):
            results.append(agreed)
            if agreed.verdict is Verdict.PASS:
                case.steps[0].expected = values
                case.provenance = _provenance(runner.oracle, agreed)
                accepted.append(case)
        casefile.write(root / OPS, accepted)
        return results


def _computed(runner: Runner, cases: Sequence[Case]) -> Iterator[tuple[dict[Tensor, Bytes], Result]]:
    """The exact values of each one-step case, and the result of the reference against the real ggml."""
    for start in range(0, len(cases), _BATCH):
        batch = cases[start : start + _BATCH]
        agreed = runner.run(Spec(REFERENCE), batch)
        exact = runner.oracle.expect(batch, EXACT)
        yield from zip((e.steps[0].all for e in exact), agreed, strict=True)


def writable(root: Path = ROOT) -> Path:
    """The file that `update` writes; UsageError if it cannot be written."""
    path = root / OPS
    if not os.access(path if path.exists() else root, os.W_OK):
        raise UsageError(f"{path}: cannot be written; golden outputs are made anew in a checkout (pip install -e .)")
    return path


def _provenance(oracle: Oracle, agreement: Result) -> dict[str, object]:
    return {
        "reference": f"{REFERENCE} {__version__}",
        "agreed": f"{SECOND_OPINION} {oracle.second_opinion().info().versions.get('ggml', '?')}",
        "nmse": agreement.to_json()["nmse"],
        "budget_used": agreement.to_json()["budget_used"],
    }


def _size(case: Case) -> int:
    (step,) = case.steps
    leaves = (*case.persistent.values(), *step.inputs.values())
    return sum(data.nbytes for data in leaves) + sum(map(nbytes, step.outputs))


def _bare(case: Case) -> Case:
    """The case without its golden values, so that they cannot be what it is checked against."""
    steps = [Step(s.graph, s.inputs, s.outputs) for s in case.steps]
    return Case(case.id, case.persistent, steps, case.family, case.params, case.seed, case.generator)


def _compare(case: Case, values: Mapping[Tensor, Bytes], agreement: Result) -> Result:
    result = Result(case.id, "golden", agreement.verdict, steps=1, detail=agreement.detail)
    result.budget_used, result.nmse = agreement.budget_used, agreement.nmse
    if agreement.verdict is not Verdict.PASS:
        return result
    try:
        fresh = build(case.id)
    except ConformanceError as e:
        return _fail(result, f"its id is no longer known: {e}")
    if _leaf_bytes(case) != _leaf_bytes(fresh):
        return _fail(result, "its id makes other input bytes now: a generator changed without a new version")
    for (t, want), got in zip(case.steps[0].expected.items(), values.values(), strict=True):
        difference = compare(t, want, got)
        if AGAIN.used(difference) > 1:
            return _fail(result, f"{t}: the reference now gives another value, {difference}")
    return result


def _leaf_bytes(case: Case) -> list[bytes]:
    step = case.steps[0]
    data = {**case.persistent, **step.inputs}
    return [data[t].tobytes() for t in step.graph.leafs() if t in data]


def _fail(result: Result, why: str) -> Result:
    result.verdict, result.detail = Verdict.FAIL, why
    return result
