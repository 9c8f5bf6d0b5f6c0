"""`conform campaign`, with one worker that runs in this process: its files, its exit codes, how it goes on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaign_pools import InlinePool
from click.testing import CliRunner, Result

from conformance.builds.build import Build, DeviceOf
from conformance.campaign.pool import Where
from conformance.causes.cause import Cause
from conformance.cli import campaign as command
from conformance.cli import main
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.verdict import Result as OneResult
from conformance.judge.verdict import Verdict
from conformance.report.runfile import read_document
from conformance.run.session.select import case_ids

SMALL = ("--backend", "cpu", "--case", "ops/ADD-*")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> InlinePool:
    """The worker of every campaign of a test."""
    pool = InlinePool()
    monkeypatch.setattr(command, "connect", pool.connect)
    return pool


@pytest.fixture
def _ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes by looks at the clock, so that a busy machine changes nothing."""
    ticks = count()
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))


def _conform(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["campaign", "-o", str(folder), *words])


def _document(path: Path) -> Mapping[str, Any]:
    found = read_document(path)
    assert found is not None
    return found.body


@pytest.mark.parametrize("software", [True, False])
def test_a_device_in_software_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, software: bool) -> None:
    """A driver that computes on the processor may serve all workers; hardware, or a build that does not load, one."""
    asked: list[Where] = []

    def inspect(text: str, _environment: Mapping[str, str | None]) -> Build:
        if text == "gone":
            raise UnavailableError("gone: there is no such build")
        device = DeviceOf("Vulkan0", "GPU", "a card", software, ())
        return Build(text, tmp_path, "0.9", "", (device,), (), llama=False, left_out=())

    def refuse(where: Where) -> None:
        asked.append(where)
        raise UsageError("seen")

    monkeypatch.setattr(command, "probe", inspect)
    monkeypatch.setattr(command, "connect", refuse)
    backends = ("ggml?lib=here&device=Vulkan0", "ggml?lib=gone&device=CUDA0", "ggml?device=CPU")
    _conform(tmp_path, *(w for b in backends for w in ("--backend", b)))
    assert [(w.devices, w.shared) for w in asked] == [
        (("Vulkan0", "CUDA0"), frozenset({"Vulkan0"} if software else ())),
    ]


def test_a_campaign_leaves_what_a_run_leaves(pool: InlinePool, tmp_path: Path) -> None:
    """A run file that the page and the history read, with each pair once and where it ran; `conform run` agrees."""
    ended = _conform(tmp_path, *SMALL)
    assert (ended.exit_code, ended.stderr) == (0, "")
    body = _document(tmp_path / "run.json")
    alone = tmp_path / "alone.json"
    assert CliRunner().invoke(main, ["run", *SMALL, "--json", str(alone)]).exit_code == 0
    expected = _document(alone)
    assert [r["case"] for r in body["results"]] == case_ids((), ("ops/ADD-*",), "smoke")
    assert [(r["case"], r["verdict"], r["nmse"]) for r in body["results"]] == [
        (r["case"], r["verdict"], r["nmse"]) for r in expected["results"]
    ]
    assert (body["asked"], body["missing"], body["totals"]) == (expected["asked"], [], expected["totals"])
    assert body["environment"]["machine"] == expected["environment"]["machine"]
    assert body["campaign"]["workers"] == ["here"]
    with closing(sqlite3.connect(tmp_path / "history.sqlite")) as store:
        assert store.execute("SELECT count(*) FROM results").fetchone() == (len(body["results"]),)
    assert pool.chunks


def test_an_interrupted_campaign_goes_on(pool: InlinePool, tmp_path: Path) -> None:
    """Ctrl-C: exit code 5, what ran is recorded, the rest is missing; the same words run the rest and no more."""
    ids = [i for c in ("ops/ADD*", "ops/MUL-*", "ops/SOFT_MAX*") for i in case_ids((), (c,), "smoke")]
    words = ("--backend", "cpu", *(w for i in ids for w in ("--case", i)))
    assert len(ids) > 32

    def interrupt() -> None:
        if pool.chunks:
            raise KeyboardInterrupt

    pool.before = interrupt
    first = _conform(tmp_path, *words)
    assert first.exit_code == 5
    assert "the same command goes on with it" in first.stderr
    then = _document(tmp_path / "run.json")
    assert {(m["reason"], m["cause"]) for m in then["missing"]} == {("interrupted", "interrupted")}
    ran = [i for c in pool.chunks for i in c.cases]
    assert len(then["missing"]) + len(then["results"]) == len(ids)
    pool.before, pool.chunks = lambda: None, []
    assert _conform(tmp_path, *words).exit_code == 0
    now = _document(tmp_path / "run.json")
    again = [i for c in pool.chunks for i in c.cases]
    assert sorted(r["case"] for r in now["results"]) == sorted(ids)
    assert {r["case"] for r in then["results"]}.isdisjoint(again)
    assert set(ran) | set(again) == set(ids)
    assert now["run"] == then["run"]


