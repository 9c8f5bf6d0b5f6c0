"""Verbs of the zoo: each class notices bugs planted in llama.cpp's functions, and passes without them."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from marks import needs_wheel

from conformance.cli import main
from conformance.ggml.errors import ConformanceError
from conformance.ggml.lib.layout import Batch
from conformance.suite.zoo.family import prepare, read
from conformance.suite.zoo.play import RUNS, Device, Played
from conformance.suite.zoo.verbs import play
from conformance.suite.zoo.verbs.desk import Desk, Pair
from conformance.suite.zoo.verbs.play import judge_pairs
from conformance.suite.zoo.verbs.table import VERBS
from conformance.suite.zoo.worker import DeviceModel

LLAMA, MAMBA, BERT, T5 = "llama", "mamba", "bert", "t5"
Call = Callable[..., Any]


@cache
def model(arch: str) -> DeviceModel:
    """A model in this process, for all tests."""
    folder = Path(mkdtemp(prefix="conformance-verbs-"))
    request = prepare(folder / "model.gguf", *read(f"zoo/{arch}-real=1@1"))
    return DeviceModel(request, "")


def played(verb: str, arch: str = LLAMA) -> Played:
    """A verb in this process; ERROR where llama.cpp reports one."""
    it = model(arch)
    desk = Desk(it.library, it.model, it._request, Path(it._request.model).parent)
    try:
        with desk.clean():
            return judge_pairs(list(VERBS[verb].play(desk)), on_cpu=True)
    except ConformanceError as e:
        return Played("ERROR", str(e))


def _nothing(result: object) -> Callable[[Call, Any], Call]:
    """Does nothing, and says that it did."""
    return lambda _call, _llama: lambda *_: result


def _loads_nothing(_: Call, _llama: Any) -> Call:  # noqa: ANN401  # a namespace
    return lambda _context, _data, size, *_rest: size


def _loses_a_cell(call: Call, llama: Any) -> Call:  # noqa: ANN401
    def load(context: int, *rest: Any) -> Any:  # noqa: ANN401
        done = call(context, *rest)
        llama.memory_seq_rm(llama.get_memory(context), 0, 3, 4)
        return done

    return load


def _other_delta(call: Call, _: Any) -> Call:  # noqa: ANN401
    return lambda memory, seq, p0, p1, delta: call(memory, seq, p0, p1, -delta)


def _half(call: Call, _: Any) -> Call:  # noqa: ANN401
    return lambda memory, source, to, *_: call(memory, source, to, 0, 6)


def _one_less(call: Call, _: Any) -> Call:  # noqa: ANN401
    return lambda memory, seq, p0, p1: call(memory, seq, p0 + 1 if p0 > 0 else p0, p1)


def _row_0(call: Call, _: Any) -> Call:  # noqa: ANN401
    rows: dict[int, int] = {}

    def get(context: int, i: int) -> int:
        if i == 0 or context not in rows:
            rows[context] = call(context, i)
            return rows[context]
        return rows.pop(context)

    return get


def _changes_a_token(call: Call, _: Any) -> Call:  # noqa: ANN401
    """In batches of several sequences."""

    def decode(context: int, batch: Batch) -> Any:  # noqa: ANN401
        n = batch.n_tokens
        ids = [ctypes.c_int32.from_address(p).value for p in (ctypes.c_uint64 * n).from_address(batch.seq_id)]
        if len(set(ids)) > 1 and batch.token:
            tokens = (ctypes.c_int32 * n).from_address(batch.token)
            tokens[n - 1] = (tokens[n - 1] + 1) % 128
        return call(context, batch)

    return decode


def _changes_long_ones(call: Call, _: Any) -> Call:  # noqa: ANN401
    def decode(context: int, batch: Batch) -> Any:  # noqa: ANN401
        if batch.n_tokens > 10:
            tokens = (ctypes.c_int32 * batch.n_tokens).from_address(batch.token)
            tokens[0] = (tokens[0] + 1) % 128
        return call(context, batch)

    return decode


def _changes_rope(call: Call, _: Any) -> Call:  # noqa: ANN401
    """Wherever one of a few parameters is not as usual."""

    def make(model: int, params: Any) -> Any:  # noqa: ANN401
        usual = params.op_offload and params.offload_kqv and params.flash_attn_type and params.n_ctx <= 512
        if not usual or params.n_threads > 1:
            params.rope_freq_base = 100.0
        return call(model, params)

    return make


def _forgets_embeddings(call: Call, _: Any) -> Call:  # noqa: ANN401
    def decode(context: int, batch: Batch) -> Any:  # noqa: ANN401
        if batch.embd:
            ctypes.memset(batch.embd, 0, 4 * 256)
        return call(context, batch)

    return decode


def _clears_the_other(call: Call, llama: Any) -> Call:  # noqa: ANN401
    """What another context holds is lost when one decodes."""
    last: list[int] = []

    def decode(context: int, batch: Batch) -> Any:  # noqa: ANN401
        if last and last[-1] != context:
            llama.memory_clear(llama.get_memory(last[-1]), True)  # C's signature
        last.append(context)
        return call(context, batch)

    return decode


def _once(call: Call, _: Any) -> Call:  # noqa: ANN401
    """What was set first stays in each context."""
    seen: set[int] = set()

    def put(context: int, *rest: Any) -> int:  # noqa: ANN401
        if context in seen:
            return 0
        seen.add(context)
        return int(call(context, *rest))

    return put


def _scale_1(call: Call, _: Any) -> Call:  # noqa: ANN401
    return lambda context, adapters, n, _scales: call(context, adapters, n, (ctypes.c_float * n)(*[1.0] * n))


def _one_adapter(call: Call, _: Any) -> Call:  # noqa: ANN401
    return lambda context, adapters, n, scales: call(context, adapters, min(n, 1), scales)


def _next_token(call: Call, _: Any) -> Call:  # noqa: ANN401
    return lambda context, i: call(context, i) + 1


def _other_sequence(call: Call, _: Any) -> Call:  # noqa: ANN401
    return lambda context, seq: call(context, 1 - seq)


def _changes_later_ones(call: Call, _: Any) -> Call:  # noqa: ANN401
    """From the third batch on that a context reads."""
    seen: dict[int, int] = {}

    def encode(context: int, batch: Batch) -> Any:  # noqa: ANN401
        seen[context] = seen.get(context, 0) + 1
        if seen[context] > 2:
            token = ctypes.c_int32.from_address(batch.token)
            token.value = (token.value + 1) % 128
        return call(context, batch)

    return encode


def _ids(change: Callable[[int], int]) -> Callable[[Call, Any], Call]:
    """Changes the sequences of tokens, in batches of several."""

    def spoil(call: Call, _: Any) -> Call:  # noqa: ANN401
        def encode(context: int, batch: Batch) -> Any:  # noqa: ANN401
            pointers = (ctypes.c_uint64 * batch.n_tokens).from_address(batch.seq_id)
            ids = [ctypes.c_int32.from_address(p) for p in pointers]
            if any(i.value for i in ids):
                for i in ids:
                    i.value = change(i.value)
            return call(context, batch)

        return encode

    return spoil


BUGS: dict[str, tuple[str, Callable[[Call, Any], Call], str, str]] = {
    "a state is not loaded": ("state_set_data", _loads_nothing, LLAMA, "state-same state-fresh state-larger state-3"),
    "a loaded state lacks a cell": ("state_set_data", _loses_a_cell, LLAMA, "state-same state-fresh state-larger"),
    "a recurrent state is not loaded": ("state_set_data", _loads_nothing, MAMBA, "state-same state-fresh state-3"),
    "a file is not loaded": ("state_load_file", _nothing(True), LLAMA, "state-file"),
    "a loaded file lacks a cell": ("state_load_file", _loses_a_cell, LLAMA, "state-file"),
    "a sequence is not loaded": (
        "state_seq_set_data", _loads_nothing, LLAMA, "state-seq state-seq-other state-seq-unified"
    ),
    "a loaded sequence lacks a cell": ("state_seq_set_data", _loses_a_cell, LLAMA, "state-seq state-fragmented"),
    "a sequence on the device is not loaded": (
        "state_seq_set_data_ext", _loads_nothing, MAMBA, "state-checkpoint state-seq-device"
    ),
    "a sequence's file lacks a cell": ("state_seq_load_file", _loses_a_cell, LLAMA, "state-seq-file"),
    "seq_rm does nothing": (
        "memory_seq_rm", _nothing(True), LLAMA, "seq-rm-tail seq-rm-whole seq-rm-all-unified drafts shift"
    ),
    "seq_rm leaves a cell": ("memory_seq_rm", _one_less, LLAMA, "seq-rm-tail seq-rm-long drafts"),
    "seq_cp does nothing": ("memory_seq_cp", _nothing(None), LLAMA, "seq-cp seq-cp-unified"),
    "seq_cp copies half": ("memory_seq_cp", _half, LLAMA, "seq-cp-unified"),
    "seq_keep does nothing": ("memory_seq_keep", _nothing(None), LLAMA, "seq-keep-unified"),
    "seq_add moves the other way": ("memory_seq_add", _other_delta, LLAMA, "seq-add shift"),
    "clear does nothing": ("memory_clear", _nothing(None), LLAMA, "clear clear-data"),
    "a clear of recurrent states does nothing": ("memory_clear", _nothing(None), MAMBA, "clear clear-data"),
    "a batch of several sequences has another token": (
        "decode", _changes_a_token, LLAMA,
        "batch-2 batch-8 batch-3-unified batch-4-alike slots-1-3 sets-unified needle coupled"
    ),
    "a long batch has another token": ("decode", _changes_long_ones, LLAMA, "chunks"),
    "parameters change more than they say": (
        "init_from_model", _changes_rope, LLAMA, "threads op-offload offload-kqv flash-attn larger"
    ),
    "the second result is the first": ("get_logits_ith", _row_0, LLAMA, "batch-3 batch-4 slots-0-2 sets outputs"),
    "contexts share what they hold": ("decode", _clears_the_other, LLAMA, "contexts-2"),
    "an adapter stays": ("set_adapters_lora", _once, LLAMA, "lora-removed lora-changed"),
    "the scale of an adapter does nothing": ("set_adapters_lora", _scale_1, LLAMA, "lora-scaled lora-2 lora-many"),
    "one adapter of several": ("set_adapters_lora", _one_adapter, LLAMA, "lora-2 lora-many"),
    "adapters do nothing": ("set_adapters_lora", _nothing(0), LLAMA, "lora-removed lora-scaled lora-changed"),
    "a control vector stays": ("set_adapter_cvec", _once, LLAMA, "cvec-removed cvec-changed"),
    "embeddings come in wrong": ("decode", _forgets_embeddings, LLAMA, "embeddings-in"),
    "a sampler takes the next token": ("get_sampled_token_ith", _next_token, LLAMA, "sampler"),
    "what was read first stays": ("encode", _once, T5, "encode-again"),
    "a text read later has another token": ("encode", _changes_later_ones, T5, "encode-twice encode-again"),
    "a batch decoded later has another token": ("decode", _changes_later_ones, T5, "encode-twice encode-again"),
    "a decoder does not begin anew": ("memory_clear", _nothing(None), T5, "encode-twice encode-again"),
    "encoded sequences are swapped": ("encode", _ids(lambda i: 1 - i), T5, "encode-2"),
    "encoded sequences are one": ("encode", _ids(lambda _: 0), T5, "encode-2"),
    "a batch of several texts has another token": ("encode", _changes_a_token, T5, "encode-2"),
    "pooled results are swapped": ("get_embeddings_seq", _other_sequence, BERT, "pooling-mean pooling-cls"),
}  # fmt: skip
"""Bug -> llama.cpp's function, how it is spoilt, the model, and the verbs that must notice."""


