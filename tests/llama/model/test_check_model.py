"""`conform check-model`: a tiny model on devices and adapters, right ones and ones with a planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_wheel

from backends.cpu import CpuBackend
from conformance.backend import registry
from conformance.backend.kernel import Kernel, KernelSession, Raw, Sources
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, new_tensor
from conformance.ggml.types import F32
from conformance.judge.evidence import Fault
from conformance.judge.verdict import MissingCause, Result, Verdict
from conformance.llama.live.llama import Device
from conformance.llama.model import figures, graphs, turns
from conformance.llama.model.check import ModelCheck, Text
from conformance.llama.model.llama_process import LlamaProcess, Turn, alone
from conformance.llama.model.modelcase import ModelCase
from conformance.llama.model.modelrun import RIGHT, ROUNDING
from conformance.llama.model.recording import ModelRecording, layer_of, step_words
from conformance.llama.model.references import allowance, rounding
from conformance.report.runfile import read_document
from conformance.run.oracle import Oracle
from conformance.run.runner import Runner

pytestmark = needs_wheel
PROMPT = [3, 14, 15, 92, 65]
DECODE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of llama in Q8_0, for llama.cpp rounds activations, with a template of ChatML."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    made = CliRunner().invoke(main, ["capture", "llama", "--model", "--weight-type", "q8_0", "-o", str(path),
                                       "--set", "tokenizer.chat_template=chatml"])  # fmt: skip
    assert made.exit_code == 0, made.output
    return path


@pytest.fixture(scope="module")
def check(model: Path) -> Iterator[ModelCheck]:
    """The model's check, which shares the reference's runs."""
    with closing(LlamaProcess(model, Device("llama.cpp"))) as llama:
        recording = ModelRecording.of(llama, alone(PROMPT, DECODE))
        with closing(ModelCheck(model, recording, lambda spec: Device(str(spec), "", "CPU"), budget=5.0)) as it:
            yield it


def test_recorded_graphs_give_the_logits(check: ModelCheck) -> None:
    """Prompt and tokens are a step each, whose recorded result llama.cpp hands out; weights stay in the file."""
    case, decoded = check.recording.case, check.recording.decoded
    assert len(case.steps) == 1 + DECODE == len(decoded.logits)
    for step, row in zip(case.steps, decoded.logits, strict=True):
        assert np.array_equal(step.expected[step.outputs[0]].view("<f4"), row)
    assert len(case.references) == len(case.persistent) - len(case.caches())
    assert list(decoded.logits.argmax(1))[:-1] == decoded.tokens


def test_a_device_of_llama_is_right(check: ModelCheck) -> None:
    """The wheel's CPU, chosen as a device, gives the same distribution, and each of its nodes is right."""
    answer = check.of(Spec("ggml"))
    assert (answer.word, answer.sentence(), answer.notes) == (RIGHT, "right", [])


def test_a_text_has_a_row_for_each_token(model: Path, check: ModelCheck) -> None:
    """Graphs with results of every token give llama.cpp's own perplexity, but for rounding."""
    with closing(LlamaProcess(model, Device("llama.cpp"))) as llama:
        text = Text(PROMPT, *llama.record(alone(PROMPT), every=True))
    found = graphs.run(check.references.backend(EXACT), text.case).logits(text.case)
    assert found.shape == text.decoded.logits.shape == (len(PROMPT), llama.n_vocab)
    assert figures.perplexity(found, PROMPT) == pytest.approx(text.perplexity, rel=0.05)
    assert np.array_equal(text.decoded.logits[-1].argmax(), check.recording.decoded.logits[0].argmax())


def test_float64_differs_by_rounding(check: ModelCheck) -> None:
    """What does not round activations differs by that alone, and the sentence has the figure."""
    answer = check.of(Spec("cpu"))
    assert answer.word == ROUNDING, answer.sentence()
    assert answer.figures is not None
    assert 0 < answer.figures.kl_max < 1e-2
    assert answer.sentence().startswith("differs by rounding: KL ")


# -- planted faults ---------------------------------------------------------------------------------------------------


Spoil = Callable[[CpuBackend, Tensor, Raw, Sources, Raw], None]
"""Makes a value wrong: of the backend, node, value, sources, and what stood there before."""


