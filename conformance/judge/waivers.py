"""Waivers: known failures of a backend with reason, link and expiry; edits of their files.

A file has any number of

    [[waiver]]
    case = "ops/GLU.SWIGLU_OAI-f16-*"             # a glob over case ids
    except = ["ops/GLU.SWIGLU_OAI-f16-ne=1*"]     # globs of exceptions; optional
    verdict = "FAIL"                              # their expected verdict
    nmse = 1.2e-4                                 # of a FAIL: the known error
    reason = "supports_op takes F16, the kernel has no branch for it"
    link = "https://…"
    expiry = 2027-03-31                           # the last day on which it is valid
    driver = "rusticl 25.0.*"                     # glob over name and version of the device's driver; optional

A waiver excuses exactly this failure: a covered case that passes is XPASS, and one with more than `MUCH` times the NMSE
stays FAIL. So does an output of zeros, or with NaN or Inf, unless `wrong = "zeros"` or `wrong = "not finite"` replaces
`nmse`.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import cache
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from conformance.case.strict import expect, only, parse_toml
from conformance.ggml.errors import UsageError

from .verdict import FAILURES, Result, Verdict
from .wrong import KINDS, Wrong, worse

WAIVABLE = tuple(v for v in Verdict if v in FAILURES and v is not Verdict.XPASS)
"""Verdicts that a waiver may expect."""
KEYS = ("case", "except", "verdict", "nmse", "wrong", "reason", "link", "expiry", "driver")


@dataclass(frozen=True, slots=True)
class Waiver:
    """A waiver entry."""

    case: str
    verdict: Verdict
    reason: str
    link: str
    expiry: date
    excepted: tuple[str, ...] = ()
    granted: Wrong | None = None
    """Known error of its cases, for a FAIL; None if not stated: then the waiver excuses nothing."""
    driver: str = ""
    """Glob over name and version of the device's driver; empty for any driver, or none."""

    def covers(self, case_id: str) -> bool:
        """Return True if its globs match this case."""
        return _matches(case_id, self.case) and not any(_matches(case_id, g) for g in self.excepted)

    def expired(self, today: date) -> bool:
        """Return True if its last day has passed."""
        return today > self.expiry

    def beyond(self, result: Result) -> str:
        """Describe how a failure with its verdict exceeds the known one; empty if it does not."""
        if self.verdict is not Verdict.FAIL:
            return ""
        if self.granted is None:
            return f"does not state the accepted error; add {_stated(result.wrong)}"
        if result.wrong is None:
            return "" if self.granted.kind == KINDS[-1] else "accepts a measured error, and this one was not measured"
        much = worse(self.granted, result.wrong)
        return f"does not accept this error: {much}" if much else ""

    def speaks_of(self, family: str) -> bool:
        """Return True if it may cover cases of `family`."""
        return fnmatch.fnmatchcase(family, self.case.partition("/")[0])


def _matches(case_id: str, glob: str) -> bool:
    literal, match = _pattern(glob)
    return case_id.startswith(literal) and (case_id == glob or match(case_id) is not None)


@cache
def _pattern(glob: str) -> tuple[str, Callable[[str], object]]:
    """Return the fixed beginning of a glob, for fast rejection, and its pattern."""
    return re.split(r"[*?[]", glob, maxsplit=1)[0], re.compile(fnmatch.translate(glob)).match


@dataclass(frozen=True, slots=True)
class Waivers:
    """A file of waivers."""

    path: str
    entries: tuple[Waiver, ...]
    text: str
    """Content of the file."""
    driver: str = ""
    """Name and version of the driver of the device; empty if it has none, or it is unknown."""

    @property
    def applying(self) -> list[tuple[int, Waiver]]:
        """The entries for this driver, with their indices."""
        entries = enumerate(self.entries)
        return [(i, w) for i, w in entries if not w.driver or fnmatch.fnmatchcase(self.driver, w.driver)]

    def where(self, index: int) -> str:
        """Return the place of an entry, for messages."""
        return f"{self.path}: waiver {index + 1} ({self.entries[index].case})"


