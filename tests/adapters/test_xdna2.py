"""xdna2: what it takes, what it computes to the bit, what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from here import Here
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends import xdna2
from backends.cpu import CpuBackend
from backends.xdna2 import (
    ARITHMETIC,
    COLUMNS,
    DECODE_N,
    LEAST_N,
    PREFILL_N,
    Array,
    Context,
    Xdna2Backend,
    Xdna2Session,
    padded,
)
from conformance.backend.interface import Backend
from conformance.backend.kernel import KernelSession
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml import quants
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, Bytes, Tensor, new_tensor
from conformance.ggml.types import F16, F32, Q4_0, Q6_K, Q8_0, GGMLType
from conformance.judge.judge import judge_node
from conformance.judge.verdict import FAILURES, Verdict
from conformance.run.execute import execute
from conformance.run.isolation.isolate import open_backend
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite import FAMILIES
from conformance.suite.family import LEVELS, Level

B = Builder()
F32Array = NDArray[np.float32]


def product(w: Tensor, x: Tensor) -> Tensor:
    """A MUL_MAT that is computed."""
    y = B.mul_mat(w, x)
    y.flags |= FLAG_COMPUTE
    return y


def raw(type_: GGMLType, x: F32Array) -> Bytes:
    """The bytes of `x` in a type."""
    data = x.astype(type_.dtype) if type_.dtype is not None else quants.from_float(type_, x)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def one(type_: GGMLType, k: int, m: int, n: int, seed: int = 0) -> tuple[Case, Tensor]:
    """One product with weights of `type_`, as a case."""
    rng = np.random.default_rng(seed)
    w, x = new_tensor(type_, k, m, name="blk.0.w.weight"), new_tensor(F32, k, n, name="x")
    y = product(w, x)
    given = {x: raw(F32, rng.standard_normal((n, k)).astype(np.float32))}
    weights = raw(type_, rng.standard_normal((m, k)).astype(np.float32))
    return Case("test/xdna2@0", {w: weights}, [Step(Graph([y]), given, (y,))]), y


def values(backend: Backend, case: Case, y: Tensor) -> F32Array:
    """What `backend` gives for the only step."""
    found: F32Array = execute(backend, case).steps[0].outputs[y].view(np.float32).reshape(y.shape)[0, 0]
    return found


def one_by_one(x: F32Array) -> tuple[NDArray[np.int64], F32Array]:
    """The rule in scalars: a scale of the largest magnitude over 127, halves away from zero."""
    q, scales = np.zeros(x.shape, np.int64), np.zeros(len(x), np.float32)
    for i, row in enumerate(x):
        d = np.float32(np.abs(row).max() / np.float32(127))
        inv = np.float32(1) / d if d else np.float32(0)
        scales[i] = d
        for j, v in enumerate(row):
            y = float(np.float32(v * inv))
            q[i, j] = int(np.copysign(np.floor(abs(y) + 0.5), y))
    return q, scales


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(1, 5), st.sampled_from([F32, F16, Q8_0]))
def test_a_product_is_the_integers_sum_and_one_scale(seed: int, n: int, m: int, type_: GGMLType) -> None:
    """Bit for bit: both operands in int8 by rows, an exact integer sum, times the product of the two scales."""
    case, y = one(type_, 32, m, n, seed)
    (w,) = case.persistent
    x = case.steps[0].inputs[y.src[1]].view(np.float32).reshape(n, 32)  # type: ignore[index]  # a MUL_MAT has two src
    weights = case.persistent[w].reshape(m, -1)
    real = (
        weights.view(type_.dtype).astype(np.float32)
        if type_.dtype
        else quants.to_float(type_, weights.reshape(m, 1, -1))
    )
    (q_w, d_w), (q_x, d_x) = one_by_one(real.reshape(m, 32)), one_by_one(x)
    expected = (q_x @ q_w.T).astype(np.float32) * (d_x[:, None] * d_w[None])
    assert np.array_equal(values(Xdna2Backend(k="32"), case, y), expected)


@pytest.mark.parametrize(("type_", "k", "n"), [(F32, 2048, 1), (Q4_0, 5632, 3), (Q6_K, 14336, 1), (F16, 4096, 70)])
def test_the_reference_imitates_it_to_rounding(type_: GGMLType, k: int, n: int) -> None:
    """In the declared arithmetic what is left is float32 rounding; against exact values the 8 bits show."""
    case, y = one(type_, k, 24, n)
    backend = Xdna2Backend()
    got = values(backend, case, y)
    want = values(CpuBackend().computing_in(backend.arithmetic()), case, y)
    exact = values(CpuBackend(), case, y)
    near = judge_node(y, want.view(np.uint8).reshape(-1), got.view(np.uint8).reshape(-1), ARITHMETIC)
    far = judge_node(y, exact.view(np.uint8).reshape(-1), got.view(np.uint8).reshape(-1), ARITHMETIC)
    assert near.used < 0.1
    assert near.difference.nmse < 2e-14
    assert 1e-5 < far.difference.nmse < 1e-3
    assert far.used > 1


def test_a_wrong_scale_of_one_row_is_seen() -> None:
    """The budget is of rounding: a thousandth in one of 24 rows is over it."""
    case, y = one(F32, 2048, 24, 8)
    want = values(CpuBackend().computing_in(ARITHMETIC), case, y)
    got = want.copy()
    got[:, 5] *= np.float32(1.001)
    assert judge_node(y, want.view(np.uint8).reshape(-1), got.view(np.uint8).reshape(-1), ARITHMETIC).used > 1


@given(st.integers(1, 3000))
def test_rows_are_padded_to_the_tile(n: int) -> None:
    """16 or 64 rows for decoding, whole tiles of 256 above; never fewer than asked for."""
    whole = padded(n)
    assert whole >= n
    assert whole in {LEAST_N, DECODE_N} or (n > DECODE_N and whole % PREFILL_N == 0)
    assert whole - n < (LEAST_N if n <= LEAST_N else DECODE_N if n <= DECODE_N else PREFILL_N)


def test_four_contexts_at_a_time() -> None:
    """A fifth K takes the place of the one used longest ago, and each time it does is counted."""
    array = Array((1, 2, 3, 4, 5))

    def use(ks: Sequence[int]) -> int:
        for k in ks:
            array.run(np.ones((2, k), np.int8), np.ones((1, k), np.int8))
        return array.switches

    assert use([1, 2, 3, 4, 1, 2]) == 0
    assert use([5]) == 1
    assert [c.k for c in array.loaded] == [4, 1, 2, 5]
    assert use([3]) == 2
    assert use([4]) == 3


@given(st.lists(st.integers(1, 8), max_size=40), st.sampled_from([1, 2, 3, 4, 5, 8, 16]))
def test_contexts_never_take_more_columns_than_there_are(ks: list[int], columns: int) -> None:
    """As many contexts as fit, each for its own K, the least recently used goes; whatever goes, products are right."""
    array = Array(tuple(range(1, 9)), columns)
    held: list[int] = []
    misses = 0
    for k in ks:
        weights, x = np.full((2, k), 3, np.int8), np.arange(k, dtype=np.int8)[None]
        assert np.array_equal(array.run(weights, x), np.full((1, 2), 3 * x.sum()))
        misses += k not in held and len(held) == COLUMNS // columns
        held = [*(h for h in held if h != k), k][-(COLUMNS // columns) :]
        assert [c.k for c in array.loaded] == held
        assert sum(c.columns for c in array.loaded) <= COLUMNS
    assert array.switches == misses


def test_a_context_without_columns_is_refused() -> None:
    """As the driver refuses a `hw_context`: with what is free, and no product."""
    array = Array((32,), 4, [Context(k, 5) for k in (1, 2, 3)])
    array.columns = 11
    with pytest.raises(BackendError, match=r"11 columns for a context of K=32 expected, 6 of 16 are free"):
        array.run(np.ones((2, 32), np.int8), np.ones((1, 32), np.int8))


def test_weights_are_kept_in_int8_until_they_are_written() -> None:
    """The second run converts nothing; a write is seen by the next."""
    case, y = one(F32, 64, 8, 2)
    step, (w,) = case.steps[0], case.persistent
    with Xdna2Backend(k="64").open(case) as session:
        first = session.compute(step.graph, step.inputs, step.outputs)[y]
        assert session.witness().bytes["int8"] == 8 * 64 + 8 * 4
        assert np.array_equal(session.compute(step.graph, step.inputs, step.outputs)[y], first)
        session.write(w, (-case.persistent[w].view(np.float32)).view(np.uint8))
        negative = session.compute(step.graph, step.inputs, step.outputs)[y]
        assert np.array_equal(negative.view(np.float32), -first.view(np.float32))
        witness = session.witness()
    assert witness.kernels == {"K=64 TILE_N=64": 3}
    assert "no hardware" in witness.notes[0]
    assert "42 rows of padding beside 6" in witness.notes[2]


def _node(k: int = 64, n: int = 2, **how: object) -> Tensor:
    w = new_tensor(
        F32, k, 8, *([3] if how.get("batched") else []), name="w", flags=FLAG_INPUT if how.get("input") else 0
    )
    x = new_tensor(F16 if how.get("half") else F32, k, n, *([3] if how.get("batched") else []), name="x")
    if how.get("computed"):
        w = B.scale(w, 2.0)
    if how.get("strided"):
        x = B.permute(new_tensor(F32, k, 3, n), 0, 2, 1, 3)
    return product(w, x)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (_node(k=96), "K=96 has no kernel slot; supported: K=32, 64"),
        (_node(computed=True), "must be a weight"),
        (_node(input=True), "must be a weight"),
        (_node(batched=True), "one matrix of weights"),
        (_node(half=True), "f32 expected, f16"),
        (_node(strided=True), "contiguous activations"),
        (_node(n=5), "n=5 is routed elsewhere, n from 2 to 4"),
        (_node(n=1), "n=1 is routed elsewhere"),
        (B.scale(new_tensor(F32, 4), 2.0), "SCALE: xdna2 has no kernel"),
    ],
)
def test_each_refusal_says_why(node: Tensor, reason: str) -> None:
    """One op, by the rules of its kernels; views are taken, as they compute nothing."""
    backend = Xdna2Backend(k="32+64", min_n="2", max_n="4")
    answer = backend.supports_op(node)
    assert not answer
    assert reason in answer.reason
    assert backend.supports_op(_node())
    assert backend.supports_op(B.reshape_1d(new_tensor(F32, 4, 2), 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": "1+2+3+4+5+6+7+8+9"}, "1 to 8"),
        ({"k": "0"}, "1 to 8"),
        ({"k": "a"}, "k: a whole number"),
        ({"max_n": "-1"}, "max_n: a whole number"),
        ({"columns": "17"}, "columns: 1 to 16"),
        ({"columns": "0"}, "columns: 1 to 16"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], message: str) -> None:
    """With the option's name and what was expected."""
    with pytest.raises(UsageError, match=message):
        Xdna2Backend(**options)


