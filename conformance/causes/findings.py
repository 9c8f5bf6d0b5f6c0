"""Write the findings page: each cause with its proof and reach, and a section for comments.

Text between two marks belongs to the user and is preserved when the page is written again:

    <!-- words: SUM-85602951 -->
    Fault of the backend, see …
    <!-- end -->

So is the title. Comments are matched to causes by id; those on causes no longer found move to the end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from conformance.case.strict import read_text
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.verdict import FAILURES, Result, Verdict, counted
from conformance.report.markdown import code, inline, table
from conformance.report.runfile import write_text
from conformance.report.runs import Runs, command
from conformance.run.session.select import build
from conformance.run.signature import innermost

from .cause import Cause, in_order

TITLE = "# Findings"
PAGE, GONE = "page", "## No longer found"
"""Key of the comments on the whole page; heading over comments on causes no longer found."""
_WORDS = re.compile(r"^<!-- words: (?P<key>[^\n]+) -->\n(?P<text>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^<!-- (words: |end -->)", re.MULTILINE)
_FOLDER = re.compile(r"(?<!\S)/(?:[^\s/:]+/)+(?=[^\s/:]+:[0-9])")
"""The local folder of a source file with a line number."""
_ARCHITECTURE = re.compile(r"-[a-z_]+=|@")
"""Separator after the architecture in an id."""
ARCHITECTURES = 2000
"""Maximum characters for architecture names; there are 123 of them."""
DETAIL = 400
"""Maximum characters of the smallest case's detail."""


@dataclass(frozen=True, slots=True)
class Words:
    """The comments that people wrote on a findings page."""

    title: str = TITLE
    of: Mapping[str, str] = field(default_factory=dict)
    """Cause id, or `PAGE` -> text, empty or ending with a newline."""


def read_words(text: str, path: str) -> Words:
    """Return the comments on the page `text`; UsageError for unbalanced marks or another page."""
    found = list(_WORDS.finditer(text))
    if not any(m["key"] == PAGE for m in found):
        raise UsageError(f"{path}: a page that `conform findings` wrote expected, none found; name another file")
    if len(_MARK.findall(text)) != 2 * len(found) or any(_MARK.search(m["text"]) for m in found):
        raise UsageError(f"{path}: after each `<!-- words: … -->` one `<!-- end -->` expected, each on its own line")
    keys = Counter(m["key"] for m in found)
    for key, n in keys.items():
        if n > 1:
            raise UsageError(f"{path}: words on {key} once expected, {n} times found; join them")
    title = text.partition("\n")[0]
    return Words(title if title.startswith("# ") else TITLE, {m["key"]: m["text"] for m in found})


def write(path: Path, runs: Runs, option: str) -> int:
    """Write the page of `runs`, preserving the comments of an existing page at `path`.

    Args:
        path: the page; it need not exist.
        runs: files with causes.
        option: what the user named the page with, for messages.

    Returns:
        The number of causes; one that several backends have counts once.

    Raises:
        UsageError: `path` holds another kind of text, or cannot be written; or `runs` have failures and no cause.
    """
    if not runs.causes and any(r.value.verdict in FAILURES for r in runs.results):
        first = runs.documents[0].path
        raise UsageError(f"{first}: has failures and no causes; first: conform causes {first} --json {first}")
    words = read_words(read_text(path), str(path)) if path.exists() else Words()
    causes = in_order([c.value for c in runs.causes])
    write_text(path, page(runs, causes, words), option)
    return len({c.id for c in causes})


def page(runs: Runs, causes: Sequence[Cause], words: Words) -> str:
    """Return the page in Markdown."""
    proofs = {(p.value.case, p.value.backend): p.value for p in runs.proofs()}
    lines = [words.title, "", *_marked(PAGE, words), *_head(runs, causes)]
    written = {PAGE}
    for n, alike in enumerate(_by_id(causes), 1):
        key = _key(alike[0].id)
        lines += ["", f"## {n}. {key}", "", *_section(alike, proofs[alike[0].smallest, alike[0].backend], runs)]
        if key not in written:  # two ids may map to one key
            lines += ["", *_marked(key, words)]
        written.add(key)
    left = [key for key, text in words.of.items() if key not in written and text.strip()]
    if left:
        lines += ["", GONE, *(text for key in left for text in ("", f"{key}:", "", *_marked(key, words)))]
    return "\n".join(lines) + "\n"


