"""Bugs of llama.cpp and of a device under it, each with the scenarios that must notice it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import device_faults as d
import function_faults as f
from faulty_device import Contexts, Device, Fault
from function_faults import Spoil

from conformance.ggml.errors import ConformanceError
from conformance.ggml.lib.llama import Llama
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.live.comparison import judge_all
from conformance.llama.live.scenarios.harness import Harness
from conformance.llama.live.scenarios.table import SCENARIOS
from conformance.llama.live.worker import DeviceModel
from conformance.llama.zoo.family import prepare, read

LLAMA, MAMBA, BERT, T5, LFM2 = "llama", "mamba", "bert", "t5", "lfm2"
Q8_0 = "llama-cache=q8_0"
"""Keys that are stored in blocks, so a shift costs one more draw of their roundings."""
WINDOW = "gemma3-set=attention.sliding_window:8"
"""Prompts are longer than the window."""
SPARSE = "deepseek32-set=attention.indexer.top_k:4"
"""Sparse attention that leaves cells out."""
MTP = "hy_v3-set=block_count:2+nextn_predict_layers:1"
"""With an MTP layer like its other layer."""
HEADS = "step35-set=block_count:4+nextn_predict_layers:2"
MERGED = "lora-merged lora-merged-embeddings"
DRAFTS = "draft-context draft-model draft-2 draft-2-unified"
SPLITS = "split-even split-uneven split-zero split-layers"
REFUSED_SEQ = "state-cut-head state-cut-half state-cut-tail state-other-types"
REFUSED = "state-cut-whole state-other-model"
NOTICED = (Verdict.FAIL, Verdict.OVERCLAIM, Verdict.VACUOUS)


@dataclass(frozen=True)
class Bug:
    """A bug, and where it is looked for."""

    spoils: Callable[[], Mapping[str, Spoil]]
    """llama.cpp's functions, and how each is spoilt."""
    arch: str
    """And what its id says of the context."""
    scenarios: str
    """Names, which must notice it."""


def _f(name: str, spoil: Spoil, scenarios: str, arch: str = LLAMA) -> Bug:
    return Bug(lambda: {name: spoil}, arch, scenarios)


def _d(make: Callable[[], Device], scenarios: str, arch: str = LLAMA) -> Bug:
    return Bug(lambda: {"init_from_model": f.device(make())}, arch, scenarios)


def _always(make: Callable[[], Fault], scenarios: str, arch: str = LLAMA) -> Bug:
    return _d(lambda: d.always(make), scenarios, arch)


def _where(holds: Callable[[d.Params], bool], make: Callable[[], Fault], scenarios: str, arch: str = LLAMA) -> Bug:
    return _d(lambda: d.where(holds, make), scenarios, arch)


def _split(scenarios: str, **spoils: Spoil) -> Bug:
    """Return a bug that only models split over devices have."""
    return Bug(lambda: f.in_other_models(**spoils), LLAMA, scenarios)


def _flagged(scenarios: str, **spoils: Callable[[list[bool]], Spoil]) -> Bug:
    """Of several functions, which share a flag."""

    def make() -> dict[str, Spoil]:
        flag: list[bool] = []
        return {name: spoil(flag) for name, spoil in spoils.items()}

    return Bug(make, LLAMA, scenarios)


def _threads(params: d.Params) -> bool:
    return bool(params.n_threads > 1)


def _several(params: d.Params) -> bool:
    return bool(params.n_seq_max > 1)


def _no_offload(params: d.Params) -> bool:
    return not params.op_offload


def _no_offload_kqv(params: d.Params) -> bool:
    return not params.offload_kqv


def _no_flash_attn(params: d.Params) -> bool:
    return not params.flash_attn_type


def _many_cells(params: d.Params) -> bool:
    return bool(params.n_ctx > 512)


def _changes_rope(params: d.Params) -> None:
    """Wherever one of a few parameters is not as usual."""
    if any(holds(params) for holds in (_threads, _no_offload, _no_offload_kqv, _no_flash_attn, _many_cells)):
        params.rope_freq_base = 100.0


def _few_cells(params: d.Params) -> bool:
    return bool(params.n_ctx <= 256)


def _mtp(params: d.Params) -> bool:
    return bool(params.ctx_type)


def _turns(params: d.Params) -> None:
    params.rope_freq_base = 100.0


def _to(value: int) -> Callable[[object], None]:
    """Of context parameters: a kind of pooling in place of another."""

    def change(params: d.Params) -> None:
        if params.pooling_type > 0:
            params.pooling_type = value if params.pooling_type != value else value % 3 + 1

    return change


