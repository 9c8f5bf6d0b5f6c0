"""The zoo: what llama.cpp lays out and computes, recorded in a process of its own."""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.lib.layout import CONTEXT_PARAMS, DEFAULTS, MODEL_PARAMS
from conformance.ggml.lib.llama import choose, put
from conformance.ggml.lib.mtmd import MTMD_PARAMS
from conformance.ggml.tensor import new_tensor
from conformance.ggml.types import F32
from conformance.judge.verdict import Verdict
from conformance.llama.zoo import family, model
from conformance.llama.zoo.family import Request, ask
from conformance.run.runner import Runner
from conformance.suite.decoder import make as build
from conformance.suite.decoder.plan import parse
from conformance.suite.family import with_seed

TINY = "set=block_count:1"


@pytest.fixture(scope="module")
def llama() -> Case:
    """Two sequences, every node of two graphs."""
    return family.make(f"zoo/llama-seqs=2,nodes=2,{TINY},run=p5.d2@7")


def digest(case: Case) -> str:
    """Of everything that an id stands for."""
    found = hashlib.sha256()
    for t, data in case.persistent.items():
        found.update(f"{t} {t.nb}".encode() + data.tobytes())
    for step in case.steps:
        for t in step.graph.tensors():
            found.update(f"{t} {t.nb} {t.op_params} {t.flags}".encode())
        for data in (*step.inputs.values(), *step.expected.values()):
            found.update(data.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("name", ["mamba", "gpt-oss", "lfm2", "qwen3next", "t5", "bert", "graniteswitch"])
def test_replays_to_the_bit(name: str) -> None:
    """On ggml, a replay gives llama.cpp's own results: the same code ran, on the same graphs and bytes."""
    case = family.make(with_seed("zoo", f"{name}-seqs=2,nodes=1,run=p3.d1"))
    runner = Runner()
    try:
        (result,) = runner.run(Spec("ggml"), [case])
    finally:
        runner.close()
    assert (result.verdict, result.nmse) == (Verdict.PASS, 0.0), result.detail
    assert all(np.isfinite(step.expected[t].view(np.float32)).all() for step in case.steps for t in step.outputs)


def test_same_id_same_bytes(llama: Case) -> None:
    """Recorded again, in another process, an id gives the same bytes."""
    assert digest(family.make(llama.id)) == digest(llama)


def test_what_leaves_are(llama: Case) -> None:
    """Weights, caches and inputs are told apart, and keep llama.cpp's names."""
    names = {t.name for t in llama.persistent}
    assert {"token_embd.weight", "blk.0.attn_q.weight", "cache_k_l0", "cache_v_l0"} <= names
    assert {t.name for t in llama.caches()} == {"cache_k_l0", "cache_v_l0"}
    assert all(t in llama.recipes for t in llama.persistent if not t.name.startswith("cache"))
    assert {"inp_tokens", "inp_pos", "attn_inp_kq_mask"} <= {t.name for t in llama.steps[1].inputs}
    for step in llama.steps:
        assert [t.name for t in step.outputs] == ["result_output"]
    assert llama.provenance["arch"] == "llama"
    assert llama.provenance["arithmetic"] == "ggml-cpu"


def test_a_file_is_small_and_exact(llama: Case, tmp_path: Path) -> None:
    """Weights lie in the file as recipes, and are the same when read."""
    path = tmp_path / "a.gguf"
    case = family.make(f"zoo/llama-seqs=2,{TINY},run=p5.d2@7")
    casefile.write(path, case)
    weights_of = sum(data.nbytes for t, data in case.persistent.items() if t in case.recipes)
    assert path.stat().st_size < weights_of / 5
    assert digest(casefile.read_one(path)) == digest(case)
    assert {t.name for t in case.recipes} == {t.name for t in llama.recipes}


@pytest.mark.parametrize("unified", [0, 1])
@pytest.mark.parametrize("plan", ["p5+3.d2.back2.p4.d1", "p20.rm1.d2.add1.p2.d1", "p6.reset.p3.d1"])
def test_plans_mean_what_they_mean_to_the_builder(plan: str, unified: int) -> None:
    """Tokens, positions and sequences of every step are the builder's, of the same plan."""
    text = f"seqs=2,unified={unified},ubatch=16,run={plan}"
    zoo = family.make(f"zoo/llama-{text},{TINY}@3")
    built = build(f"kv_growth/llama-l=1,ctx=256,{text}@3")

    def rows(case: Case) -> list[list[list[int]]]:
        return [[row[1:] for row in step.note["tokens"]] for step in case.steps]

    assert rows(zoo) == rows(built)


def test_shift_is_a_graph_of_its_own() -> None:
    """A position shift turns the keys in the cache before the next tokens, which move up."""
    case = family.make(f"zoo/llama-{TINY},run=p9.shift4.d1@0")
    assert [len(s.note["tokens"]) for s in case.steps] == [9, 0, 1]
    assert case.steps[2].note["tokens"][0][1] == 5
    assert any(n.op == "ROPE" for n in case.steps[1].graph)
    assert [t.name for t in case.steps[1].expected] == ["cache_k_l0"]


def test_other_weights_other_types(tmp_path: Path) -> None:
    """`w` says the matrices' type; `real` leaves out what llama.cpp can do without."""
    case = family.make(f"zoo/qwen3-real=1,w=q4_0,{TINY},run=p2.d1@0")
    types = {t.name: t.type.name for t in case.persistent}
    assert types["blk.0.attn_q.weight"] == "q4_0"
    assert types["blk.0.attn_norm.weight"] == "f32"
    assert not any(name.endswith((".bias", ".scale")) for name in types)
    casefile.write(tmp_path / "a.gguf", case)
    assert digest(casefile.read_one(tmp_path / "a.gguf")) == digest(case)


def test_model_files_are_recorded(tmp_path: Path) -> None:
    """A model that `make-model` wrote is loaded by llama.cpp; its case has its weights and passes on ggml."""
    model, path = str(tmp_path / "m.gguf"), str(tmp_path / "c.gguf")
    run = CliRunner()
    made = run.invoke(
        main, ["capture", "llama", "--model", "--set", "block_count=1", "--weight-type", "q8_0", "-o", model]
    )
    assert made.exit_code == 0, made.output
    options = ["--sequences", "2", "--flash-attn", "off", "--cache-type", "f32", "--run", "p5.d1"]
    assert run.invoke(main, ["capture", model, "-o", path, *options]).exit_code == 0
    replayed = run.invoke(main, ["repro", path, "--backend", "ggml"])
    assert replayed.exit_code == 0, replayed.output
    assert not casefile.read_one(path).recipes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "architecture 'nonsense' is unknown"),
        (["clip"], "clip does not run: an image encoder"),
        (["llama", "--set", "embedding_length=7"], "llama.cpp ended its process"),
        (["llama", "--set", "block_count"], "KEY=VALUE expected"),
        (["llama", "--run", "p5.fly"], "'fly' found"),
        (["llama", "--run", "at9.d1"], "cannot start with generated caches"),
        (["llama", "--run", "p300"], "a batch of 300 tokens, but only 256 cells"),
        (["mamba", "--run", "p9.back3.d1"], "cannot remove"),
        (["zoo/llama@0", "--nodes", "1"], "--nodes: only with a model file or an architecture"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Whatever is wrong, with the id, the keys or the plan, ends with one line and exit code 2."""
    done = CliRunner().invoke(main, ["capture", *arguments, "-o", str(tmp_path / "a.gguf")])
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.splitlines()) == 1


def test_the_list_says_what_runs() -> None:
    """Every architecture stands in it, at least 145 run, and each other has its reason."""
    done = CliRunner().invoke(main, ["capture"])
    assert done.exit_code == 0
    match = re.search(r"(\d+) of (\d+) architectures run", done.output)
    assert match is not None
    assert (int(match[1]) >= 145, int(match[2])) == (True, len(model.table()))
    for name, arch in model.table().items():
        assert arch.lacks or name in done.output


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing wheel, or a library that is none, is one clear reason."""
    monkeypatch.setattr("conformance.ggml.lib.files.WHEEL", "no_such_wheel")
    with pytest.raises(UnavailableError, match="not installed"):
        family.ids("smoke")
    with pytest.raises(UnavailableError, match="no such file"):
        ask(Request(id="a", stream="a", lib="/no/such/library.so"))


def test_nothing_is_imported_from_the_wheel() -> None:
    """The wheel's package runs no code here: only its library is loaded."""
    code = (
        "import sys; from conformance.ggml.lib.llama import Llama; Llama(); "
        "import json; print(json.dumps([m for m in sys.modules if m.startswith('xllamacpp')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_commands_do_not_load_the_binding() -> None:
    """`conform --help` imports the zoo, but neither ctypes structs nor a library."""
    code = (
        "import sys, conformance.cli, json; "
        "print(json.dumps([m for m in sys.modules if m.startswith('conformance.ggml.lib')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


PARAMS = {
    "llama_model_params": MODEL_PARAMS, "llama_context_params": CONTEXT_PARAMS, "mtmd_context_params": MTMD_PARAMS,
}  # fmt: skip
SET = frozenset({
    "devices", "n_gpu_layers", "use_extra_bufts", "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads",
    "n_threads_batch", "flash_attn_type", "flash_attn", "type_k", "type_v", "kv_unified", "swa_full", "embeddings",
    "cb_eval", "use_gpu", "device", "print_timings", "warmup",
})  # fmt: skip
"""What the worker sets."""


def default_params(kind: Any, which: int, **others: int) -> Any:  # noqa: ANN401  # ctypes'
    """A function that returns a struct laid out as `kind`: with the first or the last of the defaults known."""
    values = kind()
    for name, *_ in kind._fields_:
        if name in DEFAULTS:
            setattr(values, name, DEFAULTS[name][which])
    for name, value in others.items():
        setattr(values, name, value)

    def fill(at: int) -> int:
        ctypes.memmove(at, ctypes.addressof(values), kind.slack.offset)
        return at

    # System V passes the place of a large struct first and returns it
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(fill)
    function = ctypes.CFUNCTYPE(kind)(ctypes.cast(callback, ctypes.c_void_p).value or 0)
    function.callback = callback  # type: ignore[attr-defined]  # it lives as long
    return function


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="other conventions hide what is written"
)
@pytest.mark.parametrize(("struct", "k"), [(s, k) for s, known in PARAMS.items() for k in range(len(known))])
@pytest.mark.parametrize("which", [0, -1])
def test_parameters_tell_their_layout(struct: str, k: int, which: int) -> None:
    """The values that a library fills in determine where each set parameter is.

    Two layouts are mistaken for one another only where they differ in parameters behind these.
    """
    kind = PARAMS[struct][k]
    found = choose(struct, default_params(kind, which), PARAMS[struct], "lib.so")
    own, other = ({n: getattr(x, n).offset for n, *_ in x._fields_ if n in SET} for x in (kind, found))
    assert own.items() <= other.items()
    assert all(offset >= kind.slack.offset for name, offset in other.items() if name not in own)


def test_parameters_of_no_layout_are_refused() -> None:
    """A library that fills its parameters in another way is unavailable, and the message says which and how."""
    function = default_params(CONTEXT_PARAMS[0], 0, n_batch=7)
    with pytest.raises(UnavailableError, match=r"lib\.so does not fit: .* \S+\.n_batch is 2048; 7 found"):
        choose("llama_context_params", function, CONTEXT_PARAMS, "lib.so")


def test_a_parameter_that_a_version_lacks_is_told() -> None:
    """`put` sets the fields that a struct has and names the others; ctypes would take any name in silence."""
    params = CONTEXT_PARAMS[-1]()
    assert put(params, n_ctx=5, kv_unified=1) == ["kv_unified"]
    assert params.n_ctx == 5


def test_decays_decay() -> None:
    """State-space weights that must be negative are, and every recipe depends on the name."""
    a = model.recipe("c", new_tensor(F32, 1, 4, name="blk.0.ssm_a"))
    assert a.b < 0
    assert model.recipe("c", new_tensor(F32, 8, 8, name="blk.0.attn_q.weight")).tensor == "blk.0.attn_q.weight"


def test_parts_are_read() -> None:
    """A plan is its parts, repetitions written out; what cannot be read is named."""
    assert [str(p) for p in parse("p5+3.2(d1.back2).reset.shift4")] == [
        "p5+3", "d1", "back2", "d1", "back2", "reset", "shift4",
    ]  # fmt: skip
    for wrong in ("p", "d1+2", "reset3", "p5.at3", "x1", "", "p5..d1"):
        with pytest.raises(UsageError, match="run:"):
            parse(wrong)
