"""A case file holds cases whole, the same bytes for the same cases, and any GGUF reader opens it."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import assert_same, random_cases, small_case

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.errors import CaseFileError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, Bytes, Tensor, nbytes, new_tensor
from conformance.ggml.types import F32, TYPES, GGMLType


def _weights(*types: GGMLType, name: str = "w", columns: int = 2) -> dict[Tensor, Bytes]:
    made = [new_tensor(t, t.blck_size * columns, 3, name=f"{name}{i}") for i, t in enumerate(types)]
    return {t: np.random.default_rng(i).integers(0, 256, nbytes(t), dtype=np.uint8) for i, t in enumerate(made)}


@given(st.lists(random_cases(), min_size=1, max_size=3, unique_by=lambda c: c.id))
@settings(max_examples=40, deadline=None)
def test_round_trip(cases: list[Case]) -> None:
    """Cases come back from a file equal in every field; written again they give the same file, byte by byte."""
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder, "a.gguf"), Path(folder, "b.gguf")
        casefile.write(path, cases)
        back = casefile.read(path)
        casefile.write(again, back)
        for a, b in zip(cases, back, strict=True):
            assert_same(a, b)
        assert path.read_bytes() == again.read_bytes()
        assert casefile.index(path) == [c.id for c in cases]
        assert sorted(p.name for p in Path(folder).iterdir()) == ["a.gguf", "b.gguf"]


def test_bundle_of_many(tmp_path: Path) -> None:
    """200 cases in one file: all there, in order, and each one by name."""
    path = tmp_path / "many.gguf"
    cases = [small_case(f"small/n={i}@0") for i in range(200)]
    casefile.write(path, cases)
    assert casefile.index(path) == [c.id for c in cases]
    for a, b in zip(cases, casefile.read(path), strict=True):
        assert_same(a, b)
    assert_same(cases[77], casefile.read_one(path, "small/n=77@0"))
    with pytest.raises(CaseFileError, match="one case expected, 200 found"):
        casefile.read_one(path)
    with pytest.raises(CaseFileError, match="no case 'small/n=200@0'"):
        casefile.read_one(path, "small/n=200@0")


def test_persistent_tensors_are_one_object(tmp_path: Path) -> None:
    """After reading, the cache that step 0 writes is the object that step 1 reads."""
    path = tmp_path / "a.gguf"
    casefile.write(path, small_case())
    case = casefile.read_one(path)
    assert [t.name for t in case.caches()] == ["cache_k_l0"]
    cache = case.caches()[0]
    assert all(cache in s.graph.tensors() and cache in s.expected for s in case.steps)


def test_equal_bytes_are_stored_once(tmp_path: Path) -> None:
    """The same bytes in many places take their room once, and are one array after reading."""
    path = tmp_path / "a.gguf"
    w = new_tensor(F32, 1 << 16, name="w")
    steps = []
    for _ in range(5):
        x = new_tensor(F32, 1 << 16, name="x")
        y = Tensor(F32, x.ne, x.nb, "SQR", src=(x,), flags=FLAG_COMPUTE, name="y")
        data = np.full(nbytes(x), 3, np.uint8)
        steps.append(Step(Graph([y]), {x: data}, (y,), {y: data.copy(), w: data.copy()}))
    casefile.write(path, Case("a/b@0", {w: np.full(nbytes(w), 3, np.uint8)}, steps))
    assert path.stat().st_size < 1.1 * nbytes(w)
    back = casefile.read_one(path)
    assert len({id(d) for s in back.steps for d in (*s.inputs.values(), *s.expected.values())}) == 1


def test_gguf_reader_opens_it(tmp_path: Path) -> None:
    """The `gguf` package's reader finds weights with their types, shapes and blocks, and says what the file is."""
    path = tmp_path / "a.gguf"
    weights = _weights(*TYPES.values())
    casefile.write(path, [Case("a/b@0", weights, []), small_case()])
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "ggml-conformance"
    assert reader.fields["conformance.ids"].contents() == ["a/b@0", "small/cache@0"]
    found = {t.name: t for t in reader.tensors}
    assert "1/p1 cache_k_l0" in found
    for i, (t, data) in enumerate(weights.items()):
        stored = found[f"0/p{i} {t.name}"]
        assert stored.data.tobytes() == data.tobytes()
        if t.type.name in {"q8_1", "q2_0"}:  # of another size there, or newer than it
            assert stored.tensor_type == GGMLQuantizationType.I8
        else:
            assert stored.tensor_type == t.type.id
            assert list(stored.shape) == list(t.ne[:2])
    for a, b in zip(weights.values(), casefile.read(path)[0].persistent.values(), strict=True):
        assert np.array_equal(a, b)


