"""The one summary of a nightly, in Markdown: what did not run comes first, and it stays under a size."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from . import figures
from .figures import Failure
from .night import BROKEN, FAILURES, FINE, NOTHING
from .state import Answer, Done, State

FILE = "summary.md"
LIMIT = 900_000
"""Bytes; GitHub takes 1 MiB for a step."""
LISTED = 200
"""Failing cases; all of them stand in `REPRODUCE`."""
DETAIL = 300
"""Characters of a failing case's story."""
REPRODUCE = "failures.md"
DRAWN = frozenset({"seeded", "fresh"})
"""Parts that run what is drawn from the night's seed."""
WORDS = {
    FINE: "everything that was asked for ran, and is fine",
    FAILURES: "there are failures or regressions",
    NOTHING: "nothing was executed, or nothing passed on a backend, so nothing is proven",
    BROKEN: "a part could not run, or cases or a shard are missing",
}
"""Exit code -> what it means."""


def summary(
    states: Sequence[State], names: Sequence[str], found: Sequence[Failure], missing: Sequence[str], code: int
) -> str:
    """The whole text, at most `LIMIT` bytes.

    Args:
        states: of one nightly, or of all that were merged.
        names: every part there is, in order.
        found: the failing cases.
        missing: sentences of what is missing altogether.
        code: the exit code.
    """
    gating = [f for f in found if not f.fresh]
    filed = [f for f in found if f.fresh]
    lines = [f"# Nightly: {words(code)}", "", _where(states), ""]
    lines += _not_run(states, names, missing)
    lines += _parts(states, names)
    lines += _cases("Failing cases", gating)
    lines += _findings(states)
    lines += _cases("Fresh cases that fail: filed, no failure of this night", filed)
    return cut("\n".join(lines) + "\n", LIMIT)


def words(code: int) -> str:
    """What an exit code means."""
    return WORDS.get(code, "it was interrupted; start it again with the same words to go on")


def reproduce(found: Sequence[Failure]) -> str:
    """Every failing case with the command that reproduces it, in Markdown."""
    return (
        "\n".join(["# Failing cases", "", "Commands are for the folder of this file.", "", *map(_line, found)]) + "\n"
    )


def cut(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes, whole lines, saying so where something is left out."""
    raw = text.encode()
    if len(raw) <= limit:
        return text
    end = "\n… the rest is left out; it is in the documents\n"
    kept = raw[: limit - len(end.encode())].decode(errors="ignore")
    return kept.rpartition("\n")[0] + end


def _where(states: Sequence[State]) -> str:
    places = sorted({_place(s) for s in states})
    began = min(s.head["written"] for s in states)
    starts = sum(s.starts for s in states) - len(states)
    again = f"; started {starts + 1} times" if starts else ""
    seeds = sorted({s.seed for s in states if s.seed is not None and s.parts.keys() & DRAWN})
    drawn = f"; generated cases drawn from --seed {', '.join(map(str, seeds))}" if seeds else ""
    return f"{', '.join(places)}; begun {began}{again}{drawn}"


def _place(state: State) -> str:
    shard = state.asked.get("shard", "1/1")
    return state.label if shard == "1/1" else f"{state.label} shard {shard}"


def _not_run(states: Sequence[State], names: Sequence[str], missing: Sequence[str]) -> list[str]:
    lines = [f"- {m}" for m in missing]
    for s in states:
        lines += [f"- {s.unwritten}"] if s.unwritten else []
        for n in names:
            p = s.parts.get(n, Done(Answer.UNASKED))
            if p.answer is None:
                lines.append(f"- **{n}** on {_place(s)}: {'was interrupted' if p.starts else 'was never reached'}")
            elif p.answer in {Answer.BROKEN, Answer.LATE, Answer.NOTHING}:
                lines.append(f"- **{n}** on {_place(s)}: {p.answer}: {_one_line(p.says)}")
        lines += [f"- on {_place(s)}: {_one_line(u)}" for u in figures.unrun(figures.documents(s))]
    unasked = [n for n in names if all(s.parts.get(n, Done(Answer.UNASKED)).answer is Answer.UNASKED for s in states)]
    lines += [f"- not asked for: {', '.join(unasked)}"] if unasked else []
    return ["## Did not run", "", *dict.fromkeys(lines), ""] if lines else ["Every part ran.", ""]


def _parts(states: Sequence[State], names: Sequence[str]) -> list[str]:
    rows = []
    for n in names:
        for s in states:
            p = s.parts.get(n)
            if p is None or p.answer in {Answer.ELSEWHERE, Answer.UNASKED}:
                continue
            said = figures.of(figures.documents(s, p)) or p.says
            rows.append(
                (n, _place(s), str(p.answer or "interrupted"), _one_line(said), f"{p.seconds:.0f} s", f"{n}.log")
            )
    heads = ["part", "where", "answer", "figures", "took", "log"]
    return ["## Parts", "", tabulate(rows, heads, tablefmt="github", disable_numparse=True), ""]


def _cases(title: str, found: Sequence[Failure]) -> list[str]:
    if not found:
        return []
    more = len(found) - LISTED
    rest = [f"- … and {more:,} more: {REPRODUCE}"] if more > 0 else []
    return [f"## {title}: {len(found):,}", "", *map(_line, found[:LISTED]), *rest, ""]


def _findings(states: Sequence[State]) -> list[str]:
    found = [f for s in states for f in figures.findings(figures.documents(s))]
    more = [f"- … and {len(found) - LISTED:,} more, in the documents"] if len(found) > LISTED else []
    listed = [f"- {_one_line(f[:DETAIL])}" for f in found[:LISTED]]
    return [f"## Other findings: {len(found):,}", "", *listed, *more, ""] if found else []


def _line(f: Failure) -> str:
    detail = f.detail if len(f.detail) <= DETAIL else f"{f.detail[:DETAIL]}…"
    return f"- {f.verdict} `{f.case}` on `{f.backend}`: {_one_line(detail)}\n  `{f.reproduce}`"


def _one_line(text: str) -> str:
    """Safe in a table and a list of Markdown."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
