"""Generated cases, one module per family."""

from __future__ import annotations

from .alias import FAMILY as ALIAS
from .blocks import FAMILY as BLOCKS
from .captured import FAMILY as CAPTURED
from .decoders import GQA, KV_GROWTH, MULTI_SEQUENCE
from .family import LEVELS, Family, Level
from .ops import FAMILY as OPS
from .random_graphs import FAMILY as RANDOM
from .relations import FAMILY as RELATIONS
from .tbo import FAMILY as TBO
from .weight_placement import FAMILY as WEIGHT_PLACEMENT
from .zoo.family import FAMILY as ZOO

__all__ = ["FAMILIES", "LEVELS", "Family", "Level"]

_ALL = (OPS, CAPTURED, KV_GROWTH, GQA, MULTI_SEQUENCE, WEIGHT_PLACEMENT, BLOCKS, ALIAS, RANDOM, RELATIONS, TBO, ZOO)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""Every family by name, in run order."""
