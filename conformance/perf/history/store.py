"""The history: what many runs on many machines found, in one SQLite file.

Each run is stored under its own name once, however often and from wherever it is imported. A run goes in whole or not
at all; writers wait for each other, readers wait for nobody.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import FAILURES

from .rows import Cells, rows
from .schema import APPLICATION, MIGRATIONS, NAMED

PATIENCE = 60.0
"""Seconds that a writer waits for the others."""


@dataclass(frozen=True, slots=True)
class Added:
    """What became of one document."""

    run: str
    kind: str
    new: int
    """Rows that were not there before."""
    known: int
    """Rows that were."""


@final
class History:
    """An open store. Every error of its file is one `UsageError` that says what to do; none loses what was stored."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open the store at `path`, bring an older one up to date, and with `create` make one where none is.

        Raises:
            UsageError: there is none, it is damaged, no history, or of a newer version.
        """
        self.path = path
        if not create and not path.is_file():
            raise UsageError(f"{path}: a history (made by `conform history import`) expected, no such file")
        with self._said():
            mode = "rwc" if create else "rw"
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=PATIENCE, isolation_level=None
            )
        try:
            with self._said():
                self._begin_use(create=create)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the last to close leaves one file."""
        self._db.close()

    def add(self, document: Mapping[str, JSON], *, nightly: bool = False) -> Added:
        """Store one run file's content, as `report.runs` reads it, whole or not at all.

        A row that is there stays, unless this document is of the same run and was written later. A failing result takes
        the place of one that does not fail and keeps it, whatever their clocks say: one set back hides nothing.

        Args:
            document: checked already (`report.runfile.read_document`).
            nightly: whether its timings belong to the series in which change points are looked for.

        Raises:
            UsageError: the store is damaged or the disk is full; nothing of the document was stored.
        """
        with self._said(), self._transaction():
            key, later = self._run(document, nightly)
            found = rows(document)
            before = self._count(key, found)
            for table, content in found.items():
                self._insert(table, key, content, replace=later)
            new, total = self._count(key, found) - before, sum(map(len, found.values()))
            return Added(document["run"], document["kind"], new, total - new)

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows that a SELECT gives; several see one moment in a `snapshot`.

        Raises:
            UsageError: the store is damaged.
        """
        with self._said():
            return self._db.execute(sql, parameters).fetchall()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """What is read inside is all as of the first of it, whoever writes meanwhile."""
        with self._said(), self._transaction("DEFERRED"):
            yield

    def _begin_use(self, *, create: bool) -> None:
        db = self._db
        with self._transaction("DEFERRED"):  # another may be making it: all of these as of one moment
            found, ours = self._pragma("user_version"), self._pragma("application_id") == APPLICATION
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and not ours:
            raise UsageError(f"{self.path}: a history expected, a SQLite file of something else found; nothing changed")
        if found > len(MIGRATIONS):
            raise UsageError(
                f"{self.path}: a history of version {len(MIGRATIONS)} or older expected, version {found} found: "
                "a newer ggml-conformance made it; update this one. Nothing was changed"
            )
        if create and found and (damage := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise UsageError(f"{self.path}: {_advice('')} ({damage})")  # more would only be lost with it
        self._log_ahead()
        db.execute("PRAGMA synchronous = FULL")  # what is committed stays, through a loss of power too
        db.execute("PRAGMA foreign_keys = ON")
        if found < len(MIGRATIONS):
            with self._transaction():  # another may have done it meanwhile: the version is read again inside
                for step in MIGRATIONS[self._pragma("user_version") :]:
                    for statement in step:
                        db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _log_ahead(self) -> None:
        """Write-ahead logging, so that readers and a writer do not wait for each other. SQLite does not wait for locks
        here, so this does; where a file system cannot have it, SQLite keeps the journal that it has.
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
    def _said(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            raise UsageError(f"{self.path}: {_advice(str(e))} (SQLite: {e})") from e

    def _run(self, document: Mapping[str, JSON], nightly: bool) -> tuple[int, bool]:
        """The run's row, made or brought up to date; and whether the document is newer than what is there of it."""
        env = document["environment"]
        packages = json.dumps(env.get("packages") or {}, sort_keys=True)
        facts = [env["machine"], env.get("system") or "", env.get("cpu") or "", env.get("cores"), env.get("python")]
        before = self._db.execute("SELECT id, written FROM runs WHERE run = ?", (document["run"],)).fetchone()
        if before is None:
            made = self._db.execute(
                """INSERT INTO runs (run, kind, written, nightly, machine, system, cpu, cores, python, packages)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                (document["run"], document["kind"], document["written"], int(nightly), *facts, packages),
            )
            return int(made.lastrowid or 0), False
        key, written = before
        self._db.execute(
            "UPDATE runs SET written = max(written, ?), nightly = max(nightly, ?) WHERE id = ?",
            (document["written"], int(nightly), key),
        )
        return key, document["written"] > written

    def _insert(self, table: str, key: int, content: Sequence[Cells], *, replace: bool) -> None:
        """Rows of one table, texts as ids of `names`. What the statement names is ours, never a file's."""
        if not content:
            return
        columns = tuple(content[0])
        texts = sorted({row[c] for row in content for c in columns if c in NAMED})
        self._db.executemany("INSERT INTO names (text) VALUES (?) ON CONFLICT DO NOTHING", [(t,) for t in texts])
        places = ", ".join("(SELECT id FROM names WHERE text = ?)" if c in NAMED else "?" for c in columns)
        # not OR IGNORE, which would drop a row that lacks something as silently as one that is there
        verb, otherwise = ("REPLACE", "") if replace else ("INSERT", "ON CONFLICT DO NOTHING")
        if table == "results":
            verb, otherwise = "INSERT", _worse(columns, replace=replace)
        self._db.executemany(
            f"{verb} INTO {table} (run, {', '.join(columns)}) VALUES (?, {places}) {otherwise}",  # as said
            ((key, *(row[c] for c in columns)) for row in content),
        )

    def _count(self, key: int, tables: Iterable[str]) -> int:
        query = "SELECT count(*) FROM {} WHERE run = ?"
        return sum(self._db.execute(query.format(t), (key,)).fetchone()[0] for t in tables)


def _worse(columns: Sequence[str], *, replace: bool) -> str:
    """What becomes of a result that is there already: a failure is never replaced by what is none."""
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
"""Word in SQLite's message -> what it means for the user; the last for all that remain."""


def _advice(error: str) -> str:
    return next(advice for word, advice in ADVICE.items() if word in error)
