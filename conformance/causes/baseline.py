"""A baseline: the known causes of failures and the verdict of each case, in two files.

People edit the causes file; each cause has a reason and a link, each run its selection:

    [[run]]
    backend = "npu"
    level = "standard"                                 # empty if the run's record lacks it
    seed = 7                                           # left out if each case had its own
    families = []
    cases = []
    files = []
    shard = "1/1"
    passed = 3301
    failed = 141
    digest = "5e0c…"                                   # of its lines in the cases file

    [[cause]]
    id = "3f9a0c2e"                                    # causes of a run are matched by id, or as in `same.py`
    sentence = "MUL_MAT with src[0].type = q4_K is wrong"
    backend = "npu"
    verdict = "FAIL"
    op = "MUL_MAT"
    message = ""
    conditions = [["src[0].type", "q4_K"], ["src[1].ne[2]", ">1"]]
    reason = ""                                        # to be filled in
    link = ""                                          # likewise, an http(s) address

The cases file, `NAME.cases`, has a line of JSON for each case that passed or failed, sorted by id, so that a changed
case is one changed line:

    {"backend": "npu"}
    ["ops/ADD-f32+f32-a=13x5@1", "PASS"]
    ["ops/ADD-f32+f32-a=13x5,b=13@2", "FAIL", "numbers", 1e-4, ["ADD-3f9a0c2e"]]

`conform triage --write-baseline` leaves reason and link empty. Such a baseline is already valid; `Baseline.unfilled`
lists the entries without a reason. A file without `[[run]]` is of an older version and has causes only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from conformance.case.case import JSON
from conformance.case.strict import Memory, expect, only, parse_json, parse_toml, read_bytes, read_text
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.ggml.text import printable
from conformance.judge.cause import Cause, Condition
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.judge.wrong import Wrong, is_wrong
from conformance.report.runfile import write_text

from .same import same

HEAD = """\
# Known failures. A run compared with this file fails if a cause is new or gone, if a known cause has more cases or
# larger errors, or if a case that passed is unsupported or did not run. Fill in each reason, and a link to its issue.
# The file beside this one has the result of each case; `conform triage --write-baseline` writes both.
"""
CASES_SUFFIX = ".cases"
"""Suffix that the cases file adds to the name of the causes file."""
MAX_BYTES = 64 << 20
"""Size limit of the cases file; `full` takes 5 MB for one backend."""
KNOWABLE = FAILURES - {Verdict.XPASS}
"""Verdicts that a baseline accepts for a known case."""
_ADDRESS = re.compile(r"https?://\S+")


KEYS = ("id", "sentence", "backend", "verdict", "op", "message", "conditions", "reason", "link")
"""Keys required in each entry."""


@dataclass(frozen=True, slots=True)
class Known:
    """A cause as stored in a baseline: without its cases, which the runs have."""

    cause: Cause
    reason: str = ""
    link: str = ""

    @classmethod
    def of(cls, cause: Cause, said: Known | None = None) -> Known:
        """Return an entry for `cause`, with the reason and link of the earlier entry `said`."""
        bare = replace(cause, cases=(), seen="", rank={}, folder=None)
        return cls(bare) if said is None else cls(bare, said.reason, said.link)

    @property
    def key(self) -> tuple[str, str]:
        """Unique key in the file: id and backend."""
        return self.cause.id, self.cause.backend


@dataclass(frozen=True, slots=True)
class Selection:
    """The cases that a run selected for a backend; equal selections mean the same cases."""

    level: str = ""
    seed: int | None = None
    families: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    """Globs that match case ids."""
    files: tuple[str, ...] = ()
    shard: str = "1/1"

    @classmethod
    def of(cls, selected: Mapping[str, Any], backend: str) -> Selection | None:
        """Read the `selection` of a run's document; None if it lacks the backend."""
        level = selected.get("levels", {}).get(backend)
        if level is None:
            return None
        families, cases, files = (tuple(selected[k]) for k in ("families", "cases", "files"))
        return cls(level, selected["seed"], families, cases, files, selected["shard"])

    def __str__(self) -> str:
        seed = "" if self.seed is None else f"seed {self.seed}"
        words = (*self.families, *self.cases, *self.files, "" if self.shard == "1/1" else f"shard {self.shard}")
        return ", ".join(filter(None, (f"level {self.level}" if self.level else "an unknown level", seed, *words)))


