"""Bug reports, a folder per cause: smallest case, standalone proof, draft of an issue."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from conformance.backend.interface import DeviceInfo
from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.judge.cause import Cause
from conformance.judge.verdict import Result
from conformance.report.snippet import python
from conformance.run.oracle import Expectation
from conformance.run.session import failures

from .issue import issue
from .proof import Run, proof_of

CASE = "case.gguf"


def write_report(
    folder: Path,
    cause: Cause,
    case: Case,
    result: Result,
    *,
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
    texts["issue.md"] = issue(cause, case, result, what, info)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as made:
            new = Path(made) / "new"
            new.mkdir()
            casefile.write(new / CASE, [failures.with_result(case, result)])
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
