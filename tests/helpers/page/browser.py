"""A headless Chromium, and questions about the report's page.

Driven through chromedriver (Debian's packages `chromium` and `chromium-driver`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from conformance.report.runfile import Document
from conformance.report.runs import Runs

Driver = Any
"""Selenium is imported where a browser is asked for."""
VIEWS = ("overview", "support", "results", "budgets", "speed", "notrun", "runs", "missing", "units", "causes", "cause",
         "comparison", "compared")  # fmt: skip
PROBES = Path(__file__).with_name("page_probes.js")

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1360,900",
)  # fmt: skip


def programs() -> tuple[str, str]:
    """Paths of the browser and of its driver; a test that asks is skipped where there are none."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no headless browser here: apt-get install chromium chromium-driver")
    return browser, driver


@contextmanager
def chromium(profile: Path) -> Iterator[Driver]:
    """A driver of a browser with a new profile in the empty folder `profile`; ended with the block."""
    browser, driver_path = programs()
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install 'ggml-conformance[test]'")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver_path, log_output=subprocess.DEVNULL)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(120)
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: Driver, *, width: int = 1360, height: int = 900, dark: bool = False) -> None:
    """Give the page a size, and the user a taste."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def ask(driver: Driver, script: str, *arguments: Any) -> Any:  # noqa: ANN401  # JSON from the page
    """What the body of an async function returns in the page; `given` are the arguments, and the probes are there."""
    whole = f"""{PROBES.read_text(encoding="utf-8")}
        const done = arguments[arguments.length - 1], given = [...arguments].slice(0, -1);
        (async () => {{ {script} }})().then((x) => done([x ?? null]), (e) => done(`${{e}} ${{e.stack}}`));"""
    answer = driver.execute_async_script(whole, *arguments)
    assert isinstance(answer, list), answer
    return answer[0]


def turned(driver: Driver, expression: str, wanted: Any) -> Any:  # noqa: ANN401  # JSON from the page
    """What `expression` is in the page once it is `wanted`, or after ten seconds: links take their time."""
    return ask(
        driver,
        f"""const is = () => ({expression}), end = performance.now() + 10000;
        while (is() !== given[0] && performance.now() < end) await new Promise((r) => setTimeout(r, 20));
        return is();""",
        wanted,
    )


def go(driver: Driver, view: str) -> None:
    """Follow a link of the page."""
    ask(driver, "await go(given[0]);", f"#{view}")


def _conformance(runs: Runs) -> Document:
    """The run of cases, beside those of speed."""
    (found,) = (d for d in runs.documents if d.record.causes)
    return found


def results(runs: Runs) -> list[dict[str, Any]]:
    """The rows of the run's JSON."""
    document = _conformance(runs)
    found: list[dict[str, Any]] = document.body["results"]
    return found


def case_view(runs: Runs, i: int) -> str:
    """The view of one result."""
    document = _conformance(runs)
    return f"case?run={document.run}&row={i}&document={runs.documents.index(document)}"


def cause_view(runs: Runs, i: int = 0) -> str:
    """The view of one cause."""
    c = runs.causes[i].value
    return f"cause?{urlencode({'id': c.id, 'backend': c.backend})}"


def failed_view(runs: Runs) -> str:
    """The view of a single op that diverges at a node."""
    rows = results(runs)
    return case_view(
        runs,
        next(
            i for i, r in enumerate(rows) if r["where"] and r["where"].get("numbers") and r["case"].startswith("ops/")
        ),
    )
