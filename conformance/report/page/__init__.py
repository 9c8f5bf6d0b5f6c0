"""Writes the report as one self-contained HTML file: rows as JSON, and a script.

Text from runs is inserted as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from string import Template

from msgspec import to_builtins

from conformance import __version__
from conformance.case.case import JSON
from conformance.ggml.text import shell
from conformance.judge.verdict import FAILURES, MissingCause
from conformance.report.compare import Comparison, State
from conformance.report.matrix import ORDER, PASSED
from conformance.report.runfile import Document
from conformance.report.runs import Runs
from conformance.report.scope import scopes_of
from conformance.report.trend import Trend, changes, pairs_of
from conformance.run.session.environment import WRITTEN

from . import tables
from .drawings import SECONDS, drawn_graphs

SCRIPTS = ("data", "elements", "query", "grid", "matrix", "charts", "detail", "status", "sections", "builds", "main")
"""Parts of the page's script in `static/`, in order of execution."""


def page(
    runs: Runs,
    *,
    now: datetime,
    planned: Mapping[str, Sequence[str]] | None = None,
    trend: Trend | None = None,
    against: Comparison | None = None,
    drawing: float = SECONDS,
) -> str:
    """Return the whole document.

    Ages count from `now`; `planned` (level -> case ids) shows cases that never ran, `trend` rates of further runs,
    `against` the differences from a base.
    """
    every = trend.series() if trend else []
    past = Trend(pairs_of(r.value for r in runs.causes), dict(trend.sights) if trend else {})
    for d in runs.documents:
        past.watch(d)
    known = {d.run for d in runs.documents}
    units = [r for r in tables.trended(every) if r.document.run not in known]
    documents = [*runs.documents, *{r.document.digest: r.document for r in units}.values()]
    data = {
        "made": now.astimezone(timezone.utc).strftime(WRITTEN),
        "version": __version__,
        "subject": tables.named(runs),
        "failed": [str(v) for v in ORDER if v in FAILURES],
        "passed": [str(v) for v in sorted(PASSED)],
        "documents": [_document(d) for d in documents],
        "unavailable": runs.unavailable(),
        "planned": {level: [[i, *tables.subject(i)] for i in ids] for level, ids in (planned or {}).items()},
        "superseded": len(runs.superseded),
        "unlisted": _unlisted(runs),
        "lacking": _lacking(runs),
        "scopes": [[s.told, shell(s.further)] for s in scopes_of(runs)],
        "setups": tables.setups(runs),
        "bases": tables.bases(runs),
        "builds": tables.builds(runs),
        "changed": tables.changed_code(runs),
        "tables": {
            **tables.tables(runs, [*tables.units(runs.documents), *units], documents, past),
            "compared": tables.compared(against.pairs if against else ()),
        },
        "base": None if against is None else _base(against),
        "states": [str(s) for s in State],
        "changes": tables.changed(changes(every)),
        "good": trend.good if trend else {},
        "drawings": drawn_graphs(runs, seconds=drawing),
    }
    return _assembled(data)


def _unlisted(runs: Runs) -> JSON:
    """Return `[backend, number, sentence]` for cases without a result that have no row."""
    counts, patterns = Counter[tuple[str, str]](), dict[tuple[str, str], dict[str, None]]()
    for m in (r.value for r in runs.missing if r.value.count > 1):
        counts[m.backend, m.reason] += m.count
        patterns.setdefault((m.backend, m.reason), {})[m.case] = None
    rows = [[b, n, f"{why}: {', '.join(patterns[b, why])}"] for (b, why), n in counts.items()]
    return [*rows, *([b, n, f"{d.path.name} does not list them"] for d, b, n in runs.unlisted())]


def _lacking(runs: Runs) -> dict[str, int]:
    """Return why cases have no result -> their number."""
    counts = Counter[str]()
    for m in runs.missing:
        counts[str(m.value.cause)] += m.value.count
    counts[str(MissingCause.LOST)] += sum(n for _, _, n in runs.unlisted())
    return {why: n for why, n in counts.items() if n}


def _base(against: Comparison) -> JSON:
    """Return the names of the base, and each cause of either run as `[id, backend, sentence]`."""
    return {"names": list(against.base), "causes": [[*key, sentence] for key, sentence in against.sentences.items()]}


def _assembled(data: JSON) -> str:
    """Return markup around data, with style and scripts inline, each allowed by its hash."""
    folder = files(__package__).joinpath("static")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    parts = [folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"
    return Template(folder.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"script-src '{_hash(script)}'; style-src '{_hash(style)}'",
        title=html.escape(f"Conformance of {data['subject'] or 'no run'}"),
        style=style,
        script=script,
        data=tables.embedded(data),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _document(d: Document) -> JSON:
    lists = {k: len(v) for k, v in d.body.items() if isinstance(v, list)}
    return {
        "file": d.path.name,
        "run": d.run,
        "written": d.written,
        "environment": to_builtins(d.environment),
        "lists": lists,
        "totals": d.record.totals,
        "asked": d.record.asked,
        "waivers": d.record.waivers or [],
        "interrupted": d.record.interrupted is True,
    }
