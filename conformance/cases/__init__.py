"""Generated cases, one module per family."""

from __future__ import annotations

from .captured import FAMILY as CAPTURED
from .family import LEVELS, Family, Level
from .kv_growth import FAMILY as KV_GROWTH
from .ops import FAMILY as OPS

__all__ = ["FAMILIES", "LEVELS", "Family", "Level"]

FAMILIES: dict[str, Family] = {family.name: family for family in (OPS, CAPTURED, KV_GROWTH)}
"""Every family by name, in the order they run."""
