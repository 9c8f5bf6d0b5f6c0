"""Convert adapters' return values to strict JSON of bounded size, and to text for messages."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from conformance.case.case import JSON
from conformance.ggml.errors import BackendError

MAX_TEXT = 8192
"""Maximum characters of an adapter's text: a reason, a note, an exception's message."""
_MARGIN = 256
"""Additional characters, for words around the text and for its size."""
MAX_ENTRIES = 4096
"""Maximum entries of a list or mapping."""
MAX_DEPTH = 8
"""Maximum nesting of lists and mappings."""


def shortened(text: str) -> str:
    """Cut `text` to its first `MAX_TEXT` characters and append its size; idempotent."""
    if len(text) <= MAX_TEXT + _MARGIN:
        return text
    size = f"{len(text) / 1e6:.0f} MB" if len(text) >= 1e6 else f"{len(text) / 1e3:.0f} kB"
    return f"{text[:MAX_TEXT]}… ({size} in all)"


def plain(value: object, where: str, depth: int = MAX_DEPTH) -> JSON:
    """Convert an adapter's `value` to strict JSON: NumPy numbers to numbers, long texts cut.

    `where` names it in errors. BackendError if it is not JSON, too large, or deeper than `depth`.
    """
    if _easy(value):
        return value
    if isinstance(value, str):
        return shortened(str(value))
    if isinstance(value, (Mapping, list, tuple)):
        if len(value) > MAX_ENTRIES or not depth:
            raise BackendError(f"{where}: at most {MAX_ENTRIES} entries in {MAX_DEPTH} levels expected, more found")
        if not isinstance(value, Mapping):
            return [v if _easy(v) else plain(v, f"{where}[{i}]", depth - 1) for i, v in enumerate(value)]
        return {
            k if _easy(k) and type(k) is str else _key(k, where): v
            if _easy(v)
            else plain(v, f"{where}[{k!r:.80}]", depth - 1)
            for k, v in value.items()
        }
    return _number(value, where)


def _easy(value: object) -> bool:
    """Return True if the value needs no conversion; this is faster than converting it."""
    kind = type(value)
    return kind is int or kind is bool or value is None or (kind is str and len(value) <= MAX_TEXT)  # type: ignore[arg-type]  # a str


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise BackendError(f"{where}: texts as keys expected, {key!r:.80} found")
    return shortened(str(key))


def _number(value: object, where: str) -> JSON:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)) and math.isfinite(value):
        return float(value)
    raise BackendError(f"{where}: a text, a finite number, a list or a mapping expected, {value!r:.80} found")


def kind(value: object) -> str:
    """Describe the type of `value`."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"