def _by_id(causes: Sequence[Cause]) -> list[list[Cause]]:
    """Group causes by id: one bug on several backends."""
    alike: dict[str, list[Cause]] = {}
    for c in causes:
        alike.setdefault(c.id, []).append(c)
    return list(alike.values())


def _key(cause_id: str) -> str:
    """Return an id without the characters that end a mark or a heading."""
    return re.sub(r"[^\w+.-]|--", "?", cause_id)


def _marked(key: str, words: Words) -> list[str]:
    return [f"<!-- words: {key} -->", *words.of.get(key, "").splitlines(), "<!-- end -->"]


def _head(runs: Runs, causes: Sequence[Cause]) -> Iterator[str]:
    """Yield the runs, their verdicts by family, and a table of the causes."""
    yield ""
    for d in runs.documents:
        yield f"- {d.kind}, {d.written[:10]}, {inline(d.environment.cpu or d.machine, 120)}"
    results = [r.value for r in runs.results]
    verdicts = [v for v in Verdict if any(r.verdict is v for r in results)]
    counts = Counter((r.backend, r.case.partition("/")[0], r.verdict) for r in results)
    rows = [
        (code(b), code(f), *(f"{counts[b, f, v]:,}" for v in verdicts))
        for b, f in dict.fromkeys((r.backend, r.case.partition("/")[0]) for r in results)
    ]
    if rows:
        yield ""
        yield from chain(*table(["backend", "family", *map(str, verdicts)], rows))
    if causes:
        head = ["", "cause", "on", "how", "cases", "architectures", "seen again"]
        yield ""
        yield from chain(*table(head, [(str(n), *_row(alike)) for n, alike in enumerate(_by_id(causes), 1)]))
    else:
        yield from ("", "Nothing failed.")


def _row(alike: Sequence[Cause]) -> tuple[str, ...]:
    first = alike[0]
    hits = [c.rank["architectures"] for c in alike if c.rank.get("architectures") is not None]
    on = code(first.backend, 120) if len(alike) == 1 else f"{len(alike)} backends"
    how = ", ".join(dict.fromkeys(c.verdict.value for c in alike))
    seen = ", ".join(dict.fromkeys(c.seen or "–" for c in alike))
    cases = len({case for c in alike for case in c.cases})
    return _key(first.id), on, how, f"{cases:,}", str(max(hits)) if hits else "–", inline(seen, 120)


def _section(alike: Sequence[Cause], proof: Result, runs: Runs) -> Iterator[str]:
    """Yield the description of a cause: sentence, counts, architectures, detail and command."""
    yield f"{inline(alike[0].sentence)}."
    yield ""
    for cause in alike:
        families = Counter(i.partition("/")[0] for i in cause.cases)
        yield f"- fails: {', '.join(f'{n:,} of {code(f)}' for f, n in families.most_common())} on {code(cause.backend)}"
    if models := sorted({arch for cause in alike for arch in _architectures(cause, runs)}):
        names = inline(", ".join(models), ARCHITECTURES)
        yield f"- llama.cpp itself fails so, {counted(len(models), 'architecture')}: {names}"
    if proof.detail:
        yield f"- {inline(_FOLDER.sub('…/', proof.detail), DETAIL)}"
    yield ""
    yield f"    {_command(proof)}"


def _architectures(cause: Cause, runs: Runs) -> Iterator[str]:
    """Yield the whole models that fail by a cause, or with its message."""
    for r in (row.value for row in runs.results):
        if r.case.startswith("arch/") and r.backend == cause.backend and r.verdict in FAILURES:
            said = "" if r.error is None else innermost(r.error)
            if r.case in cause.cases or (cause.message and said == cause.message):
                yield _ARCHITECTURE.split(r.case.removeprefix("arch/"))[0]


def _command(proof: Result) -> str:
    """Return the command by case id if that rebuilds the case; a local file is no use to others."""
    with suppress(ConformanceError):
        build(proof.case)
        return command(replace(proof, saved=None))
    return command(proof)
