"""A baseline: the causes that one knows, as predicates, each with a reason and a link; and what a run adds or lacks.

A file holds any number of

    [[cause]]
    id = "3f9a0c2e"                                    # what a run's cause is found by, or one like it (`same.py`)
    sentence = "MUL_MAT with src[0].type = q4_K is wrong"
    backend = "npu"
    verdict = "FAIL"
    op = "MUL_MAT"
    message = ""
    conditions = [["src[0].type", "q4_K"], ["src[1].ne[2]", ">1"]]
    reason = ""                                        # for a person to fill in
    link = ""                                          # as above: an http(s) address

`conform baseline` leaves reason and link empty. A baseline counts as it is, so that it can be tried at once;
`Baseline.unfilled` names the entries that still want a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.text import printable
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import FAILURES, Verdict
from conformance.report.runfile import write_text

from .cause import Cause, Condition
from .same import same

HEAD = """\
# Known causes of failures. A run against this file fails where a cause is new, and where one of these is gone.
# Fill in each reason, and a link to where it is dealt with.
"""
_ADDRESS = re.compile(r"https?://\S+")


@dataclass(frozen=True, slots=True)
class Known:
    """One entry."""

    id: str
    sentence: str
    backend: str
    verdict: Verdict
    op: str
    message: str
    conditions: tuple[Condition, ...]
    reason: str = ""
    link: str = ""

    @classmethod
    def of(cls, cause: Cause, said: Known | None = None) -> Known:
        """An entry for `cause`, with the reason and link that were `said` of it before."""
        words = ("", "") if said is None else (said.reason, said.link)
        return cls(
            cause.id, cause.sentence, cause.backend, cause.verdict, cause.op, cause.message, cause.conditions, *words
        )

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all others of its file."""
        return self.id, self.backend


KEYS = tuple(f.name for f in fields(Known))
"""All are there in each entry."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A file of known causes."""

    path: str
    entries: tuple[Known, ...] = ()

    def where(self, entry: Known) -> str:
        """The place of an entry, for messages."""
        return f"{self.path}: cause {self.entries.index(entry) + 1} ({printable(entry.id)})"

    def unfilled(self) -> list[str]:
        """A sentence for each entry without a reason."""
        return [f"{self.where(e)} reason: fill it in" for e in self.entries if not e.reason.strip()]

    def renewed(self, causes: Sequence[Cause]) -> Baseline:
        """The baseline of `causes`; of those that it has already, reason and link stay."""
        said = {e.key: e for e in self.entries}
        known = same(self.entries, causes)
        entries = (Known.of(c, said[known[key]] if (key := (c.id, c.backend)) in known else None) for c in causes)
        return Baseline(self.path, tuple(entries))

    def to_toml(self) -> str:
        """The text of its file."""
        return HEAD + "".join(f"\n[[cause]]\n{_table(e)}" for e in self.entries)


def _table(entry: Known) -> str:
    pairs = ", ".join(f"[{_quoted(c.key)}, {_quoted(c.value)}]" for c in entry.conditions)
    values = {k: f"[{pairs}]" if k == "conditions" else _quoted(str(getattr(entry, k))) for k in KEYS}
    return "".join(f"{k} = {v}\n" for k, v in values.items())


