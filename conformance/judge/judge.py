"""Judge a case's values: the tolerance of each tensor, and the fraction used.

A tensor computed by one node has that node's tolerance; one behind a chain of nodes, within a step or through caches,
has the tolerance of the chain (`Chain`). There are two kinds of error. Float32 rounding is smooth: it passes through a
node and grows a little. Rounding to a coarser type (activations to Q8_0, K to an F16 cache) is a staircase: two correct
backends whose values differ in the last bit may take different steps, and then round everything that follows
independently. So a chain is either right to float32, or off by about the size of its roundings (measurements:
docs/suite.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

from conformance.case.case import Case, writes_in_place
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Bytes, Tensor, computes

from .budget import PEAK, RAW, ROUNDED, Budget, budget_of, changes, dequantises, free_running, stored, type_of
from .cancellation import KnownValues, cancellations
from .compare import Difference, compare, in_order
from .wrong import Wrong

_ACCUMULATE = 16.0
"""Factor by which a chain may amplify the sum of its nodes' float32 roundings."""
_INDEPENDENT = 4.0
"""Factor for independent coarse roundings; two of them differ by twice the energy of one."""

_ACTIVATIONS = {"f16": 1e-7, "bf16": 6e-6, "q8_0": 5e-5, "q8_1": 5e-5, "q8_K": 1e-4, "int8xrow": 1e-4}
"""Type that a node rounds its sources to -> NMSE that this adds to its result."""
_OPERANDS = {to: allowed / _INDEPENDENT for to, allowed in ROUNDED.items()}
"""`Arithmetic.products` -> NMSE that it adds to a product, in a chain as alone."""
_DYNAMIC = 5e-5
"""NMSE for 8-bit activations, which such a device may use with block-quantised weights."""
_MOST = 0.25
"""Upper bound for the NMSE of any chain; an all-zero result has an NMSE of 1."""
_SUM = 3e-8
"""NMSE per term that one flipped rounding adds to an F16 sum, as all later terms inherit it."""
_CHOICES = frozenset({"ARGSORT", "TOP_K"})
"""Ops that select experts; rounding of router logits may change the selection.

If two logits differ by less than the error of a rounded product, a token gets another expert, and its row has
entirely different values. Few tokens do, so the NMSE stays bounded."""
_CHOSEN = 0.1
"""NMSE of a result of two tokens, one of which got another expert."""
_STORED = {"f16": 1e-7, "bf16": 6e-6, "q8_0": 5e-5, "q8_1": 5e-5, "q5_0": 5e-4, "q5_1": 5e-4}
_STORED_OTHER = 2e-3
"""NMSE that storing adds to slightly different values: with 4 bits, 1 step in 30."""

_BLOCK_STEP = {"q8_0": (1e-4, 0.1), "q8_1": (1e-4, 0.1)}
_BLOCK_STEP_FEW_BITS = (1e-2, 1.0)
_BLOCK_STEP_OTHER = (1e-2, inf)
"""NMSE and largest element error of values one rounding apart, after storing in blocks.

A step or the block's scale may flip. Types of `_FEW_BITS` have plain steps; in the others one scale may move a whole
super-block."""
_FEW_BITS = frozenset({"q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"})


@dataclass(frozen=True, slots=True)
class Noise:
    """NMSE that nodes add, from float32 rounding and from coarse rounding."""

    smooth: float = 0.0
    steps: float = 0.0
    zeros: bool = False
    """True if zeros may have either sign, which adds no NMSE."""

    def __add__(self, other: Noise) -> Noise:
        return Noise(self.smooth + other.smooth, self.steps + other.steps, self.zeros or other.zeros)

    def __or__(self, other: Noise) -> Noise:
        smooth, steps = max(self.smooth, other.smooth), max(self.steps, other.steps)
        return Noise(smooth, steps, self.zeros or other.zeros)

    def __bool__(self) -> bool:
        return self.smooth > 0 or self.steps > 0


_NONE = Noise()


