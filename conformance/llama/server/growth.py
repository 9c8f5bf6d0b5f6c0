"""Measures how much memory of a server grows with each request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import psutil

from conformance.case.streams import Stream
from conformance.ggml.errors import UnavailableError
from conformance.process.memory import resident

from .client import Server

REQUESTS, ROUNDS = 50, 10
"""Requests of a round, and rounds that are measured after one to warm up."""
FEWEST = 4
"""Rounds without which nothing is measured."""
LENGTHS = (24, 32, 40, 48)
"""Lengths of the prompts, which come again and again: a server may keep each once."""
TOKENS = 4
LIMIT = 1024
"""Most bytes for each request: a server whose caches are full takes none."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How memory grew."""

    bytes: float
    """Growth for each request: the least but one of the rounds, since caches grow in few."""
    requests: int
    held: int
    """Resident bytes at the end."""

    @property
    def over(self) -> bool:
        """True if it grows with each request."""
        return self.bytes > LIMIT

    def sentence(self) -> str:
        """Return the measurement in one sentence."""
        most = f", at most {LIMIT:,} expected" if self.over else ""
        return f"memory grows by {self.bytes:,.0f} bytes per request in {self.requests} requests{most}"


def listener(port: int) -> int | None:
    """Return the process that listens on a TCP port of this machine; None if unknown."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    return next((c.pid for c in found if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port), None)


def measure(server: Server, pid: int, n_vocab: int, seconds: float = 60.0) -> Growth:
    """Ask a server again and again, for at most `seconds`, and read its memory.

    Raises:
        UnavailableError: the process is not known or too slow, or as `Server.complete`.
    """
    prompts = [Stream("server", f"growth {n}").integers(n, 0, n_vocab).tolist() for n in LENGTHS]
    sizes, end = list[int](), time.monotonic() + seconds
    while len(sizes) <= ROUNDS and time.monotonic() < end:
        for i in range(REQUESTS):
            server.complete(prompts[i % len(prompts)], TOKENS, cache_prompt=bool(i % 3))
            if time.monotonic() >= end:
                break
        held = resident(pid)
        if held is None:
            raise UnavailableError(f"memory was not measured: process {pid} cannot be read")
        sizes.append(held)
    if len(sizes) < FEWEST:
        raise UnavailableError(f"memory was not measured: {REQUESTS * FEWEST} requests take over {seconds:g} s")
    each = sorted(b - a for a, b in pairwise(sizes))
    return Growth(max(0, each[1]) / REQUESTS, REQUESTS * len(sizes), sizes[-1])
