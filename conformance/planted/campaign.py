"""Hunts all faults in a worker process, and goes on where a fault takes the worker down: a crash is noticed too."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Verdict
from conformance.process import Child, end_group, spawn
from conformance.suite.family import Level

from .faults import Fault

TIME_LIMIT = 300.0
"""Seconds without an event after which the worker is ended: the fault it ran hangs."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """What one family made of one fault."""

    fault: str
    family: str
    noticed: bool
    case: str = ""
    """The first case that noticed it."""
    verdict: str = ""
    detail: str = ""


@dataclass(slots=True)
class _State:
    done: dict[tuple[str, str], Hunt] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    running: JSON = None
    ended: bool = False

    def take(self, event: JSON) -> Hunt | None:
        kind = event["event"]
        if kind == "error":
            raise UsageError(event["message"])
        if kind == "end":
            self.ended = True
        elif kind == "cases":
            self.start[event["family"]] = event["at"]
        elif kind == "runs":
            self.running = event
        else:
            fields = {k: event[k] for k in ("fault", "family", "case", "verdict", "detail") if k in event}
            return self.note(Hunt(noticed=kind == "noticed", **fields))
        return None

    def note(self, hunt: Hunt) -> Hunt:
        self.done[hunt.fault, hunt.family] = hunt
        return hunt


def run(
    faults: Sequence[Fault], level: Level, progress: Callable[[Hunt], None] = lambda _: None, limit: float = TIME_LIMIT
) -> list[Hunt]:
    """What every family that a fault names made of it, in the order of the faults.

    Raises:
        UsageError: a fault cannot be planted.
    """
    state = _State()
    while not state.ended:
        before = len(state.done)
        last_words = _one_worker(faults, level, state, progress, limit)
        if not state.ended:
            at = state.running
            if at is None or (len(state.done) == before and (at["fault"], at["family"]) in state.done):
                raise UsageError(f"planted: the worker died before it ran a case: {last_words}")
            progress(
                state.note(Hunt(at["fault"], at["family"], True, at["case"], str(Verdict.CRASH), last_words))  # noticed
            )
    return [state.done[f.name, family] for f in faults for family in f.families if (f.name, family) in state.done]


def _one_worker(
    faults: Sequence[Fault], level: Level, state: _State, progress: Callable[[Hunt], None], limit: float
) -> str:
    request = {"faults": [asdict(f) for f in faults], "level": level, "done": list(state.done), "start": state.start}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as words:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        worker = spawn(
            "conformance.planted.worker", [str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words
        )
        try:
            _listen(worker, state, progress, limit)
        finally:
            end_group(worker)
            if worker.stdout:
                worker.stdout.close()
        words.seek(0, 2)
        words.seek(max(0, words.tell() - 400))
        said = " ".join(words.read().decode(errors="replace").split())
    return f"its process died (exit status {worker.returncode}): {said}"


def _listen(worker: Child, state: _State, progress: Callable[[Hunt], None], limit: float) -> None:
    if worker.stdout is None:
        return
    late = threading.Timer(limit, end_group, [worker])
    late.start()
    try:
        for line in worker.stdout:
            late.cancel()
            late = threading.Timer(limit, end_group, [worker])
            late.start()
            hunt = state.take(json.loads(line))
            if hunt is not None:
                progress(hunt)
    finally:
        late.cancel()
