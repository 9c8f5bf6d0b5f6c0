"""The pytest side: options, one test per (case, backend), verdicts as outcomes, totals at the end.

Cases run in batches behind the scenes: the first test of a batch runs all of it, the others find their result there.

Under `pytest -n` (pytest-xdist) the tests of a backend go to one worker, so that no device is used by two; results
travel to the controller in the reports, and only it counts and writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from conformance.backend.registry import Spec, resolve
from conformance.case.case import JSON, Case
from conformance.ggml.errors import UsageError
from conformance.ggml.text import printable
from conformance.judge.asked import INTERRUPTED, STOPPED, Asked, Missing
from conformance.judge.asked import told as told_missing
from conformance.judge.verdict import FAILURES, Result, Totals, Verdict
from conformance.perf.bench import Bench
from conformance.process.memory import parse_size
from conformance.report.journal import Partial
from conformance.report.runfile import check_writable, interrupts_wait, record, write_json
from conformance.report.runs import command
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session import settings, writeahead
from conformance.run.session.select import FOLDER, build, case_ids, fresh_ids, lacking, new_seed, reseeded
from conformance.run.session.settings import Waiving, in_force, lines_of, report, today
from conformance.run.session.shard import WHOLE, parse
from conformance.run.stages import choose
from conformance.suite.family import LEVELS, Level

from . import plugin_perf
from .plugin_perf import pytest_ignore_collect  # noqa: F401  # a hook of this module too
from .suite import FAMILIES

Key = tuple[Spec, str]
PROPERTY = "conformance"
"""A report's property that holds a worker's result."""


class Suite:
    """Everything one session runs, and its results so far."""

    def __init__(self, config: pytest.Config) -> None:
        self.settings = settings.load(_path(config, "settings"))
        self.level = cast("Level | None", config.getoption("level"))
        self.families: list[str] = config.getoption("family")
        self.globs: list[str] = config.getoption("case")
        self.seed: int | None = config.getoption("seed")
        self.shard = parse(config.getoption("shard"))
        self.fresh = self._fresh(config)
        limit = config.getoption("memory_limit")
        self.isolation = isolation = Isolation(
            config.getoption("isolate"), config.getoption("time_limit"), None if limit is None else parse_size(limit)
        )
        self.specs, self.lacking = choose(config.getoption("backend"), config.getoption("stage"), isolation)
        if config.getoption("json"):
            check_writable(Path(config.getoption("json")))
        save = config.getoption("save_failures") or (FOLDER if self.fresh else None)
        self.folder = Path(save) if save else writeahead.default_folder()
        self.waiving = Waiving(self.settings.waivers_of(self.specs, _path(config, "waivers")), today())
        self.problems: tuple[list[str], list[str]] = [], []
        self.runner = Runner(
            save_failures=Path(save) if save else None,
            isolation=isolation,
            write_ahead=self.folder,
            waiving=self.waiving,
            on_hang=self._hung,
        )
        self.is_worker = hasattr(config, "workerinput")
        self.is_shared = not self.is_worker and getattr(config.option, "dist", "no") != "no"
        self.interrupted = [] if self.is_worker else writeahead.recover(self.folder, build)
        self.results: dict[Key, Result] = {}
        self.planned: dict[Spec, list[str]] = {}
        self.named = bool(config.getoption("backend"))
        self.json = _path(config, "json")
        self.deselected = False
        self.asked = Asked()
        self.missing: list[Missing] = []
        self.reasons: dict[tuple[str, str], str] = {}
        """Backend and case -> why it has no result."""
        self.stopped = False
        """Whether it ended as soon as there were as many failures as the user wanted to see."""
        self.partial: Partial | None = None
        self.in_force = in_force(self.settings, self.waiving)
        self.faults: list[str] = []
        """What went wrong with the record."""
        self.session: pytest.Session | None = None
        """As long as it is not at its end."""

    def begin(self, session: pytest.Session, keys: Iterable[Key]) -> None:
        """Know what was asked for, before anything runs."""
        self.session = session
        for spec, case in keys:
            self.planned.setdefault(spec, []).append(case)
        self.asked = Asked({str(spec): ids for spec, ids in self.planned.items()})
        if self.json is not None and not self.is_worker and not session.config.option.collectonly:
            self.partial = Partial(self.json, self.asked)

    def keep(self, key: Key, result: Result) -> None:
        """Take in a result; it is on disk at once."""
        self.results[key] = result
        if self.partial is not None:
            self.partial.add([result])

    def _hung(self, spec: Spec, cases: Sequence[str], sentence: str) -> None:
        """The process is about to end because `spec` does not come back: write what the session has."""
        self.reasons |= {(str(spec), case): sentence for case in cases}
        if self.session is not None and not self.is_worker:
            _finish(self, self.session, pytest.ExitCode.INTERRUPTED)

    def unproven(self) -> dict[str, str]:
        """Backend -> a sentence, for each on which nothing passed."""
        return self.asked.unproven(list(self.results.values()), self.missing)

    @property
    def gating(self) -> bool:
        """Whether a backend on which nothing passed fails the session: it was named, or a whole level was asked for."""
        if self.shard != WHOLE:
            return False
        return self.named or (not (self.deselected or self.families or self.globs) and self._is_whole())

    def _is_whole(self) -> bool:
        listed = {n: sum(len(self._listed(f, n)) for f in FAMILIES) for n in LEVELS if n in self._levels()}
        return all(len(self.planned.get(s, ())) >= listed[self.settings.level(s, self.level)] for s in self.specs)

    def _levels(self) -> set[Level]:
        return {self.settings.level(spec, self.level) for spec in self.specs}

    def keys(self, family: str) -> list[Key]:
        """What to run of one family, cases outermost; the backend with the highest level leads."""
        levels = {spec: self.settings.level(spec, self.level) for spec in self.specs}
        ids = {n: dict.fromkeys(self._ids(family, n)) for n in sorted(set(levels.values()), key=LEVELS.index)}
        ordered = dict.fromkeys(i for listed in reversed(ids.values()) for i in listed)
        return [(spec, i) for i in ordered for spec, n in levels.items() if i in ids[n]]

    def _ids(self, family: str, level: Level) -> list[str]:
        own = self.shard.share(self._listed(family, level))
        return [*own, *(i for i in self.fresh if i.startswith(f"{family}/") and i not in own)]

    def _listed(self, family: str, level: Level) -> list[str]:
        if family not in self.families and (self.families or FAMILIES[family].lacks()):
            return []
        globs = [g for g in self.globs if g.startswith(f"{family}/") or set("*?[") & set(g.partition("/")[0])]
        if self.globs and not globs:
            return []
        return [reseeded(i, self.seed) for i in case_ids([family], globs, level)]

    def whose(self) -> dict[str, JSON]:
        """`shard` for the record of a run that is one of several."""
        if self.shard == WHOLE:
            return {}
        levels = {self.settings.level(spec, self.level) for spec in self.specs}
        return {"shard": self.shard.to_json(i for f in FAMILIES for n in levels for i in self._listed(f, n))}

    def _fresh(self, config: pytest.Config) -> list[str]:
        """What --fresh adds. Workers of a shared run get the controller's options, and so its seed."""
        n: int = config.getoption("fresh")
        if n and getattr(config.option, "fresh_seed", None) is None:
            config.option.fresh_seed = new_seed() if self.seed is None else self.seed
        level = self.level or LEVELS[0]
        new = fresh_ids(self.families, self.globs, level, n, config.option.fresh_seed) if n else []
        return self.shard.share(new)

    def key_of(self, nodeid: str) -> Key | None:
        """The case and backend of a test by its node id; None for a test of something else."""
        name = nodeid.partition("[")[2].rpartition("]")[0]
        spec = max((s for s in self.specs if name.endswith(f"-{s}")), key=lambda s: len(str(s)), default=None)
        return None if spec is None else (spec, name.removesuffix(f"-{spec}"))

    def result(self, key: Key) -> Result:
        """The result of one case on one backend; runs it, and the batch that comes with it, where it has none yet."""
        if key not in self.results:
            spec, case_id = key
            plan = self.planned.get(spec, [case_id])
            start = plan.index(case_id)
            batch = [i for i in plan[start : start + self.runner.batch_size(spec)] if (spec, i) not in self.results]
            cases = self._together(batch)
            for i, result in zip(batch, self.runner.run(spec, cases)):  # noqa: B905  # no longer than `cases`
                result.fresh = i in self.fresh
                self.keep((spec, i), result)
        return self.results[key]

    def _together(self, ids: Sequence[str]) -> list[Case]:
        """The first case, and those behind it that may share its graph: a trajectory's result is on disk by itself."""
        cases = [self.runner.case(ids[0])]
        for i in ids[1:]:
            case = self.runner.case(i)
            if len(cases[0].steps) != 1 or len(case.steps) != 1:
                break
            cases.append(case)
        return cases


