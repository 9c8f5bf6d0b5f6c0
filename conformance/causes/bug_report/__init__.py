"""Bug reports, a folder per bug: smallest cases, standalone proof, draft of an issue."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conformance.backend.interface import DeviceInfo
from conformance.case import casefile
from conformance.case.case import Case
from conformance.causes.features import OP
from conformance.ggml.errors import UsageError
from conformance.judge.cause import Cause
from conformance.judge.message import without_line
from conformance.judge.verdict import Result
from conformance.report.snippet import python
from conformance.run.oracle import Expectation
from conformance.run.session import failures

from .issue import issue
from .proof import Run, proof_of

CASE = "case.gguf"


def alike(causes: Sequence[Cause]) -> list[list[int]]:
    """Return the indices of the causes that one report describes, in order.

    An op that lacks a type often lacks it beside others that lack it too: the error is the same but for its line of the
    source, and so are verdict and conditions. A maintainer wants one issue. Without a message, or without a condition,
    nothing says that two causes are one bug.
    """
    groups: dict[object, list[int]] = {}
    for i, c in enumerate(causes):
        rest = frozenset(x for x in c.conditions if x.key != OP)
        key = (c.backend, c.verdict, without_line(c.message), rest) if c.message and rest else i
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def write_report(
    folder: Path,
    cause: Cause,
    case: Case,
    result: Result,
    *,
    also: Sequence[tuple[Cause, Case, Result]] = (),
    expectation: Expectation | None = None,
    info: DeviceInfo | None = None,
    run: Run | None = None,
) -> Path:
    """Write the folder `folder/<cause.id>/` with case, proof and draft issue; return it.

    The folder is written atomically, and replaces one from an earlier run.

    Args:
        folder: created if missing.
        cause: the cause of this smallest case.
        case: the smallest case.
        result: the result of `case` on the backend of the cause, or a device of that backend.
        also: other causes of the same bug, each with its smallest case.
        expectation: expected values of `case` on that backend (`Runner.expectation`); without them there is no C++.
        info: the device as the backend reports it.
        run: runs variants of the case on that backend, for a simpler `test_case`.

    Raises:
        UsageError: it cannot be written, or the path is not such a folder.
        CaseFileError: the case cannot be written.
    """
    target = folder / (failures.file_name(cause.id).removesuffix(".gguf").strip(".") or "cause")
    what = proof_of(case, result, expectation, cause.seen, run)
    texts = {"case.py": _python(case), "test_case.cpp": what.test_case, "program.cpp": what.program}
    texts["issue.md"] = issue(cause, case, result, what, info, [c for c, _, _ in also])
    smallest = [failures.with_result(c, r) for c, r in ((case, result), *((c, r) for _, c, r in also))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as made:
            new = Path(made) / "new"
            new.mkdir()
            casefile.write(new / CASE, smallest)
            for name, text in texts.items():
                if text:
                    (new / name).write_text(text, encoding="utf-8", newline="\n")
            _put(new, target, Path(made) / "old")
    except OSError as e:
        raise UsageError(f"{target}: cannot be written: {e.strerror}") from None
    return target


def _python(case: Case) -> str:
    try:
        return python(case)
    except UsageError:  # a graph that no ggml constructor can build
        return ""


def _put(new: Path, target: Path, old: Path) -> None:
    if target.is_symlink() or (target.exists() and not (target / CASE).is_file()):
        raise UsageError(f"{target}: another file is there; name another folder")
    if target.exists():
        target.replace(old)
    new.replace(target)
    shutil.rmtree(old, ignore_errors=True)
