"""One compiled model per template: it gives what a model of its own gives each graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backends.openvino import OpenVinoStateless
from backends.openvino.state import OpenVinoStateful
from conformance.backend.interface import Witness
from conformance.case.case import Case, Step
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Tensor, nbytes, new_tensor
from conformance.ggml.types import BF16, F16, F32, I32, I64, Q6_K, Q8_0
from conformance.suite.decoder import make

B = Builder()
TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
Values = dict[Tensor, Bytes]


def _decoder(body: str) -> Case:
    return make(f"kv_growth/llama-{TINY},{body}@1")


def _each_alone(case: Case) -> tuple[list[Values], list[Values]]:
    """Per step, outputs and caches: by one model per template, and by one per graph from the same caches."""
    lifted: list[Values] = []
    alone: list[Values] = []
    with OpenVinoStateless().open(case) as a, OpenVinoStateless(dynamic="off").open(case) as b:
        for step in case.steps:
            for t in case.caches():
                b.write(t, a.read(t))
            for session, found in ((a, lifted), (b, alone)):
                got = dict(session.compute(step.graph, step.inputs, step.outputs))
                found.append({**got, **{t: session.read(t) for t in case.caches()}})
    return lifted, alone


def _witness(case: Case, ov: OpenVinoStateless | None = None) -> Witness:
    with (ov or OpenVinoStateless()).open(case) as session:
        for step in case.steps:
            session.compute(step.graph, step.inputs, step.outputs)
        return session.witness()


def _nmse(x: Bytes, y: Bytes, t: Tensor) -> float:
    if t.type not in {F32, F16}:
        return float(not np.array_equal(x, y))
    a, b = (np.asarray(v.view(t.type.dtype or "u1"), np.float64) for v in (x, y))
    return float(np.sum((a - b) ** 2) / max(np.sum(b**2), 1e-30))


@pytest.mark.parametrize(
    "body",
    [
        "run=at254.d4.back3.d2",
        "fa=0,run=at254.d4.back3.d2",
        "write=cpy,fa=0,run=at254.d4.reset.d3",
        "write=cpy,seqs=3,run=at254.d4",
        "fa=0,seqs=3,run=at254.d4",
        "cache=f32,run=p3.p7.p20.p255",
        "w=q4_0,cache=q8_0,head=32,run=at254.d4",
    ],
)
def test_a_lifted_model_gives_what_a_model_of_the_graph_gives(body: str) -> None:
    """Outputs and caches of every step are within 1e-12, from the same caches; an F16 cache within one rounding."""
    lifted, alone = _each_alone(_decoder(body))
    for k, (found, expected) in enumerate(zip(lifted, alone, strict=True)):
        for t, want in expected.items():
            # one element in a few thousand that falls to the other side of an F16 boundary is 1e-9 of all
            assert _nmse(found[t], want, t) <= (1e-12 if t.type is not F16 else 1e-9), (k, t)


@pytest.mark.parametrize("body", ["fa=1", "fa=0", "fa=1,seqs=4", "fa=0,seqs=4", "write=cpy,fa=1", "write=cpy,fa=0"])
def test_growing_compiles_twice_per_template(body: str) -> None:
    """n_kv crosses 256 four times: for each kind of batch one model as it came, and one with symbols."""
    case = _decoder(f"ctx=1280,{body},run=at254.d4.p252.d4.p252.d4.p252.d4")
    w = _witness(case)
    assert w.compiles <= 4
    assert len(case.steps) >= 18
    assert w.symbols
    assert len(w.template) == 12
    assert not [n for n in w.notes if n.startswith("compiled one by one")]


def _kind(case: Case, k: int) -> str:
    """What llama.cpp calls a step: one token of each sequence, or a batch."""
    rows = np.array(case.steps[k].note["tokens"])
    return "decode" if len(rows) == len(np.unique(rows[:, 2])) else "prefill"


@pytest.mark.parametrize(
    ("ov", "fa", "seqs"),
    [(OpenVinoStateless, 0, 4), (OpenVinoStateless, 1, 1), (OpenVinoStateful, 0, 1), (OpenVinoStateful, 1, 4)],
    ids=lambda v: v if isinstance(v, int) else v.__name__,
)
def test_a_trajectory_from_nothing_compiles_twice_per_kind_and_changes_nothing(
    ov: type[OpenVinoStateless], fa: int, seqs: int
) -> None:
    """A growing cache needs at most two models per kind, with the values of one per graph.

    From 0 tokens over 256 three times, by prompts and by single tokens, some ubatches with one result and some with
    one for each sequence.

    Within an NMSE of 1e-11; an F16 cache within one rounding.
    """
    case = _decoder(f"fa={fa},seqs={seqs},ctx=1024,run=p250.3(d9.p247).d3")
    compiles = {"decode": 0, "prefill": 0}
    with ov().open(case) as lifted, ov(dynamic="off").open(case) as alone:
        for k, step in enumerate(case.steps):
            before = lifted.witness().compiles
            found = lifted.compute(step.graph, step.inputs, step.outputs)
            compiles[_kind(case, k)] += lifted.witness().compiles - before
            for t, want in alone.compute(step.graph, step.inputs, step.outputs).items():
                assert _nmse(found[t], want, t) <= 1e-11, (k, t)
        for t in case.caches():
            assert _nmse(lifted.read(t), alone.read(t), t) <= 1e-9
        assert not [n for n in lifted.witness().notes if n.startswith("compiled one by one")]
    assert max(compiles.values()) <= 2, compiles


def test_sequences_written_by_cpy_share_what_picks_rows() -> None:
    """Four sequences in batches of 2, 3, 1 and 4 tokens need five models for seven steps.

    Every number of streams is a template of its own (each stream has a CPY).
    """
    for fa in (0, 1):
        assert _witness(_decoder(f"seqs=4,write=cpy,fa={fa},run=at253.p2+3+1+4.d3")).compiles <= 5


def test_one_row_is_no_special_case_unless_something_makes_it_one() -> None:
    """Picking one, four and two rows of a product needs one lifted model.

    Where a row repeats over a matrix of as many rows, one row is a template of its own, and the numbers are still
    right.
    """
    for repeated, compiles in ((False, 2), (True, 4)):
        w, steps = new_tensor(F32, 8, 8), []
        for n, m in ((1, 5), (4, 7), (2, 5), (1, 9), (3, 3), (1, 7)):
            x, ids = new_tensor(F32, 8, m), new_tensor(I32, n)
            y = B.get_rows(B.mul_mat(w, x), ids)
            out = B.repeat(y, new_tensor(F32, 8, 12)) if repeated else B.sqr(y)
            rng = np.random.default_rng(n)
            inputs = {
                x: rng.standard_normal(8 * m).astype(np.float32).view(np.uint8),
                ids: rng.integers(0, m, n).astype(np.int32).view(np.uint8),
            }
            steps.append(Step(B.build_forward_expand(out), inputs, (out,)))
        case = Case("picked", {w: np.linspace(-1, 1, 64, dtype=np.float32).view(np.uint8)}, steps)
        found, expected = _each_alone(case)
        for got, wanted in zip(found, expected, strict=True):
            for t, want in wanted.items():
                assert _nmse(got[t], want, t) <= 1e-12
        assert _witness(case).compiles <= compiles


def test_prefills_of_any_length_compile_twice() -> None:
    """Batches of 3, 7, 20 and 255 tokens: the third and fourth use the model of the second."""
    assert _witness(_decoder("run=p3.p7.p20.p255")).compiles == 2


def test_a_case_that_stays_as_it_is_compiles_once() -> None:
    """Nothing is lifted before two graphs of a template differ."""
    w = _witness(_decoder("run=at20.d4"))
    assert (w.compiles, w.cache_hits, w.symbols) == (1, 3, {})


# -- what shares a model --------------------------------------------------------------------------------------------


def _small(*, scale: float = 2.0, middle: str = "sqr", byte: int = 0, name: str = "a", width: int = 8) -> Case:
    """Two steps of 3 and 5 rows: weights, a middle op, a scale."""
    w = new_tensor(F32, width, 4, name=name)
    weight = np.linspace(-1, 1, width * 4, dtype=np.float32).view(np.uint8).copy()
    weight[5] ^= byte
    steps = []
    for n in (3, 5):
        x = new_tensor(F32, width, n, name=name)
        y = B.mul_mat(w, x)
        y = B.sqr(y) if middle == "sqr" else B.relu(y)
        out = B.scale(y, scale)
        graph = B.build_forward_expand(out)
        for t in graph:
            t.name = name
        data = np.random.default_rng(n).standard_normal(width * n).astype(np.float32).view(np.uint8)
        steps.append(Step(graph, {x: data}, (out,)))
    return Case("small", {w: weight}, steps)


def _compiles(ov: OpenVinoStateless, case: Case) -> int:
    with ov.open(case) as session:
        for step in case.steps:
            found = session.compute(step.graph, step.inputs, step.outputs)
            with OpenVinoStateless(dynamic="off").open(case) as other:
                expected = other.compute(step.graph, step.inputs, step.outputs)
            for t, want in expected.items():
                assert _nmse(found[t], want, t) <= 1e-12
        return session.witness().compiles


def test_one_change_anywhere_is_another_model_and_a_name_is_none() -> None:
    """Equal names everywhere: an op_param, a shape, a middle op or a weight's byte tells two cases apart."""
    ov = OpenVinoStateless()
    assert _compiles(ov, _small()) == 2
    assert _compiles(ov, _small()) == 0
    assert _compiles(ov, _small(name="of no meaning")) == 0
    assert _compiles(ov, _small(scale=2.5)) == 2
    assert _compiles(ov, _small(middle="relu")) == 2
    assert _compiles(ov, _small(byte=1)) == 2
    assert _compiles(ov, _small(width=16)) == 2


