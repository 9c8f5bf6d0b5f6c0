"""Escape untrusted text for a terminal: characters that move the cursor or forge a line.

Ordinary Unicode is unchanged. Text for a format with its own rules (JSON, XML, a Python literal) is not escaped here
but by that format.
"""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Iterable
from pathlib import Path

_CONTROL = "\x00-\x1f\x7f-\x9f"
_BREAKS = "\u2028\u2029"
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSEEN = "\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_SURROGATES = "\ud800-\udfff"
MAX_MESSAGE = 2000
"""Maximum characters of an error's message, most of them from its beginning."""
_UNPRINTABLE = re.compile(f"[{_CONTROL}{_BREAKS}{_BIDI}{_UNSEEN}{_SURROGATES}]")


def printable(text: str, limit: int | None = None) -> str:
    r"""Return `text` as one line for a terminal, cut to `limit` characters (ending with `…`).

    Controls, line breaks, bidirectional and invisible characters and lone surrogates become `\xNN`, `\uNNNN` or
    `\UNNNNNNNN`.
    """
    shown = _UNPRINTABLE.sub(_escape, text if limit is None else text[: limit + 1])
    return shown if limit is None or len(shown) <= limit else f"{shown[: max(limit - 1, 0)]}…"


def printable_lines(text: str) -> str:
    """Apply `printable` to each line, for a table or text that quotes untrusted text."""
    return "\n".join(map(printable, text.split("\n")))


def shell(words: Iterable[str]) -> str:
    r"""Return a command line to type or copy; unprintable words are quoted as `$'\x1b'`.

    A NUL, which no argument can contain, becomes `?`: any character, in a glob.
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
    r"""Escape a character's bytes for `$'…'`; a surrogate is one byte of a non-UTF-8 path."""
    c = match[0]
    data = bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else c.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)


def clip(text: str) -> str:
    """Cut the middle of `text` if it is longer than `MAX_MESSAGE`."""
    if len(text) <= MAX_MESSAGE:
        return text
    tail = MAX_MESSAGE // 4
    return f"{text[: MAX_MESSAGE - tail]} … ({len(text) - MAX_MESSAGE} characters left out) … {text[-tail:]}"


def error_text(error: BaseException) -> str:
    """Return an error's type and, if it has one, its message."""
    name = type(error).__name__
    try:
        text = " ".join(clip(str(error)).split()).rstrip(".")
    except Exception:  # noqa: BLE001  # an adapter's own exception may fail to format
        text = ""
    return f"{name}: {text}" if text else name


def placed(error: BaseException) -> str:
    """Return an error's text with the file and line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return error_text(error) + "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in last)
