"""The builder: its graphs are llama.cpp's, its books are a KV cache's, its bytes are its seed's."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16, F32, Q4_0, Q8_0
from conformance.judge.compare import values
from conformance.llama.captured import GOLDEN
from conformance.run.execute import execute
from conformance.run.isolation.isolate import open_backend
from conformance.suite.decoder import Cparams, Hparams, Trajectory, make
from conformance.suite.decoder.config import PRESETS
from conformance.suite.decoder.memory import Cells, States, Ubatch, split

CAPTURED = {"llama-fa-1seq": 1, "llama-fa-4seq-streams": 4}
"""Capture -> its number of sequences."""

TYPES = {
    "token_embd": Q4_0,
    "attn_q": Q4_0,
    "attn_k": F16,
    "attn_v": F32,
    "attn_output": Q4_0,
    "ffn_gate": Q4_0,
    "ffn_up": F16,
    "ffn_down": Q8_0,
    "output": F16,
}
MODEL = Hparams(n_layer=2, n_embd=256, n_head=8, n_head_kv=2, n_embd_head=32, n_ff=512, n_vocab=64, types=TYPES)
UNSET = frozenset({"inp_mixed_tokens", "inp_mixed_embd", "inp_mixed_slots"})
"""Inputs of the branch that is not computed: llama.cpp leaves in them what the memory held."""


def _captured(name: str) -> Case:
    return casefile.read_one(GOLDEN / f"{name}.gguf", f"captured/{name}@0")


def _rebuilt(case: Case, n_seq: int) -> Case:
    """The same batches through the builder."""
    trajectory = Trajectory("captured/again@0", MODEL, Cparams(n_ctx=512, n_seq_max=n_seq))
    for step in case.steps:
        rows: Any = np.array(step.note["tokens"], np.int64)
        trajectory.decode(Ubatch(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] != 0))
    return trajectory.case("models", {}, 0)


def _facts(t: Tensor, numbers: dict[Tensor, int]) -> tuple[object, ...]:
    src = tuple(None if s is None else numbers[s] for s in t.src)
    view = None if t.view_src is None else numbers[t.view_src]
    return (t.name, t.op, t.type.name, t.ne, t.nb, t.op_params, t.flags, src, view, t.view_offs)


@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_equal_llama_cpp(name: str) -> None:
    """Each step of a capture is the builder's, tensor for tensor: names, op, type, ne, nb, op_params, flags, edges."""
    case = _captured(name)
    again = _rebuilt(case, CAPTURED[name])
    assert len(case.steps) == len(again.steps)
    for want, got in zip(case.steps, again.steps, strict=True):
        wanted, found = want.graph.tensors(), got.graph.tensors()
        want_no, got_no = ({t: i for i, t in enumerate(ts)} for ts in (wanted, found))
        for a, b in zip(wanted, found, strict=True):
            assert _facts(a, want_no) == _facts(b, got_no)
        assert [t.name for t in want.outputs] == [t.name for t in got.outputs]


@pytest.mark.parametrize("name", CAPTURED)
def test_inputs_equal_llama_cpp(name: str) -> None:
    """Tokens, positions, indices, masks and output rows of a capture are the builder's, byte for byte."""
    case = _captured(name)
    for want, got in zip(case.steps, _rebuilt(case, CAPTURED[name]).steps, strict=True):
        wanted, found = ({t.name: data for t, data in s.inputs.items()} for s in (want, got))
        assert wanted.keys() == found.keys()
        for key in wanted.keys() - UNSET:
            np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)


@pytest.mark.parametrize("name", CAPTURED)
def test_persistent_tensors_equal_llama_cpp(name: str) -> None:
    """Weights and caches of a capture are the builder's: name, type, ne; caches start as zeros."""
    case = _captured(name)
    again = _rebuilt(case, CAPTURED[name])
    wanted = {t.name: (t.type, t.ne) for t in case.persistent}
    assert {t.name: (t.type, t.ne) for t in again.persistent} == wanted
    assert not any(data.any() for t, data in again.persistent.items() if t.name.startswith("cache"))


