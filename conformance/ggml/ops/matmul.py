"""Enumerations of matmul."""

from __future__ import annotations

from enum import IntEnum

PREC = IntEnum("PREC", {"DEFAULT": 0, "UNDEFINED": 0, "F32": 10, "BF16": 15, "F16": 20, "Q8": 30, "Q4": 40})
"""`enum ggml_prec`."""

OP_HINT = IntEnum("OP_HINT", {"NONE": 0, "SRC0_IS_HADAMARD": 1})
"""`enum ggml_op_hint`."""

TRI_TYPE = IntEnum("TRI_TYPE", {"UPPER_DIAG": 0, "UPPER": 1, "LOWER_DIAG": 2, "LOWER": 3})
"""`enum ggml_tri_type`: what is kept."""
