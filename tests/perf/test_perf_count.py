"""Counted instructions: callgrind's files, the verdicts of two counts, and what stands where nothing is counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.cli import main
from conformance.ggml.errors import BackendCrashError, UnavailableError
from conformance.judge.verdict import Result, Verdict
from conformance.perf import units as table
from conformance.perf.bench import Bench, Row
from conformance.perf.count import D1_COST, FUNCTION, LL_COST, Callgrind, Counts, count, parse, total
from conformance.perf.gates import COUNT_LIMIT, NOISE, Gate, judge_counts
from conformance.run.runner import Runner
from conformance.run.session.select import build, parse_specs
from conformance.suite.ops import Timed

OP = table.op(Timed("RMS_NORM-f32-ne=64x4", 4, 3))
GGML = Spec("ggml")
needs_valgrind = pytest.mark.skipif(shutil.which("vgdb") is None, reason="valgrind is not installed")
GATE = Gate("g", "ratio", OP, GGML, COUNT_LIMIT, against="baseline")
FILE = """# callgrind format
version: 1
part: 2
positions: line
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw

ob=(1) /lib/libggml-cpu.so
fl=(1) ???
fn=(7) ggml_graph_compute
0 20 4
cfn=(9) ggml_vec_dot_q4_0_q8_0
calls=3 0
0 300 90 0 0 7
+1 5 1

fn=(9)
0 300 90 0 0 7 2 0 1

totals: 325 95 0 0 7 2 0 1
"""
events = st.integers(1, 10**12)
names = st.text("abcdefg_:<>(), ", min_size=1).map(lambda s: f"f{s}".rstrip())


def _counted(counts: Counts, seconds: float | None = None) -> Result:
    metrics = {**counts.metrics(), **({} if seconds is None else {"seconds": seconds})}
    return Result(OP.id, "ggml", Verdict.PASS, metrics=metrics)


def test_a_file_of_callgrind() -> None:
    """The cost of a called function counts once, and absent columns are 0."""
    assert parse(FILE) == Counts(325, 9, 1, {"ggml_graph_compute": 25, "ggml_vec_dot_q4_0_q8_0": 300})


@given(st.dictionaries(names, st.tuples(events, events, events), min_size=1))
def test_parsing_reverses_rendering(costs: dict[str, tuple[int, int, int]]) -> None:
    """Whatever the names and numbers are, each function has its own instructions, and the totals are the file's."""
    lines = ["events: Ir D1mr D1mw DLmr DLmw"]
    for i, (name, (n, d1, ll)) in enumerate(costs.items()):
        lines += [f"cfn=({i}) {name}", "calls=1 0", "0 5", f"fn=({i})", f"0 {n} {d1} 0 {ll}"]
    n, d1, ll = (sum(c[k] for c in costs.values()) for k in range(3))
    found = parse("\n".join([*lines, f"totals: {n} {d1} 0 {ll}"]))
    assert found == Counts(n, d1, ll, {name: c[0] for name, c in costs.items()})
    assert total([found, found]).metrics() == {k: 2 * v for k, v in found.metrics().items()}


@pytest.mark.parametrize(
    "text", ["", "totals: 3", "events: Ir\ntotals: 3", FILE.replace("325", "many"), "events: Ir Ir"]
)
def test_another_file(text: str) -> None:
    """Other text is an error that lists the events which are needed."""
    with pytest.raises(UnavailableError, match="a file of callgrind with events Ir, D1mr"):
        parse(text)


@given(events, st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0.01, 100))
def test_equal_counts_pass(n: int, d1: int, ll: int, slower: float) -> None:
    """Two equal counts are no regression, whatever the clock says."""
    counts = Counts(n, d1, ll)
    assert judge_counts(GATE, _counted(counts, slower), _counted(counts, 1.0)).verdict is Verdict.PASS