@dataclass(frozen=True, slots=True)
class Seen:
    """How a case failed."""

    verdict: Verdict
    wrong: Wrong | None = None
    """The error metrics of a FAIL."""
    causes: tuple[str, ...] = ()
    """Ids of the entries that explain it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Verdicts of one backend's cases."""

    backend: str
    selection: Selection | None = None
    passed: frozenset[str] = frozenset()
    failed: Mapping[str, Seen] = field(default_factory=dict)
    """Case -> how it failed; failures without a cause are left out, so they stay unknown."""

    def lines(self) -> Iterator[str]:
        """Yield the lines for the cases file."""
        yield json.dumps({"backend": self.backend})
        rows: dict[str, list[JSON]] = {case: [case, str(Verdict.PASS)] for case in self.passed}
        for case, s in self.failed.items():
            said = (None, None) if s.wrong is None else s.wrong.to_json().values()
            rows[case] = [case, str(s.verdict), *map(_rounded, said), list(s.causes)]
        yield from (json.dumps(rows[case]) for case in sorted(rows))

    @property
    def digest(self) -> str:
        """Hash of the lines."""
        return sha256("\n".join(self.lines()).encode()).hexdigest()[:16]


def _rounded(value: JSON) -> JSON:
    """Round to three digits; the last bits may differ from run to run."""
    return float(f"{value:.2e}") if isinstance(value, float) else value


def ran(results: Iterable[Result], causes: Iterable[Cause], selected: Mapping[str, Any]) -> list[Ran]:
    """Return the verdicts per backend, from the results, causes and `selection` of a run."""
    explained: dict[tuple[str, str], list[str]] = {}
    for c in causes:
        for case in c.cases:
            explained.setdefault((c.backend, case), []).append(c.id)
    by_backend: dict[str, dict[str, list[Result]]] = {}
    for r in results:
        if not r.fresh:
            by_backend.setdefault(r.backend, {}).setdefault(r.case, []).append(r)
    made = []
    for backend, cases in sorted(by_backend.items()):
        passed = {case for case, rows in cases.items() if all(r.verdict is Verdict.PASS for r in rows)}
        failed = {
            case: Seen(rows[0].verdict, rows[0].wrong, tuple(sorted(explained[backend, case])))
            for case, found in cases.items()
            if (rows := [r for r in found if r.verdict in KNOWABLE]) and (backend, case) in explained
        }
        made.append(Ran(backend, Selection.of(selected, backend), frozenset(passed), failed))
    return made


@dataclass(frozen=True, slots=True)
class Baseline:
    """Known causes, and the verdicts of the run in which they were found."""

    path: str
    entries: tuple[Known, ...] = ()
    runs: tuple[Ran, ...] = ()
    """Verdicts of the run, one entry per backend; empty for a file of an older version."""

    def where(self, entry: Known) -> str:
        """Return the location of an entry, for messages."""
        return f"{self.path}: cause {self.entries.index(entry) + 1} ({printable(entry.cause.id)})"

    def unfilled(self) -> list[str]:
        """Return a message for each entry without a reason."""
        return [f"{self.where(e)} reason: fill it in" for e in self.entries if not e.reason.strip()]

    def run_of(self, backend: str) -> Ran | None:
        """Return the verdicts of a backend; None if the file has none."""
        return next((r for r in self.runs if r.backend == backend), None)

    def unseeing(self) -> list[str]:
        """Return a message if entries have no cases."""
        if all(self.run_of(e.cause.backend) for e in self.entries):
            return []
        missing = "that a known cause has more cases or larger errors, or that cases no longer run"
        again = f"conform triage RUN.json --write-baseline {self.path}"
        return [f"{self.path}: has an older version, which does not show {missing}; write it again: {again}"]

    def renewed(self, causes: Sequence[Cause], runs: Sequence[Ran] = ()) -> Baseline:
        """Return the baseline of `causes` and `runs`; known causes retain reason and link."""
        said = {e.key: e for e in self.entries}
        known = same([e.cause for e in self.entries], causes)
        entries = (Known.of(c, said[known[key]] if (key := (c.id, c.backend)) in known else None) for c in causes)
        return Baseline(self.path, tuple(entries), tuple(runs))

    def to_toml(self) -> str:
        """Return the text of the causes file."""
        runs = (f"\n[[run]]\n{_run_table(r)}" for r in self.runs)
        return HEAD + "".join((*runs, *(f"\n[[cause]]\n{_table(e)}" for e in self.entries)))

    def to_cases(self) -> Iterator[str]:
        """Yield the lines of the cases file."""
        return (f"{line}\n" for r in self.runs for line in r.lines())


