"""Generated cases, one module per family."""

from __future__ import annotations

from .captured import FAMILY as CAPTURED
from .family import LEVELS, Family, Level
from .ops import FAMILY as OPS

__all__ = ["FAMILIES", "LEVELS", "Family", "Level"]

FAMILIES: dict[str, Family] = {family.name: family for family in (OPS, CAPTURED)}
"""Every family by name, in the order they run."""
