"""JSON that may come from a stranger, parsed within a given amount of memory."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from conformance.ggml.errors import CaseFileError

from .case import JSON

MAX_DEPTH = 64
"""Of lists and objects in each other; a case needs six, and what a note holds is the recorder's."""


class Memory:
    """A tally of what reading a file takes, kept before it is taken. Costs are CPython's, rounded up."""

    def __init__(self, limit: int, taken: int) -> None:
        self.limit = limit
        self.taken = taken

    def check(self, more: int, field: str) -> None:
        """Refuse to take `more` bytes over the limit.

        Raises:
            CaseFileError: it would be over.
        """
        if self.taken + more > self.limit:
            raise CaseFileError(
                field, f"would take more than the {self.limit} bytes of memory that a file of this size may take"
            )

    def keep(self, more: int, field: str) -> None:
        """Take `more` bytes for as long as the file's content is held."""
        self.check(more, field)
        self.taken += more


def parse(raw: memoryview, memory: Memory, field: str) -> JSON:
    """JSON in ASCII: no NaN, no number that a float64 cannot hold, no key twice.

    Raises:
        CaseFileError: names `field` and says which of these, or where it is no JSON.
    """
    memory.check(5 * len(raw), field)
    try:
        text = str(raw, "ascii")
    except UnicodeDecodeError:
        raise CaseFileError(
            field, "JSON in ASCII (other characters as \\u escapes) expected, other bytes found"
        ) from None
    memory.check(_cost(text), field)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except CaseFileError as e:
        raise CaseFileError(field, e.message) from None
    except json.JSONDecodeError as e:
        raise CaseFileError(field, f"no JSON at character {e.pos}: {e.msg}") from None
    except RecursionError:
        raise CaseFileError(field, f"lists and objects in each other deeper than {MAX_DEPTH}") from None
    except ValueError as e:  # an integer of thousands of digits
        raise CaseFileError(field, f"no JSON that can be read: {e}") from None


def weigh(value: JSON, field: str) -> int:
    """Bytes of memory that parsed JSON holds, about.

    Raises:
        CaseFileError: it is deeper than `MAX_DEPTH`.
    """
    total = 0
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[JSON] = []
        for v in level:
            if isinstance(v, dict):
                total += 64 + 160 * len(v) + sum(map(len, v))
                below.extend(v.values())
            elif isinstance(v, list):
                total += 88 + 8 * len(v)
                below.extend(v)
            else:
                total += 64 + len(v) if isinstance(v, str) else 32
        if not below:
            return total
        level = below
    raise CaseFileError(field, f"lists and objects in each other deeper than {MAX_DEPTH}")


def _cost(text: str) -> int:
    """An upper bound of the memory that parsing takes, the text itself included."""
    lists, objects, entries = text.count("["), text.count("{"), text.count(":")
    values = text.count(",") + lists + objects
    texts = max(0, text.count('"') // 2 - entries)
    width = 4 if "\\u" in text else 1  # one astral character makes a whole str four bytes wide
    return (1 + width) * len(text) + 88 * lists + 240 * objects + 160 * entries + 40 * values + 64 * texts


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CaseFileError("", f"key {key[:40]!a} stands twice in an object")
            seen.add(key)
    return found


def _constant(name: str) -> NoReturn:
    raise CaseFileError("", f"a finite number expected, {name} found")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CaseFileError("", f"a number that float64 can hold expected, {text[:40]} found")
    return value
