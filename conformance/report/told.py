"""Rows of run files that are no results: pairs that were asked for and have none, cells of a zoo, rows of phases.

Their documents may come from strangers and from other versions, so what is not of the expected type is passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from conformance.case.case import JSON

from .runfile import Document
from .runs import Row, Runs

Fields = Mapping[str, JSON]


def unlisted(runs: Runs) -> list[tuple[Document, str, int]]:
    """Documents that asked a backend for more than they have results of and name as missing, and by how many."""
    found = []
    for d in runs.of("conformance"):
        asked = d.body.get("asked")
        told = Counter(_text(v.get("backend")) for k in ("results", "missing") for _, v in _objects(d.body.get(k)))
        for backend, n in asked.items() if isinstance(asked, dict) else ():
            if isinstance(n, int) and not isinstance(n, bool) and n > told[backend]:
                found.append((d, backend, n - told[backend]))
    return found


def zoo(runs: Runs) -> list[Row[Fields]]:
    """Architecture × device × run of `conform zoo`: the newest of each kind of machine."""
    found: dict[tuple[str, ...], Row[Fields]] = {}
    for d in runs.of("zoo"):
        for i, value in _objects(d.body.get("results")):
            key = (d.machine, *(_text(value.get(k)) for k in ("architecture", "backend", "run")))
            found[key] = Row(value, d, f"results[{i}]")
    return list(found.values())


def phases(runs: Runs) -> list[Row[Fields]]:
    """Phases of `conform phases`, each with its `backend` and `model`; the newest of each kind of machine."""
    found: dict[tuple[str, ...], Row[Fields]] = {}
    for d in runs.of("phases"):
        backends = d.body.get("backends")
        model = _text(d.body.get("model"))
        for name, told in backends.items() if isinstance(backends, dict) else ():
            own = list(_objects(told.get("phases"))) if isinstance(told, dict) else []
            if isinstance(told, dict) and not own:
                own = [(-1, {"name": "", "available": False, "reason": told.get("reason")})]
            for i, value in own:
                place = f"backends[{name!r}]" if i < 0 else f"backends[{name!r}].phases[{i}]"
                key = (d.machine, name, model, _text(value.get("name")))
                found[key] = Row({**value, "backend": name, "model": model}, d, place)
    return list(found.values())


def _objects(value: JSON) -> Iterator[tuple[int, Fields]]:
    for i, v in enumerate(value if isinstance(value, list) else ()):
        if isinstance(v, dict):
            yield i, v


def _text(value: JSON) -> str:
    return "" if value is None else str(value)
