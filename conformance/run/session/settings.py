"""`conformance.toml`: names and settings of backends.

    [backend.vulkan]                       # its name for --backend
    adapter = "ggml"                       # an installed adapter
    level = "standard"                     # its level unless --level is given
    waivers = "waivers/vulkan.toml"        # its known failures, relative to this file; or package:waivers/ggml.toml
    options = { lib = "./build/bin", device = "Vulkan0" }
    environment = { GGML_VK_VISIBLE_DEVICES = "0", GGML_VK_DEBUG = false }

A table of an installed name, `[backend.ggml]`, or of one with options, `[backend."ggml?threads=1"]`, has `level` and
`waivers` only. The table of a backend with its options has precedence over that of its name.

`environment` is set in the backend's worker process before anything is loaded; `false` removes a variable. Options and
variables that begin with `./` or `../` are paths relative to the file. Reading the file opens no backend and loads no
library: only a backend that the user names with `--backend` is opened, or one named by a saved case or a run file if
the user chose the settings with `--config` (`untrusted.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, cast

from conformance import shipped
from conformance.backend import registry
from conformance.backend.interface import DeviceInfo
from conformance.backend.registry import Named, Spec
from conformance.case import strict
from conformance.case.case import JSON
from conformance.case.strict import expect, only
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge import waivers
from conformance.judge.verdict import Result, Verdict
from conformance.judge.waivers import Waivers, problems, proposal, waive
from conformance.run.live import family_or_none
from conformance.suite.family import LEVELS, Level

from .select import build

FILE = "conformance.toml"
"""Default file in the working directory."""
FOLDER = "waivers"
"""Folder of the package with its waiver files, `ADAPTER.toml`."""
OWN = ("level", "waivers")
"""Keys of every table."""
KEYS = ("adapter", "options", "environment", *OWN)
"""Keys of a table that defines a name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True)
class Settings:
    """Content of a settings file."""

    path: Path | None = None
    levels: Mapping[str, Level] = field(default_factory=dict)
    """Backend, with or without options -> its level."""
    waivers: Mapping[str, Path] = field(default_factory=dict)
    """Backend, with or without options -> its waiver file."""
    named: Mapping[str, Named] = field(default_factory=dict)
    """Name that the file defines -> its backend."""

    def level(self, spec: Spec, given: Level | None) -> Level:
        """Return the level of `spec`: the user's, its own, or smoke."""
        return given or self.levels.get(str(spec)) or self.levels.get(spec.name, LEVELS[0])

    def waivers_of(self, specs: list[Spec], given: Path | None) -> dict[Spec, Waivers]:
        """Return the waivers of each backend with a file; `given` is for the only backend.

        UsageError if a file cannot be read or is malformed, or if `given` is ambiguous.
        """
        if given is not None:
            if len(specs) != 1:
                raise UsageError(f"--waivers {given}: a waiver file is for one backend; name one with --backend")
            return {specs[0]: read_waivers(given)}
        files = {s: self.waivers.get(str(s)) or self.waivers.get(s.name) for s in specs}
        return {s: read_waivers(file) for s, file in files.items() if file is not None}


def read_waivers(path: Path) -> Waivers:
    """Read a waiver file; UsageError if it cannot be read or is malformed."""
    return waivers.parse(strict.read_text(path), str(path))


def load(path: Path | None) -> Settings:
    """Read settings and register the names that they define; without a file, none."""
    settings = read(path)
    registry.define(settings.named)
    return settings


