"""Run files for tests, made by hand."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.judge.cause import Cause, Condition
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Totals, Verdict

WHEN = "2026-01-02T03:04:05Z"


def head(kind: str, *, run: str | None = None, written: str = WHEN, machine: str = "m1") -> dict[str, Any]:
    """How a document begins."""
    environment = {"machine": machine, "python": "3.12.1", "system": "Linux x86_64", "cpu": "a cpu", "cores": 2,
                   "packages": {"numpy": "2.1"}, "unavailable": {}}  # fmt: skip
    return {"schema": 1, "kind": kind, "run": run or uuid.uuid4().hex, "written": written, "environment": environment}


def result(case: str, backend: str, verdict: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # a record's fields
    """A result's record; `XFAIL:CRASH` is a waived crash. `detail` is a note, or the error where there are no numbers;
    with `first_divergence` or `place` it is a record from before `where`.
    """
    word, _, waived = verdict.partition(":")
    detail = more.get("detail", "" if word == "PASS" else f"it is {word}")
    if not isinstance(detail, str) or not more.keys().isdisjoint({"first_divergence", "place"}):
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
    """A row of a perf document's units."""
    ordered = sorted(seconds)
    rate = 64 / ordered[len(ordered) // 2] if ordered else None
    return {
        "unit": name,
        "model": "llama-tiny",
        "case": f"kv_growth/llama-tiny,run={name}@0",
        "backend": backend,
        "verdict": "PASS" if seconds else "FAIL",
        "work": 64,
        "of": "tokens",
        "seconds": list(seconds),
        "rounds": len(seconds),
        "rate": rate,
        "counters": {"compiles": 2, "kernels": {"RMS": 3}},
        "memory": {"weights": 1000, "peak": None},
        "reason": "" if seconds else "its case did not pass",
        **more,
    }


def gate(name: str, answer: str = "fine", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A row of a perf document's gates."""
    return {
        "gate": name, "kind": "ratio", "unit": "decode", "backend": "x", "against": "y", "limit": 0.7, "answer": answer,
        "estimate": 0.6, "low": 0.58, "high": 0.63, "rounds": 12, "detectable": 0.04, "seconds": 3.5, "reason": "",
        **more,
    }  # fmt: skip


def perf(
    units: Sequence[dict[str, Any]],
    gates: Sequence[dict[str, Any]] = (),
    **head_: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """A perf document."""
    return {**head("perf", **head_), "units": list(units), "gates": list(gates)}


def written_to(path: Path, document: Any) -> Path:  # noqa: ANN401  # JSON
    """`document` in a file."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
