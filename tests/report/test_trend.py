"""Trends of a folder of records: what they say does not depend on the order of files, copies or other machines."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_files import cause, document, head, result, unit, written_to

from conformance.cli import main
from conformance.perf.statistics import median_interval
from conformance.report.trend import FEWEST, Change, Trend, changes, read_trend

A, B = "ops/ADD-f32+f32-a=3@1", "ops/SUM-f32-ne=3@1"


def _day(n: int) -> str:
    return f"2026-{n // 28 + 1:02}-{n % 28 + 1:02}T00:00:00Z"


def _nights(folder: Path, rates: list[float], machine: str = "m1") -> Trend:
    """The trend of a folder with one run per rate, whose file names are in another order than their times."""
    folder.mkdir(exist_ok=True)
    for n, rate in enumerate(rates):
        made = document([unit("decode", "x", [64 / rate])], written=_day(n), machine=machine)
        written_to(folder / f"{len(rates) - n:03}.json", made)
    return read_trend([folder])


def _found(rates: list[float], folder: Path) -> list[Change]:
    return changes(_nights(folder, rates).series())


def test_interval_of_a_median() -> None:
    """The exact binomial interval: of 6 values the extremes, of 20 the 6th from either end; none under 6."""
    assert median_interval([5, 1, 2, 3, 4]) == (None, None)
    assert median_interval([5, 1, 2, 3, 4, 6]) == (1, 6)
    assert median_interval(list(range(1, 21))) == (6, 15)


def test_a_series_is_of_one_case_backend_and_machine(tmp_path: Path) -> None:
    """Its points are in the order of their times, and a copy of a file adds none."""
    _nights(tmp_path / "a", [3.0, 2.0, 1.0])
    trend = _nights(tmp_path, [5.0], "m2")
    (tmp_path / "copy.json").write_bytes((tmp_path / "a" / "001.json").read_bytes())
    again = read_trend([tmp_path])
    for found in (trend, again):
        assert [(s.case, s.backend, s.machine, s.of) for s in found.series()] == [
            ("perf/decode/llama-tiny@1", "x", machine, "tokens") for machine in ("m1", "m2")
        ]
        assert [[round(p.pace.rate, 9) for p in s.points] for s in found.series()] == [[3.0, 2.0, 1.0], [5.0]]


def test_a_step_is_found_where_it_is(tmp_path: Path) -> None:
    """10 % in noise of 1 %, two steps in one series, and the same whenever asked; none in a series that is constant."""
    chance = random.Random(7)  # noqa: S311  # noise, no secret
    noise = [100 + chance.gauss(0, 1) for _ in range(28)]
    (one,) = _found([x * (0.9 if i >= 15 else 1) for i, x in enumerate(noise)], tmp_path / "one")
    assert (one.since.document.written, one.at.document.written) == (_day(14), _day(15))
    assert 0.88 < one.after / one.before < 0.92
    stepped = [x * (1 if i < 9 else 0.9 if i < 18 else 1.2) for i, x in enumerate(noise)]
    two = _found(stepped, tmp_path / "two")
    assert [c.at.document.written for c in two] == [_day(9), _day(18)]
    assert two[0].after == two[1].before
    assert [c.p for c in two] == [c.p for c in _found(stepped, tmp_path / "again")]
    assert _found([100.0] * 28, tmp_path / "same") == []


def test_few_runs_have_no_change(tmp_path: Path) -> None:
    """The shortest series in which a step can be found has `FEWEST` runs."""
    steps = [100.0 + i % 3 for i in range(5)] + [50.0 + i % 3 for i in range(FEWEST - 5)]
    assert len(_found(steps, tmp_path / "enough")) == 1
    assert _found(steps[1:], tmp_path / "few") == []


def test_noise_rarely_has_a_change(tmp_path: Path) -> None:
    """At most 3 of 200 series of noise, whose rate is 0.5 % by `MAX_P`: 4 or more have a probability of 2 %."""
    chance = random.Random(11)  # noqa: S311  # as above
    alarms = 0
    for n in range(200):
        folder = tmp_path / str(n)
        alarms += bool(_found([100 + chance.gauss(0, 1) for _ in range(20)], folder))
    assert alarms <= 3


def test_causes_and_good_runs(tmp_path: Path) -> None:
    """A cause has its first and last run, and is no longer open once its smallest case passed in a later run."""
    for n in (0, 1, 3):
        rows = [result(A, "x", "FAIL", cause="p"), result(B, "x", "PASS")]
        made = {**document(rows, written=_day(n)), "causes": [cause("p", [A])]}
        written_to(tmp_path / f"{9 - n}.json", made)
    passing = document([(A, "x", "PASS"), (B, "y", "UNSUPPORTED")], written=_day(2))
    written_to(tmp_path / "a.json", passing)
    trend = read_trend([tmp_path])
    (known,) = trend.causes()
    assert (known.first, known.last, known.runs, known.passed) == (_day(0), _day(3), 3, None)
    assert trend.good == {"x": _day(2), "y": None}
    written_to(tmp_path / "b.json", document([(A, "x", "PASS")], written=_day(4)))
    (known,) = read_trend([tmp_path]).causes()
    assert (known.runs, known.passed) == (3, _day(4))


def test_the_command_shows_a_trend(tmp_path: Path) -> None:
    """`--trend DIR` prints and writes what the folder and the named runs have; a wrong file is one error."""
    folder = tmp_path / "runs"
    _nights(folder, [100.0] * 6 + [50.0] * 5)
    written_to(folder / "old.json", head("planted"))
    run = written_to(tmp_path / "run.json", document([(A, "x", "PASS")], written=_day(20)))
    told = tmp_path / "told.json"
    done = CliRunner().invoke(main, ["report", str(run), "--trend", str(folder), "--json", str(told)])
    assert done.exit_code == 0, done.output
    assert f"last good run on x: {_day(20)}" in done.output
    assert "1 change in 1 rate; 0 have fewer than 11 runs" in done.output
    made = json.loads(told.read_text(encoding="utf-8"))
    assert made["last_good"] == {"x": _day(20)}
    assert [c["written"] for c in made["changes"]] == [_day(6)]
    assert CliRunner().invoke(main, ["report", str(run)]).exit_code == 2
    written_to(folder / "bad.json", {**head("conformance"), "results": 5})
    bad = CliRunner().invoke(main, ["report", str(run), "--trend", str(folder)])
    assert (bad.exit_code, "bad.json: results: Expected `array`" in bad.output) == (2, True), bad.output


@pytest.mark.parametrize("name", ["none", "run.json"])
def test_a_trend_is_of_a_folder(tmp_path: Path, name: str) -> None:
    """Exit code 2 if there is none."""
    run = written_to(tmp_path / "run.json", document([(A, "x", "PASS")]))
    assert CliRunner().invoke(main, ["report", str(run), "--trend", str(tmp_path / name)]).exit_code == 2
