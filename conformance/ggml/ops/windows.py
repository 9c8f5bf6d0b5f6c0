"""Enumerations of windows."""

from __future__ import annotations

from enum import IntEnum

OP_POOL = IntEnum("OP_POOL", {"MAX": 0, "AVG": 1})
"""`enum ggml_op_pool`."""
