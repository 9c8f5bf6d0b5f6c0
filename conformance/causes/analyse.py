"""Find the causes of a run's failures from its results and their cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from math import isfinite
from pathlib import Path

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.ggml.tensor import VIEW_OPS
from conformance.judge.cause import ALWAYS, Cause
from conformance.judge.evidence import Fault
from conformance.judge.message import innermost, masked, said
from conformance.judge.verdict import FAILURES, Result, Verdict, counted
from conformance.process import Deadline
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.run.live import is_live
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.run.shrink.workers import how_many, runners_of
from conformance.run.signature import signature_of
from conformance.suite import ops

from .bug_report import alike, write_report
from .bug_report.proof import plain_devices
from .cause import digest, in_order, unique_ids
from .confirm import Seen, confirm
from .drivers import with_drivers
from .failure import Failure, failure_of
from .features import name_of
from .group import Group, Nodes, cause_of
from .rank import count_architectures
from .rule import Rule
from .search import Search

CONFIRMING = 1 / 3
"""Maximum share of the time to confirm failures."""
_WRONG = FAILURES - {Verdict.XPASS}
AFTER = 0.1
"""Share of the time to count architectures and write bug reports; the search has the rest."""
COUNTING = 30.0
"""Maximum seconds to count architectures."""


def analyse(
    results: Sequence[Result],
    specs: Mapping[str, Spec],
    *,
    isolation: Isolation | None = None,
    seconds: float = 1800.0,
    jobs: int | None = None,
    again: bool = True,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Cause]:
    """Return the causes of all failures in `results`, most urgent first.

    `cause.assigned` adds their ids to results. `specs` maps the names of the failing backends (`failing_backends`) to
    the specs to open; names in results are never opened. `seconds` bounds the search per backend, in which `jobs`
    experiments run at a time (`shrink.workers.how_many`); in enough time the causes do not depend on it. Ctrl-C ends a
    phase, and the remaining failures are grouped with known causes. If `again`, failures first run again, each alone in
    a fresh process, for at most a third of that time. `folder` receives the bug reports. A failure whose case cannot be
    rebuilt is skipped, and so is a backend that is not installed; `progress` reports both.
    """
    found: list[tuple[Cause, Group]] = []
    live = [r for r in results if is_live(r.case)]
    results = [r for r in results if not is_live(r.case)]
    failing = failing_backends(results)
    for backend, own in groupby(sorted(results, key=lambda r: r.backend), lambda r: r.backend):
        if backend not in failing:
            continue
        try:
            found += _of_backend(specs[backend], list(own), isolation, seconds, jobs, again, folder, progress)
        except UnavailableError as e:
            progress(f"{backend}: its failures are skipped: {e}")
    return in_order([*(cause for cause, _ in found), *by_message(live)])


def failing_backends(results: Sequence[Result]) -> set[str]:
    """Return the names of the backends with a failure, which `analyse` opens."""
    return {r.backend for r in results if r.verdict in _WRONG}


def _of_backend(
    spec: Spec,
    results: Sequence[Result],
    isolation: Isolation | None,
    seconds: float,
    jobs: int | None,
    again: bool,
    folder: Path | None,
    progress: Callable[[str], None],
) -> list[tuple[Cause, Group]]:
    failures = [f for r in results if r.verdict in _WRONG and (f := _failure(r, progress)) is not None]
    if not failures:
        return []
    if not registry.is_taken(registry.resolve(spec).name):
        raise UnavailableError(f"it is not installed; known: {', '.join(registry.names())}")
    nodes = Nodes(failures, (c for r in _telling(results, failures) if (c := _case(r)) is not None))
    seen: dict[str, Seen] = {}
    deadline = Deadline.after(seconds)
    searched = deadline.within(seconds * (1 - AFTER))
    if again:
        with _interruptible("confirming failures", progress):
            confirmed = deadline.within(seconds * CONFIRMING)
            n = how_many(spec, jobs)
            seen = confirm(spec, results, isolation=isolation, jobs=n, deadline=confirmed, progress=progress)

    def make() -> Runner:
        return Runner(workers=Workers(isolation, ahead=True))

    runner, helpers = make(), None
    try:
        runner.backend(spec)
        helpers = runners_of(spec, make, jobs)
        alone = [f for f in failures if not _after(f, seen)]
        groups = Search(runner, spec, nodes, deadline=searched, progress=progress, workers=helpers).run(alone)
        groups += _poisoned(failures, seen)
        causes = unique_ids([cause_of(g, str(spec), nodes, _words(g, seen)) for g in groups])
        with _interruptible("counting architectures", progress):
            causes = count_architectures(causes, Deadline.after(min(COUNTING, seconds * AFTER / 2)), progress)
        with _interruptible("running smallest cases with other drivers", progress):
            backend = runner.backend(spec)
            if backend.fragile:
                found = [(c, g.proof.case, g.proof.result) for c, g in zip(causes, groups, strict=True)]
                with closing(make()) as fresh:
                    causes = with_drivers(found, spec, backend.info(), fresh, Deadline.after(seconds * AFTER))
        if folder is not None:
            with _interruptible("writing bug reports", progress):
                for same in alike(causes):
                    path = _report([(causes[i], groups[i]) for i in same], spec, runner, folder)
                    for i in same:
                        causes[i] = replace(causes[i], folder=str(path))
        return list(zip(causes, groups, strict=True))
    finally:
        if helpers is not None:
            helpers.close()
        runner.close()


@contextmanager
def _interruptible(work: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Let Ctrl-C end only the block; `work` describes it."""
    try:
        yield
    except KeyboardInterrupt:
        progress(f"interrupted {work}")


