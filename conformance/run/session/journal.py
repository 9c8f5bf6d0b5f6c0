"""The journal of a run: one file that is appended to while it lives.

It has one JSON document per line: a header with the request and the content of what is tested, a line before cases
start and one after them, and each result as soon as it is known. Lines are appended whole; a last line without its
newline, torn by a kill, is dropped.

A process that runs cases has one `Journal`. It is beside the file of `--json` until that is written (`Beside`), or the
file of `--journal`, which the next start continues (`Continued`); any other is in a folder where the next run finds it
(`interrupted`). `Contents` reads all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta, Struct, ValidationError, convert

from conformance.backend.registry import Spec
from conformance.case import casefile, strict
from conformance.case.case import JSON, Case
from conformance.case.strict import Memory, checked
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.judge.evidence import Count
from conformance.judge.verdict import Missing, Request, Result, counted
from conformance.process.lock import lock

from .environment import MAX_BYTES, MAX_MEMORY, SCHEMA, Environment, Time, header
from .folder import case_folder
from .identity import Identity
from .select import new_seed

KIND = "journal"
PREFIX = "running-"
"""Begin of the names of journals in a folder."""
BEGINS = f'{{"schema": {SCHEMA}, "kind": "{KIND}", '.encode()
BESIDE = ".partial.jsonl"
"""Suffix of a `Beside`, after the name of its run's final file."""
KILLED = "the run ended before it"
STARTS, ENDS = "starts", "ends"
"""Keys of the lines before cases start and after they ended, with the number of the start."""
RUN = 0
"""The number of the run itself, which starts with the first line."""
PATIENCE = 10.0
"""Seconds to wait for the lock of a run that is about to end."""
SAME = ("machine", "python", "packages")
"""Parts of the environment that may not change between the starts of a run."""


class Head(Struct, frozen=True, kw_only=True, tag_field="kind", tag=KIND):
    """The first line."""

    schema: Literal[1]
    run: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    """The name of the run, the same at each start."""
    written: Time
    environment: Environment
    options: dict[str, JSON]
    """Options that decide what runs."""
    asked: list[Missing]
    """The requested pairs, `grouped`."""
    seed: Count
    """Seed of fresh cases if the user gave none, the same at each start."""


@dataclass(frozen=True, slots=True)
class Running:
    """Cases that have started."""

    backend: str
    cases: tuple[tuple[str, int], ...] = ()
    """Id of each case, and version of its generator."""
    file: str = ""
    """Path of the only case, which no id generates; empty if there are `cases`."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a journal."""

    head: dict[str, JSON]
    """The first line; empty if there is none."""
    results: Sequence[tuple[int, dict[str, JSON]]]
    """Number of the line, and result."""
    running: Mapping[int, Running]
    """Number of a start -> its cases, of those that did not end."""
    ended: bool
    """True if the run ended by itself."""
    lines: int
    size: int
    """Bytes of whole lines."""

    @property
    def innermost(self) -> list[Running]:
        """Return the cases that ended the run, if it was killed: at most one start."""
        return list(self.running.values())[-1:]

    @classmethod
    def parse(cls, raw: bytes) -> Contents:
        """Read the whole lines of a journal; CaseFileError names the line that is damaged."""
        memory = Memory(MAX_MEMORY, 0)
        whole = raw[: raw.rfind(b"\n") + 1]
        rows = [_row(line, memory, f"line {n}") for n, line in enumerate(whole.split(b"\n")[:-1], 1)]
        if rows and (rows[0].get("kind"), rows[0].get("schema")) != (KIND, SCHEMA):
            raise CaseFileError("line 1", "not a journal of a run")
        results: list[tuple[int, dict[str, JSON]]] = []
        running: dict[int, Running] = {}
        for n, row in enumerate(rows[1:], 2):
            if STARTS in row:
                number, cases = _start(row, f"line {n}")
                running[number] = cases
            elif ENDS in row:
                running.pop(row[ENDS] if isinstance(row[ENDS], int) else -1, None)
            else:
                results.append((n, row))
        ended = len(rows) > 1 and rows[-1].get(ENDS) == RUN
        return cls(rows[0] if rows else {}, results, running, ended, len(rows), len(whole))


