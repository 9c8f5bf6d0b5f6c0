"""Archives of builds, unpacked once into a cache by the digest of their bytes; an archive is a stranger's file.

Nothing leaves the folder: a name may not be absolute or climb, files are written before any link exists, and a link
must end inside. What is neither file, folder nor symbolic link is refused, and so is more than `MOST_BYTES`.
"""

from __future__ import annotations

import hashlib
import lzma
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from conformance.ggml.errors import UnavailableError

SUFFIXES = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar", ".zip", ".whl")
MOST_BYTES = 16 << 30
"""What an archive may hold: a build with kernels of every CUDA architecture has 2 GiB."""
MOST_FILES = 100_000
_LONGEST_PATH = 4096
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, ValueError)
"""What the readers raise for bytes that are no archive, or end too early."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a symbolic link of an archive."""

    name: str
    size: int = 0
    mode: int = 0o644
    target: str | None = None
    """Of a link."""
    data: IO[bytes] | None = None
    """Of a file."""


def is_archive(path: Path) -> bool:
    """Whether a file's name is that of an archive."""
    return path.name.lower().endswith(SUFFIXES)


def unpack(path: Path, cache: Path) -> Path:
    """The folder in `cache` that holds what the archive holds, made once.

    UnavailableError where it is no archive, ends too early, or holds what `Entry` is not.
    """
    folder = cache / digest(path)
    if folder.is_dir():
        return folder
    with fresh_folder(cache) as made:
        try:
            _write(path, made)
        except _BROKEN as e:
            raise _refusal(path, f"it cannot be read to its end: {str(e) or type(e).__name__}") from None
        except OSError as e:
            raise _refusal(path, f"it cannot be unpacked in {cache}: {e.strerror or e}") from None
        return settle(made, folder)


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; UnavailableError where it cannot be read."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                sha.update(piece)
    except OSError as e:
        raise UnavailableError(f"{path}: cannot be read: {e.strerror}") from None
    return sha.hexdigest()


@contextmanager
def fresh_folder(cache: Path) -> Iterator[Path]:
    """An empty folder in `cache`, which is gone afterwards unless `settle` gave it its name."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="new-", dir=cache))
    except OSError as e:
        raise UnavailableError(f"{cache}: the cache of builds cannot be written: {e.strerror}") from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def settle(made: Path, folder: Path) -> Path:
    """Give a complete folder its name; where another process was first, its folder counts."""
    with suppress(OSError):
        made.rename(folder)
    return folder


def _write(path: Path, folder: Path) -> None:
    links: list[Entry] = []
    left, count = MOST_BYTES, 0
    for entry in _entries(path):
        count += 1
        left -= entry.size
        if count > MOST_FILES or left < 0:
            raise _refusal(path, f"it holds more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB")
        if entry.data is None:
            links.append(entry)
            continue
        place = _place(path, folder, entry.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            left_here = entry.size
            while left_here and (piece := entry.data.read(min(left_here, 1 << 20))):
                file.write(piece)
                left_here -= len(piece)
        if left_here:
            raise EOFError(f"{entry.name} ends {left_here} bytes early")
        place.chmod(0o755 if entry.mode & 0o100 else 0o644)
    for entry in links:
        place = _place(path, folder, entry.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(entry.target or "")
    root = folder.resolve()
    for entry in links:
        try:
            inside = _place(path, folder, entry.name).resolve().is_relative_to(root)
        except (OSError, RuntimeError):  # a circle
            inside = False
        if not inside:
            raise _refusal(path, f"its link {entry.name} leads outside, to {entry.target}")


def _place(path: Path, folder: Path, name: str) -> Path:
    """Where an entry goes; no part of its name is a link there, as files come first and links do not nest."""
    pure = PurePosixPath(name)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or "\0" in name:
        raise _refusal(path, f"a name inside it is no path below its folder: {name!r}")
    place = folder.joinpath(*pure.parts)
    above = place.parent
    while above != folder:
        if above.is_symlink():
            raise _refusal(path, f"{name!r} lies behind a link")
        above = above.parent
    return place


def _entries(path: Path) -> Iterator[Entry]:
    if path.name.lower().endswith((".zip", ".whl")):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                mode = info.external_attr >> 16
                if info.is_dir():
                    continue
                if stat.S_ISLNK(mode):
                    with archive.open(info) as data:
                        yield Entry(info.filename, target=data.read(_LONGEST_PATH).decode("utf-8", "replace"))
                    continue
                with archive.open(info) as file:
                    yield Entry(info.filename, info.file_size, mode, data=file)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isdir():
                continue
            if member.issym():
                yield Entry(member.name, target=member.linkname)
                continue
            held = tar.extractfile(member) if member.isreg() or member.islnk() else None
            if held is None:
                raise _refusal(path, f"{member.name!r} is neither file, folder nor link")
            size = tar.getmember(member.linkname).size if member.islnk() else member.size
            yield Entry(member.name, size, member.mode, data=held)


def _refusal(path: Path, why: str) -> UnavailableError:
    return UnavailableError(f"{path}: an archive of a build ({', '.join(SUFFIXES)}) expected; {why}")
