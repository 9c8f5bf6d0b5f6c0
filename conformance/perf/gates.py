"""Judges gates: limits of a backend's speed and counters, from a TOML file (docs/perf.md).

level = "smoke"          # of the work units
budget = 90              # seconds of measuring that one gate may take

[[gate]]
name = "the fused state pays"
kind = "ratio"           # or "count": of instructions; "counter": exact; "absolute": seconds, on one kind of machine
unit = "decode@past=512"
backend = "openvino-stateful"
against = "openvino-stateless" # or "baseline": what --against names, another build of the same backend
limit = 0.9
why = "optional"
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, cast

from conformance import shipped
from conformance.backend.registry import Spec, resolve
from conformance.case.strict import expect, only, parse_toml
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.judge.evidence import Error
from conformance.judge.verdict import Missing, MissingCause, Pair, Result, Verdict
from conformance.run.failed import result_of_error
from conformance.run.session.environment import environment
from conformance.run.session.select import parse_specs
from conformance.suite.family import LEVELS, Level

from .bench import Bench, Row
from .measure import Rounds
from .statistics import FINE, REGRESSED, UNDECIDED, Decision, Interval, decide, foreseen
from .units import Unit, units

Kind = Literal["counter", "count", "ratio", "absolute"]
FAMILY = "gate"
"""Family in the ids of gates."""
HELD = "memory.held"
"""A counter outside of witnesses: weights in memory, in percent of the model's."""
BASELINE = "baseline"
"""`against` of a gate that compares a backend with the baseline that the user names."""
BUDGET = 90.0
COARSE = 0.05
"""Change beyond its limit that a gate must be able to detect; else it warns."""
SHIPPED = shipped.path("perf", "thresholds.toml")