def _first(ids: d.Ids, _: int) -> None:
    """The first rows, as many as are wanted."""
    ids[:] = range(ids.size)


def _last(ids: d.Ids, n: int) -> None:
    """The last of so many rows, again and again."""
    ids[:] = n - 1


def _scaled(rows: f.Rows) -> None:
    """As some architectures scale embeddings of tokens."""
    for row in rows:
        row[:] = [16 * x for x in row]


def _late(rows: f.Rows) -> None:
    """Each row is that of the token before."""
    ctypes.memmove(ctypes.addressof(rows) + 1024, ctypes.addressof(rows), ctypes.sizeof(rows) - 1024)


BUGS: dict[str, Bug] = {
    # states
    "a state is not loaded": _f(
        "state_set_data", f.loads_nothing, "state-same state-fresh state-larger state-3 state-process"
    ),
    "a loaded state lacks a cell": _f(
        "state_set_data", f.loses_a_cell, "state-same state-fresh state-larger state-3 state-process"
    ),
    "the end of a state is not loaded": _f(
        "state_set_data", f.ends_early, "state-same state-fresh state-larger state-3 state-process"
    ),
    "a loaded state is moved": _f("state_set_data", f.moves_after, "state-same state-process"),
    "the end of a state is not saved": _f("state_get_data", f.ends_early, "state-larger state-3 state-process"),
    "a recurrent state is not loaded": _f("state_set_data", f.loads_nothing, "state-same state-fresh state-3", MAMBA),
    "a file is not loaded": _f("state_load_file", f.nothing(True), "state-file"),
    "a loaded file lacks a cell": _f("state_load_file", f.loses_a_cell, "state-file"),
    "the end of a file is not written": _f("state_save_file", f.file_ends_early, "state-file"),
    "a sequence is not loaded": _f(
        "state_seq_set_data", f.loads_nothing, "state-seq state-seq-other state-seq-unified state-fragmented in-flight"
    ),
    "a loaded sequence lacks a cell": _f(
        "state_seq_set_data", f.loses_a_cell, "state-seq state-seq-other state-seq-unified state-fragmented in-flight"
    ),
    "the end of a sequence is not loaded": _f(
        "state_seq_set_data", f.ends_early, "state-seq state-seq-other state-seq-unified state-fragmented in-flight"
    ),
    "a sequence is loaded into another": _f(
        "state_seq_set_data", f.arguments(lambda c, p, n, to: (c, p, n, 1 - to)), "state-seq-other"
    ),
    "another sequence is saved": _f(
        "state_seq_get_data", f.arguments(lambda c, p, n, seq: (c, p, n, 1 - seq)), "state-seq-other state-seq-unified"
    ),
    "a load empties the memory": _f(
        "state_seq_set_data", f.loads_alone, "state-seq state-seq-unified state-fragmented"
    ),
    "a sequence on the device is not loaded": _f(
        "state_seq_set_data_ext", f.loads_nothing, "state-checkpoint state-seq-device", MAMBA
    ),
    "the end of a sequence on the device is not loaded": _f(
        "state_seq_set_data_ext", f.ends_early, "state-checkpoint state-seq-device", MAMBA
    ),
    "a load on the device empties the memory": _f("state_seq_set_data_ext", f.loads_alone, "state-seq-device"),
    "a sequence on the device is loaded into another": _f(
        "state_seq_set_data_ext", f.arguments(lambda c, p, n, to, x: (c, p, n, 1 - to, x)), "state-seq-device"
    ),
    "a sequence loaded on the device lacks a cell": _f(
        "state_seq_set_data_ext", f.loses_a_cell, "state-seq-device state-checkpoint"
    ),
    "a sequence's file lacks a cell": _f("state_seq_load_file", f.loses_a_cell, "state-seq-file"),
    "the end of a sequence's file is not written": _f("state_seq_save_file", f.file_ends_early, "state-seq-file"),
    "a file holds another sequence": _f(
        "state_seq_save_file", f.arguments(lambda c, path, seq, *rest: (c, path, 1 - seq, *rest)), "state-seq-file"
    ),
    "a refused sequence is taken": _f("state_seq_set_data", f.loads_nothing, REFUSED_SEQ),
    "a refused sequence moves another": _f("state_seq_set_data", f.moves_after, REFUSED_SEQ),
    "a refused sequence takes a cell of another along": _f("state_seq_set_data", f.loses_a_cell, REFUSED_SEQ),
    "a refused sequence empties the memory": _f("state_seq_set_data", f.loads_alone, REFUSED_SEQ),
    "a refused state is taken": _f("state_set_data", f.loads_nothing, REFUSED),
    "a refused state costs a cell": _f("state_set_data", f.refuses_late, REFUSED),
    "a refused state leaves tokens": _f("memory_seq_pos_max", f.nothing(5), f"{REFUSED} {REFUSED_SEQ}"),
    "a state with snapshots is not loaded": _f("state_set_data", f.loads_nothing, "state-snapshots", LFM2),
    "the end of a state with snapshots is not loaded": _f("state_set_data", f.ends_early, "state-snapshots", LFM2),
    "a state with snapshots is moved": _f("state_set_data", f.moves_after, "state-snapshots", LFM2),
    # memory
    "seq_rm does nothing": _f(
        "memory_seq_rm",
        f.nothing(True),
        f"seq-rm-tail seq-rm-long seq-rm-whole seq-rm-all seq-rm-all-unified drafts shift {DRAFTS}",
    ),
    "seq_rm leaves a cell": _f(
        "memory_seq_rm",
        f.arguments(lambda m, seq, p0, p1: (m, seq, p0 + 1 if p0 > 0 else p0, p1)),
        f"seq-rm-tail seq-rm-long drafts {DRAFTS}",
    ),
    "seq_rm takes a cell too many": _f(
        "memory_seq_rm",
        f.arguments(lambda m, seq, p0, p1: (m, seq, p0 - 1 if p0 > 0 else p0, p1)),
        f"state-checkpoint seq-rm-tail seq-rm-long drafts {DRAFTS}",
    ),
    "seq_rm leaves the first cell": _f(
        "memory_seq_rm",
        f.arguments(lambda m, seq, p0, p1: (m, seq, max(p0, 1), p1)),
        "seq-rm-whole seq-rm-all seq-rm-all-unified",
    ),
    "seq_rm takes another's cell along": _f("memory_seq_rm", f.rm_takes_others, "state-seq seq-rm-whole"),
    "seq_rm by -1 is by 0": _f(
        "memory_seq_rm", f.arguments(lambda m, seq, p0, p1: (m, max(seq, 0), p0, p1)), "seq-rm-all seq-rm-all-unified"
    ),
    "seq_rm of recurrent states does nothing": _f("memory_seq_rm", f.nothing(True), "drafts-snapshots", LFM2),
    "seq_rm goes back too far": _f(
        "memory_seq_rm", f.arguments(lambda m, s, p0, p1: (m, s, p0 - 1, p1)), "drafts-snapshots", LFM2
    ),
    "seq_rm goes back not far enough": _f(
        "memory_seq_rm", f.arguments(lambda m, s, p0, p1: (m, s, p0 + 1, p1)), "drafts-snapshots", LFM2
    ),
    "seq_cp does nothing": _f("memory_seq_cp", f.nothing(), "seq-cp seq-cp-unified"),
    "seq_cp copies half": _f(
        "memory_seq_cp", f.arguments(lambda m, source, to, *_: (m, source, to, 0, 6)), "seq-cp-unified"
    ),
    "seq_cp copies the other way": _f(
        "memory_seq_cp", f.arguments(lambda m, source, to, *rest: (m, to, source, *rest)), "seq-cp seq-cp-unified"
    ),
    "seq_cp loses a cell": _f("memory_seq_cp", f.cp_loses_a_cell, "seq-cp seq-cp-unified"),
    "seq_keep does nothing": _f("memory_seq_keep", f.nothing(), "seq-keep-unified"),
    "seq_keep keeps another": _f("memory_seq_keep", f.arguments(lambda m, seq: (m, seq - 1)), "seq-keep-unified"),
    "seq_keep keeps nothing": _f("memory_seq_keep", f.keep_clears, "seq-keep-unified"),
    "seq_keep loses a cell": _f("memory_seq_keep", f.keep_loses_a_cell, "seq-keep-unified"),
    "seq_keep of states does nothing": _f("memory_seq_keep", f.nothing(), "seq-keep", MAMBA),
    "seq_keep keeps another state": _f("memory_seq_keep", f.arguments(lambda m, seq: (m, seq - 1)), "seq-keep", MAMBA),
    "seq_keep keeps no state": _f("memory_seq_keep", f.keep_clears, "seq-keep", MAMBA),
    "seq_add moves the other way": _f(
        "memory_seq_add",
        f.arguments(lambda m, seq, p0, p1, delta: (m, seq, p0, p1, -delta)),
        "seq-add seq-add-back shift",
    ),
    "seq_add moves half": _f(
        "memory_seq_add", f.arguments(lambda m, seq, p0, _, delta: (m, seq, p0, 8, delta)), "seq-add shift"
    ),
    "seq_add moves up alone": _f(
        "memory_seq_add", f.arguments(lambda m, seq, p0, p1, delta: (m, seq, p0, p1, abs(delta))), "seq-add-back shift"
    ),
    "a K-shift turns quantised keys one too far": _always(d.shift_one_too_far, "seq-add shift", Q8_0),
    "a K-shift of a quantised cache is not stored": _always(d.shift_lost(), "seq-add shift", Q8_0),
    "a K-shift of a quantised layer is not stored": _always(d.shift_lost(layer="l1"), "seq-add shift", Q8_0),
    "seq_add moves another along": _f("memory_seq_add", f.adds_to_all, "seq-add-back"),
    "seq_div does nothing": _f("memory_seq_div", f.nothing(), "seq-div", T5),
    "seq_div divides by one more": _f(
        "memory_seq_div", f.arguments(lambda m, seq, p0, p1, by: (m, seq, p0, p1, by + 1)), "seq-div", T5
    ),
    "seq_div leaves the end": _f(
        "memory_seq_div", f.arguments(lambda m, seq, p0, _, by: (m, seq, p0, 9, by)), "seq-div", T5
    ),
    "clear does nothing": _f("memory_clear", f.nothing(), "clear clear-data sizes embeddings-out"),
    "clear forgets one sequence": _f("memory_clear", f.clears_a_sequence, "clear clear-data"),
    "clear leaves the first cells": _f("memory_clear", f.clears_but_the_first, "clear clear-data"),
    "a clear of recurrent states does nothing": _f("memory_clear", f.nothing(), "clear clear-data", MAMBA),
    "a K-shift is lost": _always(d.shift_lost(), "seq-add shift"),
    "a K-shift leaves a layer": _always(d.shift_lost(layer="l1"), "seq-add shift"),
    "a K-shift ends at a cell": _always(d.shift_lost(cells=8), "seq-add shift"),
    "a K-shift turns as the first cell": _always(d.shift_by_first, "shift"),
    "a K-shift does not turn back": _always(d.shift_unsigned, "seq-add-back shift"),
    # MTP layers
    "an MTP layer loses a share": _where(_mtp, d.share_lost("MUL_MAT"), "mtp-layer", MTP),
    "an MTP layer leaves the last row": _where(_mtp, d.tail_left("MUL_MAT"), "mtp-layer mtp-batch", MTP),
    "an MTP layer's own cell comes late": _where(_mtp, d.own_cell_late, "mtp-batch", MTP),
    "an MTP layer turns otherwise": _f(
        "init_from_model", f.params(lambda p: _turns(p) if _mtp(p) else None), "mtp-layer", MTP
    ),
    "hidden states are the first token's": _f(
        "get_embeddings_nextn_ith", f.arguments(lambda c, _: (c, 0)), "mtp-batch mtp-states mtp-2 mtp-drafts", MTP
    ),
    "hidden states come a token late": _f(
        "get_embeddings_nextn_ith",
        f.arguments(lambda c, i: (c, max(i - 1, 0))),
        "mtp-batch mtp-states mtp-2 mtp-drafts",
        MTP,
    ),
    "hidden states are of tokens with logits": _f(
        "set_embeddings_nextn", f.arguments(lambda c, on, _: (c, on, True)), "mtp-states", MTP
    ),
    "MTP layers read another token": _f(
        "batch_ext_add_token", f.arguments(lambda b, seq, token: (b, seq, (token + seq) % 128)), "mtp-2", MTP
    ),
    "drafts of MTP layers stay": _f("memory_seq_rm", f.nothing(True), "mtp-drafts", MTP),
    "a state of MTP layers is not loaded": _f("state_set_data", f.loads_nothing, "mtp-saved", MTP),
    "a loaded state of MTP layers lacks a cell": _f("state_set_data", f.loses_a_cell, "mtp-saved", MTP),
    "the end of a state of MTP layers is not loaded": _f("state_set_data", f.ends_early, "mtp-saved", MTP),
    "no MTP layer is chosen": _f("set_nextn_layer_offset", f.nothing(), "mtp-layers", HEADS),
    "the first MTP layer stays": _f("set_nextn_layer_offset", f.put_once, "mtp-layers", HEADS),
    "the other MTP layer is chosen": _f(
        "set_nextn_layer_offset", f.arguments(lambda c, i: (c, 1 - i)), "mtp-layers", HEADS
    ),
    "an MTP layer is not begun anew": _f("memory_seq_rm", f.nothing(True), "mtp-layers", HEADS),
    # split models
    "a split model turns otherwise": _split(
        f"{SPLITS} split-rm split-cp-unified split-state split-state-seq loads", init_from_model=f.params(_turns)
    ),
    "a split model reads another token": _split(
        f"{SPLITS} split-state split-state-seq loads",
        decode=f.batch_where(lambda b: b.n_tokens > 1, lambda b: f.next_token(b, 0)),
    ),
    "a split model decodes another token": _split(
        f"{SPLITS} split-rm loads", decode=f.batch_where(lambda b: b.n_tokens == 1, lambda b: f.next_token(b, 0))
    ),
    "seq_rm of a split model does nothing": _split("split-rm", memory_seq_rm=f.nothing(True)),
    "seq_rm of a split model takes a cell too many": _split(
        "split-rm", memory_seq_rm=f.arguments(lambda m, seq, p0, p1: (m, seq, p0 - 1 if p0 > 0 else p0, p1))
    ),
    "seq_cp of a split model does nothing": _split("split-cp-unified", memory_seq_cp=f.nothing()),
    "seq_cp of a split model loses a cell": _split("split-cp-unified", memory_seq_cp=f.cp_loses_a_cell),
    "a state of a split model is not loaded": _split("split-state", state_set_data=f.loads_nothing),
    "the end of a split model's state is not loaded": _split("split-state", state_set_data=f.ends_early),
    "the end of a split model's state is not saved": _split("split-state", state_get_data=f.ends_early),
    "a sequence of a split model is not loaded": _split("split-state-seq", state_seq_set_data=f.loads_nothing),
    "a loaded sequence of a split model lacks a cell": _split("split-state-seq", state_seq_set_data=f.loses_a_cell),
    # batches
    "a batch of several sequences has another token": _f(
        "decode",
        f.batch_where(f.several, lambda b: f.next_token(b, b.n_tokens - 1)),
        "batch-2 batch-8 batch-4-alike sets-unified needle coupled",
    ),
    "a long batch has another token": _f(
        "decode",
        f.batch_where(lambda b: bool(b.token) and b.n_tokens > 10, lambda b: f.next_token(b, 0)),
        "chunks needle batch-4-alike batch-3-unified",
    ),
    "the second result is the first": _f(
        "get_logits_ith", f.row_0, "batch-3 batch-4 batch-4-alike slots-0-2 sets outputs needle"
    ),
    "a token of two sequences is the first one's": _f("decode", f.batch_where(lambda _: True, f.one_owner), "coupled"),
    "sequences in a batch are swapped": _f(
        "decode", f.ids(lambda i: i ^ 1), "batch-3 batch-3-unified slots-0-2 sets-unified"
    ),
    "contexts share what they hold": _f("decode", f.clears_the_other, "contexts-2"),
    "contexts share a mask": _d(lambda: d.shared("kq_mask"), "contexts-2 contexts-threads"),
    "contexts share indices of cells": _d(lambda: d.shared("k_idxs", "v_idxs"), "contexts-2 contexts-threads"),
    "contexts share tokens": _d(lambda: d.shared("inp_tokens"), "contexts-2 contexts-threads"),
    "a mask stays": _always(d.kept("kq_mask"), "batch-2 slots-1-3 sets ubatch ubatch-3 unified chunks drafts"),
    "indices of cells stay": _always(
        d.kept("k_idxs", "v_idxs"), "batch-4 slots-0-2 slots-1-3 sets-unified ubatch chunks seq-rm-whole"
    ),
    "positions stay": _always(d.kept("inp_pos"), "batch-3-unified ubatch-3 sets coupled"),
    "rows of results stay": _always(d.kept("out_ids"), "batch-8"),
    "indices of states stay": _always(d.kept("s_copy"), "batch-2 slots-1-3 ubatch-3", MAMBA),
    "views of a cache stay": _always(d.views_kept, "batch-8 slots-0-2 slots-1-3 sets unified"),
    "attention reads the first stream": _always(d.first_stream, "batch-3 slots-0-2 slots-1-3 seq-cp seq-rm-whole"),
    "one mask serves all streams": _always(d.one_mask, "batch-2 batch-4 batch-8 sets"),
    "a mask has one row": _always(d.mask_of_one_row, "needle ubatch unified drafts"),
    "cells are counted in place of a mask": _always(d.mask_by_count, "unified coupled"),
    "of a window a single token sees the cells before": _always(d.window_open(8), "drafts shift", WINDOW),
    "tokens share what sparse attention chose": _always(d.first_choice, "drafts", SPARSE),
    "attention ends at a cell": _always(d.mask_ends(32), "sets-unified"),
    "a token's own cell comes late": _always(d.own_cell_late, "batch-4-alike batch-3 chunks drafts"),
    "a store loses its last row": _always(d.last_row_lost(9), "sizes ubatch-3 coupled batch-4-alike"),
    "a store takes cells for neighbours": _always(d.stores_in_order, "sets unified seq-rm-whole"),
    "a cache wraps": _always(d.kept_below(64), "seq-rm-whole"),
    "a product leaves the last row": _always(d.tail_left("MUL_MAT"), "ubatch chunks outputs"),
    "a norm leaves the last row": _always(d.tail_left("RMS_NORM"), "batch-4-alike ubatch-3 outputs"),
    "a gate leaves the last row": _always(d.tail_left("GLU", tile=4), "batch-3 needle chunks"),
    "a product of two rows is of one": _always(d.first_row("MUL_MAT"), "batch-2 sets sets-unified"),
    "a product of many rows lacks a share": _always(
        d.share_lost("MUL_MAT", least=9), "batch-3-unified needle unified outputs"
    ),
    "results are of the first tokens": _always(d.rows_for("out_ids", change=_first), "batch-8 coupled outputs"),
    "results are of the last token": _always(
        d.rows_for("out_ids", change=_last), "batch-4 sets-unified drafts outputs"
    ),
    "states of convolutions are lost": _always(d.state_lost("r"), "batch-3 sets", MAMBA),
    "states of scans are lost": _always(d.state_lost("s"), "batch-3 sets", MAMBA),
    "a state begins with what was there": _always(d.state_not_zeroed, "clear sizes embeddings-out seq-rm-whole", MAMBA),
    "encoder: a product leaves the last row": _always(d.tail_left("MUL_MAT"), "batch-2", BERT),
    "a program keeps a number of rows": _always(d.rows_kept("MUL_MAT"), "sizes"),
    "a program adds to what was left over": _always(d.left_over("MUL_MAT"), "sizes"),
    "of several streams attention reads the last": _where(_several, d.last_stream, "batch-1"),
    "beside other streams a token's own cell comes late": _where(_several, d.own_cell_late, "batch-1"),
    "beside other streams a gate leaves the last row": _where(_several, d.tail_left("GLU", tile=3), "batch-1"),
    "beside other streams a store loses its last row": _where(_several, d.last_row_lost(4), "batch-1"),
    # contexts
    "the end of a model is not written": _f("model_save_to_file", f.file_ends_early, "written"),
    "a key of a model is not written": _f(
        "model_save_to_file", f.writes(lambda data: data.replace(b"rms_epsilon", b"rms_epsilom")), "written"
    ),
    "layers change places in a written model": _f(
        "model_save_to_file",
        f.writes(
            lambda data: data.replace(b"blk.0.", b"blk.#.").replace(b"blk.1.", b"blk.0.").replace(b"blk.#.", b"blk.1.")
        ),
        "written",
    ),
    "parameters change more than they say": _f(
        "init_from_model", f.params(_changes_rope), "threads op-offload offload-kqv flash-attn larger"
    ),
    "threads lose a share": _where(_threads, d.share_lost("MUL_MAT"), "threads"),
    "threads lose a row": _where(_threads, d.tail_left("RMS_NORM", tile=3), "threads"),
    "a product of many rows elsewhere lacks a share": _where(
        _no_offload, d.share_lost("MUL_MAT", least=32), "op-offload"
    ),
    "a gate elsewhere loses a row": _where(_no_offload, d.tail_left("GLU", tile=3), "op-offload"),
    "a cache elsewhere is stored late": _where(_no_offload_kqv, d.own_cell_late, "offload-kqv"),
    "a store elsewhere loses its last row": _where(_no_offload_kqv, d.last_row_lost(9), "offload-kqv"),
    "a large cache wraps": _where(_many_cells, d.kept_below(32), "larger"),
    "a large cache is not read to its end": _where(_many_cells, d.mask_ends(32), "larger"),
    "SOFT_MAX has another scale": _where(_no_flash_attn, d.scale_of("SOFT_MAX", 1.0), "flash-attn"),
    "SOFT_MAX masks as the last row": _where(_no_flash_attn, d.mask_of_one_row, "flash-attn"),
    "a batch that is declined clears": _f(
        "decode", f.after_refusal(lambda c, memory: c.memory_clear(memory, True)), "full refused-batches"
    ),
    "a batch that is declined takes a cell": _f(
        "decode", f.after_refusal(lambda c, memory: c.memory_seq_rm(memory, 0, 3, 4)), "full refused-batches"
    ),
    "a batch that is declined takes the last token along": _f(
        "decode", f.after_refusal(lambda c, memory: c.memory_seq_rm(memory, 0, 244, -1)), "full"
    ),
    "a batch that is declined moves a cell": _f(
        "decode", f.after_refusal(lambda c, memory: c.memory_seq_add(memory, 0, 3, 4, -1)), "refused-batches"
    ),
    # positions
    "what is causal once stays so": _f("set_causal_attn", f.put_once, "causal-off-unified"),
    "spans are causal": _f("set_causal_attn", f.nothing(), "causal-off-unified"),
    "results of several sequences are the first": _f("get_logits_ith", f.row_0, "causal-off-unified seqs-most"),
    "many sequences are swapped": _f("decode", f.ids(lambda i: i ^ 1), "seqs-most"),
    "a batch of many sequences has another token": _f(
        "decode",
        f.batch_where(f.several, lambda b: f.next_token(b, b.n_tokens - 1)),
        "causal-off-unified seqs-most",
    ),
    "a small cache is not read to its end": _where(_few_cells, d.mask_ends(250), "cells"),
    "a small cache wraps": _where(_few_cells, d.kept_below(250), "cells"),
    "a batch short of all cells has another token": _f(
        "decode", f.batch_where(lambda b: b.n_tokens == 253, lambda b: f.next_token(b, 252)), "cells"
    ),
    # an encoder beside a decoder
    "what was read first stays": _f("encode", f.put_once, "encode-again", T5),
    "a text read later has another token": _f("encode", f.changes_later_ones, "encode-twice encode-again", T5),
    "a batch decoded later has another token": _f("decode", f.changes_later_ones, "encode-twice encode-again", T5),
    "a decoder does not begin anew": _f("memory_clear", f.nothing(), "encode-twice encode-again", T5),
    "encoded sequences are swapped": _f("encode", f.ids(lambda i: 1 - i), "encode-2", T5),
    "encoded sequences are one": _f("encode", f.ids(lambda _: 0), "encode-2", T5),
    "a batch of several texts has another token": _f(
        "encode", f.batch_where(f.several, lambda b: f.next_token(b, b.n_tokens - 1)), "encode-2", T5
    ),
    # adapters
    "an adapter stays": _f("set_adapters_lora", f.put_once, "lora-removed lora-changed"),
    "no adapter is no change": _f("set_adapters_lora", f.none_of_none, "lora-removed lora-changed"),
    "the scale of an adapter does nothing": _f(
        "set_adapters_lora", f.scale_1, "lora-scaled lora-2 lora-many lora-changed"
    ),
    "adapters share a scale": _f("set_adapters_lora", f.one_scale, "lora-2"),
    "one adapter of several": _f(
        "set_adapters_lora", f.arguments(lambda c, of, n, scales: (c, of, min(n, 1), scales)), "lora-2 lora-many"
    ),
    "adapters do nothing": _f(
        "set_adapters_lora", f.nothing(0), f"lora-removed lora-scaled lora-changed {MERGED} lora-unfit"
    ),
    "an adapter has half its effect": _f(
        "set_adapters_lora", f.arguments(lambda c, of, n, _: (c, of, n, (ctypes.c_float * n)(*[0.5] * n))), MERGED
    ),
    "what was encoded before an adapter stays": _f("encode", f.put_once, "lora-merged", T5),
    "the first adapter is each": _f("adapter_lora_init", f.first_answer, "lora-2 lora-changed lora-merged lora-unfit"),
    "after an adapter a batch has another token": _flagged(
        "lora-unfit",
        adapter_lora_init=f.sets,
        decode=lambda flag: f.flags(flag, f.batch_where(lambda _: True, lambda b: f.next_token(b, 0))),
    ),
    "a program keeps a scale": _always(d.params_kept("SCALE"), "lora-changed"),
    "SCALE does nothing": _always(d.scale_of("SCALE", 1.0), f"lora-scaled lora-2 lora-many lora-changed {MERGED}"),
    "a control vector stays": _f("set_adapter_cvec", f.put_once, "cvec-removed cvec-changed"),
    "a control vector does nothing": _f("set_adapter_cvec", f.nothing(0), "cvec-removed cvec-changed"),
    "a control vector is not taken away": _f("set_adapter_cvec", f.none_is_ignored, "cvec-removed cvec-changed"),
    "control vectors add up": _f("set_adapter_cvec", f.vectors_add_up, "cvec-removed cvec-changed"),
    # inputs and outputs
    "embeddings come in empty": _f("decode", f.embeddings(lambda r: ctypes.memset(r[0], 0, 1024)), "embeddings-in"),
    "embeddings come in scaled": _f("decode", f.embeddings(_scaled), "embeddings-in"),
    "embeddings come in one row late": _f("decode", f.embeddings(_late), "embeddings-in"),
    "after embeddings there are no logits": _flagged(
        "embeddings-out", set_embeddings=f.sets, get_logits_ith=lambda flag: f.flags(flag, f.nothing())
    ),
    "pooled results are swapped": _f(
        "get_embeddings_seq", f.arguments(lambda c, seq: (c, 1 - seq)), "pooling-mean pooling-cls pooling-last", BERT
    ),
    "pooled results are the first one": _f(
        "get_embeddings_seq", f.arguments(lambda c, _: (c, 0)), "pooling-mean pooling-cls pooling-last", BERT
    ),
    "pooling is of another kind": _f(
        "init_from_model", f.params(_to(3)), "pooling-mean pooling-cls pooling-last", BERT
    ),
    **{
        f"{what}, of a decoder": _f(name, spoil, "pooling-mean-unified pooling-cls-unified pooling-last-unified")
        for what, name, spoil in (
            ("pooled results are swapped", "get_embeddings_seq", f.arguments(lambda c, seq: (c, 1 - seq))),
            ("pooled results are the first one", "get_embeddings_seq", f.arguments(lambda c, _: (c, 0))),
            ("pooling is of another kind", "init_from_model", f.params(_to(3))),
        )
    },
    "a mean divides by all tokens": _always(d.mean_of_all, "pooling-mean", BERT),
    "pooling takes the first row": _always(
        d.rows_for("cls", change=lambda ids, _: ids.fill(0)), "pooling-cls pooling-last", BERT
    ),
    "a sampler takes the next token": _f(
        "get_sampled_token_ith", lambda call, _: lambda c, i: call(c, i) + 1, "sampler"
    ),
    "a sampled token stays": _f("get_sampled_token_ith", f.first_answer, "sampler"),
    "a sampler is set for another sequence": _f(
        "set_sampler", f.arguments(lambda c, seq, chain: (c, seq + 1, chain)), "sampler sampler-chains"
    ),
    "candidates of a sampler are others": _f(
        "get_sampled_candidates_ith", lambda call, _: lambda c, i: call(c, i) + 4, "sampler-chains"
    ),
    "sampled logits are of the next candidates": _f(
        "get_sampled_logits_ith", lambda call, _: lambda c, i: call(c, i) + 4, "sampler-chains"
    ),
    "a sampler is not set": _f("set_sampler", f.nothing(True), "sampler-chains"),
}
"""What is wrong -> the bug."""


