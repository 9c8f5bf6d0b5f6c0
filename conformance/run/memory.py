"""How much memory a process holds, and how much a machine has. A limit on what is resident, for there is no other:
RLIMIT_AS counts what a JIT or a GPU driver maps and never touches, RLIMIT_DATA still counts reserved heaps.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from conformance.cgraph.errors import UsageError

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)


def resident(pid: int) -> int | None:
    """Bytes of physical memory that process `pid` holds: from /proc, elsewhere from `ps`; None where nobody tells."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_bytes().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, AttributeError):
        pass
    try:
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, timeout=5, check=True)  # noqa: S603  # a number of ours
        return int(done.stdout) << 10
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def physical() -> int | None:
    """Bytes of memory that the machine has; None where nobody tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def parse_size(text: str) -> int:
    """Bytes of `4G`, `512 MiB`, `1000000`; units are powers of 1024.

    Raises:
        UsageError: the text has another form, or says nothing at all.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1 << _UNITS[match[2].lower()])) if match else 0
    if size < 1:
        raise UsageError(f"memory limit: a size like 4G or 512M expected, {text!r} given")
    return size
