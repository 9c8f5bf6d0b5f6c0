"""A capture becomes a case with all that was recorded; and each of its nodes can be run from the record alone."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changed_json import changed, places
from click.testing import CliRunner
from random_cases import small_case

from conformance.case import casefile
from conformance.case.case import JSON, Case, Step, writes_in_place
from conformance.cli import main
from conformance.ggml.errors import CaseFileError, GraphError, UnavailableError, UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, nbytes, new_tensor, packed_nbytes
from conformance.ggml.types import F16, F32, I64
from conformance.llama import captured
from conformance.llama.captured import FAMILY, import_capture
from conformance.run.session.select import case_ids, lacking
from conformance.suite.batch import isolated_nodes

B = Builder()


def _bytes(n: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def capture_of(case: Case) -> tuple[JSON, dict[str, Bytes]]:
    """What the recorder would have written of a run of `case`; recorded values are arbitrary."""
    arrays = {f"p{i}": data for i, data in enumerate(case.persistent.values())}
    doc: dict[str, Any] = {"source": "test", "n_seq": 1, "persistent": [], "steps": []}
    doc["persistent"] = [{**_entry(t, {}), "node": False, "persistent": t.name} for t in case.persistent]
    caches = case.caches()
    for k, step in enumerate(case.steps):
        index = {t: j for j, t in enumerate(step.graph.tensors())}
        nodes = set(step.graph.nodes)
        tensors = []
        for t, j in index.items():
            entry = {**_entry(t, index), "node": t in nodes}
            if t in case.persistent:
                entry["persistent"] = t.name
            elif t in step.inputs:
                entry["input"] = True
                arrays[f"s{k}_i{j}"] = step.inputs[t]
            if t in nodes:
                arrays[f"s{k}_o{j}"] = _bytes(nbytes(t), 100 * k + j)
            tensors.append(entry)
        arrays.update({f"s{k}_c{i}": _bytes(nbytes(t), k) for i, t in enumerate(case.persistent) if t in caches})
        doc["steps"].append({"tokens": [[5, k, 0, 1]], "tensors": tensors})
    return doc, arrays


def _entry(t: Tensor, index: dict[Tensor, int]) -> dict[str, JSON]:
    return {
        "name": t.name,
        "op": t.op,
        "type": t.type.name,
        "ne": list(t.ne),
        "nb": list(t.nb),
        "op_params": list(t.op_params),
        "flags": t.flags,
        "view_offs": t.view_offs,
        "src": [None if s is None else index[s] for s in t.src],
        "view_src": None if t.view_src is None else index[t.view_src],
    }


def _written(folder: Path, doc: JSON, arrays: dict[str, Any]) -> Path:
    path = folder / "tiny.json"
    path.write_text(json.dumps(doc), encoding="ascii")
    np.savez_compressed(path.with_suffix(".npz"), **arrays)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A capture of the small case."""
    return _written(tmp_path, *capture_of(small_case()))


def test_import(path: Path) -> None:
    """Graphs in order, inputs, initial bytes, every computed node's value, each cache after each step, the facts."""
    case = import_capture(path)
    _, arrays = capture_of(small_case())
    assert case.id == "captured/tiny@0"
    assert case.family == "captured"
    assert case.tolerance == {"nmse": 5e-4}
    assert case.provenance == {"source": "test", "n_seq": 1}
    for i, (t, data) in enumerate(case.persistent.items()):
        assert np.array_equal(data, arrays[f"p{i}"]), t
    for k, (step, made) in enumerate(zip(case.steps, small_case().steps, strict=True)):
        assert [n.op for n in step.graph] == [n.op for n in made.graph]
        assert step.note == {"tokens": [[5, k, 0, 1]]}
        assert [t.name for t in step.outputs] == ["out"]
        assert sorted(t.name for t in step.inputs) == ["idxs", "x"]
        numbers = {t: j for j, t in enumerate(step.graph.tensors())}
        computed = [n for n in step.graph if n.op not in VIEW_OPS]
        assert set(step.expected) == {*computed, *case.caches()}
        for n in computed:
            assert np.array_equal(step.expected[n], arrays[f"s{k}_o{numbers[n]}"])
        assert np.array_equal(step.expected[case.caches()[0]], arrays[f"s{k}_c1"])


