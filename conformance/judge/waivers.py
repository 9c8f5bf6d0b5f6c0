"""Waivers: failures of one backend that people know of, each with its reason, a link and the day it ends.

A file holds any number of

    [[waiver]]
    case = "ops/GLU.SWIGLU_OAI-f16-*"             # a glob over case ids
    except = ["ops/GLU.SWIGLU_OAI-f16-ne=1*"]     # of those, none of these; may be left out
    verdict = "CRASH"                             # what becomes of them
    reason = "supports_op takes F16, the kernel has no branch for it"
    link = "https://…"
    expiry = 2027-03-31                           # the last day on which it holds

A waiver covers what fails as it says, and nothing else: a case that it covers and that passes is XPASS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from fnmatch import fnmatchcase
from typing import Any

from conformance.case.strict import expect, only, parse_toml

from .verdict import FAILURES, Result, Verdict

WAIVABLE = tuple(v for v in Verdict if v in FAILURES and v is not Verdict.XPASS)
"""Verdicts that a waiver may expect."""
CELL = "#"
"""In the ids of what is made of a case, such as a cell of an audit; no case that can be listed has one."""
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
        """Whether it speaks of this case."""
        return _matches(case_id, self.case) and not any(_matches(case_id, g) for g in self.excepted)

    def expired(self, today: date) -> bool:
        """Whether its last day is over."""
        return today > self.expiry

    def speaks_of(self, family: str) -> bool:
        """Whether cases of `family` may be among those that it covers."""
        return fnmatchcase(family, self.case.partition("/")[0])


def _matches(case_id: str, glob: str) -> bool:
    return case_id == glob or fnmatchcase(case_id, glob)


@dataclass(frozen=True, slots=True)
class Waivers:
    """One file of them."""

    path: str
    entries: tuple[Waiver, ...]
    text: str
    """The file as it is."""

    def where(self, index: int) -> str:
        """An entry, for messages."""
        return f"{self.path}: waiver {index + 1} ({self.entries[index].case})"


def parse(text: str, path: str) -> Waivers:
    """The waivers of a file.

    Raises:
        UsageError: names the file, the entry (the first is 1) and the key.
    """
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
    found = value
    if isinstance(value, str):
        try:
            found = date.fromisoformat(value)
        except ValueError:
            found = None
    expect(isinstance(found, date) and not isinstance(found, datetime), where, "a day, as 2027-03-31,", value)
    return found  # type: ignore[return-value]  # `expect` has seen that it is one


def waive(waivers: Waivers, result: Result, today: date) -> None:
    """Set `result` against the waivers: XFAIL where it fails as one of them says, XPASS where it passes."""
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
        said = ", ".join(dict.fromkeys(str(w.verdict) for _, w in holding))
        result.detail = _joined(result.detail, f"{waivers.where(holding[0][0])} waives {said} only")
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
    """Case ids to add to its `except`; where there are none, the entry is to be removed."""


def problems(
    waivers: Waivers,
    results: Iterable[Result],
    today: date,
    listed: Callable[[str], Sequence[str]],
    exists: Callable[[str], bool],
) -> list[Problem]:
    """What is wrong with the waivers, by the results of one backend.

    Args:
        waivers: of that backend.
        results: all of its results, as `waive` left them. Fresh cases do not count.
        today: the day of the run.
        listed: family -> all ids of it that any level has.
        exists: whether a family makes a case of this id.
    """
    counted = [r for r in results if not r.fresh]
    families = tuple(dict.fromkeys(r.case.partition("/")[0] for r in counted))
    found = []
    for i, waiver in enumerate(waivers.entries):
        problem = _problem(i, waiver, counted, families, today, listed, exists)
        if problem is not None:
            index, sentence, excepted = problem
            found.append(Problem(index, f"{waivers.where(index)}: {sentence}", excepted))
    return found


def _problem(
    index: int,
    waiver: Waiver,
    results: Sequence[Result],
    families: Sequence[str],
    today: date,
    listed: Callable[[str], Sequence[str]],
    exists: Callable[[str], bool],
) -> tuple[int, str, tuple[str, ...]] | None:
    mine = [r for r in results if waiver.covers(r.case)]
    if waiver.expired(today):
        still = sum(r.verdict is waiver.verdict for r in mine)
        advice = "remove it" if mine and not still else "remove it, or find a reason and a day to wait for"
        seen = f"{still} of {len(mine)} cases of this run still fail so"
        return index, f"expired on {waiver.expiry}; {seen}; {advice}", ()
    asked = [f for f in families if waiver.speaks_of(f)]
    if not mine and (not asked or CELL in waiver.case):
        return None
    known = {i for f in asked for i in listed(f) if waiver.covers(i)}
    if not mine:
        exact = not set("*?[") & set(waiver.case)
        if known or (exact and not waiver.excepted and exists(waiver.case)):
            return None
        return index, "matches no case; remove it, or mend its glob", ()
    complete = known <= {r.case for r in mine}
    passing = tuple(r.case for r in mine if r.verdict is Verdict.XPASS)
    failing = [r for r in mine if r.verdict in FAILURES - {Verdict.XPASS} or r.verdict is Verdict.XFAIL]
    if passing and complete and not failing:
        return index, f"what it waives passes now, all of {len(passing)} cases; remove it", ()
    if passing:
        return index, f"{len(passing)} of {len(mine)} cases of this run pass now; except them", passing
    if complete and not failing:
        return index, f"the backend refuses all {len(mine)} cases that it waives; remove it", ()
    return None