def _after(failure: Failure, seen: Mapping[str, Seen]) -> str:
    """Return the case that damages the process in which a failure ran; empty if unknown."""
    return seen[failure.case.id].after if failure.case.id in seen else ""


def _poisoned(failures: Sequence[Failure], seen: Mapping[str, Seen]) -> list[Group]:
    """Return a group for each case after which others fail."""
    groups: dict[str, Group] = {}
    for f in failures:
        if after := _after(f, seen):
            groups.setdefault(after, Group((f.result.verdict.value, f"after {after}"), Rule(()), f)).failures.append(f)
    return list(groups.values())


def _words(group: Group, seen: Mapping[str, Seen]) -> str:
    """Return how reliably the failures of a group reproduce, from the most reliable one."""
    tried = [seen[f.case.id] for f in group.failures if f.case.id in seen]
    best = max(tried, key=lambda s: (s.words == ALWAYS, s.failed, s.runs), default=None)
    return "" if best is None else best.words


def _report(same: Sequence[tuple[Cause, Group]], spec: Spec, runner: Runner, folder: Path) -> Path:
    """Write the bug report of causes that are one bug; return its folder."""
    (cause, group), *rest = same
    also = [(c, g.proof.case, g.proof.result) for c, g in rest]
    case = group.proof.case
    spec, result = _alone(case, group.proof.result, spec, runner)
    expectation = None
    with suppress(ConformanceError):  # without it there is no C++, and the folder says so
        expectation = runner.expectation(spec, case)
    info = runner.backend(spec).info()

    def run(variant: Case) -> Result:
        with runner.quick(locates=False, checks_stale_state=False):
            return runner.run(spec, [variant])[0]

    return write_report(folder, cause, case, result, also=also, expectation=expectation, info=info, run=run)


def _alone(case: Case, result: Result, spec: Spec, runner: Runner) -> tuple[Spec, Result]:
    """Return a scheduler's device that fails alike by itself, with its result; or the scheduler."""
    for device in plain_devices(spec):
        with suppress(ConformanceError):
            found = runner.run(device, [case])[0]
            if signature_of(found) == signature_of(result):
                return device, found
    return spec, result


def _telling(results: Sequence[Result], failures: Sequence[Failure]) -> list[Result]:
    """Return the passes that may contain such nodes: trajectories, and cases of the same ops."""
    at = {name_of(f.case.steps[f.at[0]].graph.nodes[f.at[1]]) for f in failures if f.at is not None}
    seen = {*at, "", *VIEW_OPS}  # the case of a view has a node that copies it
    return [r for r in results if r.verdict is Verdict.PASS and _op(r.case) in seen]


def _op(case_id: str) -> str:
    """Return the op of an `ops` case; empty for other families."""
    family, _, body = case_id.partition("/")
    return body.partition("-")[0] if family == ops.NAME else ""


def _failure(result: Result, progress: Callable[[str], None]) -> Failure | None:
    case = _case(result)
    if case is None:
        progress(f"{result.case}: skipped: its case can be built neither from its id nor from a file")
        return None
    return failure_of(case, result)


def _case(result: Result) -> Case | None:
    """Return the case of a result from its saved file, or by its id; None if neither works."""
    if result.saved and Path(result.saved).is_file():
        with suppress(ConformanceError):
            return next((c for c in casefile.read(Path(result.saved)) if c.id == result.case), None)
    with suppress(ConformanceError):
        return build(result.case)
    return None


def by_message(results: Sequence[Result]) -> list[Cause]:
    """Group failures that cannot be searched by op or family, verdict and message; nothing runs.

    Cases of live families have no graph; a backend may no longer open, or no time may be left.
    """
    groups: dict[tuple[str, str, Verdict, str], list[Result]] = {}
    for r in results:
        if r.verdict in _WRONG:
            what = _op(r.case) or r.case.partition("/")[0]
            groups.setdefault((r.backend, what, r.verdict, _message_of(r)), []).append(r)
    causes = []
    for (backend, what, verdict, message), rows in groups.items():
        name, cases = f"{what}-{digest(verdict, message)}", [r.case for r in rows]
        sentence = f"{what}: {verdict}: {_with_numbers(rows[0])} ({counted(len(cases), 'case')})"
        rank = {"failed": len(cases)}
        causes.append(Cause(name, sentence, backend, verdict, _op(cases[0]), message, (), tuple(cases), rank=rank))
    return sorted(causes, key=lambda c: (-len(c.cases), c.id))


def _with_numbers(result: Result) -> str:
    """Return the message by which a failure is grouped, unmasked."""
    if result.error is not None:
        return result.error.message if result.verdict is Verdict.FAIL else said(result.error)
    note = _note_of(result)
    return " ".join(note.split()) if note else _message_of(result)


def _note_of(result: Result) -> str:
    """Return the note of a live case that has neither a place nor an error; empty if none."""
    placed = result.error is not None or (result.where is not None and signature_of(result) is not None)
    return result.notes[0] if not placed and is_live(result.case) and result.notes else ""


def _message_of(result: Result) -> str:
    if result.error is not None:
        return innermost(result.error)
    if note := _note_of(result):
        return masked(note)
    where, signature = result.where, signature_of(result)
    if where is None or signature is None:
        return "wrong numbers"
    finite = "" if result.nmse is None or isfinite(result.nmse) else ", not finite"
    if where.fault is Fault.OUTPUT:
        since = f"in {where.name}" if where.name else f"from {'a later' if where.step else 'the first'} step on"
        return f"wrong numbers {since}{finite}"
    return f"wrong numbers: {', '.join(filter(None, (signature.op, signature.kind)))}"
