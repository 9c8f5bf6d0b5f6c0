"""The history: every run once, whole, whoever writes at the same time and whatever dies."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from history_load import load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import cause, document, gate, head, result, unit, written_to

from conformance.cli import main
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.perf.history import (
    History,
    Point,
    Series,
    causes,
    changes,
    runs,
    series,
)
from conformance.perf.statistics import median_interval

A, B = "ops/ADD-f32+f32-a=3@1", "ops/MUL-f32+f32-a=3@1"


COUNTERS = """SELECT metrics.metric, value FROM results JOIN metrics ON metrics.id = results.metric
              WHERE about = 'metric' ORDER BY 1"""
OLDER = Path(__file__).resolve().parents[1] / "frozen" / "history"
"""Histories of older versions, as SQL."""


def _store(path: Path, *documents: object, nightly: bool = True) -> Path:
    with closing(History(path, create=True)) as h:
        for d in documents:
            h.add(d, nightly=nightly)  # type: ignore[arg-type]  # JSON
    return path


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    """Every kind's rows: verdicts are counted, rates and their intervals."""
    seconds = [2.0, 1.0, 4.0, 1.6, 1.9, 2.1, 2.2]
    timed = document([unit("decode", "x", seconds), unit("load", "x", []), gate("g", "FAIL"), gate("h")])
    ran = document([result(A, "x", "PASS", metrics={"nmse": 0.5}), (B, "x", "FAIL"), (A, "y", "UNSUPPORTED")])
    with closing(History(_store(tmp_path / "h.sqlite", timed, ran))) as h:
        assert [r.verdicts for r in sorted(runs(h), key=lambda r: r.rows)] == [
            {"PASS": 1, "FAIL": 1, "UNSUPPORTED": 1}, {"PASS": 2, "FAIL": 2},
        ]  # fmt: skip
        (one,) = series(h)
        (point,) = one.points
        assert (one.case, one.backend, one.of, point.rounds) == ("perf/decode/llama-tiny@1", "x", "tokens", 7)
        assert (point.rate, point.low, point.high) == (32.0, 64 / 4.0, 64 / 1.0)
        assert point.packages == {"numpy": "2.1"}
        assert dict(h.query(COUNTERS))["nmse"] == 0.5
        assert dict(h.query(COUNTERS))["compiles"] == 2


def test_a_cause_is_known_since_its_first_run(tmp_path: Path) -> None:
    """Over the runs of a backend: first and last seen, in how many, in the newest words; gone when its case passes."""
    days = [f"2026-01-0{d}T00:00:00Z" for d in range(1, 5)]
    made = [document([(A, "x", "FAIL"), (B, "x", "FAIL"), (A, "y", "FAIL")], written=days[0]),
            document([(A, "x", "FAIL"), (B, "x", "FAIL")], written=days[1]),
            document([(A, "x", "FAIL"), (B, "x", "PASS")], written=days[2]),
            document([(A, "x", "FAIL"), (B, "x", "PASS"), (A, "y", "UNSUPPORTED")], written=days[3])]  # fmt: skip
    made[0]["causes"] = [cause("a", [A]), cause("b", [B]), cause("a", [A], "y")]
    made[1]["causes"] = [cause("a", [A], sentence="newer words"), cause("b", [B])]
    made[2]["causes"] = [cause("a", [A], sentence="newest words")]
    for d in made:
        for c in d.get("causes", ()):
            c["smallest"] = c["cases"][0]
    with closing(History(_store(tmp_path / "h.sqlite", *made))) as h:
        told = [(k.cause, k.backend, k.sentence, k.first, k.last, k.runs, k.passed) for k in causes(h)]
    words = [cause(n, [A])["sentence"] for n in ("a", "b")]
    assert told == [
        ("a", "x", "newest words", days[0], days[2], 3, 0),
        ("a", "y", words[0], days[0], days[0], 1, 0),
        ("b", "x", words[1], days[0], days[1], 2, 2),
    ]
    last = written_to(tmp_path / "last.json", made[3])
    said = CliRunner().invoke(main, ["report", str(last), "--store", str(tmp_path / "h.sqlite")])
    assert said.exit_code == 0, said.output
    assert "3 causes, 2 still open" in said.output
    assert "last good run on x: none" in said.output


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 4), max_size=12), st.randoms(use_true_random=False))
def test_import_is_idempotent_and_in_any_order(tmp_path: Path, order: list[int], chance: random.Random) -> None:
    """However often and in whatever order run files come, the store tells the same."""
    made = [document([(A, "x", "PASS"), (B, "x", "FAIL")], run="1" * 32),
            document([unit("u", "x", [1.0])], run="2" * 32),
            document([(A, "x", "FAIL")], run="4" * 32, machine="m2"),
            document([(A, "x", "FAIL")], run="1" * 32, written="2026-02-01T00:00:00Z"),
            document([], run="5" * 32)]  # fmt: skip
    name = chance.getrandbits(60)
    whole = _store(tmp_path / f"{name}a.sqlite", *made)
    again = _store(tmp_path / f"{name}b.sqlite", *(made[i] for i in order), *chance.sample(made, len(made)))
    with closing(History(whole)) as a, closing(History(again)) as b:
        told = """SELECT runs.run, text, verdict, detail FROM results JOIN runs ON runs.id = results.run
                  JOIN names ON names.id = case_id ORDER BY 1, 2"""
        assert runs(a) == runs(b)
        assert series(a) == series(b)
        assert a.query(told) == b.query(told)
        assert ("1" * 32, A, "FAIL", "it is FAIL") in a.query(told)  # what was written later of the same run