def _row(line: bytes, memory: Memory, place: str) -> dict[str, JSON]:
    try:
        row = strict.parse_json(memoryview(line), memory, place)
        strict.weigh(row, place)
    except CaseFileError as e:
        raise CaseFileError(place, f"one line of JSON expected: {e.message}") from None
    if not isinstance(row, dict):
        raise CaseFileError(place, "one line of JSON expected, a value that is no object found")
    return row


def _start(row: dict[str, JSON], place: str) -> tuple[int, Running]:
    try:
        own = {k: v for k, v in row.items() if k != STARTS}
        return convert(row[STARTS], int), convert(own, Running)
    except ValidationError as e:
        raise CaseFileError(place, str(e)) from None


class Journal:
    """The journal of a process that runs cases: a file in a folder, made with its first line.

    It is removed when the run ends in good order; `interrupted` finds it after a kill.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare a journal; `folder` also takes the files of running cases that no id generates."""
        self.folder = folder
        self.left: list[str] = []
        """Sentences about what an earlier run left in this file."""
        self.cut: Sequence[Running] = ()
        """Cases at which an earlier run with this file was killed."""
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._numbers = itertools.count(1)
        self._head: dict[str, JSON] | None = None
        self._files: Path | None = None
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"

    def begin(self, asked: Request, tested: Mapping[str, Identity] = MappingProxyType({})) -> None:
        """Set the header: the request, and backend -> the content of what it tests."""
        self._head = _head(asked, tested)

    def take(self, backend: str, case: str) -> Result | None:  # noqa: ARG002  # a continued one has some
        """Return a result of an earlier start, each of them once; None if the case must run."""
        return None

    def add(self, results: Sequence[Result]) -> None:
        """Append results; raises as `running`."""
        self._append([r.to_json() for r in results])

    @contextmanager
    def running(self, spec: Spec, cases: Sequence[Case], *, whole: bool = False) -> Iterator[None]:
        """Record in this context that cases run: their ids, or if `whole` the only one as a file.

        Raises:
            CaseFileError: the journal cannot be written.
        """
        number, file = next(self._numbers), None
        if whole:
            file = self._file(number, cases)
        ids = () if whole else tuple((c.id, c.generator) for c in cases)
        self._append([{STARTS: number, **asdict(Running(str(spec), ids, str(file or "")))}])
        try:
            yield
        finally:
            self._append([{ENDS: number}])
            if file is not None:
                file.unlink(missing_ok=True)

    def end(self, *, written: bool) -> str:  # noqa: ARG002  # it matters beside a record
        """Close the file, and remove it unless it is still needed.

        Args:
            written: True if the run ended and its record, if it has one, has the results.

        Returns:
            Where the results are otherwise.
        """
        self._close(removes=True)
        return ""

    def _file(self, number: int, cases: Sequence[Case]) -> Path | None:
        try:
            if self._files is None or not self._files.is_dir():  # another run removes it if it is empty
                self._files = case_folder(self.folder)
            path = self._files / f"{self._name}-{number}.gguf"
            casefile.write(path, cases)
        except OSError as e:
            self._failed(e)
            return None
        return path

    def _append(self, rows: Sequence[JSON]) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
                rows = [self._head or _head(Request(), {}), *rows]
            _write(self._descriptor, rows)
        except OSError as e:
            self._failed(e)

    def _open(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(".jsonl", f"{PREFIX}{self._name}-", self.folder)
        self._path = Path(name)
        with suppress(OSError):  # a file system without locks
            lock(descriptor, PATIENCE)  # `interrupted.recover` takes no empty file, so none is lost before the lock
        return descriptor

    def _failed(self, e: OSError) -> None:
        raise CaseFileError("file", f"{self.folder} cannot be written to: {e.strerror or e}") from e

    def _close(self, *, removes: bool) -> None:
        if self._files is not None:
            with suppress(OSError):  # it has a case
                self._files.rmdir()
        if self._descriptor is None or self._path is None:
            return
        if os.name != "nt" and removes:  # before the lock ends: no other run may recover it
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        if os.name == "nt" and removes:  # an open file cannot be removed there
            self._path.unlink(missing_ok=True)


class Beside(Journal):
    """The journal of a run that writes a record, beside it; none for a device or pipe.

    A full disk ends the journal, not the run.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        super().__init__(folder)
        self._target = target
        self._path = target.with_name(f"{target.name}{BESIDE}")
        self._given_up = target.exists() and not target.is_file()
        self.fault = ""
        """Why results are not written immediately; empty if they are."""

    def begin(self, asked: Request, tested: Mapping[str, Identity] = MappingProxyType({})) -> None:
        """Start the file; rename the one that a killed run left.

        Raises:
            UsageError: another run is writing to the file.
        """
        super().begin(asked, tested)
        self._append([])

    def end(self, *, written: bool) -> str:
        """Close the file; remove it if the record is `written`, else say where it is."""
        had = self._descriptor is not None
        self._close(removes=written)
        self._given_up = True
        if written:
            return ""
        return f"what ran is in {self._path}, which `conform report` reads" if had else self.fault

    def _append(self, rows: Sequence[JSON]) -> None:
        if not self._given_up:
            super()._append(rows)

    def _open(self) -> int:
        assert self._path is not None
        descriptor = _open_locked(self._path)
        if descriptor is None:
            raise UsageError(f"--json {self._target}: another run is writing it; choose another file")
        try:
            return self._put_aside(self._path, descriptor)
        except BaseException:  # Ctrl-C too: an open descriptor keeps the lock
            os.close(descriptor)
            raise

    def _put_aside(self, path: Path, descriptor: int) -> int:
        """Rename the file of an earlier run, if it has a result; return the new one."""
        raw = path.read_bytes() if os.fstat(descriptor).st_size <= MAX_BYTES else b""
        results = max(0, raw.count(b"\n") - 1)
        try:
            found = Contents.parse(raw)
            results = len(found.results)
            self.cut = found.innermost
        except CaseFileError:  # the report says which line
            pass
        if not results and raw:
            os.ftruncate(descriptor, 0)
        if not results:
            return descriptor
        names = (path.with_name(f"{self._target.name}.partial-{n}.jsonl") for n in itertools.count(1))
        aside = next(p for p in names if not p.exists())
        path.rename(aside)
        self.left.append(
            f"an earlier run ended before it wrote {self._target}: its {results} results are in {aside}, "
            "which `conform report` reads"
        )
        os.close(descriptor)
        descriptor = os.open(path, FLAGS | os.O_EXCL, 0o666)
        lock(descriptor)
        return descriptor

    def _failed(self, e: OSError) -> None:
        self.fault = f"{self._path}: results are not written to disk during the run: {e.strerror}"
        self._close(removes=False)
        self._given_up = True


class Continued(Journal):
    """The file of `--journal`, new or of an earlier start with the same options."""

    def __init__(self, path: Path, folder: Path, options: dict[str, JSON]) -> None:
        """Open the file; raises as `begin`."""
        super().__init__(folder)
        self._path: Path = path
        self._options = options
        self._descriptor = self._open()
        try:
            self._found = self._read()
            self._earlier = self._results()
        except BaseException:  # as in `Beside._open`
            self._close(removes=False)
            raise
        self._numbers = itertools.count(self._found.lines + 1)
        self.seed = int(self._found.head["seed"]) if self._found.head else new_seed()
        """Seed of fresh cases if the user gave none, the same at each start."""

    @property
    def run(self) -> str:
        """The name of the run, the same at each start."""
        return str((self._head or {})["run"])

    def begin(self, asked: Request, tested: Mapping[str, Identity] = MappingProxyType({})) -> None:
        """Write the header, or compare it with that of earlier starts.

        Raises:
            UsageError: the file is not a journal, cannot be written, is in use, or belongs to a run with other options,
                packages or tested content.
        """
        head = {**_head(asked, tested), "options": self._options, "seed": self.seed}
        self._head = self._found.head or head
        if self._found.head:
            try:
                self._check(self._found.head["options"], self._options, self._options)
                self._check(self._found.head["environment"], head["environment"], SAME)
                self._check_tested(self._found.head["environment"].get("identity") or {}, tested)
            except UsageError:
                self._close(removes=False)
                raise
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, self._found.size)  # without a torn line
        if not self._found.head:
            self._append([head])
            return
        if count := len(self._found.results):
            self.left.append(
                f"{counted(count, 'result')} of the run of {self._found.head['written']} reused: {self._path}"
            )
        self.cut = self._found.innermost
        self._append([{ENDS: number} for number in self._found.running])

    def take(self, backend: str, case: str) -> Result | None:
        """Return a result of an earlier start, each of them once; None if the case must run."""
        earlier = self._earlier.get((backend, case))
        return earlier.popleft() if earlier else None

    def end(self, *, written: bool) -> str:
        """Close and unlock the file, which stays for the next start."""
        if written and self._descriptor is not None and not self._is_ended(self._descriptor):
            self._append([{ENDS: RUN}])
        self._close(removes=False)
        return ""

    def _is_ended(self, descriptor: int) -> bool:
        return self._found.ended and os.fstat(descriptor).st_size == self._found.size

    def _open(self) -> int:
        try:
            descriptor = _open_locked(self._path, PATIENCE)
        except OSError as e:
            self._failed(e)
            raise AssertionError from e
        if descriptor is None:
            raise self._error("another run is writing to it")
        return descriptor

    def _read(self) -> Contents:
        raw = strict.read_bytes(self._path, MAX_BYTES)
        if b"\n" not in raw:
            begun = min(len(raw), len(BEGINS))
            if raw[:begun] != BEGINS[:begun]:
                raise self._error("not a journal of a run")
            return Contents({}, (), {}, ended=False, lines=0, size=0)
        try:
            found = Contents.parse(raw)
        except CaseFileError as e:
            raise self._error(f"{e}; if the file is yours, remove it to start again") from None
        checked(self._path, "line 1", partial(convert, found.head, Head))
        return found

    def _check(self, was: JSON, now: Mapping[str, JSON], keys: Iterable[str]) -> None:
        for k in keys:
            if was.get(k) != now[k]:
                found = f"{k} {_short(was.get(k))}, this one with {_short(now[k])}"
                raise self._error(f"its run was started with {found}; remove it to start again")

    def _check_tested(self, before: Mapping[str, dict[str, JSON]], tested: Mapping[str, Identity]) -> None:
        for backend, now in tested.items():
            if changed := now.differences(before.get(backend, {})):
                raise self._error(
                    f"the {' and '.join(changed)} of {backend} changed since its run was started; "
                    "remove it to start again"
                )

    def _results(self) -> dict[tuple[str, str], deque[Result]]:
        results: dict[tuple[str, str], deque[Result]] = defaultdict(deque)
        for n, row in self._found.results:
            result = checked(self._path, f"line {n}", partial(Result.from_json, row))
            results[result.backend, result.case].append(result)
        return results

    def _failed(self, e: OSError) -> None:
        raise self._error(f"cannot be written: {e.strerror}") from e

    def _error(self, message: str) -> UsageError:
        return UsageError(f"--journal {self._path}: {message}")


def whole(results: Sequence[Result]) -> str:
    """Return the text of a journal with these results."""
    return "".join(f"{_line(row)}\n" for row in (_head(Request(), {}), *(r.to_json() for r in results)))


def _head(asked: Request, tested: Mapping[str, Identity]) -> dict[str, JSON]:
    head = header(KIND)
    head["environment"] |= {"identity": {b: it.to_json() for b, it in tested.items()}}
    return {**head, "options": {}, "asked": [m.to_json() for m in asked.missing((), KILLED)], "seed": 0}


def _line(row: JSON) -> str:
    return json.dumps(row, allow_nan=False, default=str)


def _write(descriptor: int, rows: Sequence[JSON]) -> None:
    data = "".join(f"{_line(r)}\n" for r in rows).encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _short(value: JSON) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


def _open_locked(path: Path, patience: float = 0.0) -> int | None:
    """Open a file and lock it; None after `patience` seconds. OSError if it cannot be opened."""
    while True:
        descriptor = os.open(path, FLAGS, 0o666)
        try:
            if not lock(descriptor, patience):
                os.close(descriptor)
                return None
        except OSError:  # a file system without locks
            return descriptor
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # its run ended and removed it before it was locked