def read(path: Path | None) -> Settings:
    """Read settings without registering anything.

    None is `conformance.toml` in the working directory, if present. UsageError names file, table and key.
    """
    found = path or (Path(FILE) if Path(FILE).is_file() else None)
    if found is None:
        return Settings()
    document = strict.parse_toml(strict.read_text(found), str(found))
    only(document, ("backend",), f"{found}:")
    tables = document.get("backend", {})
    expect(isinstance(tables, dict), f"{found}: [backend]", "tables [backend.NAME]", tables)
    named, levels, files = {}, {}, {}
    for name, table in tables.items():
        where = f"{found}: [backend.{name}]"
        expect(isinstance(table, dict), where, "a table", table)
        own = set(table) <= set(OWN)
        if own and "?" in name:
            expect(_is_spec(name), where, "NAME?key=value, as the run prints it,", name)
        elif not own or not registry.is_taken(name):
            named[name] = replace(_named(name, table, where, found.parent), chosen=path is not None)
        if "level" in table:
            expect(table["level"] in LEVELS, f"{where} level", f"one of {', '.join(LEVELS)}", table["level"])
            levels[name] = cast("Level", table["level"])
        if "waivers" in table:
            expect(isinstance(table["waivers"], str), f"{where} waivers", "a file", table["waivers"])
            files[name] = shipped.located(table["waivers"], found.parent)
    return Settings(found, levels, files, named)


def _is_spec(text: str) -> bool:
    try:
        return str(Spec.parse(text)) == text
    except UsageError:
        return False


def _named(name: str, table: dict[str, Any], where: str, folder: Path) -> Named:
    installed = registry.names()
    expect(_NAME.fullmatch(name) is not None, where, "a name of letters, digits, _ . + -", name)
    what = f"another name, or only {' and '.join(OWN)} in the table of an installed adapter,"
    expect(not registry.is_taken(name), where, what, name)
    only(table, KEYS, where)
    adapter = table.get("adapter")
    expect(adapter in installed, f"{where} adapter", f"one of {', '.join(installed)}", adapter)
    options = _table(table, "options", where)
    environment = _table(table, "environment", where)
    for key, value in options.items():
        expect(isinstance(value, (str, int)), f"{where} options.{key}", "a text or a whole number", value)
        expect(not isinstance(value, bool), f"{where} options.{key}", 'a text, as "true",', value)
    for key, value in environment.items():
        expect(isinstance(value, str) or value is False, f"{where} environment.{key}", "a text or false", value)
        expect("=" not in key and "\0" not in f"{key}{value}" and key != "", f"{where} environment", "a variable", key)
    return Named(
        cast("str", adapter),
        tuple((k, _located(str(v), folder)) for k, v in options.items()),
        tuple((k, None if v is False else _located(v, folder)) for k, v in environment.items()),
        where,
    )


