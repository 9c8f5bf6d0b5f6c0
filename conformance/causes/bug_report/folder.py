"""Write the bug report folder of one cause."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from conformance.backend.interface import DeviceInfo
from conformance.case import casefile
from conformance.case.case import Case
from conformance.causes.cause import Cause
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Result
from conformance.report.snippet import python
from conformance.run.oracle import Expectation
from conformance.run.session import failures

from .proof import Proof, proof_of
from .writing import issue, readme

CASE = "case.gguf"


def write_report(
    folder: Path,
    cause: Cause,
    case: Case,
    result: Result,
    *,
    expectation: Expectation | None = None,
    info: DeviceInfo | None = None,
    since: str = "",
) -> Path:
    """Write the folder `folder/<cause.id>/` with case, proof, README and draft issue; return it.

    The folder appears whole or not at all, and replaces one from an earlier run.

    Args:
        folder: created if missing.
        cause: the cause of this smallest case.
        case: the smallest case.
        result: the result of `case` on the backend of the cause.
        expectation: expected values of `case` on that backend (`Runner.expectation`); without them there is no C++.
        info: the device as the backend reports it.
        since: the first failing version, if known.

    Raises:
        UsageError: it cannot be written, or the path is not such a folder.
        CaseFileError: the case cannot be written.
    """
    target = folder / (failures.file_name(cause.id).removesuffix(".gguf").strip(".") or "cause")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as made:
            new = Path(made) / "new"
            new.mkdir()
            casefile.write(new / CASE, [failures.with_result(case, result)])
            what = proof_of(case, result, expectation, cause.seen)
            for name, text in _texts(cause, case, result, what, info, since).items():
                (new / name).write_text(text, encoding="utf-8", newline="\n")
            _put(new, target, Path(made) / "old")
    except OSError as e:
        raise UsageError(f"{target}: cannot be written: {e.strerror}") from None
    return target


def _texts(
    cause: Cause, case: Case, result: Result, what: Proof, info: DeviceInfo | None, since: str
) -> dict[str, str]:
    texts = {"case.py": _python(case), "test_case.cpp": what.test_case, "program.cpp": what.program}
    present = {name: text for name, text in texts.items() if text}
    return {
        **present,
        "README.md": readme(cause, result, what, [CASE, *present]),
        "issue.md": issue(cause, case, result, what, info, since),
    }


def _python(case: Case) -> str:
    try:
        return python(case)
    except UsageError:  # a graph that no ggml constructor can build
        return ""


def _put(new: Path, target: Path, old: Path) -> None:
    if target.is_symlink() or (target.exists() and not (target / CASE).is_file()):
        raise UsageError(f"{target}: something else stands there; name another folder")
    if target.exists():
        target.replace(old)
    new.replace(target)
    shutil.rmtree(old, ignore_errors=True)
