"""A service that hunts planted faults: one request, and a reply for each event.

Cases are the outer loop and faults the inner one, so what a case should give is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.verdict import FAILURES, Result
from conformance.process.service import Closed, Service, failure
from conformance.run.runner import Runner
from conformance.suite import FAMILIES

from .faults import Fault
from .loader import load

TOGETHER = {"ops": 128}
"""Cases at a time, by family; trajectories come one by one."""


class Hunter(Runner):
    """A runner that asks whether something is wrong, and not where."""

    locates = False

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__()
        self._faults = {f.spec.name: f for f in faults}

    def _open(self, spec: Spec, isolate: bool | None) -> Backend:
        """A faulty backend once more, where a relation wants a second one."""
        fault = self._faults.get(spec.name)
        return super()._open(spec, isolate) if fault is None else load(fault, dict(spec.options))


def hunt(faults: Sequence[Fault], level: str, done: set[tuple[str, str]], start: dict[str, int]) -> Iterator[JSON]:
    """Run every family on every fault that names it, until it is noticed.

    Args:
        faults: what to hunt.
        level: which cases.
        done: (fault, family) pairs that need no more.
        start: family -> the first case to run, where a hunt before this one ended.
    """
    runner = Hunter(faults)
    for name, family in FAMILIES.items():
        hunted = [f for f in faults if name in f.families]
        ids = list(family.ids(level)) if hunted else []  # type: ignore[arg-type]  # checked by the command line
        size = TOGETHER.get(name, 1)
        for at in range(start.get(name, 0), len(ids), size):
            alive = [f for f in hunted if (f.name, name) not in done]
            if not alive:
                break
            yield {"event": "cases", "family": name, "at": at}
            cases = [runner.case(i) for i in ids[at : at + size]]
            for fault in alive:
                yield {"event": "runs", "fault": fault.name, "family": name, "case": ids[at]}
                wrong = next((r for r in runner.run(fault.spec, cases) if r.verdict in FAILURES), None)
                if wrong is not None:
                    done.add((fault.name, name))
                    yield _noticed(fault, name, wrong)
        for fault in hunted:
            if (fault.name, name) not in done:
                done.add((fault.name, name))
                yield {"event": "survived", "fault": fault.name, "family": name, "cases": len(ids)}


def _noticed(fault: Fault, family: str, wrong: Result) -> JSON:
    return {
        "event": "noticed",
        "fault": fault.name,
        "family": family,
        "case": wrong.case,
        "verdict": str(wrong.verdict),
        "detail": wrong.detail,
    }


def main() -> None:
    """Answer one request with all its events."""
    service = Service()
    with suppress(Closed):
        request, _ = service.receive()
        faults = [Fault(**{**f, "families": tuple(f["families"])}) for f in request["faults"]]
        try:
            for event in hunt(faults, request["level"], {(f, n) for f, n in request["done"]}, request["start"]):
                service.send(event)
        except ConformanceError as e:
            service.send(*failure(e, UsageError.__name__))
        else:
            service.send({"event": "end"})


if __name__ == "__main__":
    main()
