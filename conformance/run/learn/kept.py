"""A card on disk while it is measured: after Ctrl-C, a kill or a loss of power the next start goes on with it."""

from __future__ import annotations

from pathlib import Path

from conformance.backend.card import Card, read
from conformance.ggml.errors import UsageError

_SAME = ("suite", "device", "description", "versions", "build")
"""What a card says of where it was measured; with any other of these its entries would be another device's."""


def beside(path: Path) -> Path:
    """Where a card lies that is to be written to `path`, until it is whole."""
    return path.with_name(f"{path.name}.partial")


def resume(path: Path, begun: Card) -> Card:
    """What an earlier start left at `path`, or `begun` where it left nothing.

    UsageError if that file is damaged, or was measured with another device, driver, build or suite than `begun` says.
    """
    if not path.exists():
        return begun
    try:
        card = read(path)
    except UsageError as e:
        raise UsageError(f"{e}; remove it to begin anew") from None
    for name in _SAME:
        was, now = getattr(card, name), getattr(begun, name)
        if was != now:
            raise UsageError(f"{path}: begun with {name} {was}, here is {now}; remove it to begin anew")
    return card
