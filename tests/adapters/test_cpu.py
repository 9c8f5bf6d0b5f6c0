"""The reference: its engine, its rounding and the meaning of its ops, against plain definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.cpu import TABLE, CpuBackend, elementwise
from backends.cpu.attention import _in_f16
from backends.cpu.takes import STORED
from backends.cpu.values import alibi_slopes, load, repeated, store, to_bf16
from conformance.backend.registry import Spec, create
from conformance.case.case import Case, Step
from conformance.ggml import quants
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, contiguous_nb, nbytes, new_tensor, strided
from conformance.ggml.types import (
    BF16,
    F16,
    F32,
    GLU_OPS,
    I32,
    I64,
    OPS,
    Q4_1,
    Q8_0,
    Q8_1,
    TYPES,
    UNARY_OPS,
    GGMLType,
)

Array = NDArray[Any]
B = Builder()
CPU = CpuBackend()


class Leafs(dict[Tensor, Bytes]):
    """Leaves and their bytes, as a case holds them."""

    def add(self, type_: GGMLType, values: Array) -> Tensor:
        """A leaf of NumPy shape `values.shape` that holds `values`."""
        t = new_tensor(type_, *values.shape[::-1], name=f"leaf{len(self)}")
        self[t] = np.zeros(nbytes(t), np.uint8)
        store(type_, strided(self[t], t), values.reshape(t.shape))
        return t


def noise(seed: int, *shape: int) -> Array:
    """Standard normal numbers, rounded to float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(t: Tensor, packed: Bytes) -> Array:
    """The values of a packed output."""
    return load(t.type, strided(packed, Tensor(t.type, t.ne, contiguous_nb(t.type, t.ne))))


def run(leafs: Leafs, *outputs: Tensor, backend: CpuBackend = CPU, graph: Graph | None = None) -> list[Array]:
    """The values of `outputs`, computed in one step; the case is validated and every node supported."""
    graph = B.build_forward_expand(*outputs) if graph is None else graph
    case = Case("test/x@0", {}, [Step(graph, leafs, outputs)])
    case.validate()
    assert all(backend.supports(graph))
    with backend.open(case) as session:
        found = session.compute(graph, leafs, outputs)
    return [numbers(t, found[t]) for t in outputs]


def unary_of(op: str, x: Sequence[float]) -> Array:
    """One UNARY of a row of F32."""
    leafs = Leafs()
    return run(leafs, B.unary(leafs.add(F32, np.array(x)), op))[0].ravel()


def test_is_installed_under_its_name() -> None:
    """The entry point `cpu` opens this class, and it says which NumPy computes."""
    backend = create(Spec.parse("cpu"))
    assert isinstance(backend, CpuBackend)
    assert backend.info().versions["numpy"] == np.__version__


def test_every_kernel_says_what_it_takes() -> None:
    """The table of kernels and the table of accepted types name the same ops, all of them ggml's."""
    assert set(CPU.kernels()) == set(TABLE)
    assert set(TABLE) <= set(OPS)