def test_other_words_do_not_go_on(pool: InlinePool, tmp_path: Path) -> None:
    """A folder of other cases is refused in one line that says what differs."""
    assert _conform(tmp_path, *SMALL).exit_code == 0
    ended = _conform(tmp_path, "--backend", "cpu", "--case", "ops/MUL-*")
    assert ended.exit_code == 2
    assert 'its run was asked for cases ["ops/ADD-*"], this one ["ops/MUL-*"]' in ended.stderr
    assert pool.chunks


@pytest.mark.usefixtures("_ticks")
def test_fresh_cases_follow_until_the_time_is_over(
    pool: InlinePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --for, legs of fresh cases follow from one seed; nothing is missing that nobody was asked for; the same
    seed draws the same cases.
    """
    monkeypatch.setattr(command, "ROUND", 40)
    ended = _conform(tmp_path / "a", *SMALL, "--for", "0.5s", "--seed", "5", "--only-fresh")
    assert ended.exit_code == 5
    assert "time limit (--for): " in ended.output
    legs = sorted((tmp_path / "a").glob("fresh-*.json"))
    assert legs[0].name == "fresh-0001.json"
    assert not (tmp_path / "a" / "run.json").exists()
    for leg in legs:
        body = _document(leg)
        assert body["missing"] == []
        assert all(r["fresh"] for r in body["results"])
    assert _conform(tmp_path / "b", *SMALL, "--for", "0.5s", "--seed", "5", "--only-fresh").exit_code == 5
    cases = [[r["case"] for r in _document(tmp_path / d / "fresh-0001.json")["results"]] for d in "ab"]
    n = min(map(len, cases))
    assert n
    assert cases[0][:n] == cases[1][:n]
    assert pool.chunks


def test_a_time_without_a_fresh_case_is_incomplete(pool: InlinePool, tmp_path: Path) -> None:
    """Where the listed cases took all of it they are all there, and the reason counts no fresh one."""
    ended = _conform(tmp_path, *SMALL, "--for", "0.000001s", "--seed", "5")
    assert ended.exit_code == 5
    assert "time limit (--for): 0 fresh results" in ended.output
    assert _document(tmp_path / "run.json")["missing"] == []
    assert pool.chunks


def test_a_failure_is_shown_and_saved(pool: InlinePool, tmp_path: Path) -> None:
    """What fails on a worker is printed here, and saved here as a case that `conform repro` runs."""
    case = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
    ended = _conform(tmp_path, "--backend", "ggml", "--case", case)
    assert ended.exit_code == 1
    assert f"FAIL {case} on ggml" in ended.output
    result = _document(tmp_path / "run.json")["results"][0]
    assert Path(result["saved"]).parent == tmp_path / "failures"
    again = CliRunner().invoke(main, ["repro", result["saved"]])
    assert "as saved" in again.output
    assert pool.chunks


def test_causes_are_new_once(pool: InlinePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cause is said to be new where no leg had it before, also of an earlier start; a start that runs nothing
    groups nothing again, and loses no cause.
    """
    calls = 0

    def analyse(results: Sequence[OneResult], _: object, **__: object) -> list[Cause]:
        nonlocal calls
        calls += 1
        failing = next(r for r in results if r.verdict is Verdict.FAIL)
        return [Cause("c0ffee", "GET_ROWS is wrong", "ggml", Verdict.FAIL, "GET_ROWS", "", (), (failing.case,))]

    monkeypatch.setattr(command, "analyse", analyse)
    words = ("--backend", "ggml", "--case", "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1", "--causes", "1")
    assert "run: 1 causes that no leg had before" in _conform(tmp_path, *words).output
    assert "no leg had before" not in _conform(tmp_path, *words).output
    assert calls == 1
    body = _document(tmp_path / "run.json")
    assert [c["id"] for c in body["causes"]] == [r["cause"] for r in body["results"]] == ["c0ffee"]
    assert pool.chunks


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--only-fresh",), "--for TIME expected"),
        (("--fresh", "3"), "--for TIME expected"),
        (("--backend", "nosuch"), "--backend nosuch: is not installed"),
        (("--for", "2"), "'--for': '2': a time as 90s, 30m, 2h or 1.5d expected"),
    ],
)
def test_wrong_words(pool: InlinePool, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    """Exit code 2 and one line; nothing runs."""
    ended = _conform(tmp_path / "out", *words)
    assert ended.exit_code == 2
    assert says in ended.stderr
    assert not pool.chunks
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_ticks")
def test_a_seed_is_kept(pool: InlinePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --seed one is drawn, printed, and kept for the next start in the folder."""
    monkeypatch.setattr(command, "ROUND", 4)
    first = _conform(tmp_path, *SMALL, "--for", "0.2s", "--only-fresh")
    second = _conform(tmp_path, *SMALL, "--for", "0.2s", "--only-fresh")
    seeds = [e.stderr.partition("--seed ")[2].split()[0] for e in (first, second)]
    assert seeds[0] == seeds[1]
    assert json.loads((tmp_path / "seed").read_text()) == int(seeds[0])
    assert pool.chunks
