"""Hunt all faults in a worker process; start another where a fault kills it, since a crash is noticed, too.

As a script it is that worker: it answers one request with a reply for each event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.backend.strict import error_text
from conformance.case.case import JSON, Case
from conformance.ggml.errors import BackendError, ConformanceError, UsageError
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.process import Worker, WorkerDiedError
from conformance.process.memory import mappings
from conformance.process.service import Closed, Service, failure
from conformance.run.runner import Runner
from conformance.suite import FAMILIES, ops
from conformance.suite.family import Level

from .faults import Bundle, Fault, PlantError, control, load
from .reach import Probe

TURN = 400
"""Runs after which a worker gives way to another if its mappings of memory are more than `CROWDED`, or unknown."""
CROWDED = 30_000
"""OpenVINO keeps some ninety mappings for each case that it has compiled, and Linux lets a process have 65,530."""
TIME_LIMIT = 300.0
"""Seconds without an event after which the worker is killed: its fault hangs."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """Whether one family noticed one fault."""

    fault: str
    family: str
    noticed: bool
    case: str = ""
    """The first one that noticed it."""
    verdict: str = ""
    detail: str = ""


@dataclass(slots=True)
class _State:
    progress: Callable[[Hunt], None]
    once: bool
    done: dict[tuple[str, str], Hunt] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    """Faults with which some case that passes without them passes still, or that none reaches."""
    proven: bool = False
    """Whether a case passes without any fault."""
    running: JSON = None
    ended: bool = False

    def take(self, event: JSON) -> None:
        kind = event["event"]
        if kind in ("end", "turn"):
            self.ended = kind == "end"
        elif kind == "cases":
            self.start[event["family"]] = event["at"]
        elif kind == "runs":
            self.running = event
        elif kind == "passes":
            self.passed |= set(event["faults"])
            self.proven = True
        else:
            fields = {k: event[k] for k in ("fault", "family", "case", "verdict", "detail") if k in event}
            self.note(Hunt(noticed=kind == "noticed", **fields))

    def note(self, hunt: Hunt) -> None:
        for family in FAMILIES if self.once and hunt.noticed else (hunt.family,):
            self.done.setdefault((hunt.fault, family), hunt)
        self.progress(hunt)


def run(
    faults: Sequence[Fault],
    level: Level,
    progress: Callable[[Hunt], None] = lambda _: None,
    limit: float = TIME_LIMIT,
    *,
    once: bool = False,
) -> list[Hunt]:
    """Whether each family that a fault names noticed it, in the order of the faults.

    `once`: until one of its families did, and by those cases alone that reach its place. UsageError if a fault cannot
    be planted.
    """
    state = _State(progress, once)
    while not state.ended:
        before = len(state.done)
        last_words = _one_worker(faults, level, state, limit)
        if last_words:
            at = state.running
            if (
                at is None
                or at["fault"] == Probe.name
                or (len(state.done) == before and (at["fault"], at["family"]) in state.done)
            ):
                raise UsageError(f"planted: the worker died without a fault: {last_words}")
            state.note(Hunt(at["fault"], at["family"], True, at["case"], str(Verdict.CRASH), last_words))  # noticed
    if once and state.proven:
        _refusing(faults, state)
    found = [state.done[f.name, family] for f in faults for family in f.families if (f.name, family) in state.done]
    return list(dict.fromkeys(found))


NOTHING = "nothing passes"
"""Verdict on a fault by which an adapter refuses whatever it took: a run in which nothing passes on a backend fails."""


def _refusing(faults: Sequence[Fault], state: _State) -> None:
    noticed = {name for (name, _), h in state.done.items() if h.noticed}
    for f in faults:
        if f.name not in noticed | state.passed:
            refused = Hunt(f.name, f.families[0], True, "", NOTHING, "every case that passes without it is refused")
            state.done.update(((f.name, family), refused) for family in f.families)
            state.progress(refused)


def _one_worker(faults: Sequence[Fault], level: Level, state: _State, limit: float) -> str:
    """Hunt until the end or the end of a turn (""), or until the worker dies: how it died."""
    request: dict[str, JSON] = {"level": level, "once": state.once, "done": list(state.done), "start": state.start}
    request["passed"] = sorted(state.passed)
    try:
        for event in events("conformance.planted.campaign", faults, request, limit):
            state.take(event)
    except WorkerDiedError as e:
        return str(e)
    return ""


def events(service: str, faults: Sequence[Fault], request: Mapping[str, JSON], limit: float) -> Iterator[JSON]:
    """What a worker whose module calls `answer` says of `faults`, up to `turn` or `end`; WorkerDiedError if it dies."""
    worker = Worker(service, time_limit=limit)
    try:
        event, _ = worker.ask({**request, "faults": [asdict(f) for f in faults]})
        yield event
        while event["event"] not in ("end", "turn"):
            event, _ = worker.ask(None)
            yield event
    finally:
        worker.close()


def answer(say: Callable[[list[Fault], JSON], Iterator[JSON]]) -> None:
    """As a worker, answer one request with all events that `say` makes of its faults and the rest of it."""
    service = Service()
    with suppress(Closed):
        request, _ = service.receive()
        try:
            faults = [Fault(**{**f, "families": tuple(f["families"])}) for f in request["faults"]]
            for event in say(faults, request):
                service.send(event)
        except ConformanceError as e:
            service.send(*failure(e, UsageError.__name__))


TOGETHER = {ops.NAME: 128}
"""Cases at a time, by family; trajectories come one by one."""
FIRST = (1, 8)
"""How many cases of a batch run before the next ones, where one that fails is enough."""


UNLOADABLE = "does not load: "
"""How the detail of a mutant begins whose module, or adapter, raises when it is loaded."""


class Hunter(Runner):
    """A runner that finds out whether a result is wrong, and not where."""

    locates = False

    def __init__(self, plants: Sequence[Fault | Bundle | Probe]) -> None:
        super().__init__()
        self._plants = {p.spec.name: p for p in plants}

    def _open(self, spec: Spec, isolate: bool | None) -> Backend:
        """Open a faulty backend once more, where a relation needs a second one."""
        plant = self._plants.get(spec.name)
        if plant is None:
            return super()._open(spec, isolate)
        try:
            return load(plant, dict(spec.options))
        except PlantError:
            raise
        except Exception as e:
            load(control(plant.of, ()), dict(spec.options)).close()  # what it raises is no fault's
            raise BackendError(f"{UNLOADABLE}{error_text(e)}") from e


class Reach:
    """Which faults cases reach. One may read what another made the adapter compile or keep, so a case reaches whatever
    one of its kind has reached before.
    """

    def __init__(self, runner: Runner, probes: Sequence[Probe]) -> None:
        self._runner, self._probes = runner, probes
        self._seen: dict[tuple[str, str], set[str]] = {}

    def of(self, kind: str, faults: Sequence[Fault], run: Callable[[Spec], object]) -> list[Fault]:
        """Those of `faults` that cases of `kind` reach, once `run` has them run on the adapter behind a spec."""
        reached: set[str] = set()
        for probe in self._probes:
            if any(f.of == probe.of for f in faults):
                self._runner.backend(probe.spec)  # what runs when it is opened lasts
                lasting = self._seen.setdefault((probe.of, ""), set(probe.reached))
                run(probe.spec)
                lasting |= probe.reached & probe.lasting
                seen = self._seen.setdefault((probe.of, kind), set())
                seen |= probe.reached
                reached |= seen | lasting
                probe.reached.clear()
        return [f for f in faults if f.name in reached]


def crowded(runs: int) -> bool:
    """Whether a worker gives way to another after so many `runs`."""
    held = mappings() if runs >= TURN else 0
    return held is None or held > CROWDED


def kind_of(case_id: str) -> str:
    """Of a case of ops its op, of another its family."""
    body = case_id.partition("@")[0]
    return body.partition("-")[0] if body.startswith(f"{ops.NAME}/") else body.partition("/")[0]


def hunt(
    faults: Sequence[Fault],
    level: str,
    done: set[tuple[str, str]],
    start: dict[str, int],
    passed: Collection[str] = (),
    *,
    once: bool = False,
) -> Iterator[JSON]:
    """Run every family on every fault that names it, until a case notices it; `once` as in `run`.

    A hunt before this one `done` some (fault, family) pairs, ended before the case at `start` of each family, and saw
    cases pass with the faults in `passed`, which `once` asks of each batch where the adapter as it is passes one. It
    ends with the event `turn` where another worker must go on, or with `end`.
    """
    runs, proven = 0, set(passed)
    probes = [Probe(of, [f for f in faults if f.of == of]) for of in dict.fromkeys(f.of for f in faults)]
    runner = Hunter([*faults, *probes])
    reach = Reach(runner, probes)
    for name, family in FAMILIES.items():
        hunted = [f for f in faults if name in f.families]
        ids = list(family.ids(level)) if hunted else []  # type: ignore[arg-type]  # checked by the command line
        cut = list(batches(ids, TOGETHER.get(name, 1), kind_of if once else None))
        for at, batch in enumerate(cut[start.get(name, 0) :], start.get(name, 0)):
            alive = [f for f in hunted if (f.name, name) not in done]
            if not alive:
                break
            if crowded(runs):
                yield {"event": "turn"}
                return
            yield {"event": "cases", "family": name, "at": at}
            for event in _batch(runner, reach if once else None, name, batch, alive, proven):
                runs += event["event"] == "runs"
                if event["event"] == "noticed":
                    done.update((event["fault"], n) for n in (FAMILIES if once else (name,)))
                yield event
        for fault in hunted:
            if (fault.name, name) not in done:
                done.add((fault.name, name))
                yield {"event": "survived", "fault": fault.name, "family": name, "cases": len(ids)}
    yield {"event": "end"}


def _batch(
    runner: Runner, reach: Reach | None, family: str, ids: Sequence[str], faults: Sequence[Fault], proven: set[str]
) -> Iterator[JSON]:
    """Run the cases of a batch on `faults`; where there is a `reach`, on those that they reach."""
    cases = [runner.case(i) for i in ids]
    if reach is not None:
        yield {"event": "runs", "fault": Probe.name, "family": family, "case": ids[0]}
        right: list[Result] = []
        reached = reach.of(kind_of(ids[0]), faults, lambda spec: right.extend(runner.run(spec, cases)))
        if any(r.verdict is Verdict.PASS for r in right):
            yield _passing((f.name for f in faults if f not in reached), proven)
        faults = reached
    for fault in faults:
        yield from _try(runner, fault, family, cases, proven, once=reach is not None)


def _passing(names: Iterable[str], proven: set[str]) -> JSON:
    """The event that a case passes with these faults; they go into `proven`."""
    new = sorted(set(names) - proven)
    proven.update(new)
    return {"event": "passes", "faults": new}


def _try(
    runner: Runner, fault: Fault, family: str, cases: Sequence[Case], proven: set[str], *, once: bool
) -> Iterator[JSON]:
    """Run `cases` on a fault until one notices it."""
    yield {"event": "runs", "fault": fault.name, "family": family, "case": cases[0].id}
    for result in (r for few in _parts(cases, once=once) for r in runner.run(fault.spec, few)):
        if result.verdict in FAILURES:
            found = {"case": result.case, "verdict": str(result.verdict), "detail": result.detail}
            yield {"event": "noticed", "fault": fault.name, "family": family, **found}
            return
        if once and result.verdict is Verdict.PASS and fault.name not in proven:
            yield _passing([fault.name], proven)


def batches(ids: Sequence[str], size: int, kind: Callable[[str], str] | None) -> Iterator[Sequence[str]]:
    """`ids` in order, `size` at a time; of one kind each where there are kinds."""
    groups = [list(ids)] if kind is None else [list(g) for _, g in groupby(sorted(ids, key=kind), kind)]
    for group in groups:
        yield from (group[at : at + size] for at in range(0, len(group), size))


def _parts(cases: Sequence[Case], *, once: bool) -> Iterator[Sequence[Case]]:
    """All together; or few first, as most faults that are looked for once show in any case."""
    edges = [0, *(n for n in FIRST if once and n < len(cases)), len(cases)]
    return (cases[a:b] for a, b in pairwise(edges))


def _hunt(faults: list[Fault], request: JSON) -> Iterator[JSON]:
    done = {(f, n) for f, n in request["done"]}
    return hunt(
        faults, request["level"], done, request["start"], request.get("passed", ()), once=request.get("once", False)
    )


if __name__ == "__main__":
    answer(_hunt)
