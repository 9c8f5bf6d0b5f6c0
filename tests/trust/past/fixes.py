"""Writes `backtest-drawn.toml`: a year's fixes of ggml that can show here.

The rule was written before any of them was run. `fixes.csv` has all 351 fixes of ggml from 2025-08 to 2026-08, by
commit subject. A fix is on the list if

- it changes the CPU backend, the base (tensors, allocator, GGUF, quantisation), RPC, the scheduler (also the meta
  device of tensor parallelism), states, or Vulkan: its `parts`, by the files that it changes;
- `excluded` is empty (REASONS);
- a published package is certainly older than the fix, and another certainly newer. If the fix repairs a change of the
  same year (`since`), the older one must certainly contain that change.

SAMPLE of the fixes that change Vulkan alone are drawn by SEED. Fixes that `backtest.toml` has are left out.

The ops, conditions and kinds in `fixes.toml` come from the text and diff of each fix. Their author had not looked at
the tables of cases; the names of API scenarios were known.

    python -m tests.trust.past.fixes            # writes the list; fixes without packages are at its end
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from conformance.case.strict import parse_toml

HERE = Path(__file__).parent
CSV, FACTS, LIST = HERE / "fixes.csv", HERE / "fixes.toml", HERE / "backtest-drawn.toml"
SEED, SAMPLE = 42, 20
VULKAN = "Vulkan"
PARTS = ("CPU", "base", "RPC", "scheduler", "state", VULKAN)
"""Parts that can show; a fix of several counts for the first."""
REASONS = {
    "hardware": "it names a processor, device, driver or system that x86-64 Linux without a GPU is not",
    "build": "it changes how ggml is built, or what it logs",
    "speed": "it changes the speed alone",
    "feature": "it adds what no build claimed before",
    "effect": "its code does not run, or both builds behave alike, on x86-64 Linux without a GPU",
    "reverted": "it was itself reverted within days",
}
"""Why a fix of these parts cannot show."""
DEVICES = {VULKAN: "Vulkan0"}
"""Part -> device; CPU for others."""
MINUTES = {VULKAN: 30.0}
LINK = "https://github.com/ggml-org/{}"


@dataclass(frozen=True)
class Fix:
    """A row of `fixes.csv`."""

    merged: datetime
    name: str
    """Number of its pull request in llama.cpp; `ggml/N` in ggml; `ggml@COMMIT` without one."""
    part: str
    """The first of its parts; empty if it has none of `PARTS`."""
    since: datetime | None
    excluded: str
    known: str
    """`listed` in `backtest.toml`, `named` on a page of this project, or empty."""

    @property
    def link(self) -> str:
        """Address of its pull request or commit."""
        if "@" in self.name:
            return LINK.format(f"ggml/commit/{self.name.partition('@')[2]}")
        return LINK.format(f"ggml/pull/{self.name[5:]}" if "/" in self.name else f"llama.cpp/pull/{self.name}")


@dataclass(frozen=True)
class Package:
    """A published version, and when its llama.cpp was the newest."""

    package: str
    version: str
    first: datetime
    """It has what was merged before."""
    last: datetime
    """It lacks what was merged after."""


def fixes(path: Path = CSV) -> list[Fix]:
    """Return all fixes in the order in which they were merged."""
    with path.open(encoding="utf-8", newline="") as f:
        return [_fix(row) for row in csv.DictReader(f)]


def _fix(row: Mapping[str, str]) -> Fix:
    parts = row["parts"].split("+")
    part = next((p for p in PARTS if p in parts), "")
    since = _time(row["since"]) if row["since"] else None
    assert not row["excluded"] or row["excluded"] in REASONS, row
    return Fix(_time(row["merged"]), row["fix"], part, since, row["excluded"], row["known"])


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00") if "T" in text else f"{text}T23:59+00:00")


def packages(facts: Mapping[str, Any]) -> dict[str, list[Package]]:
    """Return the packages of each part, the oldest first."""
    found: dict[str, list[Package]] = {}
    for name, table in facts["packages"].items():
        versions = [Package(name, v, _time(first), _time(last)) for v, (first, last) in table["versions"].items()]
        for part in table["parts"]:
            found[part] = sorted(versions, key=lambda p: p.first)
    return found


def pair(fix: Fix, among: Sequence[Package]) -> tuple[Package, Package] | str:
    """Return the last package with the fault and the first without it, or why there is none."""
    before = [p for p in among if p.last < fix.merged and (fix.since is None or fix.since < p.first)]
    after = [p for p in among if fix.merged < p.first]
    if before and after:
        return before[-1], after[0]
    since = f" and after {fix.since:%Y-%m-%d}, when the fault came" if fix.since else ""
    return f"no package before {fix.merged:%Y-%m-%d}{since}" if after else f"no package after {fix.merged:%Y-%m-%d}"


def drawn(names: Sequence[str], seed: int = SEED, n: int = SAMPLE) -> set[str]:
    """Return `n` of `names`, the same on every machine."""
    return set(sorted(names, key=lambda name: sha256(f"{seed} {name}".encode()).hexdigest())[:n])


def chosen(every: Sequence[Fix], among: Mapping[str, Sequence[Package]]) -> Iterator[tuple[Fix, Any]]:
    """Yield each fix that passes the rule but for packages, and its pair or why it has none."""
    passing = [f for f in every if f.part and not f.excluded]
    found = {f.name: pair(f, among.get(f.part, ())) for f in passing}
    vulkan = drawn([f.name for f in passing if f.part == VULKAN and not isinstance(found[f.name], str)])
    for f in passing:
        if f.part != VULKAN or f.name in vulkan or isinstance(found[f.name], str):
            yield f, found[f.name]


def text(every: Sequence[Fix], facts: Mapping[str, Any]) -> str:
    """Return the TOML of the list, with the fixes that have no packages as comments."""
    rows = list(chosen(every, packages(facts)))
    listed = [f for f, found in rows if not isinstance(found, str) and f.known == "listed"]
    out = [
        "# Written by `python -m tests.trust.past.fixes` from fixes.csv and fixes.toml; see there.",
        f"# {len(listed)} more fixes that the rule chooses are in backtest.toml:",
        f"# {' '.join(f.name for f in listed)}",
        *(
            line
            for f, found in rows
            if f not in listed and not isinstance(found, str)
            for line in _entry(f, found, facts)
        ),
        "",
        "# Chosen, but without a package on both sides:",
        *(f"# {f.name} ({f.part}): {found}" for f, found in rows if isinstance(found, str)),
    ]
    return "\n".join(out) + "\n"


def _entry(fix: Fix, found: tuple[Package, Package], facts: Mapping[str, Any]) -> Iterator[str]:
    bad, good = found
    named = dict(facts["fixes"][fix.name])
    yield from ("", f"# {named.pop('about')}", "[[fault]]")
    row = {
        "link": fix.link,
        "package": bad.package,
        "bad": bad.version,
        "good": good.version,
        "device": DEVICES.get(fix.part, "CPU"),
        "minutes": MINUTES.get(fix.part, 10.0),
        **({"known": True} if fix.known else {}),
        **named,
    }
    yield from (f"{key} = {_toml(value)}" for key, value in row.items())


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def main() -> None:
    """Write the list."""
    facts = parse_toml(FACTS.read_text(encoding="utf-8"), FACTS.name)
    every = fixes()
    LIST.write_text(text(every, facts), encoding="utf-8")
    for reason in REASONS:
        click.echo(f"excluded, {reason}: {sum(f.excluded == reason and bool(f.part) for f in every)}")
    found = [(f, p) for f, p in chosen(every, packages(facts)) if f.known != "listed"]
    absent = [f for f, p in found if isinstance(p, str)]
    click.echo(f"of other parts: {sum(not f.part for f in every)}; without packages: {len(absent)}")
    click.echo(f"{LIST.name}: {len(found) - len(absent)} fixes")


if __name__ == "__main__":
    main()
