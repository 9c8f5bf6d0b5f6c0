"""Writes a summary in Markdown of bounded size, for a job summary of GitHub; causes first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from conformance.builds.changes import sentences
from conformance.judge.verdict import FAILURES, MissingCause, Result, Verdict, counted
from conformance.run.session.environment import Environment

from .compare import DIFFERS, Comparison, Sides
from .matrix import OPS, ORDER, Group, Matrix, groups, matrix, operation, operation_of
from .runs import Row, Runs, budget_used, command, pace, refusals
from .scope import scopes_of

LIMIT = 50_000
"""Maximum bytes of UTF-8; the page and the run files have the rest."""
FIRST = 3
"""Maximum number of cases listed for each group of failures."""
NAMES = 8
"""Maximum number of ops and backends listed for each group."""
DOCUMENTS = 12
"""Maximum number of run files listed."""
LONGEST = 600
"""Maximum characters of one text; an abort may print pages."""
INTERRUPTED = "interrupted: the run was killed before it wrote its record"
"""Note at the file of such a run."""
RESERVE = 8_000
"""Bytes reserved for notes on omitted items, in all sections together."""
SHARE = 0.6
"""Share of the remaining bytes that one section may take."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MEANS_ITSELF = str.maketrans({**{c: f"\\{c}" for c in "\\`*_{}[]#|~@!"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"})

Section = tuple[str, Sequence[str], Sequence[str]]
"""Heading, lines above the items, and items; a section without items is omitted."""


def markdown(runs: Runs, *, where: str = "", limit: int = LIMIT, against: Comparison | None = None) -> str:
    """Return the summary: causes, differences, verdicts, scope, failures, speed, omissions.

    Failures have their commands; verdicts are counted per backend.
    """
    place = inline(where or ", ".join(dict.fromkeys(d.path.name for d in runs.documents)), 200)
    text = "\n".join(_head(runs)) + "\n"
    for heading, lines, items in _sections(runs, against):
        if items:
            text += _section(heading, lines, items, place, int((limit - len(text.encode()) - RESERVE) * SHARE))
    return cut(text, limit, f"\n\n**The rest is omitted here; complete: {place}**\n")


def cut(text: str, limit: int, note: str) -> str:
    """Cut `text` to whole lines of at most `limit` bytes; append `note` if it was cut."""
    raw = text.encode()
    if len(raw) <= limit:
        return text
    start = raw[: max(0, limit - len(note.encode()))].decode(errors="ignore")
    return start.rpartition("\n")[0] + note


def _section(heading: str, lines: Sequence[str], items: Sequence[str], place: str, room: int) -> str:
    """Format as many items as fit, and the number of omitted ones."""
    begun = "\n".join(["", f"## {heading}", "", *lines, ""])
    room -= len(begun.encode())
    if room < 0:
        return f"\n## {heading}\n\n**All {len(items):,} are omitted here; see: {place}**\n"
    taken = 0
    for item in items:
        room -= len(item.encode()) + 1
        if room < 0:
            break
        taken += 1
    left = len(items) - taken
    note = f"\n\n**{left:,} more of {len(items):,} are omitted here; complete: {place}**" if left else ""
    return begun + "\n".join(items[:taken]) + note + "\n"


def _head(runs: Runs) -> Iterator[str]:
    failed = [r for r in runs.results if r.value.verdict in FAILURES and not r.value.fresh]
    ran = sum(r.value.verdict is not Verdict.UNSUPPORTED for r in runs.results)
    words = [counted(len(failed), "failure"), f"{counted(ran, 'case')} executed"] if ran else ["no cases ran"]
    if not ran and runs.results:
        words.append(f"{len(runs.results):,} UNSUPPORTED")
    if runs.causes:
        words.insert(0, counted(len(runs.faults()), "cause"))
    if runs.missing:
        words.append(f"{counted(_count(runs), 'case')} without a result")
    yield f"# Conformance: {', '.join(words)}"
    yield ""
    for d in runs.documents[-DOCUMENTS:]:
        env = d.environment
        machine = f"{env.cpu or 'unknown processor'}, {env.cores or '?'} cores, {env.system or ''}"
        on = f"{inline(d.machine, 40)} ({inline(machine, 120)})"
        cut = f", **{INTERRUPTED}**" if d.record.interrupted else ""
        yield f"- {d.written}: {code(d.path.name, 120)}, run {d.run[:8]} on {on}{_origin(env)}{cut}"
    if (more := len(runs.documents) - DOCUMENTS) > 0:
        yield f"- and {more} older run files"


def _origin(environment: Environment) -> str:
    """Return commit, branch and CI job, if the run file has them."""
    commit, branch, ci = (v or "" for v in (environment.commit, environment.branch, environment.ci))
    note = f"commit {code(commit[:12], 12)}" if commit else ""
    note += f" of {code(branch, 80)}" if branch else ""
    return "".join(f", {word.strip()}" for word in (note, f"CI {code(ci, 300)}" if ci else "") if word)


def _sections(runs: Runs, against: Comparison | None) -> Iterator[Section]:
    for b in (d.record.builds for d in runs.documents):
        if b is not None and b.changes is not None and b.against is not None:
            found = [_CONTROLS.sub("?", text.replace("\n", " ")) for text in sentences(b.changes)]
            yield f"What changed: {inline(b.build.name, 120)} against {inline(b.against.name, 120)}", ["```text"], [
                *(text.replace("`", "'") for text in found), "```",
            ]  # fmt: skip
    if against:
        ran = any(r.value.verdict is not Verdict.UNSUPPORTED for r in runs.results)
        differs = _compared(against, runs.devices()) or ["No pair differs." if ran else "No cases ran."]
        yield "Compared with the base", [f"{inline(against.sentence())}.", ""], differs
    yield f"Causes ({len(runs.faults()):,})", [], _causes(runs)
    yield f"Requested, but without a result ({_count(runs):,}): {_effect(runs)}", [], _missing(runs)
    verdicts = [v for v in ORDER if any(r.value.verdict is v for r in runs.results)]
    yield "Verdicts", *table(["backend", *map(str, verdicts), "max error (% of tolerance)"], _verdicts(runs, verdicts))
    yield "Scope", [], [f"- {inline(str(scope))}" for scope in scopes_of(runs)]
    failed = [r for r in runs.results if r.value.verdict in FAILURES and r.value.cause is None]
    unexplained = " that no cause explains" if runs.causes else ""
    for fresh, title in (
        (False, f"Failures{unexplained} ({{n:,}})"),
        (True, f"Fresh cases that failed{unexplained} ({{n:,}}): saved, no effect on the exit code"),
    ):
        of = [r for r in failed if r.value.fresh is fresh]
        yield title.format(n=len(of)), [], [_group(g) for g in groups(of)]
    waivers = [w for d in runs.documents for w in d.body.get("waivers") or () if isinstance(w, str)]
    yield "Waivers that need attention", [], [f"- {inline(w)}" for w in waivers]
    yield "Speed", *table(["unit", "backend", "rate", "95 % interval", "rounds"], _units(runs))
    yield "Not run", [], _not_run(runs)
    m = matrix(r for r in runs.results if r.value.case.startswith(f"{OPS}/"))
    yield "Single ops, passed of supported", *table(["op", "types", *map(code, m.backends)], _matrix(m))


