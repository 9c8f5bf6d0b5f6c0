"""A load on a history: processes that write run after run, and one that reads, for some seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from run_files import document

from conformance.perf.history import History, runs

ROWS = 60


@dataclass(frozen=True, slots=True)
class Load:
    """What came of it."""

    written: int
    """Runs that the writers say they committed, of `ROWS` rows each."""
    lost: int
    """Those of them that are not there whole."""
    reads: int
    """Times that the reader read all runs; it never saw half of one, nor fewer than before."""


def load(path: Path, seconds: float, writers: int = 2) -> Load:
    """Write by `writers` processes, which find no store, and read by this one for `seconds`; a failure is an error."""
    started = [
        subprocess.Popen([sys.executable, __file__, str(path), str(n), str(seconds)], stdout=subprocess.PIPE, text=True)
        for n in range(writers)
    ]
    while not path.exists() and any(p.poll() is None for p in started):
        time.sleep(0.001)
    reads, last, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with closing(History(path)) as h:
            seen = [r.rows for r in runs(h)]
        if set(seen) - {ROWS} or len(seen) < last:
            raise AssertionError(f"{len(seen)} runs of {set(seen)} rows read, after {last}")
        reads, last = reads + 1, len(seen)
    said: list[str] = []
    for p in started:
        out, _ = p.communicate()
        if p.returncode:
            raise AssertionError(f"a writer ended with {p.returncode}")
        said += out.splitlines()
    with closing(History(path)) as h:
        there = {r.run for r in runs(h) if r.rows == ROWS}
    return Load(len(said), sum(line.split()[0] not in there for line in said), reads)


def write(path: Path, name: int, seconds: float) -> None:
    """Add run after run and say the name of each that is in; the two writers share some texts, and some runs."""
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        shared = n % 5 == 0  # both write this one: it must be there once
        run = f"{255 if shared else name:02x}{n:030x}"
        cases = [(f"ops/ADD-f32+f32-a={i}x{n % 7}@{name if i % 2 else 0}", "x", "PASS") for i in range(ROWS)]
        if shared:
            cases = [(case.partition("@")[0] + "@0", backend, verdict) for case, backend, verdict in cases]
        with closing(History(path, create=True)) as h:
            h.add(document(cases, run=run))
        print(run, ROWS, flush=True)  # noqa: T201  # what its starter reads
        n += 1


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