def _wrong_scale(_b: CpuBackend, _n: Tensor, dst: Raw, _s: Sources, _before: Raw) -> None:
    dst *= np.float32(1.01)


def _swapped_heads(_b: CpuBackend, _n: Tensor, dst: Raw, _s: Sources, _before: Raw) -> None:
    dst[...] = dst[:, :, ::-1].copy()


def _stale_row(_b: CpuBackend, _n: Tensor, dst: Raw, src: Sources, before: Raw) -> None:
    """Nothing is written for the second token after the prompt."""
    if np.any(src[1] == len(PROMPT) + 1):
        dst[...] = before


def _wrong_base(backend: CpuBackend, node: Tensor, dst: Raw, src: Sources, _before: Raw) -> None:
    other = copy(node)
    other.op_params = (*node.op_params[:5], int(np.float32(5e5).view(np.int32)), *node.op_params[6:])
    CpuBackend.kernels(backend)["ROPE"](other, dst, src)


def planted(fault: str, op: str, name: str, spoil: Spoil) -> type[CpuBackend]:
    """The reference, registered as `fault`: `spoil` changes nodes of an op that are, or read what is, called `name`."""

    class Faulty(CpuBackend):
        """The reference with one fault in one kernel."""

        def kernels(self) -> Mapping[str, Kernel]:
            """The table, with the fault."""
            right = super().kernels()

            def kernel(node: Tensor, dst: Raw, src: Sources) -> None:
                before = dst.copy()
                right[op](node, dst, src)
                if any(name in t.name for t in (node, *node.src) if t is not None):
                    spoil(self, node, dst, src, before)

            return {**right, op: kernel}

    registry.provide(fault, Faulty)
    return Faulty


class Forgetful(CpuBackend):
    """From its third graph on, a session leaves layer 0's K as it was, whatever its kernels gave."""

    def open(self, case: Case) -> KernelSession:
        """A session that forgets."""

        class Lossy(KernelSession):
            """Counts its graphs."""

            count = 0

            def compute(
                self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
            ) -> Mapping[Tensor, Bytes]:
                cache = next((t for t in case.persistent if t.name == "cache_k_l0"), None)
                self.count += 1
                kept = self.read(cache) if cache is not None and self.count >= 3 else None
                found = super().compute(graph, inputs, outputs)
                if cache is not None and kept is not None:
                    self.write(cache, kept)
                return found

        return Lossy(self.name, self.kernels(), case)


def _last_bits(_b: CpuBackend, _n: Tensor, dst: Raw, _s: Sources, _before: Raw) -> None:
    dst *= np.float32(1 + 1e-5)


def test_a_node_over_its_budget_is_a_note_where_the_logits_are_right(check: ModelCheck) -> None:
    """An error of 1e-5 in one product is beyond float32 rounding, and no reader of the text can notice it."""
    planted("last-bits", "MUL_MAT", "blk.1.attn_v.weight", _last_bits)
    answer = check.of(Spec("last-bits"))
    assert answer.word == ROUNDING, answer.sentence()
    assert answer.where is None
    (note,) = (n for n in answer.notes if "over its budget" in n)
    assert "MUL_MAT Vcur-1" in note
    assert "first step (the prompt)" in note


FAULTS: dict[str, tuple[str, str, Spoil, int]] = {
    "wrong-scale": ("MUL_MAT", "blk.1.attn_v.weight", _wrong_scale, 0),
    "swapped-heads": ("FLASH_ATTN_EXT", "cache_k_l1", _swapped_heads, 0),
    "stale-row": ("SET_ROWS", "cache_k_l1", _stale_row, 2),
    "wrong-base": ("ROPE", "Kcur-1", _wrong_base, 0),
}
"""Fault -> op, a node of layer 1 or what it reads, what happens there, and the first step in which it does."""
WORDS = {0: "first step (the prompt)", 2: "third step"}


