"""Counts instructions and cache misses of the timed steps of a unit.

A `Counter` is a tool that runs the backend's process and counts inside ggml's graph compute only, so Python, transfers
and the building of graphs do not count. `Callgrind` executes on a simulated processor: with one thread, the same build
gives the same number of instructions each time, however busy the machine is. Its caches have fixed sizes.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter as Sums
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, UnavailableError
from conformance.process import spawn_command
from conformance.run.isolation.isolate import process_of

from .measure import Opener, play, restore
from .units import Unit

FUNCTION = "ggml_backend_graph_compute_async"
"""Exported function in which events count; it computes graphs and splits of graphs."""
D1_COST, LL_COST = 10, 100
"""Estimated cycles of a miss of the first and of the last cache, as KCachegrind weighs them."""
CACHES = ("--I1=32768,8,64", "--D1=32768,8,64", "--LL=33554432,16,64")
"""Simulated caches: bytes, ways, bytes of a line."""
SLOWDOWN = 50
"""Factor of the time limit for a process on a simulated processor."""
PATIENCE = 60.0
"""Seconds to wait for an answer of a tool."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Events of the timed steps of a unit, without repetitions."""

    instructions: int
    d1: int
    """Misses of the first data cache, reads and writes."""
    ll: int
    """Misses of the last cache by data, reads and writes."""
    functions: Mapping[str, int] = field(default_factory=dict)
    """Function -> its own instructions, without those of functions that it calls."""
    calls: int = 1
    """Number of calls of `FUNCTION`."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a result; `cycles` estimates their cost."""
        cycles = self.instructions + D1_COST * self.d1 + LL_COST * self.ll
        misses = {"misses.d1": self.d1, "misses.ll": self.ll}
        return {"instructions": self.instructions, **misses, "cycles": cycles, "graphs": self.calls}

    def grown(self, before: Counts) -> tuple[str, float] | None:
        """Return the function that grew most, with its ratio; None if none did."""
        more = {f: n - before.functions[f] for f, n in self.functions.items() if before.functions.get(f)}
        if not more or more[name := max(more, key=more.__getitem__)] <= 0:
            return None
        return name, self.functions[name] / before.functions[name]


class Counter(Protocol):
    """A tool that counts events in `FUNCTION`, such as valgrind or `perf stat`."""

    under: tuple[str, ...]
    """Words of the command that runs the process."""

    def begin(self, pid: int) -> None:
        """Begin to count in the process; nothing counted before."""

    def take(self) -> Counts | None:
        """Return the counts since the last call; None if `FUNCTION` was not called."""


def check_callgrind() -> None:
    """Raise UnavailableError, with what to install, if valgrind is missing."""
    for tool in ("valgrind", "vgdb"):
        if shutil.which(tool) is None:
            raise UnavailableError(
                f"{tool} is not installed, so no instructions can be counted: install the package valgrind"
            )


