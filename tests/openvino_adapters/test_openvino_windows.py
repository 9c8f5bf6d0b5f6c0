"""Windows of caches, weights of 16-bit floats: a step costs what it reads, and is right where it writes elsewhere."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.openvino import OpenVinoStateless
from backends.openvino.cache_window import Order
from conformance.backend.interface import Backend, Witness
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.ops.build import Builder
from conformance.ggml.quants import from_float
from conformance.ggml.tensor import Bytes, Tensor, new_tensor
from conformance.ggml.types import BF16, F16, F32, I64, GGMLType
from conformance.judge.judge import judge_step
from conformance.judge.verdict import Verdict
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite import FAMILIES

B = Builder()
HEADS, SIZE, CELLS = 2, 16, 24
WIDTH = HEADS * SIZE


def _floats(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _bytes(x: NDArray[np.float32]) -> Bytes:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _step(cache: Tensor, cells: list[int], n_kv: int, seed: int, *, shift: bool = False) -> Step:
    """Write `cells` of K and multiply its first `n_kv` with a query; if `shift`, all of K is changed in place first."""
    new, q = new_tensor(F32, WIDTH, len(cells)), new_tensor(F32, SIZE, 1, HEADS)
    ids = new_tensor(I64, len(cells))
    before = [B.cpy(B.scale(B.cast(cache, F32), 0.5), cache)] if shift else []
    written = B.set_rows(cache, new, ids)
    size, row = cache.type.type_size, cache.nb[1]
    view = B.permute(B.view_3d(cache, SIZE, HEADS, n_kv, size * SIZE, row, 0), 0, 2, 1, 3)
    out = B.mul_mat(view, q)
    inputs = {new: _bytes(_floats(len(cells), WIDTH, seed=seed)), q: _bytes(_floats(HEADS, 1, SIZE, seed=seed + 1))}
    inputs[ids] = np.array(cells, np.int64).view(np.uint8)
    return Step(B.build_forward_expand(*before, written, out), inputs, (out,))


def _case(type_: GGMLType, *steps: tuple[list[int], int, bool]) -> Case:
    cache = new_tensor(type_, WIDTH, CELLS)
    start = np.ascontiguousarray(from_float(type_, _floats(CELLS, WIDTH, seed=9))).reshape(-1).view(np.uint8)
    built = [_step(cache, cells, n, 10 + 2 * k, shift=shift) for k, (cells, n, shift) in enumerate(steps)]
    return Case("windows", {cache: start}, built)


def _right(case: Case) -> Witness:
    """The witness of a run whose outputs and caches are the reference's after every step."""
    found: list[list[dict[Tensor, Bytes]]] = []
    backends: list[Backend] = [CpuBackend(), OpenVinoStateless()]
    for backend in backends:
        with backend.open(case) as session:
            values = []
            for step in case.steps:
                got = dict(session.compute(step.graph, step.inputs, step.outputs))
                values.append({**got, **{t: session.read(t) for t in case.caches()}})
            found.append(values)
            witness = session.witness()
    for k, (want, values) in enumerate(zip(*found, strict=True)):
        assert [j.used for j in judge_step(case, k, want, values, EXACT) if j.used > 1] == []
    return witness


@pytest.mark.parametrize("type_", [F32, F16], ids=str)
def test_a_row_beyond_the_cells_that_are_read_is_stored_and_not_read(type_: GGMLType) -> None:
    """Decoding, then a step that writes cell 20 and reads 8, alone and beside one that it reads; then 20 is read."""
    plain = ([3], 8, False)
    w = _right(_case(type_, plain, ([20], 8, False), ([4, 21], 8, False), ([5], 24, False), plain))
    assert any("beyond the cells" in note for note in w.notes)


@pytest.mark.parametrize("type_", [F32, F16], ids=str)
def test_programs_that_take_a_cache_in_another_order_take_turns(type_: GGMLType) -> None:
    """A graph that changes the whole cache has it as ggml does; the decoding before and after has it by heads."""
    _right(_case(type_, ([1], 8, False), ([2], 8, True), ([3], 16, False), ([4], 16, True), ([5], 24, False)))


