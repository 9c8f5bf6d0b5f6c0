"""The stateful OpenVINO adapter: whatever a trajectory does to its caches, they and the outputs are the reference's."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.openvino.state import OpenVinoStateful
from conformance.backend.interface import Backend, Witness
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.ops.build import Builder
from conformance.ggml.quants import from_float
from conformance.ggml.tensor import Bytes, Tensor, nbytes, new_tensor
from conformance.ggml.types import BF16, F16, F32, I64, Q8_0, GGMLType
from conformance.judge.judge import judge_step
from conformance.judge.verdict import Verdict
from conformance.llama import captured
from conformance.llama.zoo import family as zoo
from conformance.run.runner import Runner
from conformance.suite import FAMILIES
from conformance.suite.decoder import make

openvino: Any = importlib.import_module("openvino")  # after the adapter, which keeps its telemetry from the network
B = Builder()
HEADS, SIZE, CELLS, STREAMS = 2, 32, 40, 3
Cells = list[list[int]]
"""The cells that a step writes, for each stream it attends to."""


@pytest.fixture(scope="module")
def ov() -> OpenVinoStateful:
    """One backend for all tests: its requests and their variables go from session to session."""
    return OpenVinoStateful()


def _floats(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _bytes(x: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


class Trajectory:
    """Steps of one attention layer over the caches `k` and `v`, as llama.cpp builds them."""

    def __init__(self, type_: GGMLType = F16, *, filled: bool = False, seed: int = 0) -> None:
        self.k, self.v = (new_tensor(type_, HEADS * SIZE, CELLS, STREAMS, name=n) for n in ("k", "v"))
        count = HEADS * SIZE * CELLS * STREAMS
        self.start = {t: from_floats(type_, _floats(count, seed=i) * filled) for i, t in enumerate((self.k, self.v))}
        self.steps: list[Step] = []
        self.seed = seed
        self.seen: list[set[int]] = [set() for _ in range(STREAMS)]

    def attend(
        self, cells: Cells, *, first: int = 0, n_kv: int = CELLS, hide: tuple[int, ...] = (), op: str = "SET_ROWS"
    ) -> None:
        """Write `cells` (of one stream, and in line, by CPY) and attend to all written so far but those in `hide`."""
        streams, n, seed = len(cells), len(cells[0]), self.seed + 7 * len(self.steps)
        width, total = HEADS * SIZE, CELLS * STREAMS
        k, v = (new_tensor(F32, width, n * streams, name=f"{t}cur") for t in "kv")
        q = new_tensor(F32, SIZE, n, 2 * HEADS, streams, name="q")
        ids, mask = new_tensor(I64, n * streams, name="ids"), new_tensor(F16, n_kv, n, 1, streams, name="mask")
        views = []
        for cache, new in ((self.k, k), (self.v, v)):
            size, row = cache.type.type_size, cache.nb[1]
            if op == "CPY":
                place = B.view_1d(cache, width * n, first * cache.nb[2] + cells[0][0] * row)
                written = B.cpy(new, place)
            else:
                written = B.set_rows(B.reshape_2d(cache, width, total), new, ids)
            view = B.view_4d(cache, SIZE, HEADS, n_kv, streams, size * SIZE, row, cache.nb[2], first * cache.nb[2])
            views.append((written, B.permute(view, 0, 2, 1, 3)))
        out = B.flash_attn_ext(q, views[0][1], views[1][1], mask, 0.2, 0.0, 0.0)
        added = np.full((streams, n, n_kv), -np.inf, np.float16)
        for s, row_cells in enumerate(cells):
            self.seen[first + s].update(row_cells)
            for i in range(n):
                later = set(row_cells[i + 1 :]) | set(hide)
                added[s, i, [c for c in self.seen[first + s] if c not in later and c < n_kv]] = -0.5 * (i % 2)
        flat = np.concatenate([np.array(c) + (first + s) * CELLS for s, c in enumerate(cells)])
        rows = [_floats(n * streams, width, seed=seed + i) for i in range(2)]
        queries = _floats(streams, 2 * HEADS, n, SIZE, seed=seed + 2)
        inputs: dict[Tensor, NDArray[Any]] = {
            k: rows[0],
            v: rows[1],
            q: queries,
            ids: flat.astype(np.int64),
            mask: added,
        }
        graph = B.build_forward_expand(views[0][0], views[1][0], out)
        inputs = {t: x for t, x in inputs.items() if t in set(graph.tensors())}
        self.steps.append(Step(graph, {t: _bytes(x) for t, x in inputs.items()}, (out,)))

    def scale(self, by: float) -> None:
        """Change every cell of K in place: no log can do that."""
        node = B.cpy(B.scale(B.cast(self.k, F32), by), self.k)
        self.steps.append(Step(B.build_forward_expand(node), {}, ()))

    def case(self) -> Case:
        """All steps."""
        return Case("trajectory", dict(self.start), self.steps)


def from_floats(type_: GGMLType, x: NDArray[np.float32]) -> Bytes:
    """Bytes of `type_`."""
    return _bytes(np.asarray(from_float(type_, x)))


def _run(backend: Backend, case: Case) -> tuple[list[dict[Tensor, Bytes]], Witness]:
    case.validate()
    found = []
    with backend.open(case) as session:
        for step in case.steps:
            got = dict(session.compute(step.graph, step.inputs, step.outputs))
            found.append({**got, **{t: session.read(t) for t in case.caches()}})
        return found, session.witness()


def _agree(ov: Backend, trajectory: Trajectory) -> Witness:
    """Run on both; caches must agree to the byte."""
    case = trajectory.case()
    found, witness = _run(ov, case)
    expected, _ = _run(CpuBackend(), case)
    for k, (f, e) in enumerate(zip(found, expected, strict=True)):
        for t, want in e.items():
            if t in case.persistent:
                assert np.array_equal(f[t], want), f"step {k}: {t}"
            else:
                np.testing.assert_allclose(f[t].view("<f4"), want.view("<f4"), rtol=2e-4, atol=2e-5, err_msg=f"{k}")
    return witness


def test_appending_is_one_log_and_one_model(ov: OpenVinoStateful) -> None:
    """A prompt and ten tokens: two models, the attention fused, the caches appended to and not copied."""
    t = Trajectory()
    t.attend([[0, 1, 2, 3, 4]], n_kv=8)
    for i in range(5, 15):
        t.attend([[i]], n_kv=8 if i < 8 else 16)
    w = _agree(ov, t)
    assert w.state == "fused"
    assert w.compiles == 2
    assert w.kernels["ScaledDotProductAttention"] == 2
    assert "Concat" not in w.kernels


def test_copies_append_too(ov: OpenVinoStateful) -> None:
    """CPY into a view at a place that moves from step to step: still one model for all decode steps."""
    t = Trajectory()
    t.attend([[0, 1, 2, 3]], op="CPY")
    for i in (4, 5, 6, 3, 4):
        t.attend([[i]], op="CPY", n_kv=8 if i % 2 else 16)
    w = _agree(ov, t)
    assert (w.state, w.compiles) == ("fused", 2)


@pytest.mark.parametrize("type_", [F16, BF16, F32], ids=str)
def test_a_rewind_overwrites_cells(ov: OpenVinoStateful, type_: GGMLType) -> None:
    """Cells written again show the new row, cells beyond keep the old one's bytes though nothing attends to them."""
    t = Trajectory(type_)
    t.attend([[0, 1, 2, 3, 4, 5]])
    t.attend([[6]])
    t.seen = [{0, 1, 2}, set(), set()]
    t.attend([[3]])
    t.attend([[4]])
    t.attend([[0, 1, 2, 3, 4, 5]])  # a second prompt
    t.attend([[6]])
    assert _agree(ov, t).state == "fused"


