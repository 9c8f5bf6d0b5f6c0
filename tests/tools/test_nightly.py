"""The nightly: no part takes another down, and one exit code and one summary say what came of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from night_script import POSIX, SCRIPT, lives, night, until

from conformance.case.case import JSON
from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome
from conformance.judge.verdict import Result, Verdict
from conformance.nightly import summary
from conformance.nightly.night import outcome, run
from conformance.nightly.parts import PARTS, Options, Paths, shown
from conformance.nightly.state import Answer, Done, State, begin, hold, read
from conformance.nightly.summary import Failure
from conformance.report.markdown import cut
from conformance.report.runfile import record
from conformance.run.session.shard import Shard

pytestmark = POSIX


def test_cases_without_a_result_are_no_end_of_a_part(tmp_path: Path) -> None:
    """A part that lacks results could not run: the next start runs it again, the summary counts, the exit code is 1."""
    done = night(tmp_path, "--parts", "fine,lacking")
    assert done.returncode == 1, done.stdout
    assert not read(tmp_path).parts["lacking"].ended
    assert "2 cases asked of fake have no result: its worker died" in (tmp_path / summary.FILE).read_text()
    assert "2 without a result" in (tmp_path / summary.FILE).read_text()


def test_a_part_that_stopped_early_is_incomplete(tmp_path: Path) -> None:
    """By a limit of its own, or with a gate undecided: no failure and no success; the next start runs it again."""
    done = night(tmp_path, "--parts", "fine,stopped")
    assert done.returncode == 5, done.stdout
    assert "stopped: incomplete: " in done.stdout
    assert done.stdout.rstrip().endswith("no failures so far, but a part timed out or decided nothing; exit code 5")
    assert read(tmp_path).parts["stopped"].answer is Answer.INCOMPLETE
    assert night(tmp_path, "--parts", "fine,stopped").returncode == 5
    assert {n: p.starts for n, p in read(tmp_path).parts.items()} == {"fine": 1, "stopped": 2}
    assert night(tmp_path / "n", "--parts", "stopped,failing").returncode == 1


def test_the_page_of_a_night_has_no_exit_code_of_its_own(tmp_path: Path) -> None:
    """It ends as what it shows, which has counted already; only one that leaves no page could not run."""
    assert night(tmp_path / "a", "--parts", "fine,page").returncode == 0
    assert read(tmp_path / "a").parts["page"].answer is Answer.FINE
    assert night(tmp_path / "b", "--parts", "fine,no-page").returncode == 1
    assert read(tmp_path / "b").parts["no-page"].answer is Answer.BROKEN


def test_no_part_takes_another_down(tmp_path: Path) -> None:
    """Crash, traceback, no document, a wrong or torn one, no program, a limit: each is said, and the next part runs."""
    broken = ["crash", "traceback", "silent", "other-kind", "torn", "late", "absent", "unknown", "report"]
    done = night(tmp_path, "--parts", ",".join([*broken, "fine", "history"]))
    assert done.returncode == 1, done.stdout
    parts = read(tmp_path).parts
    assert {n: str(parts[n].answer) for n in broken if n != "late"} == {
        n: "could not run" for n in broken if n != "late"
    }
    assert parts["late"].answer is Answer.LATE
    assert parts["fine"].answer is parts["history"].answer is Answer.FINE
    text = (tmp_path / "summary.md").read_text()
    for n in broken:
        assert f"- **{n}** on " in text
    assert "signal 11: last words" in parts["crash"].says
    assert "a fault of its own" in parts["traceback"].says
    assert "it wrote no document" in parts["silent"].says
    assert "perf, conformance expected" in parts["other-kind"].says
    assert "what it had by then is recorded" in parts["late"].says
    assert "No such file" in parts["absent"].says
    assert "- not asked for: work, rounds, failing" in text
    assert "late.json" in (tmp_path / "imported").read_text()


def test_what_could_not_run_is_tried_again(tmp_path: Path) -> None:
    """A further start runs what could not run, and what sums up after it; the rest it leaves."""
    assert night(tmp_path, "--parts", "silent,fine,history").returncode == 1
    assert night(tmp_path, "--parts", "silent,fine,history").returncode == 1
    parts = read(tmp_path).parts
    assert {n: p.starts for n, p in parts.items()} == {"silent": 2, "fine": 1, "history": 2}


def test_a_finished_night_says_the_same_again(tmp_path: Path) -> None:
    """Started once more, nothing runs, and exit code and summary are what they were."""
    first = night(tmp_path, "--parts", "work,history")
    text = (tmp_path / "summary.md").read_text()
    again = night(tmp_path, "--parts", "work,history")
    assert first.returncode == again.returncode == 0
    assert (tmp_path / "summary.md").read_text() == text.replace("\n\n##", "; started 2 times\n\n##", 1)
    assert len((tmp_path / "imported").read_text().splitlines()) == 1


def test_nothing_stays_behind_a_part(tmp_path: Path) -> None:
    """What a part started and left running is ended with it."""
    assert night(tmp_path, "--parts", "child").returncode == 0
    child = int((tmp_path / "pid").read_text())
    until(lambda: not lives(child))


def test_rounds_go_on_until_the_budget_is_used(tmp_path: Path) -> None:
    """A part that repeats writes a document per round; without a budget it does not run, which is no failure."""
    assert night(tmp_path / "a", "--parts", "rounds", "--time-budget", "0.3").returncode == 0
    done = read(tmp_path / "a").parts["rounds"]
    assert done.documents == [f"rounds-{n}.json" for n in range(1, done.rounds + 1)]
    assert done.rounds >= 1
    none = night(tmp_path / "b", "--parts", "rounds,fine", "--time-budget", "0")
    assert none.returncode == 0
    assert "- not asked for: " in none.stdout


def test_shards_merge_into_one_night(tmp_path: Path) -> None:
    """Each whole part is done by one shard; merged there is one summary of all; a shard that is missing is said."""
    parts = "work,fine,failing"
    codes = [
        night(tmp_path / f"{k}", "--parts", parts, "--shard", f"{k}/2", "--label", "here").returncode for k in (1, 2)
    ]
    assert codes == [0, 1]
    states = [read(tmp_path / f"{k}") for k in (1, 2)]
    assert [s.parts["fine"].answer for s in states] == [Answer.FINE, Answer.ELSEWHERE]
    assert [s.parts["failing"].answer for s in states] == [Answer.ELSEWHERE, Answer.FAILED]
    assert (tmp_path / "2" / "work-shard2.json").exists()
    merge = ["--parts", "history", "--merge", str(tmp_path / "2")]
    half = night(tmp_path / "half", *merge)
    assert half.returncode == 1
    assert "- here: shard 1 of 2 is missing: about 50 % of the cases did not run" in half.stdout
    whole = night(tmp_path / "whole", *merge, "--merge", str(tmp_path / "1"))
    assert whole.returncode == 1, whole.stdout
    assert "here shard 1/2, here shard 2/2" in whole.stdout
    assert "is missing:" not in whole.stdout
    assert "`conform run --case f/w@1 --backend fake`" in whole.stdout
    imported = (tmp_path / "whole" / "imported").read_text()
    assert imported == "failing-shard2.json fine-shard1.json work-shard1.json work-shard2.json\n"


def _shard(folder: Path, index: int, of: int, verdicts: dict[str, str], **extra: JSON) -> Path:
    """A document of one shard: a case on each backend, with its verdict."""
    results = [Result(f"f/{index}@1", b, Verdict(v)) for b, v in verdicts.items()]
    document = {**record(results), "shard": Shard(index, of).to_json(["f/1@1", "f/2@1"]), **extra}
    path = folder / f"{index}-{of}.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("first", "second", "backends"),
    [
        ("UNSUPPORTED", "UNSUPPORTED", ["b"]),
        ("XFAIL", "UNSUPPORTED", ["b"]),
        ("UNSUPPORTED", "PASS", []),
        ("UNSUPPORTED", "FAIL", []),
    ],
)
def test_merged_shards_prove_something_of_each_backend(
    tmp_path: Path, first: str, second: str, backends: list[str]
) -> None:
    """A backend on which nothing passed in all shards together is named, and the report ends with 3; one shard alone,
    or one that is missing a result, says nothing of that, and the report that the other shard is missing.
    """
    paths = [_shard(tmp_path, k, 2, {"a": "PASS", "b": v}) for k, v in ((1, first), (2, second))]
    documents = [json.loads(p.read_text()) for p in paths]
    assert list(summary.unproven(documents)) == backends
    assert summary.unproven(documents[:1]) == {}
    lacking = {**documents[1], "missing": [{"backend": "b", "case": "f/3@1", "reason": "died"}]}
    assert summary.unproven([documents[0], lacking]) == {}
    for several, code in ((paths, 3 if backends else 1 if second == "FAIL" else 0), (paths[:1], 1)):
        done = CliRunner().invoke(main, ["report", *map(str, several), "-o", str(tmp_path / "page")])
        assert done.exit_code == code, done.output
        assert ("b: nothing passed of 2 cases asked" in done.output) is (code == 3)
        assert ("b: shard 2 of 2 is missing" in done.output) is (several != paths)


def test_a_newer_run_proves_what_shards_did_not(tmp_path: Path) -> None:
    """Shards on which nothing passed are no matter once a later run on that machine has a PASS."""
    paths = [_shard(tmp_path, k, 2, {"b": "UNSUPPORTED"}, written="2020-01-01T00:00:00Z") for k in (1, 2)]
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps(record([Result("f/1@1", "b", Verdict.PASS)])))
    words = ["report", "-o", str(tmp_path / "page"), *map(str, paths)]
    assert CliRunner().invoke(main, words).exit_code == 3
    assert CliRunner().invoke(main, [*words, str(newer)]).exit_code == 0


def test_a_merged_night_in_which_nothing_passed_on_a_backend_is_no_success(tmp_path: Path) -> None:
    """Each shard by itself is fine; merged, the summary names the backend and the exit code is 3."""
    for k in (1, 2):
        folder = tmp_path / f"{k}"
        folder.mkdir()
        state = begin(folder, "here", {"level": "smoke", "shard": f"{k}/2"})
        path = _shard(folder, k, 2, {"a": "PASS", "b": "UNSUPPORTED"})
        state.parts = {"work": Done(Answer.FINE, documents=[path.name])}
        state.exit_code = 0
        state.save()
    merged = night(
        tmp_path / "whole", "--parts", "history", "--merge", str(tmp_path / "1"), "--merge", str(tmp_path / "2")
    )
    assert merged.returncode == 3, merged.stdout
    assert "- here: b: nothing passed of 2 cases asked: 2 UNSUPPORTED, so nothing is proven of it" in merged.stdout
    half = night(tmp_path / "half", "--parts", "history", "--merge", str(tmp_path / "1"))
    assert half.returncode == 1
    assert "nothing passed of" not in half.stdout.replace("nothing passed on a backend", "")


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    """Other words or another machine do not go on with a night; a file that is none is one line."""
    asked = {"level": "smoke"}
    state = begin(tmp_path, "here", asked)
    state.save()
    assert begin(tmp_path, "here", asked).head["run"] == state.head["run"]
    with pytest.raises(UsageError, match="was asked for level 'smoke', this one 'full'"):
        begin(tmp_path, "here", {"level": "full"})
    for text in ("", "{}", "[]", '{"kind": "nightly"}', "\0"):
        (tmp_path / "nightly.state").write_text(text)
        with pytest.raises(UsageError, match="no state of a nightly"):
            begin(tmp_path, "here", asked)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parts", "nope"], "part 'nope' is unknown; known: work, rounds"),
        (["--shard", "3/2"], "--shard '3/2'"),
        (["--backend", "nope"], "--backend nope: is not installed; known: "),
        (["--family", "nope"], "family 'nope' is unknown"),
        (["--merge", "."], "no night is there"),
        (["--level", "nope"], "'nope' is not one of"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, words: list[str], says: str) -> None:
    """Exit code 2, before anything runs."""
    where = tmp_path / "night"
    done = subprocess.run(
        [*SCRIPT, "-o", str(where), *words], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert not list(where.glob("*.json"))


def _in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run([*SCRIPT, *words], capture_output=True, text=True, timeout=60, check=False, cwd=folder)


def test_merging_runs_nothing_again(tmp_path: Path) -> None:
    """With --merge, --parts chooses among what sums up; a part that runs cases is not run, and alone is refused."""
    assert night(tmp_path / "1", "--parts", "work").returncode == 0
    ran = (tmp_path / "1" / "ran").read_text()
    merge = ["--merge", str(tmp_path / "1")]
    assert night(tmp_path / "all", *merge, "--parts", "work,history").returncode == 0
    assert not (tmp_path / "all" / "ran").exists()
    assert (tmp_path / "1" / "ran").read_text() == ran
    refused = night(tmp_path / "none", *merge, "--parts", "work")
    assert (refused.returncode, refused.stderr.splitlines()) == (
        2,
        ["conform nightly: --parts work: --merge runs nothing again, so one of history, report is expected"],
    )


def test_a_restart_past_midnight_goes_on(tmp_path: Path) -> None:
    """The default folder is that of the newest night of the same words that did not end; of others it is today's."""
    words = ["--parts", "fine,work"]
    assert _in(tmp_path, *words).returncode == 0
    (today,) = (tmp_path / "nightly").glob("*-*")
    for name, code, label in (("2020-01-01", None, "a"), ("2020-01-02", 130, "b"), ("2020-01-03", 1, "c")):
        folder = tmp_path / "nightly" / name
        folder.mkdir()
        state = read(today)
        state.folder, state.exit_code, state.parts = folder, code, {}
        state.head = {**state.head, "written": f"{name}T00:00:00Z", "run": label * 32}
        state.save()
    shutil.rmtree(today)
    other = _in(tmp_path, *words, "--level", "smoke")
    assert "going on" not in other.stdout
    shutil.rmtree(today)
    again = _in(tmp_path, *words)
    assert again.returncode == 0
    assert again.stdout.startswith("nightly/2020-01-02: going on with the night there, which did not come to its end")
    assert read(tmp_path / "nightly" / "2020-01-02").head["run"] == "b" * 32
    assert not today.exists()