@pytest.mark.parametrize("cache_type", [F32, F16, BF16, Q8_0], ids=str)
def test_rows_written_are_all_that_changes(cache_type: object) -> None:
    """SET_ROWS out of order and twice into one row, a read before and one after: bytes are those of one model each."""
    cache = new_tensor(cache_type, 32, 16)  # type: ignore[arg-type]  # a GGMLType
    steps = []
    for n, ids in ((2, (7, 1)), (4, (3, 15, 0, 9)), (3, (9, 2, 5))):
        rows, at = new_tensor(F32, 32, n), new_tensor(I64, n)
        before = B.cont(B.cast(cache, F32)) if cache_type is not Q8_0 else B.scale(rows, 1.0)
        written = B.set_rows(cache, rows, at)
        graph = B.build_forward_expand(before, written)
        data = np.random.default_rng(n).standard_normal(32 * n).astype(np.float32).view(np.uint8)
        inputs = {rows: data, at: np.array(ids, np.int64).view(np.uint8)}
        steps.append(Step(graph, inputs, (before, written)))
    size = 16 * 32 * cache.type.type_size // cache.type.blck_size
    lifted, alone = _each_alone(Case("rows", {cache: np.zeros(size, np.uint8)}, steps))
    for found, expected in zip(lifted, alone, strict=True):
        for t, want in expected.items():
            assert np.array_equal(found[t], want)


