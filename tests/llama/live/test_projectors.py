"""Projectors of the zoo: the files that they are made of, what libmtmd makes of images and sounds, and planted bugs."""

from __future__ import annotations

import atexit
import ctypes
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from commands import conform_here
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.cli import main
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.lib import mtmd
from conformance.ggml.lib.mtmd import Mtmd
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.live import projector as player
from conformance.llama.live.comparison import judge_all
from conformance.llama.live.projector import prepare
from conformance.llama.live.projectors.encoder import Encoder, image_size
from conformance.llama.live.projectors.files import TOKENS, write_projector
from conformance.llama.live.projectors.relations import MEDIA, RELATIONS
from conformance.llama.live.projectors.table import _number, projector, table
from conformance.llama.live.projectors.worker import encoder, reply
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner

Call = Callable[..., Any]
TILES, FRAMES, SOUND = "internvl", "qwen3vl_merger", "qwen3a"
"""Projectors that cut tiles and take batches, that merge frames, and of sounds."""


# --- the table and the files


def test_there_are_projectors_of_both_kinds() -> None:
    """At least 10, of images and of sounds; of one `clip.projector_type` there may be several."""
    kinds = [p.modality for p in table().values()]
    assert len(kinds) >= 30
    assert kinds.count("audio") >= 5
    assert len({p.type for p in table().values()}) >= 25


@pytest.mark.parametrize("name", table())
def test_shapes_are_small_and_whole(name: str) -> None:
    """Every weight has 1 to 4 dimensions of at least 1, no projector takes more than 40 MB, and blocks are numbered."""
    p = projector(name)
    assert all(1 <= len(ne) <= 4 and min(ne) >= 1 for ne in p.tensors.values())
    assert sum(int(np.prod(ne)) for ne in p.tensors.values()) < 10_000_000
    blocks = p.keys[f"clip.{p.modality}.block_count"]
    assert isinstance(blocks, int)
    assert any(f".blk.{blocks - 1}." in w for w in p.tensors)
    assert not any(f".blk.{blocks}." in w or "*" in w for w in p.tensors)


def test_sizes_do_not_divide() -> None:
    """Of images of an odd size, no side is a multiple of a patch, of what is merged, or of a tile."""
    for p in table().values():
        if p.modality == "vision":
            patch = p.keys["clip.vision.patch_size"]
            assert isinstance(patch, int)
            assert all(side % patch for side in image_size("odd", p.tile))
            assert all(side > 2 * p.tile for side in image_size("large", p.tile))


@given(st.lists(st.lists(st.one_of(st.integers(1, 99), st.sampled_from("EFP")), min_size=1), min_size=1, max_size=3))
def test_a_shape_is_a_sum_of_products(terms: list[list[int | str]]) -> None:
    """`4*E+1` is read as Python reads it."""
    sizes = {"E": 128, "F": 192, "P": 256}
    text = "+".join("*".join(map(str, factors)) for factors in terms)
    assert _number(text, sizes) == sum(
        int(np.prod([f if isinstance(f, int) else sizes[f] for f in factors], dtype=object)) for factors in terms
    )


@pytest.mark.parametrize("name", ["ldp", "resampler", SOUND])
def test_the_file_holds_what_the_table_says(name: str, tmp_path: Path) -> None:
    """Names, `ne`, types and keys; signed ones are int32; the bytes are the same each time, and other for a name."""
    p = projector(name)
    for file in "ab":
        write_projector(tmp_path / file, p, "one")
    write_projector(tmp_path / "c", p, "other")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    read = GGUFReader(tmp_path / "a")
    assert {t.name for t in read.tensors} == set(p.tensors)
    for t in read.tensors:
        ne = [*p.tensors[t.name], 1, 1, 1][:4]
        assert [*t.shape.tolist(), 1, 1, 1][:4] == ne
        assert t.tensor_type.name in ("F32", "F16")
        assert (np.abs(t.data.astype(np.float64)) < 50).all()
    assert read.fields["general.architecture"].contents() == "clip"
    assert read.fields["clip.projector_type"].contents() == p.type
    if p.signed:
        assert read.fields["clip.minicpmv_version"].types[0].name == "INT32"
    kernels = {t.name for t in read.tensors if t.tensor_type.name == "F16"}
    assert len(kernels) == (2 if name == "ldp" else 0)


