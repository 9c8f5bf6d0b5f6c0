"""What a run was of: commit, branch and local changes of the checkout that the user stands in, and its CI job's page.

Nothing runs: git would start what a stranger's `.git/config` names (a file system monitor, a filter). Its files are
read instead, with a bound on each, and what they do not say plainly is left out.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from conformance.cgraph.case import JSON

MOST = 64 << 20
"""Bytes of one of git's files; a larger one is not read."""
ENTRIES = 50_000
"""Files of a checkout; of a larger one nobody says whether it has changes."""
CONTENT = 64 << 20
"""Bytes of files that are read to see whether one that was touched differs."""

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", re.ASCII)
_REF = re.compile(r"refs/(?!.*\.\.)[!-~][ -~]{0,250}", re.ASCII)
_LINK = re.compile(r"https://[A-Za-z0-9][A-Za-z0-9.-]{0,250}(:[0-9]{1,5})?(/[A-Za-z0-9/._~%+,;=&?#()!$*-]*)?", re.ASCII)
_LONGEST_LINK = 1000
_LINKS = (
    "CI_JOB_URL", "BUILD_URL", "CIRCLE_BUILD_URL", "BUILDKITE_BUILD_URL", "TRAVIS_JOB_WEB_URL", "DRONE_BUILD_LINK"
)  # fmt: skip
_BRANCHES = (
    "GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BRANCH_NAME", "CIRCLE_BRANCH", "BUILDKITE_BRANCH"
)  # fmt: skip

_DIRECTORY, _SUBMODULE, _SYMLINK = 0o040000, 0o160000, 0o120000
_ASSUMED, _EXTENDED, _SKIPPED = 0x8000, 0x4000, 0x4000
_COMMIT_OBJECT = 1


class _Unknown(Exception):  # noqa: N818  # no error: git's files do not say it plainly
    """The answer is not there."""


def source(folder: Path | None = None, variables: Mapping[str, str] | None = None) -> dict[str, JSON]:
    """`commit`, `branch`, `dirty` and `ci` of a run, each only where it is known.

    `dirty` says whether a file that git follows differs from the commit. `branch` is the CI's where the checkout stands
    on none. It never fails: a checkout that cannot be read is none.

    Args:
        folder: in the checkout, or in none; default: the current directory.
        variables: the environment's; default: this process's.
    """
    variables = os.environ if variables is None else variables
    found: dict[str, JSON] = {}
    with suppress(_Unknown, OSError, ValueError, RuntimeError):
        found = _checkout(Path.cwd() if folder is None else folder)
    if "branch" not in found and (branch := next((b for k in _BRANCHES if (b := variables.get(k))), "")):
        found["branch"] = _one_line(branch)
    if link := ci_link(variables):
        found["ci"] = link
    return found


def ci_link(variables: Mapping[str, str]) -> str | None:
    """The page of the CI job that this is, by the variables that CI systems set; None elsewhere, or if it is no link.

    Only `https` without a user's name: it stands in reports that people click in.
    """
    server, project, run = (variables.get(f"GITHUB_{k}", "") for k in ("SERVER_URL", "REPOSITORY", "RUN_ID"))
    links = [f"{server}/{project}/actions/runs/{run}"] if server and project and run else []
    links += [variables[k] for k in _LINKS if variables.get(k)]
    return next((link for link in links if len(link) <= _LONGEST_LINK and _LINK.fullmatch(link)), None)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)[:250]


def _checkout(folder: Path) -> dict[str, JSON]:
    root, own, common = _places(folder.resolve())
    head = _text(own / "HEAD").strip()
    found: dict[str, JSON] = {}
    if head.startswith("ref:"):
        name = head.removeprefix("ref:").strip()
        if not _REF.fullmatch(name):
            raise _Unknown
        found["branch"] = _one_line(name.removeprefix("refs/heads/"))
        head = _resolved(name, own, common)
    if _COMMIT.fullmatch(head):
        found = {"commit": head, **found}
        with suppress(_Unknown, OSError, ValueError, struct.error, IndexError, zlib.error):
            found["dirty"] = _dirty(root, own, common, head)
    return found


