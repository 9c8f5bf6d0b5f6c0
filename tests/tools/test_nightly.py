"""The nightly: no part takes another down, and one exit code says what came of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from night_parts import write_parts
from night_script import NIGHTLY, POSIX, ended, lives, night, until, words_of

from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Why
from conformance.nightly import PARTS, STATE, Night, hold, read_parts, run, share
from conformance.run.session.shard import Shard

pytestmark = POSIX


def test_no_part_takes_another_down(tmp_path: Path) -> None:
    """Crash, traceback, no run file, a torn one, no program, a limit: each is said, and the next part runs."""
    broken = ("crash", "traceback", "silent", "torn", "absent", "lacking")
    done = night(tmp_path, *broken, "late", "fine", "history")
    assert done.returncode == 1, done.stdout
    parts = Night.read(tmp_path).parts
    assert {n: parts[n].why for n in broken} == dict.fromkeys(broken, Why.BROKEN)
    assert parts["late"].why is Why.TIME_LIMIT
    assert parts["fine"].why is parts["history"].why is None
    for n in (*broken, "late"):
        assert f"{n}: {parts[n].why}: {parts[n].says}" in done.stdout
    assert "signal 11: last words" in parts["crash"].says
    assert "a fault of its own" in parts["traceback"].says
    assert "it did not write silent.json" in parts["silent"].says
    assert "No such file" in parts["absent"].says
    assert "2 requested cases have no result" in parts["lacking"].says
    assert "fine.json" in (tmp_path / "imported").read_text()
    assert {n for n, p in parts.items() if not p.ended} == {*broken, "late"}


def test_a_part_that_stopped_early_is_incomplete(tmp_path: Path) -> None:
    """A part that timed out or left a gate undecided runs again at the next start.

    It is neither failure nor success; parts about the others run again, too.
    """
    for imported in (1, 2):
        done = night(tmp_path, "fine", "stopped", "history")
        assert done.returncode == 5, done.stdout
        assert Night.read(tmp_path).parts["stopped"].why is Why.UNDECIDED
        assert len((tmp_path / "imported").read_text().splitlines()) == imported
    assert "fine: fine, in an earlier start" in done.stdout
    assert night(tmp_path / "n", "stopped", "failing").returncode == 1
    assert night(tmp_path / "m", "fine", "nothing").returncode == 3


def test_the_page_has_no_exit_code_of_its_own(tmp_path: Path) -> None:
    """It ends as what it shows, which counts already; one that leaves no page could not run."""
    assert night(tmp_path / "a", "fine", "page").returncode == 0
    assert night(tmp_path / "b", "fine", "no-page").returncode == 1


def test_a_finished_night_says_the_same_again(tmp_path: Path) -> None:
    """Started once more, nothing runs, and the exit code is what it was; other options are refused."""
    first = night(tmp_path, "failing", "history")
    again = night(tmp_path, "failing", "history")
    assert first.returncode == again.returncode == 1
    assert len((tmp_path / "imported").read_text().splitlines()) == 1
    seed = Night.read(tmp_path).seed
    assert f"{tmp_path}: --seed {seed}" in first.stdout
    level = "level 'standard', this one with 'smoke'"
    for more, says in ((["--level", "smoke"], level), (["--seed", "5"], f"seed {seed}")):
        refused = night(tmp_path, "failing", more=more)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
    assert night(tmp_path / "b", "fine", more=["--seed", "5"]).returncode == 0
    assert Night.read(tmp_path / "b").seed == 5
    for text in ("", "{}", "[]", "\0"):
        (tmp_path / STATE).write_text(text)
        with pytest.raises(UsageError, match="is not the state of a nightly"):
            Night.read(tmp_path)


def test_an_earlier_day_is_continued_only_if_asked(tmp_path: Path) -> None:
    """Results of another day do not count as today's, in the default folder or in one that -o names.

    `--continue` takes the newest folder with the same options that did not end.
    """
    command = [*NIGHTLY, str(write_parts(tmp_path)), "--part", "fine"]
    assert ended(command, tmp_path).returncode == 0
    (today,) = (tmp_path / "nightly").glob("*-*")
    state = Night.read(today)
    for name, code in (("2020-01-01", None), ("2020-01-02", None), ("2020-01-03", 1)):
        state.folder, state.exit_code, state.day = tmp_path / "nightly" / name, code, name
        state.folder.mkdir()
        state.save()
    assert f"nightly/{today.name}: --seed" in ended(command, tmp_path).stdout
    old = ended([*command, "-o", "nightly/2020-01-01"], tmp_path)
    assert (old.returncode, "began on 2020-01-01; continue it with --continue" in old.stderr) == (2, True), old.stderr
    assert "nightly/2020-01-02: --seed" in ended([*command, "--continue"], tmp_path).stdout


def test_results_of_other_parts_options_or_builds_are_not_reused(tmp_path: Path) -> None:
    """A changed command of a part, --budget, --against or content of a backend ends with exit code 2 and its name."""
    assert night(tmp_path, "fine").returncode == 0
    words = words_of(tmp_path, "fine")
    for more, says in (["--budget", "1m"], "budget 900.0"), (["--against", "ggml"], "against None"):
        refused = ended([*words, *more])
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
    parts = tmp_path / "parts.toml"
    whole = parts.read_text()
    parts.write_text(whole.replace("write()", "sys.exit(1)"))
    refused = ended(words)
    assert (refused.returncode, "was started with parts " in refused.stderr) == (2, True), refused.stderr
    parts.write_text(whole)
    state = Night.read(tmp_path)
    (key,) = (k for k in state.asked if k == "suite of cpu")
    state.asked[key] = "0" * 12
    state.save()
    refused = ended(words)
    assert (refused.returncode, "was started with suite of cpu '000000000000'" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hours", '"abc"'), ("hours", "[1]"), ("hours", "nan"), ("hours", "inf"), ("hours", "0"), ("hours", "true"),
        ("command", "[1]"), ("command", "5"), ("command", "[]"), ("leaves", "5"), ("leaves", '"../x"'),
        ("leaves", '"night.json"'), ("leaves", "KEPT"), ("name", '"../x"'), ("name", '"night"'), ("name", "5"),
        ("says", "5"), ("shared", '"no"'),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_part_ends_before_anything_runs(tmp_path: Path, key: str, value: str) -> None:
    """Exit code 2 and one line that names the key; no path outside the folder is deleted or written."""
    kept = tmp_path / "kept"
    kept.write_text("mine")
    table = {"name": '"a"', "says": '"b"', "command": '["true"]', "hours": "1"}
    table[key] = value.replace("KEPT", f'"{kept}"')
    parts = tmp_path / "p.toml"
    parts.write_text("[[part]]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()))
    done = CliRunner().invoke(main, ["nightly", str(parts), "-o", str(tmp_path / "night")])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"conform: {parts}: part 1 {key}: ")
    assert kept.read_text() == "mine"


def test_a_link_out_of_the_folder_deletes_nothing(tmp_path: Path) -> None:
    """A part whose file lies behind a link that leads out of the folder could not run."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    folder = tmp_path / "night"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    parts = tmp_path / "p.toml"
    parts.write_text('[[part]]\nname = "a"\nsays = "b"\ncommand = ["true"]\nhours = 1\nleaves = "link/kept"\n')
    done = ended([*NIGHTLY, str(parts), "-o", str(folder)])
    assert (done.returncode, "a link leads out of the folder" in done.stdout) == (1, True), done
    assert (outside / "kept").read_text() == "mine"