@needs_wheel
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verb that uses a function passes, and does not where the function is spoilt."""
    name, spoil, arch, verbs = BUGS[bug]
    llama = model(arch).library.llama
    for verb in verbs.split():
        assert played(verb, arch).verdict == "PASS"
        with monkeypatch.context() as patch:
            patch.setattr(llama, name, spoil(getattr(llama, name), llama))
            found = played(verb, arch)
        assert found.verdict in ("FAIL", "ERROR", "VACUOUS"), verb


@needs_wheel
@pytest.mark.parametrize("verb", ["state-fresh", "lora-removed", "sampler", "seq-div"])
def test_an_absent_function_is_named(verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library that lacks a function of a verb makes it UNSUPPORTED, and the reason names the symbol."""
    lacking = {
        "state-fresh": "state_get_size", "lora-removed": "adapter_lora_init", "sampler": "set_sampler",
        "seq-div": "memory_seq_div",
    }[verb]  # fmt: skip
    monkeypatch.setattr(model(LLAMA).library.llama, lacking, None)
    reply = model(LLAMA).verb({"verb": verb, "part": 0, "folder": str(tmp_path)})
    assert reply == {"unsupported": f"this llama.cpp has no llama_{lacking}"}


def _pair(actual: list[float], expected: list[float], *, exact: bool = False, apart: bool = False) -> Pair:
    return Pair("x", np.array([actual], np.float32), np.array([expected], np.float32), exact, apart)


