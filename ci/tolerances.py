"""Print the tables of docs/measurements/tolerances.md from `conform run --json` records.

`python ci/tolerances.py run.json` first runs the ops of level full if the file does not exist.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from tabulate import tabulate

from conformance.backend.registry import REFERENCE, Spec
from conformance.ggml.types import TYPES
from conformance.judge.verdict import MissingCause, Request
from conformance.run.oracle import SECOND_OPINION
from conformance.testrun import ENDED, Chosen, TestRun

FIGURES = ("nmse", "budget_used", "nmse_exact")
COLUMNS = (SECOND_OPINION, "openvino-stateless")
_BY_TYPE = {"MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT", "ROPE", "SCALE"}
_ALIKE = (
    ("ADD", "DIV", "MUL", "SUB"),
    ("ARANGE", "COS", "LOG", "SIN"),
    ("CONV_2D_DW", "LIGHTNING_INDEXER", "OUT_PROD", "POOL_2D", "SSM_CONV"),
    ("CPY", "SET_ROWS"),
    ("CUMSUM", "MEAN", "SUM", "SUM_ROWS"),
    ("DSV4_HC_COMB", "DSV4_HC_POST", "DSV4_HC_PRE"),
    ("GATED_DELTA_NET", "GATED_LINEAR_ATTN", "RWKV_WKV6", "RWKV_WKV7", "SSM_SCAN"),
    ("GROUP_NORM", "L2_NORM", "NORM", "RMS_NORM"),
    ("MUL_MAT", "MUL_MAT_ID"),
)
"""Ops that share a row, because they round alike and use similar budget shares."""


def _row(case: str) -> str:
    """Return the table row of `ops/OP-type-…@seed`: op (or `_ALIKE`) and for `_BY_TYPE` type."""
    op, _, rest = case.partition("/")[2].partition("-")
    kind = rest.partition("-")[0].partition("+")[0] if op in _BY_TYPE else ""
    name = next((", ".join(ops) for ops in _ALIKE if op in ops), op)
    return f"{name} {'blocks' if kind in TYPES and TYPES[kind].is_quantized else kind}".strip()


def _worst(results: list[dict[str, Any]], key: str) -> str:
    found = [r[key] for r in results if r.get(key) is not None]
    return f"{max(found):.2g}" if found else "–"


def _results(path: Path) -> list[dict[str, Any]]:
    """Return the results of a record; without the file, first run all ops with `exact`."""
    if not path.exists():
        _run(path)
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found


def _run(path: Path) -> None:
    it = TestRun(Chosen(families=("ops",), level="full", exact=True, json_path=path))
    it.ask(Request({str(spec): ids for spec, ids in it.chosen.ids.items()}), gating=False)
    for spec, ids in it.chosen.ids.items():
        deque(it.play(spec, ids), maxlen=0)
    it.finish(ENDED, MissingCause.LOST)
    it.close()


def main(paths: list[str]) -> None:
    """Print the table as Markdown."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for r in _results(Path(path)):
            if r["verdict"] == "PASS":
                rows[_row(r["case"])][Spec.parse(r["backend"]).name].append(r)
    exact = [name for name in rows if not any(r.get(k) for v in rows[name].values() for r in v for k in FIGURES)]
    for name in [n for n in rows if n not in exact and n.startswith(("UNARY.", "GLU."))]:
        for backend, results in rows.pop(name).items():
            rows[name.partition(".")[0]][backend] += results
    table = []
    for name in sorted(set(rows) - set(exact)):
        cells = [name, max(len(v) for v in rows[name].values())]
        for backend in COLUMNS:
            found = rows[name][backend]
            cells += [_worst(found, "nmse"), _worst(found, "budget_used")]
        table.append([*cells, _worst(rows[name][SECOND_OPINION], "nmse_exact")])
    heads = ["op", "cases"]
    for backend in COLUMNS:
        heads += [f"{backend}: NMSE", "budget used"]
    print(tabulate(table, [*heads, f"{SECOND_OPINION}: NMSE from exact"], tablefmt="github", disable_numparse=True))
    print(f"\nEqual to the bit on both: {', '.join(sorted(exact))}.")
    print(
        f"\n{REFERENCE} is compared with {SECOND_OPINION} in its arithmetic: its figures are those of {SECOND_OPINION}."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
