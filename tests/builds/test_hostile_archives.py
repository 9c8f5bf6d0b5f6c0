"""An archive of a stranger ends in one line and in bounded memory, whatever it says of itself."""

from __future__ import annotations

import gzip
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import conform

pytestmark = pytest.mark.skipif(os.name != "posix", reason="measures memory as POSIX counts it")
MIB = 1 << 20
MOST = 200 * MIB
"""Bytes that reading any of them may add to the memory of a process that does nothing."""


def _header(name: str, kind: bytes, size: int, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info.tobuf(tarfile.GNU_FORMAT)


def _zeros(count: int, byte: bytes = b"a") -> Iterator[bytes]:
    for _ in range(count // MIB):
        yield byte * MIB


def _gz(path: Path, *parts: bytes | Iterator[bytes]) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as made:
        for part in parts:
            for piece in [part] if isinstance(part, bytes) else part:
                made.write(piece)
    return path


def _missing(folder: Path) -> Path:
    return _gz(folder / "b.tgz", _header("a.so", tarfile.LNKTYPE, 0, "absent.so"), bytes(1024))


def _long_name(folder: Path) -> Path:
    size = 300 * MIB
    return _gz(folder / "b.tgz", _header("././@LongLink", b"L", size), _zeros(size), _header("a", b"0", 0), bytes(1024))


def _pax(folder: Path) -> Path:
    size = 300 * MIB
    return _gz(folder / "b.tgz", _header("pax", b"x", size), _zeros(size), _header("a", b"0", 0), bytes(1024))


def _chain(folder: Path) -> Path:
    record = b"13 comment=ab\n"
    pax = _header("pax", b"g", len(record)) + record.ljust(512, b"\0")
    return _gz(folder / "b.tgz", pax * 200_000, _header("a", b"0", 0), bytes(1024))


def _folders(folder: Path) -> Path:
    each = _header("a", tarfile.DIRTYPE, 0)
    return _gz(folder / "b.tgz", (each * 2048 for _ in range(300)), bytes(1024))


def _sparse(folder: Path) -> Path:
    head = bytearray(_header("a", b"S", 512))
    head[482] = 1  # more of the map follows
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    more = (b"00000000001\0" * 42).ljust(504, b"\0") + b"\1" + bytes(7)
    return _gz(folder / "b.tgz", bytes(head), (more * 2048 for _ in range(256)), bytes(1024))


def _negative(folder: Path) -> Path:
    head = bytearray(_header("a.so", b"0", 0))
    head[124:136] = b"\xff" * 11 + b"\xfb"  # base 256: -5
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return _gz(folder / "b.tgz", bytes(head), bytes(10240))


def _window(folder: Path) -> Path:
    path = folder / "b.tar.xz"
    data = bytearray(lzma.compress(bytes(1024), filters=[{"id": lzma.FILTER_LZMA2, "preset": 0}]))
    header = data[12 : 12 + 4 * (data[12] + 1)]
    header[header.index(b"\x21\1") + 2] = 40  # 4 GiB, by hand: an encoder of that would take them
    header[-4:] = struct.pack("<I", zlib.crc32(bytes(header[:-4])))
    data[12 : 12 + len(header)] = header
    path.write_bytes(bytes(data))
    return path


def _zip(folder: Path, change: Callable[[bytearray], None]) -> Path:
    path = folder / "b.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("libggml.so", b"\x7fELF")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(bytes(data))
    return path


def _encrypted(folder: Path) -> Path:
    def change(data: bytearray) -> None:
        data[6] |= 1
        data[data.index(b"PK\1\2") + 8] |= 1

    return _zip(folder, change)


def _bzip2(folder: Path) -> Path:
    path = folder / "b.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as made, made.open("libggml.so", "w", force_zip64=True) as file:
        for piece in _zeros(300 * MIB):
            file.write(piece)
    return path


def _directory(folder: Path) -> Path:
    path = folder / "b.whl"
    entry = zipfile.ZipInfo("a" * 8)
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(entry, b"")
    data = path.read_bytes()
    at, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    n = (80 * MIB) // (end - at)
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, n * (end - at), at, 0)
    path.write_bytes(data[:at] + data[at:end] * n + tail)
    return path


def _deep(folder: Path) -> Path:
    path = folder / "b.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a/" * 500 + "libggml.so", b"")
    return path


ARCHIVES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a hard link to nothing": (_missing, "its hard link 'a.so' leads to no file before it"),
    "a name of 300 MiB": (_long_name, "its headers are larger"),
    "a pax header of 300 MiB": (_pax, "its headers are larger"),
    "a chain of pax headers": (_chain, "it cannot be read to its end"),
    "600,000 folders": (_folders, "it holds more than 100000 files"),
    "a map of 11 million holes": (_sparse, "its headers are larger"),
    "a negative size": (_negative, "it "),
    "a window of 4 GiB": (_window, "it cannot be read to its end: Memory usage limit"),
    "encrypted": (_encrypted, "'libggml.so' is encrypted"),
    "a bomb of bzip2": (_bzip2, "'libggml.so' is neither stored nor deflated"),
    "a directory of 80 MiB": (_directory, "its headers are larger"),
    "a deep name": (_deep, "a name inside it is longer than"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_one_line_in_bounded_memory(tmp_path: Path, name: str) -> None:
    """What each is refused for; and how much memory it took, beside an interpreter that reads a small archive."""
    make, words = ARCHIVES[name]
    path = make(tmp_path)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from conformance.builds import archive\n"
        "from conformance.ggml.errors import UnavailableError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    archive.unpack(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except UnavailableError as e:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, tmp_path / "cache"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    taken, _, message = line.partition(" ")
    assert f"{path.name}: an archive of a build" in message
    assert words in message
    assert int(taken) * 1024 < MOST
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["a hard link to nothing", "encrypted", "a name of 300 MiB"])
def test_a_hostile_archive_as_a_library_is_bad_input(tmp_path: Path, name: str) -> None:
    """Exit code 2 and one line, as of any backend that is not here."""
    path = ARCHIVES[name][0](tmp_path)
    done = conform("run", "--backend", f"ggml?lib={path}", "--case", "ops/SUM-f32-ne=5x3@1",
                   env={"XDG_CACHE_HOME": str(tmp_path / "cache")})  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    assert "an archive of a build" in done.stderr
