"""What a chain of nodes may be off by, each within its own budget: within a step, and from step to step through caches.

Two kinds of error. Float32 rounding is smooth: it passes through a node and grows a little. A rounding on the way
(activations into Q8_0, K into an F16 cache) is a staircase: two right backends whose values differ in the last bit may
take different steps, and from there on round everything that follows independently. So a chain is either right to
float32 or off by about what its roundings are worth; measured figures are in docs/tolerances.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, sqrt

from conformance.case.case import writes_in_place
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Tensor, computes

from .arithmetic import changes
from .budget import PEAK, RAW, ROUNDED, Budget, budget_of, free_running, stored

_ACCUMULATE = 16.0
"""By how much a chain of nodes may amplify the sum of its own float32 roundings."""
_INDEPENDENT = 4.0
"""The same for roundings that went different ways; two independent ones differ by twice the energy of one."""

_ACTIVATIONS = {"f16": 1e-7, "bf16": 6e-6, "q8_0": 5e-5, "q8_1": 5e-5, "q8_K": 1e-4, "int8xrow": 1e-4}
"""Type that a node rounds its sources to -> NMSE which that is worth in its result."""
_OPERANDS = {to: allowed / _INDEPENDENT for to, allowed in ROUNDED.items()}
"""`Arithmetic.products` -> NMSE which rounding both operands is worth in a product: in a chain it is allowed what it is
allowed alone."""
_DYNAMIC = 5e-5
"""The same of activations in 8 bits, which such a device may use beside weights in blocks."""
_CHOICES = frozenset({"ARGSORT", "TOP_K"})
"""What picks experts: where two router logits differ by less than a rounded product may be off, a token gets another
expert, and its row other values altogether; of many tokens few do, which the NMSE bounds."""
_CHOSEN = 0.1
"""NMSE that another expert of one token is worth in a result of two tokens."""
_STORED = {"f16": 1e-7, "bf16": 6e-6, "q8_0": 5e-5, "q8_1": 5e-5, "q5_0": 5e-4, "q5_1": 5e-4}
_STORED_OTHER = 2e-3
"""NMSE of values stored in a type, where the values differ a little: of four bits a step in 1 of 30 elements."""

_BLOCK_STEP = {"q8_0": (1e-4, 0.1), "q8_1": (1e-4, 0.1)}
_BLOCK_STEP_FEW_BITS = (1e-2, 1.0)
_BLOCK_STEP_OTHER = (1e-2, inf)
"""NMSE and largest element of a value one rounding away once it is stored in blocks: a step, or the block's scale, may
flip. The types of `_FEW_BITS` have plain steps; of the others one scale may move a whole super-block."""
_FEW_BITS = frozenset({"q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"})


@dataclass(frozen=True, slots=True)
class Noise:
    """NMSE that nodes add: smooth, and in steps."""

    smooth: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Noise) -> Noise:
        return Noise(self.smooth + other.smooth, self.steps + other.steps)

    def __or__(self, other: Noise) -> Noise:
        return Noise(max(self.smooth, other.smooth), max(self.steps, other.steps))

    def __bool__(self) -> bool:
        return self.smooth > 0 or self.steps > 0


_NONE = Noise()


class Chain:
    """Follows a trajectory graph by graph, and says of any tensor of the last one what it may be off by."""

    def __init__(self, arithmetic: Arithmetic, *, by_nodes: bool = False) -> None:
        """Ready for the first step.

        Args:
            arithmetic: of both sides.
            by_nodes: whether each node is judged by itself as well, which a choice of experts may then lean on.
        """
        self._arithmetic = arithmetic
        self._by_nodes = by_nodes
        self._noise: dict[Tensor, Noise] = {}
        self._carried: dict[Tensor, Noise] = {}
        self._writers: dict[Tensor, list[Tensor]] = {}

    def enter(self, graph: Graph) -> None:
        """Go on to the next step."""
        self._leave()
        self._noise, self._writers = {}, {}
        noisy = {t for t, noise in self._carried.items() if noise}
        for node in graph:
            if not computes(node):
                continue
            fed = any(s is not None and s.root in noisy for s in node.src)
            noise = _noise_of(node, self._arithmetic, fed=fed)
            self._noise[node] = noise
            if noise or fed:
                noisy.add(node.root)
            if writes_in_place(node):
                self._writers.setdefault(node.root, []).append(node)

    def budget(self, t: Tensor) -> Budget:
        """The budget of `t`, an output of the step or a cache after it."""
        reached, own, before = self._sum(t)
        if len(reached) < 2 and not before:
            return budget_of(reached[0] if reached else t, self._arithmetic)
        budget = _budget(t, own + before)
        if self._may_choose(reached):
            return replace(budget, nmse=max(budget.nmse, _CHOSEN if self._by_nodes else 0.0), element=inf)
        return budget

    def stated(self, t: Tensor, stated: Budget) -> Budget:
        """What `t` may be off by where the case has a recording, made with float32 products, and states how near it is.

        Where operands are rounded, the wider of that and of what this is worth; and behind a choice of experts what
        another one is worth, since a recording's nodes are judged by themselves as well.
        """
        if self._arithmetic.products not in _OPERANDS:
            return stated
        budget = max(stated, self.budget(t), key=lambda b: b.nmse)
        if self._may_choose(self._sum(t)[0]):
            return replace(budget, nmse=max(budget.nmse, _CHOSEN), element=inf)
        return budget

    def beside(self, t: Tensor, worth: float) -> Budget:
        """What `t` may be off by from a recording, where two other arithmetics than the exact one are worth `worth`.

        The chain's own rounding comes on top: errors that have nothing to do with each other add up as roots at most.
        """
        own = self.budget(t)
        if not worth:
            return own
        there = free_running(worth)
        return Budget((sqrt(own.nmse) + sqrt(worth)) ** 2, own.element + there.element, there.why)

    def _may_choose(self, reached: Iterable[Tensor]) -> bool:
        return self._arithmetic.products in _OPERANDS and any(n.op in _CHOICES for n in reached)

    def _leave(self) -> None:
        """What the step leaves in each cache: the worst of this step and those before, never their sum.

        Attention averages over what earlier steps stored, so it does not pile up from step to step.
        """
        left = dict(self._carried)
        for root in self._writers:
            if root in self._noise:
                continue  # a node's own result, gone after the step
            _, own, before = self._sum(root)
            left[root] = left.get(root, _NONE) | own | before
        self._carried = left

    def _sum(self, t: Tensor) -> tuple[list[Tensor], Noise, Noise]:
        """The nodes of the step that `t` depends on, their noise, and that of the caches they read."""
        reached = [n for n in self._reach(t) if n in self._noise or n in self._carried]
        made = [n for n in reached if n in self._noise]
        own = sum((self._noise[n] for n in made), _NONE)
        before = _NONE
        for n in reached:
            before |= self._carried.get(n, _NONE)
        return made, own, before

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


def _noise_of(node: Tensor, arithmetic: Arithmetic, *, fed: bool) -> Noise:
    """What `node` adds; roundings go different ways only where its sources already differ (`fed`)."""
    arithmetic = arithmetic.at(node)
    smooth = budget_of(node, replace(arithmetic, products=EXACT.products)).nmse
    return Noise(smooth, _operands(node, arithmetic) + (_rounding(node, arithmetic) if fed else 0.0))


def _operands(node: Tensor, arithmetic: Arithmetic) -> float:
    if not DECLARATIONS[node.op].rounding.products or arithmetic.products not in _OPERANDS:
        return 0.0
    weights = node.src[0] if node.op in {"MUL_MAT", "MUL_MAT_ID"} else None
    return _OPERANDS[arithmetic.products] + (_DYNAMIC if weights is not None and weights.type.is_quantized else 0.0)


def _rounding(node: Tensor, arithmetic: Arithmetic) -> float:
    worth = 0.0
    if changes(node, arithmetic):
        to = ""
        if node.op in {"MUL_MAT", "MUL_MAT_ID"}:
            to = arithmetic.mul_mat.get(_type(node, 0), "")
        elif node.op == "FLASH_ATTN_EXT":
            to = arithmetic.flash_attn.get(_type(node, 1), "")
        elif node.op in {"UNARY", "GLU"}:
            to = "f16"
        worth += _ACTIVATIONS.get(to, 0.0)
    narrow = node.type.is_quantized or node.type.name in _STORED
    kept = node.src[1:2] if node.op == "IM2COL" else node.src[:1]  # a kernel comes first, which it does not read
    if narrow and any(s is not None and s.type is not node.type for s in kept):
        worth += _STORED.get(node.type.name, _STORED_OTHER)
    return worth


def _type(node: Tensor, i: int) -> str:
    src = node.src[i]
    return "" if src is None else src.type.name


def _budget(t: Tensor, noise: Noise) -> Budget:
    smooth, steps = _ACCUMULATE * noise.smooth, _INDEPENDENT * noise.steps
    nmse = smooth + steps
    if not nmse:
        return RAW
    why = "a chain of nodes" if not steps else "a chain of nodes, some of which round"
    element = 4 * PEAK * sqrt(smooth) + PEAK * sqrt(steps)
    if not t.type.is_quantized:
        return stored(t, nmse, element, why)
    other = _BLOCK_STEP_FEW_BITS if t.type.name in _FEW_BITS else _BLOCK_STEP_OTHER
    floor, step = _BLOCK_STEP.get(t.type.name, other)
    return Budget(max(nmse, floor), element + step, f"{why}, stored in blocks")
