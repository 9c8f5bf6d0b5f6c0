"""Find the cases that were running when a run was killed, and make case files of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conformance.case import casefile
from conformance.ggml.errors import ConformanceError
from conformance.ggml.text import shell
from conformance.judge.verdict import Request
from conformance.process.lock import lock

from .environment import MAX_BYTES
from .folder import case_folder, default_folder
from .journal import PREFIX, Beside, Contents, Journal, Running
from .select import build

KEEP_BYTES = 1 << 30
"""Maximum bytes of case files of killed runs; the oldest are removed first."""
MOST_CASES = 10_000
"""Maximum number of cases that start at a time; a batch has a hundred."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Cases that were running when a run was killed."""

    backend: str
    path: Path
    """Case file with one or more cases, one of which ended the run."""
    cases: int

    def sentence(self) -> str:
        """Describe it in one line."""
        what = "a case" if self.cases == 1 else f"{self.cases} cases"
        again = shell(["conform", "repro", str(self.path), "--backend", self.backend])
        return f"a run ended in the middle of {what}: {again}"


def left_in(journal: Journal) -> list[str]:
    """Return sentences on what an earlier run left in the file of a journal."""
    return [*(it.sentence() for it in _rescued(journal.cut, journal.folder)), *journal.left]


def begin_beside(target: Path) -> list[str]:
    """Begin the journal beside a record before the request is known, in case of a kill.

    Returns sentences on what an earlier run left. UsageError if a run is writing to it.
    """
    journal = Beside(target, default_folder())
    journal.begin(Request())
    journal.end(written=False)
    return left_in(journal)


def recover(folder: Path, backends: AbstractSet[str] | None = None) -> list[Interrupted]:
    """Take the journals that killed runs left in `folder`; return the cases that ended them.

    Journals of other backends than `backends` stay for the next run with these; None takes all.
    """
    paths = sorted(folder.glob(f"{PREFIX}*.jsonl"))
    return _rescued([cases for path in paths for cases in _taken(path, backends)], folder)


def _taken(path: Path, backends: AbstractSet[str] | None) -> list[Running]:
    """Remove the journal of a run that ended; return the cases that ended it.

    A link, another user's file, and that of a run that lives or has just made it, are left alone, and so is that of
    another backend.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        own = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
        if not (stat.S_ISREG(found.st_mode) and own and found.st_size and lock(descriptor) and _exists(descriptor)):
            return []
        cut: list[Running] = []
        with suppress(ConformanceError):
            cut = Contents.parse(file.read(MAX_BYTES)).innermost
        if backends is not None and any(running.backend not in backends for running in cut):
            return []
        if os.name != "nt":
            path.unlink(missing_ok=True)
    if os.name == "nt":
        try:
            path.unlink(missing_ok=True)
        except OSError:  # its run has it open
            return []
    return cut


def _exists(descriptor: int) -> bool:
    """Return False if another run took the file before it was locked."""
    return os.fstat(descriptor).st_nlink > 0


def _rescued(cut: Iterable[Running], folder: Path) -> list[Interrupted]:
    """Make a case file of each; what no longer builds is left out."""
    found: list[Interrupted] = []
    for each in cut:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, ConformanceError):
            found += _saved(each, folder)
    if found:
        _trim(folder, {it.path for it in found})
    return found


def _saved(cut: Running, folder: Path) -> Iterator[Interrupted]:
    if cut.file:
        path = Path(cut.file)
        if stat.S_ISREG(path.lstat().st_mode):
            yield Interrupted(cut.backend, path, 1)
        return
    cases = [c for c, generator in ((build(i), g) for i, g in cut.cases[:MOST_CASES]) if c.generator == generator]
    path = case_folder(folder) / f"{os.getpid()}-{os.urandom(4).hex()}.gguf"
    casefile.write(path, cases)
    yield Interrupted(cut.backend, path, len(cases))


def _trim(folder: Path, new: AbstractSet[Path]) -> None:
    """Remove the oldest case files of killed runs beyond `KEEP_BYTES`, but none of `new`."""
    with suppress(OSError):  # another run removes them, too
        files = case_folder(folder).glob("*.gguf")
        known = sorted(((f.stat().st_mtime, f.stat().st_size, f) for f in files), reverse=True)
        total = 0
        for _, size, file in known:
            total += size
            if total > KEEP_BYTES and file not in new:
                file.unlink()
