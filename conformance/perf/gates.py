"""Gates: what must be true of how fast a backend is, written down in a file, and whether it is.

    level = "smoke"          # of the work units
    budget = 90              # seconds of measuring that one gate may take

    [[gate]]
    name = "a growing cache compiles nothing anew"
    kind = "counter"         # exact, no clock: a counter of the unit and what it must be
    unit = "cross@256"
    backend = "openvino-stateless"
    expect = "timed.compiles <= 1"

    [[gate]]
    name = "the fused state pays"
    kind = "ratio"           # of two backends' times, or of this build's to another's: against = "baseline"
    unit = "decode@past=512"
    backend = "openvino-stateful"
    against = "openvino-stateless"
    limit = 0.9

    [[gate]]
    name = "fast enough for what it is sold for"
    kind = "absolute"        # seconds of one measurement, on machines of one kind only
    unit = "decode@past=512"
    backend = "ggml"
    machine = "0123456789ab" # as every report names it in its environment
    limit = 0.02

Each gate may say `why`. An answer is `fine`, `regressed`, `undecided` (the budget did not suffice to tell) or
`not run`, which is never fine. How a clock is believed: `perf.bootstrap` and `perf.decide`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

from conformance import shipped
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.run.session.select import parse_specs
from conformance.suite.family import LEVELS, Level

from .decide import FINE, REGRESSED, Decision
from .units import Unit, units

Kind = Literal["counter", "ratio", "absolute"]
NOT_RUN = "not run"
BASELINE = "baseline"
"""`against` of a gate that holds this build against another one's."""
BUDGET = 90.0
SHIPPED = shipped.path("perf", "thresholds.toml")
"""The gates that come along."""