class Chain:
    """Follows a trajectory step by step and gives the tolerance of tensors of the latest one."""

    def __init__(self, arithmetic: Arithmetic, *, by_nodes: bool = False) -> None:
        """Start before the first step; `arithmetic` applies to both sides.

        `by_nodes`: each node is also judged by itself, so another choice of experts may be tolerated.
        """
        self._arithmetic = arithmetic
        self._by_nodes = by_nodes
        self._noise: dict[Tensor, Noise] = {}
        self._cancelled: Mapping[Tensor, float] = {}
        self._carried: dict[Tensor, Noise] = {}
        self._writers: dict[Tensor, list[Tensor]] = {}

    def enter(self, graph: Graph, cancelled: Mapping[Tensor, float] | None = None) -> None:
        """Go to the next step, which runs `graph`; `cancelled` is from `cancellations`."""
        self._leave()
        self._noise, self._writers, self._cancelled = {}, {}, cancelled or {}
        noisy = {t for t, noise in self._carried.items() if noise}
        for node in graph:
            if not computes(node):
                continue
            fed = any(s is not None and s.root in noisy for s in node.src)
            noise = _noise_of(node, self._arithmetic, fed=fed, cancellation=self._cancelled.get(node, 0.0))
            self._noise[node] = noise
            if noise or fed:
                noisy.add(node.root)
            if writes_in_place(node):
                self._writers.setdefault(node.root, []).append(node)

    def budget(self, t: Tensor) -> Budget:
        """Return the tolerance of `t`, an output of the step or a cache after it."""
        reached, own, before = self._sum(t)
        if len(reached) < 2 and not before and not before.zeros:
            node = reached[0] if reached else t
            return budget_of(node, self._arithmetic, cancellation=self._cancelled.get(node, 0.0))
        budget = _budget(t, own + before)
        if self._may_choose(reached):
            return replace(budget, nmse=max(budget.nmse, _CHOSEN if self._by_nodes else 0.0), element=inf)
        return budget

    def stated(self, t: Tensor, stated: Budget) -> Budget:
        """Return the tolerance of `t` for a recording with float32 products and a stated tolerance.

        If the device rounds operands, it is the larger of `stated` and the chain's tolerance; after a choice of experts
        it also allows for another expert, since a recording's nodes are judged by themselves as well.
        """
        if self._arithmetic.products not in _OPERANDS:
            return stated
        budget = max(stated, self.budget(t), key=lambda b: b.nmse)
        if self._may_choose(self._sum(t)[0]):
            return replace(budget, nmse=max(budget.nmse, _CHOSEN), element=inf)
        return budget

    def with_distance(self, t: Tensor, distance: Budget | None) -> Budget:
        """Return the tolerance of `t` for a recording, whose arithmetic has this distance.

        The chain's own rounding is added; the roots of independent errors add at most.
        """
        own = self.budget(t)
        if distance is None or not distance.nmse:
            return own
        return Budget((sqrt(own.nmse) + sqrt(distance.nmse)) ** 2, own.element + distance.element, distance.why)

    def _may_choose(self, reached: Iterable[Tensor]) -> bool:
        return self._arithmetic.products in _OPERANDS and any(n.op in _CHOICES for n in reached)

    def _leave(self) -> None:
        """Carry the noise of caches to the next step: the largest of all steps so far, not the sum.

        Attention averages over stored values of earlier steps, so errors do not accumulate from step to step.
        """
        left = dict(self._carried)
        for root in self._writers:
            if root in self._noise:
                continue  # a node's own result, gone after the step
            _, own, before = self._sum(root)
            left[root] = left.get(root, _NONE) | own | before
        self._carried = left

    def _sum(self, t: Tensor) -> tuple[list[Tensor], Noise, Noise]:
        """Return the nodes of the step on which `t` depends, their noise, and that of caches read."""
        reached = [n for n in self._reach(t) if n in self._noise or n in self._carried]
        nodes = [n for n in reached if n in self._noise]
        own = sum((self._noise[n] for n in nodes), _NONE)
        before = _NONE
        for n in reached:
            before |= self._carried.get(n, _NONE)
        return nodes, own, before

    def _reach(self, t: Tensor) -> Iterator[Tensor]:
        seen: set[Tensor] = set()
        stack = [t]
        while stack:
            cur = stack.pop()
            if cur in seen:
                continue
            seen.add(cur)
            yield cur
            stack.extend(s for s in (*cur.src, cur.view_src) if s is not None)
            stack.extend(self._writers.get(cur, ()))


def _noise_of(node: Tensor, arithmetic: Arithmetic, *, fed: bool, cancellation: float = 0.0) -> Noise:
    """Return the noise that `node` adds; coarse roundings count if its sources differ (`fed`)."""
    row, own = DECLARATIONS[node.op].rounding, arithmetic.at(node)
    smooth = budget_of(node, replace(own, products=EXACT.products), cancellation=cancellation).nmse
    steps = _operands(node, own) + arithmetic.bound(node, row.terms(node) if row.per_k else 1)
    return Noise(smooth, steps + (_rounding(node, own) if fed else 0.0), dequantises(node))


def _operands(node: Tensor, arithmetic: Arithmetic) -> float:
    if not DECLARATIONS[node.op].rounding.products or arithmetic.products not in _OPERANDS:
        return 0.0
    weights = node.src[0] if node.op in {"MUL_MAT", "MUL_MAT_ID"} else None
    return _OPERANDS[arithmetic.products] + (_DYNAMIC if weights is not None and weights.type.is_quantized else 0.0)


def _rounding(node: Tensor, arithmetic: Arithmetic) -> float:
    nmse = 0.0
    if changes(node, arithmetic):
        to = ""
        if node.op in {"MUL_MAT", "MUL_MAT_ID"}:
            to = arithmetic.mul_mat.get(type_of(node, 0), arithmetic.operands)
        elif node.op == "FLASH_ATTN_EXT":
            to = arithmetic.flash_attn.get(type_of(node, 1), arithmetic.operands)
        elif node.op in {"UNARY", "GLU"}:
            to = "f16"
        nmse += _ACTIVATIONS.get(to, 0.0)
        if arithmetic.sums != EXACT.sums:
            nmse += _SUM * DECLARATIONS[node.op].rounding.terms(node)
    narrow = node.type.is_quantized or node.type.name in _STORED
    data = node.src[1:2] if node.op == "IM2COL" else node.src[:1]  # IM2COL does not read the kernel, its src[0]
    if narrow and any(s is not None and s.type is not node.type for s in data):
        nmse += _STORED.get(node.type.name, _STORED_OTHER)
    return nmse


