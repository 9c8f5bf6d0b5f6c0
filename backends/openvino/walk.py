"""The walk: which value each root holds as the nodes run, read and written through views; emitters see only this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
import openvino.opset15 as o
from openvino import Node, Type

from conformance.backend.translating import Emitter, Plan, computes
from conformance.cgraph.errors import BackendError, ConformanceError
from conformance.cgraph.tensor import Bytes, Tensor, is_empty, nelements
from conformance.cgraph.types import BF16, F16, I64, GGMLType

from . import blocks
from .forms import BLOCKS, NUMBER, NUMBERS, VALUE, Part, encode, parts, value
from .nodes import TYPES, Constants, Shape, Value, reshape, round_bf16, round_f16
from .views import read, region, write

ROUND: dict[GGMLType, Callable[[Constants, Value], Value]] = {F16: round_f16, BF16: round_bf16}

Weights = Callable[[Tensor], Bytes]
"""A weight's bytes, which become constants of the model."""


@dataclass(slots=True)
class Held:
    """What a root holds at one moment: numbers (float32 or int32, `ne[::-1]` or any shape in that order) or parts."""

    number: Value | None = None
    parts: dict[str, Value] | None = None
    rounded: bool = True
    """Whether `number` already lies on the grid of the root's type; if not, whoever reads it rounds it first."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One parameter of the model: which tensor of the plan it takes, in which form."""

    index: int
    form: str


@dataclass(slots=True)
class Emitted:
    """A plan as OpenVINO nodes, not yet a model."""

    parameters: list[Node] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    results: list[Node] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)
    """Tensor of the plan and part, for each result: first the plan's outputs, then the caches."""
    caches: int = 0
    """How many of the last results are new contents of caches."""
    notes: Counter[str] = field(default_factory=Counter)