def test_added_says_what_is_new(tmp_path: Path) -> None:
    """The counts that `import` prints are the rows that were and were not there."""
    with closing(History(tmp_path / "h.sqlite", create=True)) as h:
        small = document([(A, "x", "PASS")], run="1" * 32)
        grown = document([(A, "x", "PASS"), (B, "x", "PASS")], run="1" * 32)
        assert [(a.new, a.known) for a in map(h.add, (small, small, grown))] == [(1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("back", [False, True])
def test_a_clock_set_back_hides_no_failure(tmp_path: Path, order: int, back: bool) -> None:
    """A run goes on after the clock was set back, and a case fails now: the history has the failure."""
    when = ["2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z" if back else "2026-01-02T00:00:00Z"]
    made = [document([(A, "x", v)], run="1" * 32, written=w) for v, w in zip(["PASS", "FAIL"], when, strict=True)]
    with closing(History(_store(tmp_path / "h.sqlite", *made[::order]))) as h:
        assert h.query("SELECT verdict FROM results") == [("FAIL",)]


@pytest.mark.parametrize("order", [1, -1])
def test_twice_in_one_run_is_the_failure(tmp_path: Path, order: int) -> None:
    """A case that one run ran twice is one row: a pass does not hide a failure."""
    doc = document([(A, "x", "FAIL"), (A, "x", "PASS")][::order])
    with closing(History(_store(tmp_path / "h.sqlite", doc))) as h:
        assert [r.verdicts for r in runs(h)] == [{"FAIL": 1}]


def test_nightly_series_only(tmp_path: Path) -> None:
    """Runs that were not imported as nightly are no part of the series, unless asked for."""
    path = _store(tmp_path / "h.sqlite", document([unit("u", "x", [1.0])]), nightly=False)
    with closing(History(path)) as h:
        assert series(h) == []
        assert len(series(h, nightly=False)) == 1


def test_a_run_goes_in_whole_or_not(tmp_path: Path) -> None:
    """An error in the middle of a document leaves nothing of it."""
    bad = document([(A, "x", "PASS"), result(B, "x", "PASS", detail=None)])
    path = tmp_path / "h.sqlite"
    with closing(History(path, create=True)) as h:
        with pytest.raises(UsageError):
            h.add(bad)
        assert runs(h) == []
        assert h.add(document([(A, "x", "PASS")])).new == 1


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """What does not fit is not stored at all; what was there stays, and the store goes on when there is room."""
    path = _store(tmp_path / "h.sqlite", document([(A, "x", "PASS")], run="1" * 32))
    large = document([(f"ops/ADD-f32+f32-a={i}@1", "x", "PASS") for i in range(2000)], run="2" * 32)
    with closing(History(path, create=True)) as h:
        h.query(f"PRAGMA max_page_count = {path.stat().st_size // 4096 + 3}")
        with pytest.raises(UsageError, match="the disk is full; this run was not stored"):
            h.add(large)
        assert [(r.run, r.rows) for r in runs(h)] == [("1" * 32, 1)]
        h.query("PRAGMA max_page_count = 100000")
        assert h.add(large).new == 2000


@pytest.mark.parametrize("seconds", [2.0])
def test_two_writers_and_a_reader(tmp_path: Path, seconds: float) -> None:
    """At the same time: no error, and every row that a writer committed is there."""
    told = load(tmp_path / "h.sqlite", seconds)
    assert told.lost == 0
    assert told.written > 0
    assert told.reads > 0


def test_many_make_it_at_once(tmp_path: Path) -> None:
    """Processes that all find no store make one store, and each one's runs are in it."""
    told = load(tmp_path / "h.sqlite", 0.5, writers=6)
    assert told.lost == 0


def test_kill_loses_nothing_committed(tmp_path: Path) -> None:
    """A writer killed (SIGKILL) as it writes: each run that it said is in is there whole, and no half one."""
    path = tmp_path / "h.sqlite"
    for round_ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-m", "history_load", str(path), str(round_), "60"],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert writer.stdout is not None
        said = [writer.stdout.readline().split() for _ in range(3 + round_)]
        writer.send_signal(signal.SIGKILL)
        said += [words for line in writer.stdout if len(words := line.split()) == 2]
        writer.wait()
        writer.stdout.close()
        with closing(History(path, create=True)) as h:
            assert h.query("PRAGMA integrity_check") == [("ok",)]
            there = {r.run: r.rows for r in runs(h)}
        for run, rows in said:
            assert there[run] == int(rows)
        assert set(there.values()) == {int(said[0][1])}  # whole runs only


def test_closed_is_one_file(tmp_path: Path) -> None:
    """Nothing lies beside a history that nobody has open, so that it can be copied."""
    _store(tmp_path / "h.sqlite", document([(A, "x", "PASS")]))
    assert [p.name for p in tmp_path.iterdir()] == ["h.sqlite"]


def _older(version: int, path: Path) -> Path:
    with closing(sqlite3.connect(path)) as db:
        db.executescript((OLDER / f"version{version}.sql").read_text(encoding="utf-8"))
        assert db.execute("PRAGMA user_version").fetchone() == (version,)
    return path


def test_an_older_version_is_brought_up(tmp_path: Path) -> None:
    """A store of version 3 tells the same as it did: runs, rates, counters, gates and causes, once and again."""
    path = _older(3, tmp_path / "h.sqlite")
    verdicts = [{"PASS": 1, "FAIL": 1, "UNSUPPORTED": 1}, {"PASS": 2, "FAIL": 2},
                {"PASS": 1, "FAIL": 1}, {"PASS": 1}]  # fmt: skip
    for _ in range(2):
        with closing(History(path)) as h:
            assert [r.verdicts for r in runs(h)] == verdicts
            ((one,),) = ([s] for s in series(h))
            assert (one.case, one.of) == ("perf/decode/llama-tiny@1", "tokens")
            (point,) = one.points
            assert (point.rate, point.low, point.high, point.rounds) == (32.0, 64 / 4.0, 64 / 1.0, 7)
            (known,) = causes(h)
            assert (known.cause, known.op, known.cases, known.smallest, known.passed) == ("a", "MUL_MAT", 1, A, 1)
            assert known.sentence == "MUL_MAT with src[0].type = a is wrong"
            found = dict(h.query(COUNTERS))
            assert (found["compiles"], found["kernels.RMS"]) == (2, 3)
            assert h.query("SELECT count(*) FROM sqlite_master WHERE type = 'table'") == [(4,)]
    with closing(sqlite3.connect(tmp_path / "h.sqlite.version3")) as kept:
        assert kept.execute("SELECT count(*), max(seconds) FROM results").fetchone() == (6, 0.0)


def test_a_store_without_causes_takes_them(tmp_path: Path) -> None:
    """A store of version 1, from before there were causes, keeps its rows, and these go in beside them."""
    with closing(History(_older(1, tmp_path / "h.sqlite"))) as h:
        assert next(iter(runs(h))).verdicts == {"PASS": 1, "FAIL": 1, "UNSUPPORTED": 1}
        assert h.add({**document([(A, "x", "FAIL")]), "causes": [cause("a", [A])]}).new == 2
        assert [k.cause for k in causes(h)] == ["a"]


def test_newer_version_is_refused(tmp_path: Path) -> None:
    """A store of a version to come is not touched."""
    path = _store(tmp_path / "h.sqlite", document([(A, "x", "PASS")]))
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    for create in (False, True):
        with pytest.raises(UsageError, match="version 99 found: a newer ggml-conformance made it"):
            History(path, create=create)
    assert path.read_bytes() == before


def test_other_files_are_refused(tmp_path: Path) -> None:
    """No history is made of another program's SQLite file, of text, or where nothing is to be made."""
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE t (x)")
    text = tmp_path / "text.sqlite"
    text.write_text("not a database at all, but long enough to be read as one\n" * 40, encoding="utf-8")
    for path, says in ((other, "something else found"), (text, "is damaged")):
        before = path.read_bytes()
        with pytest.raises(UsageError, match=says):
            History(path, create=True)
        assert path.read_bytes() == before
    with pytest.raises(UsageError, match="no such file"):
        History(tmp_path / "none.sqlite")
    with pytest.raises(UsageError, match="folder must exist"):
        History(tmp_path / "no" / "h.sqlite", create=True)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_store_is_one_error(tmp_path: Path, seed: int) -> None:
    """A damaged file is one error with advice and stays as it was, or all rows are there."""
    rows = [(f"ops/ADD-f32+f32-a={i}@1", "x", "PASS") for i in range(800)]
    path = _store(tmp_path / "h.sqlite", document(rows, run="1" * 32))
    raw, chance = bytearray(path.read_bytes()), random.Random(seed)  # noqa: S311  # damage, no secret
    if seed % 3 == 0:
        del raw[chance.randrange(1000, len(raw)) :]
    else:
        at = chance.randrange(0, len(raw) - 400) if seed % 3 == 1 else chance.randrange(0, len(raw) // 4096) * 4096
        raw[at : at + 400] = chance.randbytes(400)
    path.write_bytes(raw)
    try:
        with closing(History(path, create=True)) as h:
            h.add(document([(A, "x", "PASS")], run="2" * 32))
            told = {r.run: r.rows for r in runs(h)}
    except UsageError as e:
        assert "h.sqlite" in str(e)  # noqa: PT017  # either way is right
        assert path.read_bytes() == raw
    else:
        assert told == {"1" * 32: 800, "2" * 32: 1}


def test_interval_of_a_median() -> None:
    """The exact binomial interval: of 6 values the extremes, of 20 the 6th from either end; none under 6."""
    assert median_interval([5, 1, 2, 3, 4]) == (None, None)
    assert median_interval([5, 1, 2, 3, 4, 6]) == (1, 6)
    assert median_interval(list(range(1, 21))) == (6, 15)


def _nights(rates: list[float]) -> Series:
    points = [Point(f"{i:032x}", f"2026-01-{i + 1:02}T00:00:00Z", r, None, None, 9, {}) for i, r in enumerate(rates)]
    return Series("perf/decode/llama@1", "x", "m1", "tokens", tuple(points))


def test_change_points() -> None:
    """Otava finds a step of 10 % in noise of 1 % where it is, nothing in noise, and is not asked of few points."""
    pytest.importorskip("otava", reason="the extra 'history' is not installed: docs/reports.md")
    chance = random.Random(7)  # noqa: S311  # noise, no secret
    noise = [100 + chance.gauss(0, 1) for _ in range(28)]
    assert changes([_nights(noise), _nights([100.0, 50.0, 20.0])]) == []
    stepped = [x * (0.9 if i >= 15 else 1) for i, x in enumerate(noise)]
    (change,) = changes([_nights(stepped)])
    assert (change.since.written, change.at.written) == ("2026-01-15T00:00:00Z", "2026-01-16T00:00:00Z")
    assert 0.88 < change.ratio < 0.92
    assert changes([_nights(stepped)], least=0.2) == []


def test_change_points_without_otava(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence says what to install."""
    monkeypatch.setitem(sys.modules, "otava", None)
    monkeypatch.setitem(sys.modules, "otava.analysis", None)
    with pytest.raises(UnavailableError, match=r"pip install 'ggml-conformance\[history\]'"):
        changes([_nights([1.0] * 20)])


def test_command_line(tmp_path: Path) -> None:
    """A second import adds nothing, a bad file stores nothing; --json has runs, causes and the last good run."""
    store, folder = tmp_path / "h.sqlite", tmp_path / "runs"
    folder.mkdir()
    good = document([(A, "x", "PASS"), (A, "y", "UNSUPPORTED")], written="2026-01-01T00:00:00Z")
    written_to(folder / "good.json", good)
    written_to(folder / "a.json", document([(A, "x", "PASS"), (B, "x", "FAIL")], written="2026-01-02T00:00:00Z"))
    written_to(folder / "p.json", document([unit("u", "z", [1.0, 2.0, 3.0])]))
    written_to(folder / "old.json", head("planted"))

    def conform(*args: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["report", *args])
        return done.exit_code, done.output

    bad = written_to(tmp_path / "bad.json", {"schema": 1})
    assert conform(str(folder), str(bad), "--store", str(store))[0] == 2
    assert not store.exists()
    code, said = conform(str(folder), "--store", str(store), "--nightly", "--json", str(tmp_path / "told.json"))
    assert code == 0
    assert "2 new rows\n" in said
    assert "last good run on x: 2026-01-01T00:00:00Z" in said
    assert "0 change points in 0 nightly series; 1 others have fewer than 7 runs" in said
    assert "0 new rows, 2 were there" in conform(str(folder), "--store", str(store))[1]
    told = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    assert len(told["runs"]) == 3
    assert told["last_good"] == {"x": good["written"], "y": None, "z": "2026-01-02T03:04:05Z"}
    code, said = conform(str(folder), "--store", str(store), "-o", str(tmp_path / "page"))
    assert code == 1, said
    assert conform(str(folder))[0] == 2