def test_strides_are_packed(tmp_path: Path) -> None:
    """A recorded value that lies in memory with gaps is packed, and a node that was not computed is not expected."""
    a = new_tensor(F32, 4, 6, name="a")
    cache = new_tensor(F32, 4, 6, name="cache")
    gaps = B.cpy(B.view_2d(a, 2, 6, a.nb[1], 0), B.view_2d(cache, 2, 6, cache.nb[1], 8))
    skipped = B.sqr(a)
    graph = B.build_forward_expand(gaps, skipped)
    skipped.flags = 0
    case = Case("a/b@0", {cache: _bytes(96)}, [Step(graph, {a: _bytes(96, 1)})])
    doc, arrays = capture_of(case)
    step = import_capture(_written(tmp_path, doc, arrays)).steps[0]
    (node,) = [t for t in step.expected if t.op == "CPY"]
    raw = arrays[f"s0_o{next(j for j, t in enumerate(graph.tensors()) if t is gaps)}"]
    assert nbytes(node) > packed_nbytes(node) == step.expected[node].size
    assert np.array_equal(step.expected[node], np.concatenate([raw[16 * i : 16 * i + 8] for i in range(6)]))
    assert {t.op for t in step.expected} == {"CPY", "NONE"}
    assert [t.op for t in step.outputs] == ["CPY"]


_STRANGE: tuple[Any, ...] = (None, True, -1, 2**31, 2**64, 1.5, "", "x", [], [0], [None], [2**62] * 4, {}, {"a": [1]})


def test_hostile_json(path: Path) -> None:
    """Any value in place of any other in a capture gives a case or a CaseFileError, nothing else."""
    good = json.loads(path.read_text())
    tried = refusals = 0
    for n, place in enumerate(places(good)):
        for value in _STRANGE[n % 4 :: 4]:
            path.write_text(json.dumps(changed(good, place, value)), encoding="ascii")
            tried += 1
            error = _error(path)
            if error is not None:
                refusals += 1
                assert error.field
                assert str(error).isprintable()
    assert tried > 500
    assert refusals > tried // 3


def _error(path: Path) -> CaseFileError | None:
    try:
        import_capture(path)
    except CaseFileError as e:
        return e
    return None


def _npy(data: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, data, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (None, "is missing"),
        (b"", "and a header expected"),
        (b"\x93NUMPY\1\0" + b"\xff" * 1200, "something else"),
        (_npy(np.zeros(512, np.uint8)), "an array of 512"),
        (_npy(np.zeros(32, "<f4")), "something else"),
        (_npy(np.zeros((2, 64), np.uint8)), "something else"),
        (_npy(np.array([{"a": 1}], object)).ljust(256, b"\0"), "something else"),
        (_npy(np.zeros(128, np.uint8)).replace(b"(128,)", b"(2**9)"), "something else"),
        (_npy(np.zeros(128, np.uint8)).replace(b"(128,)", b"(2**99,"), "something else"),
        (_npy(np.zeros(128, np.uint8)) + b"more", "in 132"),
        (b"\0" * (64 << 20), "and a header expected"),
    ],
    ids=["missing", "empty", "no npy", "another size", "floats", "2-D", "pickle", "code", "broken", "longer", "bomb"],
)
def test_hostile_array(path: Path, member: bytes | None, message: str) -> None:
    """An array that is missing, of another form, a pickle, or a bomb, is refused by name; nothing is unpickled."""
    _, arrays = capture_of(small_case())
    assert arrays["p1"].size == 128
    with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in arrays.items():
            if name != "p1":
                out.writestr(f"{name}.npy", _npy(data))
        if member is not None:
            out.writestr("p1.npy", member)
    error = _error(path)
    assert error is not None
    assert error.field == "npz.p1"
    assert message in str(error)


