"""A family's list of decoders from a table of patterns, smallest model first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod

from conformance.suite.family import LEVELS, Level
from conformance.suite.ops.grammar import expand, read_keys

from .grammar import cparams_of, hparams_of, keys_of, split_arch, with_seed
from .kv import Cache
from .tensors import weight_shapes


def ids_by_size(name: str, table: Mapping[Level, Sequence[str]]) -> Callable[[Level], Sequence[str]]:
    """`Family.ids` of a family of decoders.

    Args:
        name: the family.
        table: level -> ids without family and seed that it adds; `{a|b}` stands for both.
    """

    @cache
    def ids(level: Level) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for each in LEVELS[: LEVELS.index(level) + 1]:
            bodies = [body for pattern in table[each] for body in expand(pattern)]
            found |= dict.fromkeys(with_seed(name, body) for body in sorted(bodies, key=elements))
        return tuple(found)

    return ids


def elements(body: str) -> int:
    """How many elements weights and caches have together.

    Raises:
        UsageError: as `make`.
    """
    arch, keys_text = split_arch(body)
    values, _ = read_keys(body, keys_text, keys_of(arch))
    h, c = hparams_of(arch, values), cparams_of(values)
    return sum(prod(ne) for _, ne in weight_shapes(h).values()) + sum(prod(t.ne) for t in Cache(h, c).tensors())
