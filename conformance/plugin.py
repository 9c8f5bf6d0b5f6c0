"""The pytest side: options, one test per (case, backend), verdicts as outcomes, totals at the end.

Cases run in batches behind the scenes: the first test of a batch runs all of it, the others find their result there.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from conformance.backend.registry import Spec
from conformance.cases.family import LEVELS, Level
from conformance.cgraph.errors import UsageError
from conformance.check.verdict import FAILURES, Result, Totals, Verdict
from conformance.report.record import check_writable, record, write_json
from conformance.run.runner import Runner
from conformance.run.select import case_ids
from conformance.run.stages import choose

Key = tuple[Spec, str]


class Suite:
    """Everything one session runs, and its results so far."""

    def __init__(self, config: pytest.Config) -> None:
        self.level = cast("Level", config.getoption("level"))
        self.families: list[str] = config.getoption("family")
        self.globs: list[str] = config.getoption("case")
        self.specs, self.lacking = choose(config.getoption("backend"), config.getoption("stage"))
        if config.getoption("json"):
            check_writable(Path(config.getoption("json")))
        save = config.getoption("save_failures")
        self.runner = Runner(save_failures=Path(save) if save else None)
        self.results: dict[Key, Result] = {}
        self.planned: dict[Spec, list[str]] = {}

    def ids(self, family: str) -> list[str]:
        """Case ids to run of one family."""
        if self.families and family not in self.families:
            return []
        globs = [g for g in self.globs if g.startswith(f"{family}/") or set("*?[") & set(g.partition("/")[0])]
        if self.globs and not globs:
            return []
        return case_ids([family], globs, self.level)

    def result(self, key: Key) -> Result:
        """The result of one case on one backend; runs it, and the batch that comes with it, where it has none yet."""
        if key not in self.results:
            spec, case_id = key
            plan = self.planned.get(spec, [case_id])
            start = plan.index(case_id)
            batch = [i for i in plan[start : start + self.runner.batch_size(spec)] if (spec, i) not in self.results]
            for i, result in zip(batch, self.runner.run(spec, [self.runner.case(i) for i in batch]), strict=True):
                self.results[spec, i] = result
        return self.results[key]


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
        "--stage",
        metavar="STAGE",
        help="check the values of this stage of each backend: translate (before anything is compiled) or run",
    )
    group.addoption(
        "--family", action="append", default=[], metavar="NAME", help="case family, repeatable; default: all"
    )
    group.addoption("--case", action="append", default=[], metavar="GLOB", help="case ids to run, repeatable")
    group.addoption("--level", choices=LEVELS, default="smoke", help="how many cases (default: %(default)s)")
    group.addoption("--save-failures", metavar="DIR", help="keep each failing case as a file in DIR")
    group.addoption("--json", metavar="FILE", help="write every result to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Open the backends before anything is collected, so that a wrong name is one line."""
    try:
        config.stash[SUITE] = Suite(config)
    except UsageError as e:
        raise pytest.UsageError(str(e)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case and backend, cases outermost so that one oracle's answer serves every backend."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    suite = metafunc.config.stash[SUITE]
    family = metafunc.module.FAMILY
    try:
        keys = [(spec, i) for i in suite.ids(family) for spec in suite.specs]
    except UsageError as e:
        raise pytest.UsageError(str(e)) from None
    metafunc.parametrize("conformance_case", keys, ids=[f"{i}-{spec}" for spec, i in keys], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A family or level that leaves nothing to run in one module is no skipped test."""
    items[:] = [i for i in items if not _is_empty(i)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember what was selected, in order: that is what batches are made of."""
    suite = session.config.stash[SUITE]
    for item in session.items:
        key = _key(item)
        if key is not None:
            suite.planned.setdefault(key[0], []).append(key[1])


def _is_empty(item: pytest.Item) -> bool:
    return "conformance_case" in getattr(item, "fixturenames", ()) and _key(item) is None


def _key(item: pytest.Item) -> Key | None:
    callspec = getattr(item, "callspec", None)
    key = callspec.params.get("conformance_case") if callspec else None
    return key if isinstance(key, tuple) else None


@pytest.fixture
def conformance_case(request: pytest.FixtureRequest) -> Result:
    """The result of the test's case on its backend."""
    return request.config.stash[SUITE].result(request.param)


def check(result: Result) -> None:
    """Turn a verdict into the test's outcome: skipped with the backend's reason, or failed with one sentence."""
    if result.verdict is Verdict.UNSUPPORTED:
        pytest.skip(f"{result.verdict}: {result.detail}")
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
    for spec, reason in suite.lacking.items():
        terminalreporter.line(f"{spec}: not available: {reason}")
    executed = any(r.verdict is not Verdict.UNSUPPORTED for r in suite.results.values())
    if not executed and not config.option.collectonly:
        terminalreporter.line("nothing was executed, so nothing is proven: this run fails", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that executed nothing fails; the record is written whatever happened."""
    suite = session.config.stash[SUITE]
    results = [r for k, r in suite.results.items() if _was_asked(suite, k)]
    path = session.config.getoption("json")
    if path:
        write_json(Path(path), record(results, {str(s): why for s, why in suite.lacking.items()}))
    nothing = not any(r.verdict is not Verdict.UNSUPPORTED for r in results)
    if nothing and exitstatus in {0, 5} and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    suite.runner.close()


def _was_asked(suite: Suite, key: Key) -> bool:
    return key[1] in suite.planned.get(key[0], ())