def test_what_pairs_say() -> None:
    """Bits where they must be equal, else the tolerance; nothing compared, or nothing changed, is VACUOUS."""
    near = [1.0, 2.000001]
    assert judge_pairs([_pair(near, [1.0, 2.0])], on_cpu=True).verdict == "PASS"
    assert judge_pairs([_pair(near, [1.0, 2.0], exact=True)], on_cpu=True).verdict == "FAIL"
    assert judge_pairs([_pair(near, [1.0, 2.0], exact=True)], on_cpu=False).verdict == "PASS"
    assert judge_pairs([_pair([1.0], [1.2])], on_cpu=False).verdict == "FAIL"
    assert judge_pairs([_pair([1.0], [1.01])], on_cpu=False).verdict == "PASS"
    assert judge_pairs([_pair([1.0], [1.01])], on_cpu=True).verdict == "FAIL"
    assert judge_pairs([_pair([1.0], [1.0]), _pair([1.0], [1.0], apart=True)], on_cpu=True).verdict == "VACUOUS"
    assert judge_pairs([_pair([0.0], [0.0])], on_cpu=True).verdict == "VACUOUS"
    assert judge_pairs([], on_cpu=True).verdict == "VACUOUS"


def test_masked_logits_hide_no_others() -> None:
    """What a model never gives is left out of the error, and must be the same in both ways."""
    low = float(np.finfo(np.float32).min)
    assert judge_pairs([_pair([low, 1.0], [low, 1.0])], on_cpu=True).verdict == "PASS"
    assert judge_pairs([_pair([low, 1.0], [low, 2.0])], on_cpu=True).verdict == "FAIL"
    other = judge_pairs([_pair([low, 1.0], [0.5, 1.0])], on_cpu=True)
    assert (other.verdict, "other tokens are masked" in other.detail) == ("FAIL", True)