def test_ids_are_bytes() -> None:
    """An id gives the same bytes every time, and another seed others: weights, caches, tokens."""
    text = "kv_growth/llama-w=q4_0,cache=q8_0,head=32,run=at20.p3.d2"
    assert _digest(make(f"{text}@1")) == _digest(make(f"{text}@1"))
    assert _digest(make(f"{text}@1")) != _digest(make(f"{text}@2"))


PINNED = {
    "kv_growth/llama-run=p5.d2@7": "c51893b43dc7853b",
    "kv_growth/llama-w=q4_K,embd=256,head=64,ff=256,seqs=2,fa=0,run=at9.d2@7": "7cfa449bec26ec7a",
    "kv_growth/llama-w=bf16,cache=q4_0,head=64,write=cpy,tied=1,freqs=1,run=at9.p3.back1.d1@7": "b4b21ae62809e005",
    "kv_growth/gemma2-swa=8,ubatch=16,run=at9.p3.d1@7": "3550c670c0f81929",
    "kv_growth/gpt-oss-seqs=2,run=at9.p2.d1@7": "544a335d98ae8106",
    "kv_growth/lfm2-seqs=2,run=at9.p2.d1@7": "94a35ce7f599c1e4",
    "kv_growth/llama-norm=layer,ffnbias=1,qkv=fused,headv=8,alibi=8,rope=none,run=at9.d1@7": "33900b83292c4eac",
    "kv_growth/qwen3-run=at9.shift2.d1@7": "8f463068ae585e32",
}


@pytest.mark.parametrize("case_id", PINNED)
def test_bytes_are_pinned(case_id: str) -> None:
    """The bytes of an id are those of every machine and Python; a change of them raises `GENERATOR`."""
    assert _digest(make(case_id)) == PINNED[case_id]


def _digest(case: Case) -> str:
    sha = hashlib.sha256()
    for tensors in (case.persistent, *(s.inputs for s in case.steps)):
        for t, data in tensors.items():
            sha.update(f"{t.name} {t.type} {t.ne}".encode())
            sha.update(data.tobytes())
    return sha.hexdigest()[:16]


@pytest.mark.parametrize("fa", [0, 1])
@pytest.mark.parametrize("seqs", ["seqs=1", "seqs=3", "seqs=3,unified=1"])
@pytest.mark.parametrize("write", ["set_rows", "cpy"])
def test_every_layout_is_legal(fa: int, seqs: str, write: str) -> None:
    """Whatever the cache looks like, the graphs are ones that ggml accepts, and every input has its bytes."""
    make(f"kv_growth/llama-fa={fa},{seqs},write={write},ctx=300,run=at20.p5.d2.back1.d1@1").validate()


@pytest.mark.parametrize("arch", PRESETS)
def test_every_preset_is_legal(arch: str) -> None:
    """The defaults of each architecture are a model that ggml accepts, with sequences in one stream and in several."""
    small = "l=2,embd=128,heads=2,kv=1,head=64,ff=64,vocab=32"
    for seqs in ("seqs=2", "seqs=2,unified=1,fa=0"):
        make(f"kv_growth/{arch}-{small},{seqs},run=p5+3.d2@1").validate()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("heads=3", "not a multiple"),
        ("head=15", "even head size"),
        ("fa=0,cache=q8_0,head=32", "requires flash_attn"),
        ("cache=q8_0", "do not fill blocks"),
        ("run=p9.at3", "must be the first part"),
        ("run=x3", "'x3' found"),
        ("run=p600", "no 512 free cells|no 88 free cells"),
        ("run=back1", "at least one p, o or d"),
        ("run=rm0", "leaves no sequence"),
        ("run=rm4", "is unknown"),
        ("run=p1+2", "one number of tokens"),
        ("seqs=2,run=at3.cp0", "a unified cache expected"),
        ("seqs=3,unified=1,write=cpy,run=p3.rm1.p5", "not adjacent"),
        ("l=0", "at least 1"),
        ("colour=blue", "key 'colour' is unknown"),
        ("conv=1", "at least 2 taps"),
        ("experts=2,used=3", "1 to 2 experts"),
        ("alibi=8", "rope=none"),
        ("embdscale=big", "a number or sqrt"),
        ("conv=3,run=p9.back2", "cannot be rewound"),
        ("swa=32,ctx=1024,ubatch=64,run=p9.shift2.d1", "swafull=1"),
        ("cache=bf16,run=p9.shift2.d1", "BF16"),
    ],
)
def test_refusals_say_why(keys: str, reason: str) -> None:
    """An id that no graph can be built from is refused with the reason."""
    with pytest.raises(UsageError, match=reason):
        make(f"kv_growth/llama-{keys}@1")


