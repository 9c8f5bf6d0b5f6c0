"""Gates: the file they stand in, and their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from simulated_machine import Machine

from conformance.backend.registry import Spec
from conformance.cli import main
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.outcome import judge
from conformance.judge.verdict import Missing, MissingCause, Result, Verdict
from conformance.perf.bench import Bench, Row
from conformance.perf.count import Counts
from conformance.perf.gates import SHIPPED, Answer, Gate, Judge, judge_count, judge_record, judge_time, loads
from conformance.perf.statistics import decide
from conformance.perf.units import Unit
from conformance.report.runs import read_runs
from conformance.run.runner import Runner
from conformance.run.session.select import parse_specs

HEAD = 'level = "smoke"\nbudget = 1\n'
COUNTER = '[[gate]]\nname = "c"\nkind = "counter"\nunit = "load"\nbackend = "cpu"\nexpect = "compiles <= 2"\n'
RATIO = '[[gate]]\nname = "r"\nkind = "ratio"\nunit = "load"\nbackend = "cpu"\nagainst = "ggml"\nlimit = 0.5\n'
ABSOLUTE = (
    '[[gate]]\nname = "a"\nkind = "absolute"\nunit = "load"\nbackend = "cpu"\nmachine = "0123456789ab"\nlimit = 2\n'
)


def one(text: str) -> Gate:
    """The only gate of a file."""
    (gate,) = loads(HEAD + text, "t.toml").gates
    return gate


def test_a_file() -> None:
    """Each kind is read with its own keys."""
    gates = loads(HEAD + COUNTER + RATIO + ABSOLUTE, "t.toml")
    c, r, a = gates.gates
    assert (gates.level, gates.budget) == ("smoke", 1.0)
    assert (c.counter, c.relation, c.limit, c.against) == ("compiles", "<=", 2, None)
    assert (str(r.backend), str(r.against), r.limit, r.unit.name) == ("cpu", "ggml", 0.5, "load")
    assert (a.machine, a.limit, a.against) == ("0123456789ab", 2.0, None)
    assert gates.matching(["[cr]"]) == [c, r]
    with pytest.raises(UsageError, match=r"no gate matches 'x'; known: c, r, a"):
        gates.matching(["x"])


def test_the_gates_of_this_project() -> None:
    """The file that comes along can be read, and has gates of the kinds that any machine can answer."""
    gates = loads(SHIPPED.read_text(encoding="utf-8"), str(SHIPPED)).gates
    assert {g.kind for g in gates} == {"counter", "ratio"}
    assert {str(g.against) for g in gates} == {"None", "openvino-stateless?threads=1", "baseline"}


BROKEN = [
    ("level = 3", r"t.toml level: one of smoke, standard, full expected, 3 found"),
    ("nonsense", r"t.toml: "),
    ('level = "smoke"', r"t.toml gate: at least one \[\[gate\]\] expected, nothing found"),
    ('level = "smoke"\ngate = 3', r"t.toml gate: at least one"),
    ('level = "smoke"\ngate = [3]', r"t.toml gate 0: a table expected, 3 found"),
    ("budget = 0\n" + HEAD[:16] + COUNTER, r"t.toml budget: seconds above 0 expected, 0 found"),
    ("budget = nan\n" + HEAD[:16] + COUNTER, r"t.toml budget: seconds above 0 expected, nan found"),
    (HEAD + "colour = 1\n" + COUNTER, r"t.toml colour: is unknown; known: level, budget, gate"),
    (HEAD + COUNTER + "limit = 3\n", r"t.toml gate c limit: is unknown"),
    (HEAD + COUNTER + COUNTER, r"t.toml gate c name: a name that no other gate has"),
    (
        HEAD + COUNTER.replace("counter", "feeling"),
        r"gate c kind: one of counter, count, ratio, absolute expected, 'feeling'",
    ),
    (
        HEAD + COUNTER.replace('"counter"', "[]"),
        r"gate c kind: one of counter, count, ratio, absolute expected, \[\] found",
    ),
    (HEAD + COUNTER.replace("load", "lode"), r"gate c unit: one of level smoke \(.*load.*\) expected, 'lode' found"),
    (HEAD + COUNTER.replace("cpu", "cpu?x"), r"gate c backend: a backend \(.*\) expected, 'cpu\?x' found"),
    (HEAD + COUNTER.replace("<= 2", "< 2"), r"gate c expect: COUNTER <=, == or >= NUMBER expected, 'compiles < 2'"),
    (HEAD + COUNTER.replace("<= 2", "<= two"), r"gate c expect: COUNTER"),
    (HEAD + COUNTER.replace('name = "c"\n', ""), r"t.toml gate 0 name: a text expected, nothing found"),
    (HEAD + COUNTER + "why = 1\n", r"gate c why: a text expected, 1 found"),
    (HEAD + RATIO.replace("0.5", "0"), r"gate r limit: a number above 0 expected, 0 found"),
    (HEAD + RATIO.replace("0.5", "true"), r"gate r limit: a number above 0 expected, True found"),
    (HEAD + RATIO.replace("0.5", "inf"), r"gate r limit: a number above 0 expected, inf found"),
    (
        HEAD + RATIO.replace('"ggml"', '"cpu"'),
        r"gate r against: another backend, or \"baseline\" expected, 'cpu' found",
    ),
    (HEAD + RATIO.replace("load", "memory"), r"gate r unit: a unit with something to time expected, 'memory' found"),
    (HEAD + ABSOLUTE.replace("0123456789ab", "mine"), r"gate a machine: 12 hex digits expected, 'mine' found"),
]


@pytest.mark.parametrize(("text", "said"), BROKEN)
def test_a_broken_file(text: str, said: str) -> None:
    """What is wrong with a file is one line that names it, the gate and the key."""
    with pytest.raises(UsageError, match=said) as e:
        loads(text, "t.toml")
    assert "\n" not in str(e.value)


@given(st.data())
def test_any_value_anywhere(data: st.DataObject) -> None:
    """Whatever stands in place of a value, a file is read or refused, and nothing else happens."""
    lines = (HEAD + COUNTER + RATIO + ABSOLUTE).splitlines()
    i = data.draw(st.integers(0, len(lines) - 1))
    value = data.draw(st.sampled_from(["1", "-1.5", '""', '"x"', "[]", "{}", "[[1]]", "true", "1979-05-27", "nan"]))
    lines[i] = f"{lines[i].partition(' =')[0]} = {value}" if "=" in lines[i] else value
    try:
        loads("\n".join(lines), "t.toml")
    except UsageError as e:
        assert str(e).startswith("t.toml")  # noqa: PT017  # either end is right


COUNTERS = {"compiles": 2.0, "timed.compiles": 0.0, "kernels.RMS": 5.0}


@pytest.mark.parametrize(
    ("expect", "verdict", "count"),
    [
        ("compiles <= 2", "PASS", 2),
        ("compiles <= 1", "FAIL", 2),
        ("compiles == 2", "PASS", 2),
        ("compiles >= 3", "FAIL", 2),
        ("timed.compiles == 0", "PASS", 0),
        ("kernels.RMS >= 6", "FAIL", 5),
        ("kernels.RoPE >= 1", "FAIL", 0),
        ("bytes.weights <= 9", "UNSUPPORTED", None),
        ("timed.hits >= 0", "UNSUPPORTED", None),
        ("timed <= 0", "UNSUPPORTED", None),
        ("wishes <= 1", "UNSUPPORTED", None),
    ],
)
def test_counters_are_exact(expect: str, verdict: str, count: int | None) -> None:
    """A counter is compared with its bound; a kernel not listed ran 0 times; what nobody counted was not run."""
    found = judge_count(one(COUNTER.replace("compiles <= 2", expect)), COUNTERS)
    assert (found.case, found.verdict, found.metrics.get("estimate")) == ("gate/c", Verdict(verdict), count)


def test_results_of_gates() -> None:
    """A decision's figures are metrics; what is not known is left out; an undecided gate makes the run incomplete."""
    gate = one(RATIO)
    found = judge_time(gate, decide(Machine(1).rounds(0.4), "head", "base", 0.5, 20.0), "ggml")
    assert isinstance(found, Result)
    m = found.metrics
    assert (found.verdict, m["limit"]) == (Verdict.PASS, 0.5)
    assert m["low"] < 0.4 < m["high"] < m["limit"]
    assert f"{m['rounds']:g} rounds" in found.detail
    json.dumps(found.to_json(), allow_nan=False)
    nothing = judge_time(gate, decide(Machine(opening=9.0).rounds(), "head", "base", 0.5, 5.0), "ggml")
    assert isinstance(nothing, Missing)
    assert nothing.cause is MissingCause.UNDECIDED
    assert nothing.reason.startswith("undecided, the machine is too noisy")
    assert judge([found], [nothing]).exit_code == 5


