"""A card on disk while it is measured; an interrupted measurement continues from it."""

from __future__ import annotations

from pathlib import Path

from conformance.backend.card import Card, read
from conformance.ggml.errors import UsageError

_SAME = ("suite", "device", "description", "versions", "build")
"""Fields that identify what was measured; entries are not valid for any other value."""


def beside(path: Path) -> Path:
    """Return the path of the partial card for `path`."""
    return path.with_name(f"{path.name}.partial")


def resume(path: Path, begun: Card) -> Card:
    """Return the partial card at `path`, or `begun` if there is none.

    UsageError if the file is damaged, or has another device, driver, build or suite than `begun`.
    """
    if not path.exists():
        return begun
    try:
        card = read(path)
    except UsageError as e:
        raise UsageError(f"{e}; remove it to start again") from None
    for name in _SAME:
        was, now = getattr(card, name), getattr(begun, name)
        if was != now:
            raise UsageError(f"{path}: begun with {name} {was}, here is {now}; remove it to start again")
    return card
