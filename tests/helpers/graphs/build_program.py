"""A program of constructor calls, run by the builder as it is drawn; see `ggml_ctypes`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ggml_ctypes import Json

from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.constructors import CONSTRUCTORS, SETTERS
from conformance.ggml.ops.build import Builder, Expansion
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import GLU_OPS, TYPES, UNARY_OPS, GGMLType, type_named

B = Builder()
Ne = tuple[int, int, int, int]

USED = (
    "f32", "f16", "bf16", "i32", "i64", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K",
    "mxfp4",
)  # fmt: skip
"""The types that graphs of language models carry."""
FLOATS = (0.0, 1.0, -1.5, 1e-5, 0.1, 10000.0, 8.0, 1e39, float("inf"), float("nan"), 3.5e-42)


class RefusedError(Exception):
    """The builder raised; the program ends here."""


class Program:
    """Calls, as the real ggml will get them, and what the builder made of each."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)  # noqa: S311  # argument shapes, no secrets
        self.calls: list[list[Json]] = []
        self.made: list[Json] = []
        self.error: str | None = None

    def __call__(self, function: str, *args: Json) -> int:
        """Call `function`; the index of what it made. Raises `RefusedError` where the builder refuses."""
        self.calls.append([function, *args])
        try:
            self.made.append(self._call(function, args))
        except GraphError as e:
            self.error = str(e)
            raise RefusedError from None
        return len(self.made) - 1

    def _call(self, function: str, args: Sequence[Json]) -> Json:
        if function == "build_forward_expand":
            return B.build_forward_expand(*(self.made[i] for i in args))
        if function == "build_forward_select":
            e = Expansion()
            e.select(tuple(self.made[i] for i in args[:-1]), args[-1])
            return e.graph()
        kinds = CONSTRUCTORS.get(function) or SETTERS[function]
        values = [self._argument(k, v) for k, v in zip(kinds, args, strict=True)]
        value = getattr(B, function)(*values)
        return None if function in SETTERS else value

    def _argument(self, kind: str, value: Json) -> Json:
        if kind == "t":
            return None if value is None else self.made[value]
        return type_named(value) if kind == "y" else value

    def answer(self) -> list[Json]:
        """What each call left, in the form the real ggml's answer has."""
        index = {id(t): i for i, t in enumerate(self.made) if isinstance(t, Tensor)}
        return [self._describe(x, index) for x in self.made]

    def _describe(self, x: Json, index: dict[int, int]) -> Json:
        if isinstance(x, Graph):
            return [index.get(id(n), "unseen") for n in x]
        if x is None:
            return None
        src = [self._refer(s, index) for s in x.src]
        while src and src[-1] is None:
            src.pop()
        return {
            "type": x.type.name,
            "ne": list(x.ne),
            "nb": list(x.nb),
            "op": x.op,
            "op_params": list(x.op_params),
            "flags": x.flags,
            "src": src,
            "view_src": self._refer(x.view_src, index),
            "view_offs": x.view_offs,
            "name": x.name,
        }

    def _refer(self, t: Tensor | None, index: dict[int, int]) -> Json:
        if t is None:
            return None
        return index[id(t)] if id(t) in index else self._describe(t, index)

    # what arguments are drawn from: legal as a rule, now and then a little off

    def often(self, p: float = 0.9) -> bool:
        """True with probability `p`."""
        return self.rng.random() < p

    def near(self, n: int) -> int:
        """`n`, now and then another."""
        return n if self.often(0.95) else self.rng.choice((0, 1, n + 1, max(n - 1, 0), 2 * n))

    def type(self, *names: str) -> str:
        """One of `names`, now and then any."""
        return self.rng.choice(names if self.often(0.93) else tuple(TYPES))

    def dim(self) -> int:
        """A small dimension, rarely 0."""
        return self.rng.choice((1, 1, 2, 2, 3, 4, 5, 7)) if self.often(0.99) else 0

    def ne(self, type_: str, n_dims: int = 4) -> Ne:
        """A small shape of whole blocks."""
        ne = [self.dim() * type_named(type_).blck_size] + [self.dim() for _ in range(n_dims - 1)]
        return (*ne, *(1,) * (4 - n_dims))  # type: ignore[return-value]  # four by arithmetic

    def tensor(self, type_: str, *ne: int, layouts: str = "ccgpt") -> int:
        """A tensor of this type and shape: contiguous, a view with gaps, permuted or transposed."""
        full = (*ne, *(1,) * (4 - len(ne)))
        t = type_named(type_)
        if self.rng.random() < 0.2:
            return self.named(self._tensor(t, full, self.rng.choice(layouts)))
        return self._tensor(t, full, self.rng.choice(layouts))

    def _tensor(self, t: GGMLType, ne: tuple[int, ...], layout: str) -> int:
        if layout == "g":
            big = (ne[0] + t.blck_size * self.rng.randint(0, 2), *(n + self.rng.randint(0, 2) for n in ne[1:]))
            a = self("new_tensor_4d", t.name, *big)
            offset = self.rng.choice((0, 0, t.type_size))
            return self("view_4d", a, *ne, *self.made[a].nb[1:], offset)
        if layout == "p":
            axes = list(range(4))
            self.rng.shuffle(axes)
            if t.blck_size > 1:
                axes = [0, *(x for x in axes if x)]
            return self("permute", self("new_tensor_4d", t.name, *(ne[x] for x in axes)), *axes)
        if layout == "t" and t.blck_size == 1:
            return self("transpose", self("new_tensor_4d", t.name, ne[1], ne[0], *ne[2:]))
        return self("new_tensor_4d", t.name, *ne)

    def named(self, i: int) -> int:
        """Tensor `i` with a name, some too long for ggml."""
        name = self.rng.choice(("x", "blk.0.attn_q.weight", "é–α", "n" * 62, "n" * 63, "n" * 64, "long name " * 12))
        self("set_name", i, name)
        return i

    def any(self, n_dims: int = 4, layouts: str = "ccgpt") -> int:
        """A tensor of any used type, small shape and one of `layouts`."""
        type_ = self.type(*USED)
        return self.tensor(type_, *self.ne(type_, n_dims), layouts=layouts)

    def shape(self, i: int) -> Ne:
        """`ne` of tensor `i`."""
        ne: Ne = self.made[i].ne
        return ne

    def params(self, kinds: str) -> list[Json]:
        """Arguments of these kinds, as `ggml_ctypes` letters."""
        draw: dict[str, Callable[[], Json]] = {
            "f": lambda: self.rng.choice(FLOATS),
            "i": lambda: self.rng.choice((0, 1, 2, 3, 7)),
            "u": lambda: self.rng.choice(UNARY_OPS),
            "g": lambda: self.rng.choice(GLU_OPS),
            "y": lambda: self.rng.choice(tuple(TYPES)),
        }
        return [draw[k]() for k in kinds]
