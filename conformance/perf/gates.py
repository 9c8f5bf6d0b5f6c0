"""Gates: demands on a backend's speed, written in a TOML file (docs/perf.md, thresholds.toml), and their answers.

level = "smoke"          # of the work units
budget = 90              # seconds of measuring that one gate may take

[[gate]]
name = "the fused state pays"
kind = "ratio"           # or "counter": exact, no clock; or "absolute": seconds, on one kind of machine
unit = "decode@past=512"
backend = "openvino-stateful"
against = "openvino-stateless" # or "baseline": this build's time over that of another one
limit = 0.9
why = "optional"
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, cast

from conformance import shipped
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.case.strict import expect, only, parse_toml
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import FAILURES, Verdict
from conformance.run.session.environment import environment
from conformance.run.session.select import parse_specs
from conformance.suite.family import LEVELS, Level

from .bench import Bench, Row
from .compare import Pair, UncomparableError, is_number
from .measure import Rounds
from .statistics import FINE, REGRESSED, UNDECIDED, Decision, decide
from .units import Unit, units

Kind = Literal["counter", "ratio", "absolute"]
NOT_RUN = "not run"
HELD = "memory.held"
"""A counter that no witness gives: per cent of a model's weights that a process of its own holds (`perf.held`)."""
BASELINE = "baseline"
"""`against` of a gate that compares this build with another one."""
BUDGET = 90.0
SHIPPED = shipped.path("perf", "thresholds.toml")

