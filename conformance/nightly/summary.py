"""The summary of a nightly in Markdown, from the documents that its parts left.

What did not run comes first, and the whole stays under a size. A part that died may have left anything.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from tabulate import tabulate

from conformance.case.case import JSON
from conformance.ggml.text import printable
from conformance.judge.outcome import Exit, Outcome, Why
from conformance.judge.verdict import FAILURES as FAILING_VERDICTS
from conformance.judge.verdict import Missing, Request, Result, Verdict
from conformance.report.markdown import cut
from conformance.run.session.shard import whole

from .parts import shown
from .state import Answer, Done, State

FILE = "summary.md"
LIMIT = 900_000
"""Bytes; GitHub takes 1 MiB for a step."""
LISTED = 200
"""Failing cases; all of them stand in `REPRODUCE`."""
DETAIL = 300
"""Characters of a failing case's detail."""
REST = "\n… the rest is left out; it is in the documents\n"
REPRODUCE = "failures.md"
DRAWN = frozenset({"seeded", "fresh"})
"""Parts whose cases are drawn from the night's seed."""
WORDS = {
    Exit.OK: "everything that was asked for ran, and is fine",
    Exit.FAILURES: "there are failures or regressions",
    Exit.NOTHING: "nothing was executed, or nothing passed on a backend, so nothing is proven",
    Exit.INCOMPLETE: "no failures so far, but a part timed out or decided nothing",
}
"""Exit code -> what it means."""
BROKEN = frozenset({Why.BROKEN, Why.MISSING, Why.SHARD})


def summary(
    states: Sequence[State], names: Sequence[str], failing: Sequence[Failure], missing: Sequence[str], outcome: Outcome
) -> str:
    """The whole text, at most `LIMIT` bytes."""
    gating = [_line(f) for f in failing if not f.fresh]
    filed = [_line(f) for f in failing if f.fresh]
    found = [f"- {_one_line(f[:DETAIL])}" for s in states for f in findings(documents(s))]
    lines = [f"# Nightly: {words(outcome)}", "", _where(states), ""]
    lines += _not_run(states, names, missing)
    lines += _parts(states, names)
    lines += _listed("Failing cases", gating, f": {REPRODUCE}")
    lines += _listed("Other findings", found, ", in the documents")
    lines += _listed("Fresh cases that fail: filed, no failure of this night", filed, f": {REPRODUCE}")
    return cut("\n".join(lines) + "\n", LIMIT, REST)


def words(outcome: Outcome) -> str:
    """What an outcome means."""
    found = {r.why for r in outcome.reasons if r.why.exit is outcome.exit_code}
    if outcome.exit_code is Exit.FAILURES and found <= BROKEN:
        return "a part could not run, or cases or a shard are missing"
    if outcome.exit_code is Exit.INCOMPLETE and Why.INTERRUPTED in found:
        return "it was interrupted; start it again with the same words to go on"
    return WORDS[outcome.exit_code]


def reproduce(failing: Sequence[Failure]) -> str:
    """Every failing case with the command that reproduces it, in Markdown."""
    lines = ["# Failing cases", "", "Commands are for the folder of this file.", "", *map(_line, failing), ""]
    return "\n".join(lines)


def _where(states: Sequence[State]) -> str:
    places = sorted({_place(s) for s in states})
    began = min(s.head["written"] for s in states)
    starts = sum(s.starts for s in states) - len(states)
    again = f"; started {starts + 1} times" if starts else ""
    seeds = sorted({s.seed for s in states if s.seed is not None and s.parts.keys() & DRAWN})
    drawn = f"; cases drawn from --seed {', '.join(map(str, seeds))}" if seeds else ""
    return f"{', '.join(places)}; begun {began}{again}{drawn}"


def _place(state: State) -> str:
    shard = state.asked.get("shard", "1/1")
    return state.label if shard == "1/1" else f"{state.label} shard {shard}"


