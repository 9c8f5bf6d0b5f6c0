"""The graph of one ubatch, node for node as llama.cpp builds it (`models/llama.cpp`, `llama-graph.cpp`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from conformance.cgraph.build import Builder
from conformance.cgraph.build_graph import Expansion
from conformance.cgraph.graph import Graph
from conformance.cgraph.rules_model import OP_HINT, PREC, ROPE_TYPE
from conformance.cgraph.tensor import Tensor, is_contiguous, nelements
from conformance.cgraph.types import F16, F32, I32, I64, GGMLType

from .cells import Slots, Ubatch
from .config import Cparams, Hparams, n_rot
from .kv import Cache, Writer

_B = Builder()


@dataclass(frozen=True, slots=True)
class Decode:
    """A graph, and the leaves that a trajectory fills, by llama.cpp's names."""

    graph: Graph
    inputs: dict[str, Tensor]
    logits: Tensor


def build(
    hparams: Hparams,
    cparams: Cparams,
    weights: Mapping[str, Tensor],
    cache: Cache,
    ubatch: Ubatch,
    slots: Slots,
    n_kv: int,
) -> Decode:
    """The graph that decodes `ubatch`.

    Args:
        hparams: the model.
        cparams: the context.
        weights: the model's weights by name.
        cache: K and V of each layer.
        ubatch: gives the numbers of tokens, sequences and outputs.
        slots: gives the streams, and for `write=cpy` the cells.
        n_kv: cells that attention reads.
    """
    return _Decoder(hparams, cparams, weights, cache, ubatch, slots, n_kv).build()