@cache
def model(arch: str) -> DeviceModel:
    """A model in this process, for all tests."""
    folder = Path(mkdtemp(prefix="conformance-scenarios-"))
    keys = f"{arch}," if "=" in arch else f"{arch}-"
    request = prepare(folder / "model.gguf", *read(f"zoo/{keys}real=1@1"))
    return DeviceModel(request, "")


def played(scenario: str, arch: str = LLAMA) -> Result:
    """A scenario in this process, all its parts; OVERCLAIM where llama.cpp reports an error."""
    it, pair = model(arch), Pair(f"scenario/{arch}-do={scenario}@1", "ggml")
    comparisons = []
    try:
        for part in range(SCENARIOS[scenario].parts):
            harness = Harness(it.library, it.model, it._request, Path(it._request.model).parent, part, it.device)
            with harness.clean():
                comparisons += list(SCENARIOS[scenario].play(harness))
    except ConformanceError as e:
        return Result(*pair, Verdict.OVERCLAIM, error=Error(str(e)))
    return judge_all(pair, scenario, comparisons, on_cpu=True)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """llama.cpp with a bug; raises what the bug's own code raised in a callback."""
    library: Llama = model(bug.arch).library
    spoils = bug.spoils()
    true = {name: getattr(library.llama, name) for name in spoils}
    spoilt = {name: spoil(true[name], library) for name, spoil in spoils.items()}
    try:
        for name, call in spoilt.items():
            setattr(library.llama, name, call)
        yield
    finally:
        for name, call in true.items():
            setattr(library.llama, name, call)
    for call in spoilt.values():
        if isinstance(call, Contexts) and call.error is not None:
            raise call.error


def noticed(bug: Bug, scenario: str) -> Result:
    """What a scenario says of a bug."""
    with planted(bug):
        return played(scenario, bug.arch)
