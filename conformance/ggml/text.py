"""Texts of others on their way to a terminal: what would move a cursor or forge a line is spelled out.

Ordinary Unicode stays as it is. A text that is printed as data of a format with rules of its own (JSON, XML, a Python
literal) goes there raw and is escaped by that format.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_CONTROL = "\x00-\x1f\x7f-\x9f"
_BREAKS = "\u2028\u2029"
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSEEN = "\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_SURROGATES = "\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_CONTROL}{_BREAKS}{_BIDI}{_UNSEEN}{_SURROGATES}]")


def printable(text: str, limit: int | None = None) -> str:
    r"""`text` as one line that a terminal shows as it stands: controls, line breaks, what turns the direction of text,
    what is not seen, and halves of surrogate pairs become `\xNN`, `\uNNNN` or `\UNNNNNNNN`.

    Args:
        text: from anywhere.
        limit: characters of the result, at most; a longer one ends with `…`.
    """
    shown = _UNPRINTABLE.sub(_escape, text if limit is None else text[: limit + 1])
    return shown if limit is None or len(shown) <= limit else f"{shown[: max(limit - 1, 0)]}…"


def printable_lines(text: str) -> str:
    """`printable` of each line: for a table or a text of ours that holds words of others."""
    return "\n".join(map(printable, text.split("\n")))


def shell(words: Iterable[str]) -> str:
    r"""A command that can be typed, or copied from a terminal: each word quoted, `$'\x1b'` where it is not printable.

    A NUL, which no word of a command can hold, becomes `?`: in a glob, any character.
    """
    return " ".join(map(_word, words))


def _word(word: str) -> str:
    word = word.replace("\0", "?")
    if not _UNPRINTABLE.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_UNPRINTABLE.sub(_octets, escaped)}'"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _octets(match: re.Match[str]) -> str:
    """As bytes, which every shell that knows `$'…'` writes alike; a byte of a path that is no UTF-8 is that byte."""
    c = match[0]
    data = bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else c.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)