@needs_wheel
def test_the_command_with_verbs(tmp_path: Path) -> None:
    """Verbs stand in the table and in the record as runs do, one of two processes too; what makes no sense for a model,
    and what llama.cpp refuses, is UNSUPPORTED with the reason; a name that fits none is an error of the user.
    """
    out = tmp_path / "zoo.json"
    command = ["zoo", "--backend", "ggml", "--arch", "llama", "--arch", "mamba", "--verb", "state-process", "--json"]
    result = CliRunner().invoke(main, [*command, str(out), "--verb", "shif?", "--verb", "seq-rm-tail"])
    assert result.exit_code == 0, result.output
    assert "state-process" in result.output
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert {(r["architecture"], r["run"]): r["verdict"] for r in rows} == {
        ("llama", "state-process"): "PASS", ("llama", "shift"): "PASS", ("llama", "seq-rm-tail"): "PASS",
        ("mamba", "state-process"): "PASS", ("mamba", "shift"): "UNSUPPORTED", ("mamba", "seq-rm-tail"): "UNSUPPORTED",
    }  # fmt: skip
    reasons = {r["run"]: r["detail"] for r in rows if r["verdict"] == "UNSUPPORTED"}
    assert reasons["seq-rm-tail"] == "refused: llama_memory_seq_rm(0, 13, -1) returned false"
    assert reasons["shift"] == "makes no sense for a model of kind recurrent"


def test_a_model_that_dies_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three verbs, apart from each other, are tried; if one does not die, all are."""
    asked: list[str] = []
    alive: set[str] = set()

    def conduct(*args: Any) -> dict[str, Played]:  # noqa: ANN401
        asked.extend(args[2])
        return {n: Played("PASS" if n in alive else "CRASH") for n in args[2]}

    monkeypatch.setattr(play, "conduct", conduct)
    asks: dict[str, dict[str, Any]] = {n: {} for n in "abcdefg"}
    for name, tried in (("", 3), ("a", 7), ("d", 7), ("g", 7), ("b", 3)):
        asked.clear()
        alive.clear()
        alive.add(name)
        request, _, _, _ = read("zoo/llama@1")
        played = play._alive(request, Device("x"), asks, lambda *_: Played("PASS"), 1.0)
        assert (len(asked), set(played)) == (tried, set(asks))
        assert sum(p.verdict == "NO REFERENCE" for p in played.values()) == 7 - tried


def test_the_names_of_verbs() -> None:
    """A name that fits no verb is an error of the user, and a list shows them all."""
    assert CliRunner().invoke(main, ["zoo", "--backend", "ggml", "--verb", "nothing"]).exit_code == 2
    assert "state-fragmented" in CliRunner().invoke(main, ["zoo", "--list-verbs"]).output


def test_every_verb_has_its_words() -> None:
    """A verb says what it does in few words, for at least one kind of model; at least 20 hold for a plain decoder."""
    assert all(v.does and v.kinds and len(v.does) < 80 for v in VERBS.values())
    assert sum("attention" in v.kinds for v in VERBS.values()) >= 20


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    model.cache_clear()


def test_verbs_and_runs_have_other_names() -> None:
    """A cell is named by either, so no name may be both."""
    assert not set(VERBS) & set(RUNS)
