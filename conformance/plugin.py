"""The pytest side: options, one test per (case, backend), verdicts as outcomes, totals at the end.

Cases run in batches behind the scenes: the first test of a batch runs all of it, the others find their result there.

Under `pytest -n` (pytest-xdist) the tests of a backend go to one worker, so that no device is used by two; results
travel to the controller in the reports, and only it counts and writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import pytest

from conformance.backend.registry import Spec, resolve
from conformance.cases import FAMILIES
from conformance.cases.family import LEVELS, Level
from conformance.cgraph.case import JSON
from conformance.cgraph.errors import UsageError
from conformance.check.verdict import FAILURES, Result, Totals, Verdict
from conformance.perf.bench import Bench
from conformance.report.record import check_writable, record, write_json
from conformance.run import settings, writeahead
from conformance.run.isolate import Isolation
from conformance.run.memory import parse_size
from conformance.run.runner import Runner
from conformance.run.seeds import FOLDER, fresh_ids, new_seed, reseeded
from conformance.run.select import build, case_ids, lacking
from conformance.run.shard import WHOLE, parse
from conformance.run.stages import choose
from conformance.run.waiving import Waiving, report, today

from . import plugin_perf
from .plugin_perf import pytest_ignore_collect  # noqa: F401  # a hook of this module too

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
        self.specs, self.lacking = choose(config.getoption("backend"), config.getoption("stage"))
        if config.getoption("json"):
            check_writable(Path(config.getoption("json")))
        save = config.getoption("save_failures") or (FOLDER if self.fresh else None)
        limit = config.getoption("memory_limit")
        self.isolation = isolation = Isolation(
            config.getoption("isolate"), config.getoption("time_limit"), None if limit is None else parse_size(limit)
        )
        self.folder = Path(save) if save else writeahead.default_folder()
        self.waiving = Waiving(self.settings.waivers_of(self.specs, _path(config, "waivers")), today())
        self.problems: tuple[list[str], list[str]] = [], []
        self.runner = Runner(
            save_failures=Path(save) if save else None,
            isolation=isolation,
            write_ahead=self.folder,
            waiving=self.waiving,
        )
        self.is_worker = hasattr(config, "workerinput")
        self.is_shared = not self.is_worker and getattr(config.option, "dist", "no") != "no"
        self.interrupted = [] if self.is_worker else writeahead.recover(self.folder, build)
        self.results: dict[Key, Result] = {}
        self.planned: dict[Spec, list[str]] = {}

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
            for i, result in zip(batch, self.runner.run(spec, [self.runner.case(i) for i in batch]), strict=True):
                result.fresh = i in self.fresh
                self.results[spec, i] = result
        return self.results[key]


class Controller:
    """Of a run that is shared out: takes in what the workers report."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._specs = {str(spec): spec for spec in suite.specs}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A worker's result, or the test at which it died."""
        found = dict(report.user_properties).get(PROPERTY)
        if report.when == "call" and isinstance(found, dict):
            result = Result(**{**found, "verdict": Verdict(found["verdict"])})
            self._suite.results[self._specs[result.backend], result.case] = result
        if str(report.when) == "???":  # xdist's word for it
            key = self._suite.key_of(report.nodeid)
            if key is not None:
                detail = f"the process that ran it died, of it or of a case of its batch: {report.longrepr}"
                self._suite.results[key] = Result(key[1], str(key[0]), Verdict.CRASH, detail=detail)


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
    if suite.is_shared:
        config.pluginmanager.register(Controller(suite))


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
    """Remember what was selected, in order: that is what batches are made of."""
    suite = session.config.stash[SUITE]
    for item in session.items:
        key = _key(item)
        if key is not None:
            suite.planned.setdefault(key[0], []).append(key[1])


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
        pytest.skip(f"{result.verdict}: {result.detail}")
    if result.verdict is Verdict.XFAIL:
        pytest.xfail(result.sentence())
    if result.verdict in FAILURES and result.fresh:
        pytest.xfail(f"filed, no failure of this run: {result.sentence()}")
    if result.verdict in FAILURES:
        again = f"conform repro {result.saved}" if result.saved else f"conform run --case '{result.case}'"
        pytest.fail(f"{result.sentence()}. Reproduce: {again} --backend '{result.backend}'", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Totals per backend, and every backend that is not here with the reason."""
    suite = config.stash[SUITE]
    terminalreporter.section("conformance")
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
            terminalreporter.line(f"filed, no failure of this run: {r.verdict} {r.case} on {r.backend}: {r.saved}")
    for spec, reason in suite.lacking.items():
        terminalreporter.line(f"{spec}: not available: {reason}")
    for name, reason in ({} if suite.globs else lacking(suite.families)).items():
        terminalreporter.line(f"{name}: not run: {reason}", yellow=True)
    for left in [*suite.interrupted, *writeahead.recover(suite.folder, build)]:
        terminalreporter.line(left.sentence(), yellow=True)
    for line in report(*suite.problems):
        terminalreporter.line(line, red=True)
    executed = any(r.verdict is not Verdict.UNSUPPORTED for r in suite.results.values())
    if not executed and not config.option.collectonly:
        terminalreporter.line("nothing was executed, so nothing is proven: this run fails", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that executed nothing fails; the record is written whatever happened."""
    suite = session.config.stash[SUITE]
    suite.runner.close()
    if suite.is_worker:
        return
    perf = session.config.stash.get(plugin_perf.PERF, None)
    for spec, result in perf.results() if perf else ():
        suite.results[spec, result.case] = result
        suite.planned.setdefault(spec, []).append(result.case)
    results = [r for k, r in suite.results.items() if suite.is_shared or _was_asked(suite, k)]
    suite.problems = suite.waiving.problems(results)
    path = session.config.getoption("json")
    if path:
        lacking = {str(s): why for s, why in suite.lacking.items()}
        document = perf.document(lacking) if perf else record(results, lacking, suite.problems[0])
        write_json(Path(path), {**document, **suite.whose()})
    nothing = not any(r.verdict is not Verdict.UNSUPPORTED for r in results)
    if (nothing or suite.problems[0]) and exitstatus in {0, 5} and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _was_asked(suite: Suite, key: Key) -> bool:
    return key[1] in suite.planned.get(key[0], ())