def test_every_unary_and_glu_has_a_formula() -> None:
    """All sub-ops are there: by table, or XIELU, SWIGLU_OAI and SWIGLU_CLAMP that have parameters."""
    assert {*elementwise.UNARY, "XIELU"} == set(UNARY_OPS)
    assert {*elementwise.GATES, "SWIGLU_OAI", "SWIGLU_CLAMP"} == set(GLU_OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_no_has_a_reason(op: str) -> None:
    """An op is supported, or refused with words that name it; I64 operands are refused by arithmetic."""
    a = new_tensor(I64, 4)
    node = Tensor(I64, a.ne, a.nb, op, src=(a,))
    answer = CPU.supports_op(node)
    assert answer.ok == (op in VIEW_OPS or op in {"CONT", "CPY", "DUP", "CONCAT", "REPEAT"})
    assert answer.ok or answer.reason.startswith(f"{op}: ")


@given(st.floats(width=64, allow_nan=False))
def test_bf16_is_rounded_once(x: float) -> None:
    """`to_bf16` gives the nearest BF16 of a float64, ties to even, even where going through float32 would not."""
    with np.errstate(over="ignore"):
        bits = int(to_bf16(np.array([x]))[0])
    got = float(np.array([bits << 16], np.uint32).view(np.float32)[0])
    if math.isinf(got):
        assert abs(x) >= 2.0**128 - 2.0**119
        return
    neighbours = np.array([(bits + d) << 16 for d in (-1, 1)], np.int64).astype(np.uint32).view(np.float32)
    distance = [abs(float(n) - x) for n in neighbours if math.isfinite(n) and (n > 0) == (x > 0)]
    assert all(abs(got - x) <= d for d in distance)
    assert bits % 2 == 0 or all(abs(got - x) < d for d in distance)


@pytest.mark.parametrize("end", [0x7800, 0x7C00])
def test_fast_rounding_to_f16_is_the_cast(end: int) -> None:
    """Each F16 up to 2^15 or to the largest, each half between two, and their neighbours, of both signs: equal bits."""
    exact = np.arange(end, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = (exact[1:] + exact[:-1]) / 2
    below, above = (np.nextafter(halves, np.float32(to)) for to in (0, np.inf))
    x = np.concatenate([sign * part for sign in (1, -1) for part in (exact, halves, below, above)])
    assert _in_f16(x.astype(np.float64)).tobytes() == x.astype(np.float16).astype(np.float32).tobytes()


def test_bf16_sees_bits_that_float32_loses() -> None:
    """1 + 2^-8 + 2^-40 lies above the middle of two BF16; float32 would round it onto the middle, then down."""
    assert int(to_bf16(np.array([1 + 2.0**-8 + 2.0**-40]))[0]) == 0x3F81
    assert int(to_bf16(np.array([np.nan]))[0]) & 0x7FC0 == 0x7FC0


@pytest.mark.parametrize("type_", [t for t in TYPES.values() if t in STORED])
def test_stores_as_ggml_quantises(type_: GGMLType) -> None:
    """SET_ROWS writes the bytes of ggml's reference quantiser into the rows it names and into no other."""
    values = noise(1, 3, 256) * 10
    leafs = Leafs()
    cache = new_tensor(type_, 256, 8)
    rows = leafs.add(I64, np.array([6, 0, 3]))
    node = B.set_rows(cache, leafs.add(F32, values), rows)
    graph = B.build_forward_expand(node)
    before = np.full(nbytes(cache), 7, np.uint8)
    with CPU.open(Case("test/x@0", {cache: before}, [])) as session:
        session.compute(graph, leafs, ())
        after = session.read(cache)
    want = before.copy()
    strided(want, cache)[0, 0, [6, 0, 3]] = quants.from_float(type_, values)
    assert np.array_equal(want, after)


def test_caches_live_from_step_to_step() -> None:
    """What one step stores through a view, the next one reads; the case's own bytes stay as they were."""
    cache = new_tensor(F16, 4, 3)
    start = np.zeros(nbytes(cache), np.uint8)
    with CPU.open(Case("test/x@0", {cache: start}, [])) as session:
        for row in range(3):
            leafs = Leafs()
            view = B.view_1d(cache, 4, row * 8)
            session.compute(B.build_forward_expand(B.cpy(leafs.add(F32, np.full(4, row + 1.0)), view)), leafs, ())
        assert session.read(cache).view(np.float16).tolist() == [1.0] * 4 + [2.0] * 4 + [3.0] * 4
        session.write(cache, start)
        assert not session.read(cache).any()
        assert session.witness().kernels == {"CPY": 3}
        assert (session.witness().nodes, session.witness().path) == (3, "eager")
        with pytest.raises(UsageError, match="persistent tensor"):
            session.read(view)
        with pytest.raises(UsageError, match="24 bytes expected, 2 given"):
            session.write(cache, start[:2])
    assert not start.any()


def test_in_place_leaves_the_inputs_alone() -> None:
    """An op in place on an input computes into a copy: the caller's bytes are the same on the next run."""
    leafs = Leafs()
    a = leafs.add(F32, np.array([1.0, 2.0, 3.0]))
    before = leafs[a].copy()
    y = B.scale_inplace(a, 2.0)
    assert run(leafs, y)[0].ravel().tolist() == [2.0, 4.0, 6.0]
    assert np.array_equal(before, leafs[a])


def test_an_output_is_what_the_node_held_when_it_ran() -> None:
    """A later op in place does not change an output already taken, and an output may be a view."""
    leafs = Leafs()
    y = B.scale(leafs.add(F32, np.array([1.0, 2.0])), 3.0)
    view = B.reshape_2d(y, 1, 2)
    z = B.scale_inplace(y, 10.0)
    got = run(leafs, y, view, z)
    assert [a.ravel().tolist() for a in got] == [[3.0, 6.0], [3.0, 6.0], [30.0, 60.0]]


def test_nodes_without_the_compute_flag_do_not_run() -> None:
    """Such a node is all zeros, the same on every run, and no kernel is counted."""
    leafs = Leafs()
    y = B.scale(leafs.add(F32, np.array([1.0, 2.0])), 3.0)
    graph = B.build_forward_expand(y)
    y.flags &= ~FLAG_COMPUTE
    assert not run(leafs, y, graph=graph)[0].any()


def test_errors_name_the_node() -> None:
    """An index outside its tensor, where ggml would abort, and a missing kernel are errors in words."""
    leafs = Leafs()
    y = B.get_rows(leafs.add(F32, noise(0, 3, 4)), leafs.add(I32, np.array([0, 3])))
    with pytest.raises(BackendError, match=r"GET_ROWS .*0 <= i < 3 .* expected, 3 found"):
        run(leafs, y)
    lost = Tensor(F32, y.ne, y.nb, "FLASH_ATTN_BACK", src=(y.src[0],), flags=FLAG_COMPUTE)
    with (
        CPU.open(Case("test/x@0", {}, [])) as session,
        pytest.raises(BackendError, match="no kernel for FLASH_ATTN_BACK"),
    ):
        session.compute(Graph([lost]), leafs, (lost,))


@given(st.lists(st.sampled_from([(1, 1), (1, 4), (3, 3), (2, 6)]), min_size=4, max_size=4))
def test_repeated_reads_by_modulo(sizes: list[tuple[int, int]]) -> None:
    """Element i of a repeated array is element i % ne, in every dimension at once."""
    have, want = zip(*sizes, strict=True)
    x = np.arange(math.prod(have)).reshape(have)
    got = np.broadcast_to(repeated(x, want), want)
    index = np.indices(want)
    assert np.array_equal(x[tuple(i % n for i, n in zip(index, have, strict=True))], got)


@given(st.tuples(*[st.integers(1, 3)] * 4), st.integers(1, 3), st.integers(1, 3))
def test_mul_mat_broadcasts_by_division(ne: tuple[int, int, int, int], r2: int, r3: int) -> None:
    """Matrix i of src1 meets matrix i / r of src0, in dimensions 2 and 3, also when src1 is a permuted view."""
    n3, n2, m, n = ne
    leafs = Leafs()
    w, x = noise(1, n3, n2, m, 8), noise(2, n3 * r3, n, n2 * r2, 8)
    a, b = leafs.add(F32, w), B.permute(leafs.add(F32, x), 0, 2, 1, 3)
    got = run(leafs, B.mul_mat(a, b))[0]
    wide = np.repeat(np.repeat(w, r3, 0), r2, 1).astype(np.float64)
    want = np.einsum("abmk,anbk->abnm", wide, x.astype(np.float64)).astype(np.float32)
    assert np.array_equal(want, got) or np.allclose(want, got, rtol=1e-6, atol=1e-6)


def test_mul_mat_id_picks_experts() -> None:
    """Row (iu, it) is the product of expert ids[iu, it] with row iu % ne11 of token it."""
    leafs = Leafs()
    w, x, ids = noise(1, 5, 6, 32), noise(2, 3, 2, 32), np.array([[0, 4, 4, 1], [2, 2, 3, 0], [1, 0, 4, 3]])
    got = run(leafs, B.mul_mat_id(leafs.add(F32, w), leafs.add(F32, x), leafs.add(I32, ids)))[0][0]
    want = [[w[e].astype(float) @ x[t, u % 2] for u, e in enumerate(row)] for t, row in enumerate(ids)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_computes_in_declared_arithmetic() -> None:
    """Activations go through the declared type first; what is left is rounding of the result."""
    leafs = Leafs()
    w, x = noise(1, 6, 64), noise(2, 3, 64)
    y = B.mul_mat(leafs.add(Q8_0, w), leafs.add(F32, x))
    weights = quants.roundtrip(Q8_0, w).astype(np.float64)
    for simd in (False, True):
        arithmetic = Arithmetic("a", {"q8_0": "q8_0"}, {}, "simd" if simd else "reference")
        backend = CPU.computing_in(arithmetic)
        want = quants.roundtrip(Q8_0, x, "simd" if simd else "reference").astype(np.float64) @ weights.T
        assert np.array_equal(want.astype(np.float32), run(leafs, y, backend=backend)[0][0, 0])
        assert backend.arithmetic() is arithmetic
    assert np.array_equal((x.astype(float) @ weights.T).astype(np.float32), run(leafs, y)[0][0, 0])
    assert CPU.arithmetic().name == "exact"


def test_q8_1_multiplies_minima_with_its_own_sum() -> None:
    """Q4_1 x Q8_1 is, per block, d_w q_w d_x q_x + m_w s_x with s_x the F16 that the block stores."""
    leafs = Leafs()
    w, x = noise(1, 4, 96) + 3, noise(2, 2, 96)
    y = B.mul_mat(leafs.add(Q4_1, w), leafs.add(F32, x))
    got = run(leafs, y, backend=CPU.computing_in(Arithmetic("a", {"q4_1": "q8_1"})))[0][0, 0]
    wb = quants.from_float(Q4_1, w)
    minima = wb[..., 2:4].copy().view("<f2")[..., 0].astype(float)
    above = quants.roundtrip(Q4_1, w).reshape(4, 3, 32).astype(float) - minima[..., None]
    sums = quants.from_float(Q8_1, x)[..., 2:4].copy().view("<f2")[..., 0].astype(float)
    values = quants.roundtrip(Q8_1, x).reshape(2, 3, 32).astype(float)
    want = np.einsum("mbk,nbk->nm", above, values) + np.einsum("mb,nb->nm", minima, sums)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def attention(leafs: Leafs, k: Array, v: Array, mask: Array, *, max_bias: float = 0.0) -> Tensor:
    """FLASH_ATTN_EXT of four heads over `k` and `v`, (kv heads, n_kv, 16), with tokens as rows of `mask`."""
    q = leafs.add(F32, noise(9, 4, len(mask), 16))
    kt, vt, m = (leafs.add(F16, x) for x in (k, v, mask))
    return B.flash_attn_ext(q, kt, vt, m, 0.25, max_bias, 0.0)


@pytest.mark.parametrize("max_bias", [0.0, 8.0])
def test_flash_attn_is_softmax_between_two_products(max_bias: float) -> None:
    """FLASH_ATTN_EXT equals MUL_MAT, SOFT_MAX, MUL_MAT over the same heads, masks and slopes."""
    leafs = Leafs()
    k, v, mask = noise(1, 2, 10, 16), noise(2, 2, 10, 16), noise(3, 5, 10)
    mask[1, 4:] = -np.inf
    fused = attention(leafs, k, v, mask, max_bias=max_bias)
    q, kt, vt, m, *_ = fused.src
    assert q is not None
    assert kt is not None
    assert vt is not None
    p = B.soft_max_ext(B.mul_mat(kt, q), m, 0.25, max_bias)
    plain = B.permute(B.mul_mat(B.cont(B.transpose(vt)), p), 0, 2, 1, 3)
    a, b = run(leafs, fused, plain)
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


def test_flash_attn_can_round_its_sums() -> None:
    """With `flash_attn_sum` the sum is F16 after each cell: exact for F16 numbers without rounding, coarse else."""
    leafs = Leafs()
    ones, small = np.ones((2, 300, 16)), np.full((2, 300, 16), 2.0**-12)
    small[:, 0] = 1.0
    mask = np.zeros((3, 300))
    half = CPU.computing_in(Arithmetic("a", flash_attn_sum={"f16": "f16"}, flash_attn_tile=4))
    a, b = (attention(leafs, np.zeros_like(ones), v, mask) for v in (ones, small))
    assert (run(leafs, a, b, backend=half)[0] == 1.0).all()
    lost, exact = (run(leafs, a, b, backend=backend)[1] for backend in (half, CPU))
    np.testing.assert_allclose(lost, 1 / 300, rtol=1e-6)  # 1 + 2^-12 is 1 in F16
    np.testing.assert_allclose(exact, (1 + 299 * 2.0**-12) / 300, rtol=1e-6)


def test_flash_attn_rounds_nothing_in_tiles() -> None:
    """From `flash_attn_tile` tokens on, equal float types of K and V are exact whatever else is declared."""
    k, v = noise(1, 2, 10, 16), noise(2, 2, 10, 16)
    half = CPU.computing_in(Arithmetic("a", {}, {"f16": "f16"}, flash_attn_sum={"f16": "f16"}, flash_attn_tile=4))
    for tokens, same in ((3, False), (4, True)):
        leafs = Leafs()
        y = attention(leafs, k, v, np.zeros((tokens, 10)))
        assert np.array_equal(run(leafs, y)[0], run(leafs, y, backend=half)[0]) == same


def test_flash_attn_has_tiles_for_some_rows() -> None:
    """Where V's rows are no multiple of `flash_attn_step`, there are no tiles."""
    k, v = noise(1, 2, 10, 16), noise(2, 2, 10, 16)
    declared = Arithmetic("a", {}, {"f16": "f16"}, flash_attn_sum={"f16": "f16"}, flash_attn_tile=4)
    for step, same in ((16, True), (32, False)):
        leafs = Leafs()
        y = attention(leafs, k, v, np.zeros((4, 10)))
        tiled = CPU.computing_in(replace(declared, flash_attn_step=step))
        assert np.array_equal(run(leafs, y)[0], run(leafs, y, backend=tiled)[0]) == same


def test_flash_attn_sums_parts_by_themselves() -> None:
    """From 512 cells on, one token and equal float types of K and V; each part has its own F16 sum and maximum."""
    declared = Arithmetic("a", flash_attn_sum={"f16": "f16"})
    whole, parts = (CPU.computing_in(replace(declared, flash_attn_parts=n)) for n in (1, 3))
    for cells, tokens, same in ((511, 1, True), (512, 2, True), (512, 1, False)):
        k, v = noise(1, 2, cells, 16), noise(2, 2, cells, 16)
        leafs = Leafs()
        y = attention(leafs, k, v, np.zeros((tokens, cells)))
        a, b, exact = (run(leafs, y, backend=backend)[0] for backend in (whole, parts, CPU))
        assert np.array_equal(a, b) == same
        np.testing.assert_allclose(b, exact, atol=2e-3)
    ones = np.ones((2, 6000, 16))
    leafs = Leafs()
    y = attention(leafs, np.zeros_like(ones), ones, np.zeros((1, 6000)))
    np.testing.assert_allclose(run(leafs, y, backend=whole)[0], 2048 / 6000, rtol=1e-6)  # 2048 + 1 is 2048 in F16
    np.testing.assert_allclose(run(leafs, y, backend=parts)[0], 1.0, rtol=1e-6)


def test_flash_attn_rounds_its_weights() -> None:
    """exp(-1) is 0.36787944, or 0.36791992 in F16; a new maximum scales the sum by it, too."""
    declared = Arithmetic("a", flash_attn_sum={"f16": "f16"})
    for mask in ([0.0, -1.0], [-1.0, 0.0]):
        leafs, v = Leafs(), np.stack([np.full(16, 0.0), np.linspace(1, 2, 16)])[None]
        y = attention(leafs, np.zeros_like(v), v if mask[0] > mask[1] else v[:, ::-1], np.array([mask]))
        for width, weight in (("float32", 0.36787944), ("f16", 0.36791992)):
            total = (np.float32(weight) * v[0, 1].astype(np.float16).astype(np.float32)).astype(np.float16)
            found = run(leafs, y, backend=CPU.computing_in(replace(declared, flash_attn_weights=width)))[0]
            np.testing.assert_allclose(found.reshape(-1, 16)[0], total / (1 + np.exp(-1)), rtol=1e-6)


def test_masked_cells_have_no_say() -> None:
    """NaN and infinity in masked cells of K and V change nothing; a token that sees no cell gets zeros."""
    k, v, mask = noise(1, 2, 10, 16), noise(2, 2, 10, 16), np.zeros((5, 10))
    mask[:, 7:] = -np.inf
    mask[2] = -np.inf
    clean, dirty = Leafs(), Leafs()
    want = run(clean, attention(clean, k, v, mask))[0]
    k[:, 8] = np.nan
    v[:, 9] = np.inf
    got = run(dirty, attention(dirty, k, v, mask))[0]
    assert np.array_equal(want, got)
    assert not got[0, 2].any()
    assert got[0, 3].all()


def test_soft_max_of_nothing() -> None:
    """A row of -inf alone is NaN, as ggml has it; with a sink it is zero."""
    leafs = Leafs()
    a, mask = leafs.add(F32, noise(1, 1, 2, 8)), leafs.add(F32, np.array([[0.0] * 8, [-np.inf] * 8]))
    plain, sunk = (B.soft_max_ext(a, mask, 1.0, 0.0) for _ in range(2))
    B.soft_max_add_sinks(sunk, leafs.add(F32, np.array([0.5])))
    p, s = run(leafs, plain, sunk)
    assert p[0, 0, 0].sum() == pytest.approx(1)
    assert np.isnan(p[0, 0, 1]).all()
    assert 0 < s[0, 0, 0].sum() < 1
    assert not s[0, 0, 1].any()


def test_alibi_slopes_are_the_papers() -> None:
    """Eight heads with max_bias 8 have slopes 2^-1 .. 2^-8; further heads lie between them."""
    assert alibi_slopes(8.0, 8).tolist() == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(8.0, 10)[8:].tolist() == [2**-0.5, 2**-1.5]
    assert alibi_slopes(0.0, 3).tolist() == [1.0, 1.0, 1.0]


def turned(leafs: Leafs, x: Array, positions: Array, mode: int, n_dims: int, **extra: Any) -> Tensor:  # noqa: ANN401  # passed on
    """ROPE of `x` with base 10000 and no YaRN."""
    sections, offset = extra.get("sections", (8, 8, 8, 8)), extra.get("offset", 0)
    a, b = leafs.add(F32, x), leafs.add(I32, positions)
    if mode & ROPE_TYPE.MROPE:
        return B.rope_multi(a, b, None, n_dims, sections, mode, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
    y = B.rope_ext(a, b, None, n_dims, mode, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
    return B.rope_set_offset(y, offset) if offset else y


@pytest.mark.parametrize(("mode", "step"), [(ROPE_TYPE.NORMAL, (0, 1)), (ROPE_TYPE.NEOX, (0, 8))])
def test_rope_turns_pairs(mode: int, step: tuple[int, int]) -> None:
    """The first pair turns by its position in radians; dims beyond n_dims and before the offset are copied."""
    x, pos = noise(1, 3, 2, 24), np.array([0, 1, 5000])
    for offset in (0, 4):
        leafs = Leafs()
        y = run(leafs, turned(leafs, x, pos, mode, 16, offset=offset))[0][0]
        i, j = (offset + s for s in step)
        for t, p in enumerate(pos):
            want = x[t, :, i] * math.cos(p) - x[t, :, j] * math.sin(p)
            np.testing.assert_allclose(y[t, :, i], want, rtol=1e-6, atol=1e-7)
        assert np.array_equal(y[..., :offset], x[..., :offset])
        assert np.array_equal(y[..., offset + 16 :], x[..., offset + 16 :])
        np.testing.assert_allclose((y**2).sum(-1), (x.astype(float) ** 2).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("mode", [ROPE_TYPE.MROPE, ROPE_TYPE.IMROPE])
def test_mrope_with_one_position_is_neox(mode: int) -> None:
    """Where all four positions of a token are equal, the sections make no difference."""
    leafs = Leafs()
    x, pos = noise(1, 3, 2, 64), np.array([7, 0, 4096])
    many = turned(leafs, x, np.tile(pos, 4), mode, 64, sections=(11, 7, 5, 9))
    one = turned(leafs, x, pos, ROPE_TYPE.NEOX, 64)
    got, want = run(leafs, many, one)
    assert np.array_equal(want, got)


def test_sorting() -> None:
    """ARGSORT keeps equals in order, both ways; TOP_K is the largest k with the first two exchanged."""
    leafs = Leafs()
    a = leafs.add(F32, np.array([[2.0, 3.0, 2.0, 1.0, 3.0]]))
    up, down, top = run(leafs, B.argsort(a, 0), B.argsort(a, 1), B.top_k(a, 3))
    assert up.ravel().tolist() == [3, 0, 2, 1, 4]
    assert down.ravel().tolist() == [1, 4, 0, 2, 3]
    assert top.ravel().tolist() == [4, 1, 0]


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        ("GELU", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("GELU_ERF", lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
        ("GELU_QUICK", lambda x: x / (1 + math.exp(-1.702 * x))),
        ("SILU", lambda x: x / (1 + math.exp(-x))),
        ("SOFTPLUS", lambda x: math.log1p(math.exp(x))),
        ("HARDSWISH", lambda x: x * min(1, max(0, (x + 3) / 6))),
        ("ELU", lambda x: x if x > 0 else math.expm1(x)),
        ("ROUND", lambda x: math.copysign(math.floor(abs(x) + 0.5), x)),
    ],
)
def test_unary_formulas(op: str, formula: Any) -> None:  # noqa: ANN401  # a lambda
    """Each function of more than one step is the textbook's, to float32's last bit."""
    x = np.linspace(-9, 9, 73).astype(np.float32)
    want = np.array([formula(float(v)) for v in x])
    np.testing.assert_allclose(unary_of(op, list(x)), want, rtol=1.2e-7, atol=1e-14)


@pytest.mark.parametrize("op", GLU_OPS)
@pytest.mark.parametrize("swapped", [False, True])
def test_glu_of_an_odd_row_leaves_its_last_element(op: str, swapped: bool) -> None:
    """The halves are `ne[0] / 2` long, as of the same row without its last element."""
    x, even = Leafs(), Leafs()
    values = noise(3, 4, 13)
    (odd,) = run(x, B.glu(x.add(F32, values), op, swapped))
    assert np.array_equal(odd, run(even, B.glu(even.add(F32, values[:, :12]), op, swapped))[0])


def test_nan_goes_where_ggml_lets_it() -> None:
    """C comparisons with NaN are false: RELU, STEP, SGN and HARDSIGMOID lose it, the others keep it."""
    for op in UNARY_OPS:
        if op != "XIELU":
            assert np.isnan(unary_of(op, [math.nan]))[0] == (op not in {"RELU", "STEP", "SGN", "HARDSIGMOID"}), op


def test_cpy_keeps_the_order_of_elements() -> None:
    """Between other shapes and strides the k-th element of one becomes the k-th of the other, of any types."""
    leafs = Leafs()
    x = noise(1, 4, 6, 8)
    a = B.permute(leafs.add(F32, x), 0, 2, 1, 3)
    b = leafs.add(BF16, np.zeros((6, 32)))
    got = run(leafs, B.cpy(a, b))[0]
    want = quants.roundtrip(BF16, x.transpose(1, 0, 2).reshape(6, 32))
    assert np.array_equal(want, got[0, 0])