def parse(text: str, path: str) -> Waivers:
    """Parse a file; UsageError names the file, the entry (the first is 1) and the key."""
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
    expiry, verdict = _day(table.get("expiry"), f"{where} expiry"), Verdict(table["verdict"])
    granted = _granted(table, where, verdict)
    driver = table.get("driver", "")
    expect(isinstance(driver, str) and ("driver" not in table or driver != ""), f"{where} driver", "a glob", driver)
    return Waiver(table["case"], verdict, table["reason"], table["link"], expiry, tuple(excepted), granted, driver)


def _granted(table: Mapping[str, Any], where: str, verdict: Verdict) -> Wrong | None:
    """Return the known error of its cases; None if not stated."""
    nmse, kind = table.get("nmse"), table.get("wrong")
    if verdict is not Verdict.FAIL:
        for key, value in (("nmse", nmse), ("wrong", kind)):
            expect(value is None, f"{where} {key}", f"nothing for {verdict}, which has no numbers,", value)
        return None
    expect(kind is None or kind in KINDS, f"{where} wrong", f"one of {', '.join(KINDS)}", kind)
    is_number = isinstance(nmse, (int, float)) and not isinstance(nmse, bool) and isfinite(nmse) and nmse >= 0
    expect(nmse is None or is_number, f"{where} nmse", "a finite number from 0", nmse)
    if kind in KINDS[1:]:
        expect(nmse is None, f"{where} nmse", f"nothing beside wrong = {kind}", nmse)
        return Wrong(kind, 1.0 if kind == "zeros" else inf)
    return None if nmse is None else Wrong("numbers", float(nmse))


def _stated(wrong: Wrong | None) -> str:
    """Return the line of an entry that states an error."""
    if wrong is None or wrong.kind == KINDS[-1] or not isfinite(wrong.nmse):
        return f'wrong = "{KINDS[-1]}"'
    return f"nmse = {wrong.nmse:.2g}" if wrong.kind == "numbers" else f'wrong = "{wrong.kind}"'


def _day(value: object, where: str) -> date:
    day = value
    if isinstance(value, str):
        try:
            day = date.fromisoformat(value)
        except ValueError:
            day = None
    expect(isinstance(day, date) and not isinstance(day, datetime), where, "a day, as 2027-03-31,", value)
    return day  # type: ignore[return-value]  # `expect` has checked it


def waive(waivers: Waivers, result: Result, today: date) -> Result:
    """Apply waivers to `result`: XFAIL if it fails as one of them expects, XPASS if it passes."""
    covering = [(i, w) for i, w in waivers.applying if w.covers(result.case)]
    holding = [(i, w) for i, w in covering if not w.expired(today)]
    if result.verdict is Verdict.PASS and holding:
        index, waiver = holding[0]
        passed = replace(result, waived=Verdict.PASS, verdict=Verdict.XPASS)
        return passed.noted(f"it passes, and {waivers.where(index)} says {waiver.verdict}")
    if result.verdict not in WAIVABLE:
        return result
    same = [(i, w, w.beyond(result)) for i, w in holding if w.verdict is result.verdict]
    excuse = next((w for _, w, beyond in same if not beyond), None)
    if excuse is not None:
        known = replace(result, waived=result.verdict, verdict=Verdict.XFAIL)
        return known.noted(f"waived until {excuse.expiry} ({excuse.reason}; {excuse.link})")
    if same:
        index, _, beyond = same[0]
        return result.noted(f"{waivers.where(index)} {beyond}")
    if holding:
        verdicts = ", ".join(dict.fromkeys(str(w.verdict) for _, w in holding))
        return result.noted(f"{waivers.where(holding[0][0])} waives {verdicts} only")
    return result.noted(*(f"{waivers.where(i)} expired on {w.expiry}" for i, w in covering[:1]))


@dataclass(frozen=True, slots=True)
class Problem:
    """An entry that fails the run."""

    index: int
    sentence: str
    excepted: tuple[str, ...] = ()
    """Case ids to add to its `except`."""
    stated: str = ""
    """Line to add; without it and without case ids, the entry is to be removed."""


