"""Waivers: what they cover, what fails a run, and the edit that is proposed."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, timedelta
from math import inf
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as Invoked
from hypothesis import given
from hypothesis import strategies as st
from sessions_of_pytest import session

from conformance.backend.interface import DeviceInfo
from conformance.backend.registry import Spec
from conformance.cli import main
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge import waivers
from conformance.judge.evidence import Error
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.judge.waivers import WAIVABLE, Problem, Waiver, Waivers, parse, proposal, waive
from conformance.judge.wrong import Wrong
from conformance.run.session.settings import WaiverBook
from conformance.suite import FAMILIES

TODAY = date(2026, 6, 15)
CRASHES = "ops/GLU.SWIGLU_OAI-f16-ne=33x4,form=split,limit=2.0@1"
PASSES = "ops/ADD-f32+f32-a=4x3@1"
GRANTED = Wrong("numbers", 1e-4)
ENTRY = """
[[waiver]]
case = "{case}"
verdict = "{verdict}"{granted}
reason = "known"
link = "https://example.org/1"
expiry = {expiry}
"""


def _entry(case: str, verdict: str = "FAIL", expiry: str = "2099-01-01") -> str:
    granted = "\nnmse = 1e-4" if verdict == "FAIL" else ""
    return ENTRY.format(case=case, verdict=verdict, expiry=expiry, granted=granted)


def _failed(case: str, verdict: Verdict = Verdict.FAIL, notes: tuple[str, ...] = ()) -> Result:
    """A result; a FAIL is wrong by what `_waiver` grants."""
    return Result(case, "b", verdict, wrong=GRANTED if verdict is Verdict.FAIL else None, notes=notes)


def _waivers(*entries: Waiver) -> Waivers:
    return Waivers("w.toml", entries, "")


def _waiver(
    case: str = "f/*", verdict: Verdict = Verdict.FAIL, days: int = 0, excepted: tuple[str, ...] = ()
) -> Waiver:
    granted = GRANTED if verdict is Verdict.FAIL else None
    return Waiver(case, verdict, "known", "https://example.org/1", TODAY + timedelta(days), excepted, granted)


def _problems(w: Waivers, *results: Result, listed: tuple[str, ...] = (), exists: bool = False) -> list[Problem]:
    return waivers.problems(w, results, TODAY, lambda _: listed, lambda _: exists)


IDS = st.from_regex(r"[a-c]/[xy]{1,3}", fullmatch=True)
GLOBS = st.builds(lambda f, rest: f"{f}/{rest}", st.sampled_from("abc*"), st.from_regex(r"[xy*?]{1,3}", fullmatch=True))
VERDICTS = st.sampled_from(sorted(set(Verdict) - {Verdict.XFAIL, Verdict.XPASS}))
ENTRIES = st.builds(
    _waiver, GLOBS, st.sampled_from(WAIVABLE), st.integers(-2, 2), st.lists(GLOBS, max_size=2).map(tuple)
)


@given(st.lists(ENTRIES, max_size=4), IDS, VERDICTS)
def test_a_waiver_covers_what_fails_as_it_says_and_nothing_else(
    entries: list[Waiver], case: str, verdict: Verdict
) -> None:
    """XFAIL iff a valid entry for the case names its verdict; XPASS iff a covered case passes.

    All else stays as it is. The verdict before is kept.
    """
    holding = [w for w in entries if w.covers(case) and w.expiry >= TODAY]
    result = waive(_waivers(*entries), _failed(case, verdict), TODAY)
    if verdict is Verdict.PASS and holding:
        assert (result.verdict, result.waived) == (Verdict.XPASS, "PASS")
    elif any(w.verdict is verdict for w in holding):
        assert (result.verdict, result.waived) == (Verdict.XFAIL, str(verdict))
    else:
        assert (result.verdict, result.waived) == (verdict, None)


@given(st.lists(ENTRIES, max_size=4), st.dictionaries(IDS, VERDICTS, max_size=6), st.lists(IDS, max_size=6))
def test_no_waiver_is_at_odds_with_a_run_in_silence(
    entries: list[Waiver], verdicts: dict[str, Verdict], listed: list[str]
) -> None:
    """An entry is a problem if it expired, covers a passing case, or covers nothing.

    The last holds in a family that ran only. An entry without a problem that covers a case of the run covers a
    failing one, or the run did not have all of its cases.
    """
    w = _waivers(*entries)
    results = [waive(w, _failed(case, verdict), TODAY) for case, verdict in verdicts.items()]
    found = {p.index: p for p in _problems(w, *results, listed=tuple(listed))}
    for i, entry in enumerate(entries):
        mine = [r for r in results if entry.covers(r.case)]
        known = {c for c in listed if entry.covers(c)}
        ran = any(entry.speaks_of(r.case[0]) for r in results)
        if entry.expired(TODAY) or any(r.verdict is Verdict.XPASS for r in mine):
            assert i in found
        elif not mine:
            assert (i in found) is (ran and not known)
        else:
            fails = any(r.verdict in FAILURES or r.verdict is Verdict.XFAIL for r in mine)
            assert (i in found) is (not fails and known <= {r.case for r in mine})


def test_it_holds_to_the_end_of_its_last_day() -> None:
    """On the day of its expiry a waiver holds, on the next it does not, and the failure says why."""
    for days, verdict in ((0, Verdict.XFAIL), (-1, Verdict.FAIL)):
        result = waive(_waivers(_waiver(days=days)), _failed("f/a", notes=("wrong",)), TODAY)
        assert result.verdict is verdict
    assert result.detail == "wrong; w.toml: waiver 1 (f/*) expired on 2026-06-14"
    (problem,) = _problems(_waivers(_waiver(days=-1)), result)
    assert "expired on 2026-06-14; 1 of 1 cases of this run still fail in this way" in problem.sentence


def test_another_failure_than_the_waived_one_stands() -> None:
    """A waived FAIL that crashes is a CRASH, and says what was waived."""
    result = waive(_waivers(_waiver()), Result("f/a", "b", Verdict.CRASH, error=Error("SIGABRT")), TODAY)
    assert result.verdict is Verdict.CRASH
    assert result.detail == "SIGABRT; w.toml: waiver 1 (f/*) waives FAIL only"


@pytest.mark.parametrize(
    ("stated", "found", "excused"),
    [
        ("nmse = 1e-4", Wrong("numbers", 9e-4), True),
        ("nmse = 1e-4", Wrong("numbers", 2e-3), False),
        ("nmse = 1e-4", Wrong("zeros", 1.0), False),
        ("nmse = 1e-4", Wrong("not finite", inf), False),
        ("nmse = 5.0", Wrong("zeros", 1.0), False),
        ('wrong = "zeros"', Wrong("zeros", 1.0), True),
        ('wrong = "zeros"', Wrong("numbers", 1.0), True),
        ('wrong = "zeros"', Wrong("not finite", inf), False),
        ('wrong = "not finite"', Wrong("not finite", inf), True),
    ],
)
def test_a_waiver_excuses_the_error_that_it_was_granted_for(stated: str, found: Wrong, *, excused: bool) -> None:
    """Not ten times as much, no zeros in place of numbers, no NaN: that is FAIL, and says what was granted."""
    waivers = parse(_entry("f/*").replace("nmse = 1e-4", stated), "w.toml")
    result = waive(waivers, Result("f/a", "b", Verdict.FAIL, wrong=found), TODAY)
    assert result.verdict is (Verdict.XFAIL if excused else Verdict.FAIL)
    assert ("w.toml: waiver 1 (f/*) does not accept this error: " in result.detail) is not excused


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (Wrong("numbers", 1.234e-4), "nmse = 0.00012"),
        (Wrong("zeros", 1.0), 'wrong = "zeros"'),
        (Wrong("not finite", inf), 'wrong = "not finite"'),
    ],
)
def test_a_waiver_that_does_not_say_how_wrong_excuses_nothing_and_is_told_the_number(found: Wrong, line: str) -> None:
    """A file of an older version fails the run, with a patch that adds what its cases are wrong by; then it holds."""
    old = parse("# kept\n" + _entry("f/*").replace("nmse = 1e-4\n", ""), "w.toml")
    failed = Result("f/a", "b", Verdict.FAIL, wrong=found)
    result = waive(old, failed, TODAY)
    assert result.verdict is Verdict.FAIL
    assert result.detail == f"w.toml: waiver 1 (f/*) does not state the accepted error; add {line}"
    (problem,) = _problems(old, result)
    assert problem.sentence.endswith(f"1 of this run fail; add {line}")
    patch = proposal(old, [problem])
    assert [x for x in patch.splitlines() if x[0] in "+-" and x[1] not in "+-"] == [f"+{line}"]
    again = waive(parse(old.text.replace('"FAIL"', f'"FAIL"\n{line}'), "w.toml"), failed, TODAY)
    assert again.verdict is Verdict.XFAIL


def test_details_say_reason_link_and_day() -> None:
    """A waived failure keeps its story before reason, link and expiry; a passing one names the entry."""
    results = _failed("f/a", notes=("wrong",)), Result("f/b", "b", Verdict.PASS)
    failing, passing = (waive(_waivers(_waiver()), r, TODAY) for r in results)
    assert failing.detail == "wrong; waived until 2026-06-15 (known; https://example.org/1)"
    assert passing.detail == "it passes, and w.toml: waiver 1 (f/*) says FAIL"


def test_what_matches_nothing_fails_where_it_could_have_matched() -> None:
    """A glob without a case is a problem in a run of its family only.

    An id that no level lists but a family makes, and a case of a higher level, are no problem.
    """
    w = _waivers(_waiver("f/typo*"))
    (problem,) = _problems(w, Result("f/a", "b", Verdict.PASS))
    assert problem.sentence == "w.toml: waiver 1 (f/typo*): matches no case; remove it, or fix its glob"
    assert not _problems(w, Result("g/a", "b", Verdict.PASS))
    assert not _problems(w, Result("f/a", "b", Verdict.PASS), listed=("f/typos",))
    exact = _waivers(_waiver("f/other@7"))
    assert not _problems(exact, Result("f/a", "b", Verdict.PASS), exists=True)
    assert _problems(exact, Result("f/a", "b", Verdict.PASS), exists=False)


def test_what_is_refused_now_needs_no_waiver() -> None:
    """Where the backend has come to refuse all that an entry covers, the entry goes; not while a level has more."""
    refused = Result("f/a", "b", Verdict.UNSUPPORTED)
    (problem,) = _problems(_waivers(_waiver()), refused, listed=("f/a",))
    assert "supports none of its cases (1)" in problem.sentence
    assert not _problems(_waivers(_waiver()), refused, listed=("f/a", "f/b"))


@pytest.mark.parametrize(("driver", "holds"), [("rusticl 25.0.7-2", True), ("rusticl 25.1.0", False), ("", False)])
def test_a_waiver_of_a_driver_holds_for_its_versions_only(driver: str, *, holds: bool) -> None:
    """Elsewhere it excuses nothing, no pass is an XPASS, and none of its problems count but its expiry."""
    text = _entry("f/a").replace("nmse", 'driver = "rusticl 25.0.*"\nnmse')
    w = replace(parse(text, "w.toml"), driver=driver)
    assert waive(w, _failed("f/a"), TODAY).verdict is (Verdict.XFAIL if holds else Verdict.FAIL)
    passed = waive(w, Result("f/a", "b", Verdict.PASS), TODAY)
    assert passed.verdict is (Verdict.XPASS if holds else Verdict.PASS)
    assert bool(_problems(w, passed, listed=("f/a",))) is holds
    assert _problems(replace(w, entries=parse(text.replace("2099", "2020"), "w.toml").entries), passed)


def test_only_a_backend_whose_waivers_name_a_driver_is_asked_for_it() -> None:
    """One that does not open has none, and its waivers of drivers do not apply."""
    asked = {s: parse(_entry("f/a") + f'driver = "{s}"\n', "w.toml") for s in map(Spec, ("mesa", "lost"))}
    book = WaiverBook({**asked, Spec("plain"): _waivers(_waiver("f/a"))}, TODAY)

    def info(spec: Spec) -> DeviceInfo:
        if spec.name != "mesa":
            raise UnavailableError(spec.name)
        return DeviceInfo("ggml", "Vulkan0", "", {"driver": "mesa"})

    book.ask(info)
    results = [book.apply(s, _failed("f/a")).verdict for s in map(Spec, ("mesa", "lost", "plain"))]
    assert results == [Verdict.XFAIL, Verdict.FAIL, Verdict.XFAIL]


def test_fresh_cases_prove_nothing_about_waivers() -> None:
    """A fresh case that passes under a wide glob does not fail the run."""
    fresh = Result("f/a", "b", Verdict.XPASS, fresh=True)
    assert not _problems(_waivers(_waiver()), fresh)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[waiver]\n", "w.toml: "),
        ("waivers = 1\n", "w.toml waivers: is unknown; known: waiver"),
        ("waiver = 1\n", "w.toml: [[waiver]] tables expected, 1 found"),
        (_entry("f/*") + "why = 1\n", "w.toml: waiver 1 why: is unknown; known: case, except, verdict"),
        (_entry("f/*") + _entry("f/*").replace('reason = "known"', ""), "waiver 2 reason: a text expected, nothing"),
        (_entry("f/*").replace("known", " "), "waiver 1 reason: a text expected"),
        (_entry("no-family"), "waiver 1 case: a glob over case ids"),
        (_entry("f/*", "PASS"), "waiver 1 verdict: one of FAIL, OVERCLAIM, CRASH, TIMEOUT, VACUOUS expected, 'PASS'"),
        (_entry("f/*", "XPASS"), "waiver 1 verdict: one of"),
        (_entry("f/*").replace("https:", "file:"), "waiver 1 link: an http(s) address expected"),
        (_entry("f/*", expiry='"soon"'), "waiver 1 expiry: a day, as 2027-03-31, expected, 'soon' found"),
        (_entry("f/*", expiry="2027-01-01T00:00:00"), "waiver 1 expiry: a day"),
        (_entry("f/*").replace("expiry", "#"), "waiver 1 expiry: a day, as 2027-03-31, expected, nothing found"),
        (_entry("f/*").replace("1e-4", "-1"), "waiver 1 nmse: a finite number from 0 expected, -1 found"),
        (_entry("f/*").replace("1e-4", "inf"), "waiver 1 nmse: a finite number from 0 expected, inf found"),
        (_entry("f/*").replace("1e-4", "true"), "waiver 1 nmse: a finite number from 0 expected, True found"),
        (_entry("f/*") + 'wrong = "odd"', "waiver 1 wrong: one of numbers, zeros, not finite expected, 'odd' found"),
        (_entry("f/*") + 'wrong = "zeros"', "waiver 1 nmse: nothing beside wrong = zeros expected, 0.0001 found"),
        (_entry("f/*", "CRASH") + "nmse = 1", "waiver 1 nmse: nothing for CRASH, which has no numbers, expected"),
        (_entry("f/*") + 'except = "f/a"\n', "waiver 1 except: a list of globs expected"),
        (_entry("f/*") + 'driver = ""\n', "waiver 1 driver: a glob expected"),
        (_entry("f/*") + "driver = 1\n", "waiver 1 driver: a glob expected"),
    ],
)
def test_a_malformed_file_is_one_line(text: str, says: str) -> None:
    """What is wrong is refused before anything runs, by file, entry and key."""
    with pytest.raises(UsageError) as e:
        parse(text, "w.toml")
    assert says in str(e.value)
    assert str(e.value).startswith("w.toml")


def test_a_day_is_a_date_or_its_text() -> None:
    """TOML's own date and ISO text are the same."""
    one, two = parse(_entry("f/*", expiry="2027-03-31") + _entry("f/*", expiry='"2027-03-31"'), "w.toml").entries
    assert one == two
    assert one.expiry == date(2027, 3, 31)


