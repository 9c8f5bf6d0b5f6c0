"""`conform test-file`: cases in the format of test-backend-ops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from conformance.builds.source import locate
from conformance.case.strict import read_text
from conformance.cli.cases import read_cases
from conformance.cli.options import File
from conformance.cli.output import Group, line
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.library import Library
from conformance.report.runfile import write_text
from conformance.run.session.select import build, case_ids
from conformance.suite.exchange.line import Line, Numbers, line_of, lines_of, lost, read_lines, unwritten

of_option = click.option(
    "--of", "build_name", metavar="BUILD", default="", help="Whose numbers of ops the file has; default: the wheel's."
)


def numbers_of(name: str) -> Numbers:
    """The numbers of a build; UnavailableError if it is not here."""
    return Numbers.of(Library(str(locate(name)) if name else ""))


def read_test_file(path: Path, name: str) -> list[Line]:
    """The lines of a file in the numbers of a build."""
    return read_lines(read_text(path), numbers_of(name), str(path))


@click.group(cls=Group)
def test_file() -> None:
    """Exchange ops with test-backend-ops: the files that it reads with --test-file."""


@test_file.command()
@click.argument("cases", nargs=-1, required=True, metavar="CASE|FILE…")
@of_option
@click.option("-o", "--output", type=File, required=True, metavar="FILE")
def export(cases: Sequence[str], build_name: str, output: Path) -> None:
    """Write each op of CASE, an id, a glob of ids or a case file, as a line that test-backend-ops reads."""
    numbers = numbers_of(build_name)
    rows: dict[Line, str] = {}
    notes: dict[str, int] = {}
    for text in cases:
        path = Path(text)
        made = read_cases(path) if path.is_file() else map(build, case_ids((), [text], "full"))
        for case in made:
            for found in lines_of(case):
                rows.setdefault(found.unnamed(), numbers.write(found))
            for step in case.steps:
                for node in step.graph:
                    for said in filter(None, (lost(node), unwritten(node))):
                        sentence = f"{line_of(node).op}: {said}"
                        notes[sentence] = notes.get(sentence, 0) + 1
    if not rows:
        raise UsageError("test-file export: no node that computes in these cases")
    write_text(output, "".join(f"{row}\n" for row in rows.values()), "-o")
    for sentence, n in notes.items():
        line(f"{n} nodes, {sentence}", err=True)
    line(f"{output}: {len(rows)} ops in the numbers of {numbers.title}")