@pytest.mark.parametrize("cache_type", [F32, F16], ids=str)
@pytest.mark.parametrize("options", [{}, {"dynamic": "off"}], ids=str)
def test_a_cache_may_be_copied_and_written_in_one_step(cache_type: object, options: dict[str, str]) -> None:
    """What is copied from one cache to another is what stood there before the step wrote it.

    The result that carries the rows lies in the first cache's own memory, and that cache is the first to be written.
    """
    a, b = new_tensor(cache_type, 8, 2, 3, 2), new_tensor(cache_type, 8, 5, 3, 2)  # type: ignore[arg-type]  # as above
    start = {t: np.zeros(nbytes(t), np.uint8) for t in (a, b)}
    steps, now = [], {t: np.zeros(t.shape, np.float32) for t in (a, b)}
    for k in range(4):
        x = new_tensor(F32, 8, 2, 3, 1)
        moved = B.cpy(a, B.view_4d(b, *a.ne, *b.nb[1:], b.nb[1] * k))
        written = B.cpy(x, B.view_4d(a, *x.ne, *a.nb[1:], a.nb[3] * (k % 2)))
        first = B.scale(a, 2.0)
        data = np.arange(48, dtype=np.float32) + 48 * k
        steps.append(Step(B.build_forward_expand(first, moved, written), {x: data.view(np.uint8)}, (written,)))
    with OpenVinoStateless(**options).open(Case("both", start, steps)) as session:
        for k, step in enumerate(steps):
            session.compute(step.graph, step.inputs, step.outputs)
            now[b][:, :, k : k + 2] = now[a]
            now[a][k % 2] = (np.arange(48, dtype=np.float32) + 48 * k).reshape(3, 2, 8)
            for t in (a, b):
                held = session.read(t).view(cache_type.dtype)  # type: ignore[attr-defined]  # as above
                assert np.array_equal(held.reshape(t.shape), now[t]), (k, t)


