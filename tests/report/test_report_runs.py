"""Reading and merging run files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import cause, document, gate, head, result, unit, written_to

from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Result, Verdict
from conformance.report.runfile import record, write_json
from conformance.report.runs import read_runs

A, B = "ops/ADD-f32+f32-a=3@1", "ops/MUL-f32+f32-a=3@1"


def test_what_a_run_writes_is_read_back(tmp_path: Path) -> None:
    """Each result of `record` comes back equal, with the place it stands at."""
    results = [Result(A, "x", Verdict.PASS, 0.5, 1e-9, None, 0.1, 1, {"device": "CPU"}), Result(B, "x", Verdict.FAIL)]
    runs = read_runs([written_to(tmp_path / "a.json", record(results, {"y": "not here"}))])
    assert results == [r.value for r in runs.results]
    assert [(r.document.path.name, r.place) for r in runs.results] == [
        ("a.json", "results[0]"),
        ("a.json", "results[1]"),
    ]
    assert runs.unavailable() == {"y": "not here"}


def test_folders_are_read(tmp_path: Path) -> None:
    """Records in a folder, and in folders in it; what is no record there is passed over."""
    written_to(tmp_path / "c.json", document([(A, "x", "PASS")]))
    (tmp_path / "deep").mkdir()
    written_to(tmp_path / "deep" / "p.json", document([unit("decode", "x", [1, 2]), gate("g")]))
    written_to(tmp_path / "state.json", {"parts": []})
    runs = read_runs([tmp_path])
    assert [r.value.case.partition("/")[0] for r in runs.results] == ["ops", "perf", "gate"]
    assert runs.passed_over == (tmp_path / "state.json",)


def test_named_file_must_be_a_run_file(tmp_path: Path) -> None:
    """What a folder may hold beside run files is an error where the user names it."""
    with pytest.raises(UsageError, match=r"state\.json: schema: 1 expected .*, None found"):
        read_runs([written_to(tmp_path / "state.json", {"parts": []})])


def test_shards_merge(tmp_path: Path) -> None:
    """Shards of one run give what the whole run would have given."""
    rows = [(f"ops/ADD-f32+f32-a={i}@1", "x", "PASS") for i in range(1, 8)]
    paths = [written_to(tmp_path / f"{i}.json", document(rows[i::3], run="0" * 32)) for i in range(3)]
    runs = read_runs(paths)
    assert sorted(r.value.case for r in runs.results) == sorted(c for c, _, _ in rows)
    assert not runs.superseded


def test_nothing_is_counted_twice(tmp_path: Path) -> None:
    """The same file under two names, by two ways, and one run in two files, count once."""
    doc = document([(A, "x", "PASS")])
    a = written_to(tmp_path / "a.json", doc)
    written_to(tmp_path / "b.json", doc)
    grown = copy.deepcopy(doc)
    grown["results"].append(result(B, "x", "PASS"))
    written_to(tmp_path / "c.json", grown)
    runs = read_runs([a, tmp_path, a])
    assert [(r.value.case, str(r.value.verdict)) for r in runs.results] == [(A, "PASS"), (B, "PASS")]
    assert len(runs.documents) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_newest_stays(tmp_path: Path, order: int) -> None:
    """Of two results of one case on one backend and machine the newer stays, in whatever order the files come."""
    old = written_to(tmp_path / "1.json", document([(A, "x", "CRASH")], written="2026-01-01T00:00:00Z"))
    new = written_to(tmp_path / "2.json", document([(A, "x", "PASS")], written="2026-01-01T00:00:01Z"))
    runs = read_runs([old, new][::order])
    assert [r.value.verdict for r in runs.results] == [Verdict.PASS]
    assert [r.value.verdict for r in runs.superseded] == [Verdict.CRASH]


def test_twice_in_one_run_both_stay(tmp_path: Path) -> None:
    """A case that one run ran twice does not hide its failure behind its pass; a newer run replaces both."""
    twice = written_to(tmp_path / "1.json", document([(A, "x", "FAIL"), (A, "x", "PASS")]))
    assert [str(r.value.verdict) for r in read_runs([twice]).results] == ["FAIL", "PASS"]
    newer = written_to(tmp_path / "2.json", document([(A, "x", "PASS")], written="2027-01-01T00:00:00Z"))
    runs = read_runs([twice, newer])
    assert [str(r.value.verdict) for r in runs.results] == ["PASS"]
    assert [str(r.value.verdict) for r in runs.superseded] == ["FAIL", "PASS"]


def test_two_kinds_of_machine_both_stay(tmp_path: Path) -> None:
    """A pass on one machine does not hide a failure on another."""
    a = written_to(tmp_path / "1.json", document([(A, "x", "FAIL")], machine="m1"))
    b = written_to(tmp_path / "2.json", document([(A, "x", "PASS")], machine="m2"))
    assert {r.value.verdict for r in read_runs([a, b]).results} == {Verdict.FAIL, Verdict.PASS}


def _explained(*names: str | None, written: str = "2026-01-01T00:00:00Z", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run of one case per name, which fails by the cause of this name; None passes."""
    cases = [f"ops/ADD-f32+f32-a={i}@1" for i in range(len(names))]
    rows = [result(c, "x", "FAIL" if n else "PASS", cause=n) for c, n in zip(cases, names, strict=True)]
    causes = [cause(n, [c for c, m in zip(cases, names, strict=True) if m == n]) for n in dict.fromkeys(names) if n]
    return {**document(rows, written=written, **more), "causes": causes}


