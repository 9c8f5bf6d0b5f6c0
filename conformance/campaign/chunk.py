"""A task: a chunk of one backend's cases, run on a worker.

Requests and replies are JSON; Dask wraps them in its own messages, which contain pickles (docs/ci.md).
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path

import conformance
from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.process import FOREVER
from conformance.run.isolation.isolate import Isolation
from conformance.run.oracle import Oracle
from conformance.run.runner import Runner
from conformance.run.session import expected
from conformance.run.session.environment import environment
from conformance.run.session.journal import Journal
from conformance.run.session.settings import WaiverBook
from conformance.suite.batch import groups
from conformance.testrun import SLOW, Pace

SECONDS = 10.0
"""Time limit of a task in seconds. Remaining cases return to the queue."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The request of a task."""

    number: int
    spec: Spec
    cases: Sequence[str]
    isolation: Isolation
    seconds: float = SECONDS
    """Seconds after which only the first case may start."""
    exact: bool = False
    """True to also record the NMSE from values without declared rounding."""
    locates: bool = True
    """`Runner.locates`"""
    checks_stale_state: bool = True
    """`Runner.checks_stale_state`"""
    each: float = inf
    """Seconds of a request, if less than the limit of `isolation`."""
    journals: str | None = None
    """Folder on this machine for the journal of the lane, which a later run recovers."""
    save_failures: str | None = None
    """Folder on this machine for failing cases."""
    waivers: Sequence[str] = ()
    """`WaiverBook.pack` of the backend: a known crash is not located or repeated."""
    names: dict[str, JSON] = field(default_factory=registry.pack)
    version: str = field(default_factory=lambda: conformance.__version__)

    def pack(self) -> str:
        """Return the request as JSON, without the end of the run, a time of this machine's clock."""
        words = asdict(self)
        del words["isolation"]["until"]
        return json.dumps(words)

    @classmethod
    def unpack(cls, text: str) -> Chunk:
        """Read the output of `pack`."""
        words = json.loads(text)
        spec = Spec(words["spec"]["name"], tuple(map(tuple, words["spec"]["options"])))
        return cls(**{**words, "spec": spec, "isolation": Isolation(**words["isolation"])})


@dataclass(frozen=True, slots=True)
class Reply:
    """The results of a task, or those that it has so far."""

    rows: Sequence[JSON]
    """Results of its next cases, with waivers applied, as JSON."""
    why: str = ""
    """Why the worker cannot run the backend; empty where it can."""
    worker: str = ""
    environment: dict[str, JSON] = field(default_factory=dict)
    undeclared: bool = False
    """True if the rounding of the backend is not known."""
    ended: bool = True
    """False if the task goes on, and another reply follows."""

    def pack(self) -> bytes:
        """Return the reply as compressed JSON."""
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Read the output of `pack`."""
        return cls(**json.loads(zlib.decompress(data)))


_HELD = threading.local()
"""Per-thread state between tasks: `runner`, its `key`, `journal` and `paces` by backend."""


def run_chunk(text: str) -> bytes:
    """Run a chunk as Dask's task: from `Chunk.pack` to `Reply.pack`."""
    from distributed import get_worker  # noqa: PLC0415  # an extra

    return execute(Chunk.unpack(text), get_worker().address).pack()


def execute(chunk: Chunk, worker: str = "", show: Callable[[Reply], None] | None = None) -> Reply:
    """Run a chunk until its time is over; `show` gets the results of each group at once."""
    end, rows, why, ran = time.monotonic() + chunk.seconds, list[JSON](), "", 0

    def is_late() -> bool:
        return time.monotonic() > end

    undeclared = False
    try:
        runner = _runner(chunk)
        runner.waivers = WaiverBook.unpack(chunk.spec, chunk.waivers)
        runner.waivers.ask(lambda spec: runner.backend(spec).info())
        runner.locates, runner.checks_stale_state = chunk.locates, chunk.checks_stale_state
        full = runner.batch_size(chunk.spec)
        pace = _HELD.paces.setdefault(chunk.spec, Pace(SLOW))  # most of a batch may crash
        while (batch := chunk.cases[ran : ran + pace.size(full)]) and not (ran and is_late()):
            start = time.monotonic()
            for cases in groups(map(runner.case, batch)):
                if ran and is_late():
                    break
                with runner.within(FOREVER.request(chunk.each)):
                    rows += [r.to_json() for r in runner.run(chunk.spec, cases)]
                ran += len(cases)
                if show is not None:
                    show(Reply(rows, worker=worker, ended=False))
                    rows = []
            pace.took(time.monotonic() - start, len(batch))
        undeclared = chunk.spec in runner.undeclared
    except ConformanceError as e:
        why = str(e)
    return Reply(rows, why, worker, environment(), undeclared)


def _runner(chunk: Chunk) -> Runner:
    """Return this thread's runner; a new one if the run has other names or limits.

    UnavailableError if the worker has another version or lacks the backend, since each case would fail.
    """
    if chunk.version != conformance.__version__:
        raise UnavailableError(
            f"ggml-conformance {chunk.version} expected, the version that started the run; this worker has "
            f"{conformance.__version__}"
        )
    key = chunk.isolation, chunk.names, chunk.exact, chunk.journals, chunk.save_failures
    if getattr(_HELD, "key", None) != key:
        if hasattr(_HELD, "runner"):
            _HELD.runner.close()
            end_journal()
        registry.unpack(chunk.names)
        journal = None if chunk.journals is None else Journal(Path(chunk.journals))
        save = None if chunk.save_failures is None else Path(chunk.save_failures)
        oracle = Oracle(exact=chunk.exact, disk=expected.here())
        _HELD.key, _HELD.journal, _HELD.paces = key, journal, {}
        _HELD.runner = Runner(isolation=chunk.isolation, oracle=oracle, journal=journal, save_failures=save)
    held: Runner = _HELD.runner
    held.backend(chunk.spec)
    return held


def end_journal() -> None:
    """Remove the journal of this thread's runner: no case runs any more."""
    if (journal := getattr(_HELD, "journal", None)) is not None:
        journal.end(written=False)