@pytest.mark.parametrize("fault", [*FAULTS, "forgetful"])
def test_a_fault_is_named(check: ModelCheck, tmp_path: Path, fault: str) -> None:
    """Layer, node and step are those of the planted fault, and the saved case fails on that backend alone."""
    op, layer, step = "SET_ROWS", 0, 2
    if fault in FAULTS:
        op, name, spoil, step = FAULTS[fault]
        layer = 1
        planted(fault, op, name, spoil)
    else:
        registry.provide(fault, Forgetful)
    check.folder = tmp_path
    try:
        answer = check.of(Spec(fault))
    finally:
        check.folder = None
    result = answer.result()
    assert result is not None
    assert result.verdict is Verdict.FAIL
    first = result.where
    assert first is not None
    assert (result.metrics["layer"], first.op, first.step) == (layer, op, step), answer.sentence()
    assert first.numbers is not None
    assert result.budget_used is not None
    assert result.budget_used > 1
    assert answer.sentence().startswith(f"wrong from layer {layer} on: ")
    assert answer.sentence().endswith(WORDS[step])
    small = casefile.read_one(Path(str(result.saved)), models=[check.model.parent])
    assert "not shrunk" not in answer.notes[-1], answer.notes
    with closing(Runner()) as runner:
        assert runner.run(Spec(fault), [small])[0].verdict == "FAIL"
        assert runner.run(Spec("ggml"), [small])[0].verdict == "PASS"
    if fault not in FAULTS:
        assert first.fault is Fault.STALE
        assert len(small.steps) == step + 1
    else:
        assert sum(len(s.graph) for s in small.steps) <= 3


def together(fault: str, op: str, name: str, inside: str, hidden: str) -> None:
    """The reference, registered as `fault`: a node is wrong in graphs with `inside`, unless `hidden` is asked."""
    spoiled = [False]

    class Looking(KernelSession):
        """Looks at each graph before it runs."""

        def compute(
            self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
        ) -> Mapping[Tensor, Bytes]:
            spoiled[0] = inside in {n.name for n in graph} and hidden not in {t.name for t in outputs}
            return super().compute(graph, inputs, outputs)

    class Together(CpuBackend):
        """The reference with this fault."""

        def kernels(self) -> Mapping[str, Kernel]:
            """The table, with the fault."""
            right = super().kernels()

            def kernel(node: Tensor, dst: Raw, src: Sources) -> None:
                right[op](node, dst, src)
                if spoiled[0] and node.name == name:
                    dst *= np.float32(1.5)

            return {**right, op: kernel}

        def open(self, case: Case) -> KernelSession:
            """A session that looks."""
            return Looking(self.name, self.kernels(), case)

    registry.provide(fault, Together)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            ("fused", "MUL", "attn_norm-1", "attn_norm-1", "norm-1"),
            "graphs that end earlier are wrong from MUL attn_norm-1 (NMSE 0.25) on",
        ),
        (("whole", "MUL_MAT", "Vcur-1", graphs.LOGITS, ""), "with its own inputs: MUL_MAT Vcur-1"),
    ],
)
def test_a_node_is_named_if_two_methods_name_it(
    check: ModelCheck, fault: tuple[str, str, str, str, str], said: str
) -> None:
    """Else the answer has what each found: a wrong fusion is right node by node, a wrong whole graph in its parts."""
    together(*fault)
    answer = check.of(Spec(fault[0]))
    assert answer.verdict is Verdict.FAIL, answer.sentence()
    assert said in answer.cause, answer.cause
    assert "this node is wrong by itself" not in answer.cause
    if fault[0] == "whole":
        assert answer.sentence().endswith("cannot locate the node")
        assert "graphs that end earlier: MUL_MAT result_output" in answer.cause


# -- conversations ----------------------------------------------------------------------------------------------------


class Relaying(CpuBackend):
    """Lays quantised weights out anew for the first product of one token, and then reads them wrongly for a prompt."""

    def kernels(self) -> Mapping[str, Kernel]:
        """The table, with a product that forgets the layout."""
        right = super().kernels()
        relaid: set[str] = set()

        def product(node: Tensor, dst: Raw, src: Sources) -> None:
            right["MUL_MAT"](node, dst, src)
            weight, x = node.src[0], node.src[1]
            assert weight is not None
            assert x is not None
            if weight.name == "blk.1.attn_v.weight":
                if x.ne[1] == 1:
                    relaid.add(weight.name)
                elif weight.name in relaid:
                    dst[...] = dst[..., ::-1].copy()

        return {**right, "MUL_MAT": product}


