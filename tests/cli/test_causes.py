"""`conform triage`: failures of the real ggml become causes, and known causes are no failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.causes import rank
from conformance.causes.features import features, nodes_of
from conformance.cli import bugs, main
from conformance.judge.cause import Cause
from conformance.run.session.select import build

TRANSPOSED = ("ops/SUM-f32-ne=5x3,vne=p1023@1", "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1")
"""ggml reads dense rows of a transposed matrix (docs/measurements/findings/ggml.md)."""
FINE = ("ops/SUM-f32-ne=1025x3@1", "ops/GET_ROWS-f32+i32-a=33x7,n=12@1")


def invoke(*args: object) -> Any:  # noqa: ANN401  # click's result
    """Run a command."""
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture(autouse=True, scope="module")
def few_architectures() -> Iterator[None]:
    """No block is built to count architectures: llama.cpp lays most of them out, in a minute."""
    case = build(TRANSPOSED[0])
    nodes = [features(case, k, node) for k, _, node in nodes_of(case)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "_laid_out", lambda *_: ({"one": nodes, "two": []}, 2))
        yield


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ggml with two failures."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    cases = [x for i in (*TRANSPOSED, *FINE) for x in ("--case", i)]
    assert invoke("run", "--backend", "ggml", "--json", path, *cases).exit_code == 1
    return path


@pytest.fixture(scope="module")
def grouped(run_file: Path) -> Path:
    """The same with its causes."""
    path = run_file.with_name("causes.json")
    done = invoke("triage", run_file, "--json", path, "--no-confirm", "-o", run_file.with_name("bugs"))
    assert done.exit_code == 1, done.output
    return path


def test_causes_do_not_depend_on_the_number_of_jobs(run_file: Path) -> None:
    """One experiment at a time and three find the same rules, with the same smallest cases, confirmed alike."""
    each = []
    for n in (1, 3):
        path = run_file.with_name(f"jobs-{n}.json")
        done = invoke("triage", run_file, "--json", path, "--jobs", n)
        assert done.exit_code == 1, done.output
        each.append((json.loads(path.read_text())["causes"], done.stdout))
    assert each[0][0]
    assert each[0] == each[1]


def test_failures_become_causes(grouped: Path) -> None:
    """Each failing result names its cause, which has the case, a sentence, and a folder with the proof."""
    document = json.loads(grouped.read_text())
    ids = {c["id"] for c in document["causes"]}
    named = {r["case"]: r["cause"] for r in document["results"]}
    assert {named[i] for i in TRANSPOSED} == ids
    assert all(named[i] is None for i in FINE)
    for cause in document["causes"]:
        assert cause["smallest"] in cause["cases"]
        assert ["src[0].layout", "transposed"] in cause["conditions"]
        assert cause["rank"]["architectures"] == 1
        assert (Path(cause["folder"]) / "case.gguf").is_file()


def test_known_causes_are_no_failure(run_file: Path, grouped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run passes against its own baseline, whatever the ids are.

    Against a baseline with other causes it lists new and gone ones.
    """
    known = grouped.with_name("known.toml")
    found = [Cause.from_json(c) for c in json.loads(grouped.read_text())["causes"]]
    monkeypatch.setattr(bugs, "analyse", lambda *_, **__: found)  # which takes seconds
    assert invoke("triage", run_file, "--write-baseline", known).exit_code == 0
    text = known.read_text().replace('id = "', 'id = "X')
    known.write_text(text)
    same = invoke("triage", run_file, "--baseline", known)
    assert same.exit_code == 0, same.output
    known.write_text(text.replace('"transposed"', '"permuted"'))
    other = invoke("triage", run_file, "--baseline", known)
    assert other.exit_code == 1
    assert "new" in other.output
    assert "gone" in other.output


def test_failures_are_seen_again(tmp_path: Path) -> None:
    """A case that always fails alone is said to."""
    path = tmp_path / "run.json"
    invoke("run", "--backend", "ggml", "--json", path, "--case", TRANSPOSED[0])
    done = invoke("triage", path, "--budget", "2m")
    assert "always" in done.output, done.output


def test_a_run_groups_its_own_failures(tmp_path: Path) -> None:
    """`conform run --causes` prints the causes and records them, and a run without failures has none."""
    for case, n in ((TRANSPOSED[0], 1), (FINE[0], 0)):
        path = tmp_path / "run.json"
        done = invoke("run", "--backend", "ggml", "--case", case, "--causes", "0.01", "--json", path)
        document = json.loads(path.read_text())
        assert len(document["causes"]) == n
        assert all(c["id"] in done.output for c in document["causes"])


def test_grouping_twice_leaves_no_cause_of_before(grouped: Path, tmp_path: Path) -> None:
    """A file that has causes is grouped anew, and no result names a cause that is no more."""
    document = json.loads(grouped.read_text())
    text = grouped.read_text().replace(document["causes"][0]["id"], "OLD-00000000")
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(text)
    invoke("triage", old, "--no-confirm", "--json", new)
    again = json.loads(new.read_text())
    assert [c["id"] for c in again["causes"]] == [c["id"] for c in document["causes"]]
    assert {r["cause"] for r in again["results"]} == {None, *(c["id"] for c in again["causes"])}