def test_matrices_of_blocks_have_the_type_asked_for(tmp_path: Path) -> None:
    """Those whose rows it can hold; kernels, norms and positions stay."""
    write_projector(tmp_path / "q", projector(TILES), "one", "q8_0")
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "q").tensors}
    assert types["v.blk.0.attn_q.weight"] == types["v.blk.1.ffn_down.weight"] == "Q8_0"
    assert types["v.patch_embd.weight"] == types["v.blk.0.ln1.weight"] == types["v.position_embd.weight"] == "F32"


def test_every_byte_is_a_token() -> None:
    """No text fails for a token that is not there."""
    assert len(TOKENS) == len(set(TOKENS)) == 259


def test_an_unknown_name_is_the_users_error() -> None:
    """The message lists those that there are."""
    with pytest.raises(UsageError, match=r"projector 'nothing' is unknown; known: adapter, "):
        projector("nothing")


# --- libmtmd


@cache
def first() -> Encoder:
    """The first projector, with the library of all others."""
    return encoder(prepare(Path(mkdtemp(prefix="conformance-projector-")), "mlp"), "")


@cache
def loaded(name: str) -> Encoder:
    """A projector in this process, for all tests."""
    folder = mkdtemp(prefix="conformance-projector-")
    atexit.register(rmtree, folder, ignore_errors=True)
    load = prepare(Path(folder), name)
    return Encoder(first().library, load, "")


def play(ids: Iterable[str]) -> list[Result]:
    """The results of cases on the wheel's CPU called by name."""
    runner, spec = Runner(isolation=Isolation(time_limit=60.0)), Spec.parse("ggml?device=CPU")
    try:
        return [runner.run(spec, [runner.case(i)])[0] for i in ids]
    finally:
        runner.close()


def related(relation: str, name: str) -> Result:
    """A relation in this process; OVERCLAIM where libmtmd reports an error."""
    e, pair = loaded(name), Pair(f"projector/{name}-do={relation}@1", "ggml")
    try:
        with e.clean():
            return judge_all(pair, relation, list(RELATIONS[relation].play(e)), on_cpu=True)
    except ConformanceError as error:
        return Result(*pair, Verdict.OVERCLAIM, error=Error(str(error)))


@needs_wheel
@pytest.mark.parametrize("name", table())
def test_every_projector_encodes(name: str) -> None:
    """An image whose sides no patch divides, or such a sound, has embeddings that differ from token to token."""
    e = loaded(name)
    with e.clean():
        for found in e.look(e.context(), e.medium("odd")):
            rows = found
            if name == "pixtral":  # the end of a row of patches is memory that nobody wrote, times zero: at times NaN
                rows = np.delete(found, np.s_[4::5], axis=0)
            assert np.isfinite(rows).all()
            assert rows.any(axis=1).all()
            assert len(np.unique(rows, axis=0)) == len(rows)


@needs_wheel
def test_a_large_image_is_cut() -> None:
    """Tiles are chunks of their own, and each sees another part."""
    e = loaded(TILES)
    with e.clean():
        tiles = e.look(e.context(), e.medium("large"))
    assert len(tiles) > 3
    assert len({t.tobytes() for t in tiles}) == len(tiles)


@needs_wheel
@pytest.mark.parametrize(("name", "relations"), [(TILES, RELATIONS), (FRAMES, RELATIONS), ("lfm2a", ["frames"])])
def test_a_device_that_is_the_cpu_agrees(name: str, relations: Iterable[str]) -> None:
    """Every run is equal to the bit, and every relation holds, or makes no sense and says why."""
    found = play(f"projector/{name}-do={do}@1" for do in (*MEDIA, *relations))
    assert {r.verdict for r in found} <= {Verdict.PASS, Verdict.UNSUPPORTED}, found
    assert all(r.nmse == 0.0 for r in found[: len(MEDIA)])
    assert all(r.detail for r in found if r.verdict is Verdict.UNSUPPORTED)


@needs_wheel
def test_a_projector_that_ends_its_process_costs_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of another shape aborts: runs and relations on the CPU are CRASH, with ggml's words."""
    broken = projector("mlp")
    tensors = {**broken.tensors, "mm.0.weight": (96, 256)}
    monkeypatch.setattr(player, "projector", lambda _: replace(broken, tensors=tensors))
    found = play(f"projector/mlp-do={do}@1" for do in ("media-odd", "media-threads"))
    assert [r.verdict for r in found] == [Verdict.CRASH, Verdict.CRASH]
    assert all("GGML_ASSERT" in r.detail for r in found)