class Reports:
    """Takes in what pytest reports, of its own tests and of those that workers ran."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._specs = {str(spec): spec for spec in suite.specs}
        self._died: set[Key] = set()

    def pytest_deselected(self) -> None:
        """What the user deselects is not asked for."""
        self._suite.deselected = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:  # noqa: ANN401  # xdist's own
        """All workers collect the same: the first says what was asked for."""
        if not self._suite.planned:
            self._suite.begin(node.config.pluginmanager.getplugin("session"), self._keys(ids))

    def _keys(self, ids: list[str]) -> Iterator[Key]:
        return (key for key in map(self._suite.key_of, ids) if key is not None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A worker's result, the test at which it died, or why a test has no result."""
        suite = self._suite
        found = dict(report.user_properties).get(PROPERTY)
        if report.when == "call" and isinstance(found, dict):
            result = Result(**{**found, "verdict": Verdict(found["verdict"])})
            self._keep((self._specs[result.backend], result.case), result)
        key = suite.key_of(report.nodeid) if report.failed and report.when != "call" else None
        if key is None:
            return
        said = " ".join(str(report.longrepr).strip().rpartition("\n")[2].split())
        if str(report.when) == "???":  # xdist's word for it
            self._died.add(key)
            detail = f"the process that ran it died, of it or of a case of its batch: {report.longrepr}"
            suite.keep(key, Result(key[1], str(key[0]), Verdict.CRASH, detail=detail))
        else:
            suite.reasons[str(key[0]), key[1]] = f"its {report.when} failed: {said}"

    def _keep(self, key: Key, result: Result) -> None:
        """A worker died at it: that stays, whatever another one gives that runs the rest."""
        if key not in self._died:
            self._suite.keep(key, result)
        else:
            self._suite.results[key].detail += f"; run again in another process it was {result.verdict}"


