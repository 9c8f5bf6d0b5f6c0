"""Two writers and a reader on a history for a minute; importing nights: `pytest tests/benchmarks/bench_history.py`.

No row may be lost; the figures stand in the benchmark's `extra_info`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from history_load import load
from pytest_benchmark.fixture import BenchmarkFixture
from run_files import document, unit

from conformance.perf.history import History, runs, series
from conformance.suite import FAMILIES

MINUTE = 60.0
NIGHTS, BACKENDS, UNITS = 20, 4, 40


def test_a_minute(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Every run that a writer committed is there, whole, and no process met an error."""
    where = tmp_path / "h.sqlite"
    told = benchmark.pedantic(load, (where, MINUTE), rounds=1)  # type: ignore[no-untyped-call]  # pytest-benchmark's
    benchmark.extra_info.update(runs=told.written, reads=told.reads, lost=told.lost)
    assert told.lost == 0
    assert told.written > 0


def test_nights(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Importing one more night of every standard case on four backends, and its bytes per row."""
    path, ids = tmp_path / "n.sqlite", [i for f in FAMILIES.values() for i in f.ids("standard")]

    def night() -> tuple[tuple[object, ...], dict[str, object]]:
        when = f"2026-01-{len(made) + 1:02}T00:00:00Z"
        made.append(when)
        timings = [unit(f"u{u}", f"b{b}", [1.0, 2.0, 3.0] * 4) for u in range(UNITS) for b in range(BACKENDS)]
        ran = document([(i, f"b{b}", "PASS") for b in range(BACKENDS) for i in ids], written=when)
        return (path, [ran, document(timings, written=when)]), {}

    made: list[str] = []
    benchmark.pedantic(_import, setup=night, rounds=NIGHTS)  # type: ignore[no-untyped-call]  # as above
    rows = NIGHTS * BACKENDS * len(ids)
    benchmark.extra_info.update(rows=rows, bytes_per_row=round(path.stat().st_size / rows, 1))
    with closing(History(path)) as h:
        assert len(runs(h)) == 2 * NIGHTS
        assert sum(r.rows for r in runs(h)) == rows + NIGHTS * UNITS * BACKENDS
        assert [len(s.points) for s in series(h)] == [NIGHTS] * (UNITS * BACKENDS)


def _import(path: Path, documents: list[dict[str, object]]) -> None:
    with closing(History(path, create=True)) as h:
        for d in documents:
            h.add(d, nightly=True)