def test_it_says_what_it_is() -> None:
    """By entry point and spec, and never as hardware."""
    backend = open_backend(Spec.parse("xdna2?k=64+128"))
    try:
        info = backend.info()
        assert "no hardware" in info.description
        assert "K of 64, 128" in info.description
        assert backend.arithmetic().name == "xdna2"
        assert backend.buffer_types()[0].is_host
    finally:
        backend.close()


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_has_products_that_it_takes(level: Level) -> None:
    """Of each slot's K at least one, with few rows and with more than a tile has, of several types of weights."""
    backend = Xdna2Backend()
    products = [build(i).steps[0].graph.nodes for i in FAMILIES["ops"].ids(level) if i.startswith("ops/MUL_MAT-")]
    taken = [n for nodes in products for n in nodes if n.op == "MUL_MAT" and backend.supports_op(n)]
    sources = [(w, x) for w, x in ((n.src[0], n.src[1]) for n in taken) if w is not None and x is not None]
    assert {w.ne[0] for w, _ in sources} == {2048, 4096, 5632, 14336}
    assert len({w.type for w, _ in sources}) >= 6
    assert {padded(x.ne[1]) for _, x in sources} >= {LEAST_N, DECODE_N, PREFILL_N}


@pytest.mark.parametrize("family", ["kv_growth", "gqa", "blocks"])
def test_a_scheduler_gives_it_the_projections_of_a_trajectory(family: str) -> None:
    """At smoke already: what it takes of a decoder runs on it, and the whole is right."""
    ids = [i for i in FAMILIES[family].ids("smoke") if "embd=2048" in i]
    assert ids
    runner = Runner()
    try:
        for result in runner.run(Spec.parse("sched?devices=xdna2,cpu"), [build(i) for i in ids]):
            assert result.verdict is Verdict.PASS, result.sentence()
            assert "xdna2" in str(result.witness), result.case
    finally:
        runner.close()