def _compared(against: Comparison, devices: Mapping[str, str]) -> list[str]:
    """Return a line per cause of differing pairs; without one, per op and verdicts."""
    told: dict[tuple[str, str], list[Sides]] = {}
    for p in against.pairs:
        if p.state in DIFFERS:
            of = operation(p.case)
            kind = "" if p.cause else f"{of.op or of.family}: {p.before.verdict}, now {p.after.verdict}"
            what = against.sentences.get((p.cause or "", p.backend)) or kind or p.cause or ""
            told.setdefault((p.cause or "", what), []).append(p)
    lines = []
    for (_, what), pairs in told.items():
        on = ", ".join(code(name) for name in dict.fromkeys(devices.get(p.backend, p.backend) for p in pairs))
        states = ", ".join(f"{n:,} {state}" for state, n in Counter(p.state for p in pairs).items())
        such = "" if len(pairs) == 1 else "such as "
        lines.append(f"- {states}: {inline(what)}, on {on}; {such}{code(pairs[0].case)}")
    return lines


def _causes(runs: Runs) -> list[str]:
    """Return a line for each cause, with its cases, architectures, first run, smallest case."""
    counts = Counter((r.value.cause, r.value.backend) for r in runs.results)
    lines, first, proofs, devices = [], runs.first_seen(), runs.proofs(), runs.devices()
    for indices in runs.faults():
        same = [runs.causes[i].value for i in indices]
        c = same[0]
        failed = sum(counts[x.id, x.backend] or len(x.cases) for x in same)
        names = ", ".join(code(name, 120) for name in dict.fromkeys(devices.get(x.backend, x.backend) for x in same))
        since = min(first[i].written for i in indices)
        facts = [f"{failed:,} cases on {names}", f"first seen {since[:10]}"]
        if (hit := c.rank.get("architectures")) is not None:
            of = f" of {c.rank['counted']:,} checked" if c.rank.get("counted", 0) < c.rank.get("of", 0) else ""
            facts.insert(1, f"hits {hit:,}{of} architectures")
        again = command(proofs[indices[0]].value)
        lines.append(f"- **{c.verdict}** {inline(c.text)} ({', '.join(facts)}): {code(again)}")
    return lines


