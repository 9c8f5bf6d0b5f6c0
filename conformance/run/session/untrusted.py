"""Restrict the backends that an untrusted file may choose: a saved case, run file or record.

`Spec.parse` reads the names that the user typed. A name in a file is checked by `backends_of`: an installed adapter
whose options are plain words and numbers, none of them a file, folder, library or network address; or a name from the
settings file that the user chose with `--config`. Anything else runs only if the user repeats it as `--backend`.
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
from conformance.run.scheduler.backend import devices_of

LONGEST = 300
"""Maximum characters of a file's text in a message."""
_VALUE = re.compile(r"[A-Za-z0-9_+ -]{1,64}(\.[0-9]{1,5})?")
"""Option values that a file may choose: words and numbers; no path, URL or library."""
_LARGE = re.compile(r"[0-9]{6}")
_PLACES = frozenset(
    ("lib", "library", "plugin", "path", "paths", "file", "files", "dir", "folder", "cache", "model", "out", "output",
     "log", "trace", "dump", "config", "url", "uri", "host", "server", "address", "port", "command", "cmd", "exec",
     "env", "environment")
)  # fmt: skip
"""Words in the names of options that are paths or addresses, if an adapter lacks `places`."""


def backends_of(file: Path, texts: Iterable[str], command: Sequence[str], typed: Iterable[str] = ()) -> dict[str, Spec]:
    """Return the backends that a file names, by their text in the file.

    Args:
        file: the file, for messages.
        texts: names of backends in the file.
        command: words of the running command, without `--backend`.
        typed: the user's `--backend` values, which the file may choose whatever they are.

    Raises:
        UsageError: a backend that a file may not choose; the message has the command that runs it.
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


def expect_installed(file: Path, specs: Iterable[Spec]) -> None:
    """Raise UsageError if a file was saved for a backend that this machine lacks."""
    for spec in specs:
        if not all(registry.is_taken(part.name) for part in devices_of(spec)):
            saved = printable(str(spec), LONGEST)
            raise UsageError(
                f"{file}: saved for backend {saved!r}, which is not installed here; name another with --backend"
            )


def _refusal(spec: Spec) -> str:
    """Return why a file may not choose `spec`; empty if it may."""
    if (named := registry.defined().get(spec.name)) is not None:
        if not named.chosen:
            return f"{named.where} defines {spec.name}, and --config did not name that file"
        return f"{spec.name} is a name from your settings, with additional options" if spec.options else ""
    if spec.name == SCHED:
        return next(filter(None, (_refusal_in_sched(k, v) for k, v in spec.options)), "")
    if not spec.options or spec.name not in registry.names():  # a name that is not installed cannot be opened
        return ""
    places = registry.adapter(spec.name).places
    return next(filter(None, (_refusal_of_option(k, v, places) for k, v in spec.options)), "")


def _refusal_in_sched(key: str, value: str) -> str:
    if key != "devices":
        return _refusal_of_option(key, value, None)
    devices = read_devices(value)
    if any(d.name == SCHED for d in devices):
        return "a scheduler cannot be a device of another scheduler"
    return next(filter(None, map(_refusal, devices)), "")


def _refusal_of_option(key: str, value: str, places: frozenset[str] | None) -> str:
    if key.startswith(registry.VARIABLE):
        return f"its option {printable(key, 40)} sets a variable"
    named = key in places if places is not None else bool(_PLACES & set(re.split(r"[^a-z]+", key.lower())))
    if named:
        return f"its option {printable(key, 40)} names a file, folder or address"
    if not _VALUE.fullmatch(value) or _LARGE.search(value) or Path(value).exists():
        return f"its option {printable(key, 40)} is not a short word or number"
    return ""