def test_broken_archive(path: Path) -> None:
    """An archive that is missing, cut, or damaged in any byte gives a case or one CaseFileError."""
    npz = path.with_suffix(".npz")
    good = npz.read_bytes()
    for end in range(0, len(good), 997):
        npz.write_bytes(good[:end])
        assert _error(path) is not None
    refusals = 0
    for at in range(0, len(good), 41):
        data = bytearray(good)
        data[at] ^= 0xFF
        npz.write_bytes(data)
        refusals += _error(path) is not None
    assert refusals > len(good) // 41 // 2  # the rest hits dates and other things that nothing depends on
    npz.unlink()
    assert "expected beside" in str(_error(path))
    path.unlink()
    assert "cannot be read" in str(_error(path))


def test_bundled_captures() -> None:
    """The two captures of the checkout are there at every level, whole: steps, logits, caches, every computed node."""
    ids = FAMILY.ids("smoke")
    assert ids == FAMILY.ids("full") == ["captured/llama-fa-1seq@0", "captured/llama-fa-4seq-streams@0"]
    for case_id, steps in zip(ids, (11, 7), strict=True):
        case = FAMILY.build(case_id)
        assert case.id == case_id
        assert len(case.steps) == steps
        assert [t.name for t in case.caches()] == ["cache_k_l0", "cache_v_l0", "cache_k_l1", "cache_v_l1"]
        for k, step in enumerate(case.steps):
            assert [t.name for t in step.outputs] == ["result_output"]
            assert set(case.caches()) < set(step.expected)
            computed = {n for n in step.graph if n.flags & FLAG_COMPUTE and n.op not in VIEW_OPS}
            assert k == 0 or computed < set(step.expected)
        assert case.provenance["arithmetic"] == "ggml-cpu"
    with pytest.raises(UsageError, match="llama-fa-1seq"):
        FAMILY.build("captured/nothing@0")