class _Decoder:
    """`llm_graph_context`: one graph in the making."""

    def __init__(
        self,
        hparams: Hparams,
        cparams: Cparams,
        weights: Mapping[str, Tensor],
        cache: Cache,
        ubatch: Ubatch,
        slots: Slots,
        n_kv: int,
    ) -> None:
        self.h, self.c = hparams, cparams
        self.w = weights
        self.cache = cache
        self.n_tokens = ubatch.n_tokens
        self.n_outputs = int(ubatch.outputs.sum())
        self.slots = slots
        self.n_kv = n_kv
        self.gf = Expansion()
        self.inputs: dict[str, Tensor] = {}

    def build(self) -> Decode:
        """`llama_model_llama::graph`."""
        h = self.h
        cur = self._inp_embd()
        pos = self._input("inp_pos", I32, self.n_tokens)
        writer = self._inp_attn()
        out_ids = self._input("out_ids", I32, self.n_outputs)
        for il in range(h.n_layer):
            residual = cur
            cur = self._attention(self._norm(cur, f"blk.{il}.attn_norm", "attn_norm", il), pos, writer, il)
            if il == h.n_layer - 1:
                cur, residual = _B.get_rows(cur, out_ids), _B.get_rows(residual, out_ids)
            ffn_inp = self._cb(_B.add(cur, residual), "ffn_inp", il)
            cur = self._ffn(self._norm(ffn_inp, f"blk.{il}.ffn_norm", "ffn_norm", il), il)
            cur = self._cb(_B.add(cur, ffn_inp), "l_out", il)
        cur = self._norm(cur, "output_norm", "result_norm", -1)
        _B.set_output(cur)
        head = self.w["token_embd.weight" if h.tied else "output.weight"]
        logits = self._cb(_B.mul_mat(head, cur), "result_output", -1)
        _B.set_output(logits)
        self.gf.expand(logits)
        return Decode(self.gf.graph(), self.inputs, logits)

    def _inp_embd(self) -> Tensor:
        """`build_inp_embd`: rows of the embedding; beside them the branch of a mixed batch, not computed."""
        tok_embd = self.w["token_embd.weight"]
        n = self.n_tokens
        embd = _B.get_rows(tok_embd, self._input("inp_tokens", I32, n))
        self.gf.expand(embd, compute=False)
        branches: tuple[Tensor, ...] = (embd,)
        if self.c.mixed:
            rows = _B.get_rows(tok_embd, self._input("inp_mixed_tokens", I32, n))
            self.gf.expand(rows, compute=False)
            copy = _B.dup(self._input("inp_mixed_embd", F32, self.h.n_embd, n))
            branches += (_B.set_rows(copy, rows, self._input("inp_mixed_slots", I64, n)),)
        return self._cb(self.gf.select(branches, 0), "embd", -1)

    def _inp_attn(self) -> Writer:
        """`build_attn_inp_kv`: indices, mask, rotations."""
        h, c, n = self.h, self.c, self.n_tokens
        k_idxs = v_idxs = None
        if c.write == "set_rows":
            k_idxs = self._input("attn_inp_k_idxs", I64, n)
            v_idxs = self._input("attn_inp_v_idxs", I64, n * h.n_embd_gqa if c.v_trans else n)
        n_stream = 1 if c.kv_unified else len(self.slots.streams)
        self._input("attn_inp_kq_mask", F16 if c.flash_attn else F32, self.n_kv, n // n_stream, 1, n_stream)
        for name, size in zip(("attn_inp_k_rot", "attn_inp_v_rot"), n_rot(h, c), strict=True):
            if size:
                self._input(name, F32, size, size)
        return Writer(self.cache, self.slots, k_idxs, v_idxs)

    def _attention(self, cur: Tensor, pos: Tensor, writer: Writer, il: int) -> Tensor:
        """`build_qkv`, ROPE and `build_attn`: [n_embd, n_tokens] to the same."""
        q, k, v = (self._heads(cur, f"blk.{il}.attn_{x.lower()}", f"{x}cur", il) for x in "QKV")
        q, k = (self._cb(self._rope(x, pos), name, il) for x, name in ((q, "Qcur"), (k, "Kcur")))
        rot_k, rot_v = self.inputs.get("attn_inp_k_rot"), self.inputs.get("attn_inp_v_rot")
        if rot_k is not None:
            q, k = _hadamard(q, rot_k), _hadamard(k, rot_k)
        if rot_v is not None:
            v = _hadamard(v, rot_v)
        for t in (q, v, k, *writer.write_k(k, il), *writer.write_v(v, il)):
            self.gf.expand(t)
        cur = self._mha(q, self.cache.get_k(il, self.n_kv, self.slots), self.cache.get_v(il, self.n_kv, self.slots), il)
        self.gf.expand(cur)
        self._cb(cur, "kqv_out", il)
        if rot_v is not None:
            cur = _hadamard(cur, rot_v)
        return self._cb(_B.mul_mat(self.w[f"blk.{il}.attn_output.weight"], cur), "attn_out", il)

    def _mha(self, q: Tensor, k: Tensor, v: Tensor, il: int) -> Tensor:
        """`build_attn_mha`: q [head, heads, n_tokens], k and v views of the cache; to [heads * head, n_tokens]."""
        n_stream = k.ne[3]
        n = q.ne[2] // n_stream
        q = _B.view_4d(q, q.ne[0], q.ne[1], n, n_stream, q.nb[1], q.nb[2], q.nb[2] * n, 0)
        q, k, v = (_B.permute(x, 0, 2, 1, 3) for x in (q, k, v))
        mask = self.inputs["attn_inp_kq_mask"]
        scale = 1.0 / math.sqrt(self.h.n_embd_head)
        if self.c.flash_attn:
            k, v = (_B.cast(x, F16) if x.type is F32 else x for x in (k, v))
            cur = _B.flash_attn_ext(q, k, v, mask, scale, 0.0, 0.0)
            _B.prec_set_acc(cur, PREC["F32"])
            return _B.reshape_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
        kq = self._cb(_B.mul_mat(k, q), "kq", il)
        _B.prec_set_acc(kq, PREC["F32"])
        kq = self._cb(_B.soft_max_ext(kq, mask, scale, 0.0), "kq_soft_max", il)
        kqv = self._cb(_B.mul_mat(v, kq), "kqv", il)
        cur = _B.permute(kqv, 0, 2, 1, 3)
        return _B.cont_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])

    def _ffn(self, cur: Tensor, il: int) -> Tensor:
        """`build_ffn` with a parallel gate and SiLU."""
        up = self._mul_mat(f"blk.{il}.ffn_up", cur, "ffn_up", il)
        gate = self._mul_mat(f"blk.{il}.ffn_gate", cur, "ffn_gate", il)
        cur = self._cb(_B.swiglu_split(gate, up), "ffn_swiglu", il)
        return self._mul_mat(f"blk.{il}.ffn_down", cur, "ffn_out", il)

    def _norm(self, cur: Tensor, weight: str, name: str, il: int) -> Tensor:
        norm = self._cb(_B.rms_norm(cur, self.h.eps), "norm", il)
        return self._cb(_B.mul(norm, self.w[f"{weight}.weight"]), name, il)

    def _mul_mat(self, weight: str, cur: Tensor, name: str, il: int) -> Tensor:
        return self._cb(_B.mul_mat(self.w[f"{weight}.weight"], cur), name, il)

    def _heads(self, cur: Tensor, weight: str, name: str, il: int) -> Tensor:
        cur = self._mul_mat(weight, cur, name, il)
        head = self.h.n_embd_head
        return self._cb(_B.reshape_3d(cur, head, cur.ne[0] // head, cur.ne[1]), name, il)

    def _rope(self, cur: Tensor, pos: Tensor) -> Tensor:
        h = self.h
        freqs = self.w.get("rope_freqs.weight")
        mode = ROPE_TYPE[h.rope]
        return _B.rope_ext(cur, pos, freqs, h.n_embd_head, mode, h.n_ctx_orig, h.freq_base, 1.0, 0.0, 1.0, 32.0, 1.0)

    def _input(self, name: str, type_: GGMLType, *ne: int) -> Tensor:
        ne0, ne1, ne2, ne3 = (*ne, *(1,) * (4 - len(ne)))
        t = _B.set_name(_B.new_tensor_4d(type_, ne0, ne1, ne2, ne3), name)
        _B.set_input(t)
        self.inputs[name] = t
        return t

    @staticmethod
    def _cb(t: Tensor, name: str, il: int) -> Tensor:
        return _B.set_name(t, name if il < 0 else f"{name}-{il}")


def _hadamard(cur: Tensor, rot: Tensor) -> Tensor:
    """`llama_mul_mat_hadamard`."""
    n = rot.ne[0]
    flat = _B.reshape_2d if is_contiguous(cur) else _B.cont_2d
    turned = _B.mul_mat(rot, flat(cur, n, nelements(cur) // n))
    _B.mul_mat_set_hint(turned, OP_HINT["SRC0_IS_HADAMARD"])
    return _B.reshape_4d(turned, *cur.ne)
