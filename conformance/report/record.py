"""The JSON record of a run: the only source of every report."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path

from conformance.case.case import JSON
from conformance.case.leftover import prefix
from conformance.ggml.errors import UsageError
from conformance.judge.asked import Asked, Missing
from conformance.judge.verdict import Result, Totals
from conformance.run.session.environment import environment, source

SCHEMA = 1


def header(kind: str) -> dict[str, JSON]:
    """How every document of a run begins: `{"schema", "kind", "run", "written", "environment"}`.

    `run` is a random name of 32 hex digits, by which a document is known wherever it is merged; `written` is when, in
    UTC.

    Args:
        kind: `conformance`, `perf`, `planted`, `audit`, `phases` or `zoo`.
    """
    written = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    where = {**environment(), **source()}
    return {"schema": SCHEMA, "kind": kind, "run": uuid.uuid4().hex, "written": written, "environment": where}


def record(
    results: Sequence[Result],
    unavailable: dict[str, str] | None = None,
    waivers: Sequence[str] = (),
    *,
    asked: Asked | None = None,
    missing: Sequence[Missing] = (),
    settings: JSON = None,
) -> dict[str, JSON]:
    """`header`, `asked`, `missing`, `results` and `totals`.

    Backends that are not here stand in the environment as `unavailable`; where waivers fail the run, `waivers` says
    which and why.

    Args:
        results: of the run.
        unavailable: backend -> why it is not here.
        waivers: what is wrong with them.
        asked: what the run was to run; where None, what it ran.
        missing: what of it has no result.
        settings: what of `conformance.toml` was in force.
    """
    totals = Totals()
    for r in results:
        totals.add(r)
    begun = header("conformance")
    more = {} if settings is None else {"settings": settings}
    return {
        **begun,
        "environment": {**begun["environment"], "unavailable": unavailable or {}, **more},
        "asked": dict(Counter(r.backend for r in results)) if asked is None else asked.to_json(),
        "missing": [m.to_json() for m in missing],
        "results": [r.to_json() for r in results],
        "totals": totals.to_json(),
        **({"waivers": list(waivers)} if waivers else {}),
    }


def check_writable(path: Path) -> None:
    """Refuse before anything runs what could not be written after all of it ran.

    Raises:
        UsageError: the folder is not there or takes no files.
    """
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--json {path}: a file in a folder that exists and can be written expected")


def write_json(path: Path, document: JSON) -> None:
    """Write `document` whole or not at all; Ctrl-C waits until that is done, and nothing else is left behind.

    Raises:
        UsageError: the file cannot be written there.
    """
    encoded = json.JSONEncoder(indent=1, allow_nan=False, default=str).iterencode(document)
    with interrupts_wait():
        write_text(path, chain(encoded, ["\n"]))


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold SIGINT back as long as this lasts; one that came is raised at its end."""
    came: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    except ValueError:  # not the main thread, where no signal arrives
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and before is not signal.SIG_IGN:
        raise KeyboardInterrupt


def write_text(path: Path, text: str | Iterable[str], option: str = "--json") -> None:
    """Write a text, or its parts one after the other, whole or not at all: nothing else is left where it cannot be.

    Args:
        path: a new file, or one to replace; a device is written to as it is.
        text: of the file, in UTF-8.
        option: what the user said `path` by.

    Raises:
        UsageError: the file cannot be written there.
    """
    parts = [text] if isinstance(text, str) else text
    try:
        if path.exists() and not path.is_file():
            path.write_text("".join(parts), encoding="utf-8")
            return
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=prefix(path.parent), suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as f:
                f.writelines(parts)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise UsageError(f"{option} {path}: cannot be written: {e.strerror or e}") from e