def test_captures_that_are_missing_stop_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without case files a run of all families goes on and reports it in one line.

    Naming the family is an error that says what to do.
    """
    monkeypatch.setattr(captured, "GOLDEN", tmp_path)
    assert set(lacking(())) == {"captured"}
    assert "no case files in" in lacking(())["captured"]
    assert "install ggml-conformance again" in lacking(())["captured"]
    assert any(i.startswith("ops/") for i in case_ids((), (), "smoke"))
    with pytest.raises(UnavailableError, match="install ggml-conformance again"):
        case_ids(("captured",), (), "smoke")
    with pytest.raises(UsageError, match="install ggml-conformance again"):
        FAMILY.build("captured/llama-fa-1seq@0")
    result = CliRunner().invoke(main, ["run", "--backend", "cpu", "--family", "gqa", "--family", "captured"])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    result = CliRunner().invoke(main, ["list", "cases"])
    assert result.exit_code == 0
    assert "captured: not run: no case files in" in result.stderr


@pytest.mark.parametrize("case_id", ["captured/llama-fa-1seq@0", "captured/llama-fa-4seq-streams@0"])
def test_isolated_nodes_of_a_capture(case_id: str) -> None:
    """Every computed node of a step once, in order, none in reach of another, fed with what the record holds."""
    case = FAMILY.build(case_id)
    alone, original = isolated_nodes(case, 2)
    alone.validate()
    (step,) = alone.steps
    assert list(original.values()) == [
        n for n in case.steps[2].graph if n.flags & FLAG_COMPUTE and n.op not in VIEW_OPS
    ]
    assert step.outputs == tuple(original)
    for copy_, node in original.items():
        assert np.array_equal(step.expected[copy_], case.steps[2].expected[node])
        assert not _reached(copy_) & original.keys()
    writers = [c for c in original if writes_in_place(c)]
    assert len({c.view_src for c in writers}) == len(writers) == 4
    before = case.steps[1].expected
    for c in writers:
        assert c.view_src is not None
        root = original[c].view_src
        assert root is not None
        assert np.array_equal(alone.persistent[c.view_src], before[root])
    attention = [c for c in original if c.op == "FLASH_ATTN_EXT"]
    for c in attention:  # it ran after its layer's K and V were stored
        for s, t in zip(c.src[1:3], original[c].src[1:3], strict=True):
            assert s is not None
            assert t is not None
            assert np.array_equal(alone.persistent[s.root], case.steps[2].expected[t.root])


def _reached(t: Tensor) -> set[Tensor]:
    found: set[Tensor] = set()
    todo = [s for s in (*t.src, t.view_src) if s is not None]
    while todo:
        cur = todo.pop()
        if cur not in found:
            found.add(cur)
            todo += [s for s in (*cur.src, cur.view_src) if s is not None]
    return found


def test_isolated_nodes_follow_the_bytes() -> None:
    """Nodes that write in place one after another: each copy starts from what the last one left, in its own root."""
    x = new_tensor(F32, 4, 4, name="x")
    cache = new_tensor(F32, 4, 4, name="cache")
    ids = new_tensor(I64, 4, name="ids")
    square = B.sqr(x)
    first = B.silu_inplace(square)
    half = B.scale_inplace(B.view_2d(first, 2, 4, first.nb[1], 8), 0.5)
    total = B.add(B.cast(square, F16), first)
    stored = B.set_rows(cache, total, ids)
    graph = B.build_forward_expand(first, half, total, stored)
    nodes = [n for n in graph if n.op not in VIEW_OPS]
    values = {n: _bytes(packed_nbytes(n), i) for i, n in enumerate(nodes)}
    step = Step(graph, {x: _bytes(64, 50), ids: np.arange(4, dtype="<i8").view(np.uint8)}, (), values)
    case = Case("a/b@0", {cache: _bytes(64, 60)}, [step])
    case.validate()
    alone, original = isolated_nodes(case, 0)
    alone.validate()
    copies = {n: c for c, n in original.items()}
    held = alone.steps[0].inputs | alone.persistent
    assert np.array_equal(held[copies[first].root], values[square])
    assert np.array_equal(held[copies[half].root], values[first])
    assert copies[half].view_offs == 8
    after = values[first].copy().reshape(4, 16)
    after[:, 8:] = values[half].reshape(4, 8)
    cast = next(n for n in nodes if n.op == "CPY")
    assert copies[cast].src[1] is copies[cast]
    for n, i in ((cast, 0), (total, 1)):
        s = copies[n].src[i]
        assert s is not None
        assert np.array_equal(held[s.root], after.reshape(-1))
    assert np.array_equal(held[copies[stored].root], case.persistent[cache])
    assert len({copies[n].root for n in (first, half, stored)}) == 3


def test_isolated_nodes_need_a_record() -> None:
    """A value that a later node reads and that was not recorded is named, and so is a cache of the step before."""
    case = small_case()
    with pytest.raises(GraphError, match="no recorded value of MUL_MAT"):
        isolated_nodes(case, 0)
    del case.steps[0].expected[case.caches()[0]]
    with pytest.raises(GraphError, match=r"steps\[0\] has no recorded value of cache"):
        isolated_nodes(case, 1)


def test_isolated_case_survives_a_file(tmp_path: Path) -> None:
    """The isolated case is a case like any other: it can be saved and read."""
    alone, _ = isolated_nodes(FAMILY.build("captured/llama-fa-1seq@0"), 1)
    casefile.write(tmp_path / "a.gguf", alone)
    assert len(casefile.read_one(tmp_path / "a.gguf").steps[0].expected) == len(alone.steps[0].expected)