def test_a_log_with_little_left_of_it_is_laid_out_anew(ov: OpenVinoStateful, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the same cells over and over does not let the variables grow without end."""
    monkeypatch.setattr("backends.openvino.state.append_log.SPARE", 3)
    t = Trajectory()
    t.attend([[0, 1, 2]])
    for i in range(12):
        t.attend([[i % 3]])
    assert _agree(ov, t).state == "fused"


@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_nobody_sees_any_more_reaches_nobody(ov: OpenVinoStateful, bad: float, which: int) -> None:
    """A row of K or V with NaN or infinity is in the outputs of those who see it, and in none after it is hidden.

    Hidden by the mask, or because its cell was written again.
    """

    def poisoned() -> None:
        step = t.steps[-1]
        leaf = [x for x in step.inputs if x.ne == (HEADS * SIZE, 1, 1, 1)][which]
        data = step.inputs[leaf].view("<f4").copy()
        data[:SIZE] = bad
        step.inputs[leaf] = _bytes(data)

    t = Trajectory(F32)
    t.attend([[0, 1, 2]])
    t.attend([[3]])
    poisoned()
    t.attend([[4]], hide=(3,))
    t.attend([[5]], hide=(3,))
    t.attend([[3, 7]])
    t.attend([[8]])
    poisoned()
    t.attend([[8]])
    t.attend([[9]])
    w = _agree(ov, t)
    assert w.state == "fused"


def test_sequences_share_cells_in_any_order(ov: OpenVinoStateful) -> None:
    """One stream of many sequences: cells are taken as they are free, and freed ones are used again."""
    t = Trajectory()
    t.attend([[5, 3, 9]])
    t.attend([[0, 20]], hide=(3,))
    t.attend([[3, 9]], hide=(5, 0))
    t.attend([[1]], n_kv=12)
    assert _agree(ov, t).state == "fused"


def test_streams_come_and_go(ov: OpenVinoStateful) -> None:
    """Streams of different lengths, and steps that attend to some of them only."""
    t = Trajectory()
    t.attend([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    t.attend([[3], [3], [3]])
    t.attend([[4]], first=1)
    t.attend([[5]], first=1)
    t.attend([[4], [6], [4]])
    t.attend([[4, 5], [5, 6]], first=1)
    assert _agree(ov, t).state == "fused"


def test_forms_change_in_the_middle(ov: OpenVinoStateful) -> None:
    """A step that no log can do takes the caches out of it, and the next one puts them back."""
    t = Trajectory()
    t.attend([[0, 1, 2]])
    t.scale(0.5)
    t.attend([[3]])
    t.scale(2.0)
    t.scale(2.0)
    t.attend([[4]])
    assert _agree(ov, t).state == "fused, slots"


def test_cells_that_were_there_before(ov: OpenVinoStateful) -> None:
    """Rows that no step wrote are attended to as the session found them."""
    t = Trajectory(filled=True)
    t.seen = [{0, 1, 7}, {3}, set()]
    t.attend([[2], [4]])
    t.attend([[3], [5]])
    assert _agree(ov, t).state == "fused"


def test_a_query_that_sees_nothing_gives_zeros(ov: OpenVinoStateful) -> None:
    """Where the mask hides everything from a row, as in ggml."""
    t = Trajectory()
    t.attend([[0, 1]])
    t.attend([[2]], hide=(0, 1, 2))
    t.attend([[3]])
    assert _agree(ov, t).state == "fused, slots"


def test_a_quantised_cache_is_a_slot(ov: OpenVinoStateful) -> None:
    """Blocks cannot be rows of a log."""
    t = Trajectory(Q8_0)
    t.attend([[0, 1, 2]])
    t.attend([[3]])
    assert _agree(ov, t).state == "slots"


@pytest.mark.parametrize("type_", [F32, F16, BF16], ids=str)
def test_a_variable_keeps_minus_zero(type_: GGMLType) -> None:
    """Zeros keep their sign in what a step writes, in what it leaves alone, and in a step that only reads."""
    ov = OpenVinoStateful(fusion="on")  # without, a multiplication by a constant adds +0
    cache, new, ids = new_tensor(type_, 8, 4), new_tensor(F32, 8, 1), new_tensor(I64, 1)
    x = np.array([-0.0, 0.0, 1.0, -1.0, -0.0, np.inf, -np.inf, 2.0**-12], np.float32)
    rows = from_floats(type_, np.stack([x] * 4))
    write = B.set_rows(cache, new, ids)
    only = B.scale(cache, 2.0) if type_ is F32 else B.cast(cache, F32)
    steps = [Step(B.build_forward_expand(write), {new: _bytes(x[::-1]), ids: _bytes(np.array([2]))}, ()),
             Step(B.build_forward_expand(only), {}, (only,)),
             Step(B.build_forward_expand(write), {new: _bytes(x), ids: _bytes(np.array([0]))}, ())]  # fmt: skip
    case = Case("zeros", {cache: rows}, steps)
    found, expected = _run(ov, case)[0], _run(CpuBackend(), case)[0]
    for f, e in zip(found, expected, strict=True):
        assert np.array_equal(f[cache], e[cache])
    assert np.array_equal(found[1][only].view("<f4"), expected[1][only].view("<f4"))


def test_a_weight_copied_into_a_cache_is_there(ov: OpenVinoStateful) -> None:
    """A cache whose new value is computed from constants alone takes it; the CPU plugin would keep the old one."""
    weight, cache = (new_tensor(Q8_0, 64, *ne, name=n) for n, ne in (("w", (2, 3)), ("cache", (3, 2))))
    held = {t: from_floats(Q8_0, _floats(384, seed=i)) for i, t in enumerate((weight, cache))}
    out = B.cpy(B.permute(weight, 0, 2, 1, 3), cache)
    case = Case("copy", held, [Step(B.build_forward_expand(out), {}, (out,))])
    assert np.array_equal(_run(ov, case)[0][0][cache], _run(CpuBackend(), case)[0][0][cache])


def test_write_and_reset_in_the_middle(ov: OpenVinoStateful) -> None:
    """What the host writes is what the next step finds; a new session of the same case begins anew."""
    t = Trajectory()
    t.attend([[0, 1, 2]])
    t.attend([[3]])
    case = t.case()
    results = []
    for backend in (ov, CpuBackend()):
        with backend.open(case) as session:
            for step in case.steps:
                session.compute(step.graph, step.inputs, step.outputs)
            session.write(t.k, _bytes(_floats(nbytes(t.k) // 2, seed=5).astype(np.float16)))
            (out,) = session.compute(case.steps[1].graph, case.steps[1].inputs, case.steps[1].outputs).values()
            session.write(t.v, np.zeros(nbytes(t.v), np.uint8))
            (last,) = session.compute(case.steps[0].graph, case.steps[0].inputs, case.steps[0].outputs).values()
            caches = [session.read(cache).view("<f2") for cache in (t.k, t.v)]
            results.append([out.view("<f4"), last.view("<f4"), *caches])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found.astype("f8"), expected.astype("f8"), rtol=1e-4, atol=1e-5)


def test_two_sessions_take_turns(ov: OpenVinoStateful) -> None:
    """Sessions share compiled models and never one another's state."""
    t = Trajectory()
    t.attend([[0, 1, 2]])
    for i in range(3, 6):
        t.attend([[i]])
    other = Trajectory(seed=1000)
    other.attend([[4, 5, 6]])
    for i in range(7, 10):
        other.attend([[i]])
    cases = t.case(), other.case()
    alone = [_run(ov, c)[0] for c in cases]
    with ov.open(cases[0]) as a, ov.open(cases[1]) as b:
        for k in range(4):
            for session, case, found in ((a, cases[0], alone[0][k]), (b, cases[1], alone[1][k])):
                step = case.steps[k]
                for node, data in session.compute(step.graph, step.inputs, step.outputs).items():
                    assert np.array_equal(data, found[node])
                for cache in case.caches():
                    assert np.array_equal(session.read(cache), found[cache])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_trajectory(ov: OpenVinoStateful, data: st.DataObject) -> None:
    """Cells, streams, hidden cells and changes of form at random."""
    t = Trajectory(data.draw(st.sampled_from([F16, F32])), filled=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 4)) == 0:
            t.scale(0.5)
            continue
        first = data.draw(st.integers(0, STREAMS - 1))
        streams, n = data.draw(st.integers(1, STREAMS - first)), data.draw(st.integers(1, 2))
        cells = st.lists(st.integers(0, CELLS - 1), min_size=n, max_size=n, unique=True)
        t.attend([data.draw(cells) for _ in range(streams)], first=first)
    _agree(ov, t)