def test_causes_are_read_in_their_order(tmp_path: Path) -> None:
    """Causes come as the file has them, with their place; a result has the id of its own; older files have none."""
    made = _explained("q", None, "p", "q")
    runs = read_runs([written_to(tmp_path / "a.json", made)])
    assert [(c.value.id, c.place) for c in runs.causes] == [("q", "causes[0]"), ("p", "causes[1]")]
    assert [c.value.to_json() for c in runs.causes] == made["causes"]
    assert [r.value.cause for r in runs.results] == ["q", None, "p", "q"]
    assert [p.value.case for p in runs.proofs()] == ["ops/ADD-f32+f32-a=0@1", "ops/ADD-f32+f32-a=2@1"]
    old = document([(A, "x", "FAIL")])
    del old["results"][0]["cause"]
    runs = read_runs([written_to(tmp_path / "old.json", old)])
    assert (runs.causes, runs.results[0].value.cause) == ((), None)


def test_a_cause_ends_when_its_cases_ran_again_without_it(tmp_path: Path) -> None:
    """A cause of several runs is listed once, as in the newest, first seen in the oldest.

    One whose every case has a newer result that does not name it is gone; one of whose cases did not run again
    stays.
    """
    documents = [
        _explained("p", "q", "r", "r", written="2026-01-01T00:00:00Z"),
        _explained("p", None, "r", written="2026-01-02T00:00:00Z"),
        _explained("p", None, None, written="2026-01-03T00:00:00Z"),
    ]
    runs = read_runs([written_to(tmp_path / f"{i}.json", d) for i, d in enumerate(documents)])
    told = zip(runs.causes, runs.first_seen(), strict=True)
    assert [(c.value.id, c.document.path.name, d.path.name) for c, d in told] == [
        ("p", "2.json", "0.json"),
        ("r", "1.json", "0.json"),
    ]