def test_each_night_draws_a_seed_and_repeats_it_when_told(tmp_path: Path) -> None:
    """Two nights have two seeds, a restart keeps its own, `--seed` gives it again; it is printed and in the state."""
    seeds = []
    for name in ("a", "b"):
        done = night(tmp_path / name, "--parts", "fine")
        seeds.append(read(tmp_path / name).seed)
        assert f"seed of this night: {seeds[-1]}; repeat it with `conform nightly --seed {seeds[-1]}`" in done.stdout
    assert seeds[0] != seeds[1]
    night(tmp_path / "a", "--parts", "fine")
    assert read(tmp_path / "a").seed == seeds[0]
    assert f"has seed {seeds[0]}, this one 5" in night(tmp_path / "a", "--parts", "fine", "--seed", "5").stderr
    assert night(tmp_path / "c", "--parts", "fine", "--seed", "5").returncode == 0
    assert read(tmp_path / "c").seed == 5


def test_the_seed_of_the_night_reaches_the_cases(tmp_path: Path) -> None:
    """Generated cases run under it, each round of fresh ones under one of its own; the summary names it."""
    options, paths = Options(tmp_path, seed=41), Paths(tmp_path / "a.json", tmp_path / "a.journal", (), 1)
    words = {p.name: " ".join(p.words(options, paths)) for p in PARTS}
    assert "--level smoke " in words["seeded"]
    assert "--seed 41 " in words["seeded"]
    assert "--seed 42 " in words["fresh"]
    assert "--seed" not in words["conformance"]
    state = _state(seeded=Answer.FINE)
    state.seed = 41
    assert "--seed 41" in summary.summary([state], ["seeded"], [], [], Outcome())


