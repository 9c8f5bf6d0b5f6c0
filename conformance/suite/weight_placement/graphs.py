"""Small graphs that read a tensor of a type in an unusual way: `KIND-w=TYPE,d=ROW,n=TOKENS`.

A backend that packs what it takes for weights must see which of them are read through a view, read twice, made by the
graph itself, or handed in anew each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.build_graph import Expansion
from conformance.ggml.quants import vec_dot_type
from conformance.ggml.tensor import FLAG_INPUT, Bytes, Tensor, nelements, new_tensor
from conformance.ggml.types import F32, I32, I64, TYPES, GGMLType
from conformance.suite.decoder.weights import random_bytes
from conformance.suite.ops.grammar import Key, count, read_keys, word

GENERATOR = 1
"""Raise it when any id's bytes change."""

KEYS: dict[str, Key] = {"w": word("q4_0", *TYPES), "d": count(64), "n": count(3)}
ROWS = 48
"""Rows of the weight."""
EXPERTS = 4
_B = Builder()


@dataclass(slots=True)
class Bench:
    """A case in the making."""

    id: str
    w: GGMLType
    d: int
    n: int
    k: int = 0
    """The step."""
    persistent: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[Tensor, Bytes] = field(default_factory=dict)
    gf: Expansion = field(default_factory=Expansion)

    def weight(self, name: str, type_: GGMLType, *ne: int) -> Tensor:
        """A persistent tensor, the same in every step."""
        if name not in self.persistent:
            self.persistent[name] = new_tensor(type_, *ne, name=name)
        return self.persistent[name]

    def w0(self) -> Tensor:
        """The weight in question."""
        return self.weight("w.weight", self.w, self.d, ROWS)

    def input(self, name: str, type_: GGMLType, *ne: int) -> Tensor:
        """A leaf of order 1, filled for each step."""
        t = new_tensor(type_, *ne, name=name, flags=FLAG_INPUT)
        self.inputs[t] = random_bytes(type_, self.stream(name), nelements(t), 1.0)
        return t

    def rows(self, name: str, type_: GGMLType, below: int, *ne: int) -> Tensor:
        """A leaf of distinct row numbers in each of its rows."""
        t = new_tensor(type_, *ne, name=name, flags=FLAG_INPUT)
        drawn = self.stream(name).choice(nelements(t) // t.ne[0], below, t.ne[0])
        self.inputs[t] = np.ascontiguousarray(drawn.astype(type_.dtype)).view(np.uint8).reshape(-1)
        return t

    def stream(self, name: str) -> Stream:
        """Of an input of this step."""
        return Stream(self.id, f"{name} {self.k}")

    def x(self) -> Tensor:
        """Activations."""
        return self.input("x", F32, self.d, self.n)


def _part(b: Bench) -> Tensor:
    w = b.w0()
    return _B.view_2d(w, b.d, ROWS - 16, w.nb[1], 16 * w.nb[1])


def _rows(b: Bench) -> Tensor:
    """A weight read through a view that starts at its 17th row."""
    return _B.mul_mat(_part(b), b.x())


def _parts(b: Bench) -> Tensor:
    """A weight read whole, and reshaped to three matrices."""
    x = b.x()
    whole = _B.mul_mat(b.w0(), x)
    split = _B.mul_mat(_B.reshape_3d(b.w0(), b.d, ROWS // 3, 3), _B.repeat_4d(x, b.d, b.n, 3, 1))
    return _B.concat(whole, _B.cont_2d(_B.permute(split, 0, 2, 1, 3), ROWS, b.n), 0)


def _both(b: Bench) -> Tensor:
    """A weight whose rows are looked up and that multiplies, as a tied embedding."""
    rows = _B.get_rows(b.w0(), b.rows("ids", I32, ROWS, b.n))
    return _B.mul_mat(b.w0(), _B.add(rows, b.x()))


def _input(b: Bench) -> Tensor:
    """What looks like a weight is handed in anew for each graph."""
    return _B.mul_mat(b.input("w", b.w, b.d, ROWS), b.x())


def _computed(b: Bench) -> Tensor:
    """What looks like a weight is made by the graph."""
    made = _B.cast(b.input("made", F32, b.d, ROWS), b.w)
    return _B.mul_mat(made, b.x())


def _activations(b: Bench) -> Tensor:
    """Activations of the type that the weight's products are made in."""
    return _B.mul_mat(b.w0(), _B.cast(b.x(), vec_dot_type(b.w)))


def _cache(b: Bench) -> Tensor:
    """A quantised tensor that lives across graphs and is written: no weight."""
    cache = b.weight("cache_k_l0", b.w, b.d, ROWS)
    b.gf.expand(_B.set_rows(cache, b.input("new", F32, b.d, b.n), b.rows("idxs", I64, ROWS, b.n)))
    return _B.mul_mat(_B.view_2d(cache, b.d, 32, cache.nb[1], 0), b.x())


def _experts(b: Bench) -> Tensor:
    """A matrix of each expert in one weight."""
    w = b.weight("w_exps.weight", b.w, b.d, 32, EXPERTS)
    return _B.mul_mat_id(w, _B.reshape_3d(b.x(), b.d, 1, b.n), b.rows("ids", I32, EXPERTS, 2, b.n))


def _added(b: Bench) -> Tensor:
    """Weights of no product: a norm's and a bias."""
    cur = _B.mul(_B.rms_norm(b.x(), 1e-5), b.weight("w_norm.weight", b.w, b.d))
    return _B.add(cur, b.weight("w.bias", b.w, b.d))


KINDS: dict[str, Callable[[Bench], Tensor]] = {
    "rows": _rows,
    "parts": _parts,
    "both": _both,
    "input": _input,
    "computed": _computed,
    "activations": _activations,
    "cache": _cache,
    "experts": _experts,
    "added": _added,
}
"""First word of an id -> what makes the graph's result."""


def build(case_id: str, family: str, steps: int = 2) -> Case:
    """The case behind an id without placement.

    Raises:
        UsageError: the id cannot be read, or ggml has no such graph.
    """
    head, _, seed = case_id.rpartition("@")
    kind, _, keys = head.partition("/")[2].partition("-")
    if kind not in KINDS or not re.fullmatch(r"[0-9]{1,18}", seed, re.ASCII):
        raise UsageError(f"case {case_id!r}: {family}/{'|'.join(KINDS)}-key=value,key=value@seed expected")
    values, given = read_keys(case_id, keys, KEYS)
    b = Bench(case_id, TYPES[values["w"]], values["d"], values["n"])
    made = []
    try:
        for b.k in range(steps):
            b.inputs, b.gf = {}, Expansion()
            out = KINDS[kind](b)
            b.gf.expand(out)
            made.append(Step(b.gf.graph(), b.inputs, (out,)))
        held = {t: random_bytes(t.type, Stream(case_id, t.name), nelements(t), _std(t)) for t in b.persistent.values()}
    except (GraphError, UsageError) as e:
        raise UsageError(f"case {case_id!r}: {e}") from None
    params = {"kind": kind, **given}
    return Case(case_id, held, made, family=family, params=params, seed=int(seed), generator=GENERATOR)


def _std(t: Tensor) -> float:
    return float(t.ne[0] ** -0.5) if t.ne[1] > 1 else 1.0
