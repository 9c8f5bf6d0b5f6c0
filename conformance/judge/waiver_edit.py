"""The edit of a waiver file that a run asks for, as a unified diff: the tool proposes it, a person makes it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from conformance.case.strict import parse_toml
from conformance.ggml.errors import UsageError

from .waivers import Problem, Waivers, parse

_HEADER = re.compile(r"\s*\[\[\s*waiver\s*\]\]")
_CASE = re.compile(r"""\s*["']?case["']?\s*=""")
_EXCEPT = re.compile(r"""\s*["']?except["']?\s*=""")


def proposal(waivers: Waivers, found: Sequence[Problem]) -> str:
    """A diff of the file that removes or narrows the entries of `found`; empty where its layout is beyond us."""
    edited = _edited(waivers, found)
    if edited is None:
        return ""
    before, after = (t.splitlines(keepends=False) for t in (waivers.text, edited))
    return "\n".join(difflib.unified_diff(before, after, waivers.path, waivers.path, n=2, lineterm=""))


def _edited(waivers: Waivers, found: Sequence[Problem]) -> str | None:
    lines = waivers.text.splitlines()
    starts = [i for i, line in enumerate(lines) if _HEADER.match(line)]
    if len(starts) != len(waivers.entries):  # a header inside a text, or tables written in another way
        return None
    ends = [*(_last(lines, *pair) for pair in pairwise(starts)), len(lines)]
    for problem in sorted(found, key=lambda p: -p.index):
        start, end = starts[problem.index], ends[problem.index]
        lines[start:end] = _narrowed(lines[start:end], problem.excepted) if problem.excepted else []
    text = "\n".join(lines) + "\n"
    return text if _as_meant(waivers, found, text) else None


def _last(lines: Sequence[str], start: int, end: int) -> int:
    """Where an entry ends that is not the last: comments before the next header are the next entry's."""
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


def _as_meant(waivers: Waivers, found: Sequence[Problem], text: str) -> bool:
    changes = {p.index: p.excepted for p in found}
    wanted = tuple(
        replace(w, excepted=(*w.excepted, *changes.get(i, ())))
        for i, w in enumerate(waivers.entries)
        if changes.get(i, True)
    )
    try:
        return parse(text, waivers.path).entries == wanted
    except UsageError:
        return False
