"""Generated cases, one module per family."""

from __future__ import annotations

from collections.abc import Callable

from conformance.installed import Parts

from .family import LEVELS, Family, Level, fault

__all__ = ["FAMILIES", "LEVELS", "Family", "Level", "by_default"]

GROUP = "conformance.families"
"""Entry points of families, each a `Family` under its own name."""
ORDER = (
    "ops", "captured", "kv_growth", "gqa", "multi_sequence", "weight_placement", "blocks", "alias", "random",
    "relations", "tbo", "zoo",
)  # fmt: skip
"""Run order; families of other distributions follow by name."""
FAMILIES: Parts[Family] = Parts(GROUP, "family", fault, ORDER)
"""Every installed family by name, in run order, imported on use."""


def by_default(wanted: Callable[[str], bool] = lambda _: True) -> list[Family]:
    """Return the families that run if none is named: ours that this installation does not lack.

    `wanted` selects by name; no other is imported.
    """
    chosen = (FAMILIES[n] for n in FAMILIES.ours() if wanted(n))
    return [f for f in chosen if not f.lacks()]
