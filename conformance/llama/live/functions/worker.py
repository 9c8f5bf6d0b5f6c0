"""Worker service of the family `functions` (`ways`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from conformance.ggml.lib.library import Library
from conformance.llama.live.ways import reply, serve

from . import constructors, files, pools, quantisers, training

PLAY: Mapping[Sequence[str], Callable[[Library, str, int], None]] = {
    constructors.WAYS: lambda library, way, _: constructors.play(library, way),
    quantisers.WAYS: quantisers.play,
    pools.WAYS: pools.play,
    training.WAYS: training.play,
    files.WAYS: lambda library, way, _: files.play(library, way),
}
"""Ways -> the function that plays one, from library, way and seed."""
WAYS = tuple(way for turn in zip_longest(*PLAY) for way in turn if way)
"""All ways, in turns, so that a run without much time plays some of each module."""


def play(library: Library, _device: str, way: str, seed: int) -> dict[str, Any]:
    """Play a way."""
    function = next(function for ways, function in PLAY.items() if way in ways)
    return reply(lambda: function(library, way, seed))


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads must not spin where others have work
    serve(play)
