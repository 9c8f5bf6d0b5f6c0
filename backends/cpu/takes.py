"""Types of sources and result that the reference supports, and the few rules beyond types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conformance.ggml.quants import VEC_DOT_TYPE
from conformance.ggml.quants.write import WRITE
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import BF16, F16, F32, I32, I64, Q8_1, Q8_K, TYPES, GGMLType

from .values import RoundingKernel

Types = frozenset[GGMLType]

FLOAT: Types = frozenset({F32, F16, BF16})
INDEX: Types = frozenset({I32, I64})
DOTS: Types = frozenset({Q8_1, Q8_K})
"""Types of rounded activations only: ggml has no `to_float` and `vec_dot` for them."""
BLOCK: Types = frozenset(t for t in TYPES.values() if t.is_quantized) - DOTS
VALUES: Types = FLOAT | BLOCK
WEIGHTS: Types = frozenset(VEC_DOT_TYPE) - DOTS
BLOCKS_STORED: Types = frozenset(WRITE)
"""Block types in which values can be stored: ggml's CPU has no `from_float` for the others."""
STORED: Types = FLOAT | BLOCKS_STORED | {I32}
ONLY_F32: Types = frozenset({F32})
ONLY_I32: Types = frozenset({I32})
ANY: Types = frozenset(TYPES.values())


@dataclass(frozen=True, slots=True)
class Takes:
    """Types that an op supports: `src` in order (more are refused) and the result."""

    src: tuple[Types, ...] = ()
    dst: Types = FLOAT
    also: Callable[[Tensor], str] | None = None
    """A rule beyond types: returns the reason of a refusal, or ""."""

    def refusal(self, node: Tensor) -> str:
        """Return why the reference cannot compute `node`; empty if it can."""
        for i, s in enumerate(node.src):
            if s is None:
                continue
            if i >= len(self.src):
                return f"takes {len(self.src)} src, src[{i}] is {s}"
            if s.type not in self.src[i]:
                return f"src[{i}] must be one of {_names(self.src[i])}; {s.type} found"
        if node.type not in self.dst:
            return f"dst must be one of {_names(self.dst)}; {node.type} found"
        return self.also(node) if self.also is not None else ""


Table = dict[str, tuple[Takes, RoundingKernel]]
"""Op -> supported types, and its kernel."""

ELEMENT = Takes((FLOAT,))
BINARY = Takes((FLOAT, FLOAT))
MATRIX = Takes((ONLY_F32,), ONLY_F32)


def same_types(node: Tensor) -> str:
    """Return a reason if sources and result differ in type, or ""."""
    other = [s.type for s in node.src if s is not None and s.type is not node.type]
    return f"src and dst must be of one type, {other[0]} and {node.type} found" if other else ""


def _names(types: Types) -> str:
    return ", ".join(t for t in TYPES if TYPES[t] in types)
