"""A cache of values within a run, limited in count and bytes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

COUNT = 1024
"""Maximum number of values."""
BYTES = 1 << 29
"""Maximum bytes of their data."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """A cache of the latest values, limited to `COUNT` and `BYTES`."""

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
        """Return the value of `key`; None if it is not cached."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def add(self, key: K, value: V, nbytes: int) -> None:
        """Add `value` with `nbytes` of data; nothing is evicted before `trim`."""
        self._bytes += nbytes - self._values.get(key, (value, 0))[1]
        self._values[key] = value, nbytes

    def trim(self, least: int = 1) -> None:
        """Evict the oldest values until the limits are met, but never the latest `least`."""
        while len(self._values) > least and (len(self._values) > COUNT or self._bytes > BYTES):
            _, nbytes = self._values.pop(next(iter(self._values)))
            self._bytes -= nbytes
