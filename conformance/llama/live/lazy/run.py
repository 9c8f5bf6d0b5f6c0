"""How the lazy devices behave during one run of a program, and what was called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .timeline import Access, Moment, Op, Queue, Timeline

DROP = "drop"
"""The failure of a connection to an RPC server."""
SORTS, ASKS = 1, 2
"""`graph_optimize` sorts nodes as the seed says, or `graph_compute` does.

For the latter `graph_optimize` asks for all tensors to stay allocated until the last node.
"""
COUNTED = {
    "alloc": ("alloc_buffer",), "compute": ("graph_compute", "graph_plan_compute"), "init": ("init_backend",),
    "lost": ("graph_compute",),
}  # fmt: skip
"""Failure -> the functions whose calls it counts."""


@dataclass(frozen=True, slots=True)
class Fail:
    """A failure on request."""

    what: str = ""
    """`alloc`, `compute`, `lost`, `memory`, `event`, `init`, `drop`; empty for none."""
    n: int = 1
    """Number of the call that fails, from 1 on, or of the first one (`lost`).

    Bytes for `memory` and `drop`.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """How the devices behave during one run."""

    moments: Sequence[Moment] = ("last",)
    """Moments of the devices in order; the last one also counts for those that follow."""
    seed: int = 0
    refused: frozenset[str] = frozenset()
    """Ops that no device supports."""
    from_host: bool = False
    """Queue copies from the host's memory too, as Vulkan does."""
    offloads: bool = False
    """Run nodes whose weights are on the CPU (`offload_op`)."""
    keeps_graphs: bool = False
    """Run the last graph of a `ggml_cgraph.uid` again, as CUDA and RPC do."""
    shared: bool = False
    """Read and write the host's memory, too, as devices do that share it."""
    blocking: bool = False
    """Have no functions for asynchronous transfers: ggml waits, and calls those of the buffer."""
    largest: int = 0
    """`ggml_backend_buft_get_max_size` in bytes; 0 for no limit."""
    extra: int = 0
    """Bytes behind each product that a device writes.

    It asks for them in `ggml_backend_buft_get_alloc_size`."""
    optimize: int = 0
    """0, `SORTS` or `ASKS`."""
    fail: Fail = Fail()


class Run:
    """The setting of the present run, its timeline, and the calls so far."""

    def __init__(self) -> None:
        self.begin(Setting())

    def begin(self, setting: Setting) -> None:
        """Start a new run."""
        self.setting = setting
        self.timeline = Timeline(setting.seed)
        self.calls: Counter[str] = Counter()
        """Calls of the interface by name."""
        self.failures = 0
        """Calls that failed on request."""

    def fails(self, what: str) -> bool:
        """Return True if this call fails on request."""
        fail = self.setting.fail
        lost = fail.what == "lost" and self.calls["graph_compute"] >= fail.n
        if lost or (fail.what == what and sum(self.calls[name] for name in COUNTED[what]) == fail.n):
            self.failures += 1
            return True
        return False

    def enqueue(
        self,
        queue: Queue,
        call: str,
        accesses: Sequence[Access] = (),
        run: Callable[[], None] | None = None,
        after: Op | None = None,
    ) -> Op:
        """Append an operation to a queue, as `Timeline.enqueue`; a lost device does nothing then."""
        if self.setting.fail.what == "lost" and self.fails("lost"):
            run = None
        return self.timeline.enqueue(queue, call, accesses, run, after)
