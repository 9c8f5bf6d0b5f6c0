"""Converts a record of an earlier version to the current kind.

Earlier versions wrote separate kinds for measurements, audits, runs of whole architectures and phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert

from conformance.case.case import JSON
from conformance.judge.evidence import Amount, Count, Error
from conformance.judge.verdict import Missing, MissingCause, Result, Verdict, readable_result
from conformance.perf.statistics import median_interval

T = TypeVar("T")
Rows = Iterator[Result | Missing]
_GATES = {"fine": Verdict.PASS, "regressed": Verdict.FAIL, "not run": Verdict.UNSUPPORTED}
_AUDIT = {"agreed": Verdict.PASS, "UNRUN": Verdict.UNSUPPORTED, "UNSOUND": Verdict.FAIL, "UNDERCLAIM": Verdict.FAIL}
_ZOO = {"NO REFERENCE": Verdict.UNSUPPORTED}


class _Unit(Struct):
    unit: str
    model: str
    backend: str
    of: str
    reason: str
    verdict: Verdict
    work: Amount
    seconds: list[Amount]
    rate: Amount | None
    counters: dict[str, JSON] = {}
    memory: dict[str, Count | None] = {}


class _Gate(Struct):
    gate: str
    backend: str
    answer: str
    reason: str | None = None
    limit: float | None = None
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None


def _perf(body: Mapping[str, JSON]) -> Rows:
    for u in _each(body, "units", _Unit):
        metrics = dict(_numbers({**u.counters, "memory": u.memory}, ""))
        if u.seconds and u.rate is not None:
            low, high = median_interval(u.seconds)
            metrics |= {"seconds": median(u.seconds), "rounds": len(u.seconds), f"{u.of}_per_second": u.rate}
            metrics |= {} if low is None or high is None else {"seconds.low": low, "seconds.high": high}
        yield _row(f"perf/{u.unit}/{u.model}@1", u.backend, u.verdict, u.reason, metrics)
    for g in _each(body, "gates", _Gate):
        case, reason = f"gate/{g.gate}", g.reason or g.answer
        if g.answer == "undecided":
            yield Missing(g.backend, case, reason, MissingCause.UNDECIDED)
            continue
        figures = {k: getattr(g, k) for k in ("limit", "estimate", "low", "high", "detectable")}
        known = {k: v for k, v in figures.items() if v is not None}
        yield _row(case, g.backend, _GATES.get(g.answer, Verdict.FAIL), reason, known)


class _Cell(Struct):
    finding: str
    case: str = ""
    name: str = ""
    buffer: str = ""
    detail: str = ""


def _audit(body: Mapping[str, JSON]) -> Rows:
    for backend, cells in convert(body.get("backends", {}), dict[str, list[_Cell]]).items():
        for c in cells:
            case = f"audit/{c.case.replace('@', ',')}/{c.name}/{c.buffer}@1"
            yield _row(case, backend, _verdict(c.finding, _AUDIT), f"{c.finding}: {c.detail}", {})


class _Played(Struct):
    architecture: str
    backend: str
    run: str
    verdict: str
    detail: str | None = None
    nmse: float | None = None
    nodes: Amount | None = None
    splits: Amount | None = None


def _zoo(body: Mapping[str, JSON]) -> Rows:
    for p in _each(body, "results", _Played):
        metrics = {k: v for k, v in (("nodes", p.nodes), ("splits", p.splits)) if v is not None}
        case = f"arch/{p.architecture}-{p.run.replace(' ', '-')}@1"
        yield _row(case, p.backend, _verdict(p.verdict, _ZOO), f"{p.verdict}: {p.detail or ''}", metrics)


class _Phase(Struct):
    name: str
    tokens_per_second: float | None = None
    reason: str | None = None
    seconds: float | None = None
    watts: float | None = None
    joules_per_token: float | None = None


class _Phases(Struct):
    phases: list[_Phase] = []


def _phases(body: Mapping[str, JSON]) -> Rows:
    for backend, found in convert(body.get("backends", {}), dict[str, _Phases]).items():
        for p in found.phases:
            named = ("tokens_per_second", "seconds", "watts", "joules_per_token")
            metrics = {k: v for k in named if (v := getattr(p, k)) is not None}
            verdict = Verdict.PASS if p.tokens_per_second is not None else Verdict.UNSUPPORTED
            yield _row(f"phases/{p.name}/{body.get('model')}@1", backend, verdict, p.reason or "", metrics)


_KINDS: dict[str, Callable[[Mapping[str, JSON]], Rows]] = {
    "perf": _perf, "audit": _audit, "zoo": _zoo, "phases": _phases,
}  # fmt: skip
KINDS = ("conformance", *_KINDS)
"""Kinds of a record that can be read."""


def todays(body: Mapping[str, JSON], checked: Callable[[str, Callable[[], Any]], Any]) -> Mapping[str, JSON]:
    """Convert a record of any version to the current kind and fields.

    Args:
        body: the record.
        checked: reads the value at a place and raises an error that names it.
    """
    made = dict(body)
    if (read := _KINDS.get(str(body.get("kind")))) is not None:
        rows = checked("", lambda: list(read(body)))
        results = [r for r in rows if isinstance(r, Result)]
        made["results"] = [{**r.to_json(), "verdict": str(r.verdict)} for r in results]
        made["missing"] = [m.to_json() for m in rows if isinstance(m, Missing)]
        made = {k: v for k, v in made.items() if k not in {"units", "gates", "backends", "causes"}}
        return {**made, "kind": "conformance"}
    if isinstance(rows := body.get("results"), list):
        made["results"] = [checked(f"results[{i}]", partial(_readable, r)) for i, r in enumerate(rows)]
    if isinstance(rows := body.get("missing"), list):
        made["missing"] = [
            {k: v for k, v in r.items() if (k, v) != ("cause", None)} if isinstance(r, dict) else r for r in rows
        ]
    return made


def _readable(row: JSON) -> JSON:
    """Convert a result to the current fields; its text stays unchanged."""
    made = readable_result(row)
    return {**made, "detail": row["detail"]} if isinstance(row, dict) and "detail" in row else made


def _row(case: str, backend: str, verdict: Verdict, reason: str, metrics: Mapping[str, float]) -> Result:
    known = {k: float(v) for k, v in metrics.items()}
    if verdict is Verdict.PASS:
        return Result(case, backend, verdict, metrics=known)
    return Result(case, backend, verdict, error=Error(reason), metrics=known)


def _verdict(word: str, known: Mapping[str, Verdict]) -> Verdict:
    with suppress(ValueError):
        return known.get(word) or Verdict(word)
    return Verdict.FAIL


def _each(body: Mapping[str, JSON], name: str, kind: type[T]) -> Iterator[T]:
    rows = body.get(name, [])
    if not isinstance(rows, list):
        raise ValidationError(f"Expected `array`, got `{type(rows).__name__}` - at `$.{name}`")
    for i, row in enumerate(rows):
        try:
            yield convert(row, kind)
        except ValidationError as e:
            what, _, at = str(e).partition(" - at `$")
            raise ValidationError(f"{what} - at `$.{name}[{i}]{at or '`'}") from None


def _numbers(value: JSON, name: str) -> Iterator[tuple[str, float]]:
    """Yield every number of nested objects, named like `kernels.RMS`."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _numbers(v, f"{name}.{k}" if name else k)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value