FAMILIES_OF_PRODUCTS = ("ops", "blocks", "weight_placement", "alias", "relations")
"""Families with cases of matrix products only; others are about caches and attention, or have rows of 64 at most."""


def test_it_takes_part_alone_in_each_family_of_products() -> None:
    """A run of `smoke` on xdna2 by itself executes something in each of them, to the end and right."""
    runner = Runner()
    try:
        for name in FAMILIES_OF_PRODUCTS:
            backend = runner.backend(Spec("xdna2"))
            cases = [build(i) for i in FAMILIES[name].ids("smoke") if "2048" in i]
            taken = [c for c in cases if all(all(backend.supports(s.graph)) for s in c.steps)]
            assert taken, name
            for result in runner.run(Spec("xdna2"), taken):
                assert result.verdict is Verdict.PASS, result.sentence()
    finally:
        runner.close()


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Xdna2Session, "write", KernelSession.write)


def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Array, "_free", lambda _: COLUMNS)


def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xdna2, "padded", lambda n: 8 if n <= 8 else padded(n))


def _first_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Array._context
    monkeypatch.setattr(Array, "_context", lambda a, k, n: a.loaded[0] if a.loaded else own(a, k, n))


def _latest_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Array._context
    monkeypatch.setattr(Array, "_context", lambda a, k, n: a.loaded[-1] if a.loaded else own(a, k, n))


