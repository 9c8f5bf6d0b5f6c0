"""Run files for tests, made by hand."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from conformance.judge.cause import Cause, Condition
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Totals, Verdict
from conformance.perf.statistics import median_interval

WHEN = "2026-01-02T03:04:05Z"


def head(kind: str, *, run: str | None = None, written: str = WHEN, machine: str = "m1") -> dict[str, Any]:
    """How a document begins."""
    environment = {"machine": machine, "python": "3.12.1", "system": "Linux x86_64", "cpu": "a cpu", "cores": 2,
                   "packages": {"numpy": "2.1"}, "unavailable": {}}  # fmt: skip
    return {"schema": 1, "kind": kind, "run": run or uuid.uuid4().hex, "written": written, "environment": environment}


def result(case: str, backend: str, verdict: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # a record's fields
    """A result's record; `XFAIL:CRASH` is a waived crash.

    `detail` is a note, or the error where there are no numbers.
    """
    word, _, waived = verdict.partition(":")
    detail = more.get("detail", "" if word == "PASS" else f"it is {word}")
    if not isinstance(detail, str):
        row = Result(case, backend, Verdict(word), waived=Verdict(waived) if waived else None).to_json()
        return {k: v for k, v in row.items() if k not in {"where", "error", "notes"}} | {"detail": detail, **more}
    said: dict[str, Any] = {"notes": (detail,)} if {word, waived} & {"PASS", "FAIL"} else {"error": Error(detail)}
    made = Result(case, backend, Verdict(word), waived=Verdict(waived) if waived else None, **(said if detail else {}))
    return {**made.to_json(), **more}


def cause(name: str, cases: Sequence[str], backend: str = "x", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A cause's record."""
    conditions = (Condition("src[0].type", name), Condition("src[1].ne[2]", ">1"))
    sentence = f"MUL_MAT with src[0].type = {name} is wrong"
    made = Cause(
        name, sentence, backend, Verdict.FAIL, "MUL_MAT", "", conditions, tuple(cases), "always",
        {"architectures": 7, "failed": len(cases), "passed": 0}, f"causes/{name}",
    )  # fmt: skip
    return {**made.to_json(), **more}


def document(rows: Sequence[tuple[str, str, str] | dict[str, Any]], **head_: Any) -> dict[str, Any]:  # noqa: ANN401
    """A conformance document of (case, backend, verdict)."""
    results = [r if isinstance(r, dict) else result(*r) for r in rows]
    totals = Totals()
    for r in results:
        totals.counts[Verdict(r["verdict"])] += 1
    return {**head("conformance", **head_), "results": results, "totals": totals.to_json()}


def unit(name: str, backend: str, seconds: Sequence[float], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A record of a work unit; without seconds its case failed."""
    case = f"perf/{name}/llama-tiny@1"
    if not seconds:
        return result(case, backend, "FAIL", **more)
    middle, (low, high) = median(seconds), median_interval(seconds)
    ends = {} if low is None or high is None else {"seconds.low": low, "seconds.high": high}
    metrics = {"seconds": middle, "rounds": len(seconds), "tokens_per_second": 64 / middle, "compiles": 2, **ends}
    return result(case, backend, "PASS", metrics=metrics, **more)


def gate(name: str, verdict: str = "PASS", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A record of a gate."""
    over = (
        {"notes": (), "error": {"message": f"it is {verdict}", "words": "over its limit"}} if verdict == "FAIL" else {}
    )
    return result(f"gate/{name}", "x", verdict, metrics={"estimate": 0.6, "limit": 0.7}, **over, **more)


def written_to(path: Path, document: Any) -> Path:  # noqa: ANN401  # JSON
    """`document` in a file."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