def _not_run(states: Sequence[State], names: Sequence[str], missing: Sequence[str]) -> list[str]:
    lines = [f"- {_one_line(m)}" for m in missing]
    for s in states:
        lines += [f"- {s.unwritten}"] if s.unwritten else []
        for n in names:
            p = s.parts.get(n, Done(Answer.UNASKED))
            if p.answer is None:
                lines.append(f"- **{n}** on {_place(s)}: {'was interrupted' if p.starts else 'was never reached'}")
            elif p.answer in {Answer.BROKEN, Answer.LATE, Answer.INCOMPLETE, Answer.NOTHING}:
                lines.append(f"- **{n}** on {_place(s)}: {p.answer}: {_one_line(p.says)}")
        lines += [f"- on {_place(s)}: {_one_line(u)}" for u in unrun(documents(s))]
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
            text = figures(documents(s, p)) or p.says
            rows.append(
                (n, _place(s), str(p.answer or "interrupted"), _one_line(text), f"{p.seconds:.0f} s", f"{n}.log")
            )
    heads = ["part", "where", "answer", "figures", "took", "log"]
    return ["## Parts", "", tabulate(rows, heads, tablefmt="github", disable_numparse=True), ""]


def _listed(title: str, lines: Sequence[str], where: str) -> list[str]:
    """A section of `LISTED` lines at most; the others are `where` it says."""
    more = [f"- … and {len(lines) - LISTED:,} more{where}"] if len(lines) > LISTED else []
    return [f"## {title}: {len(lines):,}", "", *lines[:LISTED], *more, ""] if lines else []


def _line(f: Failure) -> str:
    detail = f.detail if len(f.detail) <= DETAIL else f"{f.detail[:DETAIL]}…"
    return f"- {f.verdict} `{printable(f.case)}` on `{printable(f.backend)}`: {_one_line(detail)}\n  `{f.reproduce}`"


def _one_line(text: str) -> str:
    """Safe in a table and a list of Markdown, and on a terminal."""
    return printable(" ".join(text.split())).replace("|", "\\|").replace("<", "&lt;")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing case."""

    verdict: str
    case: str
    backend: str
    detail: str
    reproduce: str
    """What to type in the nightly's folder."""
    fresh: bool
    """Whether it is a new random case, which is filed and fails no run."""


