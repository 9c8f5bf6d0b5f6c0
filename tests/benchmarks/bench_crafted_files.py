"""Crafted case files by the thousand.

    PYTHONPATH=tests/helpers/graphs python tests/benchmarks/bench_crafted_files.py [COUNT [FIRST [BACKEND]]]

Prints what became of them and what should not have; exit code 1 where there is any of the latter.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers" / "graphs"))
from crafted_files import Harness


def main() -> int:
    """Run them."""
    count, first = (int(a) for a in (*sys.argv[1:3], *("20000", "0")[len(sys.argv[1:3]) :]))
    isolated = sys.argv[3] if len(sys.argv) > 3 else "ggml"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        files = Path(folder, "files")
        files.mkdir()
        harness = Harness(files, isolated=isolated or None)
        for seed in range(first, first + count):
            harness.run(seed)
        harness.close()
        beside = [p.name for p in Path(folder).iterdir() if p != files]
        os.chdir("/")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(
        f"{count} files in {time.monotonic() - start:.0f} s, peak {peak >> 10} MiB; beside them: {beside}\n"
    )
    for what, n in sorted(harness.found.items()):
        sys.stdout.write(f"{n:8,} {what}\n")
    for line in (*harness.noted, *harness.wrong):
        sys.stdout.write(f"{ascii(line)[:300]}\n")
    return int(bool(harness.wrong or beside))


if __name__ == "__main__":
    sys.exit(main())
