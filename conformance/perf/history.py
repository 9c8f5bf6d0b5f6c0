"""The history: the content of many run files, of many machines, in one SQLite file; and its queries.

A run is stored once under its own name, however often it is imported, and whole or not at all. Writers wait for each
other, readers for nobody.
"""

from __future__ import annotations

import importlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

from conformance.case.case import JSON
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.verdict import FAILURES
from conformance.perf.statistics import median_interval

APPLICATION = 0x67676D6C
"""SQLite's `application_id`, which identifies the file: "ggml"."""

_KEY = "run INTEGER NOT NULL REFERENCES runs (id)"
_NAME = "INTEGER NOT NULL REFERENCES names (id)"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE)""",
        """CREATE TABLE runs (
            id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, written TEXT NOT NULL,
            nightly INTEGER NOT NULL, machine TEXT NOT NULL, system TEXT NOT NULL, cpu TEXT NOT NULL, cores INTEGER,
            python TEXT, packages TEXT NOT NULL)""",
        f"""CREATE TABLE results (
            {_KEY}, backend {_NAME}, case_id {_NAME}, verdict TEXT NOT NULL, budget_used REAL, nmse REAL,
            nmse_exact REAL, seconds REAL NOT NULL, steps INTEGER NOT NULL, fresh INTEGER NOT NULL, waived TEXT,
            detail TEXT NOT NULL, PRIMARY KEY (run, backend, case_id)) WITHOUT ROWID""",
        f"""CREATE TABLE timings (
            {_KEY}, unit {_NAME}, model {_NAME}, backend {_NAME}, case_id {_NAME}, verdict TEXT NOT NULL,
            work REAL NOT NULL, work_of TEXT NOT NULL, rounds INTEGER NOT NULL, seconds TEXT NOT NULL, rate REAL,
            low REAL, high REAL, weights INTEGER, peak INTEGER, reason TEXT NOT NULL,
            PRIMARY KEY (run, unit, model, backend, case_id)) WITHOUT ROWID""",
        f"""CREATE TABLE counters (
            {_KEY}, unit {_NAME}, model {_NAME}, backend {_NAME}, case_id {_NAME}, counter {_NAME}, value REAL NOT NULL,
            PRIMARY KEY (run, unit, model, backend, case_id, counter)) WITHOUT ROWID""",
        f"""CREATE TABLE gates (
            {_KEY}, gate {_NAME}, unit {_NAME}, backend {_NAME}, against {_NAME}, kind TEXT NOT NULL, bound REAL,
            answer TEXT NOT NULL, estimate REAL, low REAL, high REAL, rounds INTEGER, detectable REAL, seconds REAL,
            reason TEXT, PRIMARY KEY (run, gate, unit, backend, against)) WITHOUT ROWID""",
        f"""CREATE TABLE hunts (
            {_KEY}, fault {_NAME}, family {_NAME}, level TEXT NOT NULL, adapter {_NAME}, control INTEGER NOT NULL,
            noticed INTEGER NOT NULL, case_id {_NAME}, verdict TEXT NOT NULL, PRIMARY KEY (run, fault, family))
            WITHOUT ROWID""",
    ),
    (
        f"""CREATE TABLE mutants (
            {_KEY}, area {_NAME}, mutant {_NAME}, file {_NAME}, level TEXT NOT NULL, status TEXT NOT NULL,
            why TEXT NOT NULL, PRIMARY KEY (run, area, mutant)) WITHOUT ROWID""",
    ),
    (
        f"""CREATE TABLE causes (
            {_KEY}, backend {_NAME}, cause {_NAME}, verdict TEXT NOT NULL, op {_NAME}, sentence TEXT NOT NULL,
            cases INTEGER NOT NULL, smallest {_NAME}, seen TEXT NOT NULL, PRIMARY KEY (run, backend, cause))
            WITHOUT ROWID""",
    ),
)
"""Statements that make version 1 from nothing, 2 from 1, and so on. A released step is never changed.

