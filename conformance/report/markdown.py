"""A summary in Markdown, short enough for a job summary of GitHub, whatever the run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from conformance.cgraph.case import JSON
from conformance.check.verdict import FAILURES, Result, Verdict

from .matrix import OPS, Matrix, matrix
from .reproduce import command
from .runs import Row, Runs
from .words import budget_used, refusals

LIMIT = 1_000_000
"""Bytes of UTF-8; a job summary takes 1 MiB."""
LONGEST = 600
"""Characters of one text: an abort text may have pages."""
RESERVE = 50_000
"""Bytes kept for what says what was left out, in all sections together."""
SHARE = 0.6
"""Of what is left, what one section may take, so that none crowds out those behind it."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MEANS_ITSELF = str.maketrans({**{c: f"\\{c}" for c in "\\`*_{}[]#|~@!"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"})

Section = tuple[str, Sequence[str], Sequence[str]]
"""A heading, the lines above its items, and the items, one block of text each; without items it is no section."""


def markdown(runs: Runs, *, where: str = "", limit: int = LIMIT) -> str:
    """Verdicts per backend, failures with what reproduces them, gates, speed, planted bugs, and what did not run.

    Args:
        runs: what it tells.
        where: where all of it can be seen, for sections that are cut; the run files where it is empty.
        limit: bytes that the text has at most. What is left out is counted, and where it stands is said.
    """
    place = _text(where or ", ".join(dict.fromkeys(d.path.name for d in runs.documents)))
    text = "\n".join(_head(runs)) + "\n"
    for heading, lines, items in _sections(runs):
        if items:
            text += _section(heading, lines, items, place, int((limit - len(text.encode()) - RESERVE) * SHARE))
    return text


def _section(heading: str, lines: Sequence[str], items: Sequence[str], place: str, room: int) -> str:
    """As many of the items as there is room for, and what became of the others."""
    begun = "\n".join(["", f"## {heading}", "", *lines, ""])
    room -= len(begun.encode())
    if room < 0:
        return f"\n## {heading}\n\n**All {len(items):,} are left out here; they are in: {place}**\n"
    taken = 0
    for item in items:
        room -= len(item.encode()) + 1
        if room < 0:
            break
        taken += 1
    left = len(items) - taken
    said = f"\n\n**{left:,} more of {len(items):,} are left out here; all of them: {place}**" if left else ""
    return begun + "\n".join(items[:taken]) + said + "\n"


def _head(runs: Runs) -> Iterator[str]:
    failed = [r for r in runs.results if r.value.verdict in FAILURES and not r.value.fresh]
    ran = sum(r.value.verdict is not Verdict.UNSUPPORTED for r in runs.results)
    regressed = sum(g.value["answer"] == "regressed" for g in runs.gates)
    words = [f"{len(failed):,} failures", f"{ran:,} cases executed on backends"] if runs.results else ["no cases ran"]
    if runs.missing:
        words.append(f"{len(runs.missing):,} cases asked for have no result")
    if runs.gates:
        words.append(f"{regressed} of {len(runs.gates)} gates regressed")
    yield f"# Conformance: {', '.join(words)}"
    yield ""
    for d in runs.documents[-50:]:
        env = d.environment
        machine = f"{env.get('cpu') or 'unknown processor'}, {env.get('cores') or '?'} cores, {env.get('system') or ''}"
        yield f"- {d.kind}, {d.written}: {_code(d.path.name)}, run {d.run[:8]} on {d.machine} ({_text(machine, 120)})"
    if (more := len(runs.documents) - 50) > 0:
        yield f"- and {more} older run files"


def _sections(runs: Runs) -> Iterator[Section]:
    yield f"Asked for, and without a result ({len(runs.missing):,}): the run fails", [], _missing(runs)
    verdicts = [v for v in Verdict if any(r.value.verdict is v for r in runs.results)]
    yield "Verdicts", *_table(["backend", *map(str, verdicts), "budget used, at most"], _verdicts(runs, verdicts))
    failed = [r for r in runs.results if r.value.verdict in FAILURES]
    gating = [_failure(r) for r in failed if not r.value.fresh]
    yield f"Failures ({len(gating):,})", [], gating
    filed = [_failure(r) for r in failed if r.value.fresh]
    yield f"Fresh cases that failed ({len(filed):,}): filed, no failure of this run", [], filed
    waivers = [w for d in runs.of("conformance") for w in d.body.get("waivers") or () if isinstance(w, str)]
    yield "Waivers that need a look", [], [f"- {_text(w)}" for w in waivers]
    yield "Gates", *_table(["gate", "unit", "backend", "answer", "estimate", "interval", "limit", "why"], _gates(runs))
    yield "Speed", *_table(["unit", "backend", "rate", "rounds", "not timed because"], _units(runs))
    yield "Planted bugs", [], _planted(runs)
    yield "Weights in buffers, said and done", [], _audit(runs)
    yield "Not run", [], _not_run(runs)
    m = matrix(r for r in runs.results if r.value.case.startswith(f"{OPS}/"))
    yield "Single ops, passed of declared", *_table(["op", "types", *map(_code, m.backends)], _matrix(m))


def _missing(runs: Runs) -> list[str]:
    asked = Counter[str]()
    for d in runs.of("conformance"):
        asked.update(d.body.get("asked") or {})
    rows = [m.value for m in runs.missing]
    lines = [
        f"- {_code(backend)}: {n:,} cases of {asked[backend]:,} asked: {_text(why)}"
        for (backend, why), n in Counter((m["backend"], m["reason"]) for m in rows).most_common()
    ]
    return [*lines, *(f"  - {_code(m['case'])} on {_code(m['backend'])}" for m in rows)]


def _verdicts(runs: Runs, verdicts: Sequence[Verdict]) -> Iterator[Sequence[str]]:
    for backend in dict.fromkeys(r.value.backend for r in runs.results):
        here = [r.value for r in runs.results if r.value.backend == backend]
        counts = Counter(r.verdict for r in here)
        yield _code(backend), *(f"{counts[v]:,}" for v in verdicts), budget_used(here, "nothing checked")


def _failure(row: Row[Result]) -> str:
    r = row.value
    said = f"- **{r.verdict}** {_code(r.case)} on {_code(r.backend)}: {_text(r.detail or 'no detail')}"
    return f"{said}\n  {_code(command(r))}"


def _gates(runs: Runs) -> Iterator[Sequence[str]]:
    order = ("regressed", "undecided", "not run", "fine")
    for row in sorted(runs.gates, key=lambda g: order.index(g.value["answer"])):
        g = row.value
        low, high = g.get("low"), g.get("high")
        between = f"{low:.4g} to {high:.4g}" if low is not None and high is not None else "–"
        seen = f", could have seen {100 * g['detectable']:.2g} %" if g.get("detectable") is not None else ""
        answer = f"**{g['answer']}**" if g["answer"] != "fine" else "fine"
        yield (_text(g["gate"]), _text(g["unit"]), _code(g["backend"]), answer, _number(g.get("estimate")), between,
               _number(g.get("limit")), _text((g.get("reason") or "") + seen))  # fmt: skip


def _units(runs: Runs) -> Iterator[Sequence[str]]:
    for row in runs.units:
        u = row.value
        rate = "–" if u["rate"] is None else f"{u['rate']:.4g} {_text(u['of'])}/s"
        yield _text(u["unit"]), _code(u["backend"]), rate, str(u["rounds"]), _text(u["reason"])


def _planted(runs: Runs) -> list[str]:
    if not runs.hunts:
        return []
    noticed = {(h.document.machine, h.value["fault"]) for h in runs.hunts if h.value["noticed"]}
    hunted = {(h.document.machine, h.value["fault"]) for h in runs.hunts}
    faults = {(f.document.machine, f.value["name"]): f.value for f in runs.faults}
    asked = [k for k in faults if k in hunted]
    missed = [k for k in asked if k not in noticed]
    rate = f" ({100 * (1 - len(missed) / len(asked)):.1f} %)" if asked else ""
    alarms = [fault for machine, fault in noticed if (machine, fault) not in faults]
    lines = [f"{len(asked) - len(missed)} of {len(asked)} planted bugs noticed{rate}; {len(alarms)} false alarms.", ""]
    lines += [f"- not noticed: {_code(k[1])} in {_code(faults[k]['of'])}: {_text(faults[k]['says'])}" for k in missed]
    lines += [f"- false alarm: {_code(fault)}" for fault in sorted(alarms)]
    lines += [f"- not planted: {_code(k[1])}" for k in faults if k not in hunted]
    return lines


def _audit(runs: Runs) -> list[str]:
    found: list[str] = []
    for d in runs.of("audit"):
        backends = d.body.get("backends")
        for name, cells in backends.items() if isinstance(backends, dict) else ():
            rows = [c for c in cells if isinstance(c, dict)] if isinstance(cells, list) else []
            counts = Counter(str(c.get("finding")) for c in rows)
            found.append(f"- {_code(name)}: {', '.join(f'{n:,} {_text(w)}' for w, n in counts.items()) or 'nothing'}")
            for c in rows:
                if c.get("finding") != "agreed":
                    where = f"{_code(str(c.get('weight') or 'the trajectory'))} in {_code(str(c.get('buffer')))}"
                    told = f"{_text(str(c.get('detail') or ''))}, {_code(str(c.get('case')))}"
                    found.append(f"  - **{_text(str(c.get('finding')))}** {where}: {told}")
    return found


def _not_run(runs: Runs) -> list[str]:
    lines = [f"- {_code(name)}: not available: {_text(why)}" for name, why in runs.unavailable().items()]
    for backend, reasons in refusals(r.value for r in runs.results).items():
        lines.append(f"- {_code(backend)} takes {sum(reasons.values()):,} cases not (UNSUPPORTED), by its reason:")
        lines += [f"  - {n:,}: {_text(why) or 'no reason given'}" for why, n in reasons.most_common()]
    lines += [f"- {_code(p.name)}: no run file, passed over" for p in runs.passed_over]
    return lines


def _matrix(m: Matrix) -> Iterator[Sequence[str]]:
    for what in m.rows:
        cells = [m.cells.get((what, b)) for b in m.backends]
        said = [
            "not run" if c is None else f"{c.passed} of {c.declared}" if c.declared else "unsupported" for c in cells
        ]
        yield _text(what.name), _text(what.types), *said


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[list[str], list[str]]:
    """What stands above the rows, and the rows."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"], [f"| {' | '.join(row)} |" for row in rows]


def _number(value: JSON) -> str:
    return "–" if value is None else f"{value:.4g}"


def _short(text: str, most: int) -> str:
    line = " ".join(_CONTROLS.sub("?", text.replace("\n", " ").replace("\r", " ")).split())
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most:,} more characters)"


def _text(text: str, most: int = LONGEST) -> str:
    """Text that means itself: no markup, no HTML, one line."""
    return _short(text, most).translate(_MEANS_ITSELF)


def _code(text: str, most: int = LONGEST) -> str:
    """A code span of one line that may stand in a table; a backtick in it would end it."""
    inside = _short(text, most).replace("`", "'").replace("|", "\\|")
    return f"`{inside or ' '}`"
