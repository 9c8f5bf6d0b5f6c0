"""Journals: each result is on disk as soon as it is known.

`Journal` is the file of `--journal` and continues at the next start; `Partial` is beside the file of `--json` until
that is written. Both contain one JSON document per line: first a header with the request and the seed of fresh cases,
then one result per line. Lines are appended whole; a last line without its newline, torn by a kill, is dropped, and its
case runs again.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from msgspec import convert

from conformance.case import strict
from conformance.case.case import JSON
from conformance.case.strict import Memory
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.judge.verdict import Request, Result, counted
from conformance.run.session.environment import SCHEMA, header
from conformance.run.session.identity import Identity
from conformance.run.session.select import new_seed

from .runfile import JOURNAL, JOURNAL_BEGINS, KILLED, MAX_BYTES, MAX_MEMORY, Begun, checked

BESIDE = ".partial.jsonl"
"""Suffix of a `Partial`, after the name of its run's final file."""
PATIENCE = 10.0
"""Seconds to wait for the lock of a run that is about to end."""
SAME = ("machine", "python", "packages")
"""Parts of the environment that may not change between the starts of a run."""


class Journal:
    """A journal, new or continued; locked while it is open."""

    def __init__(
        self, path: Path, asked: dict[str, JSON], tested: Mapping[str, Identity] = MappingProxyType({})
    ) -> None:
        """Read the results of earlier starts with the same options (`asked`).

        `tested`: backend -> the content of what it tests, which must be the same.

        Raises:
            UsageError: the file is not a journal, cannot be written, is in use, or belongs to a run with other options,
                packages or tested content.
        """
        self.path = path
        self._tested = tested
        self._descriptor = self._open()
        try:
            self._head, rows = self._read(asked)
            self._earlier = self._results(rows)
        except BaseException:
            self.close()
            raise

    @property
    def run(self) -> str:
        """The name of the run, the same at each start."""
        return str(self._head["run"])

    @property
    def seed(self) -> int:
        """Seed of fresh cases if the user gave none, the same at each start."""
        return int(self._head["seed"])

    @property
    def reused(self) -> str:
        """A sentence on the results of earlier starts; empty if there are none."""
        count = sum(map(len, self._earlier.values()))
        return f"{counted(count, 'result')} of the run of {self._head['written']} reused: {self.path}" if count else ""

    def take(self, backend: str, case: str) -> Result | None:
        """Return a result of an earlier start, each of them once; None if the case must run."""
        earlier = self._earlier.get((backend, case))
        return earlier.popleft() if earlier else None

    def add(self, results: Sequence[Result]) -> None:
        """Append results; UsageError if the file can no longer be written."""
        self._append([r.to_json() for r in results])

    def close(self) -> None:
        """Close and unlock the file."""
        os.close(self._descriptor)

    def _open(self) -> int:
        try:
            descriptor = _open(self.path)
        except OSError as e:
            raise self._error(f"cannot be written: {e.strerror}") from e
        if not lock(descriptor, PATIENCE):
            os.close(descriptor)
            raise self._error("another run is writing to it")
        return descriptor

    def _read(self, asked: dict[str, JSON]) -> tuple[dict[str, JSON], list[dict[str, JSON]]]:
        raw = strict.read_bytes(self.path, MAX_BYTES)
        whole, newline, torn = raw.rpartition(b"\n")
        if not newline:
            begun = min(len(torn), len(JOURNAL_BEGINS))
            if torn[:begun] != JOURNAL_BEGINS[:begun]:
                raise self._error("not a journal of a run")
            head: dict[str, JSON] = {**header(JOURNAL), "asked": asked, "seed": new_seed()}
            head["environment"] |= {"identity": {b: it.to_json() for b, it in self._tested.items()}}
            os.ftruncate(self._descriptor, 0)
            self._append([head])
            return head, []
        rows = [self._row(n, line) for n, line in enumerate(whole.split(b"\n"), 1)]
        head = rows[0]
        if head.get("kind") != JOURNAL or head.get("schema") != SCHEMA:
            raise self._error("not a journal of a run")
        checked(self.path, "line 1", partial(convert, head, Begun))
        self._check(head.get("asked"), asked, asked)
        self._check(head.get("environment"), header(JOURNAL)["environment"], SAME)
        self._check_tested(head["environment"].get("identity") or {})
        os.ftruncate(self._descriptor, len(raw) - len(torn))
        return head, rows[1:]

    def _row(self, n: int, line: bytes) -> dict[str, JSON]:
        try:
            row = strict.parse_json(memoryview(line), Memory(MAX_MEMORY, 0), "line")
            strict.weigh(row, "line")
        except CaseFileError:
            row = None
        if not isinstance(row, dict):
            raise self._error(f"line {n}: one line of JSON expected; if the file is yours, remove it to start again")
        return row

    def _check(self, was: JSON, now: Mapping[str, JSON], keys: Iterable[str]) -> None:
        if not isinstance(was, dict):
            raise self._error("not a journal of a run")
        for k in keys:
            if was.get(k) != now[k]:
                found = f"{k} {_short(was.get(k))}, this one with {_short(now[k])}"
                raise self._error(f"its run was started with {found}; remove it to start again")

    def _check_tested(self, before: Mapping[str, dict[str, JSON]]) -> None:
        for backend, now in self._tested.items():
            if changed := now.differences(before.get(backend, {})):
                raise self._error(
                    f"the {' and '.join(changed)} of {backend} changed since its run was started; "
                    "remove it to start again"
                )

    def _results(self, rows: Sequence[dict[str, JSON]]) -> dict[tuple[str, str], deque[Result]]:
        results: dict[tuple[str, str], deque[Result]] = defaultdict(deque)
        for n, row in enumerate(rows, 2):
            result = checked(self.path, f"line {n}", partial(Result.from_json, row))
            results[result.backend, result.case].append(result)
        return results

    def _append(self, rows: Sequence[JSON]) -> None:
        try:
            _write(self._descriptor, rows)
        except OSError as e:
            raise self._error(f"cannot be written: {e.strerror}") from e

    def _error(self, message: str) -> UsageError:
        return UsageError(f"--journal {self.path}: {message}")