def _count(runs: Runs) -> int:
    return sum(m.value.count for m in runs.missing)


def _effect(runs: Runs) -> str:
    lost = any(m.value.cause is MissingCause.LOST for m in runs.missing)
    return "the run fails" if lost else "the run is incomplete"


def _missing(runs: Runs) -> list[str]:
    asked = Counter[str]()
    for d in runs.documents:
        asked.update(d.body.get("asked") or {})
    rows, counts = [m.value for m in runs.missing], Counter[tuple[str, str]]()
    for m in rows:
        counts[m.backend, m.reason] += m.count
    lines = [
        f"- {code(backend)}: {n:,} of {asked[backend]:,} requested cases: {inline(why)}"
        for (backend, why), n in counts.most_common()
    ]
    many = (f"{m.count:,} of " if m.count > 1 else "" for m in rows)
    return [*lines, *(f"  - {n}{code(m.case)} on {code(m.backend)}" for n, m in zip(many, rows, strict=True))]


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
    """Format one failure, or several with the same reason: their ops, backends and the first."""
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
    """List the most frequent names with their counts, and the number of others."""
    counts = Counter(names)
    words = [f"{code(name, 120)} {n:,}" for name, n in counts.most_common(NAMES)]
    more = len(counts) - NAMES
    return ", ".join([*words, *([f"{more:,} others"] if more > 0 else [])])


def _units(runs: Runs) -> Iterator[Sequence[str]]:
    for row in runs.results:
        if (p := pace(row.value)) is not None:
            between = "–" if p.low is None or p.high is None else f"{p.low:.4g} to {p.high:.4g}"
            rate = f"{p.rate:.4g} {inline(p.of)}/s"
            yield inline(row.value.case), code(row.value.backend), rate, between, f"{p.rounds:g}"


def _not_run(runs: Runs) -> list[str]:
    lines = [f"- {code(name)}: not available: {inline(why)}" for name, why in runs.unavailable().items()]
    for backend, reasons in refusals(r.value for r in runs.results).items():
        lines.append(f"- {counted(sum(reasons.values()), 'case')} unsupported by {code(backend)}, by reason:")
        lines += [f"  - {n:,}: {inline(why) or 'no reason given'}" for why, n in reasons.most_common()]
    lines += [f"- {code(p.name)}: not a run file, ignored" for p in runs.passed_over]
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
    """Return the header lines, and the rows."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"], [f"| {' | '.join(row)} |" for row in rows]


def _short(text: str, most: int) -> str:
    line = " ".join(_CONTROLS.sub("?", text.replace("\n", " ").replace("\r", " ")).split())
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most:,} more characters)"


def inline(text: str, most: int = LONGEST) -> str:
    """Return one line of text without markup or HTML."""
    return _short(text, most).translate(_MEANS_ITSELF)


def code(text: str, most: int = LONGEST) -> str:
    """Format a one-line code span, also for tables; backticks become apostrophes."""
    inside = _short(text, most).replace("`", "'").replace("|", "\\|")
    return f"`{inside or ' '}`"
