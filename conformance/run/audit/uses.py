"""What a trajectory does with a weight, and the one made-up use that llama.cpp asks about when it loads it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor, is_contiguous, new_tensor
from conformance.ggml.types import F32, I32

MADE_UP_TOKENS = 512
"""`n_seq_tokens` and the rows of every activation in llama.cpp's `weight_buft_supported`."""
MADE_UP_SEQS = 3
"""`n_seqs` there."""
_B = Builder()


def _rows(w: Tensor, *ne: int) -> Tensor:
    """F32 activations [`ne[0]` of `w`, `ne`…]."""
    return new_tensor(F32, w.ne[0], *ne, name="b")


def _ids(*ne: int) -> Tensor:
    return new_tensor(I32, *ne, name="ids")


MADE_UP: dict[str, Callable[[Tensor, int], Tensor]] = {
    "MUL_MAT": lambda w, _: _B.mul_mat(w, _rows(w, MADE_UP_TOKENS, *w.ne[2:])),
    "MUL_MAT_ID": lambda w, used: _B.mul_mat_id(w, _rows(w, used, MADE_UP_TOKENS), _ids(used, MADE_UP_TOKENS)),
    "GET_ROWS": lambda w, _: _B.get_rows(w, _ids(MADE_UP_TOKENS)),
    "ADD": lambda w, _: _B.add(_rows(w, *w.ne[1:]), w),
    "MUL": lambda w, _: _B.mul(_rows(w, *w.ne[1:]), w),
    "DIV": lambda w, _: _B.div(_rows(w), w),
    "ADD_ID": lambda w, used: _B.add_id(_rows(w, used, MADE_UP_TOKENS), w, _ids(used, MADE_UP_TOKENS)),
    "SSM_CONV": lambda w, _: _B.ssm_conv(
        new_tensor(F32, w.ne[0] - 1 + MADE_UP_TOKENS, w.ne[1], MADE_UP_SEQS, name="conv_x"), w
    ),
}
"""Op -> (weight, experts in use) -> the node that `weight_buft_supported` makes up for it. Of ROPE's factors, sinks and
others it asks about an op that is not the one that runs, or about none, so there is nothing to compare."""


def made_up(weight: Tensor, uses: Sequence[Tensor]) -> list[Tensor]:
    """llama.cpp's node for each kind of use that reads the whole weight, with the `op_params` of the real one."""
    found: dict[Hashable, Tensor] = {}
    for node in uses:
        if node.op in MADE_UP and weight in node.src and kind(node, weight) not in found:
            try:
                made = MADE_UP[node.op](weight, node.ne[1])
            except GraphError:  # the weight is on the other side of an ADD than llama.cpp thinks
                continue
            made.op_params, made.flags, made.name = node.op_params, node.flags | FLAG_COMPUTE, "made up"
            found[kind(node, weight)] = made
    return list(found.values())


def kind(node: Tensor, weight: Tensor) -> Hashable:
    """What `supports_op` may tell apart: op, op_params, types, gaps, and every size that is no batch dimension."""
    sources = [s for s in node.src if s is not None]
    at = next(i for i, s in enumerate(node.src) if s is not None and s.root is weight)
    read = sources[0] if node.src[at] is None else node.src[at]
    assert read is not None
    apart = tuple((s.type.name, is_contiguous(s)) for s in sources)
    return (node.op, node.op_params, at, read.ne, read.nb, apart, node.type.name, node.ne[0])


def work(node: Tensor, weight: Tensor) -> Hashable:
    """What makes two nodes equal work, whichever weight they read: op, types, gaps, K and rows."""
    reading = next(s for s in node.src if s is not None and s.root is weight)
    apart = tuple((s.type.name, is_contiguous(s)) for s in node.src if s is not None)
    return (node.op, node.op_params, apart, node.type.name, reading.ne, reading is weight)


def spell(node: Tensor) -> str:
    """`MUL_MAT f32[64, 5, 1, 1]` and what it reads."""
    src = ", ".join(f"{s.type}{list(s.ne)}" for s in node.src if s is not None)
    return f"{node.op} {node.name} of {src}".replace("  ", " ")