class Walk:
    """The context that emitters get."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self.c = Constants()
        self.shared: dict[Hashable, Value] = {}
        """Values that several nodes can use, such as the angles of ROPE."""
        self._plan = plan
        self._weights = weights
        self._held: dict[Tensor, Held] = {}
        self._leaves: dict[Feed, Value] = {}
        self._out = Emitted()
        self._last_read = {s.root: plan.index[n] for n in plan.graph if computes(n) for s in n.src if s is not None}

    # -- leaves ---------------------------------------------------------------------------------------------------

    def _parameter(self, t: Tensor, form: str, dtype: str, shape: Shape) -> Value:
        feed = Feed(self._plan.index[t], form)
        if feed not in self._leaves:
            if self._plan.roles[t] == "weight":
                arrays = {VALUE: value(t, self._weights(t))} if form == VALUE else encode(t, self._weights(t))
                self._leaves[feed] = o.constant(np.ascontiguousarray(arrays[form], dtype))
            else:
                p = o.parameter(list(shape), TYPES[dtype])
                self._out.parameters.append(p)
                self._out.feeds.append(feed)
                self._leaves[feed] = p
        return self._leaves[feed]

    def _part(self, t: Tensor, p: Part) -> Value:
        if p.name == NUMBER and t.type is F16 and self._plan.roles[t] != "cache":
            return self._parameter(t, VALUE, "<f4", t.shape)
        shape = (_units(t), p.width) if p.width else t.shape
        x = self._parameter(t, p.name, p.dtype, shape)
        return o.convert(x, Type.f32) if p.dtype == "<f2" else x

    def _leaf(self, root: Tensor, *, whole: bool) -> Held:
        """A leaf as the graph finds it; `whole` for the form that can be written or moved, else one to compute with."""
        if root.type in NUMBERS:
            return Held(number=self._part(root, parts(root.type)[0]))
        if whole or (self._plan.roles[root] == "cache" and root.type in BLOCKS):
            return Held(parts={p.name: self._part(root, p) for p in parts(root.type)})
        if Feed(self._plan.index[root], VALUE) not in self._leaves:
            self._out.notes[f"leaves {'dequantised' if root.type.is_quantized else 'cast'} on the host"] += 1
        return Held(number=self._parameter(root, VALUE, "<i4" if root.type is I64 else "<f4", root.shape))

    def _current(self, root: Tensor, *, whole: bool) -> Held:
        held = self._held.get(root)
        if held is not None:
            return held
        if root not in self._plan.roles:
            raise BackendError(f"{root}: is read before the graph computes it")
        held = self._leaf(root, whole=whole)
        if root.type in NUMBERS:
            self._held[root] = held
        return held

    # -- what emitters read ---------------------------------------------------------------------------------------

    def number(self, t: Tensor) -> Value:
        """`t`'s elements now: float32, or int32 of an integer type; shape `ne[::-1]`."""
        held = self._current(t.root, whole=False)
        if held.number is None:
            return self._decoded(t, held)
        if not held.rounded:
            held.number = ROUND[t.type](self.c, held.number)
            held.rounded = True
        x, how = read(self.c, held.number, region(t, blocks=False))
        self._note(f"read by {how}" if how != "whole" else how)
        return x

    def _decoded(self, t: Tensor, held: Held) -> Value:
        if t.type not in BLOCKS or held.parts is None:
            raise BackendError(f"{t}: {t.type} that the graph itself wrote cannot be read as numbers in OpenVINO")
        r = region(t, blocks=True)
        own = {p.name: read(self.c, held.parts[p.name], r, p.width)[0] for p in parts(t.type)}
        return reshape(self.c, blocks.numbers(self.c, t.type, own), t.shape)

    def parts(self, t: Tensor) -> dict[str, Value]:
        """`t`'s blocks now, each part of shape (ne3, ne2, ne1, blocks, width): to move without looking inside."""
        held = self._current(t.root, whole=True)
        if held.parts is None:
            held = self._leaf(t.root, whole=True)
        r = region(t, blocks=True)
        assert held.parts is not None  # a type without numbers is held as parts
        return {p.name: read(self.c, held.parts[p.name], r, p.width)[0] for p in parts(t.type)}

    def _note(self, how: str) -> None:
        if how != "whole":
            self._out.notes[f"views {how}"] += 1

    # -- what emitters store --------------------------------------------------------------------------------------

    def store(self, node: Tensor, x: Value, *, exact: bool = False) -> None:
        """Make `x` the value of `node`, rounded to its type.

        Args:
            node: the node.
            x: in order of `node`'s elements, of any shape.
            exact: whether `x` already lies on the grid of `node`'s type.

        Raises:
            BackendError: values of this type cannot be built.
        """
        if node.type in BLOCKS:
            rows = reshape(self.c, x, (*node.ne[:0:-1], node.ne[0] // node.type.blck_size, node.type.blck_size))
            self.store_parts(node, blocks.quantized(self.c, node.type, rows, read_again=self.read_again(node)))
            return
        if node.type not in NUMBERS:
            raise BackendError(f"{node}: values cannot be stored in {node.type}; ask supports_op first")
        r = region(node, blocks=False)
        whole = r.contiguous and r.size == r.total
        lossy = node.type in ROUND and not exact
        # BF16 is held between steps as float32
        wide = node.type is BF16 and self._plan.roles.get(node.root) == "cache"
        if lossy and (wide or (not whole and self.read_again(node))):
            x, lossy = ROUND[node.type](self.c, x), False
        old = None if whole else self._current(node.root, whole=True)
        lossy = lossy or (old is not None and not old.rounded)
        new, how = write(self.c, old and old.number, r, x)
        self._note(f"written by {how}" if how != "whole" else how)
        self._held[node.root] = Held(number=reshape(self.c, new, node.root.shape), rounded=not lossy)

    def read_again(self, node: Tensor) -> bool:
        """Whether a later node of the graph computes with what `node` stores.

        If not, its numbers leave the graph as they are and are rounded on the way.
        """
        return self._last_read.get(node.root, -1) > self._plan.index[node]

    def store_parts(self, node: Tensor, new: Mapping[str, Value]) -> None:
        """Make `new`, in order of `node`'s blocks, the value of `node`."""
        r = region(node, blocks=True)
        whole = r.contiguous and r.size == r.total
        old = {} if whole else (self._current(node.root, whole=True).parts or {})
        made = {}
        for p in parts(node.type):
            made[p.name], how = write(self.c, old.get(p.name), r, new[p.name], p.width)
        self._note(f"written by {how}" if how != "whole" else how)
        self._held[node.root] = Held(parts=made)

    # -- results --------------------------------------------------------------------------------------------------

    def _result(self, t: Tensor, index: int) -> None:
        """Add results for `t` as it is now."""
        held = self._current(t.root, whole=True)
        if held.number is not None:
            x, _ = read(self.c, held.number, region(t, blocks=False))
            self._emit(index, NUMBER, x)
            return
        r = region(t, blocks=True)
        assert held.parts is not None  # a root holds the one or the other
        for p in parts(t.type):
            x, _ = read(self.c, held.parts[p.name], r, p.width)
            self._emit(index, p.name, o.convert(x, Type.f16) if p.dtype == "<f2" else x)

    def _cache(self, t: Tensor, index: int) -> None:
        """Add results for the whole of a cache, in the shapes that the session's memory has."""
        held = self._current(t, whole=True)
        for p in parts(t.type):
            x = held.number if held.parts is None else held.parts[p.name]
            assert x is not None  # a root holds the one or the other
            x = reshape(self.c, x, (_units(t), p.width) if p.width else t.shape)
            self._emit(index, p.name, o.convert(x, Type.f16) if p.dtype == "<f2" else x)

    def _emit(self, index: int, form: str, x: Value) -> None:
        self._out.results.append(o.result(x))
        self._out.outputs.append((index, form))

    def run(self, emitters: Mapping[str, Emitter]) -> Emitted:
        """Emit every computed node in order, take outputs right after their nodes, caches at the end.

        Raises:
            BackendError: a node cannot be expressed.
        """
        wanted = set(self._plan.outputs)
        computed = set()
        emits = iter(self._plan.computed())
        pending = next(emits, None)
        for node in self._plan.graph:
            if node is pending:
                self._emit_node(emitters, node)
                computed.add(node.root)
                pending = next(emits, None)
            if node in wanted and not is_empty(node):
                self._result(node, self._plan.index[node])
        before = len(self._out.results)
        for t, role in self._plan.roles.items():
            if role == "cache" and t in computed:
                self._cache(t, self._plan.index[t])
        self._out.caches = len(self._out.results) - before
        return self._out

    def _emit_node(self, emitters: Mapping[str, Emitter], node: Tensor) -> None:
        emitter = emitters.get(node.op)
        if emitter is None:
            raise BackendError(f"{node}: there is no emitter for {node.op}; ask supports_op first")
        try:
            emitter(self, node)
        except ConformanceError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError) as e:
            shapes = ", ".join("absent" if s is None else f"{s.type}{list(s.ne)}" for s in node.src)
            raise BackendError(f"{node}: cannot be emitted for src {shapes}: {type(e).__name__}: {e}") from e


def _units(t: Tensor) -> int:
    return nelements(t) // t.type.blck_size
