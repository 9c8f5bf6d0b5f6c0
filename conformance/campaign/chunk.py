"""A task: a chunk of one backend's cases, run on a worker.

Requests, rows and replies are JSON; Dask wraps them in messages of its own, which hold pickles (docs/campaigns.md).
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from conformance import __version__
from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.judge.verdict import Result
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session import select
from conformance.run.session.environment import environment
from conformance.suite.batch import groups

ROWS = 64
"""Results of one message, at most: a scheduler keeps the last thousand messages."""
PERIOD = 1.0
"""Seconds after which results are sent however few they are."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a task is asked for."""

    number: int
    spec: Spec
    cases: Sequence[str]
    seconds: float
    """After which no case starts."""
    isolation: Isolation
    topic: str = ""
    """Under which results are sent."""
    names: dict[str, JSON] = field(default_factory=registry.pack)
    version: str = __version__

    def pack(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Chunk:
        """What `pack` wrote."""
        words = json.loads(text)
        spec = Spec(words["spec"]["name"], tuple(map(tuple, words["spec"]["options"])))
        return cls(**{**words, "spec": spec, "isolation": Isolation(**words["isolation"])})


@dataclass(frozen=True, slots=True)
class Reply:
    """How a task ended; its results were sent before."""

    left: Sequence[str]
    """Cases that had no time."""
    why: str = ""
    """Why the worker cannot run the backend at all; empty where it can."""
    worker: str = ""
    environment: dict[str, JSON] = field(default_factory=dict)
    seconds: float = 0.0
    """That the task took on its worker."""


class _Held(threading.local):
    """What a thread of a worker keeps from task to task: backends stay open."""

    runner: Runner | None = None
    isolation: Isolation | None = None
    names: dict[str, JSON] | None = None
    open: frozenset[Spec] = frozenset()
    """Backends that were found to be here."""


_HELD = _Held()


def run_chunk(text: str) -> dict[str, JSON]:
    """The task that Dask calls, with `Chunk.pack`; a `Reply` as a dict. Results go to the topic as they come."""
    from distributed import get_worker  # noqa: PLC0415  # only where it is installed

    chunk, worker = Chunk.unpack(text), get_worker()

    def send(rows: Sequence[JSON]) -> None:
        worker.log_event(chunk.topic, {"number": chunk.number, "rows": pack_rows(rows)})

    reply = execute(chunk, send)
    return {**asdict(reply), "worker": worker.address}


def pack_rows(rows: Sequence[JSON]) -> bytes:
    """Rows as a message holds them."""
    return zlib.compress(json.dumps(rows).encode(), 1)


def unpack_rows(data: bytes) -> JSON:
    """What `pack_rows` packed."""
    return json.loads(zlib.decompress(data))


def execute(chunk: Chunk, send: Callable[[Sequence[JSON]], None]) -> Reply:
    """Run a chunk until its time is over; hand each result to `send`, some at a time."""
    began = time.monotonic()
    rows: list[JSON] = []
    sent, done = began, 0
    try:
        _check(chunk)
        for results in _results(chunk, began + chunk.seconds):
            rows += [r.to_json() for r in results]
            done += len(results)
            if len(rows) >= ROWS or time.monotonic() - sent > PERIOD:
                for start in range(0, len(rows), ROWS):
                    send(rows[start : start + ROWS])
                rows, sent = [], time.monotonic()
    except ConformanceError as e:
        return Reply(list(chunk.cases[done:]), str(e), environment=environment())
    finally:
        if rows:
            send(rows)
    return Reply(list(chunk.cases[done:]), environment=environment(), seconds=time.monotonic() - began)


def _check(chunk: Chunk) -> None:
    if chunk.version != __version__:
        raise UnavailableError(
            f"ggml-conformance {chunk.version} expected, as where the campaign runs; this worker has {__version__}"
        )


def _results(chunk: Chunk, ends: float) -> Iterator[list[Result]]:
    runner, spec = _runner(chunk), chunk.spec
    if spec not in _HELD.open:  # a backend that is not here would fail each case
        select.probe(spec, chunk.isolation)
        _HELD.open |= {spec}
    size = runner.batch_size(spec)
    for start in range(0, len(chunk.cases), size):
        batch = chunk.cases[start : start + size]
        for cases in groups(map(runner.case, batch)):
            if time.monotonic() > ends:
                return
            yield runner.run(spec, cases)


def _runner(chunk: Chunk) -> Runner:
    """This thread's runner; a new one where a campaign has other names or limits than the one before."""
    if _HELD.runner is None or (_HELD.isolation, _HELD.names) != (chunk.isolation, chunk.names):
        if _HELD.runner is not None:
            _HELD.runner.close()
        registry.unpack(chunk.names)
        _HELD.runner = Runner(isolation=chunk.isolation)
        _HELD.isolation, _HELD.names, _HELD.open = chunk.isolation, chunk.names, frozenset()
    return _HELD.runner