Repeated texts (cases, backends, units) are stored once in `names`; a column with an id of one `REFERENCES
names`. `hunts` and `mutants` are of older versions, which stored
faults and mutants; nothing is written there any more.
"""

NAMED = frozenset({"case_id", "backend", "unit", "model", "counter", "gate", "against", "fault", "family", "adapter",
                   "area", "mutant", "file", "cause", "op", "smallest"})  # fmt: skip
"""Columns that hold ids of `names`."""

COUNTED: dict[str, str] = {
    "results": "verdict",
    "timings": "verdict",
    "gates": "answer",
}
"""Table -> the SQL expression by which its rows are counted."""

Cells = dict[str, JSON]
Document = Mapping[str, JSON]

_RESULT = ("backend", "verdict", "budget_used", "nmse", "nmse_exact", "seconds", "steps", "fresh", "waived", "detail")
_TIMING = ("unit", "model", "backend", "verdict", "work", "rounds", "rate", "reason")
_GATE = ("gate", "unit", "backend", "kind", "answer", "estimate", "low", "high", "rounds", "detectable", "seconds",
         "reason")  # fmt: skip
_CAUSE = ("backend", "verdict", "op", "sentence", "smallest", "seen")
PATIENCE = 60.0
"""Seconds that a writer waits for others."""


def _pick(row: Mapping[str, JSON], columns: Sequence[str]) -> Cells:
    return {c: row.get(c) for c in columns}


def _results(document: Document) -> Iterator[Cells]:
    # a case that ran twice in a run (also from a file) is one row: the failure
    unique = {(r["case"], r["backend"]): r for r in sorted(document["results"], key=lambda r: r["verdict"] in FAILURES)}
    for r in unique.values():
        yield {**_pick(r, _RESULT), "case_id": r["case"]}


def _timings(document: Document) -> Iterator[Cells]:
    for u in document["units"]:
        low, high = median_interval(u["seconds"])
        yield {
            **_pick(u, _TIMING),
            "case_id": u["case"],
            "work_of": u["of"],
            "seconds": json.dumps(u["seconds"]),
            "low": u["work"] / high if high else None,
            "high": u["work"] / low if low else None,
            "weights": u["memory"].get("weights"),
            "peak": u["memory"].get("peak"),
        }


def _counters(document: Document) -> Iterator[Cells]:
    for u in document["units"]:
        for name, value in _numbers(u["counters"], ""):
            yield {**_pick(u, ("unit", "model", "backend")), "case_id": u["case"], "counter": name, "value": value}


def _gates(document: Document) -> Iterator[Cells]:
    for g in document.get("gates", ()):
        yield {**_pick(g, _GATE), "against": g.get("against") or "", "bound": g.get("limit")}


def _causes(document: Document) -> Iterator[Cells]:
    for c in document.get("causes", ()):
        yield {**_pick(c, _CAUSE), "cause": c["id"], "cases": len(c["cases"])}


TABLES: dict[str, dict[str, Callable[[Document], Iterator[Cells]]]] = {
    "conformance": {"results": _results, "causes": _causes},
    "perf": {"timings": _timings, "counters": _counters, "gates": _gates},
}
"""Kind of document -> the tables it fills. Of other kinds (audit, phases, zoo) only the run itself is stored."""


def rows(document: Document) -> dict[str, list[Cells]]:
    """A document as rows: table -> mappings of columns, without `run`."""
    return {table: list(make(document)) for table, make in TABLES.get(document["kind"], {}).items()}


def _numbers(value: JSON, name: str) -> Iterator[tuple[str, float]]:
    """Every number of nested objects: `kernels.RMS`."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _numbers(v, f"{name}.{k}" if name else k)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)


class Added(NamedTuple):
    """The outcome of importing one document."""

    new: int
    """Rows that the store did not have."""
    known: int
    """Rows that it had."""


