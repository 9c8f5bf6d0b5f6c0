"""The journal of a run: wherever a kill tears it, the next start goes on and counts nothing twice."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import JSON, Case
from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.verdict import LISTED, Missing, Request, Result, Verdict
from conformance.report.runfile import read_document
from conformance.run.runner import Runner
from conformance.run.session import journal as journals
from conformance.run.session.environment import header
from conformance.run.session.journal import BESIDE, Beside, Continued
from conformance.run.session.select import build, case_ids

ASKED: dict[str, JSON] = {"levels": {"cpu": "smoke"}, "seed": None}
RESULTS = st.lists(
    st.builds(
        Result,
        st.text(max_size=8),
        st.sampled_from(["cpu", "ggml?a=b"]),
        st.sampled_from(Verdict),
        budget_used=st.none() | st.floats(0, 2),
        fresh=st.booleans(),
        where=st.none()
        | st.builds(Place, st.sampled_from(Fault), st.none() | st.integers(0, 9), op=st.text(max_size=4)),
        error=st.none() | st.builds(Error, st.text(max_size=8), st.text(max_size=8)),
        notes=st.lists(st.text(max_size=8), max_size=2).map(tuple),
        witness=st.none() | st.just({"device": "ü\n"}),
    ),
    max_size=6,
)


def _open(path: Path, options: dict[str, JSON] = ASKED) -> Continued:
    journal = Continued(path, path.parent, options)
    journal.begin(Request())
    return journal


def _beside(target: Path, request: Request) -> Beside:
    journal = Beside(target, target.parent)
    journal.begin(request)
    return journal


def _taken(journal: Continued, results: Sequence[Result]) -> list[Result | None]:
    return [journal.take(r.backend, r.case) for r in results]


@given(RESULTS, st.floats(0, 1))
def test_what_a_kill_leaves_is_read_and_gone_on_with(results: list[Result], part: float) -> None:
    """Cut at any byte: each whole line is kept, each once, the torn one is dropped, and what is then appended stays."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.journal"
        first = _open(path)
        for r in results:
            first.add([r])
        first.end(written=False)
        raw = path.read_bytes()
        at = round(part * len(raw))
        path.write_bytes(raw[:at])
        kept = max(0, raw[:at].count(b"\n") - 1)

        second = _open(path)
        assert _by_key(filter(None, _taken(second, results))) == _by_key(results[:kept])
        assert _taken(second, results) == [None] * len(results)
        assert (second.run == first.run) == (raw[:at].count(b"\n") > 0)
        second.add(results[kept:])
        second.end(written=False)

        third = _open(path)
        assert _by_key(filter(None, _taken(third, results))) == _by_key(results)
        third.end(written=False)


@settings(max_examples=20)
@given(st.tuples(*[st.sampled_from([1, 2, LISTED, LISTED + 1])] * 3), st.floats(0, 1))
def test_what_a_kill_left_out_is_counted(sizes: tuple[int, ...], part: float) -> None:
    """Cut at any byte: by backend and family as many as the request lacks.

    A file without a whole header has nothing to report.
    """
    ids = [f"f{family}/{case}" for family, size in enumerate(sizes) for case in (0, *range(size))]  # one is twice in it
    request = Request(dict.fromkeys("ab", ids))
    results = [Result(case, backend, Verdict.PASS) for backend in "ab" for case in ids]
    with TemporaryDirectory() as folder:
        journal = _beside(Path(folder) / "run.json", request)
        journal.add(results)
        journal.end(written=False)
        beside = Path(folder) / f"run.json{BESIDE}"
        raw = beside.read_bytes()
        beside.write_bytes(raw := raw[: round(part * len(raw))])
        found = read_document(beside, named=False)
    whole = raw.count(b"\n")
    if found is None:
        assert whole == 0
        return
    done = results[: whole - 1]
    assert found.record.asked == request.to_json()
    assert _by_family(found.record.missing) == _by_family(request.missing(done, ""))


def test_the_header_of_many_cases_is_small(tmp_path: Path) -> None:
    """The ids of many cases are not written before the first of them runs."""
    journal = _beside(tmp_path / "run.json", Request({"a": map("ops/{}".format, range(10**5))}))
    journal.end(written=False)
    assert (tmp_path / f"run.json{BESIDE}").stat().st_size < 4096


def _by_family(missing: Sequence[Missing]) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for m in missing:
        found[m.backend, m.case.partition("/")[0]] += m.count
    return found


def _by_key(results: object) -> dict[tuple[str, str], list[Result]]:
    found: dict[tuple[str, str], list[Result]] = {}
    for r in results:  # type: ignore[attr-defined]  # any iterable of results
        found.setdefault((r.backend, r.case), []).append(r)
    return found


def test_the_seed_of_fresh_cases_stays(tmp_path: Path) -> None:
    """A second start makes the same fresh cases."""
    first = _open(tmp_path / "j")
    first.end(written=False)
    second = _open(tmp_path / "j")
    second.end(written=False)
    assert (first.run, first.seed) == (second.run, second.seed)


@pytest.mark.parametrize("content", ["no journal", "{}\n", '{"kind": "conformance"}\n', "[]\n", "1\n2\n", "\n"])
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    """What is no journal is one line, and not a byte of it changes."""
    path = tmp_path / "mine"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"not a journal of a run|one line of JSON expected"):
        _open(path)
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["{}", "null", "not JSON", '{"case": "a", "backend": "b", "verdict": "GOOD"}',
                                  '{"case": "a", "backend": "b", "verdict": "PASS", "steps": "1"}'])  # fmt: skip