@pytest.mark.parametrize("case_id", captured.FAMILY.ids("full"))
def test_captured_trajectories_are_fused(ov: OpenVinoStateful, case_id: str) -> None:
    """llama.cpp's own decode steps are one model, whatever n_kv is."""
    case = captured.FAMILY.build(case_id)
    found, w = _run(ov, case)
    assert w.state == "fused"
    assert w.compiles == 2
    expected, _ = _run(CpuBackend(), case)
    for k, (f, e) in enumerate(zip(found, expected, strict=True)):
        over = [(j.tensor, j.used) for j in judge_step(case, k, e, f, EXACT) if j.used > 1]
        assert over == [], k


@pytest.mark.parametrize("body", ["run=at254.d4", "fa=0,run=at254.d4.reset.p3", "cache=q8_0,head=32,seqs=2,run=p3.d2"])
def test_the_translation_alone_keeps_caches_too(body: str) -> None:
    """At stage `translate` variables go through `Model.evaluate` as parameters and results."""
    case = make(f"kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,{body}@1")
    with OpenVinoStateful(stage="translate").open(case) as a, CpuBackend().open(case) as b:
        for step in case.steps:
            found, want = (s.compute(step.graph, step.inputs, step.outputs) for s in (a, b))
            for t in step.outputs:
                x, y = (np.asarray(v[t].view(np.float32), np.float64) for v in (found, want))
                assert np.sum((x - y) ** 2) <= 1e-9 * np.sum(y**2)
        assert a.witness().stage == "translate"


def test_a_program_serves_caches_of_other_sizes() -> None:
    """Whole variables of 512 cells, then of 1024, which are nothing but other numbers of one template."""
    ov = OpenVinoStateful()
    for more in ("cache=f16", "seqs=3,unified=1,ctx=1024"):
        case = make(f"kv_growth/llama-{more},run=at250.d1.shift9.p30.d2.back4.d2@577")
        found, _ = _run(ov, case)
        expected, _ = _run(CpuBackend(), case)
        for k, (f, e) in enumerate(zip(found, expected, strict=True)):
            assert [j.tensor for j in judge_step(case, k, e, f, EXACT) if j.used > 1] == [], (more, k)


def test_nodes_of_two_models_are_judged_one_by_one() -> None:
    """Parts that share nothing are compiled apart; a session asks such a request for its variables, too."""
    if reason := zoo.available():
        pytest.skip(reason)
    case = FAMILIES["zoo"].build("zoo/jina-bert-v3-seqs=2,nodes=2@904")
    (result,) = Runner().run(Spec("openvino-stateful"), [case])
    assert (result.verdict, result.notes) == (Verdict.PASS, ())
