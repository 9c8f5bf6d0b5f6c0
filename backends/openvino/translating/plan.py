"""Plans, programs and memory of translating backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, computes

Role = Literal["input", "weight", "cache"]
"""Role of a leaf: bound at every run, compiled as a constant, or state that is written."""
Emitter = Callable[[Any, Tensor], None]
"""`f(context, node)`: translate `node`, and store its value in the context."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph with everything on which its translation may depend."""

    graph: Graph
    tensors: list[Tensor]
    index: dict[Tensor, int]
    """Tensor -> its index in `tensors`; programs use the index, so that they serve equal graphs."""
    roles: dict[Tensor, Role]
    """Leaf that owns its bytes -> role."""
    outputs: tuple[Tensor, ...]
    key: Hashable
    """Key that is equal for two plans exactly if one program serves both."""
    originals: Sequence[Tensor] = ()
    """The session's tensors, in the order of `tensors`, which are copies in a symbolic plan."""
    caches: tuple[Tensor, ...] = field(init=False)
    """Tensors with the role `cache`, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "caches", tuple([t for t, r in self.roles.items() if r == "cache"]))
        object.__setattr__(self, "originals", self.originals or self.tensors)

    def computed(self) -> Iterator[Tensor]:
        """Yield computing nodes in order; BackendError if one reads a tensor that is not computed."""
        dead = {n for n in self.graph if n.view_src is None and n.op not in VIEW_OPS and not n.flags & FLAG_COMPUTE}
        for node in self.graph:
            if not computes(node):
                continue
            for s in node.src:
                if s is not None and s.root in dead:
                    raise BackendError(f"{node}: reads {s}, which the graph does not compute")
            yield node


class Memory(ABC):
    """Storage of a session's persistent tensors between steps."""

    @abstractmethod
    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor; `data` stays the caller's."""

    @abstractmethod
    def read(self, tensor: Tensor) -> Bytes:
        """Return the bytes of a persistent tensor as ggml would store them."""

    def look(self, tensor: Tensor) -> Bytes:
        """Return the bytes as `read`, but perhaps not a copy: the caller must not write to it."""
        return self.read(tensor)


AnyMemory: TypeAlias = Any
"""Subclass of `Memory` defined by the adapter."""
AnyEmitted: TypeAlias = Any
"""A plan as nodes of a model, not yet compiled; defined by the adapter."""


class Program(ABC):
    """A compiled plan, or the plans of one template."""

    def bind(self, bindings: tuple[int, ...]) -> None:  # noqa: B027  # most programs serve one graph and have no symbols
        """Use these values of the template's symbols in the next runs."""

    @abstractmethod
    def run(self, plan: Plan, memory: AnyMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Run `plan`, the compiled one or one with an equal key, once on the bytes of leaves.

        Updates the caches in `memory` and returns `plan.outputs` packed. BackendError, with the device's message, if it
        failed.
        """
