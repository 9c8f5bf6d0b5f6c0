"""Writes `conformance/suite/ops/layouts.json`: cases of sources in the layouts that no row of a table has.

`python ci/layouts.py` after an op, a source or a layout is new. What is needed follows from the declarations and the
tables (`conformance/suite/ops/layouts.py`); `tests/suite/test_layouts.py` fails where the file lacks something.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from conformance.suite.ops import LAID, ids
from conformance.suite.ops.layouts import lacking, small, survey


def patterns(bodies: Sequence[str]) -> list[str]:
    """Ids that differ in their last value only as one pattern."""
    groups: dict[str, list[str]] = {}
    for body in bodies:
        before, _, layout = body.rpartition("=")
        groups.setdefault(before, []).append(layout)
    return [f"{b}={layouts[0]}" if len(layouts) == 1 else f"{b}=[{'|'.join(layouts)}]" for b, layouts in groups.items()]


def main() -> None:
    """Add to the file what it lacks; rows that stand there are kept, so no case of theirs changes."""
    standard, full = (survey(filter(small, ids(level))) for level in ("standard", "full"))
    levels = zip(("standard", "full"), lacking(standard, full), strict=True)
    kept = json.loads(LAID.read_text(encoding="ascii")) if LAID.is_file() else {}
    table = {
        level: [*kept.get(level, ()), *patterns([body.partition("/")[2] for body in bodies])]
        for level, bodies in levels
    }
    LAID.write_text(json.dumps(table, indent=0) + "\n", encoding="ascii", newline="\n")
    for level, rows in table.items():
        print(f"{level}: {len(rows)} patterns, {len(rows) - len(kept.get(level, ()))} of them new")


if __name__ == "__main__":
    main()
