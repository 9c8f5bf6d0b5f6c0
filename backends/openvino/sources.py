"""What a node reads, said so that a missing src is an error with the node's name."""

from __future__ import annotations

from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Tensor


def src(node: Tensor, i: int) -> Tensor:
    """`node.src[i]`, which the op cannot do without.

    Raises:
        BackendError: it is absent.
    """
    s = optional(node, i)
    if s is None:
        raise BackendError(f"{node}: src[{i}] is absent, {node.op} needs it")
    return s


def optional(node: Tensor, i: int) -> Tensor | None:
    """`node.src[i]`, None where ggml has NULL."""
    return node.src[i] if i < len(node.src) else None