def test_one_night_at_a_time_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused as long as the first is at work."""
    monkeypatch.setattr("conformance.nightly.state.PATIENCE", 0.0)
    held = hold(tmp_path)
    with pytest.raises(UsageError, match="another nightly is at work there"):
        hold(tmp_path)
    os.close(held)
    os.close(hold(tmp_path))


def _state(**answers: Answer | None) -> State:
    return State(
        Path(), {"written": "2026-01-01T00:00:00Z"}, "here", {}, parts={n: Done(a) for n, a in answers.items()}
    )


def test_the_exit_code_is_the_worst() -> None:
    """Failures and what could not run before what is incomplete, before nothing executed; what was not asked for does
    not count.
    """
    fine, failed, broken, nothing = Answer.FINE, Answer.FAILED, Answer.BROKEN, Answer.NOTHING

    def code(states: list[State], names: str, *lacking: list[str]) -> int:
        return outcome(states, list(names), *lacking).exit_code

    assert code([_state(a=fine, b=Answer.UNASKED)], "ab") == 0
    assert code([_state(a=failed, b=broken)], "ab") == 1
    assert code([_state(a=fine, b=broken)], "ab") == 1
    assert code([_state(a=fine, b=None)], "ab") == 5
    assert code([_state(a=fine, b=Answer.LATE)], "ab") == 5
    assert code([_state(a=fine, b=Answer.INCOMPLETE)], "ab") == 5
    assert code([_state(a=failed, b=Answer.INCOMPLETE)], "ab") == 1
    assert code([_state(a=fine)], "a", ["shard 2 of 2 is missing"]) == 1
    assert code([_state(a=nothing, b=fine)], "ab") == 3
    assert code([_state(a=nothing, b=Answer.LATE)], "ab") == 5
    assert code([_state(a=nothing), _state(a=fine)], "a") == 0
    assert code([_state()], "a") == 3
    assert code([_state(a=fine)], "a", [], ["b: nothing passed"]) == 3
    assert code([_state(a=failed)], "a", [], ["b: nothing passed"]) == 1


def test_the_summary_stays_under_its_size_and_names_every_command() -> None:
    """Thousands of failures with long stories fit; all of them stand in the file of commands."""
    found = [Failure("FAIL", f"f/{n}@1", "b", "x|y\n" * 5000, f"conform repro {n}", n % 2 == 1) for n in range(9000)]
    text = summary.summary([_state(work=Answer.FAILED)], ["work"], found, [], Outcome())
    assert len(text.encode()) <= summary.LIMIT
    assert "## Failing cases: 4,500" in text
    assert "… and 4,300 more" in text
    every = set(summary.reproduce(found).splitlines())
    assert all(f"  `conform repro {n}`" in every for n in range(9000))
    short = cut("ü\n" * 1000, 500, summary.REST)
    assert len(short.encode()) <= 500
    assert short.endswith("it is in the documents\n")


def test_findings_and_what_did_not_run_are_sentences() -> None:
    """A broken limit, and what was not there, are named."""
    gate = {"gate": "g", "unit": "u", "backend": "b", "reason": "why"}
    documents: list[dict[str, JSON]] = [
        {"kind": "perf", "gates": [{**gate, "answer": a} for a in ("fine", "regressed", "undecided", "not run")]},
        {"kind": "conformance", "environment": {"unavailable": {"npu": "no device"}}, "results": "torn"},
    ]  # fmt: skip
    assert summary.findings(documents) == ["gate g, u on b: why"]
    assert summary.unrun(documents) == ["backend npu: not available: no device", "gate g, u on b: why"]
    assert summary.figures(documents) == ("1 gates fine, 1 gates not run, 1 gates regressed, 1 gates undecided")


def test_github_gets_the_summary(tmp_path: Path) -> None:
    """It is appended to the file that GITHUB_STEP_SUMMARY names; one that cannot be written changes no exit code."""
    step = tmp_path / "step.md"
    step.write_text("before\n")
    assert night(tmp_path / "n", "--parts", "failing", GITHUB_STEP_SUMMARY=str(step)).returncode == 1
    text = step.read_text()
    assert text.startswith("before\n# Nightly: there are failures")
    assert "FAIL `f/w@1` on `fake`: a \\| b\n  `conform run --case f/w@1 --backend fake`" in text
    assert night(tmp_path / "m", "--parts", "fine", GITHUB_STEP_SUMMARY="/no/such/file").returncode == 0


def test_a_full_disk_does_not_stop_the_night(tmp_path: Path) -> None:
    """A log that cannot be written stops no command; a state that cannot be written is said and fails the night."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    lock = hold(tmp_path)
    ended = run([sys.executable, "-c", "print('x' * 100000); print('end')"], Path("/dev/full"), 60, lock)
    os.close(lock)
    assert (ended.code, ended.last_line) == (0, "end")
    state = _state(a=Answer.FINE)
    state.folder = tmp_path / "gone"
    state.save()
    assert "cannot be written" in state.unwritten
    assert outcome([state], ["a"]).exit_code == 1


def test_every_command_of_the_table_is_one(tmp_path: Path) -> None:
    """`conform` knows each command and option that the real parts use."""
    asked = Options(
        tmp_path, "smoke", ("cpu",), ("gqa",), Shard(1, 2), 1.0, 2.0, tmp_path / "h.sqlite", 7, tmp_path / "venv",
        "pypi:new==2", "pypi:old==1",
    )  # fmt: skip
    here = Paths(tmp_path / "a.json", tmp_path / "a.journal", (tmp_path / "b.json",))
    for part in PARTS:
        words = part.words(asked, here)
        own = words[words.index("conformance.cli") + 1 :]
        helped = CliRunner().invoke(main, [*own, "--help"])
        assert helped.exit_code == 0, (part.name, helped.output)
        assert all(o in helped.output for o in own if o.startswith("-")), part.name
        assert shown(words).startswith("conform ")