@pytest.fixture(scope="module")
def turns_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two turns of one slot."""
    path = tmp_path_factory.mktemp("turns") / "turns.json"
    path.write_text(json.dumps({"messages": [{"tokens": PROMPT}, {"tokens": [7, 21, 9, 40]}]}), "utf-8")
    return path


def _results(record: Path) -> dict[str, list[Result]]:
    """Return backend -> its results, as any reader of run files sees them."""
    document = read_document(record)
    assert document is not None
    found: dict[str, list[Result]] = {}
    for r in document.record.results:
        found.setdefault(r.backend, []).append(r)
    return found


def _runs(record: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(record.read_text("utf-8"))["model"]["runs"]
    return found


def _play(model: Path, turns_file: Path, backend: str, record: Path, *options: str) -> list[Result]:
    call = ["check-model", str(model), "--turns", str(turns_file), "--decode", "2", "--json", str(record), *options]
    ran = CliRunner().invoke(main, [*call, "--backend", backend])
    assert ran.exit_code in {0, 1}, ran.output
    found = _results(record)[backend]
    assert found[-1].fails_run == bool(ran.exit_code)
    return found


def test_a_fault_of_the_second_prompt_is_found_by_turns_alone(model: Path, turns_file: Path, tmp_path: Path) -> None:
    """The second prompt of a session is named, layer and turn; a fresh run of the same tokens is right."""
    registry.provide("relaying", Relaying)
    record = tmp_path / "answers.json"
    (found,) = _play(model, turns_file, "relaying", record)
    assert [found.metrics[k] for k in ("slot", "turn", "token", "layer")] == [0, 1, 0, 1]
    assert found.case == f"model/{model.as_posix()}-decode=2,turns={turns_file.as_posix()}@0"
    assert found.where is not None
    assert found.where.fault is Fault.STALE
    (run,) = _runs(record)
    assert run["answer"].endswith("turn 2, the prompt")
    assert run["fresh"] == ROUNDING
    assert "a fresh run of the 11 tokens so far is right" in found.notes


def _only_quantised(_b: CpuBackend, node: Tensor, dst: Raw, _s: Sources, _before: Raw) -> None:
    """Attention over quantised keys swaps heads."""
    assert node.src[1] is not None
    if node.src[1].type.name == "q8_0":
        dst[...] = dst[:, :, ::-1].copy()


def test_a_fault_of_one_setting_is_found_with_it(model: Path, turns_file: Path, tmp_path: Path) -> None:
    """Settings before it are right, those after it are not played, and two slots decode the same tokens."""
    planted("only-quantised", "FLASH_ATTN_EXT", "cache_k_l1", _only_quantised)
    settings = ["slots=2,batch=3,ubatch=2,shift=2", "cache=q8_0,slots=2", "fa=0"]
    options = [x for text in settings for x in ("--setting", text)]
    record = tmp_path / "answers.json"
    right, wrong = _play(model, turns_file, "only-quantised", record, *options)
    assert [(r.case.partition(".json,")[2], r.verdict) for r in (right, wrong)] == [
        (f"{settings[0]}@0", Verdict.PASS),
        (f"{settings[1]}@0", Verdict.FAIL),
    ]
    assert [wrong.metrics[k] for k in ("slot", "turn", "token")] == [0, 0, 0], wrong.detail
    assert wrong.where is not None
    assert wrong.where.op == "FLASH_ATTN_EXT"
    assert _runs(record)[-1]["answer"].endswith("slot 1, turn 1, the prompt")


def test_slots_that_graphs_reorder_are_refused(tmp_path: Path) -> None:
    """A recurrent model decodes equal parts of its slots, so that rows of graphs and of batches differ."""
    path = tmp_path / "mamba.gguf"
    made = CliRunner().invoke(main, ["capture", "mamba", "--model", "-o", str(path)])
    assert made.exit_code == 0, made.output
    turns = [Turn(PROMPT, forced=[7]), Turn(PROMPT)]
    with closing(LlamaProcess(path, Device("llama.cpp"))) as llama:
        assert len(llama.record([turns])[0].logits) == 3
        with pytest.raises(UsageError, match="use slots=1"):
            llama.record([turns, turns])


class Chat:
    """A tokenizer of letters, and a template of one letter per role."""

    def chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Format messages."""
        return "".join(f"<{role[0]}>{text}" for role, text in messages) + "<a>"

    def tokens(self, text: str, *, first: bool = True) -> list[int]:
        """Return a token per letter, after a leading one."""
        return [0] * first + [ord(c) for c in text]


