"""Waivers: known failures of one backend, each with a reason, a link and an expiry day; and edits of their files.

A file holds any number of

    [[waiver]]
    case = "ops/GLU.SWIGLU_OAI-f16-*"             # a glob over case ids
    except = ["ops/GLU.SWIGLU_OAI-f16-ne=1*"]     # globs of exceptions; optional
    verdict = "CRASH"                             # their expected verdict
    reason = "supports_op takes F16, the kernel has no branch for it"
    link = "https://…"
    expiry = 2027-03-31                           # the last day on which it is valid

A waiver excuses exactly this failure: a case that it covers and that passes is XPASS.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from conformance.case.strict import expect, only, parse_toml
from conformance.ggml.errors import UsageError

from .verdict import FAILURES, Result, Verdict

WAIVABLE = tuple(v for v in Verdict if v in FAILURES and v is not Verdict.XPASS)
"""Verdicts that a waiver may expect."""
CELL = "#"
"""Marks ids derived from a case, such as a cell of an audit; no family lists such an id."""
KEYS = ("case", "except", "verdict", "reason", "link", "expiry")


@dataclass(frozen=True, slots=True)
class Waiver:
    """One entry."""

    case: str
    verdict: Verdict
    reason: str
    link: str
    expiry: date
    excepted: tuple[str, ...] = ()

    def covers(self, case_id: str) -> bool:
        """Whether its globs match this case."""
        return _matches(case_id, self.case) and not any(_matches(case_id, g) for g in self.excepted)

    def expired(self, today: date) -> bool:
        """Whether its last day has passed."""
        return today > self.expiry

    def speaks_of(self, family: str) -> bool:
        """Whether it may cover cases of `family`."""
        return fnmatchcase(family, self.case.partition("/")[0])


def _matches(case_id: str, glob: str) -> bool:
    return case_id == glob or fnmatchcase(case_id, glob)


@dataclass(frozen=True, slots=True)
class Waivers:
    """A file of waivers."""

    path: str
    entries: tuple[Waiver, ...]
    text: str
    """The content of the file."""

    def where(self, index: int) -> str:
        """The place of an entry, for messages."""
        return f"{self.path}: waiver {index + 1} ({self.entries[index].case})"


def parse(text: str, path: str) -> Waivers:
    """The waivers of a file; UsageError names the file, the entry (the first is 1) and the key."""
    document = parse_toml(text, path)
    only(document, ("waiver",), path)
    tables = document.get("waiver", [])
    expect(isinstance(tables, list), f"{path}", "[[waiver]] tables", tables)
    return Waivers(path, tuple(_waiver(t, f"{path}: waiver {i + 1}") for i, t in enumerate(tables)), text)


def _waiver(table: Mapping[str, Any], where: str) -> Waiver:
    only(table, KEYS, where)
    for key in ("case", "verdict", "reason", "link"):
        value = table.get(key)
        expect(isinstance(value, str) and bool(value.strip()), f"{where} {key}", "a text", value)
    expect("/" in table["case"], f"{where} case", "a glob over case ids, family/…,", table["case"])
    verdicts = [v.value for v in WAIVABLE]
    expect(table["verdict"] in verdicts, f"{where} verdict", f"one of {', '.join(verdicts)}", table["verdict"])
    expect(re.match(r"https?://\S+$", table["link"]) is not None, f"{where} link", "an http(s) address", table["link"])
    excepted = table.get("except", [])
    is_list = isinstance(excepted, list) and all(isinstance(g, str) for g in excepted)
    expect(is_list, f"{where} except", "a list of globs", excepted)
    expiry = _day(table.get("expiry"), f"{where} expiry")
    return Waiver(table["case"], Verdict(table["verdict"]), table["reason"], table["link"], expiry, tuple(excepted))


def _day(value: object, where: str) -> date:
    day = value
    if isinstance(value, str):
        try:
            day = date.fromisoformat(value)
        except ValueError:
            day = None
    expect(isinstance(day, date) and not isinstance(day, datetime), where, "a day, as 2027-03-31,", value)
    return day  # type: ignore[return-value]  # `expect` has checked it


def waive(waivers: Waivers, result: Result, today: date) -> None:
    """Apply the waivers to `result`: XFAIL if it fails as one of them says, XPASS if it passes."""
    covering = [(i, w) for i, w in enumerate(waivers.entries) if w.covers(result.case)]
    holding = [(i, w) for i, w in covering if not w.expired(today)]
    if result.verdict is Verdict.PASS and holding:
        index, waiver = holding[0]
        result.waived, result.verdict = str(Verdict.PASS), Verdict.XPASS
        result.detail = _joined(f"it passes, and {waivers.where(index)} says {waiver.verdict}", result.detail)
        return
    if result.verdict not in WAIVABLE:
        return
    same = next((w for _, w in holding if w.verdict is result.verdict), None)
    if same is not None:
        result.waived, result.verdict = str(result.verdict), Verdict.XFAIL
        result.detail = _joined(f"waived until {same.expiry} ({same.reason}; {same.link})", result.detail)
    elif holding:
        verdicts = ", ".join(dict.fromkeys(str(w.verdict) for _, w in holding))
        result.detail = _joined(result.detail, f"{waivers.where(holding[0][0])} waives {verdicts} only")
    elif covering:
        index, waiver = covering[0]
        result.detail = _joined(result.detail, f"{waivers.where(index)} expired on {waiver.expiry}")


def _joined(*parts: str) -> str:
    return "; ".join(p for p in parts if p)


@dataclass(frozen=True, slots=True)
class Problem:
    """An entry that fails the run."""

    index: int
    sentence: str
    excepted: tuple[str, ...] = ()
    """Case ids to add to its `except`; if there are none, remove the entry."""


def problems(
    waivers: Waivers,
    results: Iterable[Result],
    today: date,
    ids_of: Callable[[str], Sequence[str]],
    exists: Callable[[str], bool],
) -> list[Problem]:
    """What is wrong with the waivers of one backend, judged by all its results after `waive`. Fresh ones do not count.

    `ids_of`: family -> its ids at all levels; `exists`: whether a family can make a case of this id.
    """
    counted = [r for r in results if not r.fresh]
    families = tuple(dict.fromkeys(r.case.partition("/")[0] for r in counted))
    out = []
    for i, waiver in enumerate(waivers.entries):
        mine = [r for r in counted if waiver.covers(r.case)]
        sentence, excepted = "", ()  # type: tuple[str, tuple[str, ...]]
        if waiver.expired(today):
            sentence = _expired(waiver, mine)
        else:
            relevant = [f for f in families if waiver.speaks_of(f)]
            known = {case for f in relevant for case in ids_of(f) if waiver.covers(case)}
            if mine:
                sentence, excepted = _outdated(mine, complete=known <= {r.case for r in mine})
            elif relevant and CELL not in waiver.case:
                sentence = _unmatched(waiver, known, exists)
        if sentence:
            out.append(Problem(i, f"{waivers.where(i)}: {sentence}", excepted))
    return out


def _expired(waiver: Waiver, mine: Sequence[Result]) -> str:
    still = sum(r.verdict is waiver.verdict for r in mine)
    advice = "remove it" if mine and not still else "remove it, or find a reason and a day to wait for"
    return f"expired on {waiver.expiry}; {still} of {len(mine)} cases of this run still fail so; {advice}"


def _unmatched(waiver: Waiver, known: Iterable[str], exists: Callable[[str], bool]) -> str:
    exact = not set("*?[") & set(waiver.case)
    if known or (exact and not waiver.excepted and exists(waiver.case)):
        return ""
    return "matches no case; remove it, or mend its glob"


def _outdated(mine: Sequence[Result], *, complete: bool) -> tuple[str, tuple[str, ...]]:
    passing = tuple(r.case for r in mine if r.verdict is Verdict.XPASS)
    failing = [r for r in mine if r.verdict in FAILURES - {Verdict.XPASS} or r.verdict is Verdict.XFAIL]
    if passing and complete and not failing:
        return f"what it waives passes now, all of {len(passing)} cases; remove it", ()
    if passing:
        return f"{len(passing)} of {len(mine)} cases of this run pass now; except them", passing
    if complete and not failing:
        return f"the backend refuses all {len(mine)} cases that it waives; remove it", ()
    return "", ()


_HEADER = re.compile(r"\s*\[\[\s*waiver\s*\]\]")
_CASE = re.compile(r"""\s*["']?case["']?\s*=""")
_EXCEPT = re.compile(r"""\s*["']?except["']?\s*=""")


def proposal(waivers: Waivers, problems: Sequence[Problem]) -> str:
    """A diff of the file that removes or narrows the entries of `problems`, for a person to apply; empty if we cannot
    make it.
    """
    edited = _edited(waivers, problems)
    if edited is None:
        return ""
    before, after = (t.splitlines(keepends=False) for t in (waivers.text, edited))
    return "\n".join(difflib.unified_diff(before, after, waivers.path, waivers.path, n=2, lineterm=""))


def _edited(waivers: Waivers, problems: Sequence[Problem]) -> str | None:
    lines = waivers.text.splitlines()
    starts = [i for i, line in enumerate(lines) if _HEADER.match(line)]
    if len(starts) != len(waivers.entries):  # a header inside a string, or another TOML notation
        return None
    ends = [*(_last(lines, *pair) for pair in pairwise(starts)), len(lines)]
    for problem in sorted(problems, key=lambda p: -p.index):
        start, end = starts[problem.index], ends[problem.index]
        lines[start:end] = _narrowed(lines[start:end], problem.excepted) if problem.excepted else []
    text = "\n".join(lines) + "\n"
    return text if _as_meant(waivers, problems, text) else None


def _last(lines: Sequence[str], start: int, end: int) -> int:
    """The end of an entry before another: comments before the next header belong to the next entry."""
    while end - 1 > start and lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return end


def _narrowed(entry: list[str], ids: Sequence[str]) -> list[str]:
    at = next((i for i, line in enumerate(entry) if _EXCEPT.match(line)), None)
    if at is None:
        case = next((i for i, line in enumerate(entry) if _CASE.match(line)), 0)
        return [*entry[: case + 1], _line(ids), *entry[case + 1 :]]
    for end in range(at + 1, len(entry) + 1):
        try:
            have = parse_toml("\n".join(entry[at:end]), "")["except"]
        except UsageError:
            continue
        return [*entry[:at], _line([*have, *ids]), *entry[end:]]
    return entry


def _line(globs: Sequence[str]) -> str:
    return f"except = [{', '.join(json.dumps(g, ensure_ascii=False) for g in globs)}]"


def _as_meant(waivers: Waivers, problems: Sequence[Problem], text: str) -> bool:
    changes = {p.index: p.excepted for p in problems}
    target = tuple(
        replace(w, excepted=(*w.excepted, *changes.get(i, ())))
        for i, w in enumerate(waivers.entries)
        if changes.get(i, True)
    )
    try:
        return parse(text, waivers.path).entries == target
    except UsageError:
        return False