@dataclass
class Counted:
    """A bench whose rows pass and execute a given number of instructions per backend."""

    instructions: Mapping[str, int]

    def rows(self, unit: Unit, specs: Sequence[Spec], _: object) -> list[Row]:
        """A row per backend."""
        return [Row(unit, s, Result(unit.id, str(s), Verdict.PASS)) for s in specs]

    def count(self, row: Row) -> None:
        """Count, or be unable to."""
        n = self.instructions[str(row.backend)]
        row.counts = Counts(n, 0, 0)
        row.result = replace(
            row.result, verdict=Verdict.PASS if n else Verdict.UNSUPPORTED, metrics=row.counts.metrics()
        )


@pytest.mark.parametrize(
    ("cpu", "ggml", "verdict"), [(101, 100, "PASS"), (102, 100, "FAIL"), (9, 100, "PASS"), (100, 0, "UNSUPPORTED")]
)
def test_a_gate_counts(cpu: int, ggml: int, verdict: str) -> None:
    """Instructions decide whatever the clock says: against another backend, or by their number alone."""
    bench: Any = Counted({"cpu": cpu * 10**6, "ggml": ggml * 10**6})
    count = RATIO.replace("ratio", "count").replace("load", "decode@past=0").replace("0.5", "1.01")
    assert Judge(bench, 1.0).answer(one(count)).verdict is Verdict(verdict)  # type: ignore[union-attr]
    fixed = COUNTER.replace("load", "decode@past=0").replace("compiles <= 2", "instructions <= 101000000")
    found = Judge(bench, 1.0).answer(one(fixed))
    assert found.verdict is (Verdict.PASS if cpu <= 101 else Verdict.FAIL)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="a unit with something to count expected, 'load' found"):
        one(RATIO.replace("ratio", "count"))


