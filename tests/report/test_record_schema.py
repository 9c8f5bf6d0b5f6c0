"""The schema of a record: published as a file, and held by what a run writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from run_files import cause, document, gate, result, unit, written_to

from conformance.case.case import JSON
from conformance.judge.evidence import Error, Fault, Numbers, Place
from conformance.judge.verdict import Result, Verdict
from conformance.judge.wrong import Wrong
from conformance.report.runfile import Record, record

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "record.schema.json"
A = "ops/ADD-f32+f32-a=3@1"
PLACE = Place(Fault.NODE, 0, 0, "ADD", "x", "f32[3]", Numbers((0, 0, 0, 0), 1.0, float("nan"), float("inf"), 1e-7))


def test_the_published_schema_is_that_of_the_code() -> None:
    """To write it anew: `python tests/report/test_record_schema.py`."""
    assert json.loads(SCHEMA.read_text(encoding="utf-8"), object_hook=_nullable) == _schema()


def _schema() -> JSON:
    return json.loads(json.dumps(msgspec.json.schema(Record)), object_hook=_nullable)


def _nullable(part: dict[str, JSON]) -> dict[str, JSON]:
    """`nullable` as JSON Schema says it; without empty defaults, which msgspec states since 0.23 only."""
    if part.get("default") == {}:
        del part["default"]
    return {**part, "type": [part["type"], "null"]} if part.pop("nullable", False) else part


@pytest.mark.parametrize(
    "made",
    [
        record(
            [
                Result(A, "x", Verdict.CRASH, error=Error("m")),
                Result(A, "y", Verdict.PASS, 0.5, 0.1, witness={"a": 1}),
                Result(
                    A, "z", Verdict.FAIL, float("inf"), where=PLACE, wrong=Wrong("zeros", float("inf")), notes=("n",)
                ),
            ],
            {"w": "not here"},
            ["a waiver"],
        ),
        {**document([result(A, "x", "FAIL", cause="p")]), "causes": [cause("p", [A])]},
        document([unit("decode", "x", [1.0, 2.0]), gate("g")]),
    ],
    ids=["record", "causes", "perf"],
)
def test_what_a_run_writes_keeps_the_schema(tmp_path: Path, made: JSON) -> None:
    """By a validator that is not ours."""
    path = written_to(tmp_path / "run.json", made)
    words = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(SCHEMA), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(_schema(), indent=1) + "\n", encoding="utf-8")