KEYS: dict[str, tuple[str, ...]] = {
    "counter": ("expect",),
    "count": ("against", "limit"),
    "ratio": ("against", "limit"),
    "absolute": ("machine", "limit"),
}
"""Kind -> required keys beside name, kind, unit and backend."""
_COMMON = ("name", "kind", "unit", "backend")
_EXPECT = re.compile(r"(?P<counter>[A-Za-z][\w.: -]*?) *(?P<relation><=|>=|==) *(?P<limit>\d+)", re.ASCII)
_MACHINE = re.compile(r"[0-9a-f]{12}")
NAMED = 200
"""Maximum characters of a gate's name in an error."""
_LONGEST_COUNT = 15
"""Maximum digits, so that a counter stays below 2**53."""
RELATIONS: dict[str, Callable[[int, int], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, slots=True)
class Gate:
    """One requirement."""

    name: str
    kind: Kind
    unit: Unit
    backend: Spec
    limit: float
    """A ratio of times or counts, seconds, or a counter's limit."""
    against: Spec | Literal["baseline"] | None = None
    machine: str = ""
    counter: str = ""
    relation: str = ""

    @property
    def id(self) -> str:
        """Id of its result: `gate/NAME`."""
        return f"{FAMILY}/{self.name}"


@dataclass(frozen=True, slots=True)
class Gates:
    """The content of a file."""

    level: Level
    budget: float
    gates: tuple[Gate, ...]

    def matching(self, globs: Sequence[str]) -> list[Gate]:
        """Return the gates that match any of `globs` (default: all); UsageError if a glob has none."""
        for glob in globs:
            if not any(fnmatchcase(g.name, glob) for g in self.gates):
                raise UsageError(f"no gate matches {glob!r}; known: {', '.join(g.name for g in self.gates)}")
        return [g for g in self.gates if not globs or any(fnmatchcase(g.name, x) for x in globs)]


def loads(text: str, where: str) -> Gates:
    """Parse the gates in the text of the file `where`; UsageError names gate and key."""
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


def is_number(value: object) -> bool:
    """Return True for a number that float64 can hold."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


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
    timed = unit.steps if kind == "count" else unit.timed
    expect(timed, f"{where} unit", f"a unit with something to {'count' if kind == 'count' else 'time'}", unit.name)
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


COUNT_LIMIT = 1.005
"""Ratio of instructions, and of estimated cycles, that a comparison of counts allows."""
NOISE = {"instructions": 1_000, "cycles": 3_000}
"""Differences for each graph that never fail: malloc depends on what was allocated before.

Two processes differed by 455 instructions and 700 cycles in graphs of a million cycles, by 0.15 % in larger ones."""
COUNTED = {"instructions": "instructions", "cycles": "estimated cycles", "misses.d1": "D1 misses",
           "misses.ll": "LL misses"}  # fmt: skip
"""Metric of `count.Counts` -> words."""

Answer = Result | Missing
"""Result of a gate: PASS, FAIL, UNSUPPORTED with the reason, or its case's failure.

An undecided gate is missing, which makes the run incomplete."""


def not_run(gate: Gate, reason: str) -> Result:
    """Return the answer of a gate that cannot be judged on this machine."""
    return Result(gate.id, str(gate.backend), Verdict.UNSUPPORTED, error=Error(reason))


def _answer(gate: Gate, ok: bool, reason: str, metrics: Mapping[str, float]) -> Result:
    known = {k: float(v) for k, v in metrics.items() if math.isfinite(v)}
    found = Result(gate.id, str(gate.backend), Verdict.PASS if ok else Verdict.FAIL, metrics=known)
    return found.noted(reason) if ok else replace(found, error=Error(reason, "over its limit"))


def judge_count(gate: Gate, counters: Mapping[str, float]) -> Result:
    """Compare a counter with its limit; UNSUPPORTED if the backend does not count it."""
    group = gate.counter.partition(".")[0]
    # a backend that lists the kernels it ran did not run the others
    default = 0 if group == "kernels" and any(k.startswith("kernels.") for k in counters) else None
    value = counters.get(gate.counter, default)
    if value is None:
        known = ", ".join(counters) or "nothing"
        return not_run(gate, f"{gate.backend} does not count {gate.counter}; it counts {known}")
    limit = int(gate.limit)
    ok = RELATIONS[gate.relation](int(value), limit)
    reason = f"{gate.counter} is {value:g}, {gate.relation} {limit} required"
    return _answer(gate, ok, reason, {"estimate": value, "limit": limit})


def judge_time(gate: Gate, decision: Decision, against: str | None) -> Answer:
    """Return the answer of a gate on time; `against` names the other side of the comparison."""
    i = decision.interval
    measured = f"{i.estimate:.4g} {'s' if against is None else f'× {against}'}"
    if math.isfinite(i.high):
        measured += f" (between {i.low:.4g} and {i.high:.4g})"
    reason = f"{measured}, at most {gate.limit:g} allowed, after {decision.rounds} rounds in {decision.seconds:.0f} s"
    if decision.answer == UNDECIDED:
        known = math.isfinite(i.detectable)
        effect = f"{100 * i.detectable:.2g} % beyond the limit" if known else "no difference"
        why = f"undecided, the machine is too noisy for its time: {reason}; {effect} could be detected"
        return Missing(str(gate.backend), gate.id, why, MissingCause.UNDECIDED)
    metrics = {"estimate": i.estimate, "low": i.low, "high": i.high, "limit": gate.limit, "detectable": i.detectable,
               "rounds": decision.rounds, "seconds": decision.seconds}  # fmt: skip
    return _answer(gate, decision.answer == FINE, reason, metrics)


def judge_record(gate: Gate, now: Result, then: Mapping[tuple[str, str], Result]) -> Answer:
    """Compare a unit's time with an earlier record's, by the 95 % intervals of medians."""
    before = then.get((now.case, now.backend))
    if now.verdict is not Verdict.PASS:
        return replace(now, case=gate.id)
    if before is None or "seconds" not in before.metrics:
        return not_run(gate, "the earlier record does not have this unit")
    a, b = now.metrics, before.metrics
    ends = [m.get(f"seconds.{end}") for m in (a, b) for end in ("low", "high")]
    if None in ends:
        why = "undecided: at least six rounds of each side expected, fewer found"
        return Missing(now.backend, gate.id, why, MissingCause.UNDECIDED)
    low, high = a["seconds.low"] / b["seconds.high"], a["seconds.high"] / b["seconds.low"]
    answer = REGRESSED if low > gate.limit else FINE if high <= gate.limit else UNDECIDED
    interval = Interval(a["seconds"] / b["seconds"], low, high, math.inf)
    decision = Decision(answer, interval, int(a["rounds"]), a["seconds"] * a["rounds"])
    return judge_time(gate, decision, "the earlier record")


def judge_counts(gate: Gate, now: Result, then: Result | None, grown: tuple[str, float] | None = None) -> Result:
    """Compare instructions and estimated cycles with the baseline's, beyond `NOISE`.

    The cycles rise without the instructions if more accesses miss a cache. Times, if both have them, only add to the
    reason. `grown` is the function that grew most, and its ratio.
    """
    if now.verdict is not Verdict.PASS:
        return replace(now, case=gate.id)
    if then is None or not then.metrics.get("instructions"):
        return not_run(gate, "the baseline has no counts of this unit")
    a, b = now.metrics, then.metrics
    ratios = {k: a[k] / b[k] for k in COUNTED if b.get(k)}
    graphs = a.get("graphs", 1)
    over = any(ratios[k] > gate.limit and a[k] - b[k] > n * graphs for k, n in NOISE.items())
    shown = [k for k in COUNTED if k in ratios and (over or not k.startswith("misses."))]
    told = ", ".join(f"{ratios[k]:.4f} × {COUNTED[k]}" for k in shown)
    time = f", {a['seconds'] / b['seconds']:.2f} × time" if a.get("seconds") and b.get("seconds") else ""
    where = f"; most in {grown[0]}: {grown[1]:.4f} ×" if grown and over and ratios["instructions"] > gate.limit else ""
    reason = f"{gate.unit.model}: {told}, at most {gate.limit:g} allowed{time}{where}"
    metrics = {
        "estimate": max(ratios[k] for k in NOISE),
        "limit": gate.limit,
        **{f"ratio.{k}": r for k, r in ratios.items()},
    }
    return _answer(gate, not over, reason, metrics)


@dataclass(slots=True)
class Judge:
    """Answers gates one after the other and stores the measured rows."""

    bench: Bench
    budget: float
    """Seconds of measuring for each gate."""
    lacking: Mapping[Spec, str] = field(default_factory=dict)
    """Unavailable backend -> reason."""
    baseline: Spec | None = None
    """The baseline of gates that compare with one."""
    machine: str = field(default_factory=lambda: str(environment()["machine"]))
    warn: Callable[[str], None] = field(default=lambda _: None)
    """Takes a warning about a gate, before most of its time is spent."""
    rows: dict[tuple[Unit, Spec], Row] = field(default_factory=dict)
    """For each measured unit and backend, the row with the most rounds."""

    def answer(self, gate: Gate) -> Answer:
        """Measure and judge a gate; UNSUPPORTED, with the reason, if it cannot be measured here."""
        if gate.machine and gate.machine != self.machine:
            return not_run(gate, f"it is for machine {gate.machine}, this is {self.machine}")
        against = self.baseline if gate.against == BASELINE else gate.against
        if gate.against == BASELINE:
            if self.baseline is None:
                return not_run(gate, "no baseline was given: --against names a backend")
            if (own := resolve(gate.backend).name) != (other := resolve(self.baseline).name):
                return not_run(gate, f"the baseline {self.baseline} is a backend of {other}, not of {own}")
            against = self.baseline.with_defaults(gate.backend.options)
        specs = [gate.backend, *([against] if isinstance(against, Spec) else [])]
        for spec in specs:
            if spec in self.lacking:
                return not_run(gate, f"{spec}: not available: {self.lacking[spec]}")
        if len(set(specs)) < len(specs):
            return not_run(gate, f"the baseline is {gate.backend} itself")
        return self._measured(gate, specs)

    def _measured(self, gate: Gate, specs: Sequence[Spec]) -> Answer:
        decisions: list[Decision] = []
        against = str(specs[1]) if len(specs) > 1 else None

        def buy(rounds: Rounds) -> None:
            if gate.kind in {"counter", "count"}:
                rounds.more(1)  # they are the same in each
            elif len(rounds.seconds) == len(specs):
                seen = foreseen(rounds, str(gate.backend), against, self.budget)
                if seen > COARSE:
                    self.warn(
                        f"{gate.name}: too noisy here: in {self.budget:g} s only what is {seen:.0%} beyond the limit "
                        f"is found; a longer budget, an idle machine, or a gate of kind count finds less"
                    )
                decisions.append(decide(rounds, str(gate.backend), against, gate.limit, self.budget))

        rows = self.bench.rows(gate.unit, specs, buy)
        for row in rows:
            if gate.kind == "count" or gate.counter in COUNTED:
                self.bench.count(row)
            key = row.unit, row.backend
            if key not in self.rows or len(row.seconds) >= len(self.rows[key].seconds):
                self.rows[key] = row
        for row in rows:
            if row.result.verdict is not Verdict.PASS:
                return replace(row.result, case=gate.id, backend=str(gate.backend)).noted(
                    f"{gate.unit.name} on {row.backend}"
                )
        return judge_time(gate, decisions[-1], against) if decisions else self._counted(gate, rows)

    def _counted(self, gate: Gate, rows: Sequence[Row]) -> Result:
        if gate.kind == "count":
            now, then = rows
            grown = now.counts.grown(then.counts) if now.counts and then.counts else None
            return judge_counts(gate, now.result, then.result, grown)
        return self._held(gate) if gate.counter == HELD else judge_count(gate, rows[0].result.metrics)

    def _held(self, gate: Gate) -> Result:
        try:
            return judge_count(gate, {HELD: self.bench.held(gate.backend)})
        except UnavailableError as e:
            return not_run(gate, str(e))
        except ConformanceError as e:
            return result_of_error(Pair(gate.id, str(gate.backend)), e)
