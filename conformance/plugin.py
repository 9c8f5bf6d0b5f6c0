"""The pytest plugin: one test per case and backend, verdicts as outcomes, totals at the end.

The cases of a session run in lanes, one per core, and a test waits for the result of its case. In a session of few
cases this process runs them in batches: the first test of a batch runs all of it, the others find their results.

Under `pytest -n` (pytest-xdist) all tests of a device go to one worker. Results reach the controller in the reports,
and only the controller counts and writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

from conformance.backend.registry import Spec, resolve
from conformance.campaign.executor import Executor
from conformance.campaign.lanes import Lanes, number, pairs_of, shares
from conformance.cli import options
from conformance.ggml.errors import BackendCrashError, CaseFileError, ConformanceError, UnavailableError, UsageError
from conformance.ggml.text import printable, printable_lines
from conformance.judge.evidence import Error
from conformance.judge.outcome import Exit
from conformance.judge.verdict import FAILURES, MissingCause, Request, Result, Totals, Verdict, counted
from conformance.perf.bench import Bench
from conformance.report.runfile import interrupts_wait
from conformance.report.runs import command, refusal_lines
from conformance.run import golden
from conformance.run.session import failures
from conformance.run.session.select import build, lacking
from conformance.run.session.settings import settings_lines
from conformance.run.session.shard import WHOLE
from conformance.suite.family import LEVELS
from conformance.testrun import TestRun

from . import plugin_perf

Key = tuple[Spec, str]
PROPERTY = "conformance"
"""Report property with a worker's result."""
STATUS = {
    Exit.OK: pytest.ExitCode.OK,
    Exit.FAILURES: pytest.ExitCode.TESTS_FAILED,
    Exit.NOTHING: pytest.ExitCode.TESTS_FAILED,  # 3 and 5 are pytest's own: an internal error, no tests
    Exit.INCOMPLETE: pytest.ExitCode.INTERRUPTED,
}
"""Exit code of `conform` -> that of pytest (docs/exit-codes.md)."""


