"""The stateful model that `NPUW_LLM` splits: token ids, an attention mask, positions and beams in, logits out.

It is the fused form of `openvino-stateful` with other inputs: the number of tokens is that of the token ids, and the
causal mask is made in the model. OpenVINO finds inputs, output and caches by the names that Hugging Face models have.
"""

from __future__ import annotations

from collections.abc import Callable

import openvino.opset15 as o
from openvino import Model, Node, PartialShape, Type

from backends.openvino.emit import fused
from backends.openvino.nodes import Constants, Shape, Value, reshape, transpose
from backends.openvino.sources import src
from backends.openvino.state.walk import StateWalk
from backends.openvino.walk import ROUND, Compressed, Weights
from conformance.backend.translating.plan import Plan
from conformance.backend.translating.sym import Const, Expr, Symbol, expr_of
from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Tensor

LOWEST = -65504.0
"""What hides a cell: the lowest number of float16, which an NPU computes in."""
OPS: dict[str, Callable[[Value, Value], Node]] = {
    "+": o.add, "-": o.subtract, "*": o.multiply, "//": o.divide, "%": o.floor_mod,
}  # fmt: skip


class TokenConstants(Constants):
    """Symbols are computed in the model, from the shape of the token ids; there is one, the number of tokens."""

    def __init__(self, tokens: Node) -> None:
        super().__init__()
        self._tokens = tokens
        self._made: dict[Expr, Node] = {}

    def _symbol(self, n: int) -> Node:
        return self._expression(expr_of(n))

    def _expression(self, e: Expr) -> Node:
        if e not in self._made:
            self._made[e] = self._emit(e)
        return self._made[e]

    def _emit(self, e: Expr) -> Node:
        if isinstance(e, Const):
            return self.i64(e.n)
        if isinstance(e, Symbol):
            return self._tokens
        return OPS[e.op](self._expression(e.left), self._expression(e.right))


def _input(name: str, type_: Type, rank: int) -> Node:
    node = o.parameter(PartialShape([-1] * rank), type_)
    node.output(0).set_names({name})
    node.set_friendly_name(name)
    return node


class LlmWalk(StateWalk):
    """The walk of a decoder in its `Form`, traced over one symbol: the number of tokens."""

    def __init__(
        self,
        plan: Plan,
        leaves: tuple[Tensor, Tensor],
        weights: Weights,
        compressed: Compressed,
    ) -> None:
        super().__init__(plan, weights, compressed)
        self._ids, self._mask_in = _input("input_ids", Type.i64, 2), _input("attention_mask", Type.i64, 2)
        self._positions, self._beam = _input("position_ids", Type.i64, 2), _input("beam_idx", Type.i32, 1)
        tokens = o.gather(o.shape_of(self._ids), o.constant([1], Type.i64), o.constant(0, Type.i64))
        self.c = TokenConstants(tokens)
        self._ports = dict(zip(leaves, (self._ids, self._positions), strict=True))
        self._named: dict[Tensor, str] = {}
        for layer, a in enumerate(self._logs[0].attentions):
            for cache, kind in ((a.k, "key"), (a.v, "value")):
                if self._named.setdefault(cache, f"{layer}.{kind}") != f"{layer}.{kind}":
                    raise BackendError(f"{cache}: is attended to in two layers")
        self._laid[0] = fused.Mask(self._causal(tokens), None)

    def _causal(self, tokens: Node) -> Value:
        """float32 (1, 1, tokens, past + tokens): a token sees itself and what stands before it, as far as it is there.

        OpenVINO's static models have the tokens at the end of the keys, and say in the attention mask which are there.
        """
        c = self.c
        total = o.squeeze(o.gather(o.shape_of(self._mask_in), c.i64(1), c.axis(0)), c.axis(0))
        first = o.subtract(total, o.squeeze(tokens, c.axis(0)))
        keys = o.unsqueeze(o.range(c.axis(0), total, c.axis(1), Type.i64), c.axis(0))
        queries = o.unsqueeze(o.range(first, total, c.axis(1), Type.i64), c.axis(1))
        there = o.unsqueeze(o.convert(self._mask_in, Type.boolean), c.i64(1, 2))
        seen = o.logical_and(o.unsqueeze(o.less_equal(keys, queries), c.i64(0, 1)), there)
        return o.select(seen, c.f32(0.0), c.f32(LOWEST))

    def _parameter(self, t: Tensor, form: str, dtype: str, shape: Shape) -> Value:
        if t not in self._ports:
            return super()._parameter(t, form, dtype, shape)
        flat = o.reshape(o.convert(self._ports[t], Type.i32), self.c.i64(*[1] * (len(shape) - 1), -1), False)
        return self.c.shaped(flat, shape)

    def _append(self, node: Tensor) -> None:
        cache, rows = node.root, src(node, 0)
        log = self._logs[0]
        new = reshape(self.c, self.number(rows), (1, log.tokens, log.heads, log.head_size))
        if cache.type in ROUND:
            new = self.c.shaped(ROUND[cache.type](self.c, new), (1, log.tokens, log.heads, log.head_size))
        new = transpose(self.c, new, (0, 2, 1, 3))
        where = self._named[cache]
        name = f"past_key_values.{where}present.{where}"
        self._whole[cache], assign = fused.remembered(self.c, new, self._beam, name, int(log.heads), int(log.head_size))
        self.sinks.append(assign)

    def decoder(self, logits: Tensor) -> Model:
        """What `run` emitted, `logits` its one result: (batch, tokens, vocabulary), straight from a product.

        OpenVINO cuts the model before that product and makes a model of its own of it.

        Raises:
            BackendError: the logits are no product.
        """
        value = self.number(logits)
        node = value if isinstance(value, Node) else value.get_node()
        while node.get_type_name() == "Reshape":
            node = node.input_value(0).get_node()
        if node.get_type_name() != "MatMul":
            raise BackendError(f"{logits}: a MatMul expected at the end, a {node.get_type_name()} found")
        x, weight = node.input_value(0), node.input_value(1)
        width = logits.src[1]
        assert width is not None  # of the product
        rows = o.reshape(x, self.c.i64(1, -1, int(width.ne[0])), False)
        result = o.result(o.matmul(rows, weight, False, True))
        result.output(0).set_names({"logits"})
        inputs = [self._ids, self._mask_in, self._positions, self._beam]
        return Model(results=[result], sinks=self.sinks, parameters=inputs, name="decoder")
