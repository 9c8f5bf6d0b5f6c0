"""The shards of a run together, in `conform report`: which is missing, and on which backend nothing passed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.case.case import JSON
from conformance.cli import main
from conformance.judge.verdict import Result, Verdict
from conformance.report.runfile import record
from conformance.report.runs import unproven
from conformance.run.session.shard import Shard


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
    """A backend without a PASS in all shards is named, and the report ends with 3.

    One shard alone, or one that is missing a result, says nothing of that; the report says that the other shard is
    missing.
    """
    paths = [_shard(tmp_path, k, 2, {"a": "PASS", "b": v}) for k, v in ((1, first), (2, second))]
    documents = [json.loads(p.read_text()) for p in paths]
    assert list(unproven(documents)) == backends
    assert unproven(documents[:1]) == {}
    lacking = {**documents[1], "missing": [{"backend": "b", "case": "f/3@1", "reason": "died"}]}
    assert unproven([documents[0], lacking]) == {}
    for several, code in ((paths, 3 if backends else 1 if second == "FAIL" else 0), (paths[:1], 1)):
        done = CliRunner().invoke(main, ["report", *map(str, several), "-o", str(tmp_path / "page")])
        assert done.exit_code == code, done.output
        assert ("b: no case passed (" in done.output) is (code == 3)
        assert ("b: shard 2 of 2 is missing" in done.output) is (several != paths)


def test_a_newer_run_proves_what_shards_did_not(tmp_path: Path) -> None:
    """Shards on which nothing passed are no matter once a later run on that machine has a PASS."""
    paths = [_shard(tmp_path, k, 2, {"b": "UNSUPPORTED"}, written="2020-01-01T00:00:00Z") for k in (1, 2)]
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps(record([Result("f/1@1", "b", Verdict.PASS)])))
    words = ["report", "-o", str(tmp_path / "page"), *map(str, paths)]
    assert CliRunner().invoke(main, words).exit_code == 3
    assert CliRunner().invoke(main, [*words, str(newer)]).exit_code == 0
