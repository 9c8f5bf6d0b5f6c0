"""The nightly: no part takes another down, and one exit code says what came of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from night_script import POSIX

from conformance import nightly
from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Exit, Why
from conformance.nightly import STATE, Night, Options, Step, held, share, steps
from conformance.run.session.shard import Shard

pytestmark = POSIX

BEGIN = """
import os, sys
from pathlib import Path
sys.path[:0] = [{helpers!r}]
from run_files import document, written_to
folder, name = Path({folder!r}), {name!r}
def write(verdict="PASS"):
    written_to(folder / f"{{name}}.json", document([("f/w@1", "fake", verdict)] if verdict else []))
with (folder / "ran").open("a") as f:
    f.write(name + "\\n")
"""
PROGRAMS = {
    "fine": "write()",
    "failing": "write('FAIL'); sys.exit(1)",
    "nothing": "write(''); sys.exit(3)",
    "stopped": "write(); sys.exit(5)",
    "crash": "import signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
    "traceback": "raise RuntimeError('a fault of its own')",
    "silent": "pass",
    "torn": "(folder / 'torn.json').write_text('{\"kind\"')",
    "child": "import subprocess; (folder / 'pid').write_text(str(subprocess.Popen(['sleep', '600']).pid)); write()",
    "page": "(folder / 'page').mkdir(exist_ok=True); (folder / 'page' / 'index.html').touch(); sys.exit(1)",
    "no-page": "sys.exit(1)",
    "endless": "import time; time.sleep(600)",
}


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument of a step is a program in place of the words of `conform`."""
    monkeypatch.setattr(nightly, "words", lambda _: [sys.executable, "-c"])


def _steps(folder: Path, *names: str) -> list[Step]:
    folder.mkdir(exist_ok=True)
    helpers = str(Path(__file__).parents[1] / "helpers" / "runs")
    texts = {n: BEGIN.format(helpers=helpers, folder=str(folder), name=n) + PROGRAMS[n] for n in names}
    return [Step(n, "made up", [text], last="page" in n) for n, text in texts.items()]


def _night(folder: Path, *names: str) -> tuple[Night, Exit, list[str]]:
    """Start or continue a night of these steps; return it, its exit code and what it told."""
    chosen, told = _steps(folder, *names), list[str]()
    night = Night.begin(folder, {}, None, resumes=False)
    night.run(chosen, told.append)
    return night, night.outcome(chosen).exit_code, told


def test_no_part_takes_another_down(tmp_path: Path) -> None:
    """A step that crashes, raises, or writes no or a torn record is reported; the next step runs."""
    broken = ("crash", "traceback", "silent", "torn")
    night, code, told = _night(tmp_path, *broken, "fine", "page")
    assert code == Exit.FAILURES
    done = night.done
    assert {n: done[n].why for n in broken} == dict.fromkeys(broken, Why.BROKEN)
    assert done["fine"].why is done["page"].why is None
    for n in broken:
        assert f"{n}: {done[n].why}: {done[n].says}" in told
    assert "signal 11: last words" in done["crash"].says
    assert "a fault of its own" in done["traceback"].says
    assert "it did not write silent.json" in done["silent"].says
    assert "torn.json: " in done["torn"].says
    assert "last words" in (tmp_path / "crash.log").read_text()


def test_what_did_not_end_runs_again_and_nothing_else(tmp_path: Path) -> None:
    """A part that could not run or left a gate undecided does, and so does the page, which shows the others."""
    for runs in (1, 2):
        _, code, told = _night(tmp_path, "fine", "failing", "stopped", "silent", "page")
        assert code == Exit.FAILURES
        ran = (tmp_path / "ran").read_text().split()
        assert {n: ran.count(n) for n in ("fine", "failing", "stopped", "silent", "page")} == {
            "fine": 1, "failing": 1, "stopped": runs, "silent": runs, "page": runs,
        }  # fmt: skip
    assert "fine: fine, in an earlier start" in told
    _night(tmp_path / "n", "fine", "page")
    _night(tmp_path / "n", "fine", "page")
    assert (tmp_path / "n" / "ran").read_text().split() == ["fine", "page"]


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("fine", "page"), Exit.OK), (("fine", "no-page"), Exit.FAILURES), (("fine", "stopped"), Exit.INCOMPLETE),
        (("stopped", "failing"), Exit.FAILURES), (("fine", "nothing"), Exit.NOTHING),
    ],
)  # fmt: skip
def test_the_worst_part_decides(tmp_path: Path, names: tuple[str, ...], code: Exit) -> None:
    """A page ends as what it shows, which counts already; one that was not written could not run."""
    assert _night(tmp_path, *names)[1] is code


def test_nothing_stays_behind_a_part(tmp_path: Path) -> None:
    """A process that a step started and left running ends with the step."""
    assert _night(tmp_path, "child")[1] is Exit.OK
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_part_ends_in_its_time(tmp_path: Path) -> None:
    """One that takes longer is ended and is not finished; the next part runs, and the outcome says so."""
    endless, fine = _steps(tmp_path, "endless", "fine")
    night = Night.begin(tmp_path, {}, None, resumes=False)
    night.run([replace(endless, limit=1.0), fine], lambda _: None)
    assert night.done["endless"].why is Why.TIME_LIMIT
    assert night.done["endless"].says == "ended after 1.0 s (--limit); the next start continues it"
    assert night.done["fine"].why is None
    assert night.outcome([endless, fine]).exit_code is Exit.INCOMPLETE


