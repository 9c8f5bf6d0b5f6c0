"""Emitters: what adds a ggml node to an OpenVINO graph; one module per topic, as in `conformance.ggml.ops`.

Beside its emitters a topic says how tokens and cells go through its ops (`backends.openvino.axes`).
"""

from __future__ import annotations

from backends.openvino.axes import Rule
from conformance.backend.translating.plan import Emitter

from . import attention, elementwise, matmul, media, recurrent, rope, rows, views

EMITTERS: dict[str, Emitter] = {
    op: emitter
    for topic in (attention, elementwise, matmul, media, recurrent, rope, rows, views)
    for op, emitter in topic.EMITTERS.items()
}
"""Op -> its emitter."""
AXES: dict[str, Rule] = {
    op: rule for topic in (attention, elementwise, matmul, rope, rows, views) for op, rule in topic.AXES.items()
}
"""Op -> the axes of a node from those of its sources."""
