"""Differences between two builds: functions, shaders, sources, and the binary interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.ggml.errors import UnavailableError

from .contents import Contents, contents_of, differing
from .headers import declarations
from .source import libraries

MOST = 0.5
"""Share of changed functions above which the compiler or its options differ."""
LEAST = 20
"""Fewest functions for such a judgement."""
_OWN = re.compile(r"ggml|llama")
_VARIANT = re.compile(r"libggml-cpu-([\w.]+?)(?:-[0-9a-f]{8})?\.so")
_VERSION = frozenset({"ggml_commit", "ggml_version"})
"""Functions that differ between any two builds."""


@dataclass(frozen=True, slots=True)
class Named:
    """Names of one kind in both builds: changed, only in the new, only in the old."""

    changed: Sequence[str] = ()
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    total: int = 0
    """Number in the new build."""

    @classmethod
    def of(cls, old: Mapping[str, str], new: Mapping[str, str]) -> Named:
        """Compare digests by name."""
        return cls(*differing(old, new), len(new))

    @property
    def differ(self) -> list[str]:
        """Names of the new build that the old one lacks or has otherwise."""
        return sorted([*self.changed, *self.added])

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed)

    def __str__(self) -> str:
        counts = ((len(self.changed), "changed"), (len(self.added), "new"), (len(self.removed), "removed"))
        return f"{', '.join(f'{n:,} {word}' for n, word in counts if n) or 'no difference'} of {self.total:,}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between an old and a new build."""

    functions: Named = field(default_factory=Named)
    """Functions of ggml, by symbol."""
    shaders: Named = field(default_factory=Named)
    sources: Named = field(default_factory=Named)
    """Kernels whose source lies in the library: OpenCL, Metal."""
    tables: Named = field(default_factory=Named)
    """Objects with pointers to functions."""
    exported: Named = field(default_factory=Named)
    ops: Sequence[str] = ()
    """Sentences about the numbers of ops."""
    types: Sequence[str] = ()
    """Sentences about the numbers of types."""
    structs: Named = field(default_factory=Named)
    declared: Named = field(default_factory=Named)
    """Functions, structs and enums of installed headers, if both builds have them."""
    keys: Named = field(default_factory=Named)
    """GGUF keys."""
    compilers: tuple[Sequence[str], Sequence[str]] = ((), ())
    nameless: int = 0
    """Functions without a name that differ, in stripped libraries."""
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Changed function -> the CPU libraries in which it differs, unless in all."""

    @property
    def rebuilt(self) -> str:
        """Why the functions do not show what changed; empty if they do."""
        changed, total = len(self.functions.changed), self.functions.total - len(self.functions.added)
        if total >= LEAST and changed > MOST * total:
            others = "" if self.compilers[0] == self.compilers[1] else " (the compilers differ)"
            return f"{changed:,} of {total:,} functions differ: another compiler or other options{others}"
        return ""

    @property
    def is_empty(self) -> bool:
        """True if nothing that a case can show differs."""
        return not (self.functions or self.shaders or self.sources or self.tables or self.nameless)

    @property
    def summary(self) -> str:
        """Numbers of functions, shaders and kernels that differ."""
        kinds = ((self.functions, "functions"), (self.shaders, "shaders"), (self.sources, "kernels in text"))
        return "; ".join(f"{what}: {of}" for of, what in kinds if of.total)

    @property
    def code(self) -> list[str]:
        """Functions, shaders and kernels of the new build that the old one lacks or has otherwise."""
        return [*self.functions.differ, *self.shaders.differ, *self.sources.differ, *self.tables.differ]


def difference(new: Path, old: Path) -> Difference:
    """Compare two builds that `source.locate` found.

    Raises:
        UnavailableError: a build has no library in ELF format for x86-64 or aarch64.
    """
    before, after = _read(old), _read(new)
    headers = [declarations(p) for p in (old, new)]
    variants = [v for v in after if v in before]
    merged = [_merged(side[v] for v in variants) for side in (before, after)]
    a, b = merged
    each = {v: Named.of(before[v].functions, after[v].functions) for v in variants}
    functions = Named(
        [n for n in sorted({n for f in each.values() for n in f.changed}) if n not in _VERSION],
        sorted({n for f in each.values() for n in f.added} - a.functions.keys()),
        sorted({n for f in each.values() for n in f.removed} - b.functions.keys()),
        len(b.functions),
    )
    of = {n: [v for v, f in each.items() if n in f.changed] for n in functions.changed}
    having = {n: [v for v in variants if n in after[v].functions and n in before[v].functions] for n in of}
    return Difference(
        functions=functions,
        shaders=Named.of(a.shaders, b.shaders),
        sources=Named.of(a.sources, b.sources),
        tables=Named.of(a.tables, b.tables),
        exported=Named.of(*(dict.fromkeys(filter(_OWN.match, s.exported), "") for s in merged)),
        ops=list(_numbers(*({n: i for i, n in enumerate(s.ops)} for s in merged))),
        types=list(_numbers(a.types, b.types)),
        structs=Named.of(*({k: "; ".join(v) for k, v in s.structs.items()} for s in merged)),
        declared=Named.of(*headers) if all(headers) else Named(),
        keys=Named.of(*(dict.fromkeys(s.keys, "") for s in merged)),
        compilers=(a.compilers, b.compilers),
        nameless=len(set(b.nameless) - set(a.nameless)),
        variants={n: vs for n, vs in of.items() if vs != having[n]},
    )


def _read(path: Path) -> dict[str, Contents]:
    """Return CPU variant (empty for all other libraries together) -> contents."""
    groups: dict[str, list[Contents]] = {}
    error: UnavailableError | None = None
    for file in dict.fromkeys(p.resolve() for p in libraries(path) if p == path or _OWN.search(p.name)):
        try:
            found = contents_of(file)
        except UnavailableError as e:
            error = error or e
            continue
        m = _VARIANT.match(file.name)
        groups.setdefault(m[1] if m else "", []).append(found)
    if not groups:
        raise error or UnavailableError(f"{path}: a library of ggml expected, there is none")
    return {v: _merged(iter(cs)) for v, cs in groups.items()}


def _merged(parts: Iterator[Contents]) -> Contents:
    """Return the union of the contents of several libraries."""
    every = list(parts)
    first = every[0]
    return Contents(
        machine=first.machine,
        compilers=sorted({c for p in every for c in p.compilers}),
        is_stripped=any(p.is_stripped for p in every),
        functions={k: v for p in every for k, v in p.functions.items()},
        nameless=[d for p in every for d in p.nameless],
        shaders={k: v for p in every for k, v in p.shaders.items()},
        sources={k: v for p in every for k, v in p.sources.items()},
        tables={k: v for p in every for k, v in p.tables.items()},
        exported=[e for p in every for e in p.exported],
        ops=next((p.ops for p in every if p.ops), []),
        types=next((p.types for p in every if p.types), {}),
        structs={k: v for p in every for k, v in p.structs.items()},
        keys=[k for p in every for k in p.keys],
    )


def _numbers(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[str]:
    """Yield sentences about names whose number differs; a shift of many is one sentence."""
    if not old or not new:
        return
    for name in new:
        if name not in old:
            yield f"{name} = {new[name]} is new"
    for name in old:
        if name not in new:
            yield f"{name} = {old[name]} is gone"
    moved = [n for n in new if n in old and new[n] != old[n]]
    by: dict[int, list[str]] = {}
    for name in moved:
        by.setdefault(new[name] - old[name], []).append(name)
    for shift, names in by.items():
        first = names[0]
        more = f" to {names[-1]} ({len(names)})" if len(names) > 1 else ""
        yield f"{first}{more}: {shift:+d}, {first} is {new[first]}, was {old[first]}"
