"""Write each case to disk before it runs, to recover it if the run is killed.

A run has its own folder and locks it while it lives. A trajectory, or a case that no id generates, is written as a case
file; one-step cases are written by id, because a file for each would take longer than running it. The file is removed
after the case has run. A folder without a lock is from a killed run: `recover` turns its cases into case files.
"""

from __future__ import annotations

import atexit
import getpass
import itertools
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import JSON, Case
from conformance.ggml.errors import CaseFileError, ConformanceError
from conformance.ggml.text import printable, shell

try:
    import fcntl

    LOCKS = True
except ImportError:  # POSIX only
    LOCKS = False

RUNNING = "running-"
LEFT = "interrupted"
LOCK = "lock"
KEEP_BYTES = 1 << 30
"""Maximum bytes of case files of killed runs; the oldest are removed first."""
MAX_IDS = 1 << 20
"""Maximum bytes of the ids of a batch; a hundred ids take a tenth of it."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


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


def default_folder() -> Path:
    """Return the default parent folder of runs: the user's own in the system's temporary folder.

    Others can create files there too. If a folder of that name belongs to another user, is a link or is writable to
    others, this process makes a new one and says so.
    """
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # no such user in a container
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"conformance-{user}"
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    return folder if is_own(folder) else _instead_of(folder)


def is_own(folder: Path) -> bool:
    """Return True if `folder` is this user's, not a link, and not writable by others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not found.st_mode & 0o022)


@cache
def _instead_of(folder: Path) -> Path:
    made = Path(tempfile.mkdtemp(prefix="conformance-"))
    atexit.register(partial(_removed_if_empty, made))
    says = f"{folder} is writable by other users, so it is not used; cases of interrupted runs are saved in {made}"
    sys.stderr.write(f"{printable(says)}\n")
    return made


def _removed_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


class Ahead:
    """The folder of a run below `folder`; `known(case)` is True if its id generates it."""

    def __init__(self, folder: Path, known: Callable[[Case], bool]) -> None:
        self.folder = folder
        self._known = known
        self._count = itertools.count()
        self._own: Path | None = None
        self._lock: int | None = None

    @contextmanager
    def batch(self, spec: Spec, cases: Sequence[Case]) -> Iterator[None]:
        """Write the ids of generated `cases` and their backend while they run; raises as `one`."""
        with self._written(spec, [c for c in cases if self._known(c)], None):
            yield

    @contextmanager
    def one(self, spec: Spec, case: Case) -> Iterator[None]:
        """Write `case` to disk while it runs, as a file or by id; CaseFileError if not possible."""
        by_id = self.by_id(case)
        with self._written(spec, [case] if by_id else [], None if by_id else case):
            yield

    def close(self) -> None:
        """Remove the folder of the run."""
        if self._own is not None:
            assert self._lock is not None
            if os.name == "nt":  # an open file cannot be removed there
                os.close(self._lock)
                shutil.rmtree(self._own, ignore_errors=True)
            else:  # locked to the end, so that no recovery takes the folder
                shutil.rmtree(self._own, ignore_errors=True)
                os.close(self._lock)
            self._own = None

    def by_id(self, case: Case) -> bool:
        """Return True if the id of `case` is enough to recover it."""
        return len(case.steps) == 1 and self._known(case)

    @contextmanager
    def _written(self, spec: Spec, by_id: Sequence[Case], whole: Case | None) -> Iterator[None]:
        try:
            stem = f"{self._folder()}/{next(self._count):08}"
            file = None if whole is None else Path(f"{stem}.gguf")
            if file is not None and whole is not None:
                casefile.write(file, whole)
            text = json.dumps({"backend": str(spec), "ids": [[c.id, c.generator] for c in by_id]})
            # a third of the time of Path.write_text
            descriptor = os.open(f"{stem}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, text.encode())
            os.close(descriptor)
        except OSError as e:
            raise CaseFileError("file", f"{self.folder} cannot be written to: {e.strerror or e}") from e
        try:
            yield
        finally:
            os.unlink(f"{stem}.json")  # noqa: PTH108  # as above
            if file is not None:
                file.unlink()

    def _folder(self) -> Path:
        if self._own is None:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _alone_in(self.folder):  # no recovery sees it before it is locked
                own = Path(tempfile.mkdtemp(prefix=f"{RUNNING}{os.getpid()}-", dir=self.folder))
                self._lock = os.open(own / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
                if LOCKS and sys.platform != "win32":  # elsewhere an open file cannot be removed
                    with suppress(OSError):
                        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._own = own
        return self._own


def recover(folder: Path, build: Callable[[str], Case]) -> list[Interrupted]:
    """Turn the cases that killed runs left in `folder` into case files, and return each once."""
    found: list[Interrupted] = []
    for own in sorted(folder.glob(f"{RUNNING}*")):
        if not is_own(own):
            continue  # another user's, or a link: neither read nor removed
        with _alone_in(folder):
            lock = _take(own / LOCK)
        if lock is None:
            continue
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, ConformanceError):
            said = max(own.glob("*.json"), default=None)  # the last that began is the innermost
            if said is not None:
                found.append(_rescued(folder / LEFT, said, build))
        shutil.rmtree(own, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
    for folder_of in {i.path.parent for i in found}:
        _trim(folder_of, {i.path for i in found})
    return found


def _trim(folder: Path, new: AbstractSet[Path]) -> None:
    """Remove the oldest case files of `folder` beyond `KEEP_BYTES`, but none of `new`."""
    with suppress(OSError):  # another run removes them, too
        files = sorted(((f.stat().st_mtime, f.stat().st_size, f) for f in folder.glob("*.gguf")), reverse=True)
        total = 0
        for _, size, file in files:
            total += size
            if total > KEEP_BYTES and file not in new:
                file.unlink()


def _rescued(to: Path, said: Path, build: Callable[[str], Case]) -> Interrupted:
    descriptor = os.open(said, os.O_RDONLY | _NO_LINK)
    with os.fdopen(descriptor, "rb") as file:
        document: dict[str, JSON] = json.loads(file.read(MAX_IDS))
    backend, ids = document["backend"], document["ids"]
    if not (isinstance(backend, str) and all(isinstance(i, str) for i, _ in ids)):
        raise ValueError("texts expected")  # not written by a run of ours
    with suppress(FileExistsError):
        to.mkdir(mode=0o700)
    if not is_own(to):  # a link, or writable to others: use another folder
        to = Path(tempfile.mkdtemp(prefix=f"{LEFT}-", dir=to.parent))
    path = to / f"{said.parent.name.removeprefix(RUNNING)}-{said.stem}.gguf"
    whole = said.with_suffix(".gguf")
    if whole.is_symlink() or whole.exists():
        if not stat.S_ISREG(whole.lstat().st_mode):
            raise ValueError(f"{whole}: a file expected")
        whole.replace(path)
        return Interrupted(backend, path, 1)
    cases = [c for c, generator in ((build(i), g) for i, g in ids) if c.generator == generator]
    casefile.write(path, cases)
    return Interrupted(backend, path, len(cases))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from making or taking a run's folder in `folder` within this context."""
    if not LOCKS or sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _take(lock: Path) -> int | None:
    """Take the lock of a run that ended: its descriptor, -1 without locks, None if it lives.

    The caller holds it until the folder is removed, so that two recoveries do not report the same run.
    """
    if not LOCKS or sys.platform == "win32":
        try:
            lock.unlink(missing_ok=True)
        except PermissionError:
            return None
        return -1
    try:
        descriptor = os.open(lock, os.O_RDWR | _NO_LINK)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