def _next_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is at least as long, as one that rounds up finds."""
    own, slots = Array._context, (4096, 5632, 14336)
    monkeypatch.setattr(Array, "_context", lambda a, k, n: own(a, next((s for s in slots if s > k), k), n))


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (None, ""),
        (_stale, "weights written in mid-session = the same from the start"),
        (_no_limit, "counters[columns] <=16; the witness has 32"),
        (_few_rows, "counters[least_rows] >=16; the witness has 8"),
        (_first_slot, "MUL_MAT"),
        (_latest_slot, "MUL_MAT"),
        (_next_slot, "MUL_MAT"),
    ],
)
def test_its_limits_are_judged_by_cases_that_it_runs_alone(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None] | None, says: str
) -> None:
    """`smoke` on plain xdna2: a context too many, too few rows, a wrong slot and a stale copy fail, and say why."""
    ids = [i for i in FAMILIES["weight_placement"].ids("smoke") if "/lengths-" in i]
    ids += [i for i in FAMILIES["relations"].ids("smoke") if "/weights-graph=product" in i]
    if plant is not None:
        plant(monkeypatch)
    runner = Here()
    try:
        found = runner.run(Spec("xdna2"), [build(i) for i in ids])
    finally:
        runner.close()
    wrong = [r for r in found if r.verdict in FAILURES]
    assert bool(wrong) is bool(plant), [r.sentence() for r in found]
    assert says in " ".join(r.sentence() for r in wrong)
    assert all(r.verdict is Verdict.PASS for r in found if r not in wrong)


def test_a_kernel_for_each_tile_has_a_context() -> None:
    """Four K of few tokens and then of many are eight kernels, four of which are loaded at a time."""
    (case_id,) = (i for i in FAMILIES["weight_placement"].ids("smoke") if "/lengths-" in i)
    witness = execute(Xdna2Backend(), build(case_id)).witness
    assert witness.counters == {"columns": COLUMNS, "least_rows": LEAST_N, "switches": 4}
    assert witness.kernels == {f"K={k} TILE_N={t}": 1 for t in (DECODE_N, PREFILL_N) for k in (2048, 14336, 4096, 5632)}