def _document(path: Path) -> dict[str, JSON]:
    """A document; empty where there is none that can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def documents(state: State, part: Done | None = None) -> list[dict[str, JSON]]:
    """The documents of a part, or of all, as far as they can be read."""
    chosen = [part] if part else state.parts.values()
    return [d for p in chosen for d in (_document(state.folder / n) for n in p.documents) if d]


def failures(states: Sequence[State], folder: Path) -> list[Failure]:
    """Each failing (case, backend) of a night once, those that fail the run first; commands are for `folder`."""
    rows: dict[tuple[int, str, str], Failure] = {}
    for k, s in enumerate(states):
        folder_of_cases = Path(os.path.relpath(s.folder, folder)) / "failures"
        for r in _rows(documents(s), "results"):
            if r.get("verdict") in FAILING_VERDICTS:
                rows[k, str(r.get("case")), str(r.get("backend"))] = _failure(r, folder_of_cases)
    return sorted(rows.values(), key=lambda f: f.fresh)


def _failure(r: dict[str, JSON], saved_in: Path) -> Failure:
    case, backend, saved = str(r.get("case")), str(r.get("backend")), r.get("saved")
    # the folder may have moved, from the machine that ran it to the one where this is read
    again = ["repro", str(saved_in / PurePath(saved).name)] if isinstance(saved, str) else ["run", "--case", case]
    reproduce = shown(["conform", *again, "--backend", backend])
    return Failure(str(r.get("verdict")), case, backend, str(r.get("detail") or ""), reproduce, bool(r.get("fresh")))


def findings(documents: Sequence[dict[str, JSON]]) -> list[str]:
    """A sentence for each gate that regressed."""
    broken = [g for g in _rows(documents, "gates") if g.get("answer") == "regressed"]
    return [f"gate {g.get('gate')}, {g.get('unit')} on {g.get('backend')}: {g.get('reason')}" for g in broken]


def unrun(documents: Sequence[dict[str, JSON]]) -> list[str]:
    """A sentence for each case, gate and backend that did not run within a part that did."""
    lacking = [(d.get("environment") or {}).get("unavailable") or {} for d in documents]
    left_out = Counter((str(m.get("backend")), str(m.get("reason"))) for m in _rows(documents, "missing"))
    gates = [g for g in _rows(documents, "gates") if g.get("answer") == "not run"]
    return [
        *(f"{n:,} cases asked of {b} have no result: {why}" for (b, why), n in left_out.most_common()),
        *(f"backend {b}: not available: {why}" for d in lacking for b, why in d.items()),
        *(f"gate {g.get('gate')}, {g.get('unit')} on {g.get('backend')}: {g.get('reason')}" for g in gates),
    ]


def unproven(documents: Sequence[Mapping[str, JSON]]) -> dict[str, str]:
    """Backend -> a sentence, for each on which nothing passed, and nothing failed, in a run that demands it, or in all
    shards of one together.

    A shard alone says nothing, and neither do some of them, since the cases of the others may have passed.
    """
    runs: dict[tuple[str, int], list[Mapping[str, JSON]]] = {}
    for d in documents:
        shard = d.get("shard")
        if isinstance(shard, dict) and shard.get("whole") not in {None, whole(())}:  # which is of fresh cases alone
            runs.setdefault((shard["whole"], shard["of"]), []).append(d)
    complete = [run for (_, of), run in runs.items() if {d["shard"]["index"] for d in run} == set(range(1, of + 1))]
    complete += [[d] for d in documents if d.get("gating") is True]
    return {backend: sentence for run in complete for backend, sentence in _unproven(run).items()}


def _unproven(run: Sequence[Mapping[str, JSON]]) -> dict[str, str]:
    rows = [r for r in _rows(run, "results") if not r.get("fresh")]
    results = [Result(str(r.get("case")), str(r.get("backend")), Verdict(r["verdict"])) for r in rows]
    missing = [Missing(str(m.get("backend")), str(m.get("case")), "") for m in _rows(run, "missing")]
    cases: dict[str, dict[str, None]] = {}
    for backend, case in [*((r.backend, r.case) for r in results), *((m.backend, m.case) for m in missing)]:
        cases.setdefault(backend, {})[case] = None
    return Request(cases).unproven(results, missing)


def figures(documents: Sequence[dict[str, JSON]]) -> str:
    """The figures of one part's documents in a line; empty where it has none."""
    return "; ".join(filter(None, (figure(documents) for figure in _FIGURES)))


def _verdicts(documents: Sequence[dict[str, JSON]]) -> str:
    rows = _rows(documents, "results")
    filed = sum(bool(r.get("fresh")) and r.get("verdict") in FAILING_VERDICTS for r in rows)
    lacking = len(_rows(documents, "missing"))
    counted = _counted([r.get("verdict") for r in rows]) + (f" ({filed} of fresh cases, filed)" if filed else "")
    return ", ".join(filter(None, (counted, f"{lacking:,} without a result" if lacking else "")))


def _gates(documents: Sequence[dict[str, JSON]]) -> str:
    return _counted([f"gates {g.get('answer')}" for g in _rows(documents, "gates")])


def _units(documents: Sequence[dict[str, JSON]]) -> str:
    rows = _rows(documents, "units")
    timed = sum(bool(u.get("seconds")) for u in rows)
    return f"{timed} of {len(rows)} work units timed" if rows else ""


_Figure = Callable[[Sequence[dict[str, JSON]]], str]
_FIGURES: tuple[_Figure, ...] = (_verdicts, _gates, _units)


def _counted(words: Sequence[object]) -> str:
    return ", ".join(f"{n:,} {word}" for word, n in sorted(Counter(map(str, words)).items()))


def _rows(documents: Sequence[Mapping[str, JSON]], name: str) -> list[dict[str, JSON]]:
    lists = [d.get(name) for d in documents]
    return [r for rows in lists if isinstance(rows, list) for r in rows if isinstance(r, dict)]
