"""The family `functions`: functions of a build's ggml that no graph of the suite calls.

An id is `functions/WAY@seed`; the modules beside this one have the ways.
"""

from __future__ import annotations

from conformance.llama.live.ways import family

from . import worker

NAME = "functions"

FAMILY = family(
    NAME,
    "a build's constructors of nodes, quantisers, GGUF files, thread pools and training, which no graph calls",
    worker.WAYS,
    worker.__name__,
)