def test_parts_that_run_cases_use_lanes_and_each_part_has_a_limit() -> None:
    """`--jobs` and `--limit` reach every part concerned, and the same night may go on with others."""
    every = steps(Path(), Options(jobs=3, limit=60.0), 1, Path())
    for step in every:
        words = list(step.words)
        assert step.limit == 60.0
        assert (words[words.index("--jobs") + 1] if words[0] == "run" else "3") == "3"
    assert Options(jobs=3, limit=60.0).to_json() == Options(jobs=1, limit=1.0).to_json()


def _conform(*words: str) -> Result:
    return CliRunner().invoke(main, ["nightly", *words])


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line whose parts end at once and write nothing."""
    monkeypatch.setattr(nightly, "run", lambda _words, log, _limit: log.touch() or 0)


@pytest.mark.usefixtures("silent")
def test_a_night_goes_on_with_its_options_and_seed_alone(tmp_path: Path) -> None:
    """Another level, seed, --budget or --against, or other content of a backend: exit code 2 and its name."""
    words = ("-o", str(tmp_path), "--part", "perf", "--backend", "cpu")
    first = _conform(*words)
    seed = Night.read(tmp_path).seed
    assert (first.exit_code, f"{tmp_path}: --seed {seed}" in first.output) == (1, True), first.output
    assert f"--seed {seed}\n" in _conform(*words).output
    level = "level 'standard', this one with 'smoke'"
    for more, says in (
        (("--level", "smoke"), level), (("--seed", "5"), f"seed {seed}"), (("--budget", "1m"), "budget 900.0"),
        (("--against", "ggml"), "against None"),
    ):  # fmt: skip
        refused = _conform(*words, *more)
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.output
    state = Night.read(tmp_path)
    (key,) = (k for k in state.asked if k == "suite of cpu")
    state.asked[key] = "0" * 12
    state.save()
    refused = _conform(*words)
    assert (refused.exit_code, "was started with suite of cpu '000000000000'" in refused.stderr) == (2, True)
    for text in ("", "{}", "[]", "\0"):
        (tmp_path / STATE).write_text(text)
        with pytest.raises(UsageError, match="is not the state of a nightly"):
            Night.read(tmp_path)


@pytest.mark.usefixtures("silent")
def test_an_earlier_day_is_continued_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of another day do not count as today's, in the default folder or in one that -o names.

    `--continue` takes the newest folder with the same options that did not end.
    """
    monkeypatch.chdir(tmp_path)
    words = ("--part", "perf", "--backend", "cpu")
    assert _conform(*words).exit_code == 1
    (today,) = Path("nightly").glob("*-*")
    state = Night.read(today)
    for name, code in (("2020-01-01", None), ("2020-01-02", None), ("2020-01-03", 1)):
        state.folder, state.exit_code, state.day = Path("nightly") / name, code, name
        state.folder.mkdir()
        state.save()
    assert f"nightly/{today.name}: --seed" in _conform(*words).output
    old = _conform(*words, "-o", "nightly/2020-01-01")
    assert (old.exit_code, "began on 2020-01-01; continue it with --continue" in old.stderr) == (2, True), old.output
    assert "nightly/2020-01-02: --seed" in _conform(*words, "--continue").output


def test_shards_share_the_parts() -> None:
    """Each whole part is done by one shard; shared parts and the page by each."""
    every = steps(Path(), Options(), 1, Path())
    own = [share(every, Shard(k, 3)) for k in (1, 2, 3)]
    for step in every:
        assert sum(step in mine for mine in own) == (3 if step.shared or step.last else 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--part", "nope"], "--part nope: one of conformance, seeded"),
        (["--shard", "3/2"], "--shard '3/2'"),
        (["--backend", "nope"], "backend 'nope' is not installed; known: "),
        (["--family", "nope"], "family 'nope' is unknown"),
        (["--level", "nope"], "'nope' is not one of"),
        (["parts.toml"], "unexpected extra argument"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    """Exit code 2, before anything runs."""
    monkeypatch.chdir(tmp_path)
    done = _conform("-o", "night", *words)
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr
    assert not list(Path("night").glob("*.json"))


def test_one_night_at_a_time_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused as long as the first is at work."""
    monkeypatch.setattr(nightly, "PATIENCE", 0.0)
    with held(tmp_path), pytest.raises(UsageError, match="another nightly is running there"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


def test_every_command_of_the_list_is_one() -> None:
    """`conform` knows each command and option of the parts; generated cases run under the night's seed."""
    options = Options("smoke", ("cpu",), ("gqa",), Shard(1, 2), 60.0, "cpu")
    seeded = set()
    for step in steps(Path("folder"), options, 5, Path("trend")):
        own = list(step.words)
        helped = CliRunner().invoke(main, [*own, "--help"])
        assert helped.exit_code == 0, (step.name, helped.output)
        assert all(o in helped.output for o in own if o.startswith("-")), step.name
        seeded |= {step.name} if "--seed" in own else set()
    assert seeded == {"seeded", "fresh"}


def test_the_state_has_options_seed_and_outcomes(tmp_path: Path) -> None:
    """`night.json` is what the next start reads."""
    _night(tmp_path, "failing")
    state = json.loads((tmp_path / STATE).read_text(encoding="utf-8"))
    assert state["done"]["failing"]["why"] == str(Why.FAILED)
    assert isinstance(state["seed"], int)
