"""The tables of a history, and how an older one becomes a newer one."""

from __future__ import annotations

APPLICATION = 0x67676D6C
"""SQLite's `application_id`, by which the file is known: "ggml"."""

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
)
"""Statements that make version 1 of nothing, 2 of 1, and so on. A step that was ever released is never changed.

Texts that come again and again (cases, backends, units, faults) stand once in `names`; a column with the id of one
`REFERENCES names`. `control` is 1 where a hunt ran on an adapter as it is, to see that nothing is noticed there.
"""

NAMED = frozenset({"case_id", "backend", "unit", "model", "counter", "gate", "against", "fault", "family", "adapter"})
"""Columns that hold ids of `names`."""

COUNTED: dict[str, str] = {
    "results": "verdict",
    "timings": "verdict",
    "gates": "answer",
    "hunts": "CASE WHEN noticed THEN 'noticed' ELSE 'not noticed' END",
}
"""Table -> the word that its rows are counted by."""
