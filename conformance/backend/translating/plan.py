"""What is translated and what comes of it: a plan, the memory it works on, the program that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, computes

Role = Literal["input", "weight", "cache"]
"""What a leaf is to a program: bound at every run, part of the program, or state that some step writes."""
Emitter = Callable[[Any, Tensor], None]
"""`f(context, node)`: add to the translation what computes `node`, and store the value in the context."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One graph and what a translation of it may depend on; nothing else may reach a program."""

    graph: Graph
    tensors: list[Tensor]
    index: dict[Tensor, int]
    """Tensor -> its place in `tensors`: the name under which a program knows it, so that it serves equal graphs."""
    roles: dict[Tensor, Role]
    """Leaves that own their bytes -> what they are."""
    outputs: tuple[Tensor, ...]
    key: Hashable
    """Equal for two plans exactly when one program serves both."""
    caches: tuple[Tensor, ...] = field(init=False)
    """Tensors whose role that is, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "caches", tuple([t for t, r in self.roles.items() if r == "cache"]))

    def settled(self) -> None:
        """To be called when all has been decided that depends on numbers, before it is compiled.

        Raises:
            BackendError: what was decided does not hold for the graph that the program is wanted for.
        """

    def computed(self) -> Iterator[Tensor]:
        """The nodes that compute something, in order.

        Raises:
            BackendError: one of them reads a tensor that its graph leaves uncomputed.
        """
        dead = {n for n in self.graph if n.view_src is None and n.op not in VIEW_OPS and not n.flags & FLAG_COMPUTE}
        for node in self.graph:
            if not computes(node):
                continue
            for s in node.src:
                if s is not None and s.root in dead:
                    raise BackendError(f"{node}: reads {s}, which the graph does not compute")
            yield node


class Snapshot:
    """What a graph was when it was looked at: who builds graphs may build the next one in the memory of the last."""

    __slots__ = ("_held", "_nodes", "_tensors")

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(graph.nodes)
        self._tensors = graph.tensors()
        self._held = list(map(_FIELDS, self._tensors))

    def shows(self, graph: Graph) -> bool:
        """Whether `graph` is still the same, field by field; 0.1 ms for 700 tensors."""
        return self._nodes == graph.nodes and self._held == list(map(_FIELDS, self._tensors))


_FIELDS = attrgetter("src", "ne", "nb", "view_offs", "op", "op_params", "type", "flags", "view_src")


class Memory(ABC):
    """Where a session's persistent tensors live between steps."""

    @abstractmethod
    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor; `data` stays the caller's."""

    @abstractmethod
    def read(self, tensor: Tensor) -> Bytes:
        """The bytes of a persistent tensor as ggml would hold them."""

    def look(self, tensor: Tensor) -> Bytes:
        """As `read`, for who changes nothing: perhaps not a copy."""
        return self.read(tensor)


AnyMemory: TypeAlias = Any
"""The `Memory` of the adapter's own kind that its programs work on."""


class Program(ABC):
    """A compiled plan, or the plans of one template."""

    def bind(self, bindings: tuple[int, ...]) -> None:  # noqa: B027  # most programs serve one graph and have no symbols
        """Let the next runs be for these values of the template's symbols."""

    @abstractmethod
    def run(self, plan: Plan, memory: AnyMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Run once: read caches from `memory`, leave their new contents there, and give `plan.outputs` packed.

        Args:
            plan: the one it was made from, or another of an equal key.
            memory: what the backend's `memory` made.
            inputs: leaf -> its bytes.

        Raises:
            BackendError: the device failed; its words are in the message.
        """
