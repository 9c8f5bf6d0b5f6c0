"""What many results have in common: the same verdict for the same reason, whatever case, node and numbers it is of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from conformance.judge.verdict import Result, Verdict

from .matrix import operation
from .runs import Row

ORDER: tuple[Verdict, ...] = (
    Verdict.FAIL, Verdict.CRASH, Verdict.TIMEOUT, Verdict.OVERCLAIM, Verdict.VACUOUS, Verdict.XPASS,
    Verdict.XFAIL, Verdict.UNSUPPORTED, Verdict.PASS,
)  # fmt: skip
"""In which people are told of verdicts: what needs a look first."""
LONGEST = 300
"""Characters of a cause."""
_READ = 4000
"""Characters of a detail that a cause is made of: a death's last words may have pages."""

_STEP = re.compile(r"^(?:steps?\[?\d+\]?: |computing steps\[\d+\] of )")
_BRACKETS = re.compile(r"\[[^\[\]]*\d[^\[\]]*\]")
_NODE = re.compile(r"\b(node|leaf)_\d+")
_HEX = re.compile(r"\b0x[0-9a-fA-F]+\b")
_NUMBER = re.compile(r"(?<![\w.:])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


@lru_cache(maxsize=256)
def _word(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w/.?=-]){re.escape(text or chr(0))}(?![\w/.?=-])")


def cause(result: Result) -> str:
    """The reason of a result without what differs from case to case: ids, nodes, shapes, places and numbers.

    The line of a source file (`ops.cpp:3564`) stays, and so does what ggml calls the op.
    """
    text = " ".join(result.detail[:_READ].split())
    text = _word(result.backend).sub("…", text.replace(result.case or "\0", "…"))
    text = _BRACKETS.sub("[…]", _STEP.sub("", text))
    text = _NUMBER.sub("#", _HEX.sub("#", _NODE.sub(r"\1_#", text)))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


@dataclass(frozen=True, slots=True)
class Group:
    """Results of one verdict and one cause."""

    verdict: Verdict
    cause: str
    rows: Sequence[Row[Result]]

    @property
    def backends(self) -> Counter[str]:
        """How many are of each backend."""
        return Counter(r.value.backend for r in self.rows)

    @property
    def ops(self) -> Counter[str]:
        """How many are of each op, or of each family that is not of single ops."""
        return Counter(operation(r.value.case).name for r in self.rows)


def groups(rows: Iterable[Row[Result]]) -> list[Group]:
    """Rows by verdict and cause: verdicts in their order, the largest groups of each first."""
    found: dict[tuple[Verdict, str], list[Row[Result]]] = {}
    for row in rows:
        found.setdefault((row.value.verdict, cause(row.value)), []).append(row)
    made = [Group(verdict, why, of) for (verdict, why), of in found.items()]
    return sorted(made, key=lambda g: (ORDER.index(g.verdict), -len(g.rows)))
