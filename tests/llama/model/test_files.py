"""`conform check-model` on files: damaged ones, healthy pairs, and what is no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_wheel
from trust import files
from trust.files import DAMAGES, Draft

from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.ggml.quants import from_float
from conformance.ggml.types import TYPES
from conformance.judge.evidence import Fault, Place
from conformance.judge.verdict import Result, Verdict
from conformance.llama.model import against, filecheck, modelfile, plausible
from conformance.llama.model.finding import Finding, FindingKind
from conformance.llama.model.graphs import silent
from conformance.llama.model.modelcase import ModelCase
from conformance.llama.model.modelfile import ModelFile
from conformance.report.runfile import read_document

ROWS, WIDTH = 16, 512
WEIGHT = "blk.0.ffn_up.weight"


def draft(type_name: str, *, change: Callable[[np.ndarray], None] | None = None) -> Draft:
    """A model of one matrix, changed before it is stored."""
    x = np.random.default_rng(3).standard_normal((ROWS, WIDTH)).astype(np.float32)
    if change:
        change(x)
    type_ = TYPES[type_name]
    raw = np.ascontiguousarray(from_float(type_, x)).view(np.uint8).reshape(-1)
    return Draft("llama", {"llama.block_count": 1}, {WEIGHT: type_}, {WEIGHT: (WIDTH, ROWS)}, {WEIGHT: raw})


def alone(file: ModelFile) -> list[Finding]:
    """Return the findings of the checks that need no second file."""
    return [*plausible.header(file), *plausible.values(file, silent)]


# -- two files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a model of an architecture is made once."""
    return tmp_path_factory.mktemp("models")


@needs_wheel
@pytest.mark.parametrize("kind", [*DAMAGES])
def test_a_damage_is_named(folder: Path, kind: str) -> None:
    """Tensor or key and block are those of the damage, and nothing else is wrong."""
    damaged = files.damaged(41, folder, ["llama"], kind)
    found = damaged.pair.findings(folder)
    assert damaged.named(found), (damaged.words, [f.sentence() for f in found])


@needs_wheel
@pytest.mark.parametrize("seed", [4, 6, 21])
def test_a_healthy_pair_raises_no_alarm(folder: Path, seed: int) -> None:
    """Another type of the same values, quantised by the real ggml, is not wrong."""
    pair = files.healthy(seed, folder, ["llama", "qwen3"])
    assert [f.sentence() for f in pair.findings(folder) if f.wrong] == [], pair.words