class Callgrind:
    """Counts with valgrind's callgrind, in files of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._channel = f"--vgdb-prefix={folder}/vgdb"
        # Without hash randomisation the process allocates the same memory in each run. It starts without
        # instrumentation: importing Python's modules would take half a minute.
        self.under: tuple[str, ...] = (
            "env", "PYTHONHASHSEED=0", "valgrind", "--tool=callgrind", "--cache-sim=yes", *CACHES,
            "--instr-atstart=no", f"--toggle-collect={FUNCTION}", f"--dump-after={FUNCTION}", "--dump-line=no",
            f"--callgrind-out-file={folder}/counts", f"--log-file={folder}/log", self._channel,
        )  # fmt: skip

    def begin(self, pid: int) -> None:
        """Turn instrumentation on; UnavailableError if the tool cannot be reached."""
        command = ["vgdb", self._channel, f"--pid={pid}", "instrumentation", "on"]
        child = spawn_command(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            told, _ = child.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            child.release()
            raise UnavailableError(f"vgdb did not reach valgrind within {PATIENCE:g} s: is ptrace forbidden?") from None
        if child.returncode:
            raise UnavailableError(f"vgdb did not reach valgrind: {told.decode(errors='replace').strip()}")

    def take(self) -> Counts | None:
        """Return the sum of the files that callgrind wrote since the last call, and delete them."""
        found = sorted(self._folder.glob("counts.*"))
        parsed = [parse(f.read_text(encoding="utf-8", errors="replace")) for f in found]
        for file in found:
            file.unlink()
        return total(parsed) if parsed else None


@contextmanager
def callgrind() -> Iterator[Callgrind]:
    """Provide a `Callgrind` with a temporary folder; UnavailableError without valgrind."""
    check_callgrind()
    with tempfile.TemporaryDirectory(prefix="conformance-count-") as folder:
        yield Callgrind(Path(folder))


Tool = Callable[[], AbstractContextManager[Counter]]


def total(counts: list[Counts]) -> Counts:
    """Add counts."""
    functions: Sums[str] = Sums()
    for c in counts:
        functions.update(c.functions)
    instructions, d1, ll, calls = (
        sum(getattr(c, name) for c in counts) for name in ("instructions", "d1", "ll", "calls")
    )
    return Counts(instructions, d1, ll, functions, calls)


def parse(text: str) -> Counts:
    """Parse a file in callgrind's format; UnavailableError for another format or missing events."""
    events: list[str] = []
    totals: list[int] = []
    names: dict[str, str] = {}
    functions: Sums[str] = Sums()
    function, callee = "", False
    try:
        for line in text.splitlines():
            word, _, rest = line.partition(" ")
            if word == "events:":
                events = rest.split()
            elif word == "totals:":
                totals = list(map(int, rest.split()))
            elif word.startswith(("fn=", "cfn=")):
                number = word.partition("=")[2]
                name = names.setdefault(number, rest or number)
                function = function if word[0] == "c" else name
            elif word.startswith("calls="):
                callee = True  # the next line is the cost of the called function
            elif word and word[0] in "0123456789+-*":
                if not callee:
                    functions[function] += int(rest.partition(" ")[0] or 0)
                callee = False
        found = dict(zip(events, totals + [0] * (len(events) - len(totals)), strict=True))
        return Counts(found["Ir"], found["D1mr"] + found["D1mw"], found["DLmr"] + found["DLmw"], functions)
    except (ValueError, KeyError) as e:
        raise UnavailableError(
            f"a file of callgrind with events Ir, D1mr, D1mw, DLmr, DLmw expected, another one found ({e!r})"
        ) from None


def count(unit: Unit, case: Case, opener: Opener, tool: Counter) -> Counts:
    """Count the timed steps of a unit once; `opener` starts the backend under `tool`.

    Unless the unit is `fresh`, its steps run once before, which builds what is built once and fills the caches.

    Raises:
        UnavailableError: it cannot be counted; the message says why and what to do.
        BackendError: the backend failed.
    """
    try:
        backend = opener()
        try:
            own = process_of(backend)
            if own is None or own.threads not in (None, 1):
                raise UnavailableError("counting needs a backend with one process and one thread")
            with backend.open(case) as session:
                tool.begin(own.pid)
                if not unit.fresh:
                    play(session, case.steps)
                    restore(session, case)
                play(session, case.steps[: unit.first])
                tool.take()
                play(session, case.steps[unit.first :])
                counts = tool.take()
        finally:
            backend.close()
    except BackendCrashError as e:
        if e.died != "SIGILL":
            raise
        raise UnavailableError(
            "valgrind does not know an instruction of this build (AVX-512 is such a one): count a build without it, "
            "or if it has several CPU libraries choose one, as ggml?variant=haswell"
        ) from None
    if counts is None:
        raise UnavailableError(f"it does not call {FUNCTION}, in which instructions are counted")
    return counts