@given(n_ubatch=st.integers(1, 40), lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4), unified=st.booleans())
def test_splits_lose_nothing(n_ubatch: int, lengths: list[int], unified: bool) -> None:
    """Ubatches hold every token of a batch once, each sequence in order; with streams all sequences have as many."""
    n = sum(lengths)
    seqs = np.repeat(np.arange(len(lengths)), lengths)
    batch = Ubatch(np.arange(n), np.arange(n), seqs, np.zeros(n, np.bool_))
    parts = split(batch, n_ubatch, unified=unified)
    tokens = np.concatenate([p.tokens for p in parts]) if parts else np.arange(0)
    assert sorted(tokens.tolist()) == list(range(n))
    for seq in range(len(lengths)):
        mine = [t for p in parts for t in p.tokens[p.seqs == seq].tolist()]
        assert mine == sorted(mine)
    for p in parts:
        assert p.n_tokens <= n_ubatch
        counts = np.bincount(p.seqs)
        assert unified or len(set(counts[counts > 0].tolist())) == 1


@settings(deadline=None)
@given(data=st.data(), n_stream=st.sampled_from([1, 3]))
def test_cells_hold_what_was_put_there(data: st.DataObject, n_stream: int) -> None:
    """After any prompts and removals a token sees exactly the cells of its sequence that are not after it."""
    cells = Cells(64, n_stream)
    known: dict[int, int] = dict.fromkeys(range(3), 0)
    for _ in range(data.draw(st.integers(1, 6))):
        seq = data.draw(st.integers(0, 2))
        if known[seq] and data.draw(st.booleans()):
            known[seq] = data.draw(st.integers(0, known[seq] - 1))
            cells.seq_rm(seq, known[seq])
            continue
        n = data.draw(st.integers(1, 4))
        batch = Ubatch(np.zeros(n, np.int64), known[seq] + np.arange(n), np.full(n, seq), np.ones(n, np.bool_))
        slots = cells.find_slot(batch)
        assert (cells.pos[list(slots.streams), slots.idxs] < 0).all()
        cells.apply(batch, slots)
        known[seq] += n
        assert cells.seq_pos_max(seq) == known[seq] - 1
        mask = cells.kq_mask(batch, cells.n_kv(slots))
        seen = np.isfinite(mask)
        assert seen.sum(axis=1).tolist() == (batch.pos + 1).tolist()
        rows = cells.k_idxs(slots)
        assert seen[np.arange(n), rows % 64].all()


@settings(deadline=None)
@given(data=st.data(), n_stream=st.sampled_from([1, 2]), n_swa=st.integers(1, 12))
def test_windows_hold_what_they_show(data: st.DataObject, n_stream: int, n_swa: int) -> None:
    """However often its cells go round, a token sees the last `n_swa` positions of its sequence, each in one cell."""
    n_ubatch = 8
    cells = Cells(2 * n_swa + 2 * n_ubatch, n_stream, n_swa)
    past = [0, 0]
    for _ in range(data.draw(st.integers(1, 12))):
        seq, n = data.draw(st.integers(0, 1)), data.draw(st.integers(1, n_ubatch))
        batch = Ubatch(np.zeros(n, np.int64), past[seq] + np.arange(n), np.full(n, seq), np.ones(n, np.bool_))
        (slots,) = cells.prepare([batch])
        cells.apply(batch, slots)
        past[seq] += n
        s = cells.stream_of(seq)
        n_kv = cells.n_kv(slots)
        for row, p in zip(cells.kq_mask(batch, n_kv), batch.pos.tolist(), strict=True):
            shown = sorted(cells.pos[s, :n_kv][np.isfinite(row)].tolist())
            assert shown == list(range(max(0, p + 1 - n_swa), p + 1))
        held = np.sort(cells.pos[s][cells.seq[s] == 1 << seq])
        assert np.array_equal(held, np.arange(held[0], past[seq]))


