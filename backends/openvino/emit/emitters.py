"""The table: op -> emitter."""

from __future__ import annotations

from conformance.backend.translating.plan import Emitter

from . import attention, elementwise, matmul, matrices, plain, recurrent, reduce, rope, rows

EMITTERS: dict[str, Emitter] = {
    **elementwise.EMITTERS,
    **reduce.EMITTERS,
    **rows.EMITTERS,
    **matmul.EMITTERS,
    **rope.EMITTERS,
    **recurrent.EMITTERS,
    **matrices.EMITTERS,
    **plain.EMITTERS,
    **attention.EMITTERS,
}