def _budget(t: Tensor, noise: Noise) -> Budget:
    smooth, steps = _ACCUMULATE * noise.smooth, _INDEPENDENT * noise.steps
    nmse = min(_MOST, smooth + steps)
    if not nmse:
        return replace(RAW, zeros=noise.zeros)
    why = "a chain of nodes" if not steps else "a chain of nodes, some of which round"
    element = 4 * PEAK * sqrt(smooth) + PEAK * sqrt(steps)
    if not t.type.is_quantized:
        return stored(t, nmse, element, why)
    other = _BLOCK_STEP_FEW_BITS if t.type.name in _FEW_BITS else _BLOCK_STEP_OTHER
    floor, step = _BLOCK_STEP.get(t.type.name, other)
    return Budget(max(nmse, floor), element + step, f"{why}, stored in blocks")


@dataclass(frozen=True, slots=True)
class Judged:
    """Difference and tolerance of one tensor after one step."""

    step: int
    tensor: Tensor
    difference: Difference
    budget: Budget

    @property
    def used(self) -> float:
        """Fraction of the tolerance used; over 1 fails."""
        return self.budget.used(self.difference)


def how_wrong(judged: Iterable[Judged]) -> Wrong | None:
    """Return the worst error of tensors over their tolerance; None if there is none."""
    return Wrong.worst(Wrong(j.difference.kind, j.difference.nmse) for j in judged if j.used > 1)


def judge_node(
    node: Tensor,
    expected: Bytes,
    found: Bytes,
    arithmetic: Arithmetic,
    *,
    step: int = 0,
    same: bool = True,
    known: KnownValues | None = None,
) -> Judged:
    """Judge one node's value with correct sources; `same` as in `budget_of`.

    `known`: values of its step, for the cancellation of products; the order of equal elements that it sorts is open.
    """
    cancellation, keys = (known.cancellation(node), known.sort_keys(node)) if known else (0.0, None)
    if keys is not None and expected.nbytes == found.nbytes:
        expected, found = in_order(expected, keys), in_order(found, keys)
    difference = compare(node, expected, found, unordered=node.op == "TOP_K")
    return Judged(step, node, difference, budget_of(node, arithmetic, same=same, cancellation=cancellation))


def judge_isolated(
    alone: Case,
    original: Mapping[Tensor, Tensor],
    right: Mapping[Tensor, Bytes],
    found: Mapping[Tensor, Bytes],
    arithmetic: Arithmetic,
    *,
    step: int = 0,
) -> Iterator[Judged]:
    """Judge the nodes of `isolated_nodes` one by one, in order.

    `right` has the expected value of each copy, `found` that of each copy or of its original. `arithmetic` includes the
    copies (`Arithmetic.copied`).
    """
    known = KnownValues(alone, 0, right)
    for copy, node in original.items():
        value = found[copy] if copy in found else found[node]
        yield replace(judge_node(copy, right[copy], value, arithmetic, step=step, known=known), tensor=node)


def judge_step(
    case: Case,
    k: int,
    expected: Mapping[Tensor, Bytes],
    found: Mapping[Tensor, Bytes],
    arithmetic: Arithmetic,
    chain: Chain | None = None,
    distances: Mapping[Tensor, Budget] | None = None,
) -> Iterator[Judged]:
    """Judge outputs and caches after step `k` of a case, which may state a tolerance.

    `expected` (in `arithmetic`) and `found` are packed bytes. `chain` has followed the previous steps; None if this
    step started from correct caches. `distances`, for a recording: tensor -> error between the arithmetics of both
    sides; then the tolerance that the case states is a minimum.
    """
    chain = chain or Chain(arithmetic)
    chain.enter(case.steps[k].graph, cancellations(case, k, expected))
    stated = free_running(case.tolerance["nmse"]) if "nmse" in case.tolerance else None
    for t, want in expected.items():
        budget = chain.stated(t, stated) if stated else chain.budget(t)
        if distances is not None:
            budget = max(budget, chain.with_distance(t, distances.get(t)), key=lambda b: b.nmse)
        yield Judged(k, t, compare(t, want, found[t], unordered=t.op == "TOP_K"), budget)


def judge_trajectory(
    case: Case,
    expected: Iterable[Mapping[Tensor, Bytes]],
    found: Iterable[Mapping[Tensor, Bytes]],
    arithmetic: Arithmetic,
    distances: Sequence[Mapping[Tensor, Budget]] | None = None,
    *,
    by_nodes: bool = False,
) -> Iterator[Judged]:
    """Judge every step of a free run, in which errors feed back through caches."""
    chain = Chain(arithmetic, by_nodes=by_nodes)
    for k, (want, got) in enumerate(zip(expected, found, strict=True)):
        yield from judge_step(case, k, want, got, arithmetic, chain, None if distances is None else distances[k])
