"""Enumerations of rope."""

from __future__ import annotations

from enum import IntEnum

ROPE_TYPE = IntEnum("ROPE_TYPE", {"NORMAL": 0, "NEOX": 2, "MROPE": 8, "VISION": 24, "IMROPE": 40})
"""`GGML_ROPE_TYPE_*`."""