@given(st.integers(10**5, 10**12), st.integers(0, 10**9), st.floats(1.0, 1.2), st.floats(0.01, 1))
def test_more_instructions_fail(n: int, misses: int, ratio: float, faster: float) -> None:
    """More instructions than the limit are a FAIL, though misses and time fell; no more of either is a PASS."""
    now = Counts(int(n * ratio), misses // 2, misses // 4)
    found = judge_counts(GATE, _counted(now, faster), _counted(Counts(n, misses, misses), 1.0))
    over = now.instructions / n > COUNT_LIMIT and now.instructions - n > NOISE["instructions"]
    assert (found.verdict is Verdict.FAIL) == over
    assert found.metrics["ratio.instructions"] == now.instructions / n


@given(st.integers(10**6, 10**9), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_misses_alone_fail(n: int, base: int, d1: int, ll: int) -> None:
    """With equal instructions, misses are a FAIL once their cycles are over the limit."""
    then, now = Counts(n, base, base), Counts(n, base + d1, base + ll)
    cycles = n + (D1_COST + LL_COST) * base
    over = (cycles + D1_COST * d1 + LL_COST * ll) / cycles > COUNT_LIMIT
    found = judge_counts(GATE, _counted(now), _counted(then))
    assert found.verdict is (Verdict.FAIL if over else Verdict.PASS)
    assert ("D1 misses" in found.detail) == (over and bool(base))


@given(st.integers(1, 10**6), st.integers(0, 1000), st.integers(0, 900), st.integers(1, 20))
def test_noise_of_a_small_unit_passes(n: int, more: int, d1: int, graphs: int) -> None:
    """A few hundred instructions and misses for each graph are no regression, however small the unit is."""
    then, now = Counts(n, 0, 0, {}, graphs), Counts(n + more * graphs, d1 * graphs, 0, {}, graphs)
    assume(more + D1_COST * d1 <= NOISE["cycles"])
    assert judge_counts(GATE, _counted(now), _counted(then)).verdict is Verdict.PASS


def test_a_finding_has_op_shape_ratio_and_function() -> None:
    """The reason names the shape, the ratio, the time, and the function that grew most."""
    then = Counts(100_000, 0, 0, {"dot": 80_000, "loop": 20_000})
    now = Counts(102_000, 0, 0, {"dot": 82_000, "loop": 20_000})
    found = judge_counts(GATE, _counted(now, 0.9), _counted(then, 1.0), now.grown(then))
    assert found.verdict is Verdict.FAIL
    assert "RMS_NORM-f32-ne=64x4: 1.0200 × instructions" in found.detail
    assert "at most 1.005 allowed, 0.90 × time; most in dot: 1.0250 ×" in found.detail
    assert then.grown(then) is None


def test_a_baseline_without_counts() -> None:
    """A record of times alone cannot judge counts; a unit that failed keeps its verdict."""
    counted = _counted(Counts(1, 1, 1))
    timed = Result(OP.id, "ggml", Verdict.PASS, metrics={"seconds": 1.0})
    for then in (timed, None):
        assert judge_counts(GATE, counted, then).verdict is Verdict.UNSUPPORTED
    assert judge_counts(GATE, Result(OP.id, "ggml", Verdict.CRASH), counted).verdict is Verdict.CRASH


def test_valgrind_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs, and the message says what to install."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    done = CliRunner().invoke(main, ["perf", "run", "--count", "-b", "cpu", "op/RMS_NORM*"])
    assert done.exit_code == 2
    assert "install the package valgrind" in done.output


def _dies(how: str) -> Callable[[], object]:
    def opener() -> object:
        raise BackendCrashError("died", died=how)

    return opener


class Blind:
    """A counter that runs nothing and counts nothing."""

    under: tuple[str, ...] = ("env",)

    def begin(self, pid: int) -> None:
        """Do nothing."""

    def take(self) -> Counts | None:
        """Return no counts, as if ggml had not been called."""
        return None


def test_an_instruction_that_valgrind_does_not_know() -> None:
    """SIGILL says which builds can be counted; any other death stays a crash."""
    case = build(OP.case_id)
    with pytest.raises(UnavailableError, match=r"AVX-512.*ggml\?variant=haswell"):
        count(OP, case, _dies("SIGILL"), Blind())  # type: ignore[arg-type]  # it opens nothing
    with pytest.raises(BackendCrashError, match="died"):
        count(OP, case, _dies("SIGSEGV"), Blind())  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("cpu", f"it does not call {FUNCTION}"),
        pytest.param("ggml?threads=2", "one process and one thread", marks=needs_wheel),
    ],
)
def test_a_backend_that_cannot_be_counted(spec: str, why: str) -> None:
    """The row is UNSUPPORTED, with the reason, and keeps no counts."""
    (parsed,) = parse_specs([spec])
    runner = Runner()
    row = Row(OP, parsed, Result(OP.id, spec, Verdict.PASS))
    Bench(runner).count(row, lambda: nullcontext(Blind()))
    runner.close()
    assert row.result.verdict is Verdict.UNSUPPORTED
    assert why in row.result.detail
    assert row.counts is None


def test_units_without_steps_are_not_counted() -> None:
    """A unit that only opens a session keeps its result."""
    unit = table.load(table.SMALL)
    row = Row(unit, GGML, Result(unit.id, "ggml", Verdict.PASS))
    runner = Runner()
    Bench(runner).count(row, lambda: nullcontext(Blind()))
    runner.close()
    assert (row.counts, row.result.verdict) == (None, Verdict.PASS)


@needs_valgrind
def test_an_unreachable_process(tmp_path: Path) -> None:
    """If valgrind's channel does not answer, the message says so."""
    with pytest.raises(UnavailableError, match="vgdb did not reach valgrind"):
        Callgrind(tmp_path).begin(1)


@needs_valgrind
@needs_wheel
def test_two_counts_of_a_build_are_equal() -> None:
    """The same build executes the same number of instructions each time."""
    runner = Runner()
    bench = Bench(runner)
    rows = [Row(OP, GGML, Result(OP.id, "ggml", Verdict.PASS)) for _ in range(2)]
    for row in rows:
        bench.count(row)
    runner.close()
    a, b = (row.result for row in rows)
    assert a.verdict is Verdict.PASS, a.detail
    assert a.metrics["instructions"] == b.metrics["instructions"] > 0
    assert judge_counts(GATE, a, b).verdict is Verdict.PASS
