"""What a run keeps to use again, within bounds."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

COUNT = 1024
"""Values."""
BYTES = 1 << 29
"""Of their data."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """The latest values, up to `COUNT` of them and up to `BYTES`."""

    def __init__(self) -> None:
        self._values: dict[K, tuple[V, int]] = {}
        self._bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __getitem__(self, key: K) -> V:
        return self._values[key][0]

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value of `key`; None if there is none any more."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def add(self, key: K, value: V, nbytes: int) -> None:
        """Keep `value`, whose data are `nbytes`; nothing is given up for it before `trim`."""
        self._bytes += nbytes - self._values.get(key, (value, 0))[1]
        self._values[key] = value, nbytes

    def trim(self, least: int = 1) -> None:
        """Give up the oldest values until the rest is within the bounds, but never one of the latest `least`."""
        while len(self._values) > least and (len(self._values) > COUNT or self._bytes > BYTES):
            _, nbytes = self._values.pop(next(iter(self._values)))
            self._bytes -= nbytes
