"""Unpack archives of builds once, into a cache keyed by SHA-256; archives are untrusted.

Nothing is written outside the folder: names may not be absolute or contain `..`, files are written before any link is
created, and a link must resolve inside. Other kinds of members are rejected, as is more than `MOST_BYTES`. Everything
that is read into memory (headers, names, a decoder's window) has a size limit.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import shutil
import stat
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

from conformance.ggml.errors import UnavailableError

SUFFIXES = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar", ".zip", ".whl")
MOST_BYTES = 16 << 30
"""Limit in bytes for an archive's contents; kernels for all CUDA devices take 2 GiB."""
MOST_FILES = 100_000
"""Limit for files, links and folders."""
MOST_HEADERS = 64 << 20
"""Limit in bytes for all headers of a tar, or the directory of a zip."""
_MOST_HEADER = 256 << 10
"""Limit in bytes for the headers of one tar member: names and extensions."""
_MOST_MEMORY = 256 << 20
"""Memory limit in bytes of the xz decoder; `xz -9` needs 65 MiB."""
_LONGEST_PATH = 4096
_DEEPEST = 64
"""Limit for nested folders."""
_PIECE = 1 << 16
_SHOWN = 80
"""Maximum characters of a name in a message."""
_BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError,
    OverflowError, LookupError,
)  # fmt: skip
"""Exceptions that the readers raise for invalid or truncated archives."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or link in an archive."""

    name: str
    size: int = 0
    mode: int = 0o644
    target: str | None = None
    """Target of a symbolic link."""
    same: str | None = None
    """The earlier file to which a hard link refers."""
    data: IO[bytes] | None = None
    """Contents of a file."""


def cache() -> Path:
    """Return the cache folder of unpacked and downloaded builds, `ggml-conformance/builds`."""
    above = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else "")
    return (Path(above) if above else Path.home() / ".cache") / "ggml-conformance" / "builds"


def is_archive(path: Path) -> bool:
    """Return True if the file name is that of an archive."""
    return path.name.lower().endswith(SUFFIXES)


