"""A summary in Markdown of bounded size, for a job summary of GitHub; causes first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES, Result, Verdict

from .compare import Comparison, Pair, State
from .matrix import OPS, ORDER, Group, Matrix, groups, matrix, operation_of
from .runfile import Environment
from .runs import Fields, Row, Runs, budget_used, command, refusals

LIMIT = 50_000
"""Bytes of UTF-8; the page and the run files have the rest."""
FIRST = 3
"""Cases shown of each group of failures."""
NAMES = 8
"""Ops and backends named of each group."""
DOCUMENTS = 12
"""Run files named."""
LONGEST = 600
"""Characters of one text; an abort may print pages."""
RESERVE = 8_000
"""Bytes for the notes on what is left out, in all sections together."""
SHARE = 0.6
"""The part of the remaining bytes that one section may take, so that it leaves room for those after it."""

FINE = ("PASS", "NO REFERENCE")
"""Verdicts of a zoo cell that are no failure (`PASSES` of `suite/zoo/play.py`)."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MEANS_ITSELF = str.maketrans({**{c: f"\\{c}" for c in "\\`*_{}[]#|~@!"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"})

Section = tuple[str, Sequence[str], Sequence[str]]
"""Heading, lines above the items, and the items, one block of text each; without items it is left out."""


def markdown(runs: Runs, *, where: str = "", limit: int = LIMIT, against: Comparison | None = None) -> str:
    """Causes, what is new and fixed `against` a base, verdicts per backend, failures with their commands, gates, speed,
    planted bugs, mutants, and what did not run.
    """
    place = inline(where or ", ".join(dict.fromkeys(d.path.name for d in runs.documents)), 200)
    text = "\n".join(_head(runs)) + "\n"
    for heading, lines, items in _sections(runs, against):
        if items:
            text += _section(heading, lines, items, place, int((limit - len(text.encode()) - RESERVE) * SHARE))
    return cut(text, limit, f"\n\n**The rest is left out here; all of it: {place}**\n")


def cut(text: str, limit: int, note: str) -> str:
    """`text` in at most `limit` bytes, whole lines; `note` at its end says that something is left out."""
    raw = text.encode()
    if len(raw) <= limit:
        return text
    start = raw[: max(0, limit - len(note.encode()))].decode(errors="ignore")
    return start.rpartition("\n")[0] + note


def _section(heading: str, lines: Sequence[str], items: Sequence[str], place: str, room: int) -> str:
    """As many items as there is room for, and how many are left out."""
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
    note = f"\n\n**{left:,} more of {len(items):,} are left out here; all of them: {place}**" if left else ""
    return begun + "\n".join(items[:taken]) + note + "\n"


def _head(runs: Runs) -> Iterator[str]:
    failed = [r for r in runs.results if r.value.verdict in FAILURES and not r.value.fresh]
    ran = sum(r.value.verdict is not Verdict.UNSUPPORTED for r in runs.results)
    regressed = sum(g.value.answer == "regressed" for g in runs.gates)
    words = [f"{len(failed):,} failures", f"{ran:,} cases executed on backends"] if runs.results else []
    if not runs.results and (runs.of("conformance") or not _others(runs)):
        words.append("no cases ran")
    if runs.causes:
        words.insert(0, f"{len(runs.causes):,} causes")
    if runs.missing:
        words.append(f"{len(runs.missing):,} cases asked for have no result")
    if runs.gates:
        words.append(f"{regressed} of {len(runs.gates)} gates regressed")
    words += _others(runs)
    yield f"# Conformance: {', '.join(words)}"
    yield ""
    for d in runs.documents[-DOCUMENTS:]:
        env = d.environment
        machine = f"{env.cpu or 'unknown processor'}, {env.cores or '?'} cores, {env.system or ''}"
        on = f"{inline(d.machine, 40)} ({inline(machine, 120)})"
        yield f"- {d.kind}, {d.written}: {code(d.path.name, 120)}, run {d.run[:8]} on {on}{_origin(env)}"
    if (more := len(runs.documents) - DOCUMENTS) > 0:
        yield f"- and {more} older run files"


def _origin(environment: Environment) -> str:
    """Commit, branch and CI job, if the run file has them."""
    commit, branch, ci = (v or "" for v in (environment.commit, environment.branch, environment.ci))
    note = f"commit {code(commit[:12], 12)}" if commit else ""
    note += f" of {code(branch, 80)}" if branch else ""
    return "".join(f", {word.strip()}" for word in (note, f"CI {code(ci, 300)}" if ci else "") if word)


def _others(runs: Runs) -> list[str]:
    """Phrases on everything besides cases and gates."""
    words = []
    if runs.units:
        words.append(f"{sum(u.value.rate is not None for u in runs.units):,} of {len(runs.units):,} units timed")
    if cells := runs.zoo():
        words.append(f"{sum(map(_fails, cells)):,} of {len(cells):,} zoo cells failed")
    if phases := runs.phases():
        words.append(f"{sum(p.value.get('tokens_per_second') is not None for p in phases):,} phases timed")
    words += [f"{len(runs.of('audit')):,} audits"] if runs.of("audit") else []
    return words


def _fails(cell: Row[Fields]) -> bool:
    return cell.value.get("verdict") not in FINE


def _sections(runs: Runs, against: Comparison | None) -> Iterator[Section]:
    yield f"Causes ({len(runs.causes):,})", [], _causes(runs)
    if against:
        yield "Against the base", [f"{inline(against.sentence())}.", ""], _compared(against) or ["No pair differs."]
    yield f"Asked for, and without a result ({len(runs.missing):,}): the run fails", [], _missing(runs)
    verdicts = [v for v in ORDER if any(r.value.verdict is v for r in runs.results)]
    yield "Verdicts", *table(["backend", *map(str, verdicts), "budget used, at most"], _verdicts(runs, verdicts))
    failed = [r for r in runs.results if r.value.verdict in FAILURES and r.value.cause is None]
    unexplained = " that no cause explains" if runs.causes else ""
    for fresh, title in (
        (False, f"Failures{unexplained} ({{n:,}})"),
        (True, f"Fresh cases that failed{unexplained} ({{n:,}}): filed, no failure of this run"),
    ):
        of = [r for r in failed if r.value.fresh is fresh]
        yield title.format(n=len(of)), [], [_group(g) for g in groups(of)]
    waivers = [w for d in runs.of("conformance") for w in d.body.get("waivers") or () if isinstance(w, str)]
    yield "Waivers that need a look", [], [f"- {inline(w)}" for w in waivers]
    yield "Gates", *table(["gate", "unit", "backend", "answer", "estimate", "interval", "limit", "why"], _gates(runs))
    yield "Speed", *table(["unit", "backend", "rate", "rounds", "not timed because"], _units(runs))
    cells = runs.zoo()
    columns = list(dict.fromkeys((str(c.value.get("backend")), str(c.value.get("run"))) for c in cells))
    yield "Zoo", *table(["architecture", *(f"{code(b)}, {inline(r)}" for b, r in columns)], _zoo(cells, columns))
    yield "Zoo cells that failed", [], [_cell(c) for c in cells if _fails(c)]
    yield (
        "Phases",
        *table(["backend", "phase", "tokens/s", "W", "J/token", "splits", "not timed because"], _phases(runs)),
    )
    yield "Weights in buffers, said and done", [], _audit(runs)
    yield "Not run", [], _not_run(runs)
    m = matrix(r for r in runs.results if r.value.case.startswith(f"{OPS}/"))
    yield "Single ops, passed of declared", *table(["op", "types", *map(code, m.backends)], _matrix(m))


def _compared(against: Comparison) -> list[str]:
    """A line for each cause that makes pairs new, changed or fixed, and for each such pair without one."""
    told: dict[tuple[str | None, str, str], list[Pair]] = {}
    for p in against.pairs:
        if p.state in {State.NEW, State.CHANGED, State.FIXED}:
            told.setdefault((p.cause, p.backend, "" if p.cause else p.case), []).append(p)
    lines = []
    for (cause, backend, _), pairs in told.items():
        first = pairs[0]
        what = against.sentences.get((cause or "", backend)) or f"{first.before.verdict}, now {first.after.verdict}"
        states = ", ".join(f"{n:,} {state}" for state, n in Counter(p.state for p in pairs).items())
        lines.append(f"- {states}: {inline(what)}, on {code(backend)}; {code(first.case)}")
    return lines


def _causes(runs: Runs) -> list[str]:
    """A line for each cause: what it is, how many fail by it, whom it hits, since when, and its smallest case."""
    counts = Counter((r.value.cause, r.value.backend) for r in runs.results)
    lines = []
    for row, first, proof in zip(runs.causes, runs.first_seen(), runs.proofs(), strict=True):
        c = row.value
        failed = counts[c.id, c.backend] or len(c.cases)
        facts = [f"{failed:,} cases on {code(c.backend, 120)}", f"first seen {first.written[:10]}"]
        if (hit := c.rank.get("architectures")) is not None:
            of = f" of {c.rank['counted']:,}" if "counted" in c.rank else ""
            facts.insert(1, f"hits {hit:,}{of} architectures")
        lines.append(f"- **{c.verdict}** {inline(c.sentence)} ({', '.join(facts)}): {code(command(proof.value))}")
    return lines


def _missing(runs: Runs) -> list[str]:
    asked = Counter[str]()
    for d in runs.of("conformance"):
        asked.update(d.body.get("asked") or {})
    rows = [m.value for m in runs.missing]
    lines = [
        f"- {code(backend)}: {n:,} cases of {asked[backend]:,} asked: {inline(why)}"
        for (backend, why), n in Counter((m.backend, m.reason) for m in rows).most_common()
    ]
    return [*lines, *(f"  - {code(m.case)} on {code(m.backend)}" for m in rows)]


def _verdicts(runs: Runs, verdicts: Sequence[Verdict]) -> Iterator[Sequence[str]]:
    for backend in dict.fromkeys(r.value.backend for r in runs.results):
        here = [r.value for r in runs.results if r.value.backend == backend]
        counts = Counter(r.verdict for r in here)
        yield code(backend), *(f"{counts[v]:,}" for v in verdicts), budget_used(here, "nothing checked")


def _failure(row: Row[Result]) -> str:
    r = row.value
    note = f"- **{r.verdict}** {code(r.case)} on {code(r.backend)}: {inline(r.detail or 'no detail')}"
    return f"{note}\n  {code(command(r))}"


def _group(group: Group) -> str:
    """One failure; or the reason of several, their ops and backends, and the first of them."""
    first, n = group.rows[:FIRST], len(group.rows)
    if n == 1:
        return _failure(group.rows[0])
    why = inline(group.reason or "no detail")
    ops = _named(operation_of(r.value).name for r in group.rows)
    backends = _named(r.value.backend for r in group.rows)
    lines = [f"- **{group.verdict}** {n:,} times: {why}", f"  - of {ops}; on {backends}"]
    for row in first:
        lines.append(f"  - {code(row.value.case, 200)} on {code(row.value.backend, 120)}")
        lines.append(f"    {code(command(row.value))}")
    return "\n".join([*lines, *([f"  - and {n - len(first):,} more like these"] if n > len(first) else [])])


def _named(names: Iterable[str]) -> str:
    """The most frequent names with their counts, and the number of others."""
    counts = Counter(names)
    words = [f"{code(name, 120)} {n:,}" for name, n in counts.most_common(NAMES)]
    more = len(counts) - NAMES
    return ", ".join([*words, *([f"{more:,} others"] if more > 0 else [])])


def _zoo(cells: Sequence[Row[Fields]], columns: Sequence[tuple[str, str]]) -> Iterator[Sequence[str]]:
    """A row per architecture, those with a failure first."""
    found: dict[str, dict[tuple[str, str], Row[Fields]]] = {}
    for c in cells:
        here = found.setdefault(str(c.value.get("architecture")), {})
        here[str(c.value.get("backend")), str(c.value.get("run"))] = c
    for name, here in sorted(found.items(), key=lambda item: (not any(map(_fails, item[1].values())), item[0])):
        yield inline(name, 80), *(_cell_text(here.get(c)) for c in columns)


def _cell_text(cell: Row[Fields] | None) -> str:
    if cell is None:
        return "not run"
    word, nmse = inline(str(cell.value.get("verdict")), 40), cell.value.get("nmse")
    figure = f" {nmse:.1e}" if isinstance(nmse, (int, float)) and not isinstance(nmse, bool) else ""
    return f"**{word}**{figure}" if _fails(cell) else f"{word}{figure}"


def _cell(cell: Row[Fields]) -> str:
    c = cell.value
    where = f"{code(str(c.get('backend')), 120)}, {inline(str(c.get('run')), 80)}"
    named = f"{code(str(c.get('architecture')), 80)} on {where}"
    return f"- **{inline(str(c.get('verdict')), 40)}** {named}: {inline(str(c.get('detail') or 'no detail'), 300)}"


def _phases(runs: Runs) -> Iterator[Sequence[str]]:
    for row in runs.phases():
        p = row.value
        figures = (p.get(k) for k in ("tokens_per_second", "watts", "joules_per_token", "splits"))
        words = [_number(v if isinstance(v, (int, float)) else None) for v in figures]
        yield code(str(p["backend"])), inline(str(p.get("name") or "–")), *words, inline(str(p.get("reason") or ""))


def _gates(runs: Runs) -> Iterator[Sequence[str]]:
    order = ("regressed", "undecided", "not run", "fine")
    for row in sorted(runs.gates, key=lambda g: order.index(g.value.answer)):
        g = row.value
        low, high = g.low, g.high
        between = f"{low:.4g} to {high:.4g}" if low is not None and high is not None else "–"
        seen = f", could have seen {100 * g.detectable:.2g} %" if g.detectable is not None else ""
        answer = f"**{g.answer}**" if g.answer != "fine" else "fine"
        yield (inline(g.gate), inline(g.unit), code(g.backend), answer, _number(g.estimate), between,
               _number(g.limit), inline((g.reason or "") + seen))  # fmt: skip


def _units(runs: Runs) -> Iterator[Sequence[str]]:
    for row in runs.units:
        u = row.value
        rate = "–" if u.rate is None else f"{u.rate:.4g} {inline(u.of)}/s"
        yield inline(u.unit), code(u.backend), rate, str(u.rounds), inline(u.reason)


def _audit(runs: Runs) -> list[str]:
    lines: list[str] = []
    for _, backend, rows in runs.audits():
        counts = Counter(str(r.value.get("finding")) for r in rows)
        lines.append(f"- {code(backend)}: {', '.join(f'{n:,} {inline(w)}' for w, n in counts.items()) or 'nothing'}")
        for c in (r.value for r in rows if r.value.get("finding") != "agreed"):
            where = f"{code(str(c.get('weight') or 'the trajectory'))} in {code(str(c.get('buffer')))}"
            why = f"{inline(str(c.get('detail') or ''))}, {code(str(c.get('case')))}"
            lines.append(f"  - **{inline(str(c.get('finding')))}** {where}: {why}")
    return lines


def _not_run(runs: Runs) -> list[str]:
    lines = [f"- {code(name)}: not available: {inline(why)}" for name, why in runs.unavailable().items()]
    for backend, reasons in refusals(r.value for r in runs.results).items():
        lines.append(f"- {code(backend)} takes {sum(reasons.values()):,} cases not (UNSUPPORTED), by its reason:")
        lines += [f"  - {n:,}: {inline(why) or 'no reason given'}" for why, n in reasons.most_common()]
    lines += [f"- {code(p.name)}: no run file, passed over" for p in runs.passed_over]
    return lines


def _matrix(m: Matrix) -> Iterator[Sequence[str]]:
    for what in m.rows:
        cells = [m.cells.get((what, b)) for b in m.backends]
        yield inline(what.name), inline(what.types), *map(_passed, cells)


def _passed(cell: Counter[str] | None) -> str:
    if cell is None:
        return "not run"
    return f"{cell['passed']} of {cell['declared']}" if cell["declared"] else "unsupported"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[list[str], list[str]]:
    """The header lines, and the rows."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"], [f"| {' | '.join(row)} |" for row in rows]


def _number(value: JSON) -> str:
    return "–" if value is None else f"{value:.4g}"


def _short(text: str, most: int) -> str:
    line = " ".join(_CONTROLS.sub("?", text.replace("\n", " ").replace("\r", " ")).split())
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most:,} more characters)"


def inline(text: str, most: int = LONGEST) -> str:
    """One line of text without markup or HTML."""
    return _short(text, most).translate(_MEANS_ITSELF)


def code(text: str, most: int = LONGEST) -> str:
    """A code span of one line, also for tables; a backtick would end it, so it becomes an apostrophe."""
    inside = _short(text, most).replace("`", "'").replace("|", "\\|")
    return f"`{inside or ' '}`"
