"""Golden outputs: stored values of a corpus on which the reference and the real ggml agree.

`ops.gguf` in `golden/` has single ops with expected values, `captured/` there has trajectories recorded from llama.cpp.
The file defines which cases are golden; `requant.json` has outputs of some with requantised weights. `verify`
recomputes all of them, `judge` compares backends with them; every run does so for its own cases (`stored`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import conformance
from conformance import shipped
from conformance.backend.registry import REFERENCE, Spec
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT, REQUANTISING
from conformance.ggml.errors import CaseFileError, ConformanceError, UsageError
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.judge.budget import Budget
from conformance.judge.compare import compare
from conformance.judge.verdict import Result, Verdict
from conformance.suite.batch import groups

from .isolation.isolate import Isolation
from .oracle import SECOND_OPINION, Expectation, Oracle
from .runner import Runner
from .session.select import build, case_ids
from .session.settings import WaiverBook
from .stored import FAMILY, OPS, REQUANT, Stored, label, requantised, requantised_of

AGAIN = Budget(2.0**-44, 2.0**-20, "the same computation on another machine: a last bit may round the other way")
LARGEST = 1 << 19
"""Maximum bytes of a case and its values in the corpus, which every installation contains."""
_BATCH = 128


def read(folder: Path) -> tuple[list[Case], list[Case]]:
    """Return ops and trajectories of a corpus; UsageError if none, CaseFileError if damaged."""
    path = folder / OPS
    if not path.is_file():
        raise UsageError(f"{path}: no golden outputs here; {shipped.AGAIN}")
    found: list[list[Case]] = []
    errors: list[CaseFileError] = []
    for p in (path, *sorted((folder / "captured").glob("*.gguf"))):
        try:
            found.append(casefile.read(p))
        except CaseFileError as e:
            errors += [e, *e.others]
    if errors:
        first, *others = errors
        first.others = tuple(others)
        raise first
    return found[0], [c for cases in found[1:] for c in cases]


def verify(folder: Path | None = None) -> list[Result]:
    """Recompute golden values on reference and real ggml, a result per case; raises as `read`."""
    stored, captured = read(folder or shipped.golden())
    with closing(Runner()) as runner:
        again = _computed(runner, [_bare(c) for c in stored])
        results = [_compare(c, now, agreed) for c, (now, agreed) in zip(stored, again, strict=True)]
        results += _verify_requantised(runner, folder or shipped.golden(), stored)
        return results + [r for c in captured for r in runner.run(Spec(REFERENCE), [c])]


def _verify_requantised(runner: Runner, folder: Path, cases: Sequence[Case]) -> Iterator[Result]:
    """Recompute the outputs with requantised weights; yield a result per arithmetic and case."""
    known = {c.id: c for c in cases}
    for name, outputs in requantised(folder).items():
        found = [known[i] for i in outputs if i in known]
        again = runner.oracle.expect([_bare(c) for c in found], REQUANTISING[name])
        expected = dict(zip((c.id for c in found), again, strict=True))
        for i in outputs:
            passed, where = Result(i, f"golden {name}", Verdict.PASS), f"{label(str(folder / REQUANT))}: {i}"
            if i not in expected:
                yield _fail(passed, f"{where}: it is not in {OPS}")
                continue
            (stored,) = (s for s in requantised_of(known[i], folder) if s.arithmetic.name == name)
            yield _compare_requantised(passed, where, stored, expected[i])


def _compare_requantised(result: Result, where: str, stored: Stored, again: Expectation) -> Result:
    if stored.problem:
        return _fail(result, f"{where}: {stored.problem}")
    for t, want in stored.values[0].items():
        difference = compare(t, want, again.steps[0].all[t])
        if AGAIN.used(difference) > 1:
            what = f"requantised weights ({stored.arithmetic.name}): stored value differs: {t}"
            return _fail(result, f"{where}: {what}: the reference now gives {difference}")
    return replace(result, steps=1)


def judge(
    specs: Sequence[Spec],
    folder: Path | None = None,
    isolation: Isolation | None = None,
    waivers: WaiverBook | None = None,
) -> Iterator[Result]:
    """Run the corpus on backends; yield one result per case and backend.

    They are compared with stored values and with the recomputed reference. Raises as `read` and `Runner.run`.
    """
    stored, captured = read(folder or shipped.golden())
    with closing(Runner(isolation=isolation, waivers=waivers)) as runner:
        for spec in specs:
            size = runner.batch_size(spec)
            for start in range(0, len(stored), size):
                for group in groups(stored[start : start + size]):
                    yield from runner.run(spec, group)
            for case in captured:
                yield from runner.run(spec, [case])


def update(folder: Path | None = None, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[Result]:
    """Recompute `ops.gguf` and return one result per case.

    A case keeps its bytes if its values are unchanged, or if the reference and the real ggml disagree, which fails.

    Args:
        folder: the corpus; the shipped one by default.
        add: globs of ids of any level to add.
        remove: globs of ids to remove.

    Raises:
        UsageError: it cannot be written, or a glob matches nothing.
    """
    path = writable(folder)
    held = {c.id: c for c in casefile.read(path)} if path.exists() else {}
    for glob in remove:
        if not any(fnmatchcase(i, glob) for i in held):
            raise UsageError(f"--remove {glob}: no case of {path} matches it")
    gone = {i for i in held if any(fnmatchcase(i, glob) for glob in remove)}
    more = case_ids([FAMILY], add, "full") if add else []
    ids = [i for i in dict.fromkeys([*held, *more]) if i not in gone]
    with closing(Runner()) as runner:
        results, cases = _updated(runner, ids, held)
    casefile.write(path, cases)
    return results


def _updated(runner: Runner, ids: Iterable[str], held: Mapping[str, Case]) -> tuple[list[Result], list[Case]]:
    """Return a result per known id, and the cases to write, in order."""
    results: dict[str, Result] = {}
    made: dict[str, Case] = {}
    for i in ids:
        try:
            case = build(i)
        except ConformanceError as e:
            results[i] = _fail(
                Result(i, "golden", Verdict.PASS), f"its id is no longer known: {e}; --remove removes it"
            )
            continue
        if i in held or _size(case) <= LARGEST:
            made[i] = case
    for case, (values, agreed) in zip(made.values(), _computed(runner, list(made.values())), strict=True):
        results[case.id] = agreed
        if agreed.verdict is Verdict.PASS:
            case.steps[0].expected = values
            case.provenance = _provenance(runner.oracle, agreed)
    chosen = [_chosen(held.get(i), made.get(i)) for i in ids]
    return [results[i] for i in ids if i in results], [c for c in chosen if c is not None]


def _chosen(held: Case | None, made: Case | None) -> Case | None:
    """Return which of the two cases the corpus gets; None if no value was accepted."""
    accepted = made if made is not None and made.steps[0].expected else None
    if held is None or accepted is None:
        return held or accepted
    same = _leaf_bytes(held) == _leaf_bytes(accepted) and _value_bytes(held) == _value_bytes(accepted)
    return held if same else accepted


def _computed(runner: Runner, cases: Sequence[Case]) -> Iterator[tuple[dict[Tensor, Bytes], Result]]:
    """Yield exact values of each one-step case, and the result of the reference against ggml."""
    for start in range(0, len(cases), _BATCH):
        batch = cases[start : start + _BATCH]
        agreed = runner.run(Spec(REFERENCE), batch)
        exact = runner.oracle.expect(batch, EXACT)
        yield from zip((e.steps[0].all for e in exact), agreed, strict=True)


def writable(folder: Path | None = None) -> Path:
    """Return the file that `update` writes; UsageError if it is not writable."""
    path = (folder or shipped.golden()) / OPS
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written; golden outputs are updated in a checkout (pip install -e .)")
    return path


def _provenance(oracle: Oracle, agreement: Result) -> dict[str, object]:
    return {
        "reference": f"{REFERENCE} {conformance.__version__}",
        "agreed": f"{SECOND_OPINION} {oracle.second_opinion().info().versions.get('ggml', '?')}",
        "nmse": agreement.to_json()["nmse"],
        "budget_used": agreement.to_json()["budget_used"],
    }


def _size(case: Case) -> int:
    (step,) = case.steps
    leaves = (*case.persistent.values(), *step.inputs.values())
    return sum(data.nbytes for data in leaves) + sum(map(nbytes, step.outputs))


def _bare(case: Case) -> Case:
    """Return the case without golden values, so that it cannot be compared with them."""
    steps = [Step(s.graph, s.inputs, s.outputs) for s in case.steps]
    return Case(case.id, case.persistent, steps, case.family, case.params, case.seed, case.generator)


def _compare(case: Case, values: Mapping[Tensor, Bytes], agreement: Result) -> Result:
    result = replace(agreement, case=case.id, backend="golden", steps=1)
    if agreement.verdict is not Verdict.PASS:
        return result
    where = f"{label(case.file)}: {case.id}"
    try:
        fresh = build(case.id)
    except ConformanceError as e:
        return _fail(result, f"{where}: its id is no longer known: {e}")
    if _leaf_bytes(case) != _leaf_bytes(fresh):
        return _fail(result, f"{where}: its id now gives other input bytes: a generator changed without a new version")
    for (t, want), got in zip(case.steps[0].expected.items(), values.values(), strict=True):
        difference = compare(t, want, got)
        if AGAIN.used(difference) > 1:
            return _fail(result, f"{where}: stored value differs: {t}: the reference now gives {difference}")
    return result


def _leaf_bytes(case: Case) -> list[bytes]:
    step = case.steps[0]
    data = {**case.persistent, **step.inputs}
    return [data[t].tobytes() for t in step.graph.leafs() if t in data]


def _value_bytes(case: Case) -> list[bytes]:
    return [data.tobytes() for data in case.steps[0].expected.values()]


def _fail(result: Result, why: str) -> Result:
    return replace(result, verdict=Verdict.FAIL, where=None, notes=(why,))
