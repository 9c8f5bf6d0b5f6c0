"""The family `access`: a ggml device sets, reads, clears and copies bytes of tensors.

An id is `access/WAY@seed`, where WAY is a function of `transfers.WAYS`. After each call every byte of every tensor is
read back, so a stray write is seen too.
"""

from __future__ import annotations

from . import transfers
from .ways import family

NAME = "access"

FAMILY = family(
    NAME,
    "a ggml device sets, reads, clears and copies bytes of tensors",
    tuple(transfers.WAYS),
    transfers.__name__,
)