def _places(folder: Path) -> tuple[Path, Path, Path]:
    """The checkout around a folder, its own git folder, and the one that all checkouts of the repository share."""
    for root in (folder, *folder.parents):
        own = root / ".git"
        if own.is_file():
            named = _text(own).strip()
            if not named.startswith("gitdir: "):
                raise _Unknown
            own = root / named.removeprefix("gitdir: ")
        if own.is_dir():
            shared = own / "commondir"
            return root, own, own / _text(shared).strip() if shared.is_file() else own
    raise _Unknown


def _resolved(name: str, own: Path, common: Path) -> str:
    for place in dict.fromkeys((own, common)):
        with suppress(OSError):
            return _text(place / name).strip()
    with suppress(OSError):
        for line in _text(common / "packed-refs").splitlines():
            commit, _, packed = line.partition(" ")
            if packed == name:
                return commit
    return ""


def _bytes(path: Path, most: int = MOST) -> bytes:
    """A plain file's bytes.

    Raises:
        _Unknown: it is none, or larger.
    """
    with _plain(path) as f:
        if os.fstat(f.fileno()).st_size > most:
            raise _Unknown
        return f.read(most)


def _plain(path: Path) -> BinaryIO:
    """A plain file, opened; a pipe or a device is not waited for."""
    f = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
        f.close()
        raise _Unknown
    return f


def _text(path: Path) -> str:
    return _bytes(path, 8 << 20).decode("utf-8")


@dataclass(frozen=True, slots=True)
class _Entry:
    path: bytes
    mode: int
    size: int
    modified: tuple[int, int]
    digest: bytes
    unmerged: bool