def unpack(path: Path, cache: Path) -> Path:
    """Return the folder in `cache` with the archive's contents; UnavailableError if invalid."""
    folder = cache / digest(path)
    if folder.is_dir():
        return folder
    with fresh_folder(cache) as made:
        try:
            _write(path, made)
        except (*_BROKEN, OSError) as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise _refusal(path, f"it cannot be unpacked in {cache}: {e.strerror or e}") from None
            raise _refusal(path, f"it cannot be read to its end: {str(e) or type(e).__name__}") from None
        return settle(made, folder)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; UnavailableError if it cannot be read."""
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
    """Create an empty folder in `cache` that is removed afterwards, unless `settle` renamed it."""
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
    """Rename a complete folder; if another process was first, its folder is used."""
    with suppress(OSError):
        made.rename(folder)
    return folder


def _write(path: Path, folder: Path) -> None:
    links: list[tuple[Path, Entry]] = []
    left = MOST_BYTES
    for entry in _entries(path):
        place = _place(path, folder, entry.name)
        if entry.target is not None:
            links.append((place, entry))
            continue
        source = None if entry.same is None else _place(path, folder, entry.same)
        if source is not None and not source.is_file():
            raise _refusal(path, f"its hard link {_short(entry.name)} leads to no file before it")
        size = entry.size if source is None else source.stat().st_size
        left -= size
        if size < 0 or left < 0:
            raise _refusal(path, f"it holds more than {MOST_BYTES >> 30} GiB")
        place.parent.mkdir(parents=True, exist_ok=True)
        if source is None:
            _copy(entry, place)
        elif source != place:
            shutil.copy(source, place)
    _link(path, folder, links)


def _copy(entry: Entry, place: Path) -> None:
    left = entry.size
    with place.open("wb") as file:
        while left and entry.data is not None and (piece := entry.data.read(min(left, _PIECE))):
            file.write(piece)
            left -= len(piece)
    if left:
        raise EOFError(f"{_short(entry.name)} ends {left} bytes early")
    place.chmod(0o755 if entry.mode & 0o100 else 0o644)


def _link(path: Path, folder: Path, links: Sequence[tuple[Path, Entry]]) -> None:
    for place, entry in links:
        _place(path, folder, entry.name)  # no link is on its path yet
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(entry.target or "")
    root = folder.resolve()
    for _, entry in links:
        try:
            inside = _place(path, folder, entry.name).resolve().is_relative_to(root)
        except (OSError, RuntimeError):  # a cycle
            inside = False
        if not inside:
            raise _refusal(path, f"its link {_short(entry.name)} leads outside, to {_short(entry.target or '')}")


def _place(path: Path, folder: Path, name: str) -> Path:
    """Return the path of an entry; files come before links, so no part of it is a link."""
    pure = PurePosixPath(name)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or "\0" in name:
        raise _refusal(path, f"a name inside it is not a path below its folder: {_short(name)}")
    if len(name) > _LONGEST_PATH or len(pure.parts) > _DEEPEST:
        raise _refusal(path, f"a name inside it is longer than {_LONGEST_PATH} or deeper than {_DEEPEST} folders")
    place = folder.joinpath(*pure.parts)
    above = place.parent
    while above != folder:
        if above.is_symlink():
            raise _refusal(path, f"{_short(name)} lies behind a link")
        above = above.parent
    return place


def _entries(path: Path) -> Iterator[Entry]:
    with closing(_of_zip(path) if path.name.lower().endswith((".zip", ".whl")) else _of_tar(path)) as entries:
        yield from entries


def _counted(path: Path, count: int) -> None:
    if count > MOST_FILES:
        raise _refusal(path, f"it holds more than {MOST_FILES} files")


def _of_zip(path: Path) -> Generator[Entry]:
    with path.open("rb") as raw:
        bounded = _Bounded(raw, MOST_HEADERS)
        with zipfile.ZipFile(cast("IO[bytes]", bounded)) as archive:
            _counted(path, len(archive.infolist()))
            bounded.left = 2 * path.stat().st_size + MOST_HEADERS  # each byte is read once, plus local headers
            for info in archive.infolist():
                mode = info.external_attr >> 16
                if info.is_dir():
                    continue
                if info.flag_bits & 1:
                    raise _refusal(path, f"{_short(info.filename)} is encrypted")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise _refusal(path, f"{_short(info.filename)} is neither stored nor deflated")
                with archive.open(info) as data:
                    if stat.S_ISLNK(mode):
                        yield Entry(info.filename, target=data.read(_LONGEST_PATH).decode("utf-8", "replace"))
                    else:
                        yield Entry(info.filename, info.file_size, mode, data=data)


def _of_tar(path: Path) -> Generator[Entry]:
    with path.open("rb") as raw, closing(_decompressed(raw)) as plain:
        bounded = _Forward(plain, _MOST_HEADER)
        headers, count = MOST_HEADERS, 0
        with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r:") as tar:
            while (member := tar.next()) is not None:
                headers -= _MOST_HEADER - bounded.left
                count += 1
                _counted(path, count)
                if headers < 0:
                    raise _refusal(path, f"its headers take more than {MOST_HEADERS >> 20} MiB")
                if member.issym():
                    yield Entry(member.name, target=member.linkname)
                elif member.islnk():
                    yield Entry(member.name, same=member.linkname)
                elif member.isreg():
                    bounded.left = member.size + _MOST_HEADER
                    yield Entry(member.name, member.size, member.mode, data=tar.extractfile(member))
                elif not member.isdir():
                    raise _refusal(path, f"{_short(member.name)} is neither file, folder nor link")
                bounded.left = _MOST_HEADER


def _decompressed(raw: BinaryIO) -> BinaryIO:
    """Open a file for streaming decompression."""
    head = raw.read(6)
    raw.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw))
    if head.startswith(b"BZh"):
        return cast("BinaryIO", bz2.BZ2File(raw))
    return cast("BinaryIO", io.BufferedReader(_Xz(raw))) if head == b"\xfd7zXZ\0" else raw


class _Xz(io.RawIOBase):
    """Contents of an xz file; unlike in `lzma.LZMAFile`, the decoder's memory is limited."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decoder = lzma.LZMADecompressor(memlimit=_MOST_MEMORY)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  # whatever has memory
        """Fill part of `buffer`; return 0 at the end."""
        view = memoryview(buffer).cast("B")
        while True:
            more = b""
            if self._decoder.eof:  # another stream may follow
                more = (self._decoder.unused_data or self._raw.read(_PIECE)).lstrip(b"\0")
                if not more:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=_MOST_MEMORY)
            elif self._decoder.needs_input and not (more := self._raw.read(_PIECE)):
                raise EOFError("the compressed data end early")
            if piece := self._decoder.decompress(more, len(view)):
                view[: len(piece)] = piece
                return len(piece)


class _Bounded:
    """A file that limits further reads to `left` bytes; the readers trust sizes in headers."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file = file
        self.left = left

    def read(self, size: int = -1) -> bytes:
        """Read as many bytes as there are; ValueError for more than `left`."""
        data = self._file.read(size if 0 <= size <= self.left else self.left + 1)
        if len(data) > self.left:
            raise ValueError("its headers are larger than those of a build")
        self.left -= len(data)
        return data

    def seek(self, to: int, whence: int = 0) -> int:
        """Seek in the file."""
        return self._file.seek(to, whence)

    def tell(self) -> int:
        """Return the position in the file."""
        return self._file.tell()

    def seekable(self) -> bool:
        """Return True."""
        return True


class _Forward(_Bounded):
    """A bounded file that is read forward only, as for compressed data."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        super().__init__(file, left)
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        """Read as `_Bounded` does."""
        data = super().read(size)
        self._at += len(data)
        return data

    def seek(self, to: int, _whence: int = 0) -> int:
        """Skip to position `to`; ValueError for a position before the current one."""
        if to < self._at:
            raise ValueError("a seek backwards")
        while self._at < to and (data := self._file.read(min(to - self._at, _PIECE))):
            self._at += len(data)
        return self._at

    def tell(self) -> int:
        """Return the number of bytes read."""
        return self._at


def _short(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…")


def _refusal(path: Path, why: str) -> UnavailableError:
    return UnavailableError(f"{path}: an archive of a build ({', '.join(SUFFIXES)}) expected; {why}")
