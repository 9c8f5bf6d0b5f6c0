"""Emitters of ggml nodes as OpenVINO graphs, one module per topic as in `ggml.ops`.

A topic also has rules for tokens and cells of its ops (`backends.openvino.axes`).
"""

from __future__ import annotations

from backends.openvino.axes import Rule
from backends.openvino.translating.plan import Emitter

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
"""Op -> function from the axes of a node's sources to its own."""