def _quoted(text: str) -> str:
    """A TOML string: JSON's, but for characters that only JSON takes as they are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse(text: str, path: str) -> Baseline:
    """The baseline of a file; UsageError names the file, the entry (the first is 1) and the key."""
    document = parse_toml(text, path)
    only(document, ("cause",), path)
    tables = document.get("cause", [])
    are_tables = isinstance(tables, list) and all(isinstance(t, dict) for t in tables)
    expect(are_tables, path, "[[cause]] tables", tables)
    entries = tuple(_known(t, f"{path}: cause {i + 1}") for i, t in enumerate(tables))
    places: dict[tuple[str, str], int] = {}
    for i, e in enumerate(entries):
        first = places.setdefault(e.key, i)
        expect(first == i, f"{path}: cause {i + 1} id", f"another than that of cause {first + 1}", e.id)
    return Baseline(path, entries)


def _known(table: dict[str, Any], where: str) -> Known:
    only(table, KEYS, where)
    for key in KEYS:
        value = table.get(key)
        if key != "conditions":
            expect(isinstance(value, str), f"{where} {key}", "a text", value)
    expect(bool(table["id"].strip()), f"{where} id", "a text that is not empty", table["id"])
    verdicts = [str(v) for v in Verdict if v in FAILURES]
    expect(table["verdict"] in verdicts, f"{where} verdict", f"one of {', '.join(verdicts)}", table["verdict"])
    link = table["link"]
    expect(link == "" or bool(_ADDRESS.fullmatch(link)), f"{where} link", "an http(s) address, or an empty text", link)
    pairs = table.get("conditions")
    are_pairs = isinstance(pairs, list) and all(map(_is_pair, pairs))
    expect(are_pairs, f"{where} conditions", "a list of pairs of texts", pairs)
    conditions = tuple(Condition(*pair) for pair in table["conditions"])
    return Known(**{**table, "verdict": Verdict(table["verdict"]), "conditions": conditions})


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)


def read(path: Path) -> Baseline:
    """The baseline of a file; UsageError if it cannot be read, or is malformed."""
    return parse(read_text(path), str(path))


def write(path: Path, causes: Sequence[Cause], option: str) -> Baseline:
    """Write the baseline of `causes`; of those that the file has already, reason and link stay.

    Args:
        path: the file; it need not exist.
        causes: of a run.
        option: what the user named the file with, for messages.

    Raises:
        UsageError: what stands there is no baseline, or the file cannot be written.
    """
    before = read(path) if path.exists() else Baseline(str(path))
    made = before.renewed(causes)
    write_text(path, made.to_toml(), option)
    return made


@dataclass(frozen=True, slots=True)
class Difference:
    """What a run's causes add to the known ones, and which of those they lack."""

    new: tuple[Cause, ...]
    """In the order of the run."""
    gone: tuple[Known, ...]
    """In the order of the baseline."""
    known: tuple[Cause, ...]

    def sentences(self) -> list[str]:
        """A line for each new cause, then for each that is gone; none where nothing differs."""
        new = (f"new: {_named(c)} (smallest case of {len(c.cases):,}: {c.smallest})" for c in self.new)
        gone = (f"gone: {_named(e)}{f' ({e.reason})' if e.reason else ''}" for e in self.gone)
        return [printable(line) for line in (*new, *gone)]

    def outcome(self) -> Outcome:
        """It fails where a cause is new or gone."""
        sentences = self.sentences()
        return Outcome.of(Why.NEW, sentences[: len(self.new)]) + Outcome.of(Why.GONE, sentences[len(self.new) :])

    def exit_code(self) -> int:
        """0: all causes are known, and all known ones are there; 1: a cause is new or gone."""
        return self.outcome().exit_code


def _named(cause: Cause | Known) -> str:
    return f"{cause.id} on {cause.backend}, {cause.verdict}: {cause.sentence}"


def compare(baseline: Baseline, causes: Sequence[Cause], backends: Collection[str] | None = None) -> Difference:
    """What differs between what is known and the `causes` of a run; `same` says which is which.

    Args:
        baseline: what is known.
        causes: those of one run of all cases that the baseline was written for.
        backends: those that the run was on: entries of others are not gone. None: every one.
    """
    known = same(baseline.entries, causes)
    there = set(known.values())
    return Difference(
        tuple(c for c in causes if (c.id, c.backend) not in known),
        tuple(e for e in baseline.entries if e.key not in there and (backends is None or e.backend in backends)),
        tuple(c for c in causes if (c.id, c.backend) in known),
    )