def test_nothing_stays_behind_a_part(tmp_path: Path) -> None:
    """What a part started and left running is ended with it."""
    assert night(tmp_path, "child").returncode == 0
    child = int((tmp_path / "pid").read_text())
    until(lambda: not lives(child))


def test_shards_share_the_parts(tmp_path: Path) -> None:
    """Each whole part is done by one shard; shared parts and those about the others by each."""
    parts = read_parts(write_parts(tmp_path))
    own = [share(parts, Shard(k, 3)) for k in (1, 2, 3)]
    for part in parts:
        assert sum(part in mine for mine in own) == (3 if part.shared or part.last else 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--part", "nope"], "--part nope: one of conformance, seeded"),
        (["--shard", "3/2"], "--shard '3/2'"),
        (["--backend", "nope"], "--backend nope: is not installed; known: "),
        (["--family", "nope"], "family 'nope' is unknown"),
        (["--level", "nope"], "'nope' is not one of"),
        (["parts.toml"], "part 1 command: a value expected"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    """Exit code 2, before anything runs."""
    monkeypatch.chdir(tmp_path)
    Path("parts.toml").write_text('[[part]]\nname = "a"\nsays = "b"\nhours = 1\n')
    done = CliRunner().invoke(main, ["nightly", "-o", "night", *words])
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr
    assert not list(Path("night").glob("*.json"))


def test_one_night_at_a_time_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused as long as the first is at work."""
    monkeypatch.setattr("conformance.nightly.PATIENCE", 0.0)
    held = hold(tmp_path)
    with pytest.raises(UsageError, match="another nightly is running there"):
        hold(tmp_path)
    os.close(held)
    os.close(hold(tmp_path))


def test_a_full_disk_does_not_stop_the_night(tmp_path: Path) -> None:
    """A log that cannot be written stops no command."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    held = hold(tmp_path)
    done = run([sys.executable, "-c", "print('x' * 100000); print('end')"], Path("/dev/full"), 60, held)
    os.close(held)
    assert (done.code, done.last_line) == (0, "end")


def test_every_command_of_the_table_is_one() -> None:
    """`conform` knows each command and option that the real parts use; generated cases run under the night's seed."""
    names = ("level", "shard", "seed", "budget", "store", "document", "journal", "folder")
    values = {n: [n] for n in names} | {
        "backends": ["--backend", "cpu"], "families": ["--family", "gqa"], "against": ["--against", "cpu"],
        "history": ["--store", "h"], "documents": [],
    }  # fmt: skip
    seeded = set()
    for part in PARTS:
        words = part.words(values)
        own = words[words.index("conformance.cli") + 1 :]
        helped = CliRunner().invoke(main, [*own, "--help"])
        assert helped.exit_code == 0, (part.name, helped.output)
        assert all(o in helped.output for o in own if o.startswith("-")), part.name
        seeded |= {part.name} if "--seed" in own else set()
    assert seeded == {"seeded", "fresh"}