SUITE = pytest.StashKey[Suite]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `pytest conformance`."""
    group = parser.getgroup("conformance", "ggml backends")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME[?KEY=VALUE]",
        help="backend to test, repeatable; default: every available one",
    )
    group.addoption(
        "--config", dest="settings", metavar="FILE", help="names of backends (default: conformance.toml, if it is here)"
    )
    group.addoption("--waivers", metavar="FILE", help="known failures of the one --backend")
    group.addoption(
        "--stage",
        metavar="STAGE",
        help="check the values of this stage of each backend: translate (before anything is compiled) or run",
    )
    group.addoption(
        "--family", action="append", default=[], metavar="NAME", help="case family, repeatable; default: all"
    )
    group.addoption("--case", action="append", default=[], metavar="GLOB", help="case ids to run, repeatable")
    group.addoption("--level", choices=LEVELS, help=f"how many cases (default: the backend's own, or {LEVELS[0]})")
    group.addoption("--seed", type=int, metavar="N", help="every generated case with this seed instead of its own")
    group.addoption(
        "--fresh",
        type=int,
        default=0,
        metavar="N",
        help="also N new cases of the chosen families, from a fresh seed (or --seed): kept if they fail, never gating",
    )
    group.addoption("--shard", default="1/1", metavar="I/N", help="only the I-th of N shares of the chosen cases")
    group.addoption("--save-failures", metavar="DIR", help="keep each failing case as a file in DIR")
    group.addoption(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="run backends in processes of their own, or in this one (default: those that need it)",
    )
    group.addoption(
        "--time-limit",
        type=float,
        default=Isolation().time_limit,
        metavar="SECONDS",
        help="what one request may take in such a process (default: %(default)s)",
    )
    group.addoption("--memory-limit", metavar="SIZE", help="what such a process may hold, as 4G")
    group.addoption("--json", metavar="FILE", help="write every result to FILE")
    plugin_perf.add_options(group)


def pytest_configure(config: pytest.Config) -> None:
    """Open the backends before anything is collected, so that a wrong name is one line."""
    try:
        suite = config.stash[SUITE] = Suite(config)
        if config.getoption("perf"):
            plugin_perf.configure(config, Bench(suite.runner, suite.isolation), suite.specs, suite.level or LEVELS[0])
    except UsageError as e:
        raise pytest.UsageError(str(e)) from None
    if not suite.is_worker:
        config.pluginmanager.register(Reports(suite))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case and backend, cases outermost so that one oracle's answer serves every backend."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    suite = metafunc.config.stash[SUITE]
    family = metafunc.module.FAMILY
    try:
        keys = suite.keys(family)
    except UsageError as e:
        raise pytest.UsageError(str(e)) from None
    metafunc.parametrize("conformance_case", keys, ids=[f"{i}-{spec}" for spec, i in keys], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A family or level that leaves nothing to run in one module is no skipped test."""
    items[:] = [i for i in items if not _is_empty(i) and not plugin_perf.is_empty(i)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401  # xdist's own
    """Tests are shared out by device, whatever `--dist` says: marks of groups would do less and depend on versions."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415  # whoever calls this has it

    suite = config.stash[SUITE]

    class ByDevice(LoadScopeScheduling):  # type: ignore[misc]  # xdist may not be there when types are checked
        def _split_scope(self, nodeid: str) -> str:
            key = suite.key_of(nodeid)
            return nodeid if key is None else device(key[0])

    return ByDevice(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember what was selected, in order: that is what batches are made of, and what must have a result."""
    suite = session.config.stash[SUITE]
    if not suite.is_shared:  # there workers collect
        try:
            suite.begin(session, filter(None, map(_key, session.items)))
        except UsageError as e:
            raise pytest.UsageError(str(e)) from None


def device(spec: Spec) -> str:
    """What no two workers may use at a time: the device that an option names, or the backend itself."""
    behind = resolve(spec)
    named = dict(behind.options).get("device", "CPU")
    return behind.name if named.upper() == "CPU" else named


def _path(config: pytest.Config, option: str) -> Path | None:
    given = config.getoption(option)
    return Path(given) if given else None


def _is_empty(item: pytest.Item) -> bool:
    return "conformance_case" in getattr(item, "fixturenames", ()) and _key(item) is None


def _key(item: pytest.Item) -> Key | None:
    callspec = getattr(item, "callspec", None)
    key = callspec.params.get("conformance_case") if callspec else None
    return key if isinstance(key, tuple) else None


@pytest.fixture
def conformance_case(request: pytest.FixtureRequest) -> Result:
    """The result of the test's case on its backend."""
    suite = request.config.stash[SUITE]
    result = suite.result(request.param)
    if suite.is_worker:
        request.node.user_properties.append((PROPERTY, result.to_json()))
    return result


def check(result: Result) -> None:
    """Turn a verdict into the test's outcome: skipped with the backend's reason, or failed with one sentence."""
    if result.verdict is Verdict.UNSUPPORTED:
        pytest.skip(f"{result.verdict}: {printable(result.detail)}")
    if result.verdict is Verdict.XFAIL:
        pytest.xfail(result.sentence())
    if result.verdict in FAILURES and result.fresh:
        pytest.xfail(f"filed, no failure of this run: {result.sentence()}")
    if result.verdict in FAILURES:
        pytest.fail(f"{result.sentence()}. Reproduce: {command(result)}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Totals per backend, what is in force, every backend that is not here, and what is wrong with the run."""
    suite = config.stash[SUITE]
    terminalreporter.section("conformance")
    for line in lines_of(suite.in_force):
        terminalreporter.line(line)
    for spec in suite.specs:
        totals = Totals()
        for (s, _), r in suite.results.items():
            if s == spec:
                totals.add(r)
        terminalreporter.line(f"{spec}: {totals}")
    if suite.fresh:
        terminalreporter.line(f"--fresh {len(suite.fresh)}: seed {config.option.fresh_seed}")
    for r in suite.results.values():
        if r.fresh and r.verdict in FAILURES:
            filed = f"filed, no failure of this run: {r.verdict} {r.case} on {r.backend}: {r.saved}"
            terminalreporter.line(printable(filed))
    for spec, reason in suite.lacking.items():
        terminalreporter.line(printable(f"{spec}: not available: {reason}"))
    for name, reason in ({} if suite.globs else lacking(suite.families)).items():
        terminalreporter.line(printable(f"{name}: not run: {reason}"), yellow=True)
    for left in [*suite.interrupted, *writeahead.recover(suite.folder, build)]:
        terminalreporter.line(left.sentence(), yellow=True)
    if suite.partial is not None and suite.partial.left:
        terminalreporter.line(printable(suite.partial.left), yellow=True)
    for line in (*report(*suite.problems), *_wrong(suite, config)):
        terminalreporter.line(printable(line), red=True)


def _wrong(suite: Suite, config: pytest.Config) -> Iterator[str]:
    """What is wrong with the run as a whole."""
    if config.option.collectonly:
        return
    yield from suite.faults
    yield from told_missing(suite.missing, sum(map(len, suite.asked.cases.values())))
    yield from suite.unproven().values()
    if not any(r.verdict is not Verdict.UNSUPPORTED for r in suite.results.values()):
        yield "nothing was executed, so nothing is proven: this run fails"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that executed nothing, or lacks a result, fails; the record is written whatever happened."""
    suite = session.config.stash[SUITE]
    suite.session = None
    if not suite.is_worker:
        with interrupts_wait():
            _finish(suite, session, exitstatus)
    suite.runner.close()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The record of a session whose end was interrupted before `pytest_sessionfinish`."""
    suite = config.stash.get(SUITE, None)
    if suite is not None and suite.session is not None:
        pytest_sessionfinish(suite.session, pytest.ExitCode.INTERRUPTED)


def _finish(suite: Suite, session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    perf = config.stash.get(plugin_perf.PERF, None)
    for spec, result in perf.results() if perf else ():
        suite.results[spec, result.case] = result
        suite.planned.setdefault(spec, []).append(result.case)
    results = [r for k, r in suite.results.items() if suite.is_shared or _was_asked(suite, k)]
    most = config.getoption("maxfail")
    suite.stopped = bool(most) and session.testsfailed >= most
    if not config.option.collectonly:
        suite.missing = suite.asked.missing(results, _why(suite, most, exitstatus), suite.reasons)
    suite.problems = suite.waiving.problems(results)
    if suite.json is not None:
        lacking = {str(s): why for s, why in suite.lacking.items()}
        document = perf.document(lacking) if perf else record(
            results, lacking, suite.problems[0], asked=suite.asked, missing=suite.missing, settings=suite.in_force
        )  # fmt: skip
        _write(suite, suite.json, {**document, **suite.whose()})
    nothing = not any(r.verdict is not Verdict.UNSUPPORTED for r in results)
    left_out = suite.missing and not suite.stopped
    wrong = nothing or left_out or suite.problems[0] or suite.faults or (suite.gating and suite.unproven())
    if wrong and exitstatus in {0, 5} and not config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _write(suite: Suite, path: Path, document: dict[str, JSON]) -> None:
    """The record; where it cannot be written, what lies beside it stays."""
    written = True
    try:
        write_json(path, document)
    except UsageError as e:
        suite.faults.append(str(e))
        written = False
    if suite.partial is not None and (says := suite.partial.close(written=written)):
        suite.faults.append(says)


def _why(suite: Suite, most: int, exitstatus: int) -> str:
    """Why a test that was selected has no result, as far as nothing more is known of it."""
    if suite.stopped:
        return STOPPED if most == 1 else f"stopped after {most} failures"
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        return INTERRUPTED
    return "no worker reported it: one that had it died, or was ended" if suite.is_shared else "pytest did not run it"


def _was_asked(suite: Suite, key: Key) -> bool:
    return key[1] in suite.planned.get(key[0], ())