def _set(*path: Any) -> Callable[[Any], None]:  # noqa: ANN401  # keys, and a value last
    def change(doc: Any) -> None:  # noqa: ANN401
        *way, last, value = path
        for k in way:
            doc = doc[k]
        doc[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("schema", 2), r"schema: 1 expected \(newer versions write others\), 2 found"),
        (_set("kind", "gossip"), "kind: 'conformance' expected, 'gossip' found; older versions"),
        (_set("run", "../../etc"), "run: Expected `str` matching"),
        (_set("written", "yesterday"), "written: Expected `str` matching"),
        (
            _set("written", "2026-02-31T00:00:00Z"),
            "time data '2026-02-31T00:00:00Z' does not match|day is out of range",
        ),
        (_set("environment", []), "environment: Expected `object`, got `array`"),
        (_set("environment", "machine", 7), "environment.machine: Expected `str`, got `int`"),
        (_set("environment", "unavailable", {"x": 1}), r"environment.unavailable\[...\]: Expected `str`, got `int`"),
        (_set("results", {}), "results: Expected `array`, got `object`"),
        (_set("results", 0, 5), r"results\[0\]: Expected `object`, got `int`"),
        (_set("results", 0, "verdict", "MAYBE"), r"results\[0\].verdict: Invalid enum value 'MAYBE'"),
        (_set("results", 0, "seconds", -1), r"results\[0\].seconds: Expected `float` >= 0"),
        (_set("results", 0, "seconds", True), r"results\[0\].seconds: Expected `float`, got `bool`"),
        (_set("results", 0, "steps", 1 << 60), r"results\[0\].steps: Expected `int` <= 9007199254740991"),
        (_set("results", 0, "witness", "seen"), r"results\[0\].witness: Expected `object | null`, got `str`"),
        (_set("results", 0, "cause", 5), r"results\[0\].cause: Expected `str | null`, got `int`"),
        (_set("results", 0, "cause", "p"), r"results\[0\].cause: null or the id of a cause of this file .* 'p' found"),
        (_set("causes", {}), r"causes: Expected `array`, got `object`"),
        (_set("causes", [5]), r"causes\[0\]: Expected `object`, got `int`"),
        (_set("causes", [{}]), r"causes\[0\]: Object missing required field `id`"),
        (_set("causes", [cause(" ", [A])]), r"causes\[0\].id: Expected `str` matching"),
        (_set("causes", [cause("p", [A])] * 2), r"causes\[1\].id: a unique id .* 'p' found"),
        (_set("causes", [{**cause("p", [A]), "cases": []}]), r"causes\[0\].cases: Expected `array` of length >= 1"),
        (
            _set("causes", [cause("p", [A], verdict="PASS")]),
            r"causes\[0\].verdict: the verdict of a failure expected, PASS found",
        ),
        (_set("causes", [cause("p", [A], conditions=[["a"]])]), r"causes\[0\].conditions\[0\]: .*length 2, got 1"),
        (_set("causes", [cause("p", [A], conditions=["ab"])]), r"causes\[0\].conditions\[0\]: .*, got `str`"),
        (_set("causes", [cause("p", [A], rank={"failed": -1})]), r"causes\[0\].rank\[...\]: Expected `int` >= 0"),
        (_set("causes", [cause("p", [A], folder=5)]), r"causes\[0\].folder: Expected `str | null`, got `int`"),
        (_set("results", 0, "detail", "\ud800"), r"results\[0\].detail: text expected, half of a surrogate pair"),
    ],
)
def test_one_error_names_file_and_field(tmp_path: Path, change: Callable[[Any], None], says: str) -> None:
    """A wrong field is one error that names the file, the field, what was expected and what came."""
    doc = document([(A, "x", "PASS")])
    change(doc)
    with pytest.raises(UsageError, match=rf"wrong\.json: {says}"):
        read_runs([written_to(tmp_path / "wrong.json", doc)])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "invalid JSON at character 0"),
        (b'{"schema": 1, "schema": 1}', "occurs twice"),
        (b'{"schema": NaN}', "NaN found"),
        (b"[" * 100_000, "deeper"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "deeper"),
        (b"\xff\xfe", "UTF-8"),
        (b"[1, 2]", "JSON of another kind"),
        (b'{"schema": 1' + b"9" * 5000 + b"}", "invalid JSON"),
    ],
)
def test_broken_files(tmp_path: Path, raw: bytes, says: str) -> None:
    """Bytes that are no run file give the one error, whatever they are."""
    path = tmp_path / "broken.json"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=rf"broken\.json: .*{says}"):
        read_runs([path])


def test_missing_file_and_empty_folder(tmp_path: Path) -> None:
    """No run file at all is an error, not an empty report."""
    with pytest.raises(UsageError, match=r"no\.json: a run file expected, cannot be read"):
        read_runs([tmp_path / "no.json"])
    with pytest.raises(UsageError, match="none found in"):
        read_runs([tmp_path])


@pytest.mark.parametrize("kind", ["mutate", "perf"])
def test_a_kind_of_older_versions_is_passed_over(tmp_path: Path, kind: str) -> None:
    """In a folder it is no run file; where the user names it, the error names it."""
    old = written_to(tmp_path / "old.json", {**head(kind), "level": "smoke"})
    written_to(tmp_path / "new.json", document([(A, "x", "PASS")]))
    assert read_runs([tmp_path]).passed_over == (old,)
    with pytest.raises(UsageError, match=f"kind: 'conformance' expected, '{kind}' found; .*: repeat the run"):
        read_runs([old])


def test_a_document_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A number that JSON has no word for, or an interrupt: no half of a file, and no temporary one, stays."""
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert not list(tmp_path.iterdir())
