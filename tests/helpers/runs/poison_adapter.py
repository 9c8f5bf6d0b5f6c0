"""The real ggml in an adapter that one case poisons, or that fails by chance; found by its entry point.

`poison?at=DIGEST&cases=N&how=WAY` dies at the N-th case after the one with that digest, or before that where a damaged
heap is found out. `poison?odds=P&seed=S&draws=FILE` fails each case with probability P: FILE holds a byte for each draw
so far, of whatever process.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from backends.ggml import GgmlBackend
from conformance.backend.interface import Session
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendError

if TYPE_CHECKING:  # every process of the adapter would pay for it
    import pytest

C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes, C.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
HELD = 4096
"""Bytes of the block that loses its header."""


def _abort() -> Callable[[], object]:
    """Nothing but the end."""
    return os.abort


def _heap() -> Callable[[], object]:
    """Write below a block of the heap, over its size; who frees it finds that out."""
    block = C.malloc(HELD)
    ctypes.memset(block - 8, 0xA5, 8)
    return lambda: C.free(block)


def _fault() -> Callable[[], object]:
    """Keep a pointer to nowhere."""
    return lambda: ctypes.string_at(16)


WAYS = {"abort": _abort, "heap": _heap, "fault": _fault}
"""What the poison leads to at the next case, and gives: the end that comes of it."""


class Poison(GgmlBackend):
    """ggml's CPU, poisoned or flaky.

    Args:
        at: the digest of the case that poisons; empty for none.
        cases: how many cases later the process dies.
        how: of `WAYS`.
        odds: the probability that a case fails.
        seed: of the draws.
        draws: the file that counts them.
        most: cases of a process, the last of which ends it; 0 for no end.
    """

    delegates = ("ggml",)
    batch = 1

    def __init__(
        self,
        at: str = "",
        cases: str = "1",
        how: str = "abort",
        odds: str = "0",
        seed: str = "0",
        draws: str = "",
        most: str = "0",
    ) -> None:
        super().__init__()
        self._at, self._how, self._left = at, how, int(cases)
        self._odds, self._seed, self._draws = float(odds), seed, Path(draws)
        self._poisoned, self._more = False, int(most)
        self._end: Callable[[], object] | None = None

    def open(self, case: Case) -> Session:
        """Its session; counts cases since the poison, or draws."""
        self._more -= 1
        if not self._more:
            os.abort()
        if self._poisoned:
            self._end = self._end or WAYS[self._how]()
            self._left -= 1
            if not self._left:
                self._end()
                os.abort()  # who frees a damaged block may live on
        self._poisoned |= digest(case.id) == self._at
        if self._odds and self._draw() < self._odds:
            raise BackendError("no luck")
        return super().open(case)

    def _draw(self) -> float:
        with self._draws.open("ab") as file:
            file.write(b".")
            return random.Random(f"{self._seed} {file.tell()}").random()  # noqa: S311  # no secret


def digest(case_id: str) -> str:
    """What the option `at` takes for a case."""
    return sha256(case_id.encode()).hexdigest()[:16]


def poisoned(case_id: str, cases: int, how: str = "abort") -> Spec:
    """The adapter that dies `cases` after one."""
    return Spec("poison", (("at", digest(case_id)), ("cases", str(cases)), ("how", how)))


def flaky(odds: float, seed: int, draws: Path) -> Spec:
    """The adapter that fails by chance; `draws` is a file that no other has."""
    return Spec("poison", (("odds", str(odds)), ("seed", str(seed)), ("draws", str(draws))))


@contextmanager
def installed(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """While this lasts, the adapter is installed, here and in workers, by an entry point in `folder`."""
    from planted_adapter import installed as planted  # noqa: PLC0415  # workers import this module, and no pytest

    with planted(folder, patch, "poison", "poison_adapter:Poison", __file__):
        yield
