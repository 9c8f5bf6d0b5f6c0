"""The family `random`: valid graphs grown at random by the builder's rules, in many sizes.

`random/nodes=24,steps=3,d=32,w=q8_0,cache=f16@7`: `nodes` per step's graph, `steps` of the trajectory, rows of `d`
elements, weights of type `w`, caches of type `cache`; `rare=1` adds ops that few backends support. Id and seed together
define the graph: another seed gives another graph.

A graph grows by moves, in all steps of the trajectory at once. A move draws its choices once, then adds the same nodes
to every step, or to no step. `Facts` estimate the size of a value's elements and its other properties; they limit the
moves, so that no chain of them overflows, or subtracts nearly equal numbers and divides by the difference: rounding in
a correct backend must not lead to a wrong result. Values are never computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.graph import check_tensor
from conformance.ggml.ops.build import Builder, Expansion
from conformance.ggml.ops.op import check_node
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import (
    FLAG_INPUT,
    Bytes,
    Dims,
    Tensor,
    can_repeat,
    computes,
    dims,
    is_contiguous,
    nelements,
    new_tensor,
)
from conformance.ggml.types import BF16, F16, F32, I32, I64, TYPES, GGMLType

from .data import Fill, away_from_zero, chosen, distinct, encode, integers, normal, random_bytes
from .family import LEVELS, Family, Level, keys, read_keys, split_id, with_seed

B = Builder()

TOKENS = (3, 5, 1, 1, 7, 2, 1, 4)
"""Rows of the inputs per step: a prompt, decodes, another prompt."""
CELLS = 32
"""Rows of a cache."""
TRIES = 40
"""Number of consecutive moves that may fail before a plain one is used."""
FEW = 8
"""Minimum number of elements of a value: a single one may be nearly zero."""
SIZE = 1 << 13
"""Maximum number of elements of a value: small graphs find as many bugs in less time."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Estimated magnitudes and the number of a value's elements."""

    std: float = 1.0
    """Approximate root mean square."""
    peak: float = 3.5
    """Approximate maximum magnitude."""
    spread: bool = True
    """True if elements of rows and columns vary, so that variances do not cancel."""

    def times(self, factor: float) -> Facts:
        """Return the estimates for the elements times `factor`."""
        return replace(self, std=self.std * abs(factor), peak=self.peak * abs(factor))


@dataclass(slots=True)
class Value:
    """One tensor per step, and its estimates."""

    at: list[Tensor]
    """Step -> tensor."""
    facts: Facts = field(default_factory=Facts)
    kind: str = "node"
    """`node`, `input`, `weight` or `cache`."""

    @property
    def type(self) -> GGMLType:
        """The type, equal in every step."""
        return self.at[0].type


Make = Callable[[int], Tensor]
"""Step -> its tensor; `GraphError` if ggml would reject it."""


