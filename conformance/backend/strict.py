"""What a stranger's code gives back, made plain: only what JSON can hold, of a size that a report can hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.cgraph.case import JSON
from conformance.cgraph.errors import BackendError

TEXT = 1 << 16
"""Characters of one text."""
VALUES = 1 << 17
"""Values in one record, and a sixteenth of the characters of all its texts."""
WORDS = 2000
"""Characters of an error's message that are kept, most of them of its beginning."""
_DEPTH = 8
_INTEGER = 1 << 63


def plain(value: object, where: str) -> JSON:
    """`value` as strict JSON takes it: NumPy's scalars as numbers, tuples as lists, keys as texts.

    Args:
        value: an adapter's.
        where: its name in messages, as `Witness.kernels`.

    Raises:
        BackendError: names the field that holds something else, or too much.
    """
    return _Reader().read(value, where, _DEPTH)


class _Reader:
    def __init__(self) -> None:
        self._left = VALUES * 16

    def read(self, value: object, where: str, depth: int) -> JSON:
        if value is None or isinstance(value, (bool, np.bool_)):
            return None if value is None else bool(value)
        if isinstance(value, (int, np.integer)):
            if not -_INTEGER <= value < _INTEGER:
                raise BackendError(f"{where}: a number of 64 bits expected, a larger one found")
            return int(value)
        if isinstance(value, (float, np.floating)):
            return float(value)
        if isinstance(value, str):
            return self._text(value, where)
        if depth and isinstance(value, Mapping):
            return {self._key(k, where): self.read(v, f"{where}[{shown(k)}]", depth - 1) for k, v in value.items()}
        if depth and isinstance(value, (list, tuple)):
            return [self.read(v, f"{where}[{i}]", depth - 1) for i, v in enumerate(value)]
        raise BackendError(f"{where}: a number, a text, or a list or mapping of them expected, {kind(value)} found")

    def _key(self, key: object, where: str) -> str:
        self._take(16, where)
        if not isinstance(key, str):
            raise BackendError(f"{where}: texts expected as keys, {kind(key)} found")
        return self._text(key, where)

    def _text(self, text: str, where: str) -> str:
        if len(text) > TEXT:
            raise BackendError(f"{where}: at most {TEXT} characters expected, {len(text)} found")
        self._take(len(text) + 16, where)
        return str(text).encode(errors="replace").decode()  # half a surrogate pair fits in no file

    def _take(self, size: int, where: str) -> None:
        self._left -= size
        if self._left < 0:
            raise BackendError(f"{where}: more than a report can hold was given")


def kind(value: object) -> str:
    """What `value` is, in words."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"


def shown(value: object) -> str:
    """A key in a message: short, and on one line."""
    return ascii(value[:40]) if isinstance(value, str) else kind(value)


def clip(text: str, limit: int = WORDS) -> str:
    """`text`, its middle left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]} … ({len(text) - limit} characters left out) … {text[-tail:]}"


def said(error: BaseException) -> str:
    """An error in words: its type and, where it has one, its message."""
    name = type(error).__name__
    try:
        text = " ".join(clip(str(error)).split()).rstrip(".")
    except Exception:  # noqa: BLE001  # an adapter's own exception may fail to say anything
        text = ""
    return f"{name}: {text}" if text else name