@given(data=st.data(), n_seqs=st.integers(1, 4))
def test_states_are_read_from_where_they_were_left(data: st.DataObject, n_seqs: int) -> None:
    """Rows written and read as a graph does: each sequence finds its own state, or zeros where it is new."""
    states, rows = States(n_seqs), [0] * n_seqs
    known: dict[int, int] = {}
    lengths = dict.fromkeys(range(n_seqs), 0)
    for step in range(1, data.draw(st.integers(2, 12))):
        seq = data.draw(st.integers(0, n_seqs - 1))
        act = data.draw(st.sampled_from(["run", "run", "rm", "cp"]))
        if act == "rm":
            states.seq_rm(seq, 0)
            known.pop(seq, None)
            lengths[seq] = 0
        elif act == "cp":
            other = data.draw(st.integers(0, n_seqs - 1))
            if other != seq and seq in known:
                states.seq_cp(seq, other)
                known[other], lengths[other] = known[seq], lengths[seq]
        else:
            seqs = np.array(sorted(data.draw(st.sets(st.integers(0, n_seqs - 1), min_size=1))))
            pos = np.array([lengths[s] for s in seqs.tolist()])
            batch = Ubatch(np.zeros(len(seqs), np.int64), pos, seqs, np.ones(len(seqs), np.bool_))
            place = states.place(batch)
            if place.zero >= 0:
                rows[place.zero] = 0
            gathered = [rows[i] for i in place.s_copy]
            assert gathered[: len(seqs)] == [known.get(s, 0) for s in seqs.tolist()]
            for i, s in enumerate(seqs.tolist()):
                known[s] = 100 * step + i
                lengths[s] += 1
                rows[place.head + i] = known[s]
            for i in range(len(seqs), len(gathered)):
                rows[place.head + i] = gathered[i]


def test_prepared_slots_are_those_that_are_filled() -> None:
    """Ubatches of one batch get different cells, and until they are applied nothing has changed."""
    cells = Cells(64, 1)
    parts = split(_prompt(40), 16, unified=True)
    slots = cells.prepare(parts)
    assert (cells.pos < 0).all()
    assert len(np.unique(np.concatenate([s.idxs.reshape(-1) for s in slots]))) == 40


def _prompt(n: int) -> Ubatch:
    nothing = np.zeros(n, np.int64)
    return Ubatch(nothing, np.arange(n), nothing, np.ones(n, np.bool_))


def test_moved_positions_know_by_how_much() -> None:
    """After a shift a cell's position less its shift is where its K was rotated to; what falls below 0 is emptied."""
    cells = Cells(32, 1)
    (slots,) = cells.prepare([_prompt(10)])
    cells.apply(_prompt(10), slots)
    cells.seq_rm(0, 0, 4)
    cells.seq_add(0, 5, -5)
    held = cells.pos[0] >= 0
    assert sorted(cells.pos[0][held].tolist()) == [0, 1, 2, 3, 4, 4]
    assert set((cells.pos - cells.shift)[0][held].tolist()) == set(range(4, 10))
    cells.seq_add(0, 0, -2)
    assert cells.seq_pos_max(0) == 2
    assert (cells.shift[cells.pos < 0] == 0).all()


def test_weights_keep_activations_in_order() -> None:
    """Every weight type gives logits of order 1 and K of order 1: neither vanishing nor exploding."""
    wide = "embd=256,heads=4,head=64,ff=256"
    llamas = ("w=f32", "w=q4_0", "w=q8_0", f"w=q6_K,{wide}", f"w=q4_K,{wide}", "l=8,w=f16")
    for keys in (*(f"llama-{keys}" for keys in llamas), "qwen3-l=4", "gemma2-l=2", "gpt-oss-l=4", "lfm2-l=4,tied=0"):
        case = make(f"kv_growth/{keys},run=o40@3")
        backend = open_backend(Spec("cpu"))
        (ran,) = execute(backend, case).steps
        for t, data in {**ran.outputs, **ran.caches}.items():
            held = values(t, data)
            size = float(np.sqrt(np.mean(held[held != 0] ** 2)))
            assert 0.2 < size < 8, (keys, t.name, size)