def _dirty(root: Path, own: Path, common: Path, commit: str) -> bool:
    """Whether a followed file differs from the index, or the index from the commit.

    Raises:
        _Unknown: git's files do not say it plainly.
    """
    index = _Index(_bytes(own / "index"), len(commit) // 2)
    left = CONTENT
    for entry in index.entries():
        if entry.unmerged:
            return True
        path = os.path.join(os.fsencode(root), entry.path)  # noqa: PTH118  # bytes, as git has them
        try:
            found = os.lstat(path)
        except OSError:
            return True
        if entry.mode == _SUBMODULE:
            continue
        if _untouched(found, entry):
            continue
        left -= found.st_size
        if left < 0:
            raise _Unknown
        if _blob(path, found, entry) != entry.digest:
            return True
    staged = index.tree()
    return staged != _tree_of(common / "objects", commit)


def _untouched(found: os.stat_result, entry: _Entry) -> bool:
    seconds, rest = divmod(found.st_mtime_ns, 10**9)
    then, part = entry.modified  # some builds of git keep whole seconds
    return found.st_size & 0xFFFFFFFF == entry.size and seconds & 0xFFFFFFFF == then and part in {0, rest}


def _blob(path: bytes, found: os.stat_result, entry: _Entry) -> bytes:
    """What git would call the file's content, unless a filter changes it on its way."""
    link = entry.mode == _SYMLINK
    if link != stat.S_ISLNK(found.st_mode) or not (link or stat.S_ISREG(found.st_mode)):
        return b""
    body = os.readlink(path) if link else _bytes(Path(os.fsdecode(path)))  # noqa: PTH115  # bytes, as git has them
    make = hashlib.sha256 if len(entry.digest) == 32 else hashlib.sha1
    return make(b"blob %d\0" % len(body) + body, usedforsecurity=False).digest()


class _Index:
    """git's list of the files it follows, version 2, 3 or 4 (`gitformat-index`)."""

    def __init__(self, raw: bytes, width: int) -> None:
        magic, self._version, self._count = struct.unpack_from(">4sII", raw)
        if magic != b"DIRC" or self._version not in (2, 3, 4) or self._count > ENTRIES:
            raise _Unknown
        self._raw, self._width, self._end = raw, width, 12

    def entries(self) -> Iterator[_Entry]:
        """Each of them, without those that git was told not to look at; all before `tree`."""
        at, path = 12, b""
        for _ in range(self._count):
            fields = struct.unpack_from(">10I", self._raw, at)
            digest = self._raw[at + 40 : at + 40 + self._width]
            (flags,) = struct.unpack_from(">H", self._raw, at + 40 + self._width)
            begin, at = at, at + 42 + self._width
            more = 0
            if flags & _EXTENDED and self._version > 2:
                (more,) = struct.unpack_from(">H", self._raw, at)
                at += 2
            if self._version == 4:
                cut, at = self._distance(at)
                path = path[: len(path) - cut]
            else:
                path = b""
            end = self._raw.index(b"\0", at)
            path += self._raw[at:end]
            at = end + 1 if self._version == 4 else begin + ((end - begin) // 8 + 1) * 8
            if path.startswith(b"/") or b".." in path.split(b"/"):
                raise _Unknown
            if fields[6] == _DIRECTORY:  # a sparse index
                raise _Unknown
            if not flags & _ASSUMED and not more & _SKIPPED:
                yield _Entry(path, fields[6], fields[9], (fields[2], fields[3]), digest, bool(flags & 0x3000))
        self._end = at

    def _distance(self, at: int) -> tuple[int, int]:
        value = self._raw[at] & 127
        while self._raw[at] & 128:
            at += 1
            value = ((value + 1) << 7) | (self._raw[at] & 127)
        return value, at + 1

    def tree(self) -> bytes:
        """The tree that a commit of the index would have.

        Raises:
            _Unknown: git has not written it down since something was added.
        """
        at, last = self._end, len(self._raw) - self._width
        while at + 8 <= last:
            name, size = struct.unpack_from(">4sI", self._raw, at)
            if name == b"TREE":
                _, _, rest = self._raw[at + 8 : at + 8 + size].partition(b"\0")
                counts, _, rest = rest.partition(b"\n")
                if int(counts.split()[0]) >= 0:
                    return rest[: self._width]
                raise _Unknown
            if name[:1].islower():  # what cannot be understood without it
                raise _Unknown
            at += 8 + size
        raise _Unknown


def _tree_of(objects: Path, commit: str) -> bytes:
    """The tree of a commit, which stands alone or in a pack."""
    try:
        body = zlib.decompressobj().decompress(_bytes(objects / commit[:2] / commit[2:]), 4096)
        begun, _, body = body.partition(b"\0")
        if not begun.startswith(b"commit "):
            raise _Unknown
    except OSError:
        body = _packed(objects / "pack", bytes.fromhex(commit))
    first = body.partition(b"\n")[0]
    if not first.startswith(b"tree "):
        raise _Unknown
    return bytes.fromhex(first.removeprefix(b"tree ").decode("ascii"))


def _packed(folder: Path, commit: bytes) -> bytes:
    """The beginning of a commit in one of the packs.

    Raises:
        _Unknown: it is in none, or only as a difference from another one.
    """
    for index in sorted(folder.glob("*.idx"))[:64]:
        offset = _offset(_bytes(index, 4 * MOST), commit)
        if offset is not None:
            with _plain(index.with_suffix(".pack")) as f:
                f.seek(offset)
                raw = f.read(4096)
            at = 0
            kind = raw[0] >> 4 & 7
            while raw[at] & 128:
                at += 1
            if kind != _COMMIT_OBJECT:
                raise _Unknown
            return zlib.decompressobj().decompress(raw[at + 1 :], 4096)
    raise _Unknown


def _offset(raw: bytes, wanted: bytes) -> int | None:
    """Where an object stands in a pack, by the pack's index (version 2)."""
    if raw[:8] != b"\xfftOc\0\0\0\2":
        raise _Unknown
    fan = struct.unpack_from(">256I", raw, 8)
    low, high, count = fan[wanted[0] - 1] if wanted[0] else 0, fan[wanted[0]], fan[255]
    names, width = 8 + 1024, len(wanted)
    while low < high:
        middle = (low + high) // 2
        name = raw[names + middle * width : names + (middle + 1) * width]
        if name == wanted:
            (at,) = struct.unpack_from(">I", raw, names + count * (width + 4) + 4 * middle)
            if at >> 31:
                (at,) = struct.unpack_from(">Q", raw, names + count * (width + 8) + 8 * (at & 0x7FFFFFFF))
            return int(at)
        low, high = (middle + 1, high) if name < wanted else (low, middle)
    return None
