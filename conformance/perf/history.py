"""The history: many run files, from many machines, in one SQLite file; and its queries.

A run is stored once under its own name, however often it is imported, and atomically. Writers wait for each
other, readers never wait.
"""

from __future__ import annotations

import importlib
import json
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

from conformance.case.case import JSON
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.verdict import FAILURES

APPLICATION = 0x67676D6C
"""SQLite's `application_id`, which identifies the file: "ggml"."""

VERSION = 5
"""Version of the tables, SQLite's `user_version`."""

_NAME = "INTEGER NOT NULL REFERENCES names (id)"

NAMES = (
    "CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE)",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, written TEXT NOT NULL,
        nightly INTEGER NOT NULL, machine TEXT NOT NULL, system TEXT NOT NULL, cpu TEXT NOT NULL, cores INTEGER,
        python TEXT, packages TEXT NOT NULL)""",
)
"""Tables of unique names (of cases and backends) and of runs. Unchanged since version 1."""

RESULTS = (
    """CREATE TABLE metrics (
        id INTEGER PRIMARY KEY, about TEXT NOT NULL, metric TEXT NOT NULL, subject TEXT NOT NULL, unit TEXT NOT NULL,
        UNIQUE (about, metric, subject, unit))""",
    f"""CREATE TABLE results (
        run INTEGER NOT NULL REFERENCES runs (id), backend {_NAME}, case_id {_NAME},
        metric INTEGER NOT NULL REFERENCES metrics (id), verdict TEXT, value REAL, low REAL, high REAL, rounds INTEGER,
        detail TEXT NOT NULL, PRIMARY KEY (run, backend, case_id, metric)) WITHOUT ROWID""",
)
"""Metrics, and a row for each value (docs/reports.md)."""


def _moved(table: str, about: str, metric: str, cells: str) -> tuple[str, str]:
    """Return SQL statements that move a table of version 3 into `metrics` and `results`.

    Args:
        table: its name in version 3.
        about: of its metrics.
        metric: its metric, subject and unit; `{name}` stands for the text of that name.
        cells: the case and the cells of a row.
    """
    words = re.sub(r"\{(\w+)\}", rf"(SELECT text FROM names WHERE id = {table}.\1)", metric)  # noqa: S608
    return (
        f"INSERT INTO metrics (about, metric, subject, unit) SELECT DISTINCT '{about}', {words} FROM {table}",  # noqa: S608
        f"""INSERT INTO results SELECT run, backend, {cells} FROM {table} JOIN metrics AS m
            ON (m.about, m.metric, m.subject, m.unit) = ('{about}', {words})""",  # noqa: S608
    )


TABLES = (
    f"""CREATE TABLE IF NOT EXISTS causes (run INTEGER, backend {_NAME}, cause {_NAME}, verdict TEXT, op {_NAME},
        sentence TEXT, cases INTEGER, smallest {_NAME})""",
    "ALTER TABLE results RENAME TO cases",
    *RESULTS,
    *_moved("cases", "case", "'budget_used', '', ''",
            "case_id, m.id, verdict, budget_used, NULL, NULL, NULL, detail"),
    *_moved("timings", "unit", "{unit}, {model}, work_of",
            "case_id, m.id, verdict, rate, low, high, rounds, reason"),
    *_moved("counters", "counter", "{unit} || ': ' || {counter}, {model}, ''",
            "case_id, m.id, NULL, value, NULL, NULL, NULL, ''"),
    *_moved("gates", "gate", "{gate}, {against}, ''",
            "gates.unit, m.id, answer, estimate, low, high, rounds, coalesce(reason, '')"),
    *_moved("causes", "cause", "{cause}, {op}, 'cases'",
            "smallest, m.id, verdict, cases, NULL, NULL, NULL, sentence"),
    *(f"DROP TABLE IF EXISTS {table}"
      for table in ("cases", "timings", "counters", "gates", "causes", "hunts", "mutants")),
)  # fmt: skip
"""Statements that migrate versions 1 to 3, with a table for each kind of row, to 4."""

_UNIT, _GATE = "'perf/' || m.metric || '/' || m.subject || '@1'", "'gate/' || m.metric"
_COUNTED = "'perf/' || substr(m.metric, 1, instr(m.metric, ': ') - 1) || '/' || m.subject || '@1'"
_COUNTER = "substr(m.metric, instr(m.metric, ': ') + 2)"


def _as_results(about: str, case: str, metric: str, cells: str) -> tuple[str, ...]:
    """Return SQL that turns rows of version 4 into rows of cases, or of their metrics."""
    old = f"FROM metrics AS m WHERE about = '{about}'"
    made = "'case', 'budget_used'" if metric == "" else f"'metric', {metric}"
    return (
        f"INSERT OR IGNORE INTO names (text) SELECT {case} {old}",
        f"INSERT OR IGNORE INTO metrics (about, metric, subject, unit) SELECT {made}, '', '' {old}",
        f"""INSERT OR IGNORE INTO results SELECT run, backend, n.id, k.id, {cells} FROM results AS r
            JOIN metrics AS m ON m.id = r.metric AND m.about = '{about}' JOIN names AS n ON n.text = {case}
            JOIN metrics AS k ON (k.about, k.metric, k.subject, k.unit) = ({made}, '', '')""",  # noqa: S608
    )


_VERDICT = "CASE verdict WHEN 'fine' THEN 'PASS' WHEN 'regressed' THEN 'FAIL' ELSE 'UNSUPPORTED' END"
_OLD = "SELECT id FROM metrics WHERE about IN ('unit', 'counter', 'gate')"
KINDS = (
    *_as_results("unit", _UNIT, "", "verdict, NULL, NULL, NULL, NULL, detail"),
    *_as_results("unit", _UNIT, "m.unit || '_per_second'", "NULL, value, low, high, rounds, ''"),
    *_as_results("counter", _COUNTED, _COUNTER, "NULL, value, NULL, NULL, NULL, ''"),
    *_as_results("gate", _GATE, "", f"{_VERDICT}, NULL, NULL, NULL, NULL, detail"),
    f"DELETE FROM results WHERE metric IN ({_OLD})",  # noqa: S608  # our own words
    "DELETE FROM metrics WHERE about IN ('unit', 'counter', 'gate')",
)
"""Statements that migrate version 4, which had separate units, counters and gates."""

Document = Mapping[str, JSON]
PATIENCE = 60.0
"""Seconds that a writer waits for the lock."""


class Cells(NamedTuple):
    """A row of `results`, with its metric."""

    backend: str
    case: str
    about: str
    """`case`, `metric` (of a case), or `cause`."""
    metric: str
    subject: str
    """The op of a cause; else empty."""
    unit: str
    """`cases` of a cause; else empty."""
    verdict: str | None
    """Verdict of a case or cause; None for a metric or a counter."""
    value: float | None
    low: float | None = None
    high: float | None = None
    rounds: int | None = None
    detail: str = ""


def rows(document: Document) -> Iterator[Cells]:
    """Yield the rows stored for a record."""
    # a case that ran twice in a run (also from a file) is one row: the failure
    results = sorted(document["results"], key=lambda r: r["verdict"] in FAILURES)
    for r in {(r["case"], r["backend"]): r for r in results}.values():
        used = r.get("budget_used")
        yield Cells(
            r["backend"], r["case"], "case", "budget_used", "", "", r["verdict"], used, detail=r.get("detail", "")
        )
        metrics = r.get("metrics") or {}
        for name, value in metrics.items():
            low, high = (_at(metrics, name, f"seconds.{end}") for end in ("high", "low"))
            yield Cells(r["backend"], r["case"], "metric", name, "", "", None, value, low, high, metrics.get("rounds"))
    for c in document.get("causes", ()):
        yield Cells(c["backend"], c["smallest"], "cause", c["id"], c["op"], "cases", c["verdict"], len(c["cases"]),
                    detail=c["sentence"])  # fmt: skip


def _at(metrics: Mapping[str, float], name: str, end: str) -> float | None:
    """Return a rate at one end of the interval of its seconds."""
    if not name.endswith("_per_second") or not metrics.get(end):
        return None
    return metrics[name] * metrics["seconds"] / metrics[end]


class Added(NamedTuple):
    """The outcome of importing one document."""

    new: int
    """Rows added."""
    known: int
    """Rows that were stored already."""


@final
class History:
    """An open store; errors of its file are a `UsageError` with advice and lose no rows."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open the store at `path`; migrate an older one; with `create` make a missing one.

        A copy of a migrated store stays beside it.

        Raises:
            UsageError: there is no file, or it is damaged, not a history, or of a newer version.
        """
        self.path = path
        if not create and not path.is_file():
            raise UsageError(f"{path}: a history (made by `conform report RUN --store DB`) expected, no such file")
        with self._errors():
            mode = "rwc" if create else "rw"
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=PATIENCE, isolation_level=None
            )
        try:
            with self._errors():
                self._begin_use(create=create)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file; the last process to close it merges SQLite's extra files into it."""
        self._db.close()

    def add(self, document: Mapping[str, JSON], *, nightly: bool = False) -> Added:
        """Store one run file's content atomically.

        A stored row stays, unless this document of the same run was written later. But a failing result always replaces
        any other, and only a failing one replaces it: a clock that was set back hides no failure.

        Args:
            document: checked already (`report.runfile.read_document`).
            nightly: True if its timings belong to the series that are searched for change points.

        Raises:
            UsageError: the store is damaged or the disk is full; nothing of the document was stored.
        """
        with self._errors(), self._transaction():
            key, later = self._run(document, nightly)
            content, before = list(rows(document)), self._count(key)
            self._insert(key, content, replace=later)
            new = self._count(key) - before
            return Added(new, len(content) - new)

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a SELECT, on one state within a `snapshot`; UsageError if the store is damaged."""
        with self._errors():
            return self._db.execute(sql, parameters).fetchall()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads of the block see one state of the store, despite concurrent writers."""
        with self._errors(), self._transaction("DEFERRED"):
            yield

    def _begin_use(self, *, create: bool) -> None:
        db = self._db
        with self._transaction("DEFERRED"):  # another process may be making it: read these at one moment
            version, ours = self._pragma("user_version"), self._pragma("application_id") == APPLICATION
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and not ours:
            raise UsageError(f"{self.path}: a history expected, a SQLite file of something else found; nothing changed")
        if version > VERSION:
            raise UsageError(
                f"{self.path}: a history of version {VERSION} or older expected, version {version} found: "
                "a newer ggml-conformance made it; update this one. Nothing was changed"
            )
        if create and version and (damage := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise UsageError(f"{self.path}: {_advice('')} ({damage})")  # rows added to it would be lost too
        self._log_ahead()
        db.execute("PRAGMA synchronous = FULL")  # a commit survives a loss of power
        db.execute("PRAGMA foreign_keys = ON")
        if version < VERSION:
            kept = self.path.with_name(f"{self.path.name}.version{version}")
            if version and not kept.exists():
                db.execute("VACUUM INTO ?", (str(kept),))
            with self._transaction():  # another process may have migrated it meanwhile: read the version again
                version = self._pragma("user_version")
                steps = (TABLES if version < 4 else ()) + KINDS if 0 < version < VERSION else ()
                for statement in steps if version else (*NAMES, *RESULTS):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {VERSION}")

    def _log_ahead(self) -> None:
        """Turn on write-ahead logging, so that readers and a writer do not wait for each other.

        Retries while the file is locked. Without shared memory SQLite keeps its rollback journal.
        """
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as e:
                if "locked" not in str(e) or time.monotonic() > end:
                    raise
                time.sleep(0.01)
            else:
                return

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            raise UsageError(f"{self.path}: {_advice(str(e))} (SQLite: {e})") from e
        except OverflowError as e:
            raise UsageError(f"{self.path}: 64-bit integers expected, a larger one found; nothing was stored") from e

    def _run(self, document: Mapping[str, JSON], nightly: bool) -> tuple[int, bool]:
        """Insert or update the run's row; return its id, and True if the document is newer."""
        env, kind = document["environment"], document.get("kind", "conformance")
        packages = json.dumps(env.get("packages") or {}, sort_keys=True)
        facts = [env["machine"], env.get("system") or "", env.get("cpu") or "", env.get("cores"), env.get("python")]
        before = self._db.execute("SELECT id, written FROM runs WHERE run = ?", (document["run"],)).fetchone()
        if before is None:
            cursor = self._db.execute(
                """INSERT INTO runs (run, kind, written, nightly, machine, system, cpu, cores, python, packages)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                (document["run"], kind, document["written"], int(nightly), *facts, packages),
            )
            return int(cursor.lastrowid or 0), False
        key, written = before
        self._db.execute(
            "UPDATE runs SET written = max(written, ?), nightly = max(nightly, ?) WHERE id = ?",
            (document["written"], int(nightly), key),
        )
        return key, document["written"] > written

    def _insert(self, key: int, content: Sequence[Cells], *, replace: bool) -> None:
        names = sorted({text for row in content for text in (row.backend, row.case)})
        self._db.executemany("INSERT INTO names (text) VALUES (?) ON CONFLICT DO NOTHING", [(t,) for t in names])
        metrics = sorted({row[2:6] for row in content})
        self._db.executemany(
            "INSERT INTO metrics (about, metric, subject, unit) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", metrics
        )
        self._db.executemany(_INSERT, ((key, *row, replace, replace) for row in content))

    def _count(self, key: int) -> int:
        return int(self._db.execute("SELECT count(*) FROM results WHERE run = ?", (key,)).fetchone()[0])


_FAILING = f"IN ({', '.join(repr(str(v)) for v in sorted(FAILURES))})"
_ID = "(SELECT id FROM names WHERE text = ?)"
_CELLS = ("verdict", "value", "low", "high", "rounds", "detail")
_INSERT = f"""
    INSERT INTO results VALUES (?, {_ID}, {_ID},
        (SELECT id FROM metrics WHERE (about, metric, subject, unit) = (?, ?, ?, ?)), ?, ?, ?, ?, ?, ?)
    ON CONFLICT (run, backend, case_id, metric) DO UPDATE SET {", ".join(f"{c} = excluded.{c}" for c in _CELLS)}
    WHERE CASE (SELECT about FROM metrics WHERE id = excluded.metric)
        WHEN 'case' THEN CASE WHEN ? THEN excluded.verdict {_FAILING} OR results.verdict NOT {_FAILING}
            ELSE excluded.verdict {_FAILING} AND results.verdict NOT {_FAILING} END
        ELSE ? END"""  # noqa: S608  # our own words
"""Insert a row; a failure replaces other results, but only a failure replaces it."""

ADVICE: dict[str, str] = {
    "locked": f"another program has locked the history for more than {PATIENCE:.0f} s; try again when it is done",
    "full": "the disk is full; this run was not stored, and earlier runs are unchanged",
    "readonly": "the history cannot be written to; nothing was changed",
    "unable to open": "the history cannot be opened or created; its folder must exist and be writable",
    "": "the history is damaged and nothing was changed. Keep the file: SQLite's `.recover` reads what is left of it, "
    "or import the run files into a new one",
}
"""Word in SQLite's message -> advice to the user; the last entry matches every message."""


def _advice(error: str) -> str:
    return next(advice for word, advice in ADVICE.items() if word in error)


FEWEST = 7
"""Minimum number of points of a series: Otava's test needs 3 on each side."""
WINDOW = 50
"""Number of points in Otava's window; its default."""
MAX_P = 0.001
"""Otava's default threshold of p."""


@dataclass(frozen=True, slots=True)
class Run:
    """One stored run."""

    run: str
    kind: str
    written: str
    machine: str
    system: str
    cpu: str
    nightly: bool
    rows: int
    verdicts: Mapping[str, int]
    """Verdict -> number of rows."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run's rate of a series."""

    run: str
    written: str
    rate: float
    """Units of work per second, median over the rounds."""
    low: float | None
    """95 % interval of that median (`statistics.median_interval`); None under 6 rounds."""
    high: float | None
    rounds: int
    packages: Mapping[str, str | None]
    """Package -> version."""


@dataclass(frozen=True, slots=True)
class Series:
    """One case on one backend and kind of machine, oldest first."""

    case: str
    backend: str
    machine: str
    of: str
    """Unit of work: tokens, cases, bytes or steps."""
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A cause on a backend, as described by the newest run that has it."""

    cause: str
    backend: str
    verdict: str
    op: str
    sentence: str
    cases: int
    smallest: str
    first: str
    """Time of the first run that has it."""
    last: str
    runs: int
    """Number of runs that have it."""
    passed: int
    """Number of later runs in which its smallest case passed."""


def runs(history: History) -> list[Run]:
    """Return every run, oldest first."""
    counts: dict[int, dict[str, int]] = {}
    with history.snapshot():
        for key, verdict, n in history.query(_COUNT):
            counts.setdefault(key, {})[verdict] = n
        every = history.query(_RUNS)
    return [
        Run(run, kind, written, machine, system, cpu, bool(nightly), sum(n.values()), n)
        for key, run, kind, written, machine, system, cpu, nightly in every
        for n in [counts.get(key, {})]
    ]


def series(history: History, *, nightly: bool = True) -> list[Series]:
    """Return rates by unit, backend and kind of machine, of nightly runs or of all."""
    points: dict[tuple[str, str, str, str], list[Point]] = {}
    rates = history.query(_RATES, (int(nightly),))
    for case, backend, machine, metric, run, written, rate, low, high, rounds, packages in rates:
        point = Point(run, written, rate, low, high, rounds or 0, json.loads(packages))
        points.setdefault((case, backend, machine, metric.removesuffix("_per_second")), []).append(point)
    return [Series(*key, tuple(own)) for key, own in points.items()]


def causes(history: History) -> list[Known]:
    """Return every cause on every backend; those whose smallest case has passed since come last."""
    return [Known(*row) for row in history.query(_CAUSES)]


def last_good(history: History) -> dict[str, str | None]:
    """Return backend -> time of its newest run with passes and no failures, or None."""
    return dict(history.query(_GOOD))


@dataclass(frozen=True, slots=True)
class Change:
    """A rate changed from one run to the next."""

    series: Series
    at: Point
    """The first run with the new rate."""
    since: Point
    """The last run with the old rate."""
    before: float
    """Mean rate since the previous change."""
    after: float
    """Mean rate until the next change."""
    p: float
    """p of the t-test: the probability of such a step if nothing changed."""

    @property
    def ratio(self) -> float:
        """New rate / old rate; below 1 it became slower."""
        return self.after / self.before


def changes(every: Iterable[Series], least: float = 0.0) -> list[Change]:
    """Return the change points of each series of at least 7 points (E-divisive, Apache Otava).

    They are sorted by time within a series; relative changes up to `least` are omitted (0.02 is 2 %).

    Raises:
        UnavailableError: there is such a series, and Apache Otava, an extra that pins NumPy, is not installed.
    """
    all_changes: list[Change] = []
    for one in every:
        if len(one.points) < FEWEST:
            continue
        points, _ = _otava().compute_change_points([p.rate for p in one.points], WINDOW, MAX_P, least)
        for c in points:
            s, at = c.stats, c.index
            means = float(s.mean_1), float(s.mean_2)
            all_changes.append(Change(one, one.points[at], one.points[at - 1], *means, float(s.pvalue)))
    return all_changes


def _otava() -> ModuleType:
    try:
        return importlib.import_module("otava.analysis")
    except ImportError as e:
        raise UnavailableError(
            f"change points need Apache Otava, which is not installed ({e}): pip install 'ggml-conformance[history]', "
            "preferably in a separate environment, since it pins NumPy; the history can be read from there"
        ) from None


_RUNS = "SELECT id, run, kind, written, machine, system, cpu, nightly FROM runs ORDER BY written, run"
_COUNT = """
    SELECT run, verdict, count(*) FROM results JOIN metrics ON metrics.id = results.metric
    WHERE about = 'case' GROUP BY 1, 2"""
_RATES = """
    SELECT case_id.text, backend.text, machine, metrics.metric, runs.run, written, value, low, high, rounds, packages
    FROM metrics JOIN results ON results.metric = metrics.id JOIN runs ON runs.id = results.run
    JOIN names AS backend ON backend.id = backend JOIN names AS case_id ON case_id.id = case_id
    WHERE about = 'metric' AND metrics.metric GLOB '*_per_second' AND value IS NOT NULL AND nightly >= ?
    ORDER BY 1, 2, 3, 4, written, runs.run"""
_GOOD = f"""
    SELECT text, max(CASE WHEN passed AND NOT failed THEN written END) FROM (
        SELECT run, backend, sum(verdict = 'PASS') AS passed, sum(verdict {_FAILING}) AS failed FROM results
        JOIN metrics ON metrics.id = results.metric WHERE about = 'case' GROUP BY 1, 2) AS every
    JOIN runs ON runs.id = every.run JOIN names ON names.id = every.backend GROUP BY 1 ORDER BY 1"""  # noqa: S608
_CAUSES = """
    WITH every AS (
        SELECT metrics.metric AS cause, subject AS op, results.*, written,
            row_number() OVER (PARTITION BY backend, metrics.metric ORDER BY written DESC, results.run DESC) AS age,
            min(written) OVER (PARTITION BY backend, metrics.metric) AS first,
            count(*) OVER (PARTITION BY backend, metrics.metric) AS n
        FROM metrics JOIN results ON results.metric = metrics.id JOIN runs ON runs.id = results.run
        WHERE about = 'cause')
    SELECT cause, backend.text, verdict, op, detail, CAST(value AS INTEGER), smallest.text, first, written, n,
        (SELECT count(*) FROM results AS r JOIN metrics ON metrics.id = r.metric JOIN runs ON runs.id = r.run
         WHERE about = 'case' AND r.backend = every.backend AND r.case_id = every.case_id AND r.verdict = 'PASS'
         AND runs.written > every.written) AS passed
    FROM every JOIN names AS backend ON backend.id = backend JOIN names AS smallest ON smallest.id = case_id
    WHERE age = 1 ORDER BY passed > 0, written DESC, 2, 1"""