@pytest.mark.parametrize("between", ["nothing", "softmax"])
def test_what_is_repeated_may_be_repeated_again(between: str) -> None:
    """In a model with symbols too, where OpenVINO's own Tile of a Tile gives other rows (2026.4.1)."""
    w, steps = new_tensor(F32, 32, 64), []  # which fixes the width of all that follows
    for n in (3, 5, 7):
        x = new_tensor(F32, 32, n)
        y = B.repeat_4d(B.mul_mat(w, x), 64, 2 * n, 1, 1)
        out = B.repeat_4d(y if between == "nothing" else B.soft_max(y), 128, 2 * n, 1, 1)
        data = np.random.default_rng(n).standard_normal(32 * n, np.float32).view(np.uint8)
        steps.append(Step(B.build_forward_expand(out), {x: data}, (out,)))
    weights = np.random.default_rng(0).standard_normal(32 * 64, np.float32).view(np.uint8)
    case = Case("repeats", {w: weights}, steps)
    assert _witness(case).symbols
    lifted, alone = _each_alone(case)
    for found, expected in zip(lifted, alone, strict=True):
        for t, want in expected.items():
            assert _nmse(found[t], want, t) <= 1e-12


def test_a_row_below_the_first_is_an_error() -> None:
    """A place of -1 never counts from the end."""
    cache, rows, at = new_tensor(F32, 8, 4), new_tensor(F32, 8, 2), new_tensor(I64, 2)
    written = B.set_rows(cache, rows, at)
    inputs = {rows: np.zeros(64, np.uint8), at: np.array([-1, 2], np.int64).view(np.uint8)}
    step = Step(B.build_forward_expand(written), inputs, ())
    case = Case("below", {cache: np.zeros(128, np.uint8)}, [step])
    message = "row index out of range"
    with OpenVinoStateless().open(case) as session, pytest.raises(BackendError, match=message):
        session.compute(step.graph, step.inputs, ())


def test_caches_of_another_size_are_served_by_the_same_model() -> None:
    """Three sessions of one backend whose caches have 4, 6 and 9 rows: rows go where they belong in each."""
    ov = OpenVinoStateless()
    for n in (4, 6, 9):
        cache = new_tensor(F32, 8, n)
        steps = []
        for k in range(2):
            rows, at = new_tensor(F32, 8, 2), new_tensor(I64, 2)
            inputs = {
                rows: np.full(16, k + n, np.float32).view(np.uint8),
                at: np.array([n - 1, k], np.int64).view(np.uint8),
            }
            steps.append(Step(B.build_forward_expand(B.set_rows(cache, rows, at)), inputs, ()))
        with ov.open(Case(f"rows {n}", {cache: np.zeros(32 * n, np.uint8)}, steps)) as session:
            for step in steps:
                session.compute(step.graph, step.inputs, ())
            held = session.read(cache).view(np.float32).reshape(n, 8)[:, 0]
        assert held.tolist() == [n, n + 1, *[0] * (n - 3), n + 1]


@pytest.mark.parametrize("fa", [0, 1])
@pytest.mark.parametrize("ov", [OpenVinoStateless, OpenVinoStateful])
def test_a_graph_may_be_another_the_next_time(ov: type[OpenVinoStateless], fa: int) -> None:
    """Who builds a graph in the memory of the last one is served what stands there now."""
    case = _decoder(f"fa={fa},run=p9.d3.p4")
    graph = Graph([])
    with ov().open(case) as a, ov().open(case) as b:
        for step in case.steps:
            graph.nodes[:] = step.graph.nodes
            found = a.compute(graph, step.inputs, step.outputs)
            want = b.compute(step.graph, step.inputs, step.outputs)
            assert all(np.array_equal(found[t], want[t]) for t in step.outputs)


def test_overwritten_leaves_of_types_that_cannot_be_stored_are_refused() -> None:
    """Numbers of a Q6_K leaf are the host's; once the graph has moved other blocks there, nobody knows them."""
    w, x, ids = new_tensor(Q6_K, 256, 4), new_tensor(Q6_K, 256, 2), new_tensor(I32, 3)
    moved, rows = B.cpy(x, B.view_2d(w, 256, 2, w.nb[1], w.nb[1])), B.get_rows(w, ids)
    ov = OpenVinoStateless()
    refused = [s.reason for s in ov.supports(B.build_forward_expand(moved, rows, B.cont(w))) if not s]
    assert len(refused) == 1
    assert refused[0].startswith("GET_ROWS: reads values of q6_K that ")
    assert all(ov.supports(B.build_forward_expand(rows, moved)))


