"""The clock of a measurement: processor time where one thread computes."""

from __future__ import annotations

import time

from conformance.backend.measure import clock_of
from conformance.backend.registry import Spec, create


def test_one_thread_is_timed_in_processor_time() -> None:
    """Waiting does not lengthen what one thread takes; with several threads, or on another device, it counts."""
    clocks = [clock_of(n) for n in (1, 2, None)]
    before = [c() for c in clocks]
    time.sleep(0.2)
    one, two, unknown = (c() - b for c, b in zip(clocks, before, strict=True))
    assert one < 0.1
    assert two >= 0.2
    assert unknown >= 0.2


def test_backends_say_how_many_threads_compute() -> None:
    """`threads=1` of an adapter is one thread; a scheduler, and OpenVINO's own choice, are unknown."""
    said = {}
    for spec in ("ggml", "ggml?threads=2", "ggml?mode=sched", "openvino-stateless", "openvino-stateless?threads=1"):
        backend = create(Spec.parse(spec))
        said[spec] = backend.threads
        backend.close()
    assert list(said.values()) == [1, 2, None, None, 1]
