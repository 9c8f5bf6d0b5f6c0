"""Writes `conformance/suite/tbo/cases.txt.xz`: cases of one test-backend-ops.

`python ci/tbo.py FILE` reads one JSON object a line (or gzip of it): `op` and `vars` as the program prints them, `size`
(bytes), `out` (index of the result), and `t`, the tensors: `n` name, `op`, `d` the op as the program describes it,
`ty`, `ne`, `nb`, `fl` flags, `vs` and `vo` view source and offset, `src` indices, `p` op_params. Lines of equal names
and graphs are one case. A case that the declarations refuse, or that is too large for a run, is listed with the reason;
run the script again once they accept more.
"""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.case.case import Case, Step
from conformance.ggml.errors import ConformanceError
from conformance.ggml.tensor import FLAG_PARAM
from conformance.ggml.types import GLU_OPS, UNARY_OPS
from conformance.run.cost import refusal
from conformance.suite.tbo import CASES, Row, graph_of

MEMORY, SECONDS = 2 << 30, 60
"""Half of a small machine's limits; larger cases are in no level and run by name."""
SUB_OPS = {"UNARY": UNARY_OPS, "GLU": GLU_OPS}


def row_of(entry: dict[str, Any], names: Counter[str], seen: set[str]) -> Row | None:
    """Convert a line to a row; None if there already is one with this name and graph."""
    tensors = [_tensor(t) for t in entry["t"]]
    for t in tensors:
        if t[1].startswith("OPT_STEP"):
            tensors[t[8][0]][5] = FLAG_PARAM  # the program also flags what it would differentiate
    name = f"{entry['op']}({entry['vars']})"
    text = json.dumps([entry["out"], tensors], separators=(",", ":"))
    if f"{name} {text}" in seen:
        return None
    seen.add(f"{name} {text}")
    names[name] += 1
    row = Row(name if names[name] == 1 else f"{name}~{names[name]}", entry["size"], "", text)
    try:
        graph, result = graph_of(row)
    except ConformanceError as e:
        return row._replace(why=" ".join(str(e).split()))
    case = Case(f"tbo/{row.name}@0", {}, [Step(graph, {}, (result,))])
    return row._replace(why=refusal([case], memory_limit=MEMORY, time_limit=SECONDS))


def _tensor(t: dict[str, Any]) -> list[Any]:
    """Convert a tensor's fields, with our numbers of sub-ops, because ggml's change."""
    params = list(t["p"])
    if t["op"] in SUB_OPS:
        params = [list(SUB_OPS[t["op"]]).index(t["d"]), *params[1:]]
    return [t["n"], t["op"], t["ty"], t["ne"], t["nb"], 0, t["vs"], t["vo"], t["src"], params]


def main() -> None:
    """Write the file and print its statistics."""
    path = Path(sys.argv[1])
    names, seen = Counter[str](), set[str]()
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        found = [row_of(json.loads(line), names, seen) for line in lines]
    rows = sorted((row for row in found if row is not None), key=lambda row: (row.size, row.name))
    text = "".join("\t".join(map(str, row)) + "\n" for row in rows)
    CASES.write_bytes(lzma.compress(text.encode("ascii"), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(found)} lines, {len(rows)} cases, {CASES.stat().st_size} bytes")
    refused = Counter(
        (row.name.partition("(")[0], row.why.split(": ", 1)[-1].partition(" takes ")[0].split(" failed:")[0])
        for row in rows
        if row.why
    )
    for (op, why), n in refused.most_common():
        print(f"{n:6} {op}: {why[:160]}")


if __name__ == "__main__":
    main()