def test_a_template_formats_each_turn_once(tmp_path: Path) -> None:
    """A prompt is what the template adds after the last answer; given answers are decoded; tokens need no template."""
    file = tmp_path / "turns.json"
    said = [{"role": "system", "content": "S"}, {"content": "Q"}, {"role": "assistant", "content": "A"}]
    file.write_text("\n".join(json.dumps({"messages": m}) for m in ([*said, {"content": "R"}], [{"tokens": [1]}])))
    first, second = turns.talk(Chat(), file, 5)  # type: ignore[arg-type]
    texts = ["".join(map(chr, turn.prompt)) for turn in first]
    assert texts == ["\0<s>S<u>Q<a>", "<u>R<a>"]
    assert [turn.forced for turn in (*first, *second)] == [[65], None, None]
    assert second == [Turn([1], 5)]
    for text, words in (
        ("", "the file is empty"),
        ("[]", "conversations expected"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "message 1"),
        ('{"messages": [{"content": "a"}, {"content": ""}]}', "message 2"),
        ('{"messages": []}', "no message of a user"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=words):
            turns.talk(Chat(), file, 5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="slots: 1 to 64 expected, 0 found"):
        turns.setting("slots=0", flash_attn=True)


def test_the_template_is_the_models_own(model: Path) -> None:
    """llama.cpp applies the template of the file."""
    with closing(LlamaProcess(model, Device("llama.cpp"))) as llama:
        assert llama.chat([("user", "é")]) == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_what_its_contract_says(model: Path, tmp_path: Path) -> None:
    """Exit code 0, a sentence and a row for each backend, and the record's fields; a wrong backend ends with 1."""
    record = tmp_path / "answers.json"
    call = ["check-model", str(model), "--tokens", "3,14,15", "--decode", "2", "--json", str(record)]
    ran = CliRunner().invoke(main, [*call, "--backend", "ggml", "--backend", "openvino-stateless"])
    assert ran.exit_code == 0, ran.output
    assert "ggml: right\n" in ran.output
    assert "openvino-stateless: differs by rounding: KL " in ran.output
    results = _results(record)
    assert _runs(record)[0]["answer"] == "right"
    assert {r.verdict for (r,) in results.values()} == {Verdict.PASS}
    (found,) = results["openvino-stateless"]
    assert found.budget_used is not None
    assert 0 < found.budget_used <= 1
    assert 0 < found.metrics["kl_mean"] <= found.metrics["kl_max"] < 1e-2
    op, name, spoil, _ = FAULTS["swapped-heads"]
    planted("swapped-heads", op, name, spoil)
    wrong = CliRunner().invoke(main, [*call, "--backend", "swapped-heads"])
    assert wrong.exit_code == 1, wrong.output
    (found,) = _results(record)["swapped-heads"]
    assert _runs(record)[0]["answer"].startswith("wrong from layer 1 on: FLASH_ATTN_EXT")
    assert found.where is not None
    assert (found.metrics["layer"], found.where.step, found.where.op) == (1, 0, "FLASH_ATTN_EXT")
    shown = CliRunner().invoke(main, ["report", str(record), "-o", str(tmp_path / "page")])
    assert shown.exit_code == 1, shown.output
    page = (tmp_path / "page" / "index.html").read_text("utf-8")
    assert "FLASH_ATTN_EXT" in page
    assert "from layer 1 on, first step (the prompt)" in page
    again = CliRunner().invoke(main, ["run", "--case", found.case, "--backend", "swapped-heads", "--json", str(record)])
    assert again.exit_code == 1, again.output
    (repeated,) = _results(record)["swapped-heads"]
    assert (repeated.case, repeated.where, repeated.error) == (found.case, found.where, None)


@pytest.mark.parametrize("backend", ["swaped", "sched?devices=swaped,cpu"])
def test_an_unknown_backend_is_refused_before_anything_is_decoded(model: Path, backend: str) -> None:
    """Also a device of a scheduler."""
    ran = CliRunner().invoke(main, ["check-model", str(model), "--backend", backend])
    assert ran.exit_code == 2
    assert ran.output.startswith("conform: backend 'swaped' is not installed;")


def _interrupted(_b: CpuBackend, _n: Tensor, dst: Raw, src: Sources, _before: Raw) -> None:
    """Ctrl-C in the second token after the prompt."""
    if dst.any() and np.any(src[1] == 4):
        raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_known(model: Path, tmp_path: Path) -> None:
    """The KL of the first step is printed at once; an interrupted backend has it in table and record, too."""
    planted("interrupted", "SET_ROWS", "cache_k_l1", _interrupted)
    record = tmp_path / "answers.json"
    call = ["check-model", str(model), "--tokens", "3,14,15", "--decode", "3", "--json", str(record)]
    ran = CliRunner().invoke(main, [*call, "--backend", "cpu", "--backend", "interrupted"])
    assert ran.exit_code == 5, ran.output
    assert "interrupted: logits of 1 token: KL " in ran.output
    assert "not run" in ran.output.splitlines()[-3]
    document = read_document(record)
    assert document is not None
    assert [(r.backend, r.verdict) for r in document.record.results] == [("cpu", Verdict.PASS)]
    assert [(m.backend, m.cause) for m in document.record.missing] == [("interrupted", MissingCause.INTERRUPTED)]
    last = _runs(record)[-1]
    assert last["answer"] == "not run: interrupted"
    assert 0 < max(last["kl_rows"]) < 1e-2


def test_float64_computes_no_more_steps_than_disagree(check: ModelCheck) -> None:
    """Rounding is measured in the first step; a row of K that is missing from the third on is compared to the end."""
    op, name, spoil, _ = FAULTS["stale-row"]
    planted("stale-again", op, name, spoil)
    for backend, computed in (("cpu", 1), ("stale-again", 1 + DECODE)):
        said: list[str] = []
        fresh = replace(check, oracle=Oracle(), say=said.append)
        with closing(fresh):
            fresh.of(Spec(backend))
        assert sum("rounding as exact: step" in words for words in said) == computed, said


def test_bad_input_says_what_to_type(model: Path, tmp_path: Path) -> None:
    """Whatever is no model is one line and exit code 2, with what to type instead."""
    text, short, strange = tmp_path / "a.txt", tmp_path / "short.gguf", tmp_path / "strange.gguf"
    text.write_text("no model", "utf-8")
    short.write_bytes(model.read_bytes()[:5000])
    writer = GGUFWriter(strange, "unheard-of")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path, words in (
        (tmp_path, "this is a folder"),
        (tmp_path / "none", "there is no such file"),
        (text, "convert_hf_to_gguf.py"),
        (short, "is the file complete?"),
        (strange, "conform capture"),
    ):
        ran = CliRunner().invoke(main, ["check-model", str(path), "--backend", "ggml"])
        assert (ran.exit_code, words in ran.output, ran.output.count("\n")) == (2, True, 1), ran.output
    for options, words in (
        (["--backend", "ggml", "--tokens", "1,x"], "1,15,7"),
        (["--backend", "ggml", "--tokens", "100000"], "tokens from 0 to"),
        (["--backend", "ggml", "--prompt", "a"], "--tokens 1,2,3"),
        (["--backend", "ggml", "--prompt", "a", "--tokens", "1"], "one of --prompt, --tokens and --turns"),
    ):
        ran = CliRunner().invoke(main, ["check-model", str(model), *options])
        assert (ran.exit_code, words in ran.output) == (2, True), ran.output
    ran = CliRunner().invoke(main, ["run", str(model), "--backend", "ggml"])
    assert (ran.exit_code, "conform check-model" in ran.output) == (2, True), ran.output


@given(
    file=st.text("ab-=,@%/*[ é", min_size=1).filter(lambda t: Path(t).name),
    tokens=st.lists(st.integers(0, 1 << 20), max_size=3),
    prompt=st.none() | st.text(max_size=8),
    decode=st.integers(0, 99),
    at=st.text(max_size=8),
    setting=st.sampled_from(turns.SETTINGS),
)
def test_an_id_of_a_case_has_all_of_it(
    file: str, tokens: list[int], prompt: str | None, decode: int, at: str, setting: str
) -> None:
    """Any path, prompt and name is read again, whatever signs it has; a number of tokens is that of a decoded case."""
    case = ModelCase(Path(file), tuple(tokens), (), 64 if at else decode, prompt, None, Path(file), at, setting)
    assert ModelCase.read(case.id) == case
    assert not set("*[ @,") & set(case.id.removesuffix("@0").partition("/")[2].partition("-")[0])


@pytest.mark.parametrize(
    ("case_id", "words"),
    [
        ("model/a.gguf-foo=1@0", "keys: tokens, answer"),
        ("model/a.gguf-tokens=x@0", "integers like"),
        ("model/a.gguf-slots=0@0", "slots: 1 to 64 expected"),
        ("model/@0", "model/FILE-"),
    ],
)
def test_an_id_that_is_none_says_why(case_id: str, words: str) -> None:
    """The key is named, with what is expected."""
    with pytest.raises(UsageError, match=words):
        ModelCase.read(case_id)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_what_two_rows_are_apart() -> None:
    """An offset of all logits changes no probability; what is no number is infinitely far; KL has its known value."""
    row = np.array([0.0, np.log(3.0)], np.float32)
    assert figures.divergence(row + np.float32(5), row) < 1e-12
    assert figures.divergence(np.zeros(2, np.float32), row) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))
    assert figures.divergence(np.array([0.0, np.nan], np.float32), row) == np.inf
    assert figures.nmse(np.array([0.0, np.inf], np.float32), row) == np.inf


