"""Grammar of demands: what a case may require of a witness; `run.judgement` checks them.

    {"compiles": "<=2", "kernels": ["RMS"], "state": "fused", "views": {"gather": 0}}
    {"openvino-*": {"compiles": "<=2"}, "ggml*": {"device": "CPU*"}}
    {"lifts": {"compiles": "<=4"}, "appends": {"cache_bytes": "<=8192"}}

A key is a field of a witness, or a glob over backends (`name` or `name?option=value`) and over the properties they
declare (`Witness.promises`), with demands for those backends only. All demands must be met.

| `promises` | of a backend that |
|---|---|
| `lifts` | compiles one program for all graphs that differ in sizes and offsets only, after seeing two of them |
| `static` | compiles one program for all of them, with sizes of its own |
| `appends` | moves no more of a cache than a step writes |
| `fuses` | keeps caches inside the attention kernel |
| `resumes` | continues with its own copy of a cache, without loading it again |
| `packs` | stores quantised weights in about as many bits as their blocks |
| `layers` | runs each RMS_NORM and each plain ROPE as one layer, `RMS` and `RoPE`, in every program |
| `tiles` | multiplies on an array of 16 columns with kernels of at least 16 rows, `K=… TILE_N=…`; counts all three |

| type of the field | a demand on it |
|---|---|
| a number | the number, or text `<=n`, `>=n`, `==n`; with `*programs`, n for each of `counters["programs"]` |
| text | the text, `*` and `?` as in a glob |
| counts by name | a list of required names, or an object glob -> demand on the sum of the counts that match |
| lines | a list of globs, each of which must match some line |

A limit from above on what a backend declares is not met by a count of 0: it has counted nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from conformance.ggml.errors import GraphError

from .strict import shown

Kind = Literal["number", "text", "counts", "lines"]

FIELDS: dict[str, Kind] = {
    "device": "text", "path": "text", "stage": "text", "template": "text", "state": "text",
    "nodes": "number", "compiles": "number", "cache_hits": "number", "splits": "number", "copies": "number",
    "cache_bytes": "number", "peak_compile_bytes": "number",
    "bytes": "counts", "kernels": "counts", "symbols": "counts", "views": "counts", "counters": "counts",
    "notes": "lines", "promises": "lines", "libraries": "lines",
}  # fmt: skip
"""Field of a witness -> type of its value."""

COMPARISON = re.compile(r"(<=|>=|==)(\d{1,18})(\*programs)?")
PROGRAMS = "programs"
"""Counter of a witness: the programs whose layers `kernels` counts."""
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Demand:
    """A demand on one field."""

    backends: str
    """Glob over backends and `promises`."""
    field: str
    entry: str | None
    """Glob over the names of the counts in the field; None for the field itself."""
    what: Any
    """A number, a text, or a list of texts, as in the table above."""

    def __str__(self) -> str:
        what = "with " + ", ".join(self.what) if isinstance(self.what, list) else f"{self.what}"
        return f"{self.field}{'' if self.entry is None else f'[{self.entry}]'} {what}"


def parse(demands: Mapping[str, Any]) -> list[Demand]:
    """Parse a case's `demands`; GraphError, starting with the field, if one is malformed."""
    out: list[Demand] = []
    for key, value in demands.items():
        if key in FIELDS:
            out += _of_field("*", key, value, f"demands.{key}")
        elif isinstance(value, dict) and 0 < len(key) <= _LONGEST:
            for name, inner in value.items():
                where = f"demands.{_shown(key)}.{_shown(name)}"
                if name not in FIELDS:
                    raise GraphError(f"{where}: a field of a witness expected, one of {', '.join(FIELDS)}")
                out += _of_field(key, name, inner, where)
        else:
            raise GraphError(
                f"demands.{_shown(key)}: a field of a witness expected ({', '.join(FIELDS)}), "
                "or a glob over backends with an object of such fields"
            )
    return out


def _of_field(backends: str, name: str, value: Any, where: str) -> Iterator[Demand]:  # noqa: ANN401  # JSON
    kind = FIELDS[name]
    if kind == "counts" and isinstance(value, dict):
        for entry, number in value.items():
            _check("number", f"{where}.{_shown(entry)}", number)
            yield Demand(backends, name, entry, number)
        return
    _check(kind, where, value)
    yield Demand(backends, name, None, value)


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return COMPARISON.fullmatch(value) is not None
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_text(x) for x in value)


_FORMS: dict[Kind, tuple[str, Callable[[object], bool]]] = {
    "number": ("a number, or text such as '<=2', '>=1' or '==0'", _is_number),
    "text": ("text", _is_text),
    "counts": ("a list of names, or an object of numbers by name", _is_names),
    "lines": ("a list of globs", _is_names),
}
"""Type of a field -> description of a valid demand, and its check."""


def _check(kind: Kind, where: str, value: object) -> None:
    words, fits = _FORMS[kind]
    if not fits(value):
        raise GraphError(f"{where}: {words} expected, {_shown(value)} found")


def _shown(value: object) -> str:
    """Format an untrusted value: short, printable, without `:`, which ends a message's field."""
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z0-9_*?=-]{1,40}", value) else ascii(value[:40]).replace(":", "\\x3a")
    return repr(value) if value is None or isinstance(value, bool) else shown(value)