class Suite:
    """A pytest session: a run whose cases are tests."""

    def __init__(self, config: pytest.Config) -> None:
        chosen = options.chosen_of(config)
        if chosen.fresh and getattr(config.option, "fresh_seed", None) is None:  # xdist's workers get it
            config.option.fresh_seed = chosen.new.seed
        self.chosen = replace(chosen, fresh_seed=getattr(config.option, "fresh_seed", None))
        self.is_worker = hasattr(config, "workerinput")
        if self.is_worker:  # the controller writes the record
            self.chosen = replace(self.chosen, json_path=None)
        self.is_shared = not self.is_worker and getattr(config.option, "dist", "no") != "no"
        self._is_alone = self.is_worker or self.is_shared or config.getoption("perf")
        n = 1 if self._is_alone or config.option.collectonly else number(self.chosen.jobs, pairs_of(self.chosen))
        with ExitStack() as ends:
            self._started = None if n == 1 else ends.enter_context(closing(Lanes(n)))
            """Lanes, which import while this process opens the backends and collects."""
            self.run = TestRun(self.chosen, recovers=not self.is_worker)
            self._ends = ends.pop_all()
        if self.is_shared:
            self.chosen.workers.close()  # xdist's workers run the cases
        self.results: dict[Key, Result] = {}
        self.planned: dict[Spec, list[str]] = {}
        self.deselected = False
        self.session: pytest.Session | None = None
        """The pytest session; None after its end."""

    def begin(self, session: pytest.Session, keys: Iterable[Key]) -> None:
        """Set the required results, before anything runs."""
        self.session = session
        for spec, case in keys:
            self.planned.setdefault(spec, []).append(case)
        request = Request({str(spec): ids for spec, ids in self.planned.items()})
        if not session.config.option.collectonly:
            self.run.ask(request, gating=self._is_gating())

    def keep(self, key: Key, result: Result) -> None:
        """Store a result and write it to disk at once."""
        self.results[key] = result
        self.run.keep([result])

    def _is_gating(self) -> bool:
        """Return True if a backend with no PASS fails: it was named, or a whole level selected."""
        it = self.chosen
        if it.backends or it.shard != WHOLE or self.deselected or not it.is_whole_level:
            return bool(it.backends) and it.shard == WHOLE
        return all(len(self.planned.get(s, ())) >= len(it.level_ids.get(it.levels[s], ())) for s in it.specs)

    @cached_property
    def keys(self) -> list[Key]:
        """Tests to run, cases outermost, in the order of the highest level.

        Raises:
            UsageError: a family is unknown, or a glob matches no case.
            UnavailableError: this installation lacks a family that is named.
        """
        by_level = sorted(self.chosen.specs, key=lambda s: LEVELS.index(self.chosen.levels[s]), reverse=True)
        wanted = {s: dict.fromkeys(self.chosen.ids[s]) for s in self.chosen.specs}
        order = dict.fromkeys(i for s in by_level for i in wanted[s])
        return [(s, i) for i in order for s, ids in wanted.items() if i in ids]

    def key_of(self, nodeid: str) -> Key | None:
        """Return case and backend of a test from its node id; None for other tests."""
        name = nodeid.partition("[")[2].rpartition("]")[0]
        specs = (s for s in self.chosen.specs if name.endswith(f"-{s}"))
        spec = max(specs, key=lambda s: len(str(s)), default=None)
        return None if spec is None else (spec, name.removesuffix(f"-{spec}"))

    def result(self, key: Key) -> Result:
        """Return the result of a case on a backend; wait for its lane, or run its batch.

        Raises:
            BackendCrashError: the device does not start, or no lane can run the backend.
        """
        if key not in self.results and self._lanes is not None and shares(key[1]):
            spec, case_id = key
            found = self._lanes.result(spec, case_id)
            if found is None:
                raise BackendCrashError(self.run.reasons.get((str(spec), ""), f"{spec}: no lane ran the case"))
            self.results[key] = found
        if key not in self.results:
            spec, case_id = key
            plan, runner = self.planned.get(spec, [case_id]), self.run.runner
            start = plan.index(case_id)
            batch = [i for i in plan[start : start + runner.batch_size(spec)] if (spec, i) not in self.results]
            ran: list[Result] = []
            for _, result in self.run.play(spec, batch, stop=lambda: bool(ran)):  # one group of cases
                ran.append(result)
                self.results[spec, result.case] = result
        return self.results[key]

    @cached_property
    def _lanes(self) -> Executor | None:
        """The lanes that run the session's cases; None if this process does."""
        ids = {s: [i for i in own if shares(i)] for s, own in self.planned.items()}
        n = 1 if self._is_alone else number(self.chosen.jobs, sum(map(len, ids.values())))
        if n == 1:
            self._ends.close()
            return None
        self.chosen.workers.close()
        lanes = self._started or self._ends.enter_context(closing(Lanes(n)))
        lanes.share_devices(list(ids))
        return Executor(lanes, self.run, ids)

    def close(self) -> None:
        """End the lanes and all backends."""
        self._ends.close()
        self.run.close()


class Reports:
    """Receives pytest's reports, of its own tests and of those of workers."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._specs = {str(spec): spec for spec in suite.chosen.specs}
        self._died: set[Key] = set()

    def pytest_deselected(self) -> None:
        """Record that the user deselected tests, which need no result."""
        self._suite.deselected = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:  # noqa: ANN401  # xdist's own
        """Set the required results from the first worker; all workers collect the same tests."""
        if not self._suite.planned:
            session = node.config.pluginmanager.getplugin("session")
            self._suite.begin(session, filter(None, map(self._suite.key_of, ids)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store a worker's result, the test at which it died, or why a test has no result."""
        suite = self._suite
        fields = dict(report.user_properties).get(PROPERTY)
        if report.when == "call" and isinstance(fields, dict):
            result = Result.from_json(fields)
            at = self._specs[result.backend], result.case
            if at not in self._died:
                suite.keep(at, result)
            else:  # a worker died at it: a later result does not count
                suite.results[at] = suite.results[at].noted(f"{result.verdict} when run again in another process")
        key = suite.key_of(report.nodeid) if report.failed and report.when != "call" else None
        if key is None:
            return
        if str(report.when) == "???":  # xdist reports a dead worker so
            self._died.add(key)
            detail = f"its process died, because of it or of another case of its batch: {report.longrepr}"
            suite.keep(key, Result(key[1], str(key[0]), Verdict.CRASH, error=Error(detail)))
        else:
            why = " ".join(str(report.longrepr).strip().rpartition("\n")[2].split())
            suite.run.reasons[str(key[0]), key[1]] = f"its {report.when} failed: {why}"


