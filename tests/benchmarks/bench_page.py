"""How long the report's page takes with 20,000 results: to be made, to open, to filter, to change views.

`pytest tests/benchmarks/bench_page.py -s` prints the figures of docs/reports.md and asserts what is promised there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import made_runs
import pytest
from browser import VIEWS, Driver, ask, look
from click.testing import CliRunner

from conformance.cli import main

pytest_plugins = ("page_fixtures",)
RESULTS = 20_000
MADE, OPENED, FILTERED = 20.0, 2.0, 0.1
"""Seconds that are promised."""

PAINTED = """
const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
const timed = async (act) => {
  await painted();
  const start = performance.now();
  await act();
  document.body.getBoundingClientRect();
  const worked = performance.now();
  await painted();
  return [worked - start, performance.now() - start];
};
"""
WORDS = ("r", "ro", "rop", "rope", "rope f32", "mul_mat", "q4_0", "flash npu", "zzz", "", "step=", "cpu", "diverges")


def _tell(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """The report of 20,000 results, and what making it took: seconds by the clock, and by the processor."""
    folder = tmp_path_factory.mktemp("runs")
    made_runs.write(folder, RESULTS)
    out = tmp_path_factory.mktemp("out")
    clock, processor = time.perf_counter(), time.process_time()
    ran = CliRunner().invoke(main, ["report", str(folder), "--level", "full", "-o", str(out)])
    spent = time.perf_counter() - clock, time.process_time() - processor
    assert ran.exit_code == 0, ran.output
    return out / "index.html", *spent


def test_made(made: tuple[Path, float, float]) -> None:
    """All four reports are made in under 20 s."""
    path, clock, processor = made
    _tell(f"made: {clock:.1f} s ({processor:.1f} s of processor), {path.stat().st_size / 1e6:.1f} MB")
    assert clock < MADE


def test_opened(made: tuple[Path, float, float], browser: Driver) -> None:
    """From the address to the first picture in under 2 s."""
    found = []
    look(browser)
    for _ in range(5):
        browser.get("about:blank")
        browser.get(made[0].as_uri())
        found.append(
            ask(
                browser,
                """await new Promise((f) => setTimeout(f, 100));
                return Math.max(performance.getEntriesByType("navigation")[0].loadEventEnd,
                                ...performance.getEntriesByType("paint").map((p) => p.startTime)) / 1000;""",
            )
        )
    assert ask(browser, "return document.documentElement.dataset.ready") == "yes"
    _tell(f"opened: {median(found):.2f} s, at most {max(found):.2f} s of {len(found)}")
    assert median(found) < OPENED


def test_filtered(made: tuple[Path, float, float], browser: Driver) -> None:
    """From a key or a choice to the rows laid out in under 100 ms; to the next picture is one frame more."""
    look(browser)
    browser.get(made[0].as_uri() + "#results")
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    before = _processor(browser)
    spent = ask(
        browser,
        PAINTED
        + """const all_ = [];
        for (const w of given[0]) all_.push(await timed(() => choose(document.querySelector("#search"), w)));
        for (const name of ["verdict", "backend", "family", "op", "type"]) {
          const select = chooser(name);
          for (const o of [...select.options].slice(0, 6)) all_.push(await timed(() => choose(select, o.value)));
          choose(select, "");
        }
        for (const b of all("thead button")) all_.push(await timed(() => b.click()));
        return all_;""",
        WORDS,
    )
    _tell(f"processor, pictures too: {(_processor(browser) - before) / len(spent) * 1000:.0f} ms each")
    for name, values in (("rows laid out", [a for a, _ in spent]), ("painted", [b for _, b in spent])):
        most = f"at most {max(values):.0f} ms of {len(values)} filters and orders"
        _tell(f"{name}: median {median(values):.0f} ms, {most}")
    assert max(a for a, _ in spent) < FILTERED * 1000


def _processor(browser: Driver) -> float:
    """Seconds of processor that the page's thread took."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(m["value"] for m in metrics if m["name"] == "ThreadTime"))


def test_views(made: tuple[Path, float, float], browser: Driver) -> None:
    """How long each view takes; printed, nothing is promised of it."""
    look(browser)
    browser.get(made[0].as_uri())
    for view in VIEWS:
        worked, painted = ask(browser, PAINTED + "return timed(() => go('#' + given[0]))", view)
        _tell(f"{view}: {worked:.0f} ms, painted {painted:.0f} ms")
    filtered = ask(
        browser,
        PAINTED + "await go('#support'); return timed(() => choose(document.querySelector('#search'), 'mul'))",
    )
    _tell(f"support, filtered: {filtered[0]:.0f} ms, painted {filtered[1]:.0f} ms")