@pytest.fixture
def ggml() -> ctypes.CDLL:
    """The real library, which reads GGUF itself."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("no wheel of xllamacpp here")
    library = ctypes.CDLL(str(next(Path(next(iter(spec.submodule_search_locations))).glob("*.so"))))
    library.gguf_init_from_file.restype = ctypes.c_void_p
    for name in ("gguf_get_n_tensors", "gguf_get_tensor_name", "gguf_find_tensor", "gguf_free"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_char_p][: 2 if "find" in name else 1]
    library.gguf_get_n_tensors.restype = library.gguf_find_tensor.restype = ctypes.c_int64
    return library


def test_ggml_opens_it(tmp_path: Path, ggml: ctypes.CDLL) -> None:
    """Ggml's own `gguf_init_from_file` takes the file and knows its tensors."""

    class Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    path = tmp_path / "a.gguf"
    casefile.write(path, [Case("a/b@0", _weights(*TYPES.values()), []), small_case()])
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
    context = ggml.gguf_init_from_file(os.fsencode(path), Params(True, None))
    assert context
    assert ggml.gguf_get_n_tensors(context) == len(gguf.GGUFReader(path).tensors)
    assert ggml.gguf_find_tensor(context, b"1/p1 cache_k_l0") >= 0
    ggml.gguf_free(context)


def test_tensors_without_elements_and_long_names(tmp_path: Path) -> None:
    """What GGUF has no room for comes back all the same: no elements, 63-byte names cut anywhere, no bytes at all."""
    path = tmp_path / "a.gguf"
    names = ["é" * 31, "x" * 63, "\x00\n\U0001f600", ""]
    weights = {new_tensor(F32, n, 2, name=name): np.full(8 * n, 1, np.uint8) for n, name in enumerate(names)}
    empty = Case("empty/e@0", {new_tensor(TYPES["q4_K"], 0, 5): np.empty(0, np.uint8)}, [])
    for cases in ([Case("a/b@0", weights, []), empty], [empty]):
        casefile.write(path, cases)
        for a, b in zip(cases, casefile.read(path), strict=True):
            assert_same(a, b)


def test_arrays_cannot_be_written(tmp_path: Path) -> None:
    """Byte arrays share one copy of the file, so nothing can be written into them by mistake."""
    path = tmp_path / "a.gguf"
    casefile.write(path, small_case())
    for data in casefile.read_one(path).persistent.values():
        assert not data.flags.writeable


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": {"a": math.nan}}, "cases[0]"),
        ({"params": {"a": (1, 2)}}, "tuple"),
        ({"params": {1: 2}}, "key that is not a string"),
        ({"provenance": {"a": {1, 2}}}, "not JSON serializable"),
        ({"id": "a/\ud800@0"}, "cases[0]"),
    ],
)
def test_what_json_cannot_hold_is_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    """A field that would not come back as it is cannot be written, and what was there before stays."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"before")
    case = Case("a/b@0", {}, [])
    for name, value in fields.items():
        setattr(case, name, value)
    with pytest.raises(CaseFileError) as e:
        casefile.write(path, case)
    assert message in str(e.value)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_bundle_needs_cases_of_different_ids(tmp_path: Path) -> None:
    """No case at all, and two of one name, cannot be written."""
    with pytest.raises(CaseFileError, match="at least one"):
        casefile.write(tmp_path / "a.gguf", [])
    with pytest.raises(CaseFileError, match="'small/cache@0' occurs twice"):
        casefile.write(tmp_path / "a.gguf", [small_case(), small_case()])


def test_places_that_are_no_file(tmp_path: Path) -> None:
    """A file that is not there, a folder, an empty file, a folder that is not there: one line that says so."""
    (tmp_path / "empty.gguf").touch()
    for path in (tmp_path / "none.gguf", tmp_path, tmp_path / "empty.gguf", "a\0b"):
        for reader in (casefile.read, casefile.index, casefile.read_one):
            with pytest.raises(CaseFileError, match=r"^file: "):
                reader(path)
    with pytest.raises(CaseFileError, match="cannot be written"):
        casefile.write(tmp_path / "no folder" / "a.gguf", small_case())


@pytest.mark.skipif(os.name != "posix", reason="nobody tells whether a process lives")
def test_what_killed_processes_left_goes_with_the_next_write(tmp_path: Path) -> None:
    """Temporary files and folders of dead processes are removed, those of living ones and all else stays."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    (tmp_path / f".conformance-{gone.pid}-folder").mkdir()
    (tmp_path / f".conformance-{gone.pid}-x.tmp").touch()
    stays = {f".conformance-{os.getppid()}-x.tmp", ".conformance-notes", "case.gguf"}
    for name in stays - {"case.gguf"}:
        (tmp_path / name).touch()
    casefile.write(tmp_path / "case.gguf", small_case())
    assert {p.name for p in tmp_path.iterdir()} == stays
