"""Enumerations of rows."""

from __future__ import annotations

from enum import IntEnum

SORT_ORDER = IntEnum("SORT_ORDER", {"ASC": 0, "DESC": 1})
"""`enum ggml_sort_order`."""
