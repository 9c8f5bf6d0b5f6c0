"""The yardstick: what pytest-benchmark's `--benchmark-compare-fail` says of the same seconds.

`regressed` asks its own check, without a file or a process. `benchmark_json` writes what `--benchmark-compare` and
`pytest-benchmark compare` read; it is what `pytest conformance --perf --benchmark-json FILE` writes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_benchmark.stats import Stats
from pytest_benchmark.utils import parse_compare_fail

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError

VERSION = "5.0.0"
"""Of the format."""


def stats(seconds: Sequence[float]) -> dict[str, float]:
    """pytest-benchmark's statistics of one benchmark's rounds: `min`, `max`, `mean`, `median`, `stddev`, `iqr`, ….

    Raises:
        UsageError: no rounds.
    """
    if not seconds:
        raise UsageError("yardstick: at least one round expected, none found")
    found: Any = Stats()  # type: ignore[no-untyped-call]  # pytest-benchmark has no types
    for s in seconds:
        found.update(s)
    return dict(found.as_dict())


def regressed(expression: str, current: Sequence[float], compared: Sequence[float]) -> str:
    """Why `--benchmark-compare-fail EXPRESSION` would fail; empty where it would not.

    Args:
        expression: as `median:5%`, `min:3%` or `mean:0.001`.
        current: seconds of the rounds that are judged.
        compared: seconds of those that they are held against.

    Raises:
        UsageError: the expression cannot be read, or no rounds.
    """
    return failing(expression, stats(current), stats(compared))


def failing(expression: str, current: Mapping[str, float], compared: Mapping[str, float]) -> str:
    """As `regressed`, of what `stats` made of the rounds."""
    try:
        check: Any = parse_compare_fail(expression)  # type: ignore[no-untyped-call]  # as above
    except Exception as e:  # noqa: BLE001  # argparse's own error, which is no ValueError
        raise UsageError(f"yardstick: FIELD:N% or FIELD:SECONDS expected, {expression!r} found: {e}") from None
    return str(check.fails(current, compared) or "")


def benchmark_json(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """A perf document in pytest-benchmark's format, which has no place for what was not timed: that is left out.

    Args:
        document: as `perf.document.document` gives it.
    """
    environment = document["environment"]
    return {
        "machine_info": {
            "node": environment["machine"],
            "processor": environment["cpu"],
            "system": environment["system"],
            "python_version": environment["python"],
            "cpu": {"brand_raw": environment["cpu"], "count": environment["cores"]},
        },
        "commit_info": {},
        "benchmarks": [_benchmark(u) for u in document["units"] if u["seconds"]],
        "datetime": document["written"],
        "version": VERSION,
    }


def _benchmark(unit: Mapping[str, JSON]) -> dict[str, JSON]:
    name = f"test_time[{unit['unit']}-{unit['backend']}]"
    return {
        "group": unit["unit"],
        "name": name,
        "fullname": f"conformance/test_perf.py::{name}",
        "params": {"unit": unit["unit"], "backend": unit["backend"]},
        "param": f"{unit['unit']}-{unit['backend']}",
        "extra_info": extra_info(unit),
        "options": {"disable_gc": True, "timer": "session", "warmup": True},
        "stats": {**stats(unit["seconds"]), "data": list(unit["seconds"]), "iterations": 1},
    }


def extra_info(unit: Mapping[str, JSON]) -> dict[str, JSON]:
    """What stands beside a benchmark's statistics: all of a unit's entry but the seconds."""
    return {k: v for k, v in unit.items() if k not in {"unit", "backend", "seconds", "elapsed"}}
