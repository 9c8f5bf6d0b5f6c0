"""KV cache of each layer: its tensors, the nodes that store into them, and the views read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Tensor, nelements, new_tensor, row_size
from conformance.ggml.types import F32

from .config import Cparams, Hparams
from .memory import Slots

_B = Builder()


class Cache:
    """Caches per layer: `cache_k_l*` and `cache_v_l*`, or `cache_r_l*` of a short convolution.

    K and V: [n_embd_gqa, n_ctx, n_stream]; elements of a token are `n_ctx` apart in a transposed V. R: [n_embd_r,
    n_seq_max].
    """

    def __init__(self, hparams: Hparams, cparams: Cparams) -> None:
        h, c = hparams, cparams
        self.h, self.c = h, c
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        self.r: dict[int, Tensor] = {}
        for il in range(h.n_layer):
            n_ctx = c.n_ctx_swa(h) if h.is_swa(il) else c.n_ctx
            if h.is_recr(il):
                self.r[il] = new_tensor(F32, h.n_embd_r, c.n_seq_max, name=f"cache_r_l{il}")
            else:
                self.k[il] = new_tensor(c.type_k, h.n_embd_gqa, n_ctx, c.n_stream, name=f"cache_k_l{il}")
                self.v[il] = new_tensor(c.type_v, h.n_embd_v_gqa, n_ctx, c.n_stream, name=f"cache_v_l{il}")

    def tensors(self) -> list[Tensor]:
        """Return all caches."""
        return [*self.k.values(), *self.v.values(), *self.r.values()]

    def get_k(self, il: int, n_kv: int, slots: Slots) -> Tensor:
        """Return [head, heads_kv, n_kv, streams] of the cells that attention reads: `get_k`."""
        return self._rows(self.k[il], self.h.n_embd_head, n_kv, slots)

    def get_v(self, il: int, n_kv: int, slots: Slots) -> Tensor:
        """Return V in the shape of `get_k`; transposed, [n_kv, heads_kv, head, streams]."""
        v, head, heads = self.v[il], self.h.head_v, self.h.n_head_kv
        if not self.c.v_trans:
            return self._rows(v, head, n_kv, slots)
        nb2 = row_size(v.type, v.ne[1])
        nb3 = nb2 * v.ne[0]
        return _B.view_4d(v, n_kv, heads, head, slots.count, nb2 * head, nb2, nb3, nb3 * slots.first)

    def _rows(self, t: Tensor, head: int, n_kv: int, slots: Slots) -> Tensor:
        nb1 = row_size(t.type, head)
        return _B.view_4d(t, head, self.h.n_head_kv, n_kv, slots.count, nb1, t.nb[1], t.nb[2], t.nb[2] * slots.first)


@dataclass(frozen=True, slots=True)
class Writer:
    """Stores K and V of a ubatch: by SET_ROWS at indices, or without these by CPY into views."""

    cache: Cache
    slots: Slots
    k_idxs: Tensor | None
    v_idxs: Tensor | None

    def write_k(self, cur: Tensor, il: int) -> list[Tensor]:
        """Return the nodes that store K [head, heads_kv, n_tokens]: `cpy_k`."""
        return self._rows(self.cache.k[il], cur, self.k_idxs)

    def write_v(self, cur: Tensor, il: int) -> list[Tensor]:
        """Return the nodes that store V [head, heads_kv, n_tokens]: `cpy_v`."""
        v = self.cache.v[il]
        if not self.cache.c.v_trans:
            return self._rows(v, cur, self.v_idxs)
        if self.v_idxs is None:
            return self._copy(v, cur, transposed=True)
        flat = _flat(cur)
        column = _B.reshape_2d(v, 1, nelements(v))
        return [_B.set_rows(column, _B.reshape_2d(flat, 1, nelements(flat)), self.v_idxs)]

    def _rows(self, t: Tensor, cur: Tensor, idxs: Tensor | None) -> list[Tensor]:
        if idxs is None:
            return self._copy(t, cur, transposed=False)
        gqa, n = t.ne[0], cur.ne[2]
        rows = _B.view_2d(cur, gqa, n, cur.nb[2], 0)
        if t.ne[2] > 1:
            t = _B.reshape_2d(t, gqa, t.ne[1] * t.ne[2])
        return [_B.set_rows(t, rows, idxs)]

    def _copy(self, t: Tensor, cur: Tensor, *, transposed: bool) -> list[Tensor]:
        """Return a CPY per stream, as in `llm_build_kv_store`; transposed into rows `n_ctx` long."""
        gqa, n = t.ne[0], cur.ne[2] // len(self.slots.streams)
        stores = []
        for i, (s, head) in enumerate(self._heads()):
            part = self._part(cur, i, n)
            if transposed:
                part = _B.transpose(_flat(part))
                to = _B.view_2d(t, n, gqa, row_size(t.type, t.ne[1]), s * t.nb[2] + head * t.nb[0])
            else:
                to = _B.view_1d(t, gqa * n, s * t.nb[2] + head * t.nb[1])
            stores.append(_B.cpy(part, to))
        return stores

    def _part(self, cur: Tensor, i: int, n: int) -> Tensor:
        """Return the tokens of the `i`-th stream, or all if there is only one."""
        if len(self.slots.streams) == 1:
            return cur
        return _B.view_3d(cur, *cur.ne[:2], n, *cur.nb[1:3], i * n * cur.nb[2])

    def _heads(self) -> list[tuple[int, int]]:
        """Return stream and first cell of each run of tokens; UsageError if cells are not adjacent."""
        for idxs in self.slots.idxs:
            if np.any(np.diff(idxs) != 1):
                raise UsageError("write=cpy: the free cells are not adjacent; only write=set_rows can fill gaps")
        return list(zip(self.slots.streams, self.slots.idxs[:, 0].tolist(), strict=True))


def _flat(cur: Tensor) -> Tensor:
    """Return [head, heads, n] as [head * heads, n], copied if not contiguous."""
    n_embd, n = cur.ne[0] * cur.ne[1], cur.ne[2]
    gapless = cur.nb[2] == row_size(cur.type, n_embd)
    return _B.reshape_2d(cur, n_embd, n) if gapless else _B.cont_2d(cur, n_embd, n)
