"""`xdna2`: an NPU that multiplies matrices in int8 only; a functional model, no hardware.

The rules of an XDNA2 backend for ggml: the MUL_MAT that it supports, its rounding, and its stored weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from conformance.backend.interface import BufferType, DeviceInfo, Support, Witness, no
from conformance.backend.kernel import Kernel, KernelBackend, KernelSession, Raw, Sources
from conformance.case.case import Case
from conformance.ggml import quants
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.matmul import AT_ONCE
from conformance.ggml.quants.requant import FORMS, quantised, weight_form
from conformance.ggml.tensor import Bytes, Tensor, is_contiguous, nrows
from conformance.ggml.types import F32, TYPES

COLUMNS = 16
"""Columns of the array."""
CONTEXT_COLUMNS = 4
"""Columns of a wide context: four such contexts fit the array, or sixteen of one column."""
MAX_SLOTS = 8
"""Maximum number of kernels, one per K."""

CHUNK = 1 << 18
"""Weights converted at a time: no second copy of a weight is in memory."""
LEAST_N = 16
"""Minimum activation rows of the array."""
DECODE_N = 64
"""TILE_N of the decode kernel."""
PREFILL_N = 256
"""TILE_N of the prefill kernel."""


def padded(n: int) -> int:
    """Return rows computed for `n` activation rows: 16 or a decode tile, or prefill tiles."""
    if n <= DECODE_N:
        return LEAST_N if n <= LEAST_N else DECODE_N
    return -(-n // PREFILL_N) * PREFILL_N


def tile(n: int) -> int:
    """Return TILE_N of the kernel for `n` rows of activations."""
    return DECODE_N if n <= DECODE_N else PREFILL_N


def dispatch(weights: NDArray[np.int8], activations: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return `activations @ weights^T`, summed in int32, (n, m), as one run of a kernel.

    Weights are (m, k), activations (n, k); n is a multiple of the tile or `LEAST_N`. A product of float64 is exact
    here: K at most 2^16 terms of at most 2^14 each stay far below 2^53, and K up to 2^17 below int32.
    """
    out = np.zeros((len(activations), len(weights)), np.int32)
    filled = int(np.flatnonzero(activations.any(axis=1)).max(initial=-1)) + 1  # padding is zeros and stays so
    x = activations[:filled].astype(np.float64)
    step = max(1, CHUNK // weights.shape[1])
    for i in range(0, len(weights), step):
        out[:filled, i : i + step] = x @ weights[i : i + step].astype(np.float64).T
    return out


@dataclass(frozen=True, slots=True)
class Context:
    """A `hw_context`: the kernel of one K and TILE_N, on its own columns."""

    k: int
    columns: int
    tile: int = DECODE_N

    def run(self, weights: NDArray[np.int8], activations: NDArray[np.int8]) -> NDArray[np.int32]:
        """Run `dispatch`: the kernel reads its operands as consecutive rows of `k`."""
        return dispatch(self._rows(weights), self._rows(activations))

    def _rows(self, x: NDArray[np.int8]) -> NDArray[np.int8]:
        return x if x.shape[1] == self.k else np.resize(x, (len(x), self.k))


@dataclass(slots=True)
class Array:
    """Loaded contexts, and counters."""

    slots: Sequence[int]
    """K of each kernel."""
    columns: int = CONTEXT_COLUMNS
    """Columns of one context."""
    loaded: list[Context] = field(default_factory=list)
    """Loaded contexts, least recently used first."""
    switches: int = 0
    """Number of times a context was evicted for another."""
    most_columns: int = 0
    """Maximum columns of all contexts loaded at the same time."""
    least_rows: int = 0
    """Minimum activation rows of a kernel run; 0 before the first."""
    runs: dict[str, int] = field(default_factory=dict)
    """`K=2048 TILE_N=64` -> runs."""
    rows: int = 0
    """Activation rows requested."""
    padding: int = 0
    """Padding rows computed in addition."""

    def run(self, weights: NDArray[np.int8], activations: NDArray[np.int8]) -> NDArray[np.int32]:
        """Multiply, padded to the tile; BackendError if no columns are free for the K's context."""
        n, k = activations.shape
        context = self._context(k, tile(n))
        whole = padded(n)
        name = f"K={context.k} TILE_N={context.tile}"
        self.runs[name] = self.runs.get(name, 0) + 1
        self.rows += n
        self.padding += whole - n
        rows = np.zeros((whole, k), np.int8)
        rows[:n] = activations
        self.most_columns = max(self.most_columns, sum(c.columns for c in self.loaded))
        self.least_rows = min(self.least_rows or len(rows), len(rows))
        return context.run(weights, rows)[:n]

    def _context(self, k: int, tile_n: int) -> Context:
        """Return the context of a kernel, evicting the least recently used one if necessary."""
        context = next((c for c in self.loaded if c.k == k and c.tile == tile_n), None)
        if context is not None:
            self.loaded.remove(context)
        elif self._free() < self.columns:
            self.loaded.pop(0)
            self.switches += 1
        if self._free() < self.columns:
            raise BackendError(
                f"xdna2: {self.columns} columns for a context of K={k} expected, {self._free()} of {COLUMNS} are free"
            )
        self.loaded.append(context or Context(k, self.columns, tile_n))
        return self.loaded[-1]

    def _free(self) -> int:
        return COLUMNS - sum(c.columns for c in self.loaded)


SLOTS = "2048+4096+5632+14336"
"""K of attention and feed-forward projections of the target models."""
FORM = "int8xrow"
_GRID = FORMS[FORM]
_FLOATING = {n: FORM for n, t in TYPES.items() if t.is_quantized or n in {"f32", "f16", "bf16"}}

ARITHMETIC = Arithmetic("xdna2", mul_mat=_FLOATING, weights=_FLOATING)
"""Both operands in int8, with one float32 scale per row of weights and per token."""


class Xdna2Backend(KernelBackend):
    """MUL_MAT in int8 on a functional model of the array.

    Args:
        k: K of up to 8 kernel slots, joined by `+`.
        min_n: minimum rows of activations (tokens) that are routed here.
        max_n: maximum rows, 0 for any number: with 1 the NPU runs decoding only and another backend the prompt.
        columns: columns of one context, of the array's 16: 4 are a wide one, so that four are loaded at a time.

    Raises:
        UsageError: an option is not a number, there are too many slots, or more columns than there are.
    """

    name = "xdna2"
    places = frozenset()

    def __init__(self, k: str = SLOTS, min_n: str = "1", max_n: str = "0", columns: str = str(CONTEXT_COLUMNS)) -> None:
        self._slots = tuple(_number("k", part) for part in k.split("+"))
        if len(self._slots) > MAX_SLOTS or min(self._slots) < 1:
            raise UsageError(f"xdna2: k: 1 to {MAX_SLOTS} positive sizes joined by + expected, {k!r} found")
        self._min_n, self._max_n = _number("min_n", min_n), _number("max_n", max_n)
        self._columns = _number("columns", columns)
        if not 1 <= self._columns <= COLUMNS:
            raise UsageError(f"xdna2: columns: 1 to {COLUMNS} expected, {columns!r} found")

    def info(self) -> DeviceInfo:
        """Return a description of the functional model."""
        return DeviceInfo(
            "xdna2",
            "functional model",
            f"functional model of an XDNA2 NPU on NumPy, no hardware: MUL_MAT in int8, K of {self._spelled}, "
            f"TILE_N {DECODE_N} and {PREFILL_N}, n from {LEAST_N}, {COLUMNS // self._columns} contexts of "
            f"{self._columns} columns",
            {"numpy": np.__version__},
        )

    def arithmetic(self) -> Arithmetic:
        """Return the rounding: weights and activations in int8 by rows, exact sums, one scale."""
        return ARITHMETIC

    def buffer_types(self) -> Sequence[BufferType]:
        """Return the host's memory, and a type for each slot, which stores int8 copies of its K."""
        return [BufferType("host"), *(BufferType(f"slot K={k}", is_host=False) for k in self._slots)]

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """Return `supports`; a slot supports only weights of its K."""
        answers = zip(graph, self.supports(graph), strict=True)
        why = self._misplaced(tensor, buffer)
        return [no(f"{n.op}: {why}") if s and why and tensor in n.src else s for n, s in answers]

    def _misplaced(self, tensor: Tensor, buffer: int) -> str:
        at = buffer % (1 + len(self._slots))
        if not at or self._slots[at - 1] == tensor.ne[0]:
            return ""
        return f"{tensor.name} has K={tensor.ne[0]} and does not fit the slot of K={self._slots[at - 1]}"

    def kernels(self) -> Mapping[str, Kernel]:
        """Return the only op; sessions compute it, because they store the weights."""
        return {"MUL_MAT": _no_session}

    def refuses(self, node: Tensor) -> str:
        """Return why a node is not routed here, by the real backend's rules in their order."""
        w, x = node.src[0], node.src[1]
        if w is None or x is None:
            return "src[0] and src[1] expected"
        n, is_weight = nrows(x), bool(weight_form(node, ARITHMETIC.weights, {}))
        in_f32 = x.type is F32 and node.type is F32
        rules = (
            (w.ne[0] in self._slots, f"K={w.ne[0]} has no kernel slot; supported: K={self._spelled}"),
            (is_weight, f"src[0] must be a weight, which is stored as int8 once; {w} found"),
            (w.ne[2] * w.ne[3] == 1, f"one matrix of weights expected, {list(w.ne)} found"),
            (in_f32, f"activations and result in f32 expected, {x.type} and {node.type} found"),
            (is_contiguous(x), f"contiguous activations expected, nb {list(x.nb)} found"),
            (
                self._min_n <= n <= (self._max_n or n),
                f"n={n} is routed elsewhere, n from {self._min_n} to {self._max_n or 'any'} comes here",
            ),
        )
        return next((reason for holds, reason in rules if not holds), "")

    def open(self, case: Case) -> Xdna2Session:
        """Copy persistent tensors; BackendError if a weight must be in a slot of another K."""
        for t, p in case.placement.items():
            if p.must and (why := self._misplaced(t, p.buffer)):
                raise BackendError(why)
        return Xdna2Session(self._slots, self._columns, case)

    @property
    def _spelled(self) -> str:
        return ", ".join(map(str, self._slots))


class Xdna2Session(KernelSession):
    """Weights of a case, in int8 from their first use on."""

    def __init__(self, slots: Sequence[int], columns: int, case: Case) -> None:
        super().__init__("xdna2 (functional model)", {"MUL_MAT": self._mul_mat}, case)
        self._array = Array(slots, columns)
        self._fixed = frozenset(case.persistent).difference(case.caches())
        self._int8: dict[Tensor, tuple[NDArray[np.int8], NDArray[np.float32]]] = {}

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor and drop its int8 copy."""
        super().write(tensor, data)
        self._int8.pop(tensor, None)

    def witness(self) -> Witness:
        """Return kernel runs, use of the array, bytes of int8 weights, padding, context switches."""
        w, a = super().witness(), self._array
        w.kernels = dict(a.runs)
        w.promises = ["tiles"]
        w.counters = {"columns": a.most_columns, "least_rows": a.least_rows, "switches": a.switches}
        w.bytes["int8"] = sum(q.nbytes + d.nbytes for q, d in self._int8.values())
        w.notes = [
            "functional model of an XDNA2 NPU, no hardware",
            f"{len(a.loaded)} contexts of {a.columns} columns, {a.switches} switches",
            f"{a.padding} rows of padding beside {a.rows} of activations",
        ]
        return w

    def _mul_mat(self, node: Tensor, dst: Raw, src: Sources) -> None:
        """Compute `dst = (q_x q_w^T) * (d_x d_w)`: an exact int32 sum, then one float32 scale."""
        weight, x = node.src[0], src[1]
        if weight is None or src[0] is None or x is None:
            return
        q_w, d_w = self._weights(weight, src[0])
        q_x, d_x = _by_rows(x.reshape(-1, weight.ne[0]))
        out = dst.reshape(-1, node.ne[0])
        step = max(1, AT_ONCE // weight.ne[0])
        for i in range(0, len(q_w), step):
            rows = slice(i, i + step)
            out[:, rows] = self._array.run(q_w[rows], q_x).astype(np.float32) * (d_x * d_w[rows].T)

    def _weights(self, weight: Tensor, raw: Raw) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        if weight in self._int8:
            return self._int8[weight]
        rows = _in_int8(weight, raw)
        if weight in self._fixed:
            self._int8[weight] = rows
        return rows


def _in_int8(weight: Tensor, raw: Raw) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise a matrix of weights, few rows at a time."""
    k, m = weight.ne[:2]
    q, d = np.empty((m, k), np.int8), np.empty((m, 1), np.float32)
    step = max(1, CHUNK // k)
    for i in range(0, m, step):
        part = slice(i, i + step)
        q[part], d[part] = _by_rows(quants.to_float(weight.type, raw[:, :, part]).reshape(-1, k))
    return q, d


def _by_rows(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise to int8 (rows, k) with one scale each, (rows, 1)."""
    assert _GRID is not None
    q, d = quantised(_GRID, x)
    return q[..., 0, :], d[..., 0, :].astype(np.float32)


def _no_session(node: Tensor, dst: Raw, src: Sources) -> None:
    """Raise UsageError: sessions provide their own kernel."""
    del dst, src
    raise UsageError(f"{node}: an xdna2 session expected")


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"xdna2: {name}: a whole number expected, {text!r} found")
    return int(text)
