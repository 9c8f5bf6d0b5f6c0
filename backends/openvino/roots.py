"""Roots: what each tensor that owns its bytes holds at the current point of the graph.

    leaf (parameter, constant or variable) --first use--> Held --writes--> Held ... --settled--> one value per part

A write into a part of a root is kept until the root is read, so that a cache that only receives rows is never copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import openvino.opset15 as o
from openvino import Type

from backends.openvino.translating.plan import Plan
from backends.openvino.translating.template import Sym
from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16, I64

from .bind import HostMemory
from .cache_window import windows
from .emitted import EmittedGraph, InputBinding
from .nodes import TYPES, Constants, Shape, Value
from .storage import BLOCKS, NUMBER, NUMBERS, VALUE, Part, encode, held_dtype, part_shape, parts, value
from .views import Rows, scatter


@dataclass(frozen=True, slots=True)
class Written:
    """Rows that replace some of a root's."""

    where: Rows
    rows: dict[str, Value]
    """Part -> the new rows, rounded to the root's type if the graph reads them again."""
    exact: bool = False
    """True if numbers are rounded to that type."""


@dataclass(slots=True)
class Held:
    """Current contents of a root."""

    parts: dict[str, Value]
    """Parts of the root's type (`storage`), or the numbers of a leaf that is only read.

    Numbers are float32 or int32, of any shape in the order of `ne[::-1]`."""
    rounded: bool = True
    """True if the numbers are already rounded to the root's type, so reads need not round."""
    pending: list[Written] = field(default_factory=list)
    """Writes that are not yet in `parts`."""
    log: list[Written] | None = None
    """All writes into a cache since the step began; None if they do not determine its contents."""


class Roots:
    """Contents of the roots of a graph, and the model's parameters for its leaves.

    Args:
        whole: bind caches as a whole, whatever the graph reads of them.
        constants: those of the model, if not plain ones.
    """

    bound: ClassVar[bool] = True
    """True if caches are on the host (`storage.held`) and receive new rows from it."""

    def __init__(
        self, plan: Plan, memory: HostMemory, *, whole: bool = False, constants: Constants | None = None
    ) -> None:
        self.c = constants or Constants()
        self.memory = memory
        self.out = EmittedGraph()
        self.windows = windows(plan) if self.bound and not whole else {}
        self.contents: dict[Tensor, Held] = {}
        """Root that was written, or a leaf with numbers that was read -> its contents."""
        self._plan = plan
        self._leaves: dict[InputBinding, Value] = {}

    def original(self, t: Tensor) -> Tensor:
        """Return the session's tensor, which `memory` knows, of which `t` is a copy, or `t` itself."""
        return self._plan.originals[self._plan.index[t]]

    def is_cache(self, root: Tensor) -> bool:
        """Return True if `root` is a cache."""
        return self._plan.roles.get(root) == "cache"

    # -- leaves ---------------------------------------------------------------------------------------------------

    def parameter(self, t: Tensor, form: str, dtype: str, shape: Shape) -> Value:
        """Return a part of leaf `t`, or its numbers: a constant if it is a weight, else a parameter."""
        feed = InputBinding(self._plan.index[t], form)
        if feed not in self._leaves:
            if self._plan.roles[t] == "weight":
                data = self.memory.look(self.original(t))
                arrays = {VALUE: value(t, data)} if form == VALUE else encode(t, data)
                array = np.ascontiguousarray(arrays[form], dtype)
                # shared if OpenVINO supports it: the session's own bytes, kept alive by the constant
                self._leaves[feed] = o.constant(array, shared_memory=array.flags.writeable)
            else:
                p = o.parameter([-1 if isinstance(n, Sym) else n for n in shape], TYPES[dtype])
                self.out.parameters.append(p)
                self.out.feeds.append(feed)
                self._leaves[feed] = self.c.shaped(p, shape)
        return self._leaves[feed]

    def leaf(self, root: Tensor, *, whole: bool) -> Held:
        """Return a leaf's first value: as stored if `whole` (to write or move it), else as numbers."""
        log: list[Written] | None = [] if self.is_cache(root) else None
        if whole or root.type in NUMBERS or (self.is_cache(root) and root.type in BLOCKS):
            return Held({p.name: self._part(root, p) for p in parts(root.type)}, log=log)
        if InputBinding(self._plan.index[root], VALUE) not in self._leaves:
            self.out.notes[f"leaves {'dequantised' if root.type.is_quantized else 'cast'} on the host"] += 1
        return Held({NUMBER: self.parameter(root, VALUE, "<i4" if root.type is I64 else "<f4", root.shape)})

    def _part(self, t: Tensor, p: Part) -> Value:
        shape = part_shape(t, p)
        if self.is_cache(t) and self.bound:
            if t in self.windows:
                order = self.out.orders[InputBinding(self._plan.index[t], p.name)] = self.windows[t].order
                shape = order.shape
            return self.parameter(t, p.name, held_dtype(p), shape)
        if p.name == NUMBER and t.type is F16 and not self.is_cache(t):
            return self.parameter(t, VALUE, "<f4", t.shape)
        x = self.parameter(t, p.name, p.dtype, shape)
        return self.c.shaped(o.convert(x, Type.f32), shape) if p.dtype == "<f2" else x

    # -- contents -------------------------------------------------------------------------------------------------

    def held(self, root: Tensor, *, whole: bool) -> Held:
        """Return the contents of `root`, perhaps with pending writes; `whole` as in `leaf`."""
        held = self.contents.get(root)
        if held is not None:
            return held
        if root not in self._plan.roles:
            raise BackendError(f"{root}: is read before the graph computes it")
        held = self.leaf(root, whole=whole)
        if root.type in NUMBERS:
            self.contents[root] = held
        return held

    def settled(self, root: Tensor, *, whole: bool) -> Held:
        """Return the contents of `root` after all writes; `whole` as in `leaf`."""
        held = self.held(root, whole=whole)
        for w in held.pending:
            held.parts = {
                p.name: scatter(self.c, held.parts[p.name], w.where, w.rows[p.name], p.width) for p in parts(root.type)
            }
        held.pending.clear()
        return held

    def set(self, root: Tensor, held: Held) -> None:
        """Replace the contents of `root`."""
        self.contents[root] = held

    def write(self, root: Tensor, w: Written, *, lossy: bool = False) -> None:
        """Replace rows of `root`, applied when it is read; `lossy`: they are not rounded yet."""
        if self.is_cache(root):
            held = self.contents.get(root)
            if held is None:
                held = self.contents[root] = self.leaf(root, whole=True)
            held.pending.append(w)
            if held.log is not None:
                held.log.append(w)
            return
        old = self.settled(root, whole=True)
        self.contents[root] = Held(old.parts, old.rounded and not lossy, [w])