def _table(entry: Known) -> str:
    pairs = ", ".join(f"[{_quoted(c.key)}, {_quoted(c.value)}]" for c in entry.cause.conditions)
    words = {k: _quoted(str(getattr(entry if k in ("reason", "link") else entry.cause, k))) for k in KEYS}
    values = {**words, "conditions": f"[{pairs}]"}
    return "".join(f"{k} = {v}\n" for k, v in values.items())


def _run_table(r: Ran) -> str:
    s = r.selection or Selection()
    lists = {k: f"[{', '.join(map(_quoted, getattr(s, k)))}]" for k in ("families", "cases", "files")}
    values = {
        "backend": _quoted(r.backend),
        "level": _quoted(s.level),
        **({} if s.seed is None else {"seed": s.seed}),
        **lists,
        "shard": _quoted(s.shard),
        "passed": len(r.passed),
        "failed": len(r.failed),
        "digest": _quoted(r.digest),
    }
    return "".join(f"{k} = {v}\n" for k, v in values.items())


def _quoted(text: str) -> str:
    """Return a TOML string: JSON's, with DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse(text: str, path: str, cases: bytes | None = None) -> Baseline:
    """Parse a causes file and its cases file; UsageError names file, entry (from 1) and key."""
    entries, tables = _entries(text, path)
    return Baseline(path, entries, _runs(tables, path, cases) if tables else ())


def _entries(text: str, path: str) -> tuple[tuple[Known, ...], list[dict[str, Any]]]:
    """Return the entries of a causes file and its run tables, which are not checked yet."""
    document = parse_toml(text, path)
    only(document, ("run", "cause"), path)
    tables = {name: document.get(name, []) for name in ("run", "cause")}
    for name, rows in tables.items():
        are_tables = isinstance(rows, list) and all(isinstance(t, dict) for t in rows)
        expect(are_tables, path, f"[[{name}]] tables", rows)
    entries = tuple(_known(t, f"{path}: cause {i + 1}") for i, t in enumerate(tables["cause"]))
    places: dict[tuple[str, str], int] = {}
    for i, e in enumerate(entries):
        first = places.setdefault(e.key, i)
        expect(first == i, f"{path}: cause {i + 1} id", f"another than that of cause {first + 1}", e.cause.id)
    return entries, tables["run"]


def _known(table: dict[str, Any], where: str) -> Known:
    only(table, KEYS, where)
    for key in KEYS:
        value = table.get(key)
        if key != "conditions":
            expect(isinstance(value, str), f"{where} {key}", "a text", value)
    expect(bool(table["id"].strip()), f"{where} id", "a text that is not empty", table["id"])
    verdicts = [str(v) for v in Verdict if v in FAILURES]
    expect(table["verdict"] in verdicts, f"{where} verdict", f"one of {', '.join(verdicts)}", table["verdict"])
    link = table["link"]
    expect(link == "" or bool(_ADDRESS.fullmatch(link)), f"{where} link", "an http(s) address, or an empty text", link)
    pairs = table.get("conditions")
    are_pairs = isinstance(pairs, list) and all(map(_is_pair, pairs))
    expect(are_pairs, f"{where} conditions", "a list of pairs of texts", pairs)
    conditions = tuple(Condition(*pair) for pair in table["conditions"])
    words = {k: table[k] for k in ("id", "sentence", "backend", "op", "message")}
    cause = Cause(**words, verdict=Verdict(table["verdict"]), conditions=conditions, cases=())
    return Known(cause, table["reason"], link)


def _is_pair(value: object) -> bool:
    return _are_texts(value) and len(value) == 2  # type: ignore[arg-type]  # it is a list


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_RUN: dict[str, tuple[str, Callable[[object], bool]]] = {
    "backend": ("a text", lambda v: isinstance(v, str)),
    "level": ("a text", lambda v: isinstance(v, str)),
    "seed": ("a whole number from 0", lambda v: v is None or _is_count(v)),
    "families": ("a list of texts", _are_texts),
    "cases": ("a list of texts", _are_texts),
    "files": ("a list of texts", _are_texts),
    "shard": ("a text", lambda v: isinstance(v, str)),
    "passed": ("a whole number from 0", _is_count),
    "failed": ("a whole number from 0", _is_count),
    "digest": ("a text", lambda v: isinstance(v, str)),
}


def _runs(tables: Sequence[dict[str, Any]], path: str, cases: bytes | None) -> tuple[Ran, ...]:
    cases_file = f"{path}{CASES_SUFFIX}"
    if cases is None:
        raise UsageError(
            f"{path}: its cases are expected in {cases_file}, which cannot be read; keep both files together"
        )
    read = _cases(cases, cases_file)
    runs = []
    for i, table in enumerate(tables):
        where = f"{path}: run {i + 1}"
        only(table, _RUN, where)
        for key, (what, ok) in _RUN.items():
            expect(ok(table.get(key)), f"{where} {key}", what, table.get(key))
        backend = table["backend"]
        if backend not in read:
            raise UsageError(f"{where} backend: {printable(backend)} has no cases in {cases_file}")
        passed, failed = read.pop(backend)
        selected = {**table, "levels": {backend: table["level"] or None}, "seed": table.get("seed")}
        selection = Selection.of(selected, backend)
        run = Ran(backend, selection, frozenset(passed), failed)
        if (run.digest, len(passed), len(failed)) != (table["digest"], table["passed"], table["failed"]):
            raise UsageError(
                f"{cases_file}: does not belong to {path}; write both again with conform triage --write-baseline"
            )
        runs.append(run)
    if read:
        raise UsageError(f"{cases_file}: {printable(next(iter(read)))} has no [[run]] in {path}")
    return tuple(runs)


def _cases(raw: bytes, path: str) -> dict[str, tuple[set[str], dict[str, Seen]]]:
    """Return the passed and failed cases by backend; UsageError names the line."""
    memory, found = Memory(64 * MAX_BYTES, 0), {}  # type: tuple[Memory, dict[str, tuple[set[str], dict[str, Seen]]]]
    passed, failed = set(), {}  # type: tuple[set[str], dict[str, Seen]]
    for n, line in enumerate(raw.splitlines(), 1):
        try:
            row = parse_json(memoryview(line), memory, f"{path}: line {n}")
        except CaseFileError as e:
            raise UsageError(str(e)) from None
        if isinstance(row, dict) and set(row) == {"backend"} and isinstance(row["backend"], str):
            passed, failed = set(), {}
            if row["backend"] in found:
                raise UsageError(f"{path}: line {n}: the cases of {printable(row['backend'])} occur twice")
            found[row["backend"]] = passed, failed
        elif found and _is_case(row) and row[0] not in passed and row[0] not in failed:
            if len(row) == 2:
                passed.add(row[0])
            else:
                case, verdict, kind, nmse, causes = row
                wrong = None if kind is None else Wrong.from_json({"kind": kind, "nmse": nmse})
                failed[case] = Seen(Verdict(verdict), wrong, tuple(causes))
        else:
            raise UsageError(f"{path}: line {n}: a case with its verdict expected")
    return found


def _is_case(row: JSON) -> bool:
    if not isinstance(row, list) or len(row) not in (2, 5) or not all(isinstance(v, str) for v in row[:2]):
        return False
    if len(row) == 2:
        return bool(row[1] == Verdict.PASS)
    _, verdict, kind, nmse, causes = row
    is_measured = (kind, nmse) == (None, None) or is_wrong({"kind": kind, "nmse": nmse})
    return verdict in map(str, KNOWABLE) and is_measured and _are_texts(causes)


def read(path: Path) -> Baseline:
    """Read a baseline and its cases file; UsageError if one is unreadable or malformed."""
    text, cases_file = read_text(path), Path(f"{path}{CASES_SUFFIX}")
    cases = read_bytes(cases_file, MAX_BYTES) if cases_file.exists() else None
    return parse(text, str(path), cases)


def before(path: Path) -> Baseline:
    """Return the baseline that a new one replaces, without runs; UsageError for another file."""
    if not path.exists():
        return Baseline(str(path))
    return Baseline(str(path), _entries(read_text(path), str(path))[0])  # its cases file need not match


def write(path: Path, causes: Sequence[Cause], option: str, runs: Sequence[Ran] = ()) -> Baseline:
    """Write the baseline of `causes` and `runs`; reasons and links in the file are preserved.

    Args: path: the file; it need not exist. causes: of a run. option: the option that names the file, for messages.
    runs: the verdicts of the cases of that run.

    Raises:
        UsageError: the file is not a baseline, or cannot be written.
    """
    made = before(path).renewed(causes, runs)
    write_text(Path(f"{path}{CASES_SUFFIX}"), made.to_cases(), option)
    write_text(path, made.to_toml(), option)
    return made
