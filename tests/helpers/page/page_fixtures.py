"""A page and a browser that has it open, once for all test files that name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from math import inf

import made_runs
import pytest
from browser import Driver, chromium, look
from run_files import written_to

from conformance.report.compare import compare
from conformance.report.page import page
from conformance.report.runs import Runs, read_runs
from conformance.run.session.select import case_ids

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    made_runs.write(folder, 1200, nights=4)
    return read_runs([folder])


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What they are held against."""
    return read_runs([written_to(tmp_path_factory.mktemp("base") / "base.json", made_runs.base(1200))])


@pytest.fixture(scope="session")
def address(runs: Runs, base: Runs, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Their page, as a file."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    planned = {"smoke": case_ids((), (), "smoke")}
    against = compare(runs, base)
    path.write_text(page(runs, now=NOW, planned=planned, against=against, drawing=inf), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One browser for all tests."""
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def at(browser: Driver, address: str) -> Iterator[Driver]:
    """The browser with the page just opened, on a screen, by day; no test may leave an error behind."""
    look(browser)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(address)
    yield browser
    assert [line for line in browser.get_log("browser") if line["level"] != "INFO"] == []
