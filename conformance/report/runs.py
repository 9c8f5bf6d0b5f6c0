"""Run files merged: what every report is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Generic, TypeVar

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Result, Verdict

from .runfile import Document, read_document
from .schema import ROWS

T = TypeVar("T")

KEYS: dict[str, tuple[str, ...]] = {
    "results": ("case", "backend"),
    "missing": ("case", "backend"),
    "units": ("unit", "model", "case", "backend"),
    "gates": ("gate", "unit", "backend", "against"),
    "faults": ("name",),
    "hunts": ("fault", "family"),
}
"""List -> the fields by which two rows of one machine are of one thing: the newer one stays."""


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One row of a document's list, and where it stands there."""

    value: T
    document: Document
    place: str
    """`results[17]`."""

    @property
    def where(self) -> str:
        """File and place, for whoever wants to see the number in its source."""
        return f"{self.document.path.name}: {self.place}"


@dataclass(frozen=True, slots=True)
class Runs:
    """All that some run files hold, each thing once.

    Of one thing on one kind of machine (`KEYS`) the newest row stays; what machines of two kinds say both stays.
    """

    documents: tuple[Document, ...]
    """Oldest first; a run that stands in two files is here as both where they differ."""
    results: tuple[Row[Result], ...]
    missing: tuple[Row[Mapping[str, JSON]], ...]
    """Pairs that a run was asked for and has no result of, unless a newer run has; each fails its run."""
    units: tuple[Row[Mapping[str, JSON]], ...]
    gates: tuple[Row[Mapping[str, JSON]], ...]
    faults: tuple[Row[Mapping[str, JSON]], ...]
    hunts: tuple[Row[Mapping[str, JSON]], ...]
    superseded: tuple[Row[Result], ...]
    """Results of which a newer one is in `results`."""
    passed_over: tuple[Path, ...]
    """JSON files found in a folder that are no run files."""

    def of(self, kind: str) -> list[Document]:
        """The documents of one kind, oldest first."""
        return [d for d in self.documents if d.kind == kind]

    def unavailable(self) -> dict[str, str]:
        """Backends that no machine had, and why the last one that asked did not."""
        found: dict[str, str] = {}
        for d in self.documents:
            found.update(d.environment.get("unavailable") or {})
        ran = {r.value.backend for r in self.results}
        return {name: why for name, why in found.items() if name not in ran}


def read_runs(paths: Sequence[Path]) -> Runs:
    """Read run files, and those in folders (and folders in them), and merge them.

    A JSON file in a folder whose `kind` is no kind of run is passed over; one that is named must be a run file.

    Raises:
        UsageError: a file that cannot be read or trusted, named with the field; or no run file at all.
    """
    documents: dict[str, Document] = {}
    passed_over: list[Path] = []
    for path, named in _files(paths):
        document = read_document(path, named=named)
        if document is None:
            passed_over.append(path)
        else:
            documents.setdefault(document.digest, document)
    if not documents:
        raise UsageError(f"a run file (written with --json) expected, none found in {', '.join(map(str, paths))}")
    ordered = sorted(documents.values(), key=lambda d: d.written)
    merged = {name: _merge(ordered, name) for name in KEYS}
    answered = {_pair(r): r.document.written for r in merged["results"][0]}
    missing = [r for r in merged["missing"][0] if answered.get(_pair(r), "") <= r.document.written]
    return Runs(
        documents=tuple(ordered),
        results=tuple(_result(r) for r in merged["results"][0]),
        missing=tuple(missing),
        units=tuple(merged["units"][0]),
        gates=tuple(merged["gates"][0]),
        faults=tuple(merged["faults"][0]),
        hunts=tuple(merged["hunts"][0]),
        superseded=tuple(_result(r) for r in merged["results"][1]),
        passed_over=tuple(passed_over),
    )


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file once, and whether it was named rather than found in a folder."""
    seen: set[Path] = set()
    for path in paths:
        found = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        for f in found:
            if (real := f.resolve()) not in seen and (f is path or f.is_file()):
                seen.add(real)
                yield f, f is path


def _merge(
    documents: Sequence[Document], name: str
) -> tuple[list[Row[Mapping[str, JSON]]], list[Row[Mapping[str, JSON]]]]:
    """The newest row of each thing, in the order in which the things first came; and the older ones.

    Rows of one thing in one document, as of a case that was run from a file too, all stay.
    """
    newest: dict[tuple[JSON, ...], list[Row[Mapping[str, JSON]]]] = {}
    older: list[Row[Mapping[str, JSON]]] = []
    for d in documents:
        if name not in ROWS.get(d.kind, {}):
            continue
        for i, value in enumerate(d.body.get(name, ())):
            rows = newest.setdefault((d.machine, *(value.get(k) for k in KEYS[name])), [])
            if rows and rows[0].document is not d:
                older += rows
                rows.clear()
            rows.append(Row(value, d, f"{name}[{i}]"))
    return [r for rows in newest.values() for r in rows], older


def _pair(row: Row[Mapping[str, JSON]]) -> tuple[JSON, ...]:
    return row.document.machine, *(row.value.get(k) for k in KEYS["missing"])


_RESULT_FIELDS = tuple(f.name for f in fields(Result))


def _result(row: Row[Mapping[str, JSON]]) -> Row[Result]:
    known = {k: row.value[k] for k in _RESULT_FIELDS if k in row.value}
    return Row(Result(**{**known, "verdict": Verdict(known["verdict"])}), row.document, row.place)