CASES = st.lists(st.sampled_from(["f/a", "f/b*", "g/[c]", 'g/"d"']), min_size=1, max_size=4)
CHANGES = st.lists(st.one_of(st.none(), st.lists(IDS, min_size=1, max_size=2).map(tuple)), min_size=4, max_size=4)


@given(CASES, CHANGES, st.lists(st.booleans(), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_proposed_edit_does_what_was_found_and_leaves_the_rest(
    cases: list[str], changes: list[tuple[str, ...] | None], problem: list[bool], has_except: list[bool]
) -> None:
    """Applied, the diff removes or narrows the entries in question; every other line, comments too, is as it was."""
    text = "# a heading\n"
    for case, has in zip(cases, has_except, strict=False):
        escaped = case.replace('"', '\\"')
        text += f"\n# about {escaped}" + _entry(escaped) + ('except = [\n  "z/z",  # why\n]\n' if has else "")
    w = parse(text, "w.toml")
    found = [Problem(i, "", changes[i] or ()) for i in range(len(cases)) if problem[i]]
    diff = proposal(w, found).splitlines()
    assert bool(diff) is bool(found)
    after = parse(_applied(text, diff), "w.toml").entries
    assert [e.case for e in after] == [c for i, c in enumerate(cases) if not problem[i] or changes[i]]
    assert [e.excepted for e in after] == [
        (*(("z/z",) if has_except[i] else ()), *((changes[i] or ()) if problem[i] else ()))
        for i in range(len(cases))
        if not problem[i] or changes[i]
    ]
    assert _applied(text, diff).count("# about") == len(cases)


def _applied(text: str, diff: list[str]) -> str:
    """`text` after a unified diff, read hunk by hunk."""
    lines, out, at = text.splitlines(), [], 0
    for line in diff[2:]:
        if line.startswith("@@"):
            start, _, count = line.split()[1][1:].partition(",")
            begin = int(start) - (1 if count != "0" else 0)
            out += lines[at:begin]
            at = begin
        elif line[0] == "+":
            out.append(line[1:])
        else:
            assert lines[at] == line[1:]
            out += [line[1:]] if line[0] == " " else []
            at += 1
    return "\n".join([*out, *lines[at:]]) + "\n"


def test_no_edit_is_proposed_that_would_do_something_else() -> None:
    """Where entries cannot be found line by line (inline tables, a header inside a text) no diff is given."""
    inline = 'waiver = [{case = "f/*", verdict = "CRASH", reason = "r", link = "https://x.y", expiry = 2026-01-01}]\n'
    w = parse(inline, "w.toml")
    assert proposal(w, [Problem(0, "")]) == ""


def _conform(*args: str) -> Invoked:
    return CliRunner().invoke(main, list(args), catch_exceptions=False)


def test_a_run_that_fails_as_waived_is_fine(tmp_path: Path) -> None:
    """A waived crash is XFAIL, in the record with its verdict before; nothing is kept of it and the exit code is 0."""
    path, out, failures = tmp_path / "w.toml", tmp_path / "r.json", tmp_path / "failures"
    path.write_text(_entry("ops/GLU.SWIGLU_OAI-f16-*limit=2.0@1", "CRASH"))
    command = ("run", "--backend", "ggml", "--case", CRASHES, "--case", PASSES)
    result = _conform(*command, "--waivers", str(path), "--json", str(out), "--save-failures", str(failures))
    assert result.exit_code == 0, result.output
    assert "1 PASS, 1 XFAIL" in result.output
    document = json.loads(out.read_text())
    waived = next(r for r in document["results"] if r["case"] == CRASHES)
    assert (waived["verdict"], waived["waived"]) == ("XFAIL", "CRASH")
    assert "waivers" not in document
    assert not list(failures.glob("*.gguf"))
    assert _conform(*command).exit_code == 1


def test_a_run_with_stale_waivers_fails_and_says_so(tmp_path: Path) -> None:
    """Passing, expired and unmatched entries each fail the run with a sentence, and an edit is proposed, not made."""
    path, out = tmp_path / "w.toml", tmp_path / "r.json"
    text = _entry(PASSES) + _entry("ops/GONE-*") + _entry("ops/ADD-*", expiry="2020-01-01") + _entry("gqa/no-such-*")
    path.write_text(text)
    result = _conform("run", "--backend", "ggml", "--case", PASSES, "--waivers", str(path), "--json", str(out))
    assert result.exit_code == 1
    assert f"XPASS {PASSES} on ggml" in result.output
    sentences = json.loads(out.read_text())["waivers"]
    assert [s.partition(") ")[0].partition(": ")[2] for s in sentences] == [
        f"waiver 1 ({PASSES}): every waived case passes now (1); remove it",
        "waiver 2 (ops/GONE-*): matches no case; remove it, or fix its glob",
        "waiver 3 (ops/ADD-*): expired on 2020-01-01; 0 of 1 cases of this run still fail in this way; remove it",
    ]
    assert f"--- {path}" in result.output
    assert '-case = "ops/GONE-*"' in result.output
    assert path.read_text() == text


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_waiver_of_another_driver_does_not_concern_a_run(tmp_path: Path, jobs: str) -> None:
    """The CPU has no driver: the crash stands, and the pass is a pass."""
    path = tmp_path / "w.toml"
    named = 'driver = "llvmpipe *"\n'
    path.write_text(_entry(CRASHES, "CRASH") + named + _entry(PASSES) + named)
    command = ("run", "--backend", "ggml", "--case", CRASHES, "--case", PASSES, "--jobs", jobs)
    result = _conform(*command, "--waivers", str(path))
    assert (result.exit_code, "1 PASS, 1 CRASH" in result.output) == (1, True), result.output
    assert "waivers fail this run" not in result.output


def test_an_expired_waiver_alone_fails_a_run_that_passes(tmp_path: Path) -> None:
    """Every case passes, and the run fails all the same."""
    path = tmp_path / "w.toml"
    path.write_text(_entry("ops/MUL-*", expiry="2020-01-01"))
    result = _conform("run", "--backend", "ggml", "--case", PASSES, "--waivers", str(path))
    assert "1 PASS" in result.output
    assert result.exit_code == 1


def test_waivers_are_of_one_backend(tmp_path: Path) -> None:
    """--waivers with two backends is refused; one of conformance.toml is of its backend alone."""
    path = tmp_path / "w.toml"
    path.write_text(_entry(PASSES))
    two = _conform("run", "--backend", "ggml", "--backend", "cpu", "--case", PASSES, "--waivers", str(path))
    assert two.exit_code == 2
    assert "a waiver file is for one backend" in two.output
    config = tmp_path / "c.toml"
    config.write_text('[backend.x]\nadapter = "ggml"\nwaivers = "w.toml"\n')
    both = _conform("run", "--config", str(config), "--backend", "x", "--backend", "ggml", "--case", PASSES)
    assert both.exit_code == 1
    assert f"XPASS {PASSES} on x" in both.output
    assert f"XPASS {PASSES} on ggml" not in both.output
    missing = _conform("run", "--config", str(config), "--backend", "ggml", "--case", PASSES)
    assert missing.exit_code == 0


@pytest.mark.parametrize("shared", [(), ("-n", "1")])
def test_pytest_takes_waivers_too(tmp_path: Path, shared: tuple[str, ...]) -> None:
    """`pytest conformance`: XFAIL is xfailed, and a stale waiver fails a session in which nothing else does."""
    if shared:
        pytest.importorskip("xdist")
    path = tmp_path / "w.toml"
    path.write_text(_entry("ops/GLU.SWIGLU_OAI-f16-*limit=2.0@1", "CRASH") + _entry("ops/GONE-*"))
    words = ("--backend", "ggml", "--waivers", str(path), "--case", CRASHES, "--case", PASSES, *shared)
    stale = session(*words)
    assert stale.returncode == 1
    assert "1 passed, 1 xfailed" in stale.stdout
    assert "waivers fail this run: " in stale.stdout
    assert '-case = "ops/GONE-*"' in stale.stdout
    if shared:
        return
    path.write_text(_entry("ops/GLU.SWIGLU_OAI-f16-*limit=2.0@1", "CRASH"))
    fine = session(*words)
    assert fine.returncode == 0, fine.stdout
    assert "1 passed, 1 xfailed" in fine.stdout


def test_the_ids_of_these_tests_exist() -> None:
    """What the runs above take is what the suite has."""
    for case in (CRASHES, PASSES):
        assert FAMILIES["ops"].build(case).id == case
