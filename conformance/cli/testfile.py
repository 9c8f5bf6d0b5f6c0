"""Reads and writes files of test-backend-ops: ops, or lines of its output."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from conformance.builds.source import locate
from conformance.case.case import Case
from conformance.case.strict import read_text
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.library import Library
from conformance.report.runfile import write_text
from conformance.suite import tbo
from conformance.suite.exchange.build import case_of
from conformance.suite.exchange.line import Line, Numbers, line_of, lines_of, lost, read_lines, unwritten

from .output import line

_PRINTED = re.compile(r"\b[A-Z][A-Z0-9_]*\([^()]*\)")
"""The name of a case as the program prints it."""


def numbers_of(build: str) -> Numbers:
    """Return the op numbering of a build (default: the wheel); UnavailableError if absent."""
    return Numbers.of(Library(str(locate(build)) if build else ""))


def read(files: Sequence[str]) -> list[Case]:
    """Read cases of `FILE[@BUILD]`, with the op numbering of BUILD (default: the wheel).

    Prints each line that cannot become a case. UsageError for a malformed file.
    """
    cases: dict[str, Case] = {}
    for name in files:
        file, _, build = (name, "", "") if Path(name).is_file() else name.partition("@")
        path = Path(file)
        text = read_text(path)
        printed = [found[0] for row in text.splitlines() if (found := _PRINTED.search(row))]
        rows: Sequence[str | Line] = printed or read_lines(text, numbers_of(build), str(path))
        for row in rows:
            try:
                case = tbo.build(f"{tbo.NAME}/{row}@0") if isinstance(row, str) else case_of(row)
            except UsageError as e:
                line(f"{path}: left out: {e}", err=True)
            else:
                cases.setdefault(case.id, case)
    return list(cases.values())


def show(cases: Iterable[Case], build: str, output: Path | None) -> None:
    """Write the ops of cases for `--test-file`, one per line; report lost properties on stderr."""
    numbers, rows, notes = numbers_of(build), dict[Line, str](), Counter[str]()
    for case in cases:
        for found in lines_of(case):
            rows.setdefault(found.unnamed(), numbers.write(found))
        for node in (n for step in case.steps for n in step.graph):
            notes.update(f"{line_of(node).op}: {said}" for said in (lost(node), unwritten(node)) if said)
    if not rows:
        raise UsageError("list cases --format test-file: these cases have no node that computes")
    if output is not None:
        write_text(output, "".join(f"{row}\n" for row in rows.values()), "-o")
    for row in () if output is not None else rows.values():
        line(row)
    for sentence, n in notes.items():
        line(f"{n} nodes, {sentence}", err=True)
    line(f"{len(rows)} ops in the numbers of {numbers.title}", err=True)
