"""Emitters: what adds a ggml node to an OpenVINO graph; one module per topic, as in `conformance.ggml.ops`."""

from __future__ import annotations

from conformance.backend.translating.plan import Emitter

from . import attention, elementwise, matmul, recurrent, rope, rows, views

EMITTERS: dict[str, Emitter] = {
    op: emitter
    for topic in (attention, elementwise, matmul, recurrent, rope, rows, views)
    for op, emitter in topic.EMITTERS.items()
}
"""Op -> its emitter."""