def test_perplexity_of_rows() -> None:
    """One row in two equal minds, one certain: the geometric mean; the last row is asked for nothing."""
    rows = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 9.0]], np.float32)
    assert figures.perplexity(rows, [0, 1, 0]) == pytest.approx(np.sqrt(2.0))


def test_a_flip_is_explained_by_rounding_alone() -> None:
    """Another token is near where right runs are as far apart as the margin in some row; an offset does not count."""
    reference = np.array([[1.0, 0.5, 0.0], [1.0, 0.9, 0.0]], np.float32)
    found = reference[:, [1, 0, 2]]
    exact = np.zeros((2, 3), np.float32)
    same, moved = exact + np.float32(3), np.array([[0.1, -0.1, 0.0]], np.float32)
    worth = rounding((exact, same), (exact, moved))
    assert worth == pytest.approx(0.2)
    first, second = figures.flips(found, reference, worth)
    assert (first.near, second.near) == (False, True)
    assert first.margin == pytest.approx(0.5)
    assert not figures.flips(found, reference, rounding((exact, same), (exact, exact)))[1].near


def test_the_allowance_is_what_arithmetics_cost() -> None:
    """Roots add, of the worst row of each side."""
    exact = np.ones((2, 4), np.float32)
    one = exact * np.array([[1.0], [1.1]], np.float32)
    assert allowance((exact, one), (exact, one)) == pytest.approx(16 * 0.01, rel=1e-5)
    assert allowance((exact, exact), (exact, one)) == pytest.approx(4 * 0.01, rel=1e-5)
    assert allowance((exact, exact), (exact, exact)) < 1e-6


def test_layers_by_the_names_of_llama() -> None:
    """A node's own name, a cache's or weight's that it reads, or the last named node's before it; none in the head."""
    x, w = (new_tensor(F32, 4, name=name) for name in ("inp", "blk.3.attn_norm.weight"))
    plain, scaled, after, head = (Tensor(F32, x.ne, x.nb, "SCALE") for _ in range(4))
    for node, src, name in (
        (plain, (x,), "node_0"),
        (scaled, (plain, w), "node_1"),
        (after, (scaled,), "node_2"),
    ):
        node.src, node.name = src, name
    named = Tensor(F32, x.ne, x.nb, "SCALE", src=(after,), name="l_out-3")
    head.src, head.name = (named,), "result_norm"
    graph = Graph([plain, scaled, after, named, head])
    assert [layer_of(n, graph) for n in graph] == [None, 3, 3, 3, None]
    assert layer_of(new_tensor(F32, 4, name="cache_k_l12"), graph) == 12
    assert layer_of(new_tensor(F32, 4, name="Vcur-7 (view)"), graph) == 7
    assert [step_words(k, prompt=not k) for k in (0, 1, 11)] == ["first step (the prompt)", "second step", "step 12"]