def _table(table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = table.get(key, {})
    expect(isinstance(value, dict), f"{where} {key}", "a table", value)
    return cast("dict[str, Any]", value)


def _located(value: str, folder: Path) -> str:
    """Return a path as absolute: a library without a folder would be searched in the system's."""
    return str((folder / value).resolve()) if value.startswith(("./", "../")) else value


class WaiverBook:
    """The waivers of a run's backends, as of one day."""

    def __init__(self, waivers: Mapping[Spec, Waivers], today: date) -> None:
        self._waivers = dict(waivers)
        self._today = today

    def to_json(self) -> dict[str, JSON]:
        """Return backend -> its waiver file and number of known failures."""
        return {str(s): {"file": w.path, "known": len(w.entries)} for s, w in self._waivers.items()}

    def pack(self, spec: Spec) -> list[str]:
        """Return the waivers of a backend as strings, for another process; empty without any."""
        own = self._waivers.get(spec)
        return [] if own is None else [own.path, own.text, self._today.isoformat()]

    @classmethod
    def unpack(cls, spec: Spec, words: Sequence[str]) -> WaiverBook:
        """Read the output of `pack`."""
        if not words:
            return NO_WAIVERS
        path, text, day = words
        return cls({spec: waivers.parse(text, path)}, date.fromisoformat(day))

    def ask(self, info: Callable[[Spec], DeviceInfo]) -> None:
        """Ask each backend whose waivers name a driver for its own; none if it does not open."""
        for spec, own in self._waivers.items():
            if any(w.driver for w in own.entries):
                with suppress(ConformanceError):
                    self._waivers[spec] = replace(own, driver=info(spec).driver)

    def of(self, spec: Spec) -> Sequence[object]:
        """Return the known failures of a backend."""
        return self._waivers[spec].entries if spec in self._waivers else ()

    def apply(self, spec: Spec, result: Result) -> Result:
        """Return `result`, as XFAIL or XPASS if a waiver of `spec` covers the case."""
        return waive(self._waivers[spec], result, self._today) if spec in self._waivers else result

    def verdicts(self, spec: Spec, case_id: str) -> list[Verdict]:
        """Return the verdicts that waivers of `spec` expect of a case."""
        entries = self._waivers[spec].applying if spec in self._waivers else ()
        return [w.verdict for _, w in entries if w.covers(case_id)]

    def expects(self, spec: Spec, case_id: str, verdict: Verdict) -> bool:
        """Return True if a waiver of `spec` expects this verdict of a case."""
        return verdict in self.verdicts(spec, case_id)

    def problems(self, results: Iterable[Result]) -> tuple[list[str], list[str]]:
        """Return a sentence per waiver that fails the run, and a unified diff per file to fix it."""
        rows = list(results)
        sentences: list[str] = []
        edits: list[str] = []
        for spec, own in self._waivers.items():
            mine = [r for r in rows if r.backend == str(spec)]
            found = problems(own, mine, self._today, _listed, exists)
            sentences += [p.sentence for p in found]
            if found and (edit := proposal(own, found)):
                edits.append(edit)
        return sentences, edits


NO_WAIVERS = WaiverBook({}, date.min)


def active_settings(settings: Settings, waivers: WaiverBook | None = None) -> dict[str, JSON] | None:
    """Return the settings and waivers in use, for the record; None if no file was read."""
    known = {} if waivers is None else waivers.to_json()
    if settings.path is None and not known:
        return None
    return {
        "file": None if settings.path is None else str(settings.path.absolute()),
        "names": sorted(registry.defined()),
        "levels": dict(settings.levels),
        "waivers": known,
    }


def settings_lines(found: dict[str, JSON] | None) -> list[str]:
    """Return `active_settings` as lines for the terminal."""
    if found is None:
        return []
    said = [f"names: {', '.join(found['names'])}"] if found["names"] else []
    said += [f"level of {name}: {level}" for name, level in found["levels"].items()]
    said += [
        f"waivers of {name}: {w['file']}: {w['known']} known failure{'s' * (w['known'] != 1)}"
        for name, w in found["waivers"].items()
    ]
    return [f"settings: {found['file'] or 'no file'} ({'; '.join(said)})"] if said else []


def known_lines(results: Iterable[Result], book: WaiverBook) -> Iterator[str]:
    """Yield a line per shipped waiver file that expects failures of backends without waivers."""
    failed = [(Spec.parse(r.backend), r) for r in results if r.fails_run]
    for file in sorted(shipped.path(FOLDER).glob("*.toml")):
        own = read_waivers(file)
        known = sum(
            waive(own, r, today()).verdict is Verdict.XFAIL
            for spec, r in failed
            if not book.of(spec) and (spec.name == file.stem or spec.name.startswith(f"{file.stem}-"))
        )
        if known:
            setting = f'waivers = "{shipped.PREFIX}{FOLDER}/{file.name}"'
            yield f"{known} of {len(failed)} failing cases known: {setting} in conformance.toml (docs/waivers.md)"


def today() -> date:
    """Return the local date, the only clock that affects a verdict, by the last day of a waiver."""
    return datetime.now().astimezone().date()


def report(edits: Sequence[str]) -> list[str]:
    """Return the edits that `problems` proposes, as lines for the terminal."""
    if not edits:
        return []
    return ["proposed changes (as a patch, `git apply` or `patch -p0` takes it):", *edits]


def _listed(family: str) -> Sequence[str]:
    """Return all ids of a family; none if it is unknown, as for a case from a file."""
    known = family_or_none(family)
    return () if known is None else known.ids("full")


def exists(case_id: str) -> bool:
    """Return True if a family makes a case of this id."""
    try:
        build(case_id)
    except ConformanceError:
        return False
    return True
