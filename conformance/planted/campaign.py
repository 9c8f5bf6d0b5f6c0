"""Hunts all faults in a worker process, and goes on where a fault takes the worker down: a crash is noticed too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Verdict
from conformance.process import Worker, WorkerDiedError
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
    """Hunt until the end ("") or until the worker dies: how it died."""
    request = {"faults": [asdict(f) for f in faults], "level": level, "done": list(state.done), "start": state.start}
    worker = Worker("conformance.planted.worker", time_limit=limit)
    try:
        event, _ = worker.ask(request)
        while True:
            hunt = state.take(event)
            if hunt is not None:
                progress(hunt)
            if state.ended:
                return ""
            event, _ = worker.receive()
    except WorkerDiedError as e:
        return str(e)
    finally:
        worker.close()
