"""What the documents of a nightly say in figures, and its failing cases; what died may have left anything."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES
from conformance.run.audit.cells import FAILING

from .parts import shown
from .state import Done, State


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing case."""

    verdict: str
    case: str
    backend: str
    detail: str
    reproduce: str
    """What to type in the nightly's folder."""
    fresh: bool
    """Whether it is a new random case, which is filed and fails no run."""


def read(path: Path) -> dict[str, JSON]:
    """A document; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def documents(state: State, part: Done | None = None) -> list[dict[str, JSON]]:
    """The documents of a part, or of all, as far as they can be read."""
    chosen = [part] if part else state.parts.values()
    return [d for p in chosen for d in (read(state.folder / n) for n in p.documents) if d]


def failures(states: Sequence[State], folder: Path) -> list[Failure]:
    """Each failing (case, backend) of a night once, those that fail the run first; commands are for `folder`."""
    found: dict[tuple[int, str, str], Failure] = {}
    for k, s in enumerate(states):
        saved_in = Path(os.path.relpath(s.folder, folder)) / "failures"
        for r in _rows(documents(s), "results"):
            if r.get("verdict") in FAILURES:
                found[k, str(r.get("case")), str(r.get("backend"))] = _failure(r, saved_in)
    return sorted(found.values(), key=lambda f: f.fresh)


def _failure(r: dict[str, JSON], saved_in: Path) -> Failure:
    case, backend, saved = str(r.get("case")), str(r.get("backend")), r.get("saved")
    # the folder may have moved, from the machine that ran it to the one where this is read
    again = ["repro", str(saved_in / PurePath(saved).name)] if isinstance(saved, str) else ["run", "--case", case]
    reproduce = shown(["conform", *again, "--backend", backend])
    return Failure(str(r.get("verdict")), case, backend, str(r.get("detail") or ""), reproduce, bool(r.get("fresh")))


def findings(documents: Sequence[dict[str, JSON]]) -> list[str]:
    """What parts other than cases found, a sentence each: bugs that nobody noticed, limits that were broken, words that
    do not match work.
    """
    noticed = {h.get("fault") for h in _rows(documents, "hunts") if h.get("noticed")}
    missed = [f for f in _rows(documents, "faults") if f.get("name") not in noticed]
    broken = [g for g in _rows(documents, "gates") if g.get("answer") == "regressed"]
    return [
        *(f"planted bug {f.get('name')} ({f.get('of')}) is not noticed: {f.get('says')}" for f in missed),
        *(f"gate {g.get('gate')}, {g.get('unit')} on {g.get('backend')}: {g.get('reason')}" for g in broken),
        *(f"audit: {f.get('finding')} {f.get('name')} in {f.get('buffer')} on {name}: {f.get('detail')}"
          for name, f in _cells(documents) if f.get("finding") in FAILING),
    ]  # fmt: skip


def unrun(documents: Sequence[dict[str, JSON]]) -> list[str]:
    """What did not run within parts that did, a sentence each: cases, gates, and backends that are not there."""
    lacking = [(d.get("environment") or {}).get("unavailable") or {} for d in documents]
    left_out = Counter((str(m.get("backend")), str(m.get("reason"))) for m in _rows(documents, "missing"))
    gates = [g for g in _rows(documents, "gates") if g.get("answer") == "not run"]
    return [
        *(f"{n:,} cases asked of {b} have no result: {why}" for (b, why), n in left_out.most_common()),
        *(f"backend {b}: not available: {why}" for d in lacking for b, why in d.items()),
        *(f"gate {g.get('gate')}, {g.get('unit')} on {g.get('backend')}: {g.get('reason')}" for g in gates),
    ]


def of(documents: Sequence[dict[str, JSON]]) -> str:
    """The figures of one part's documents in a line; empty where they have none of these."""
    return "; ".join(filter(None, (figure(documents) for figure in _FIGURES)))


def _verdicts(documents: Sequence[dict[str, JSON]]) -> str:
    rows = _rows(documents, "results")
    filed = sum(bool(r.get("fresh")) and r.get("verdict") in FAILURES for r in rows)
    lacking = len(_rows(documents, "missing"))
    counted = _counted([r.get("verdict") for r in rows]) + (f" ({filed} of fresh cases, filed)" if filed else "")
    return ", ".join(filter(None, (counted, f"{lacking:,} without a result" if lacking else "")))


def _hunts(documents: Sequence[dict[str, JSON]]) -> str:
    names = {f.get("name") for f in _rows(documents, "faults")}
    noticed = {h.get("fault") for h in _rows(documents, "hunts") if h.get("noticed")}
    return f"{len(names & noticed)} of {len(names)} planted bugs noticed" if names else ""


def _gates(documents: Sequence[dict[str, JSON]]) -> str:
    return _counted([f"gates {g.get('answer')}" for g in _rows(documents, "gates")])


def _units(documents: Sequence[dict[str, JSON]]) -> str:
    rows = _rows(documents, "units")
    timed = sum(bool(u.get("seconds")) for u in rows)
    return f"{timed} of {len(rows)} work units timed" if rows else ""


def _audited(documents: Sequence[dict[str, JSON]]) -> str:
    return _counted([c.get("finding") for _, c in _cells(documents)])


def _cells(documents: Sequence[dict[str, JSON]]) -> list[tuple[str, dict[str, JSON]]]:
    """Backend and cell of audits."""
    audited = [d["backends"] for d in documents if d.get("kind") == "audit" and isinstance(d.get("backends"), dict)]
    return [(name, c) for backends in audited for name in backends for c in _rows([backends], name)]


_FIGURES: tuple[Callable[[Sequence[dict[str, JSON]]], str], ...] = (_verdicts, _hunts, _gates, _units, _audited)


def _counted(words: Sequence[object]) -> str:
    return ", ".join(f"{n:,} {word}" for word, n in sorted(Counter(map(str, words)).items()))


def _rows(documents: Sequence[dict[str, JSON]], name: str) -> list[dict[str, JSON]]:
    lists = [d.get(name) for d in documents]
    return [r for rows in lists if isinstance(rows, list) for r in rows if isinstance(r, dict)]