class Partial:
    """The results of a run so far, in a file beside the run's final one."""

    def __init__(self, target: Path, asked: Request) -> None:
        """Start the file, but not for a device or pipe; rename the file that a killed run left.

        Raises:
            UsageError: another run is writing to the file.
        """
        self.path = target.with_name(f"{target.name}{BESIDE}")
        self.left = ""
        """A sentence about the results that an earlier run left."""
        self.fault = ""
        """Why results are not written immediately; empty if they are."""
        self._descriptor: int | None = None
        if target.exists() and not target.is_file():
            return
        try:
            self._descriptor = _open(self.path)
            if not lock(self._descriptor):
                os.close(self._descriptor)
                raise UsageError(f"--json {target}: another run is writing it; choose another file")
            self._put_aside(target)
            missing = [m.to_json() for m in asked.missing((), KILLED)]
            _write(self._descriptor, [{**header(JOURNAL), "asked": {"missing": missing}, "seed": 0}])
        except OSError as e:
            self._stop(e)

    def add(self, results: Sequence[Result]) -> None:
        """Append results; a full disk sets `fault`, and the run continues."""
        if self._descriptor is not None:
            try:
                _write(self._descriptor, [r.to_json() for r in results])
            except OSError as e:
                self._stop(e)

    def close(self, *, written: bool) -> str:
        """Close the file; remove it if the run's own file is `written`, else say where it is."""
        if self._descriptor is None:
            return "" if written else self.fault
        if written:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        return "" if written else f"what ran is in {self.path}, which `conform report` reads"

    def _put_aside(self, target: Path) -> None:
        """Rename the file of an earlier run, if it has a result."""
        assert self._descriptor is not None
        results = self.path.read_bytes().count(b"\n") - 1
        if results < 1:
            os.ftruncate(self._descriptor, 0)
            return
        names = (self.path.with_name(f"{target.name}.partial-{n}.jsonl") for n in itertools.count(1))
        aside = next(p for p in names if not p.exists())
        self.path.rename(aside)
        self.left = (
            f"an earlier run ended before it wrote {target}: its {results} results are in {aside}, "
            "which `conform report` reads"
        )
        os.close(self._descriptor)
        self._descriptor = _open(self.path, os.O_EXCL)
        lock(self._descriptor)

    def _stop(self, e: OSError) -> None:
        self.fault = f"{self.path}: results are not written to disk during the run: {e.strerror}"
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | flags, 0o666)


def _write(descriptor: int, rows: Sequence[JSON]) -> None:
    data = b"".join(json.dumps(r, allow_nan=False, default=str).encode() + b"\n" for r in rows)
    while data:
        data = data[os.write(descriptor, data) :]


def _short(value: JSON) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def lock(descriptor: int, patience: float = 0.0) -> bool:
    """Lock a file for all owners of its descriptor; False after `patience` seconds."""
    try:
        import fcntl  # noqa: PLC0415  # POSIX only; elsewhere two runs with one file are the user's to avoid
    except ImportError:
        return True
    if sys.platform == "win32":
        return True
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True