def test_a_broken_line_within_is_named(tmp_path: Path, line: str) -> None:
    """Only the last line may be torn; any other is an error with its number, since a lost result would run twice."""
    path = tmp_path / "j"
    _open(path).end(written=False)
    with path.open("a") as f:
        f.write(f"{line}\n")
    with pytest.raises(UsageError, match="line 2"):
        _open(path)


def test_a_run_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of other options or packages do not mix with this run's; the message names what differs."""
    path = tmp_path / "j"
    _open(path).end(written=False)
    with pytest.raises(UsageError, match=r"was started with seed null, this one with 7"):
        _open(path, {**ASKED, "seed": 7})
    other = {
        **header("journal"),
        "environment": {"machine": "m", "python": "3", "packages": {"openvino": "1"}},
    }
    monkeypatch.setattr(journals, "header", lambda _: other)
    with pytest.raises(UsageError, match=r"was started with machine"):
        _open(path)


def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run with the same journal is refused as long as the first lives."""
    monkeypatch.setattr(journals, "PATIENCE", 0.0)
    first = _open(tmp_path / "j")
    with pytest.raises(UsageError, match="another run is writing to it"):
        _open(tmp_path / "j")
    first.end(written=False)
    _open(tmp_path / "j").end(written=False)


def test_a_journal_is_reported_as_a_record_is(tmp_path: Path) -> None:
    """`conform report` reads the file of --journal; it is of an interrupted run until the run has ended by itself."""
    path = tmp_path / "j"
    words = ["run", "--backend", "ggml", "--case", "ops/SUM-f32-ne=33x5x3x2@349", "--journal", str(path)]
    assert CliRunner().invoke(main, words).exit_code == 0
    found = read_document(path)
    assert found is not None
    assert [r.verdict for r in found.record.results] == [Verdict.PASS]
    assert (found.record.interrupted, found.record.missing) == (None, [])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    found = read_document(path)
    assert found is not None
    assert found.record.interrupted


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """What cannot be written is said, not lost in silence."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    journal = _open(tmp_path / "j")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._descriptor or 0)
    os.close(full)
    with pytest.raises(UsageError, match=r"--journal .*j: cannot be written: No space left"):
        journal.add([Result("a", "b", Verdict.PASS)])
    journal.end(written=False)


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any piece, a second start runs exactly the rest, and its document is that of an unbroken run."""
    ran: list[str] = []
    dying: list[int] = [0]
    real = Runner.run

    def run(self: Runner, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        if len(ran) >= dying[0] > 0:
            raise SystemExit(9)  # as abrupt as this process can bear: nothing more is written to the journal
        ran.extend(c.id for c in cases)
        return real(self, spec, cases)

    monkeypatch.setattr(Runner, "run", run)
    loose = tmp_path / "loose.gguf"
    casefile.write(loose, [build(case_ids(["ops"], [], "smoke")[0])])
    words = ["run", str(loose), "--family", "alias", "--backend", "ggml", "--fresh", "2",
             "--save-failures", str(tmp_path)]  # fmt: skip
    whole, broken, path = tmp_path / "whole.json", tmp_path / "broken.json", tmp_path / "j"

    dying[0] = 4
    CliRunner().invoke(main, [*words, "--journal", str(path), "--json", str(broken)])
    assert len(ran) == 4
    dying[0] = 0
    assert CliRunner().invoke(main, [*words, "--journal", str(path), "--json", str(broken)]).exit_code == 0
    resumed = json.loads(broken.read_text())
    total = len(resumed["results"])
    assert len(ran) == total == 1 + len(case_ids(["alias"], [], "smoke")) + 2
    assert CliRunner().invoke(main, [*words, "--journal", str(path), "--json", str(broken)]).exit_code == 0
    assert len(ran) == total
    again = json.loads(broken.read_text())
    assert (again["run"], again["results"], again["totals"]) == (resumed["run"], resumed["results"], resumed["totals"])

    seed = str(json.loads(path.read_text().partition("\n")[0])["seed"])
    CliRunner().invoke(main, [*words, "--journal", str(tmp_path / "j2"), "--json", str(whole)])
    listed = [r["case"] for r in json.loads(whole.read_text())["results"] if not r["fresh"]]
    assert [r["case"] for r in resumed["results"] if not r["fresh"]] == listed
    fresh = [r["case"] for r in resumed["results"] if r["fresh"]]
    assert len(fresh) == 2
    assert CliRunner().invoke(main, [*words, "--seed", seed, "--only-fresh", "--json", str(whole)]).exit_code == 0
    assert {r["case"] for r in json.loads(whole.read_text())["results"] if r["fresh"]} == set(fresh)


def test_an_interrupted_run_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C what ran is recorded, of the backend at work too, and the exit code says that it is not all."""
    real = Runner.run
    ran: list[str] = []

    def run(self: Runner, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        if ran:
            raise KeyboardInterrupt
        ran.append(cases[0].id)
        return real(self, spec, cases)

    monkeypatch.setattr(Runner, "run", run)
    out = tmp_path / "r.json"
    result = CliRunner().invoke(main, ["run", "--family", "gqa", "--backend", "ggml", "--json", str(out)])
    assert result.exit_code == 5
    assert [r["case"] for r in json.loads(out.read_text())["results"]] == ran
