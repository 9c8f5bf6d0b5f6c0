"""Settings of this run: hypothesis profile, garbage collector, folders, caches.

Hypothesis draws the same examples each time where CI is set, else from a growing database. No expected values are kept
on disk, the temporary folder is the run's own, and one shrink runs at a time.

`-m quick` selects the first tests of each file, up to `QUICK` seconds as measured in `quick.json`.
`pytest tests -n 2 --dist loadfile --measure` measures again.
"""

import gc
import json
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from conformance.run.shrink import workers

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("local", print_blob=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", print_blob=True, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW
)
os.environ["CONFORMANCE_EXPECTED"] = ""  # tests change kernels: no later run may find their values
settings.load_profile("ci" if os.environ.get("CI") else "local")
gc.set_threshold(20_000)  # by default the collector takes a tenth of the time: modules and tests stay anyway


MEASURED = Path(__file__).with_name("quick.json")
"""File -> seconds of its first test functions, in order."""
QUICK = 1.0
"""Seconds of a file's quick tests (`_since`)."""
LATE = 40
"""Seconds of wall time after which a measured test is ended: it is not quick."""
_used: defaultdict[str, float] = defaultdict(float)
"""File -> seconds that its tests took so far, where they are measured."""
_measured: defaultdict[str, dict[str, float]] = defaultdict(dict)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures."""
    parser.addoption("--measure", action="store_true", help="Write tests/quick.json; run only what may be quick.")


def pytest_configure(config: pytest.Config) -> None:
    """Define the marker."""
    config.addinivalue_line("markers", "quick: among the first tests of its file, as measured in tests/quick.json")


def _place(item: pytest.Item) -> tuple[str, str]:
    """File and function of a test."""
    return item.nodeid.partition("::")[0], item.nodeid.partition("::")[2].partition("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests."""
    quick = {(f, name) for f, times in json.loads(MEASURED.read_text("utf-8")).items() for name in _first(times)}
    for item in items:
        if _place(item) in quick:
            item.add_marker("quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test, or skip it if those before it in its file took too long."""
    if not item.config.getoption("--measure"):
        return (yield)
    file, _ = _place(item)
    if _used[file] > QUICK:
        item.add_marker(pytest.mark.skip(reason="its file has taken its time"))
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(LATE)
    item.stash[_BEGAN] = began = _now()
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        _used[file] += _since(began)


_Time = tuple[float, float]
"""Seconds of processor time, children that ended included, and of wall time."""
_BEGAN = pytest.StashKey[_Time]()


def _now() -> _Time:
    return sum(os.times()[:4]), time.monotonic()


def _since(began: _Time) -> float:
    """The longer of both: a test that waits is not quick, nor one that loads both cores."""
    return max(now - then for now, then in zip(_now(), began, strict=True))


def _late(*_: object) -> None:
    raise TimeoutError(f"{LATE} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:  # noqa: ANN401  # pytest's
    """Send the time of a measured test with its last report."""
    report = yield
    if call.when == "teardown" and _BEGAN in item.stash:
        report.user_properties.append(("seconds", _since(item.stash[_BEGAN])))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the times of a function's tests; one that failed is never quick."""
    file, function = report.nodeid.partition("::")[0], report.nodeid.partition("::")[2].partition("[")[0]
    times = _measured[file]
    if report.failed:
        times[function] = LATE
    for name, seconds in report.user_properties:
        if name == "seconds":
            times[function] = round(times.get(function, 0.0) + float(str(seconds)), 3)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the times of the files that ran, up to the first function that is not quick."""
    if session.config.getoption("--measure") and not hasattr(session.config, "workerinput"):
        found = {**json.loads(MEASURED.read_text("utf-8")), **{f: _first(times) for f, times in _measured.items()}}
        here = {f: own for f, own in sorted(found.items()) if own and Path(session.config.rootpath, f).exists()}
        MEASURED.write_text(json.dumps(here, indent=0) + "\n", "utf-8")


def _first(times: dict[str, float]) -> dict[str, float]:
    """The functions before the first that is not quick."""
    total, found = 0.0, {}
    for name, seconds in times.items():
        total += seconds
        if total > QUICK:
            break
        found[name] = seconds
    return found


def pytest_collection_finish() -> None:
    """Exempt collected tests from garbage collection; they live until the session ends."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_worker() -> Iterator[None]:
    """A search shrinks one case at a time: the other processors run other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "MOST", 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run gets a temporary folder of its own.

    A run recovers the cases of a killed one from there, and must not find those of another worker.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield
