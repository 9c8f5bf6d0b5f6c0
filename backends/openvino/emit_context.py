"""Context of emitters: tensors as values of a model, read and stored through their roots."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import openvino.opset15 as o
from openvino import Type

from backends.openvino.translating.plan import Emitter, Plan
from backends.openvino.translating.template import same
from conformance.ggml.errors import BackendError
from conformance.ggml.ops.op import optional
from conformance.ggml.tensor import Tensor, computes, is_empty
from conformance.ggml.types import BF16, F16, GGMLType

from .cache_window import Window
from .emitted import CacheWrite, EmittedGraph
from .nodes import Constants, Value, numbers, quantized, reshape, round_bf16, round_f16, shape_of
from .roots import Held, Roots, Written
from .storage import BLOCKS, NUMBER, NUMBERS, part_shape, parts
from .views import Region, Rows, arranged, place, read, region
from .weights import Stored

ROUND: dict[GGMLType, Callable[[Constants, Value], Value]] = {F16: round_f16, BF16: round_bf16}


def src(node: Tensor, i: int) -> Tensor:
    """Return `node.src[i]`, which the op requires; BackendError if it is absent."""
    s = optional(node, i)
    if s is None:
        raise BackendError(f"{node}: src[{i}] is absent, {node.op} needs it")
    return s


class EmitContext:
    """Context passed to emitters: numbers of tensors, read and stored through their roots."""

    def __init__(self, plan: Plan, roots: Roots) -> None:
        self.c = roots.c
        self.shared: dict[Hashable, Value] = {}
        """Values shared by several nodes, such as angles."""
        self._plan = plan
        self._roots = roots
        self._out = roots.out
        self._last_read = {s.root: plan.index[n] for n in plan.graph if computes(n) for s in n.src if s is not None}

    # -- what emitters read ---------------------------------------------------------------------------------------

    def number(self, t: Tensor) -> Value:
        """Return `t`'s current elements: float32, or int32 for integers; shape `ne[::-1]`."""
        if t.root in self._roots.windows:
            return self._seen(t, self._roots.windows[t.root])
        held = self._roots.settled(t.root, whole=False)
        if NUMBER not in held.parts:
            return self._decoded(t, held)
        if not held.rounded:
            held.parts[NUMBER] = ROUND[t.type](self.c, held.parts[NUMBER])
            held.rounded = True
        x, how = read(self.c, held.parts[NUMBER], region(t, blocks=False))
        if how != "whole":
            self.note(f"views read by {how}")
        return x

    def _seen(self, t: Tensor, window: Window) -> Value:
        """Return view `t` of the first cells of a cache, with the rows written so far."""
        held = self._roots.held(t.root, whole=True)
        self._out.inside |= {(self._plan.index[ids], window.cells) for ids in window.ids}
        self.note("views read by slice")
        x = window.read(self.c, held.parts[NUMBER], [(w.where.ids, w.rows[NUMBER]) for w in held.pending])
        return reshape(self.c, x, t.shape)

    def _decoded(self, t: Tensor, held: Held) -> Value:
        if t.type not in BLOCKS:
            raise BackendError(f"{t}: {t.type} that the graph itself wrote cannot be read as numbers in OpenVINO")
        return reshape(self.c, numbers(self.c, t.type, self._blocks(t, held)), t.shape)

    def _blocks(self, t: Tensor, held: Held) -> dict[str, Value]:
        r = region(t, blocks=True)
        return {p.name: read(self.c, held.parts[p.name], r, p.width)[0] for p in parts(t.type)}

    def baked(self, t: Tensor) -> bool:
        """Return True if `t` is a weight that becomes a constant of the model."""
        return self._plan.roles.get(t) == "weight"

    def weight(self, node: Tensor) -> Stored | None:
        """Return `src[0]` of a product or lookup if it is a weight that can stay compressed."""
        t = node.src[0]
        if t is None or not self.baked(t):
            return None
        memory = self._roots.memory
        stored = memory.weights.get(node, self._roots.original(t), memory.look)
        if stored is not None:
            self._out.notes["weights kept compressed"] += 1
            self._out.halves |= stored.half
        return stored

    def parts(self, t: Tensor) -> dict[str, Value]:
        """Return `t`'s current blocks, each part (ne3, ne2, ne1, blocks, width), for moves."""
        return self._blocks(t, self._roots.settled(t.root, whole=True))

    def note(self, what: str) -> None:
        """Count `what` in the witness's notes."""
        self._out.notes[what] += 1

    # -- what emitters store --------------------------------------------------------------------------------------

    def store(self, node: Tensor, x: Value, *, exact: bool = False) -> None:
        """Set the value of `node` to `x`, rounded to its type unless it is `exact` already.

        `x` has `node`'s elements in order, in any shape. BackendError if values of this type cannot be built.
        """
        if node.type in BLOCKS:
            rows = reshape(self.c, x, (*node.ne[:0:-1], node.ne[0] // node.type.blck_size, node.type.blck_size))
            self.store_parts(node, quantized(self.c, node.type, rows, read_again=self.read_again(node)))
            return
        if node.type not in NUMBERS:
            raise BackendError(f"{node}: values cannot be stored in {node.type}; ask supports_op first")
        r = region(node, blocks=False)
        lossy = node.type in ROUND and not exact
        # a BF16 cache is float32 between steps; the host rounds narrower types
        wide = node.type is BF16 and self._roots.is_cache(node.root)
        if lossy and (wide or (not r.whole and self.read_again(node))):
            x, lossy = ROUND[node.type](self.c, x), False
        if r.whole:
            self._roots.set(node.root, Held({NUMBER: reshape(self.c, x, node.root.shape)}, rounded=not lossy))
        else:
            self._replace(node, r, {NUMBER: x}, lossy=lossy)

    def read_again(self, node: Tensor) -> bool:
        """Return True if a later node computes with `node`'s value; else it is rounded on output."""
        return self._last_read.get(node.root, -1) > self._plan.index[node]

    def _replace(self, node: Tensor, r: Region, new: Mapping[str, Value], *, lossy: bool = False) -> None:
        where, order, how = place(self.c, r)
        rows = {p.name: arranged(self.c, new[p.name], r, where, order, p.width) for p in parts(node.type)}
        self.note(f"views written by {how}")
        self._roots.write(node.root, Written(where, rows), lossy=lossy)

    def rows(self, node: Tensor, ids: Value) -> Rows | None:
        """Return rows `ids`, int (n,), of `node` as positions in its root; None if not on one axis."""
        r = region(node, blocks=node.type in BLOCKS)
        n = r.shape[-1]
        if not (r.contiguous and r.total % n == 0 and r.offset % n == 0):
            return None
        if not same(r.offset, 0):
            ids = self.c.shaped(o.add(o.convert(ids, Type.i64), self.c.i64(r.offset // n)), shape_of(self.c, ids))
        return Rows((r.total // n, n), 0, ids)

    def store_rows(self, node: Tensor, where: Rows, new: Mapping[str, Value], *, exact: bool = True) -> None:
        """Replace rows `where` of `node`'s root by parts `new` (n, …); `exact` as in `store`."""
        lossy = node.type in ROUND and not exact
        if lossy and (self.read_again(node) or (node.type is BF16 and self._roots.is_cache(node.root))):
            new, lossy = {n: ROUND[node.type](self.c, x) for n, x in new.items()}, False
        self.note("views written by rows")
        self._roots.write(node.root, Written(where, dict(new), exact=not lossy), lossy=lossy)

    def store_parts(self, node: Tensor, new: Mapping[str, Value]) -> None:
        """Set the value of `node` to `new`, in order of its blocks."""
        r = region(node, blocks=True)
        if r.whole:
            self._roots.set(node.root, Held(dict(new)))
        else:
            self._replace(node, r, new)

    # -- results --------------------------------------------------------------------------------------------------

    def _result(self, t: Tensor, index: int) -> None:
        """Add results for the current value of `t`."""
        held = self._roots.settled(t.root, whole=True)
        if NUMBER in held.parts:
            x, _ = read(self.c, held.parts[NUMBER], region(t, blocks=False))
            self._out.output(index, NUMBER, x)
            return
        blocks = self._blocks(t, held)
        for p in parts(t.type):
            x = blocks[p.name]
            self._out.output(index, p.name, o.convert(x, Type.f16) if p.dtype == "<f2" else x)

    def _cache(self, t: Tensor, index: int) -> None:
        """Add results for a whole cache, in the shapes of the session's memory."""
        held = self._roots.settled(t, whole=True)
        for p in parts(t.type):
            x = reshape(self.c, held.parts[p.name], part_shape(t, p))
            self._out.output(index, p.name, o.convert(x, Type.f16) if p.dtype == "<f2" and not self._roots.bound else x)

    def _commit(self, t: Tensor, index: int, log: list[Written]) -> None:
        """Add results for the rows that were written into a cache."""
        for w in log:
            leaf = self._out.leaf_of(w.where.ids)
            ids = self._out.result(w.where.ids) if leaf is None else leaf
            for p in parts(t.type):
                extents = (*w.where.extents, *((p.width,) if p.width else ()))
                rows = self._out.result(w.rows[p.name])
                commit = CacheWrite(index, p.name, extents, w.where.axis, ids, rows, leaf is not None, w.exact)
                self._out.commits.append(commit)

    def run(self, emitters: Mapping[str, Emitter]) -> EmittedGraph:
        """Emit every computed node, outputs after theirs, caches last; BackendError on failure."""
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
        self._out.first_cache = len(self._out.results)
        contents = self._roots.contents
        caches = [t for t in self._plan.caches if t in computed and t in contents]
        written = {t: contents[t].log if self._roots.bound else None for t in caches}
        for t, log in written.items():
            if log is None:
                self._cache(t, self._plan.index[t])
        for t, log in written.items():
            if log is not None:
                self._commit(t, self._plan.index[t], log)
        self._out.symbols = self.c.symbols
        self._out.parameters += self.c.symbols.values()
        return self._out

    def _emit_node(self, emitters: Mapping[str, Emitter], node: Tensor) -> None:
        emitter = emitters.get(node.op)
        if emitter is None:
            raise BackendError(f"{node}: there is no emitter for {node.op}; ask supports_op first")
        try:
            emitter(self, node)
        except (RuntimeError, TypeError, ValueError, LookupError) as e:
            shapes = ", ".join("absent" if s is None else f"{s.type}{list(s.ne)}" for s in node.src)
            words = f"{type(e).__name__}: {e}"
            raise BackendError(f"{node}: cannot be emitted for src {shapes}: {words}", words=words) from e