@pytest.mark.parametrize(("seconds", "verdict"), [(2.0, "FAIL"), (0.9, "PASS"), (1.02, None)])
def test_an_earlier_record_is_a_base(seconds: float, verdict: str | None) -> None:
    """Intervals that lie on one side of the limit decide; others, and too few rounds, do not."""
    gate, at = one(RATIO.replace("0.5", "1.02")), {"rounds": 10.0}

    def timed(median: float) -> Result:
        metrics = {"seconds": median, "seconds.low": 0.99 * median, "seconds.high": 1.01 * median, **at}
        return Result("perf/u", "cpu", Verdict.PASS, metrics=metrics)

    found = judge_record(gate, timed(seconds), {("perf/u", "cpu"): timed(1.0)})
    assert (str(found.verdict) if isinstance(found, Result) else None) == verdict
    few = Result("perf/u", "cpu", Verdict.PASS, metrics={"seconds": 1.0, **at})
    assert isinstance(judge_record(gate, timed(seconds), {("perf/u", "cpu"): few}), Missing)
    absent = judge_record(gate, timed(seconds), {})
    assert isinstance(absent, Result)
    assert absent.verdict is Verdict.UNSUPPORTED


def judged(gate: Gate, **known: object) -> Result:
    """What a judge with little patience says."""
    runner = Runner()
    try:
        answer: Answer = Judge(Bench(runner), 1.0, **known).answer(gate)  # type: ignore[arg-type]  # what each test knows
    finally:
        runner.close()
    assert isinstance(answer, Result)
    return answer


def test_what_is_not_run() -> None:
    """Another machine, a backend that is not here, and a missing baseline make a gate UNSUPPORTED, never PASS."""
    (ggml,) = parse_specs(["ggml"])
    found = [
        judged(one(ABSOLUTE), machine="ba9876543210"),
        judged(one(RATIO), lacking={ggml: "no wheel"}),
        judged(one(RATIO.replace('"ggml"', '"baseline"'))),
        judged(one(RATIO.replace('"ggml"', '"baseline"')), baseline=ggml),
    ]
    assert [r.verdict for r in found] == [Verdict.UNSUPPORTED] * 4
    assert [r.detail for r in found] == [
        "it is for machine 0123456789ab, this is ba9876543210",
        "ggml: not available: no wheel",
        "no baseline was given: --against names a backend",
        "the baseline ggml is a backend of ggml, not of cpu",
    ]


def test_a_baseline_has_the_options_of_its_gate() -> None:
    """A gate with one thread is not compared with a build that uses all: open options are the gate's."""
    (own, old, other) = parse_specs(["ggml?threads=1", "ggml?lib=x", "ggml?threads=2"])
    assert str(old.with_defaults(own.options)) == "ggml?lib=x&threads=1"
    assert str(other.with_defaults(own.options)) == "ggml?threads=2"


def test_a_case_that_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that fails while it is measured fails its gate."""

    def refuse(*_: object) -> None:
        raise UnavailableError("gone")

    monkeypatch.setattr("conformance.perf.bench.Bench.measured", refuse)
    answer = judged(one(COUNTER))
    assert (answer.case, answer.verdict) == ("gate/c", Verdict.OVERCLAIM)
    assert "gone" in answer.detail


def test_gates_on_the_command_line(tmp_path: Path) -> None:
    """`conform perf gate` measures a counter gate of a real backend, says what became of each, and writes it down."""
    path, out = tmp_path / "gates.toml", tmp_path / "out.json"
    counter = COUNTER.replace("compiles <= 2", "timed.nodes >= 1").replace("load", "decode@past=0")
    path.write_text(HEAD + counter + ABSOLUTE)
    result = CliRunner().invoke(main, ["perf", "gate", str(path), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 PASS, 1 UNSUPPORTED" in result.output
    (record,) = read_runs([out]).documents
    found = {r.case.partition("@")[0]: r.verdict for r in record.record.results}
    assert found == {"perf/decode": Verdict.PASS, "gate/c": Verdict.PASS, "gate/a": Verdict.UNSUPPORTED}
    late = CliRunner().invoke(main, ["perf", "gate", str(path), "--budget", "0.000001s"])
    assert late.exit_code == 5, late.output
    assert "not started (--budget)" in late.output
    path.write_text(HEAD + counter.replace(">= 1", "== 0"))
    assert CliRunner().invoke(main, ["perf", "gate", str(path)]).exit_code == 1
    path.write_text(HEAD + ABSOLUTE)
    assert CliRunner().invoke(main, ["perf", "gate", str(path)]).exit_code == 3