@pytest.mark.parametrize("type_name", ["q4_0", "q8_0", "q6_K", "q2_K"])
@pytest.mark.parametrize("source", ["f32", "bf16", "q8_0", "q4_0"])
def test_one_negated_scale_is_named_in_any_types(tmp_path: Path, type_name: str, source: str) -> None:
    """The unit of the coarser type that holds the values of the one damaged block is the only wrong one."""
    damaged = draft(type_name)
    type_ = TYPES[type_name]
    blocks = damaged.raw[WEIGHT].reshape(-1, type_.type_size)
    block = len(blocks) // 2
    at = {"q6_K": 208, "q2_K": 80}.get(type_name, 0)
    blocks[block, at + 1] ^= 0x80
    a, b = damaged.write(tmp_path / "a.gguf"), draft(source).write(tmp_path / "b.gguf")
    (found,) = (f for f in against.tensors(a, b, silent) if f.wrong)
    assert (found.kind, found.where, found.of) == (FindingKind.VALUES, WEIGHT, ROWS * WIDTH // found.per)
    assert found.index == block * type_.blck_size // found.per
    assert found.count <= max(1, type_.blck_size // found.per)


@pytest.mark.parametrize(
    ("key", "expected", "found", "wrong"),
    [
        ("llama.rope.freq_base", 5e5, 1e4, [True]),
        ("llama.rope.freq_base", 1e4, None, []),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5, 1e-6, [True]),
        ("llama.context_length", 4096, 2048, [False]),
        ("tokenizer.ggml.tokens", ["a", "b"], ["a", "c"], [True]),
        ("tokenizer.chat_template", "a", "b", [False]),
        ("general.name", "a", "b", []),
    ],
)
def test_keys_that_change_results_are_wrong(
    tmp_path: Path, key: str, expected: object, found: object, wrong: list[bool]
) -> None:
    """Others are told apart or ignored, and a key may be absent if it has the default."""
    keys = [{} if value is None else {key: value} for value in (found, expected)]
    a, b = (replace(draft("f32"), keys=k).write(tmp_path / f"{i}.gguf") for i, k in enumerate(keys))
    assert [f.wrong for f in against.header(a, b)] == wrong


# -- one file ---------------------------------------------------------------------------------------------------------


def _far(x: np.ndarray) -> None:
    x[3, 70] = 1e4


def _nan(x: np.ndarray) -> None:
    x[3, 70] = np.nan


def _hole(x: np.ndarray) -> None:
    x[3, 64:96] = 0


def _channel(x: np.ndarray) -> None:
    x[:, 70] *= 1e4


@pytest.mark.parametrize(
    ("change", "type_name", "found"),
    [
        (_far, "f16", (FindingKind.SCALE, False)),
        (_nan, "f32", (FindingKind.NOT_FINITE, True)),
        (_hole, "q8_0", (FindingKind.CONSTANT, False)),
        (_channel, "q8_0", None),
        (None, "q4_K", None),
    ],
)
def test_implausible_values_are_named(
    tmp_path: Path, change: Callable[[np.ndarray], None] | None, type_name: str, found: tuple[FindingKind, bool] | None
) -> None:
    """The block is named, and a channel that is large in every row is not."""
    each = alone(draft(type_name, change=change).write(tmp_path / "a.gguf"))
    assert [(f.kind, f.wrong, f.where, f.row) for f in each] == ([(*found, WEIGHT, 3)] if found else [])


@pytest.mark.parametrize("type_name", ["q8_0", "q4_K", "q4_0"])
def test_a_negative_scale_is_wrong_where_no_quantiser_writes_it(tmp_path: Path, type_name: str) -> None:
    """Q4_0 has negative scales in healthy files, so there it is not seen."""
    damaged = draft(type_name)
    damaged.raw[WEIGHT].reshape(-1, TYPES[type_name].type_size)[5, 1] ^= 0x80
    found = alone(damaged.write(tmp_path / "a.gguf"))
    assert [(f.kind, f.index) for f in found] == ([] if type_name == "q4_0" else [(FindingKind.SCALE, 5)])


def test_the_tables_of_tokens_are_checked(tmp_path: Path) -> None:
    """Lengths, types, ids, scores and merges that contradict the tokens are named by table and entry."""
    tokens = [f"t{i}" for i in range(300)]
    table = "tokenizer.ggml."
    keys = {
        f"{table}tokens": [*tokens[:299], "t7"], f"{table}token_type": [1] * 150 + [9] + [1] * 149,
        f"{table}scores": [*(-float(i) for i in range(200)), -3.0, *(-float(i) for i in range(201, 300))],
        f"{table}merges": ["t1 t2", "t3"], f"{table}eos_token_id": 300,
    }  # fmt: skip
    file = replace(draft("f32"), keys=keys).write(tmp_path / "a.gguf")
    found = {(f.where.removeprefix(table), f.index, f.wrong) for f in plausible.header(file)}
    assert found == {("tokens", 299, False), ("token_type", 150, True), ("scores", 200, False), ("merges", 1, True),
                     ("merges", 0, False), ("eos_token_id", None, True)}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 1000), flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), max_size=4))
def test_damaged_headers_end_in_words(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flips: list[tuple[int, int]]
) -> None:
    """Any bytes give findings or a UsageError."""
    folder = tmp_path_factory.mktemp("header")
    healthy = draft("q4_0").write(folder / "b.gguf")
    data = bytearray(healthy.parts[0])
    for at, by in flips:
        data[at] ^= by
    path = folder / "a.gguf"
    path.write_bytes(data[: len(data) - cut])
    try:
        file = modelfile.read(path)
    except UsageError:
        return
    for f in [*alone(file), *against.header(file, healthy), *against.tensors(file, healthy, silent)]:
        assert f.sentence()
    case = ModelCase(path, compare=healthy.path)
    found = [*alone(file), *against.header(file, healthy), *against.tensors(file, healthy, silent)]
    for r in filecheck.results(case, file, found):
        assert ModelCase.read(r.case).id == r.case
        assert Result.from_json(r.to_json()).sentence()


def test_files_that_are_not_one_model_are_refused(tmp_path: Path) -> None:
    """A part that is not the first, is misnamed or stands alone, and a big-endian file are refused with what to do."""
    a = b = draft("f32").raw[WEIGHT]
    whole = Draft("llama", {}, dict.fromkeys("ab", TYPES["f32"]), dict.fromkeys("ab", (WIDTH, ROWS)), {"a": a, "b": b})
    first, second = whole.split(tmp_path, "a", "b")
    assert modelfile.read(first).tensors.keys() == {"a", "b"}
    with pytest.raises(UsageError, match="name its first part"):
        modelfile.read(second)
    with pytest.raises(UsageError, match=r"NAME-00001-of-00002\.gguf"):
        modelfile.read(first.rename(tmp_path / "part.gguf"))
    (tmp_path / "part.gguf").rename(first)
    held = second.read_bytes()
    for other, why in ((first.read_bytes(), "it is 0 of 2"), (whole.split(tmp_path, "a", "a")[1].read_bytes(), "'a'")):
        second.write_bytes(other)
        with pytest.raises(UsageError, match=why):
            modelfile.read(first)
    whole.split(tmp_path, "a")
    second.write_bytes(held)
    whole.split(tmp_path, "a", "")
    with pytest.raises(UsageError, match="2 tensors expected in 2 parts, found 1"):
        modelfile.read(first)
    second.unlink()
    with pytest.raises(UsageError, match=r"llama-00002-of-00002\.gguf expected beside it"):
        modelfile.read(first)
    data = bytearray(draft("f32").write(tmp_path / "a.gguf").parts[0])
    data[4:8] = data[4:8][::-1]
    (tmp_path / "big.gguf").write_bytes(data)
    with pytest.raises(UsageError, match="big-endian"):
        modelfile.read(tmp_path / "big.gguf")