def test_views_that_strides_cannot_factor_are_gathered() -> None:
    """An overlapping view of an input whose length changes is read by computed places."""
    steps = []
    for n in (12, 18, 30):
        x = new_tensor(F32, n)
        view = B.view_2d(x, 3, n // 3, 8, 0)
        out = B.cont(view)
        data = np.arange(n, dtype=np.float32).view(np.uint8)
        steps.append(Step(B.build_forward_expand(out), {x: data}, (out,)))
    case = Case("windows", {}, steps)
    lifted, alone = _each_alone(case)
    for found, expected in zip(lifted, alone, strict=True):
        for t, want in expected.items():
            assert np.array_equal(found[t], want)
    assert _witness(case).compiles == 2


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "sdpa5d"])
@pytest.mark.parametrize("body", ["run=at254.d4", "seqs=3,run=at254.d4", "cache=f32,run=p3.p7.p20"])
def test_attention_forms_agree(attention: str, body: str) -> None:
    """Each form computes what the form by hand computes, lifted or not, within float32's rounding."""
    case = _decoder(body)
    with OpenVinoStateless(attention=attention).open(case) as a, OpenVinoStateless().open(case) as b:
        for step in case.steps:
            for t in case.caches():
                b.write(t, a.read(t))
            found = a.compute(step.graph, step.inputs, step.outputs)
            expected = b.compute(step.graph, step.inputs, step.outputs)
            for t, want in expected.items():
                assert _nmse(found[t], want, t) <= 1e-11
        assert a.witness().compiles <= 2


def test_unknown_options_name_the_known() -> None:
    """Each error lists the legal values."""
    with pytest.raises(UsageError, match="manual, sdpa, sdpa5d"):
        OpenVinoStateless(attention="flash")
    with pytest.raises(UsageError, match="on, off"):
        OpenVinoStateless(dynamic="maybe")


_RUN = """
import hashlib, sys
from backends.openvino import OpenVinoStateless
from backends.openvino.state import OpenVinoStateful
from conformance.suite.decoder import make
case = make(sys.argv[1])
h = hashlib.sha256()
with OpenVinoStateless(cache_dir=sys.argv[2]).open(case) as session:
    for step in case.steps:
        for x in session.compute(step.graph, step.inputs, step.outputs).values():
            h.update(x.tobytes())
    print(h.hexdigest(), *[n for n in session.witness().notes if "cache_dir" in n], sep="|")
"""


def _process(folder: Path) -> list[str]:
    case = f"kv_growth/llama-{TINY},run=at254.d4@1"
    args = [sys.executable, "-W", "error", "-c", _RUN, case, str(folder)]
    return subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip().split("|")


def test_a_warm_cache_dir_gives_what_a_cold_one_gives(tmp_path: Path) -> None:
    """A new process loads models; broken and foreign files are compiled again, and the witness says so."""
    cold, note = _process(tmp_path)
    assert note == "2 models compiled and kept in cache_dir"
    assert _process(tmp_path) == [cold, "2 models loaded from cache_dir"]
    first, second = sorted(tmp_path.iterdir())
    broken = bytearray(first.read_bytes())
    broken[len(broken) // 2] ^= 1
    first.write_bytes(broken)
    second.write_bytes(b"no model")
    again = "2 models in cache_dir broken or of another origin, compiled again"
    assert _process(tmp_path) == [cold, again]
    second.write_bytes(first.read_bytes())
    found, *notes = _process(tmp_path)
    assert found == cold
    assert notes == [again.replace("2", "1", 1), "1 models loaded from cache_dir"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_graph_may_be_run_again_after_others() -> None:
    """A session knows its graphs: running one again, or a copy of it, gives the same."""
    case = _decoder("run=at254.d4")
    step = case.steps[0]
    with OpenVinoStateless().open(case) as session:
        before = {t: session.read(t) for t in case.caches()}
        first = session.compute(step.graph, step.inputs, step.outputs)
        for other in case.steps[1:]:
            session.compute(other.graph, other.inputs, other.outputs)
        for graph in (step.graph, Graph(step.graph.nodes)):
            for t, data in before.items():
                session.write(t, data)
            again = session.compute(graph, step.inputs, step.outputs)
            assert all(np.array_equal(again[t], first[t]) for t in step.outputs)