class Growth:
    """Builds the case."""

    def __init__(self, case_id: str, steps: int, row: int, weights: GGMLType, caches: GGMLType) -> None:
        self.id = case_id
        self.row, self.weights, self.caches = row, weights, caches
        self.tokens = [TOKENS[k % len(TOKENS)] for k in range(steps)]
        self.values: list[Value] = []
        self.persistent: dict[Tensor, Bytes] = {}
        self.inputs: list[dict[Tensor, Bytes]] = [{} for _ in range(steps)]
        self.stored: dict[Tensor, int] = {}
        """Cache -> rows written so far, equal in every step."""
        self._stream = Stream(case_id, "graph")
        self._expansions = [Expansion() for _ in range(steps)]
        self._count = 0
        self.input("x", lambda k: dims(row, self.tokens[k]))
        self.input("y", lambda k: dims(row, self.tokens[k]))

    # choices, each drawn once for all steps

    def below(self, n: int) -> int:
        """Return a random number from 0..n-1."""
        return int(self._stream.integers(1, 0, n)[0])

    def choice(self, items: Sequence[Any]) -> Any:  # noqa: ANN401  # an item
        """Return a random item."""
        return items[self.below(len(items))]

    def recent(self, accept: Callable[[Value], bool]) -> Value | None:
        """Return a random value that `accept` takes, preferring recent ones; None if there is none."""
        fit = [v for v in self.values if accept(v)]
        return fit[max(self.below(len(fit)), self.below(len(fit)))] if fit else None

    def some(self, accept: Callable[[Value], bool]) -> Value:
        """Return a value as `recent` does, for conditions that the inputs `x` and `y` meet."""
        value = self.recent(accept)
        assert value is not None
        return value

    # leaves

    def input(self, name: str, ne: Callable[[int], Dims], fill: Fill | None = None, type_: GGMLType = F32) -> Value:
        """Add an input to each step, with different bytes in each."""
        leaves = []
        for k in range(len(self.tokens)):
            t = new_tensor(type_, *ne(k), name=name, flags=FLAG_INPUT)
            self.inputs[k][t] = encode(type_, Stream(self.id, f"{name} {k}"), t.ne, fill or normal())
            leaves.append(t)
        value = Value(leaves, kind="input")
        if type_ is F32 and fill is None:
            self.values.append(value)
        return value

    def name(self, kind: str) -> str:
        """Return an unused leaf name."""
        self._count += 1
        return f"{kind}{self._count}"

    def weight(self, type_: GGMLType, *ne: int, std: float) -> Tensor:
        """Add a weight shared by all steps."""
        t = new_tensor(type_, *ne, name=self.name("w"))
        self.persistent[t] = random_bytes(type_, Stream(self.id, t.name), nelements(t), std)
        return t

    def cache(self, row: int) -> Tensor:
        """Add a cache [row, CELLS] with random initial rows."""
        t = new_tensor(self.caches, row, CELLS, name=self.name("cache"))
        self.persistent[t] = random_bytes(self.caches, Stream(self.id, t.name), nelements(t), 1.0)
        self.stored[t] = 0
        return t

    # nodes

    def add(self, make: Make, facts: Facts | None = None, *, keep: bool = True) -> Value | None:
        """Add a node to every step, or to none if invalid or too large; `keep` it for later nodes."""
        try:
            tensors = [make(k) for k in range(len(self.tokens))]
            for t in tensors:
                check_tensor(t)
                check_node(t)
        except GraphError:
            return None
        if any(not (FEW if t.type is F32 else 1) <= nelements(t) <= SIZE for t in tensors):
            return None
        for t, e in zip(tensors, self._expansions, strict=True):
            e.expand(t)
        value = Value(tensors, facts or Facts())
        if keep:
            self.values.append(value)
        return value

    def overwrite(self, old: Value, make: Make, facts: Facts) -> None:
        """Add a node that writes into the bytes of `old`; updates all values that share them."""
        if self.add(make, facts):
            for v in self.values:
                if v.at[0].root is old.at[0].root:
                    v.facts = facts

    @property
    def nodes(self) -> int:
        """Number of nodes so far, per step."""
        return len(self._expansions[0].nodes)

    def grow(self, moves: Mapping[Callable[[Growth], Any], int], nodes: int) -> None:
        """Grow to exactly `nodes` nodes by random moves, which add one to three nodes each."""
        lots = [m for m, weight in moves.items() for _ in range(weight)]
        failed = 0
        while self.nodes < nodes:
            before = self.nodes
            move = self.choice(lots)
            if nodes - before >= 4:
                move(self)
            failed = 0 if self.nodes > before else failed + 1
            if nodes - before < 4 or failed > TRIES:
                self._go_on()
                failed = 0

    def _go_on(self) -> None:
        """Apply a move that never fails."""
        last = self.some(_whole)
        self.add(lambda k: B.scale(last.at[k], 0.75), last.facts.times(0.75))

    # the case

    def case(self, params: dict[str, Any], seed: int) -> Case:
        """Return the finished case without unused leaves."""
        steps = []
        used: set[Tensor] = set()
        for k, e in enumerate(self._expansions):
            graph = e.graph()
            tensors = set(graph.tensors())
            used |= tensors
            inputs = {t: d for t, d in self.inputs[k].items() if t in tensors}
            steps.append(Step(graph, inputs, self._outputs(graph.nodes)))
        persistent = {t: d for t, d in self.persistent.items() if t in used}
        return Case(self.id, persistent, steps, family=NAME, params=params, seed=seed, generator=GENERATOR)

    def _outputs(self, nodes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return nodes that no other reads, and a fifth of the rest; caches are checked anyway."""
        read = {s for n in nodes for s in n.src if s is not None and s is not n}
        able = [(i, n) for i, n in enumerate(nodes) if n.root not in self.persistent]
        return tuple(n for i, n in able if n not in read or (i % 5 == 0 and computes(n)))


def facts_of_sum(a: Facts, b: Facts) -> Facts:
    """Return the estimated range of values of `a + b`."""
    return Facts(math.hypot(a.std, b.std), a.peak + b.peak, a.spread or b.spread)


HIGHEST = 30.0
"""Maximum magnitude of an element."""
LOWEST = 0.05
"""Minimum root mean square, because errors are relative."""


def _whole(v: Value) -> bool:
    """Return True if the value is contiguous, as SCALE requires."""
    return v.type is F32 and all(is_contiguous(t) for t in v.at)


def _plain(v: Value) -> bool:
    """Return True if elements of a row are adjacent, as ggml's CPU requires."""
    return v.type is F32 and all(t.nb[0] == F32.type_size for t in v.at)


def _large(v: Value) -> bool:
    """Return True if a norm may divide by it."""
    return _plain(v) and v.facts.std >= 0.25 and min(t.ne[0] for t in v.at) >= 8


def _own(v: Value) -> bool:
    """Return True if it may be overwritten: a whole result of a node."""
    return v.type is F32 and v.kind == "node" and all(t.view_src is None for t in v.at)


def _sane(f: Facts) -> bool:
    return f.peak <= HIGHEST and f.std >= LOWEST


# elementwise

_UNARY = {
    "silu": 0.6, "gelu": 0.6, "gelu_quick": 0.6, "gelu_erf": 0.6, "tanh": 0.6, "sigmoid": 0.5, "relu": 0.7, "elu": 0.8,
    "softplus": 1.0, "neg": 1.0, "abs": 1.0, "hardswish": 0.6, "hardsigmoid": 0.5,
}  # fmt: skip
"""Constructor -> factor of the root mean square."""
_INPLACE = ("silu", "gelu", "tanh", "sigmoid", "relu", "neg", "abs")


def _unary(g: Growth) -> None:
    a = g.some(_plain)
    name = g.choice(tuple(_UNARY))
    facts = Facts(a.facts.std * _UNARY[name], max(1.0, a.facts.peak + 0.7), a.facts.spread)
    if _sane(facts):
        g.add(lambda k: getattr(B, name)(a.at[k]), facts)


def _unary_inplace(g: Growth) -> None:
    """Add a unary op in place; all views of the operand then have the new elements."""
    a = g.recent(_own)
    name = g.choice(_INPLACE)
    if a is None:
        return
    facts = replace(a.facts, std=a.facts.std * _UNARY[name], peak=max(1.0, a.facts.peak))
    if _sane(facts):
        g.overwrite(a, lambda k: getattr(B, f"{name}_inplace")(a.at[k]), facts)


def _scale(g: Growth) -> None:
    a = g.some(_whole)
    s, b = g.choice((0.5, -1.5, 2.0, 0.7)), g.choice((0.0, 0.0, 0.25))
    if not _sane(facts := replace(a.facts.times(s), peak=a.facts.peak * abs(s) + b)):
        return
    if g.below(3) or a.kind != "node":
        g.add(lambda k: B.scale_bias(a.at[k], s, b), facts)
    elif _own(a):
        g.overwrite(a, lambda k: B.scale_bias_inplace(a.at[k], s, b), facts)


def _clamp(g: Growth) -> None:
    a = g.some(_plain)
    g.add(lambda k: B.clamp(a.at[k], -1.25, 2.0), replace(a.facts, peak=min(2.0, a.facts.peak)))


def _leaky_relu(g: Growth) -> None:
    a = g.recent(_own)  # for others ggml's CPU reads row i at i * nb[1], ignoring nb[2]
    if a is not None:
        g.add(lambda k: B.leaky_relu(a.at[k], 0.1, inplace=False), replace(a.facts, std=a.facts.std * 0.7))


def _wave(g: Growth) -> None:
    a = g.some(_plain)
    name = g.choice(("sin", "cos"))
    if a.facts.std >= 0.25:
        g.add(lambda k: getattr(B, name)(a.at[k]), Facts(0.6, 1.0, a.facts.spread))


def _partner(g: Growth, a: Value) -> Value | None:
    return g.recent(
        lambda v: _plain(v) and v is not a and all(can_repeat(s, t) for s, t in zip(v.at, a.at, strict=True))
    )


_SCALING = frozenset({"RMS_NORM", "L2_NORM", "SCALE", "CONT", "CPY"})


def _direction(t: Tensor) -> Tensor:
    """Return the result whose rows `t` has, up to a factor: two of one direction may cancel."""
    while t.root.op in _SCALING and (source := t.root.src[0]) is not None:
        t = source
    return t.root


def _binary(g: Growth) -> None:
    """Add a sum, difference or product, with the second operand broadcast to the first."""
    a = g.some(_plain)
    b = _partner(g, a)
    op = g.choice(("add", "add", "sub", "mul"))
    if b is None:
        return
    related = op == "sub" and _direction(a.at[0]) is _direction(b.at[0])
    product = Facts(a.facts.std * b.facts.std, a.facts.peak * b.facts.peak, a.facts.spread and b.facts.spread)
    facts = product if op == "mul" else facts_of_sum(a.facts, b.facts)
    if not related and _sane(facts):
        g.add(lambda k: getattr(B, op)(a.at[k], b.at[k]), facts)


def _binary_inplace(g: Growth) -> None:
    """Add a sum or product into the first operand's bytes."""
    a = g.recent(_own)
    b = None if a is None else _partner(g, a)
    op = g.choice(("add_inplace", "mul_inplace"))
    if a is None or b is None or a.at[0].root is b.at[0].root:
        return
    product = Facts(a.facts.std * b.facts.std, a.facts.peak * b.facts.peak, False)
    facts = product if op == "mul_inplace" else facts_of_sum(a.facts, b.facts)
    if _sane(facts):
        g.overwrite(a, lambda k: getattr(B, op)(a.at[k], b.at[k]), facts)


def _div(g: Growth) -> None:
    """Divide by an input without elements near zero."""
    a = g.some(_plain)
    if not _sane(facts := a.facts.times(2.0)):
        return
    row = a.at[0].ne[0]
    if any(t.ne[0] != row for t in a.at):
        return
    by = g.input(g.name("divisor"), lambda _: dims(row), away_from_zero(0.5, 2.0))
    g.add(lambda k: B.div(a.at[k], by.at[k]), facts)


def _glu(g: Growth) -> None:
    """Add a gated unit of two values, or of the halves of one value's rows."""
    name = g.choice(("swiglu", "geglu", "reglu", "geglu_quick", "geglu_erf"))
    a = g.some(_plain)
    if g.below(2):
        b = g.recent(lambda v: _plain(v) and v is not a and all(s.ne == t.ne for s, t in zip(v.at, a.at, strict=True)))
        if b is not None and _sane(f := Facts(a.facts.std * b.facts.std, a.facts.peak * b.facts.peak)):
            g.add(lambda k: getattr(B, f"{name}_split")(a.at[k], b.at[k]), f)
    elif _sane(f := Facts(a.facts.std**2, a.facts.peak**2)) and all(t.ne[0] % 2 == 0 for t in a.at):
        g.add(lambda k: getattr(B, name)(a.at[k]), f)


# rows


def _norm(g: Growth) -> None:
    a = g.some(_large)
    name = g.choice(("rms_norm", "rms_norm", "norm", "l2_norm"))
    if name == "norm" and not a.facts.spread:
        return
    row = max(t.ne[0] for t in a.at)
    facts = Facts(1.0, math.sqrt(row), a.facts.spread and name != "norm")  # rows of a norm sum to rounding errors
    if name == "l2_norm":
        facts = facts.times(1 / math.sqrt(row))
    if not _sane(facts):
        return
    if name == "rms_norm" and _own(a) and not g.below(3):
        g.overwrite(a, lambda k: B.rms_norm_inplace(a.at[k], 1e-5), facts)
    else:
        g.add(lambda k: getattr(B, name)(a.at[k], 1e-5), facts)


def _soft_max(g: Growth) -> None:
    """Add a softmax, whose rows sum to 1, and scale it to order 1."""
    a = g.some(lambda v: _plain(v) and v.facts.peak <= 12.0)
    row = min(t.ne[0] for t in a.at)
    p = g.add(lambda k: B.soft_max_ext(a.at[k], None, 0.5, 0.0), Facts(1.5 / row, 1.0, False), keep=False)
    if p is not None:
        factor = min(float(row), HIGHEST)
        g.add(lambda k: B.scale(p.at[k], factor), Facts(1.5 * factor / row, factor, False))


def _sums(g: Growth) -> None:
    a = g.some(_plain)
    root = math.sqrt(max(t.ne[0] for t in a.at))
    if g.below(2):
        op, facts = B.mean, Facts(a.facts.std / root, a.facts.peak, False)
    else:
        op, facts = B.sum_rows, Facts(a.facts.std * root, a.facts.peak * root, False)
    if _sane(facts) and a.facts.spread:
        g.add(lambda k: op(a.at[k]), facts)


def _argsort(g: Growth) -> None:
    """Sort the rows of a new input with well-separated elements."""
    row, order = g.choice((8, 16)), g.below(2)
    a = g.input(g.name("scores"), lambda k: dims(row, g.tokens[k]), distinct(-2.0, 2.0))
    g.add(lambda k: B.argsort(a.at[k], order), keep=False)


def _argmax(g: Growth) -> None:
    """Add the index of the maximum of each row of a new input."""
    a = g.input(g.name("scores"), lambda k: dims(16, g.tokens[k]), distinct(-2.0, 2.0))
    g.add(lambda k: B.argmax(a.at[k]), keep=False)


# products


def _mul_mat(g: Growth) -> None:
    a = g.some(lambda v: _plain(v) and min(t.ne[0] for t in v.at) >= 4)
    if any(t.ne[0] != a.at[0].ne[0] for t in a.at):
        return
    n, m = a.at[0].ne[0], g.choice((8, 16, 32, g.row, g.row))
    type_ = g.weights if n % g.weights.blck_size == 0 else F32
    w = g.weight(type_, n, m, std=1 / math.sqrt(n))
    facts = Facts(a.facts.std, a.facts.std * 4.5)
    if _sane(facts):
        g.add(lambda k: B.mul_mat(w, a.at[k]), facts)


def _product(g: Growth) -> None:
    """Multiply two results, like attention scores, and scale to order 1."""
    a = g.some(lambda v: _plain(v) and min(t.ne[0] for t in v.at) >= 4)
    b = g.recent(lambda v: _plain(v) and v is not a and v.at[0].ne[0] == a.at[0].ne[0])
    if b is None or not (a.facts.spread and b.facts.spread):
        return
    n = max(t.ne[0] for t in a.at)
    std = a.facts.std * b.facts.std * math.sqrt(n)
    scores = g.add(lambda k: B.mul_mat(a.at[k], b.at[k]), Facts(std, 5 * std), keep=False)
    if scores is not None:
        g.add(lambda k: B.scale(scores.at[k], 1 / std), Facts(1.0, 5.0))


def _rope(g: Growth) -> None:
    """Rotate the rows of a three-dimensional value by their positions."""
    a = g.recent(lambda v: _plain(v) and all(t.ne[3] == 1 and t.ne[0] % 2 == 0 and t.ne[2] > 1 for t in v.at))
    if a is None:
        return
    pos = g.input(g.name("pos"), lambda k: dims(a.at[k].ne[2]), integers(0, 200), I32)
    mode = ROPE_TYPE[g.choice(("NORMAL", "NEOX"))]
    facts = replace(a.facts, peak=a.facts.peak * 1.5)
    if _sane(facts):
        g.add(lambda k: B.rope(a.at[k], pos.at[k], a.at[k].ne[0], mode), facts)


def _embed(g: Growth) -> None:
    """Get rows of a table or a value by indices."""
    if g.below(2):
        type_ = g.weights if g.row % g.weights.blck_size == 0 else F32
        table = g.weight(type_, g.row, 16, std=1.0)
        ids = g.input(g.name("ids"), lambda k: dims(g.tokens[k]), integers(0, 16), I32)
        g.add(lambda k: B.get_rows(table, ids.at[k]), Facts(spread=False))
        return
    a = g.some(lambda v: _plain(v) and all(t.ne[2] == t.ne[3] == 1 for t in v.at))
    rows = min(t.ne[1] for t in a.at)
    ids = g.input(g.name("ids"), lambda _: dims(min(rows, 4)), chosen(rows), I32)
    g.add(lambda k: B.get_rows(a.at[k], ids.at[k]), a.facts)


# layout


def _view(g: Growth) -> None:
    """View a part of each row, some of the rows, or every second one."""
    a = g.some(lambda v: v.type is F32 and all(t.ne[2] == t.ne[3] == 1 for t in v.at))
    how, at = g.choice(("half", "rows", "second", "flat")), g.below(2)

    def make(k: int) -> Tensor:
        t = a.at[k]
        n0, n1 = t.ne[0], t.ne[1]
        if how == "half":
            return B.view_2d(t, n0 // 2, n1, t.nb[1], at * (n0 // 2) * t.nb[0])
        if how == "rows":
            return B.view_2d(t, n0, (n1 + 1) // 2, t.nb[1], at * (n1 // 2) * t.nb[1])
        if how == "second":
            return B.view_2d(t, n0, (n1 + 1) // 2, 2 * t.nb[1], 0)
        return B.view_1d(t, n0 * n1 // 2, 0)

    if all(t.nb[0] == 4 and (how != "flat" or is_contiguous(t)) for t in a.at):
        g.add(make, a.facts)


_AXES = ((1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (1, 2, 0, 3), (3, 0, 1, 2))


def _permute(g: Growth) -> None:
    a = g.some(lambda v: v.type is F32)
    axes = g.choice(_AXES)
    if axes == _AXES[0] and g.below(2):
        g.add(lambda k: B.transpose(a.at[k]), a.facts)
    else:
        g.add(lambda k: B.permute(a.at[k], *axes), a.facts)


def _cont(g: Growth) -> None:
    a = g.recent(lambda v: v.type is F32 and not all(is_contiguous(t) for t in v.at))
    if a is not None:
        g.add(lambda k: B.cont(a.at[k]), a.facts)


def _reshape(g: Growth) -> None:
    """Reshape to heads, to one row, or to four dimensions."""
    a = g.some(_whole)
    how = g.choice(("heads", "heads", "flat", "split"))

    def make(k: int) -> Tensor:
        t = a.at[k]
        n = nelements(t)
        if how == "heads":
            return B.reshape_3d(t, t.ne[0] // 2, 2, n // t.ne[0])
        if how == "flat":
            return B.reshape_2d(t, t.ne[0] * t.ne[1], n // (t.ne[0] * t.ne[1]))
        return B.reshape_4d(t, t.ne[0] // 4, 2, 2, n // t.ne[0])

    g.add(make, a.facts)


def _concat(g: Growth) -> None:
    a = g.some(_plain)
    dim = g.below(3)
    b = g.recent(lambda v: _plain(v) and all(_equal_except(s, t, dim) for s, t in zip(v.at, a.at, strict=True)))
    if b is not None:
        peak, low = max(a.facts.peak, b.facts.peak), min(a.facts.std, b.facts.std)
        facts = Facts(low, peak, a.facts.spread and b.facts.spread)
        if max(a.facts.std, b.facts.std) < 8 * low:
            g.add(lambda k: B.concat(a.at[k], b.at[k], dim), facts)


def _equal_except(s: Tensor, t: Tensor, dim: int) -> bool:
    return all(m == n for i, (m, n) in enumerate(zip(s.ne, t.ne, strict=True)) if i != dim)


def _repeat(g: Growth) -> None:
    a = g.some(_plain)
    by = g.choice(((2, 1, 1), (1, 2, 1), (1, 1, 3)))
    facts = replace(a.facts, spread=False)
    g.add(lambda k: B.repeat_4d(a.at[k], *(n * m for n, m in zip(a.at[k].ne, (*by, 1), strict=True))), facts)


def _cast(g: Growth) -> None:
    a = g.some(lambda v: v.type is F32)
    type_ = g.choice((F16, F16, BF16))
    narrow = g.add(lambda k: B.cast(a.at[k], type_), a.facts, keep=False)
    if narrow is not None:
        g.add(lambda k: B.cast(narrow.at[k], F32), a.facts)


# caches


def _cache(g: Growth) -> Tensor:
    known = list(g.stored)
    if known and g.below(2):
        cache: Tensor = g.choice(known)
        return cache
    return g.cache(g.row)


def _store_rows(g: Growth) -> None:
    """Write rows into a cache at indices, then read the cache through a view."""
    cache = _cache(g)
    a = g.recent(lambda v: _plain(v) and all(t.ne == (*cache.ne[:1], t.ne[1], 1, 1) for t in v.at))
    if a is None or max(t.ne[1] for t in a.at) > CELLS or not 0.3 <= a.facts.std <= 3.0:
        return
    ids = g.input(g.name("idxs"), lambda k: dims(a.at[k].ne[1]), chosen(CELLS), I64)
    if g.add(lambda k: B.set_rows(cache, a.at[k], ids.at[k]), keep=False) is not None:
        _read(g, cache)


def _store_copy(g: Growth) -> None:
    """Copy rows into a view of a cache that advances per step, as llama.cpp did; then read it."""
    cache = _cache(g)
    if cache.type.is_quantized:
        return
    a = g.recent(
        lambda v: v.type is F32 and all(t.ne == (*cache.ne[:1], n, 1, 1) for t, n in zip(v.at, g.tokens, strict=True))
    )
    if a is None or not 0.3 <= a.facts.std <= 3.0:
        return
    heads = [sum(g.tokens[:k]) % (CELLS - 7) for k in range(len(g.tokens))]
    to = g.add(lambda k: B.view_2d(cache, cache.ne[0], g.tokens[k], cache.nb[1], heads[k] * cache.nb[1]), keep=False)
    if to is not None and g.add(lambda k: B.cpy(a.at[k], to.at[k]), keep=False) is not None:
        _read(g, cache)


def _read(g: Growth, cache: Tensor) -> None:
    """Read the rows written so far, as F32."""
    ids = g.input(g.name("rows"), lambda k: dims(min(CELLS, 4 * (1 + k))), chosen(CELLS), I32)
    g.add(lambda k: B.get_rows(cache, ids.at[k]), Facts(spread=True, peak=4.0))


Move = Callable[[Growth], None]

MOVES: dict[Move, int] = {
    _unary: 4, _unary_inplace: 2, _scale: 2, _clamp: 1, _binary: 6, _binary_inplace: 2, _div: 1, _glu: 2, _norm: 3,
    _soft_max: 1, _sums: 1, _argsort: 1, _mul_mat: 5, _product: 2, _rope: 2, _embed: 2, _view: 4, _permute: 4, _cont: 4,
    _reshape: 4, _concat: 2, _repeat: 1, _cast: 1, _store_rows: 3, _store_copy: 3,
}  # fmt: skip
"""Move -> its relative frequency."""
RARE: dict[Move, int] = {_leaky_relu: 3, _wave: 3, _argmax: 2}
"""Ops that language models rarely use and few backends support; only with `rare=1`."""


NAME = "random"
GENERATOR = 2
"""Increment when the bytes of any id change."""

NODES = (2, 60)
STEPS = (1, 8)
ROWS = (8, 16, 32, 64)
WEIGHTS = ("f32", "f16", "bf16", "q8_0", "q4_0")
CACHES = ("f32", "f16", "bf16", "q8_0", "q4_0")

KEYS = keys(f"nodes=12 steps=3 d=32|{'|'.join(map(str, ROWS))} w={'|'.join(WEIGHTS)} cache={'|'.join(CACHES)} rare=0|1")


def build(case_id: str) -> Case:
    """Build the case of an id; UsageError if it is invalid."""
    body, seed = split_id(case_id, NAME, "key=value,key=value")
    values, given = read_keys(case_id, body, KEYS)
    for key, (low, high) in (("nodes", NODES), ("steps", STEPS)):
        if not low <= values[key] <= high:
            raise UsageError(f"case {case_id!r}: {key}: {low} to {high} expected, {values[key]} found")
    row = int(values["d"])
    growth = Growth(case_id, values["steps"], row, TYPES[values["w"]], TYPES[values["cache"]])
    growth.grow({**MOVES, **RARE} if values["rare"] == "1" else MOVES, values["nodes"])
    return growth.case(given, seed)


def _row(i: int) -> str:
    """Return the `i`-th id without family and seed; sizes and types have different periods."""
    nodes = NODES[0] + (i * 7) % (NODES[1] - NODES[0] + 1)
    steps = 1 + (i * 3) % 4
    cache = CACHES[i // 3 % (5 if ROWS[i % 4] >= 32 else 3)]
    rare = ",rare=1" if i % 6 == 5 else ""
    return f"nodes={nodes},steps={steps},d={ROWS[i % 4]},w={WEIGHTS[i // 2 % 5]},cache={cache}{rare}"


COUNTS: dict[Level, int] = {"smoke": 12, "standard": 150, "full": 600}
"""Level -> number of cases, including those of lower levels."""


@cache
def ids(level: Level) -> Sequence[str]:
    """Return the case ids of a level, a fixed part of an infinite family."""
    rows: list[str] = []
    for name in LEVELS[: LEVELS.index(level) + 1]:
        added = map(_row, range(len(rows), COUNTS[name]))
        rows += sorted(added, key=lambda row: int(row.split(",")[0].split("=")[1]))
    return tuple(with_seed(NAME, row, f"{i} {row}") for i, row in enumerate(rows))


FAMILY = Family(NAME, "random valid graphs, run in several sizes with persistent caches", ids, build)