@final
class History:
    """An open store. Every error of its file is one `UsageError` that says what to do; none loses stored rows."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open the store at `path`, migrate an older one, and with `create` make one where there is none.

        Raises:
            UsageError: there is none, it is damaged, no history, or of a newer version.
        """
        self.path = path
        if not create and not path.is_file():
            raise UsageError(f"{path}: a history (made by `conform history import`) expected, no such file")
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
        """Close the file; the last process to close it leaves one file."""
        self._db.close()

    def add(self, document: Mapping[str, JSON], *, nightly: bool = False) -> Added:
        """Store one run file's content, whole or not at all.

        A stored row stays, unless this document of the same run was written later. But a failing result always replaces
        one that does not fail and is never replaced by one: a clock that was set back hides no failure.

        Args:
            document: checked already (`report.runfile.read_document`).
            nightly: whether its timings belong to the series in which change points are sought.

        Raises:
            UsageError: the store is damaged or the disk is full; nothing of the document was stored.
        """
        with self._errors(), self._transaction():
            key, later = self._run(document, nightly)
            tables = rows(document)
            before = self._count(key, tables)
            for table, content in tables.items():
                self._insert(table, key, content, replace=later)
            new, total = self._count(key, tables) - before, sum(map(len, tables.values()))
            return Added(new, total - new)

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a SELECT; inside a `snapshot` several see the same moment. UsageError if the store is damaged."""
        with self._errors():
            return self._db.execute(sql, parameters).fetchall()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads inside see the store as of the first one, whoever writes meanwhile."""
        with self._errors(), self._transaction("DEFERRED"):
            yield

    def _begin_use(self, *, create: bool) -> None:
        db = self._db
        with self._transaction("DEFERRED"):  # another process may be making it: read these at one moment
            version, ours = self._pragma("user_version"), self._pragma("application_id") == APPLICATION
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and not ours:
            raise UsageError(f"{self.path}: a history expected, a SQLite file of something else found; nothing changed")
        if version > len(MIGRATIONS):
            raise UsageError(
                f"{self.path}: a history of version {len(MIGRATIONS)} or older expected, version {version} found: "
                "a newer ggml-conformance made it; update this one. Nothing was changed"
            )
        if create and version and (damage := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise UsageError(f"{self.path}: {_advice('')} ({damage})")  # rows added to it would be lost too
        self._log_ahead()
        db.execute("PRAGMA synchronous = FULL")  # a commit survives a loss of power
        db.execute("PRAGMA foreign_keys = ON")
        if version < len(MIGRATIONS):
            with self._transaction():  # another process may have migrated it meanwhile: read the version again
                for step in MIGRATIONS[self._pragma("user_version") :]:
                    for statement in step:
                        db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _log_ahead(self) -> None:
        """Turn write-ahead logging on, so that readers and a writer do not wait for each other. SQLite itself does not
        wait for locks here; on a file system without shared memory it keeps its rollback journal.
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

    def _run(self, document: Mapping[str, JSON], nightly: bool) -> tuple[int, bool]:
        """Insert or update the run's row; return its id and whether the document is newer than what is stored of it."""
        env = document["environment"]
        packages = json.dumps(env.get("packages") or {}, sort_keys=True)
        facts = [env["machine"], env.get("system") or "", env.get("cpu") or "", env.get("cores"), env.get("python")]
        before = self._db.execute("SELECT id, written FROM runs WHERE run = ?", (document["run"],)).fetchone()
        if before is None:
            cursor = self._db.execute(
                """INSERT INTO runs (run, kind, written, nightly, machine, system, cpu, cores, python, packages)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                (document["run"], document["kind"], document["written"], int(nightly), *facts, packages),
            )
            return int(cursor.lastrowid or 0), False
        key, written = before
        self._db.execute(
            "UPDATE runs SET written = max(written, ?), nightly = max(nightly, ?) WHERE id = ?",
            (document["written"], int(nightly), key),
        )
        return key, document["written"] > written

    def _insert(self, table: str, key: int, content: Sequence[Cells], *, replace: bool) -> None:
        """Insert rows of one table, texts as ids of `names`. Table and column names are ours, never a file's."""
        if not content:
            return
        columns = tuple(content[0])
        texts = sorted({row[c] for row in content for c in columns if c in NAMED})
        self._db.executemany("INSERT INTO names (text) VALUES (?) ON CONFLICT DO NOTHING", [(t,) for t in texts])
        places = ", ".join("(SELECT id FROM names WHERE text = ?)" if c in NAMED else "?" for c in columns)
        # not OR IGNORE, which would also silently drop a row that violates NOT NULL
        verb, otherwise = ("REPLACE", "") if replace else ("INSERT", "ON CONFLICT DO NOTHING")
        if table == "results":
            verb, otherwise = "INSERT", _worse(columns, replace=replace)
        self._db.executemany(
            f"{verb} INTO {table} (run, {', '.join(columns)}) VALUES (?, {places}) {otherwise}",
            ((key, *(row[c] for c in columns)) for row in content),
        )

    def _count(self, key: int, tables: Iterable[str]) -> int:
        query = "SELECT count(*) FROM {} WHERE run = ?"
        return sum(self._db.execute(query.format(t), (key,)).fetchone()[0] for t in tables)


def _worse(columns: Sequence[str], *, replace: bool) -> str:
    """The clause for a result that is stored already: only a failure replaces a failure."""
    failing = f"IN ({', '.join(repr(str(v)) for v in sorted(FAILURES))})"
    cells = ", ".join(f"{c} = excluded.{c}" for c in columns)
    wins = f"excluded.verdict {failing} {'OR' if replace else 'AND'} results.verdict NOT {failing}"
    return f"ON CONFLICT (run, backend, case_id) DO UPDATE SET {cells} WHERE {wins}"


ADVICE: dict[str, str] = {
    "locked": f"another program has held the history for more than {PATIENCE:.0f} s; try again when it is done",
    "full": "the disk is full; nothing of this was stored, and what was stored before is still there",
    "readonly": "the history cannot be written to; nothing was changed",
    "unable to open": "the history cannot be opened or made there; its folder must exist and take files",
    "": "the history is damaged and nothing was changed. Keep the file: SQLite's `.recover` reads what is left of it, "
    "or import the run files into a new one",
}
"""Word in SQLite's message -> advice to the user; the last fits every message."""


def _advice(error: str) -> str:
    return next(advice for word, advice in ADVICE.items() if word in error)


FEWEST = 7
"""Points that a series needs: Otava's test needs 3 on each side."""
WINDOW = 50
"""Points that Otava looks at together; its own default."""
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
    """Verdict, answer, or noticed and not -> how many rows."""


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
    """One work unit on one backend and kind of machine, oldest first."""

    unit: str
    model: str
    backend: str
    machine: str
    of: str
    """Unit of work: tokens, cases, bytes or steps."""
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A cause on a backend, in the words of the newest run that has it."""

    cause: str
    backend: str
    verdict: str
    op: str
    sentence: str
    cases: int
    smallest: str
    first: str
    """When the first run that has it was written."""
    last: str
    runs: int
    """How many runs have it."""
    passed: int
    """In how many later runs its smallest case passed."""


def runs(history: History) -> list[Run]:
    """Every run, oldest first."""
    counts: dict[int, dict[str, int]] = {}
    with history.snapshot():
        for table, word in COUNTED.items():
            for key, value, n in history.query(_COUNT.format(word=word, table=table)):
                counts.setdefault(key, {})[value] = n
        every = history.query(_RUNS)
    return [
        Run(run, kind, written, machine, system, cpu, bool(nightly), sum(n.values()), n)
        for key, run, kind, written, machine, system, cpu, nightly in every
        for n in [counts.get(key, {})]
    ]


def series(history: History, *, nightly: bool = True) -> list[Series]:
    """The rates of each unit on each backend and kind of machine, of nightly runs only or of all."""
    points: dict[tuple[str, str, str, str, str], list[Point]] = {}
    rates = history.query(_RATES, (int(nightly),))
    for unit, model, backend, machine, of, run, written, rate, low, high, rounds, packages in rates:
        point = Point(run, written, rate, low, high, rounds, json.loads(packages))
        points.setdefault((unit, model, backend, machine, of), []).append(point)
    return [Series(*key, tuple(own)) for key, own in points.items()]


def causes(history: History) -> list[Known]:
    """Every cause on every backend; those whose smallest case passed since come last."""
    return [Known(*row) for row in history.query(_CAUSES)]


@dataclass(frozen=True, slots=True)
class Change:
    """A rate changed from one run to the next."""

    series: Series
    at: Point
    """The first run that has the new rate."""
    since: Point
    """The last run that had the old one."""
    before: float
    """Mean rate since the previous change."""
    after: float
    """Mean rate until the next change."""
    p: float
    """Of the t-test: how likely such a step is if nothing changed."""

    @property
    def ratio(self) -> float:
        """Of the rates; below 1 it became slower."""
        return self.after / self.before


def changes(every: Iterable[Series], least: float = 0.0) -> list[Change]:
    """Change points (E-divisive with a t-test, by Apache Otava) of each series of at least 7 points, oldest
    first; relative changes up to `least` are left out (0.02 is 2 %).

    Raises:
        UnavailableError: there is such a series, and Apache Otava is not installed (it is an extra: it pins NumPy).
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
            f"change points need Apache Otava, which is not here ({e}): pip install 'ggml-conformance[history]', best "
            "into an environment of its own, since it pins NumPy; the history can be read from there"
        ) from None


_RUNS = "SELECT id, run, kind, written, machine, system, cpu, nightly FROM runs ORDER BY written, run"
_COUNT = "SELECT run, {word}, count(*) FROM {table} GROUP BY 1, 2"
_RATES = """
    SELECT unit.text, model.text, backend.text, machine, work_of, runs.run, written, rate, low, high, rounds, packages
    FROM timings JOIN runs ON runs.id = timings.run JOIN names AS unit ON unit.id = unit
    JOIN names AS model ON model.id = model JOIN names AS backend ON backend.id = backend
    WHERE rate IS NOT NULL AND runs.nightly >= ? ORDER BY 1, 2, 3, 4, 5, written, runs.run"""
_CAUSES = """
    WITH every AS (
        SELECT causes.*, written,
            row_number() OVER (PARTITION BY backend, cause ORDER BY written DESC, causes.run DESC) AS age,
            min(written) OVER (PARTITION BY backend, cause) AS first, count(*) OVER (PARTITION BY backend, cause) AS n
        FROM causes JOIN runs ON runs.id = causes.run)
    SELECT cause.text, backend.text, verdict, op.text, sentence, cases, smallest.text, first, written, n,
        (SELECT count(*) FROM results JOIN runs AS later ON later.id = results.run
         WHERE results.backend = every.backend AND case_id = every.smallest AND results.verdict = 'PASS'
         AND later.written > every.written) AS passed
    FROM every JOIN names AS cause ON cause.id = cause JOIN names AS backend ON backend.id = backend
    JOIN names AS op ON op.id = op JOIN names AS smallest ON smallest.id = smallest
    WHERE age = 1 ORDER BY passed > 0, written DESC, 2, 1"""
