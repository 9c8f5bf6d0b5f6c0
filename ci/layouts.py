"""Writes `conformance/suite/ops/layouts.json`: cases of layouts that no table row has.

Run `python ci/layouts.py` after adding an op, a source or a layout. The declarations and tables determine the required
cases (`conformance/suite/ops/layouts.py`); `tests/suite/test_layouts.py` fails if the file lacks one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from conformance.suite.ops import LAID, ids
from conformance.suite.ops.layouts import lacking, small, survey


def by_source(bodies: Sequence[str]) -> dict[str, str]:
    """Return id up to the value of its last key, which is a source -> these values."""
    sources: dict[str, list[str]] = {}
    for body in bodies:
        before, _, layout = body.rpartition("=")
        sources.setdefault(before, []).append(layout)
    return {source: " ".join(layouts) for source, layouts in sources.items()}


def main() -> None:
    """Add missing cases to the file; existing ones stay unchanged."""
    standard, full = (survey(filter(small, ids(level))) for level in ("standard", "full"))
    kept = json.loads(LAID.read_text(encoding="ascii")) if LAID.is_file() else {}
    for level, bodies in zip(("standard", "full"), lacking(standard, full), strict=True):
        new = by_source([body.partition("/")[2] for body in bodies])
        sources = kept.setdefault(level, {})
        for source, layouts in new.items():
            sources[source] = f"{sources.get(source, '')} {layouts}".strip()
        print(f"{level}: {len(sources)} sources, {len(new)} of them with new layouts")
    LAID.write_text(json.dumps(kept, indent=0) + "\n", encoding="ascii", newline="\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