KEYS: dict[str, tuple[str, ...]] = {
    "counter": ("expect",),
    "ratio": ("against", "limit"),
    "absolute": ("machine", "limit"),
}
"""Kind -> required keys beside name, kind, unit and backend."""
_COMMON = ("name", "kind", "unit", "backend")
_EXPECT = re.compile(r"(?P<counter>[A-Za-z][\w.: -]*?) *(?P<relation><=|>=|==) *(?P<limit>\d+)", re.ASCII)
_MACHINE = re.compile(r"[0-9a-f]{12}")
NAMED = 200
"""Characters of a gate's name in an error."""
_LONGEST_COUNT = 15
"""Digits: a counter of a document stays below 2**53."""
RELATIONS: dict[str, Callable[[int, int], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, slots=True)
class Gate:
    """One demand."""

    name: str
    kind: Kind
    unit: Unit
    backend: Spec
    limit: float
    """A ratio, seconds, or a counter's limit."""
    against: Spec | Literal["baseline"] | None = None
    machine: str = ""
    counter: str = ""
    relation: str = ""


@dataclass(frozen=True, slots=True)
class Gates:
    """The content of a file."""

    level: Level
    budget: float
    gates: tuple[Gate, ...]

    def matching(self, globs: Sequence[str]) -> list[Gate]:
        """The gates whose name matches any of `globs`, all where there is none; UsageError if one matches nothing."""
        for glob in globs:
            if not any(fnmatchcase(g.name, glob) for g in self.gates):
                raise UsageError(f"no gate matches {glob!r}; there are {', '.join(g.name for g in self.gates)}")
        return [g for g in self.gates if not globs or any(fnmatchcase(g.name, x) for x in globs)]


def loads(text: str, where: str) -> Gates:
    """The gates in the text of the file `where`; UsageError if a key is wrong, which names the gate and the key."""
    table = parse_toml(text, where)
    only(table, ("level", "budget", "gate"), where)
    level, budget, entries = table.get("level"), table.get("budget", BUDGET), table.get("gate")
    expect(isinstance(level, str) and level in LEVELS, f"{where} level", f"one of {', '.join(LEVELS)}", level)
    expect(is_number(budget) and budget > 0, f"{where} budget", "seconds above 0", budget)
    expect(isinstance(entries, list) and bool(entries), f"{where} gate", "at least one [[gate]]", entries)
    gates: dict[str, Gate] = {}
    for i, entry in enumerate(cast("list[Any]", entries)):
        expect(isinstance(entry, dict), f"{where} gate {i}", "a table", entry)
        name = entry.get("name")
        place = f"{where} gate {name[:NAMED] if isinstance(name, str) and name else i}"
        gate = _gate(entry, cast("Level", level), place)
        expect(gate.name not in gates, f"{place} name", "a name that no other gate has", gate.name)
        gates[gate.name] = gate
    return Gates(cast("Level", level), float(budget), tuple(gates.values()))


def _gate(entry: Mapping[str, Any], level: Level, where: str) -> Gate:
    kind = entry.get("kind")
    expect(isinstance(kind, str) and kind in KEYS, f"{where} kind", f"one of {', '.join(KEYS)}", kind)
    own = KEYS[cast("str", kind)]
    only(entry, (*_COMMON, *own, "why"), where)
    for key in (*_COMMON, *own):
        if key != "limit":
            expect(isinstance(entry.get(key), str) and entry[key], f"{where} {key}", "a text", entry.get(key))
    expect(isinstance(entry.get("why", ""), str), f"{where} why", "a text", entry.get("why"))
    known = {u.name: u for u in units(level)}
    expect(entry["unit"] in known, f"{where} unit", f"one of level {level} ({', '.join(known)})", entry["unit"])
    unit = known[entry["unit"]]
    backend = _spec(entry["backend"], f"{where} backend")
    gate = partial(Gate, entry["name"], cast("Kind", kind), unit, backend)
    if kind == "counter":
        match = _EXPECT.fullmatch(entry["expect"])
        ok = match is not None and len(match["limit"]) <= _LONGEST_COUNT
        expect(ok, f"{where} expect", "COUNTER <=, == or >= NUMBER", entry["expect"])
        words = cast("re.Match[str]", match)
        return gate(int(words["limit"]), counter=words["counter"], relation=words["relation"])
    limit = cast("float", entry.get("limit"))
    expect(is_number(limit) and limit > 0, f"{where} limit", "a number above 0", limit)
    expect(unit.timed, f"{where} unit", "a unit with something to time", unit.name)
    if kind == "absolute":
        expect(bool(_MACHINE.fullmatch(entry["machine"])), f"{where} machine", "12 hex digits", entry["machine"])
        return gate(float(limit), machine=entry["machine"])
    if entry["against"] == BASELINE:
        return gate(float(limit), against="baseline")
    against = _spec(entry["against"], f"{where} against")
    expect(against != backend, f"{where} against", f'another backend, or "{BASELINE}"', entry["against"])
    return gate(float(limit), against=against)


def _spec(text: str, where: str) -> Spec:
    try:
        return parse_specs([text])[0]
    except ConformanceError as e:
        expect(ok=False, where=where, what=f"a backend ({e})", value=text)
        raise  # `expect` did


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a gate."""

    gate: Gate
    answer: str
    """`fine`, `regressed`, `undecided` (the budget did not suffice) or `not run`."""
    reason: str
    """One sentence."""
    decision: Decision | None = None
    count: int | None = None
    """The counter."""
    broke: bool = False
    """Whether it was not run because a case failed."""

    def to_json(self) -> dict[str, JSON]:
        """As a document has it; null for what is not known."""
        g, d = self.gate, self.decision
        known = d.interval if d else None
        return {
            "gate": g.name,
            "kind": g.kind,
            "unit": g.unit.name,
            "backend": str(g.backend),
            "against": None if g.against is None else str(g.against),
            "limit": g.limit,
            "answer": self.answer,
            "estimate": self.count if known is None else _finite(known.estimate),
            "low": self.count if known is None else _finite(known.low),
            "high": self.count if known is None else _finite(known.high),
            "rounds": d.rounds if d else 0,
            "detectable": None if known is None else _finite(known.detectable),
            "seconds": d.seconds if d else 0.0,
            "reason": self.reason,
        }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def judge_count(gate: Gate, counters: Mapping[str, JSON]) -> Answer:
    """Hold a counter against its limit; `not run` where the backend does not count it."""
    value = _counter(counters, gate.counter)
    if value is None:
        known = ", ".join(_names(counters)) or "nothing"
        return Answer(gate, NOT_RUN, f"{gate.backend} does not count {gate.counter}; it counts {known}")
    ok = RELATIONS[gate.relation](value, int(gate.limit))
    reason = f"{gate.counter} is {value}, {gate.relation} {int(gate.limit)} demanded"
    return Answer(gate, FINE if ok else REGRESSED, reason, count=value)


def _counter(counters: Mapping[str, JSON], path: str) -> int | None:
    name, _, key = path.partition(".")
    value = counters.get(name)
    if key:
        if not isinstance(value, dict) or not value:
            return None
        # a backend that lists the kernels it ran did not run the others
        value = value.get(key, 0 if name == "kernels" else None)
    return value if isinstance(value, int) else None


def _names(counters: Mapping[str, JSON]) -> list[str]:
    return [
        f"{name}.{key}" if key else name
        for name, value in counters.items()
        for key in (value if isinstance(value, dict) else [""])
    ]


def judge_time(gate: Gate, decision: Decision) -> Answer:
    """The answer to a gate on a clock, in a sentence."""
    i = decision.interval
    measured = f"{i.estimate:.4g} {'s' if gate.against is None else f'× {gate.against}'}"
    if math.isfinite(i.high):
        measured += f" (between {i.low:.4g} and {i.high:.4g})"
    reason = f"{measured}, at most {gate.limit:g} allowed, after {decision.rounds} rounds in {decision.seconds:.0f} s"
    if decision.answer not in {FINE, REGRESSED}:
        known = math.isfinite(i.detectable)
        effect = f"{100 * i.detectable:.2g} % beyond the limit would have been seen" if known else "nothing can be seen"
        reason += f"; {effect} with so many"
    return Answer(gate, decision.answer, reason, decision)


@dataclass(slots=True)
class Judge:
    """Answers gates one after the other and keeps what it measured."""

    bench: Bench
    budget: float
    """Seconds of measuring for each gate."""
    lacking: Mapping[Spec, str] = field(default_factory=dict)
    """Backend that this machine does not have -> why."""
    pair: Pair | None = None
    """This build and the baseline."""
    machine: str = field(default_factory=lambda: str(environment()["machine"]))
    rows: dict[tuple[Unit, Spec], Row] = field(default_factory=dict)
    """Of each unit and backend measured the row with most rounds."""

    def answer(self, gate: Gate) -> Answer:
        """Measure and judge; whatever prevents that makes the gate `not run`, with the reason."""
        if gate.machine and gate.machine != self.machine:
            return Answer(gate, NOT_RUN, f"it is about machine {gate.machine}, and this is {self.machine}")
        if gate.against == BASELINE:
            return self._against_baseline(gate)
        specs = [gate.backend, *([gate.against] if isinstance(gate.against, Spec) else [])]
        for spec in specs:
            if spec in self.lacking:
                return Answer(gate, NOT_RUN, f"{spec}: not available: {self.lacking[spec]}")
        return self._measured(gate, specs)

    def _measured(self, gate: Gate, specs: list[Spec]) -> Answer:
        decisions: list[Decision] = []
        against = None if gate.against is None else str(gate.against)

        def buy(rounds: Rounds) -> None:
            if gate.kind == "counter":
                rounds.more(1)  # a counter is the same in each
            elif len(rounds.seconds) == len(specs):
                decisions.append(decide(rounds, str(gate.backend), against, gate.limit, self.budget))

        rows = self.bench.rows(gate.unit, specs, buy)
        for row in rows:
            key = row.unit, row.backend
            if key not in self.rows or len(row.seconds) >= len(self.rows[key].seconds):
                self.rows[key] = row
        for row in rows:
            if row.broke or row.result.verdict is not Verdict.PASS:
                broke = row.broke or row.result.verdict in FAILURES
                return Answer(gate, NOT_RUN, f"{row.backend}: {row.reason}", broke=broke)
        if gate.counter == HELD:
            return self._held(gate)
        if gate.kind == "counter":
            return judge_count(gate, {**rows[0].counters, "memory": rows[0].memory})
        return judge_time(gate, decisions[-1])

    def _held(self, gate: Gate) -> Answer:
        try:
            return judge_count(gate, {"memory": {"held": self.bench.held(gate.backend)}})
        except UnavailableError as e:
            return Answer(gate, NOT_RUN, str(e))
        except ConformanceError as e:
            return Answer(gate, NOT_RUN, f"it failed while it was measured: {e}", broke=True)

    def _against_baseline(self, gate: Gate) -> Answer:
        if self.pair is None:
            return Answer(gate, NOT_RUN, "no baseline was given: --base names a virtual environment that has one")
        try:
            return judge_time(gate, self.pair.decide(gate.unit, gate.backend, gate.limit, self.budget))
        except UncomparableError as e:
            return Answer(gate, NOT_RUN, str(e), broke=e.broke)
        except UsageError:  # a build that does not speak our protocol measures nothing
            raise
        except ConformanceError as e:
            return Answer(gate, NOT_RUN, f"it failed while it was measured: {e}", broke=True)


def outcome(answers: Sequence[Answer]) -> Outcome:
    """It fails where a gate regressed or a case behind one failed, and is incomplete where one is undecided."""

    def names(chosen: Iterable[Answer]) -> list[str]:
        return [f"{a.gate.name}: {a.answer}: {a.reason}" for a in chosen]

    return (
        Outcome.of(Why.FAILED, names(a for a in answers if a.answer == REGRESSED or a.broke))
        + Outcome.of(Why.UNDECIDED, names(a for a in answers if a.answer == UNDECIDED))
        + Outcome.of(Why.UNEXECUTED, ["no gate was run"] if all(a.answer == NOT_RUN for a in answers) else [])
    )