def test_an_order_and_its_table_undo_each_other() -> None:
    """What lies by heads is shown by cells over the same memory, so that writing there writes the cache."""
    order = Order((CELLS, HEADS, SIZE), (1, 0, 2))
    x = _floats(CELLS, WIDTH, seed=1)
    held = order.ordered(x)
    assert held.shape == order.shape
    assert order.cells == 1
    assert np.array_equal(order.table(held).reshape(CELLS, WIDTH), x)
    order.table(held)[5] = 7.0
    assert (held[:, 5] == 7).all()


@pytest.mark.parametrize("type_", [F16, BF16], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_matrix_of_16_bit_floats_is_held_as_it_is(type_: GGMLType, steps: int) -> None:
    """A window's weight is a constant in one step as in several, with exact values.

    The kernel's copy has 16 bits a number. BF16 is an input where the processor does not know it.
    """
    w, x = new_tensor(type_, 256, 64), new_tensor(F32, 256, 3)
    out = B.mul_mat(w, x)
    values = np.ascontiguousarray(from_float(type_, _floats(64, 256, seed=1))).reshape(-1).view(np.uint8)
    step = Step(B.build_forward_expand(out), {x: _bytes(_floats(3, 256, seed=2))}, (out,))
    witness = _right(Case("halves", {w: values}, [step] * steps))
    if type_ is F16 or OpenVinoStateless()._compiler.knows_bf16():
        assert witness.bytes["weights"] == witness.bytes["packed copies"] == 64 * 256 * 2
    else:
        assert witness.bytes.get("packed copies", 0) == 0


def _batch(count: int, *, chained: bool) -> Case:
    """One step of `count` additions, of one another's results if `chained`."""
    x = new_tensor(F32, 8)
    inputs, outputs = {x: _bytes(_floats(8, seed=1))}, [x]
    for i in range(count):
        a = new_tensor(F32, 8)
        inputs[a] = _bytes(_floats(8, seed=2 + i))
        outputs.append(B.add(outputs[-1] if chained else B.scale(a, 2.0), a))
    used = {t: data for t, data in inputs.items() if chained or t is not x}
    return Case("batch", {}, [Step(B.build_forward_expand(*outputs[1:]), used, tuple(outputs[1:]))])


@pytest.mark.parametrize(("count", "chained", "models"), [(40, False, 2), (40, True, 1), (4, False, 1)])
def test_what_hangs_together_by_nothing_is_compiled_at_the_same_time(count: int, chained: bool, models: int) -> None:
    """Many small graphs are two models, one graph and a few are one; the values are the reference's either way."""
    case = _batch(count, chained=chained)
    step = case.steps[0]
    backend = OpenVinoStateless()
    backend._compiler = replace(backend._compiler, split=True)
    with backend.open(case) as session, CpuBackend().open(case) as reference:
        got, want = (s.compute(step.graph, step.inputs, step.outputs) for s in (session, reference))
        assert all(np.allclose(got[t].view(np.float32), want[t].view(np.float32), rtol=1e-6) for t in step.outputs)
        (program,) = session.programs()  # type: ignore[attr-defined]  # an OpenVinoSession
        assert len(getattr(program.compiled, "_compiled", [None])) == models
        assert session.witness().compiles == 1


def test_a_cache_that_becomes_an_input_lies_as_in_ggml_again() -> None:
    """The cache lies in a window's order, then a graph that reads nothing of it makes it equal to one of its inputs."""
    case = _case(F32, ([0, 1], 8, False), ([2], 8, False))
    (cache,) = case.caches()
    x = new_tensor(F32, WIDTH, CELLS)
    made = B.cpy(x, cache)
    step = Step(B.build_forward_expand(made), {x: _bytes(_floats(CELLS, WIDTH, seed=5))}, (made,))
    _right(replace(case, steps=[case.steps[0], step, case.steps[1]]))


@pytest.mark.parametrize("arch", ["bert", "jina-bert-v2", "modern-bert"])
def test_attention_without_a_cache_takes_fewer_tokens_than_before(arch: str) -> None:
    """The second step of an encoder is shorter: every row of its result is written."""
    ids = [i for i in FAMILIES["blocks"].ids("standard") if f"/{arch}-" in i and "block=attention@" in i]
    with closing(Runner()) as runner:
        results = [r for i in ids for r in runner.run(Spec("openvino-stateless"), [build(i)])]
    assert results
    assert all(r.verdict is Verdict.PASS for r in results), [r.sentence() for r in results]
