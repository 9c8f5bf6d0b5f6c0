"""Changes between two builds for people: code, the cases that reach it, interface."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from .code import shown
from .difference import Difference, Named
from .reach import Impact

ROWS = {"function": 10, "shader": 3, "source": 3, "table": 0}
"""Kind -> maximum number of lines with cases."""
KINDS = tuple(ROWS)
WIDTH = 110
"""Characters of a line with names."""
_ARGUMENTS = re.compile(r"<[^<>]*>")


class Change(Struct, frozen=True, kw_only=True):
    """A function, shader or kernel of the new build that the old one lacks or has otherwise."""

    kind: str
    """Member of `KINDS`."""
    name: str
    """Its name, as `code.shown` returns it."""
    is_new: bool = False
    is_shared: bool = False
    """True if so many cases reach it that a case per op shows it."""
    cases: int = 0
    """Cases that reach it; 0 if it is shared, or reached by none."""
    tested: int = 0
    """Number of them that ran."""
    failing: int = 0
    """Number of them that fail on the new build alone."""


class Changes(Struct, frozen=True, kw_only=True):
    """All changes between two builds."""

    rows: list[Change] = []
    interface: dict[str, list[str]] = {}
    """Kind of item on which programs depend, such as `exported symbols` -> differences."""
    totals: dict[str, int] = {}
    """Kind -> number in the new build."""
    note: str = ""
    """Why changed functions do not show what changed, or what could not be compared."""


def changes(
    found: Difference, impacts: Sequence[Impact], architectures: tuple[Collection[str], Collection[str]] = ((), ())
) -> Changes:
    """Return the changes of a difference, with the cases of all setups of `impacts`.

    `architectures`: those of the old and of the new build.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    for impact in impacts:
        for name, ids in impact.cases.items():
            cases[name].update(ids)
    common = {name for impact in impacts for name in impact.shared}
    rows = [
        Change(
            kind=kind,
            name=shown(name),
            is_new=name in of.added,
            is_shared=name in common or kind == "table",
            cases=0 if kind == "table" else len(cases[name]),
        )
        for kind, of in zip(KINDS, (found.functions, found.shaders, found.sources, found.tables), strict=True)
        for name in of.differ
    ]
    known = (dict.fromkeys(names, "") for names in architectures)
    interface = {
        "exported symbols": _names(found.exported),
        "numbers of ops": list(found.ops),
        "numbers of types": list(found.types),
        "structs": _names(found.structs),
        "declarations in headers": _names(found.declared),
        "GGUF keys": _names(found.keys),
        "architectures": _names(Named.of(*known)) if all(architectures) else [],
    }
    of = {k: n.total for k, n in zip(KINDS, (found.functions, found.shaders, found.sources, found.tables), strict=True)}
    return Changes(
        rows=rows, interface={k: v for k, v in interface.items() if v}, totals=of, note="; ".join(_notes(found))
    )


def _names(of: Named) -> list[str]:
    return [*(f"+{n}" for n in of.added), *(f"-{n}" for n in of.removed), *(f"{n} differs" for n in of.changed)]


def _notes(found: Difference) -> Iterator[str]:
    if found.rebuilt:
        yield f"{found.rebuilt}, so they do not show what was edited"
    elif found.compilers[0] != found.compilers[1]:
        yield "the compilers or their options differ"
    if found.nameless:
        yield f"{found.nameless:,} functions without a name differ, since a library is stripped"


def sentences(found: Changes) -> Iterator[str]:
    """Yield at most 40 lines: code by the cases that reach it, then the interface."""
    if found.note:
        yield found.note
    if not found.rows:
        yield "no function, shader or kernel differs"
    for kind in KINDS:
        own = [r for r in found.rows if r.kind == kind]
        if own:
            new = sum(r.is_new for r in own)
            counts = [f"{n:,} {word}" for n, word in ((len(own) - new, "changed"), (new, "new")) if n]
            yield f"{kind}s: {', '.join(counts)} of {found.totals.get(kind, 0):,}"
            yield from _code(own, ROWS[kind])
    for what, texts in found.interface.items():
        yield f"{what}: {_joined(texts, 3 * WIDTH, '; ' if what.startswith('numbers') else ', ')}"


def _code(rows: Sequence[Change], most: int) -> Iterator[str]:
    """Yield a line for each group of equal names, and one for names without cases of their own."""
    groups: dict[str, list[Change]] = defaultdict(list)
    for r in rows:
        if r.cases and not r.is_shared:
            groups[_plain(r.name)].append(r)
    order = sorted(groups, key=lambda name: -max(r.cases for r in groups[name]))
    for name in order[:most]:
        own = groups[name]
        times = f" × {len(own)}" if len(own) > 1 else ""
        yield f"  {max(r.cases for r in own):6,} cases  {own[0].name if len(own) == 1 else name}{times}{_ran(own)}"
    if more := order[most:]:
        yield f"     and {len(more)} more: {_joined(more, WIDTH)}"
    if shared := [r.name for r in rows if r.is_shared]:
        yield f"     all cases  {_joined(_grouped(shared), 2 * WIDTH)}"
    if left := [r.name for r in rows if not r.cases and not r.is_shared]:
        yield f"       no case  {_joined(_grouped(left), 3 * WIDTH)}"


def _ran(rows: Iterable[Change]) -> str:
    tested, failing = max((r.tested for r in rows), default=0), max((r.failing for r in rows), default=0)
    return f": {tested:,} ran, {failing:,} fail" if tested else ""


def _plain(name: str) -> str:
    """Return a name without template arguments."""
    while (short := _ARGUMENTS.sub("", name)) != name:
        name = short
    return name.strip()


def _grouped(names: Iterable[str]) -> list[str]:
    return [name if n == 1 else f"{name} × {n}" for name, n in Counter(map(_plain, names)).items()]


def _joined(texts: Sequence[str], width: int, between: str = ", ") -> str:
    """Join texts up to a width; the rest is counted."""
    kept: list[str] = []
    for text in texts:
        if kept and sum(map(len, kept)) + len(between) * len(kept) + len(text) > width:
            break
        kept.append(text)
    left = len(texts) - len(kept)
    return between.join(kept) + (f" and {left:,} more" if left else "")


def counted(found: Changes, of: Mapping[str, tuple[int, int]]) -> Changes:
    """Return the changes with the cases that ran and that fail, by `Change.name`."""
    numbers = ((r, *of.get(r.name, (0, 0))) for r in found.rows)
    return replace(found, rows=[replace(r, tested=tested, failing=failing) for r, tested, failing in numbers])
