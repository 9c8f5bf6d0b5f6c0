"""Gates: the file they stand in, and their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from simulated_machine import Machine

from conformance.cli import main
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.perf.bench import Bench
from conformance.perf.gates import (
    NOT_RUN,
    SHIPPED,
    Answer,
    Gate,
    Judge,
    judge_count,
    judge_time,
    loads,
    outcome,
)
from conformance.perf.statistics import FINE, REGRESSED, UNDECIDED, decide
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
    with pytest.raises(UsageError, match=r"no gate matches 'x'; there are c, r, a"):
        gates.matching(["x"])


def test_the_gates_of_this_project() -> None:
    """The file that comes along can be read, and has gates of the kinds that any machine can answer."""
    gates = loads(SHIPPED.read_text(encoding="utf-8"), str(SHIPPED)).gates
    assert {g.kind for g in gates} == {"counter", "ratio"}
    assert {str(g.against) for g in gates} == {"None", "openvino-stateless", "baseline"}


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
    (HEAD + COUNTER.replace("counter", "feeling"), r"gate c kind: one of counter, ratio, absolute expected, 'feeling'"),
    (HEAD + COUNTER.replace('"counter"', "[]"), r"gate c kind: one of counter, ratio, absolute expected, \[\] found"),
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


COUNTERS = {"compiles": 2, "timed": {"compiles": 0}, "kernels": {"RMS": 5}, "bytes": {}, "memory": {"peak": None}}


@pytest.mark.parametrize(
    ("expect", "answer", "count"),
    [
        ("compiles <= 2", FINE, 2),
        ("compiles <= 1", REGRESSED, 2),
        ("compiles == 2", FINE, 2),
        ("compiles >= 3", REGRESSED, 2),
        ("timed.compiles == 0", FINE, 0),
        ("kernels.RMS >= 6", REGRESSED, 5),
        ("kernels.RoPE >= 1", REGRESSED, 0),
        ("bytes.weights <= 9", NOT_RUN, None),
        ("memory.peak <= 9", NOT_RUN, None),
        ("timed.hits >= 0", NOT_RUN, None),
        ("timed <= 0", NOT_RUN, None),
        ("wishes <= 1", NOT_RUN, None),
    ],
)
def test_counters_are_exact(expect: str, answer: str, count: int | None) -> None:
    """A counter is held against its bound exactly; a kernel not listed ran 0 times; what nobody counted was not run."""
    found = judge_count(one(COUNTER.replace("compiles <= 2", expect)), COUNTERS)
    assert (found.answer, found.count) == (answer, count)
    assert found.to_json()["estimate"] == count


def test_entries_of_a_document() -> None:
    """A decision's figures stand in its entry; what is not known is null, and never infinite."""
    gate = one(RATIO)
    machine = Machine(1)
    answer = judge_time(gate, decide(machine.rounds(0.4), "head", "base", 0.5, 20.0))
    entry = answer.to_json()
    assert (entry["answer"], entry["kind"], entry["against"]) == (FINE, "ratio", "ggml")
    assert entry["low"] < 0.4 < entry["high"] < entry["limit"]
    assert f"{entry['rounds']} rounds" in entry["reason"]
    nothing = judge_time(gate, decide(Machine(opening=9.0).rounds(), "head", "base", 0.5, 5.0))
    assert nothing.answer == UNDECIDED
    assert nothing.reason.endswith("nothing can be seen with so many")
    assert nothing.to_json()["high"] is None
    json.dumps([entry, nothing.to_json(), Answer(gate, NOT_RUN, "x").to_json()], allow_nan=False)


def test_exit_codes() -> None:
    """1 where a gate regressed or a case failed, 5 where one is undecided, 3 where none was run."""
    gate = one(COUNTER)
    fine, bad, open_, absent = (Answer(gate, a, "") for a in (FINE, REGRESSED, UNDECIDED, NOT_RUN))
    broke = Answer(gate, NOT_RUN, "", broke=True)
    assert outcome([fine, absent]).exit_code == 0
    assert outcome([fine, open_, absent]).exit_code == 5
    assert outcome([fine, open_, bad]).exit_code == outcome([fine, broke]).exit_code == 1
    assert outcome([absent, absent]).exit_code == outcome([]).exit_code == 3


def judged(gate: Gate, **known: object) -> Answer:
    """What a judge with little patience says."""
    runner = Runner()
    try:
        return Judge(Bench(runner), 1.0, **known).answer(gate)  # type: ignore[arg-type]  # what each test knows
    finally:
        runner.close()


def test_what_is_not_run() -> None:
    """Another machine, a backend that is not here, and a missing baseline make a gate `not run`, never fine."""
    (ggml,) = parse_specs(["ggml"])
    assert judged(one(ABSOLUTE), machine="ba9876543210").reason == (
        "it is about machine 0123456789ab, and this is ba9876543210"
    )
    assert judged(one(RATIO), lacking={ggml: "no wheel"}).reason == "ggml: not available: no wheel"
    assert judged(one(RATIO.replace('"ggml"', '"baseline"'))).reason.startswith("no baseline was given")


def test_a_case_that_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit whose case did not pass is not timed: the gate was not run and the run fails."""

    def refuse(*_: object) -> None:
        raise UnavailableError("gone")

    monkeypatch.setattr("conformance.perf.bench.Bench.measured", refuse)
    answer = judged(one(COUNTER))
    assert (answer.answer, answer.broke) == (NOT_RUN, True)
    assert "gone" in answer.reason


def test_gates_on_the_command_line(tmp_path: Path) -> None:
    """`conform perf gate` measures a counter gate of a real backend, says what became of each, and writes it down."""
    path, out = tmp_path / "gates.toml", tmp_path / "out.json"
    counter = COUNTER.replace("compiles <= 2", "timed.nodes >= 1").replace("load", "decode@past=0")
    path.write_text(HEAD + counter + ABSOLUTE)
    result = CliRunner().invoke(main, ["perf", "gate", str(path), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 fine, 0 regressed, 0 undecided, 1 not run" in result.output
    document = json.loads(out.read_text())
    assert [g["answer"] for g in document["gates"]] == [FINE, NOT_RUN]
    assert [u["unit"] for u in document["units"]] == ["decode@past=0"]
    path.write_text(HEAD + counter.replace(">= 1", "== 0"))
    assert CliRunner().invoke(main, ["perf", "gate", str(path)]).exit_code == 1
    path.write_text(HEAD + ABSOLUTE)
    assert CliRunner().invoke(main, ["perf", "gate", str(path)]).exit_code == 3