SUITE = pytest.StashKey[Suite]()
NO_BENCHMARKS = "Not saving anything, no benchmarks have been run!"
"""Warning of pytest-benchmark at the end of a session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `pytest conformance`, the same as those of `conform run`."""
    options.add_to(parser.getgroup("conformance", "ggml backends"))


def pytest_configure(config: pytest.Config) -> None:
    """Open the backends before collection, so that a wrong name is a one-line error."""
    try:
        suite = config.stash[SUITE] = Suite(config)
        if config.getoption("perf"):
            plugin_perf.configure(config, Bench(suite.run.runner, suite.chosen.isolation), suite.chosen)
    except (UsageError, UnavailableError) as e:
        raise pytest.UsageError(str(e)) from None
    if not suite.is_worker:
        config.pluginmanager.register(Reports(suite))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Choose the cases before collection, so that a glob without a match is a one-line error."""
    try:
        _ = session.config.getoption("perf") or session.config.stash[SUITE].keys
    except (UsageError, UnavailableError) as e:
        raise pytest.UsageError(str(e)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per case and backend; cases vary slowest, to share expected values."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    keys = [] if metafunc.config.getoption("perf") else metafunc.config.stash[SUITE].keys
    metafunc.parametrize("conformance_case", keys, ids=[f"{i}-{spec}" for spec, i in keys], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove tests without parameters; check golden outputs only in a level's first shard."""
    suite = config.stash[SUITE]
    whole = (
        not (config.getoption("perf") or suite.chosen.families or suite.chosen.globs) and suite.chosen.shard.index == 1
    )
    left_out = frozenset() if whole else frozenset({"conformance_golden"})
    items[:] = [
        i
        for i in items
        if not (_is_empty(i) or plugin_perf.is_empty(i)) and left_out.isdisjoint(getattr(i, "fixturenames", ()))
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401  # xdist's own
    """Spread the cases by `scope`, whatever `--dist` says; group marks depend on versions."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415  # only xdist calls this

    suite = config.stash[SUITE]

    class ByScope(LoadScopeScheduling):  # type: ignore[misc]  # xdist is optional
        def _split_scope(self, nodeid: str) -> str:
            key = suite.key_of(nodeid)
            return nodeid if key is None else scope(*key)

    return ByScope(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the selected tests in order, for batches and the required results."""
    suite = session.config.stash[SUITE]
    if not suite.is_shared:  # with xdist, workers collect
        try:
            suite.begin(session, filter(None, (_key(i) or plugin_perf.case_of(i) for i in session.items)))
        except UsageError as e:
            raise pytest.UsageError(str(e)) from None


def scope(spec: Spec, case_id: str) -> str:
    """Return the tests that one worker runs: of a device, or ops or graphs of a backend.

    Two groups of nearly equal cost per backend keep two workers busy to the end.
    """
    adapter = resolve(spec)
    name = dict(adapter.options).get("device", "CPU")
    if name.upper() != "CPU":
        return name
    return f"{adapter.name} {'ops' if case_id.startswith('ops/') else 'graphs'}"


def _is_empty(item: pytest.Item) -> bool:
    return "conformance_case" in getattr(item, "fixturenames", ()) and _key(item) is None


def _key(item: pytest.Item) -> Key | None:
    callspec = getattr(item, "callspec", None)
    key = callspec.params.get("conformance_case") if callspec else None
    return key if isinstance(key, tuple) else None


@pytest.fixture
def conformance_case(request: pytest.FixtureRequest) -> Result:
    """Return the result of the test's case on its backend."""
    suite = request.config.stash[SUITE]
    result = suite.result(request.param)
    if suite.is_worker:
        request.node.user_properties.append((PROPERTY, result.to_json()))
    return result


@pytest.fixture
def conformance_golden() -> list[Result]:
    """Recompute the golden outputs and return the results; damaged values fail the test."""
    try:
        return golden.verify()
    except CaseFileError as e:
        pytest.fail("\n".join(map(str, (e, *e.others))), pytrace=False)


def check(result: Result) -> None:
    """Turn a verdict into the test's outcome: skip, xfail or failure, with the reason."""
    if result.verdict is Verdict.UNSUPPORTED:
        pytest.skip(f"{result.verdict}: {printable(result.detail)}")
    if result.verdict is Verdict.XFAIL:
        pytest.xfail(result.sentence())
    if result.verdict in FAILURES and result.fresh:
        pytest.xfail(f"saved, does not fail the run: {result.sentence()}")
    if result.verdict in FAILURES:
        lines: list[str] = []
        with suppress(ConformanceError):  # a case that no id makes has no sources here
            lines = failures.source_lines(build(result.case), result)
        pytest.fail("\n".join([f"{result.sentence()}. Reproduce: {command(result)}", *lines]), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(
    report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
) -> tuple[str, str, str] | None:
    """Count unsupported cases separately from skipped tests."""
    suite = config.stash.get(SUITE, None)
    if suite is None or not report.skipped or hasattr(report, "wasxfail") or suite.key_of(report.nodeid) is None:
        return None
    return "unsupported", "u", "UNSUPPORTED"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print totals, settings and waivers in use, unavailable backends, and problems of the run."""
    suite = config.stash[SUITE]
    terminalreporter.section("conformance")

    def show(texts: Iterable[str], **markup: bool) -> None:
        for text in texts:
            terminalreporter.line(printable_lines(text), **markup)

    run, chosen = suite.run, suite.chosen
    show(settings_lines(run.active_settings))
    for spec in chosen.specs:
        own = [r for (s, _), r in suite.results.items() if s == spec]
        show([f"{spec}: {Totals.of(own)}"])
        if terminalreporter.hasopt("skipped"):
            show(refusal_lines(own))
    if config.option.verbose >= 0:
        show(map(str, run.scopes()))
    if new := chosen.new.round(0):
        show([f"--fresh {len(new)}: seed {chosen.new.seed}"])
    show(run.notes())
    show(printable(f"{name}: not available: {reason}") for name, reason in chosen.lacking.items())
    absent = {} if chosen.globs else lacking(chosen.families)
    show((f"{name}: not run: {reason}" for name, reason in absent.items()), yellow=True)
    show([*run.left, *run.recovered()], yellow=True)
    show(map(printable, () if config.option.collectonly else run.outcome().lines()), red=True)


@pytest.hookimpl(specname="pytest_sessionfinish", wrapper=True, tryfirst=True)
def pytest_nothing_to_save() -> Generator[None, object, object]:
    """Ignore a warning that would end pytest with a traceback where warnings are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_BENCHMARKS)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the record; fail a run without cases, or that lacks a result."""
    suite = session.config.stash[SUITE]
    suite.session = None
    if not suite.is_worker:
        with interrupts_wait():
            _finish(suite, session, exitstatus)
    suite.close()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the record of a session that was interrupted before `pytest_sessionfinish`."""
    suite = config.stash.get(SUITE, None)
    if suite is not None and suite.session is not None:
        pytest_sessionfinish(suite.session, pytest.ExitCode.INTERRUPTED)


def _finish(suite: Suite, session: pytest.Session, exitstatus: int) -> None:
    config, run = session.config, suite.run
    perf = config.stash.get(plugin_perf.PERF, None)
    for spec, result in perf.results() if perf else ():
        suite.results[spec, result.case] = result
    run.results = [r for k, r in suite.results.items() if suite.is_shared or k[1] in suite.planned.get(k[0], ())]
    if config.option.collectonly:
        run.request = Request()
    try:
        run.finish(*_why(suite, session, exitstatus))
    except UsageError as e:
        run.faults.append(str(e))
    if exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED} and not config.option.collectonly:
        session.exitstatus = STATUS[run.outcome().exit_code]


def _why(suite: Suite, session: pytest.Session, exitstatus: int) -> tuple[str, MissingCause]:
    """Return the reason for missing results if no other is known."""
    maxfail = session.config.getoption("maxfail")
    if maxfail and session.testsfailed >= maxfail:
        return f"stopped after {counted(maxfail, 'failure')}", MissingCause.STOPPED
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        return "interrupted", MissingCause.INTERRUPTED
    lost = "no worker reported it: its worker died or was killed" if suite.is_shared else "pytest did not run it"
    return lost, MissingCause.LOST
