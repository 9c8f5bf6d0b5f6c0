"""Precision profile of a device, measured op by op (`conform precision`), as a TOML file.

suite = "0.1.0"
device = "Vulkan0"
description = "llvmpipe (LLVM 15.0.6, 256 bits)"
versions = { ggml = "0.25.1" }
others = false                         # judge other keys by the limits of upstream's own tests
build = ""                             # SHA-256 of the measured libraries
refused = ["MUL_MAT-nvfp4+f32@9"]      # keys that the device refuses, so that they were not measured

[op."MUL_MAT-q4_0+f32@9"]              # a key of `ggml.arithmetic.key_of`
rounding = "operands f16, sums f16x2"  # one of `ggml.arithmetic.ROUNDINGS`
residual = 0.0                         # the worst NMSE relative to the reference in that rounding
bound = 0.0                            # NMSE that is allowed beyond float32 rounding
terms = 2048                           # of the longest sum measured
blind = ""                             # the bugs that the bound would hide
finding = ""                           # why the measurement is unreliable; nothing is allowed then
cases = ["ops/MUL_MAT-q4_0+f32-a=256x33,b=256x9@1"]
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.arithmetic import EXACT, ROUNDINGS, Arithmetic, excess
from conformance.ggml.errors import UsageError

from .interface import DeviceInfo


@dataclass(frozen=True, slots=True)
class Entry:
    """Measurement of one key; see the fields of the file."""

    rounding: str = EXACT.name
    residual: float = 0.0
    bound: float = 0.0
    terms: int = 1
    blind: str = ""
    finding: str = ""
    cases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """Precision profile of one device."""

    suite: str
    device: str
    description: str
    versions: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, Entry] = field(default_factory=dict)
    others: bool = False
    """True if upstream's limits apply to a key without an entry; else it must be exact."""
    build: str = ""
    """SHA-256 of the measured libraries (`builds.source.contents`); "" if no file was named."""
    refused: tuple[str, ...] = ()
    """Keys for which the device accepts no plain case."""

    def has(self, key: str, ids: Sequence[str]) -> bool:
        """Return True if `key` was refused, or measured with cases that are all among its `ids`."""
        return key in self.refused or (key in self.entries and set(self.entries[key].cases) <= set(ids))

    def arithmetic(self, name: str) -> Arithmetic:
        """Return the arithmetic in which the reference computes, called `name`."""
        return Arithmetic(
            name,
            roundings={k: e.rounding for k, e in self.entries.items()},
            bounds={k: e.bound for k, e in self.entries.items() if e.bound},
            lengths={k: e.terms for k, e in self.entries.items() if e.bound},
            measured=not self.others,
        )

    def check(self, info: DeviceInfo, where: str) -> None:
        """Raise UsageError if the profile at `where` is of another device; versions may differ."""
        found = (info.device, info.description)
        if found != (self.device, self.description):
            raise UsageError(
                f"{where}: a profile of {info.device} ({info.description!r}) expected, one of {self.device} "
                f"({self.description!r}) found; `conform precision` writes one"
            )

    def to_toml(self) -> str:
        """Return the content of the profile's file."""
        versions = ", ".join(f"{_quoted(k)} = {_quoted(v)}" for k, v in self.versions.items())
        head = f"suite = {_quoted(self.suite)}\ndevice = {_quoted(self.device)}\n"
        head += f"description = {_quoted(self.description)}\nversions = {{ {versions} }}\n"
        head += f"others = {str(self.others).lower()}\nbuild = {_quoted(self.build)}\n"
        head += f"refused = {_value(self.refused)}\n"
        return head + "".join(_table(k, e) for k, e in self.entries.items())


def _table(key: str, entry: Entry) -> str:
    values = {f.name: getattr(entry, f.name) for f in fields(entry)}
    lines = (f"{k} = {_value(v)}\n" for k, v in values.items())
    return f"\n[op.{_quoted(key)}]\n{''.join(lines)}"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Quote a TOML string: as in JSON, and escape the character that JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read(path: Path) -> Profile:
    """Read a profile; UsageError if it cannot be read or is malformed."""
    return parse(read_text(path), str(path))


def parse(text: str, where: str) -> Profile:
    """Parse a profile; UsageError names the file, the table and the key."""
    document = parse_toml(text, where)
    only(document, ("suite", "device", "description", "versions", "others", "build", "refused", "op"), f"{where}:")
    build, refused = document.get("build", ""), document.get("refused", [])
    for key, value in (*((k, document.get(k)) for k in ("suite", "device", "description")), ("build", build)):
        expect(isinstance(value, str), f"{where}: {key}", "a text", value)
    versions, tables = document.get("versions", {}), document.get("op", {})
    texts = isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values())
    expect(texts, f"{where}: versions", "a table of texts", versions)
    expect(_are_texts(refused), f"{where}: refused", "a list of texts", refused)
    others = document.get("others", False)
    expect(isinstance(others, bool), f"{where}: others", "true or false", others)
    expect(isinstance(tables, dict) and bool(tables or others), f"{where}: op", 'tables [op."KEY"]', tables)
    entries = {key: _entry(key, t, f'{where}: [op."{key}"]') for key, t in tables.items()}
    named = (document["suite"], document["device"], document["description"])
    return Profile(*named, versions, entries, others, build, tuple(refused))


def _entry(op_key: str, table: object, where: str) -> Entry:
    expect(isinstance(table, dict), where, "a table", table)
    values: dict[str, Any] = dict(table)  # type: ignore[call-overload]  # a dict
    only(values, [f.name for f in fields(Entry)], where)
    for key in ("rounding", "residual", "bound"):
        expect(key in values, f"{where} {key}", "a value", None)
    known = ", ".join(ROUNDINGS)
    expect(values["rounding"] in ROUNDINGS, f"{where} rounding", f"one of {known}", values["rounding"])
    for key in ("residual", "bound"):
        value = values[key]
        number = type(value) in (int, float) and math.isfinite(value) and value >= 0
        expect(number, f"{where} {key}", "a finite number from 0", value)
        values[key] = float(value)
    terms = values.get("terms", 1)
    expect(type(terms) is int and terms > 0, f"{where} terms", "a whole number from 1", terms)
    for key in ("blind", "finding"):
        expect(isinstance(values.get(key, ""), str), f"{where} {key}", "a text", values.get(key))
    cases = values.get("cases", [])
    expect(_are_texts(cases), f"{where} cases", "a list of texts", cases)
    expect(not (values.get("finding") and values["bound"]), f"{where} bound", "0 with a finding", values["bound"])
    wanted = excess(op_key, values["bound"])
    expect(not wanted, f"{where} bound", wanted, values["bound"])
    return Entry(**{**values, "cases": tuple(cases)})


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