@needs_wheel
def test_a_model_in_parts_is_the_model(folder: Path, tmp_path: Path) -> None:
    """All of its tensors are checked, llama.cpp loads it, and a damaged one is named as in one file."""
    whole = files.zoo("llama", folder)
    draft = files.drafted(whole)
    names = list(draft.raw)
    parts = draft.split(tmp_path, names[:3], names[3:4], names[4:])
    ran = CliRunner().invoke(main, ["check-model", str(parts[0]), "--compare", str(whole.path)])
    assert (ran.exit_code, f"{len(names)} tensors" in ran.output) == (0, True), ran.output
    assert [*against.header(modelfile.read(parts[0]), whole)] == []
    last = draft.raw[names[-1]] = draft.raw[names[-1]].copy()
    last.view(np.float32)[7] = np.nan
    draft.split(tmp_path, names[:3], names[3:4], names[4:])
    ran = CliRunner().invoke(main, ["check-model", str(parts[0])])
    assert (ran.exit_code, names[-1] in ran.output) == (1, True), ran.output


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_checks_a_file_without_a_backend(tmp_path: Path) -> None:
    """It ends with 0 for a healthy pair, with 1 and the block for a damaged one; the record has the evidence."""
    a, b, record = (str(tmp_path / n) for n in ("a.gguf", "b.gguf", "r.json"))
    draft("q8_0").write(Path(a))
    draft("f16").write(Path(b))
    ran = CliRunner().invoke(main, ["check-model", a])
    assert (ran.exit_code, "nothing is implausible" in ran.output) == (0, True), ran.output
    ran = CliRunner().invoke(main, ["check-model", a, "--compare", b, "--json", record])
    assert (ran.exit_code, "but for the cost of its types" in ran.output) == (0, True), ran.output
    damaged = draft("q8_0")
    damaged.raw[WEIGHT].reshape(-1, 34)[5, 1] ^= 0x80
    damaged.write(Path(a))
    ran = CliRunner().invoke(main, ["check-model", a, "--compare", b, "--json", record])
    assert (ran.exit_code, f"values: {WEIGHT}, block 5 (row 0, 32 values), 1 of 256" in ran.output) == (1, True)
    document = read_document(Path(record))
    assert document is not None
    wrong, layers = document.record.results
    assert (document.body["model"]["compared"], wrong.metrics["index"], wrong.verdict) == ("b.gguf", 5, Verdict.FAIL)
    assert (wrong.where, layers.verdict) == (Place(Fault.NODE, op="NONE", name=WEIGHT), Verdict.UNSUPPORTED)
    again = CliRunner().invoke(main, ["run", "--case", wrong.case, "--backend", "cpu"])
    assert (again.exit_code, f"values: {WEIGHT}, block 5" in again.output) == (1, True), again.output


def test_a_file_without_tensors_is_not_called_plausible(tmp_path: Path) -> None:
    """Where no value was checked, the command says so and ends with 3."""
    path = tmp_path / "a.gguf"
    Draft("llama", {"llama.block_count": 1}, {}, {}, {}).write(path)
    ran = CliRunner().invoke(main, ["check-model", str(path)])
    assert "no values were checked" in ran.output, ran.output
    assert "implausible" not in ran.output
    assert ran.exit_code == 3


def test_an_interrupted_comparison_prints_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second tensor leaves the finding of the first."""
    path = tmp_path / "a.gguf"
    damaged = draft("f32", change=_nan)
    damaged.types["x"], damaged.ne["x"], damaged.raw["x"] = damaged.types[WEIGHT], (4,), np.zeros(16, np.uint8)
    damaged.write(path)
    values = ModelFile.values

    def interrupted(self: ModelFile, t: modelfile.StoredTensor, first: int, n: int) -> modelfile.F32:
        if t.name == "x":
            raise KeyboardInterrupt
        return values(self, t, first, n)

    monkeypatch.setattr(ModelFile, "values", interrupted)
    ran = CliRunner().invoke(main, ["check-model", str(path)])
    assert (ran.exit_code, f"not finite: {WEIGHT}" in ran.output) == (5, True), ran.output


def test_a_file_without_an_architecture_is_read(tmp_path: Path) -> None:
    """A file of metadata alone has nothing to be wrong."""
    writer = GGUFWriter(tmp_path / "a.gguf", "")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert alone(modelfile.read(tmp_path / "a.gguf")) == []