def problems(
    waivers: Waivers,
    results: Iterable[Result],
    today: date,
    ids_of: Callable[[str], Sequence[str]],
    exists: Callable[[str], bool],
) -> list[Problem]:
    """Return the problems of one backend's waivers, given its results; ignore fresh cases.

    `ids_of`: family -> its ids at all levels; `exists`: True if a family can make a case of this id.
    """
    counted = [r for r in results if not r.fresh]
    families = tuple(dict.fromkeys(r.case.partition("/")[0] for r in counted))
    out, applying = [], dict(waivers.applying)
    for i, waiver in enumerate(waivers.entries):
        mine = [r for r in counted if waiver.covers(r.case)]
        sentence, excepted, stated = "", (), ""  # type: tuple[str, tuple[str, ...], str]
        failing = [r for r in mine if r.verdict is Verdict.FAIL is waiver.verdict]
        if waiver.expired(today):
            sentence = _expired(waiver, mine)
        elif i not in applying:
            continue
        elif failing and waiver.granted is None:
            stated = _stated(Wrong.worst(r.wrong for r in failing if r.wrong is not None))
            sentence = f"does not state the accepted error; {len(failing)} of this run fail; add {stated}"
        else:
            relevant = [f for f in families if waiver.speaks_of(f)]
            known = (case for f in relevant for case in ids_of(f) if waiver.covers(case))
            if mine:
                sentence, excepted = _outdated(mine, known)
            elif relevant:
                sentence = _unmatched(waiver, known, exists)
        if sentence:
            out.append(Problem(i, f"{waivers.where(i)}: {sentence}", excepted, stated))
    return out


def _expired(waiver: Waiver, mine: Sequence[Result]) -> str:
    still = sum(r.verdict is waiver.verdict for r in mine)
    advice = "remove it" if mine and not still else "remove it, or set a new reason and expiry"
    return f"expired on {waiver.expiry}; {still} of {len(mine)} cases of this run still fail in this way; {advice}"


def _unmatched(waiver: Waiver, known: Iterator[str], exists: Callable[[str], bool]) -> str:
    exact = not set("*?[") & set(waiver.case)
    if (exact and not waiver.excepted and exists(waiver.case)) or next(known, None) is not None:
        return ""
    return "matches no case; remove it, or fix its glob"


def _outdated(mine: Sequence[Result], known: Iterator[str]) -> tuple[str, tuple[str, ...]]:
    passing = tuple(r.case for r in mine if r.verdict is Verdict.XPASS)
    failing = [r for r in mine if r.verdict in FAILURES - {Verdict.XPASS} or r.verdict is Verdict.XFAIL]
    complete = not failing and {r.case for r in mine}.issuperset(known)
    if passing and complete:
        return f"every waived case passes now ({len(passing)}); remove it", ()
    if passing:
        return f"{len(passing)} of {len(mine)} cases of this run pass now; add them to its `except`", passing
    if complete:
        return f"the backend supports none of its cases ({len(mine)}); remove it", ()
    return "", ()


_HEADER = re.compile(r"\s*\[\[\s*waiver\s*\]\]")
_CASE = re.compile(r"""\s*["']?case["']?\s*=""")
_VERDICT = re.compile(r"""\s*["']?verdict["']?\s*=""")
_EXCEPT = re.compile(r"""\s*["']?except["']?\s*=""")


def proposal(waivers: Waivers, problems: Sequence[Problem]) -> str:
    """Return a patch that removes, narrows or completes the entries of `problems`, or ""."""
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
        entry = lines[start:end]
        if problem.stated:
            lines[start:end] = _with_line(entry, problem.stated)
        else:
            lines[start:end] = _narrowed(entry, problem.excepted) if problem.excepted else []
    text = "\n".join(lines) + "\n"
    return text if _as_meant(waivers, problems, text) else None


def _last(lines: Sequence[str], start: int, end: int) -> int:
    """Return the end of an entry; comments before the next header belong to the next entry."""
    while end - 1 > start and lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return end


def _with_line(entry: list[str], stated: str) -> list[str]:
    at = next((i for i, line in enumerate(entry) if _VERDICT.match(line)), 0)
    return [*entry[: at + 1], stated, *entry[at + 1 :]]


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
    changes = {p.index: p for p in problems}
    target = []
    for i, w in enumerate(waivers.entries):
        change = changes.get(i)
        if change is None:
            target.append(w)
        elif change.stated:
            target.append(replace(w, granted=_granted(parse_toml(change.stated, ""), "", w.verdict)))
        elif change.excepted:
            target.append(replace(w, excepted=(*w.excepted, *change.excepted)))
    try:
        return parse(text, waivers.path).entries == tuple(target)
    except UsageError:
        return False