KEYS: dict[str, tuple[str, ...]] = {
    "counter": ("expect",),
    "ratio": ("against", "limit"),
    "absolute": ("machine", "limit"),
}
"""What a gate of each kind must have beside name, kind, unit and backend."""
_COMMON = ("name", "kind", "unit", "backend")
_EXPECT = re.compile(r"(?P<counter>[A-Za-z][\w.: -]*?) *(?P<relation><=|>=|==) *(?P<limit>\d+)")
_MACHINE = re.compile(r"[0-9a-f]{12}")
RELATIONS: dict[str, Callable[[int, int], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, slots=True)
class Gate:
    """One demand."""

    name: str
    kind: Kind
    unit: Unit
    backend: Spec
    limit: float
    """A ratio, seconds, or what a counter is held against."""
    against: Spec | Literal["baseline"] | None = None
    machine: str = ""
    counter: str = ""
    relation: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Gates:
    """A file of them."""

    level: Level
    budget: float
    gates: tuple[Gate, ...]


def load(path: Path) -> Gates:
    """The gates in a file.

    Raises:
        UsageError: it cannot be read, or is none; the message names the gate and the key.
    """
    return loads(read_text(path), str(path))


def loads(text: str, where: str) -> Gates:
    """As `load`, from the text of the file called `where`."""
    table = parse_toml(text, where)
    only(table, ("level", "budget", "gate"), where)
    level, budget, listed = table.get("level"), table.get("budget", BUDGET), table.get("gate")
    expect(level in LEVELS, f"{where} level", f"one of {', '.join(LEVELS)}", level)
    expect(_number(budget), f"{where} budget", "seconds above 0", budget)
    expect(isinstance(listed, list) and bool(listed), f"{where} gate", "at least one [[gate]]", listed)
    found: dict[str, Gate] = {}
    for i, entry in enumerate(cast("list[Any]", listed)):
        expect(isinstance(entry, dict), f"{where} gate {i}", "a table", entry)
        named = f"{where} gate {entry.get('name', i)}"
        gate = _gate(entry, cast("Level", level), named)
        expect(gate.name not in found, f"{named} name", "a name that no other gate has", gate.name)
        found[gate.name] = gate
    return Gates(cast("Level", level), float(budget), tuple(found.values()))


def matching(gates: Gates, globs: Sequence[str]) -> list[Gate]:
    """The gates whose name matches any of `globs`; all, where there is none.

    Raises:
        UsageError: a glob matches nothing.
    """
    for glob in globs:
        if not any(fnmatchcase(g.name, glob) for g in gates.gates):
            raise UsageError(f"no gate matches {glob!r}; there are {', '.join(g.name for g in gates.gates)}")
    return [g for g in gates.gates if not globs or any(fnmatchcase(g.name, x) for x in globs)]


def _gate(entry: Mapping[str, Any], level: Level, where: str) -> Gate:
    kind = entry.get("kind")
    expect(isinstance(kind, str) and kind in KEYS, f"{where} kind", f"one of {', '.join(KEYS)}", kind)
    own = KEYS[cast("str", kind)]
    only(entry, (*_COMMON, *own, "why"), where)
    for key in (*_COMMON, *own):
        if key != "limit":
            expect(isinstance(entry.get(key), str) and entry[key], f"{where} {key}", "a text", entry.get(key))
    expect(isinstance(entry.get("why", ""), str), f"{where} why", "a text", entry.get("why"))
    unit = _unit(entry["unit"], level, where)
    common = {"name": entry["name"], "kind": kind, "unit": unit, "why": entry.get("why", "")}
    backend = _spec(entry["backend"], f"{where} backend")
    if kind == "counter":
        match = _EXPECT.fullmatch(entry["expect"])
        expect(match is not None, f"{where} expect", "COUNTER <=, == or >= NUMBER", entry["expect"])
        said = cast("re.Match[str]", match)
        return Gate(
            **common, backend=backend, counter=said["counter"], relation=said["relation"], limit=int(said["limit"])
        )
    expect(_number(entry.get("limit")), f"{where} limit", "a number above 0", entry.get("limit"))
    expect(unit.timed, f"{where} unit", "a unit with something to time", unit.name)
    limit = float(entry["limit"])
    if kind == "absolute":
        expect(bool(_MACHINE.fullmatch(entry["machine"])), f"{where} machine", "12 hex digits", entry["machine"])
        return Gate(**common, backend=backend, machine=entry["machine"], limit=limit)
    if entry["against"] == BASELINE:
        return Gate(**common, backend=backend, against="baseline", limit=limit)
    against = _spec(entry["against"], f"{where} against")
    expect(against != backend, f"{where} against", f'another backend, or "{BASELINE}"', entry["against"])
    return Gate(**common, backend=backend, against=against, limit=limit)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _unit(name: str, level: Level, where: str) -> Unit:
    known = {u.name: u for u in units(level)}
    expect(name in known, f"{where} unit", f"one of level {level} ({', '.join(known)})", name)
    return known[name]


def _spec(text: str, where: str) -> Spec:
    try:
        return parse_specs([text])[0]
    except ConformanceError as e:
        expect(ok=False, where=where, what=f"a backend ({e})", value=text)
        raise  # `expect` did


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found at a gate."""

    gate: Gate
    answer: str
    """`fine`, `regressed`, `undecided` or `not run`."""
    reason: str
    """One sentence."""
    decision: Decision | None = None
    count: int | None = None
    """The counter."""
    broke: bool = False
    """Whether it was not run because a case failed."""

    def to_json(self) -> dict[str, JSON]:
        """As a document has it; what is not known is null."""
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


def counted(gate: Gate, counters: Mapping[str, JSON]) -> Answer:
    """Hold a counter against what it must be; a counter that the backend does not have was not run."""
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
        # a backend that lists the kernels it ran and not this one did not run it
        value = value.get(key, 0 if name == "kernels" else None)
    return value if isinstance(value, int) else None


def _names(counters: Mapping[str, JSON]) -> list[str]:
    return [
        f"{name}.{key}" if key else name
        for name, value in counters.items()
        for key in (value if isinstance(value, dict) else [""])
    ]


def decided(gate: Gate, decision: Decision) -> Answer:
    """What a gate on a clock answers, in a sentence."""
    i = decision.interval
    found = f"{i.estimate:.4g} {'s' if gate.against is None else f'× {gate.against}'}"
    if math.isfinite(i.high):
        found += f" (between {i.low:.4g} and {i.high:.4g})"
    reason = f"{found}, at most {gate.limit:g} allowed, after {decision.rounds} rounds in {decision.seconds:.0f} s"
    if decision.answer not in {FINE, REGRESSED}:
        known = math.isfinite(i.detectable)
        effect = f"{100 * i.detectable:.2g} % beyond the limit would have been seen" if known else "nothing can be seen"
        reason += f"; {effect} with so many"
    return Answer(gate, decision.answer, reason, decision)
