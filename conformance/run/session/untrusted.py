"""Which backend a file may choose: a saved case, a run file or a record may come from a stranger.

`Spec.parse` reads what the user typed. What a file names goes through `backends_of`: an installed adapter whose options
are plain words and numbers, none of which names a file, folder, library or network address; or a name of the settings
file that the user chose with `--config`. Anything else runs only if the user repeats it as `--backend`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.ggml.text import printable, shell
from conformance.run.scheduler.assign import read_devices
from conformance.run.scheduler.backend import NAME as SCHED

LONGEST = 300
"""Characters of a file's text that a message shows."""
_VALUE = re.compile(r"[A-Za-z0-9_+ -]{1,64}(\.[0-9]{1,5})?")
"""A value of an option that a file may choose: a word, a number, words joined by +. No path, URL or library."""
_LARGE = re.compile(r"[0-9]{6}")
_PLACES = frozenset(
    ("lib", "library", "plugin", "path", "paths", "file", "files", "dir", "folder", "cache", "model", "out", "output",
     "log", "trace", "dump", "config", "url", "uri", "host", "server", "address", "port", "command", "cmd", "exec",
     "env", "environment")
)  # fmt: skip
"""Words in the name of an option that names a place, where an adapter does not declare its `places`."""


def backends_of(file: Path, texts: Iterable[str], command: Sequence[str], typed: Iterable[str] = ()) -> dict[str, Spec]:
    """The backends that a file names, by their text there.

    Args:
        file: named in messages.
        texts: what the file says.
        command: words of the running command, without `--backend`.
        typed: what the user gave as `--backend`; the file may choose these, whatever they are.

    Raises:
        UsageError: a backend that a file may not choose; the message holds the command that runs it.
    """
    found: dict[str, Spec] = {}
    allowed = frozenset(map(Spec.parse, typed))
    refused = ""
    for text in dict.fromkeys(texts):
        try:
            found[text] = spec = Spec.parse(text)
            why = "" if spec in allowed else _refusal(spec)
        except UsageError as e:
            raise UsageError(printable(f"{file}: {e}", 2 * LONGEST)) from None
        if why and not refused:
            refused = f"{file}: names backend {printable(text, LONGEST)!r}, which a file may not choose: {why}"
    if refused:
        again = [word for text in found for word in ("--backend", text)]
        raise UsageError(f"{refused}. To run it: {shell([*command, *again])}")
    return found


def _refusal(spec: Spec) -> str:
    """Why a file may not choose `spec`; empty where it may."""
    if (named := registry.defined().get(spec.name)) is not None:
        if not named.chosen:
            return f"{named.where} defines {spec.name}, and nobody named that file with --config"
        return f"{spec.name} is a name of your settings, with options of its own" if spec.options else ""
    if spec.name == SCHED:
        return next(filter(None, (_refusal_in_sched(k, v) for k, v in spec.options)), "")
    if not spec.options or spec.name not in registry.names():  # nothing opens a name that is not installed
        return ""
    places = registry.adapter(spec.name).places
    return next(filter(None, (_refusal_of_option(k, v, places) for k, v in spec.options)), "")


def _refusal_in_sched(key: str, value: str) -> str:
    if key != "devices":
        return _refusal_of_option(key, value, None)
    devices = read_devices(value)
    if any(d.name == SCHED for d in devices):
        return "a scheduler is no device of another"
    return next(filter(None, map(_refusal, devices)), "")


def _refusal_of_option(key: str, value: str, places: frozenset[str] | None) -> str:
    if key.startswith(registry.VARIABLE):
        return f"its option {printable(key, 40)} sets a variable"
    named = key in places if places is not None else bool(_PLACES & set(re.split(r"[^a-z]+", key.lower())))
    if named:
        return f"its option {printable(key, 40)} names a place"
    if not _VALUE.fullmatch(value) or _LARGE.search(value) or Path(value).exists():
        return f"its option {printable(key, 40)} is no short word or number"
    return ""