@needs_wheel
@pytest.mark.parametrize(("name", "steps"), [(TILES, 3), ("ldpv2", 1)])
def test_what_it_computes_is_a_case(name: str, steps: int, tmp_path: Path) -> None:
    """A step for each chunk, weights as seeds, and right to the reference in float64 and to ggml, node by node."""
    file = tmp_path / "case.gguf"
    result = CliRunner().invoke(main, ["capture", f"projector/{name}-do=media-odd@1", "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert file.stat().st_size < 40_000_000
    case = casefile.read_one(file)
    assert [len(s.outputs) for s in case.steps] == [1] * steps
    assert case.recipes
    ran = CliRunner().invoke(main, ["run", str(file), "--backend", "cpu", "--backend", "ggml"])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.count("1 PASS; golden") == 2


@pytest.mark.parametrize(
    ("name", "says"), [("mlp-do=media-turn", "media-turn"), ("nothing-do=media-odd", "projector 'nothing' is unknown")]
)
def test_a_recording_is_of_one_medium(name: str, says: str) -> None:
    """A relation and an unknown projector are refused."""
    done = CliRunner().invoke(main, ["capture", f"projector/{name}@1", "-o", "x.gguf"])
    assert (done.exit_code, says in done.output) == (2, True), done.output


# --- planted bugs


def _second_zero(call: Call) -> Call:
    """Each second time that embeddings are fetched, they are zeros."""
    count, zeros = [0], (ctypes.c_float * 1_000_000)()

    def get(*args: Any) -> Any:  # noqa: ANN401
        count[0] += 1
        return call(*args) if count[0] % 2 else ctypes.addressof(zeros)

    return get


def _stays(call: Call) -> Call:
    """A context encodes its first chunk alone."""
    seen: set[int] = set()

    def encode(context: int, chunk: int) -> int:
        if context in seen:
            return 0
        seen.add(context)
        return int(call(context, chunk))

    return encode


def _first_of_batch(call: Call) -> Call:
    """Every chunk of a batch has the embeddings of the first."""
    first: dict[int, int] = {}
    return lambda batch, chunk: call(batch, first.setdefault(batch, chunk))


def _empty_batch(_: Call) -> Call:
    return lambda _batch: 0


def _other_weights(when: Callable[[Any], bool]) -> Callable[[Call], Call]:
    """Some parameters load another file."""

    def spoil(call: Call) -> Call:
        def make(file: bytes, model: int, params: Any) -> Any:  # noqa: ANN401
            other = Path(file.decode()).with_name("other.gguf")
            name = Path(file.decode()).parent.name
            if when(params):
                write_projector(
                    other, projector(next(p for p in table() if loaded(p).load.file == file.decode())), name
                )
            return call(str(other).encode() if when(params) else file, model, params)

        return make

    return spoil


def _media(change: Callable[[list[int]], list[int]]) -> Callable[[Call], Call]:
    """Changes the media of prompts of several."""

    def spoil(call: Call) -> Call:
        def tokenize(context: int, chunks: int, text: Any, media: Any, n: int) -> int:  # noqa: ANN401
            if n > 1:
                media = (ctypes.c_void_p * n)(*change([int(m) for m in media]))
            return int(call(context, chunks, text, media, n))

        return tokenize

    return spoil


BUGS: dict[str, tuple[str, Callable[[Call], Call], str, str]] = {
    "the second tile is 0": ("get_output_embd", _second_zero, TILES, "tiles-back media-prompt media-turn media-twice"),
    "the second piece of a sound is 0": ("get_output_embd", _second_zero, SOUND, "tiles-back media-prompt"),
    "what was encoded first stays": ("encode_chunk", _stays, TILES, "tiles-back media-turn media-prompt media-twice"),
    "a batch has the first's embeddings": ("batch_get_output_embd", _first_of_batch, TILES, "media-batch tiles-batch"),
    "a batch is not encoded": ("batch_encode", _empty_batch, TILES, "media-batch tiles-batch"),
    "flash attention is another": (
        "init_from_file", _other_weights(lambda p: p.flash_attn_type == 0), FRAMES, "media-flash-attn"
    ),
    "3 threads are wrong": ("init_from_file", _other_weights(lambda p: p.n_threads > 1), FRAMES, "media-threads"),
    "images of a prompt are swapped": ("tokenize", _media(lambda m: m[::-1]), TILES, "media-prompt"),
    "the second frame is not seen": ("tokenize", _media(lambda m: [m[0]] * len(m)), FRAMES, "frames media-prompt"),
}  # fmt: skip
"""Bug -> libmtmd's function, how it is spoilt, the projector, and the relations that must notice."""


@needs_wheel
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each relation that uses a function passes, and does not where the function is spoilt."""
    name, spoil, projector_name, relations = BUGS[bug]
    functions = loaded(projector_name).library.mtmd
    for relation in relations.split():
        assert related(relation, projector_name).verdict is Verdict.PASS
        with monkeypatch.context() as patch:
            patch.setattr(functions, name, spoil(getattr(functions, name)))
            found = related(relation, projector_name)
        assert found.verdict in (Verdict.FAIL, Verdict.OVERCLAIM, Verdict.VACUOUS), relation


def test_what_a_row_of_zeros_says() -> None:
    """Such a row on the CPU proves nothing."""
    assert player.tells([np.ones((2, 3), np.float32)])
    assert not player.tells([np.ones((2, 3), np.float32), np.eye(2, 3, dtype=np.float32)[[0, 0]] * 0])


# --- what a build lacks


@needs_wheel
def test_an_absent_function_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A libmtmd that lacks a function makes it UNSUPPORTED by name; so does a build without libmtmd."""
    e = loaded(TILES)
    ask = {"relation": "media-batch", "folder": str(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(e.library.mtmd, "batch_init", None)
        assert reply(e, ask) == {"unsupported": "this libmtmd has no mtmd_batch_init"}
    monkeypatch.setattr(e.library, "absent", "it carries no libmtmd")
    assert reply(e, ask) == {"unsupported": "it carries no libmtmd"}


@needs_wheel
def test_a_build_whose_libmtmd_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has none, or parameters of an unknown layout, says so and still is a llama.cpp."""
    function, ours = Mtmd.function, first().library
    builds = [ours]  # alive, as the library calls the log of each
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Mtmd, "function", lambda self, s: None if s == "mtmd_init_from_file" else function(self, s))
            builds.append(Mtmd())
        with monkeypatch.context() as patch:
            patch.setattr(mtmd, "MTMD_PARAMS", mtmd.MTMD_PARAMS[-1:])
            builds.append(Mtmd())
    finally:
        for log_set in (ours.llama.log_set, ours.mtmd.log_set):
            log_set(ours.log.callback, None)
    assert [("carries no libmtmd" in b.absent, "mtmd_context_params has" in b.absent) for b in builds] == [
        (False, False), (True, False), (False, True),
    ]  # fmt: skip


@needs_wheel
def test_a_projector_that_a_build_does_not_know(tmp_path: Path) -> None:
    """It is UNSUPPORTED by its name, and so is a relation that makes no sense for sounds."""
    e = loaded("mlp")
    stranger = replace(projector("mlp"), keys={**projector("mlp").keys, "clip.projector_type": "of-tomorrow"})
    write_projector(tmp_path / "p.gguf", stranger, "x")
    strange = Encoder(e.library, replace(e.load, projector="of-tomorrow", file=str(tmp_path / "p.gguf")), "")
    ask = {"run": "media-odd", "file": str(tmp_path / "x.npz")}
    assert reply(strange, ask) == {"unsupported": "this libmtmd knows no projector of-tomorrow"}
    assert reply(loaded(SOUND), {"relation": "frames", "folder": str(tmp_path)}) == {
        "unsupported": "does not apply to audio"
    }
    lost = Encoder(e.library, replace(e.load, file=str(tmp_path / "none.gguf")), "")
    assert "cannot load the projector" in reply(lost, ask)["failed"]


@needs_wheel
def test_projectors_in_a_run(tmp_path: Path) -> None:
    """A result for each run and relation of a projector."""
    out = tmp_path / "projectors.json"
    words = ("--level", "standard", "--backend", "ggml", "--case", "projector/mlp-norm-*", "--json", out)
    result = conform_here("run", *words)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [r["case"] for r in rows] == player.ids_of("mlp-norm")
    assert {r["verdict"] for r in rows} == {"PASS", "UNSUPPORTED"}


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    loaded.cache_clear()
    first.cache_clear()
