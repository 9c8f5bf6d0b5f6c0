"""Ops with a state: what they must do whatever the numbers, and that one compiled model serves any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.openvino import OpenVinoStateless
from conformance.backend.interface import Backend
from conformance.case.case import Case, Step
from conformance.ggml.errors import GraphError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Tensor, nelements, new_tensor
from conformance.ggml.types import F32, I32

B = Builder()
Array = NDArray[Any]
SIZE, HEADS = 8, 2


@dataclass(frozen=True)
class Op:
    """One op: its inputs per token and sequence, (…,) behind (sequences, tokens), and how it is called."""

    inputs: Mapping[str, tuple[int, ...]]
    make: Callable[[dict[str, Tensor], Tensor, int, int], Tensor]
    """`f(inputs, state, tokens, sequences)`."""
    state: tuple[int, ...] = (HEADS, SIZE, SIZE)
    flat: bool = True
    """Whether tokens of all sequences stand in one dimension."""
    out: tuple[int, ...] = (HEADS, SIZE)


_HEADED = (HEADS, SIZE)


def _scan(t: dict[str, Tensor], state: Tensor, n: int, n_seqs: int) -> Tensor:
    s = B.reshape_4d(state, SIZE, SIZE, HEADS, n_seqs)
    ids = B.cast(B.arange(0, n_seqs, 1), I32)
    b, c = (B.reshape_4d(t[k], SIZE, 1, n, n_seqs) for k in "bc")
    dt = B.reshape_3d(t["dt"], HEADS, n, n_seqs)
    x = B.reshape_4d(t["x"], SIZE, HEADS, n, n_seqs)
    return B.ssm_scan(s, x, dt, B.reshape_2d(t["decay"], 1, HEADS), b, c, ids, 1)


def _delta(t: dict[str, Tensor], state: Tensor, n: int, n_seqs: int) -> Tensor:
    q, k, v = (B.reshape_4d(t[name], SIZE, HEADS, n, n_seqs) for name in "qkv")
    g, beta = (B.reshape_4d(t[name], 1, HEADS, n, n_seqs) for name in ("g", "beta"))
    return B.gated_delta_net(q, k, v, g, beta, B.reshape_4d(state, SIZE, SIZE, HEADS, n_seqs), 1)


def _wide(state: Tensor, n_seqs: int) -> Tensor:
    return B.reshape_2d(state, SIZE * SIZE * HEADS, n_seqs)


OPS: dict[str, Op] = {
    "SSM_SCAN": Op({"x": _HEADED, "dt": (HEADS,), "b": (SIZE,), "c": (SIZE,)}, _scan),
    "RWKV_WKV6": Op(
        dict.fromkeys("kvrw", _HEADED),
        lambda t, s, _, n: B.rwkv_wkv6(t["k"], t["v"], t["r"], t["first"], t["w"], _wide(s, n)),
    ),
    "RWKV_WKV7": Op(
        dict.fromkeys("rwkvab", _HEADED),
        lambda t, s, _, n: B.rwkv_wkv7(t["r"], t["w"], t["k"], t["v"], t["a"], t["b"], _wide(s, n)),
    ),
    "GATED_LINEAR_ATTN": Op(
        dict.fromkeys("kvqw", _HEADED),
        lambda t, s, _, n: B.gated_linear_attn(t["k"], t["v"], t["q"], t["w"], _wide(s, n), 0.5),
    ),
    "GATED_DELTA_NET": Op({"q": _HEADED, "k": _HEADED, "v": _HEADED, "g": (HEADS,), "beta": (HEADS,)}, _delta),
}
FIXED = {"decay": (HEADS,), "first": (HEADS, SIZE)}
"""What no token changes: SSM_SCAN's A and RWKV_WKV6's tf."""


def _values(op: Op, n: int, n_seqs: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    shapes = {k: (n_seqs, n, *shape) for k, shape in op.inputs.items()}
    return {k: (random.standard_normal(shape) * 0.4).astype("f4") for k, shape in (*shapes.items(), *FIXED.items())}


def _step(op: Op, cache: Tensor, values: dict[str, Array], n: int, n_seqs: int) -> Step:
    """A graph that computes outputs and puts the new states into `cache`, as llama.cpp does."""
    inputs: dict[Tensor, Bytes] = {}
    leaves: dict[str, Tensor] = {}
    for name, x in values.items():
        shape = x.shape if name in FIXED else (n_seqs * n, *x.shape[2:])
        leaves[name] = new_tensor(F32, *shape[::-1], name=name, flags=1)
        inputs[leaves[name]] = np.ascontiguousarray(x).reshape(-1).view("u1")
    result = op.make(leaves, cache, n, n_seqs)
    count = n * n_seqs * HEADS * SIZE
    y = B.cont(B.view_1d(result, count, 0))
    kept = B.cpy(B.view_1d(result, nelements(cache), 4 * count), B.view_1d(cache, nelements(cache), 0))
    graph = B.build_forward_expand(y, kept)
    used = set(graph.tensors())
    return Step(graph, {t: data for t, data in inputs.items() if t in used}, (y,))


def _run(backend: Backend, op: Op, chunks: list[dict[str, Array]], state: Array) -> tuple[Array, Array]:
    """Outputs (sequences, tokens, HEADS, SIZE) and the last state, the chunks run one after the other."""
    n_seqs = state.shape[0]
    cache = new_tensor(F32, state.size, name="cache_s_l0")
    steps = [_step(op, cache, c, _tokens(c), n_seqs) for c in chunks]
    case = Case("test/x@0", {cache: state.reshape(-1).view("u1")}, steps)
    case.validate()
    found = []
    with backend.open(case) as session:
        for chunk, step in zip(chunks, steps, strict=True):
            (y,) = step.outputs
            got = session.compute(step.graph, step.inputs, step.outputs)[y].view("<f4")
            found.append(got.reshape(n_seqs, _tokens(chunk), HEADS, SIZE))
        return np.concatenate(found, 1), session.read(cache).view("<f4").reshape(state.shape)


def _tokens(values: dict[str, Array]) -> int:
    return int(next(x.shape[1] for k, x in values.items() if k not in FIXED))


def _part(values: dict[str, Array], *, seqs: slice = slice(None), tokens: slice = slice(None)) -> dict[str, Array]:
    return {k: x if k in FIXED else x[seqs, tokens] for k, x in values.items()}


def _state(op: Op, n_seqs: int, seed: int) -> Array:
    random = np.random.default_rng(seed + 1)
    x: Array = random.standard_normal((n_seqs, *op.state)).astype("f4")
    return x


@pytest.mark.parametrize("name", OPS)
@given(n=st.integers(2, 6), cut=st.integers(1, 5), n_seqs=st.integers(1, 3), seed=st.integers(0, 2**16))
@settings(max_examples=12, deadline=None)
def test_tokens_at_once_are_tokens_one_after_the_other(name: str, n: int, cut: int, n_seqs: int, seed: int) -> None:
    """However a prompt is cut, outputs and the last state are the same; a carried state is rounded to float32."""
    op, cut = OPS[name], min(cut, n - 1)
    values, state = _values(op, n, n_seqs, seed), _state(op, n_seqs, seed)
    whole = _run(CpuBackend(), op, [values], state)
    first, rest = _part(values, tokens=slice(cut)), _part(values, tokens=slice(cut, None))
    parts = _run(CpuBackend(), op, [first, rest], state)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(a).max()))


@pytest.mark.parametrize("name", OPS)
@given(n=st.integers(1, 4), seed=st.integers(0, 2**16))
@settings(max_examples=8, deadline=None)
def test_sequences_do_not_see_each_other(name: str, n: int, seed: int) -> None:
    """Three sequences at once give to the bit what each gives alone."""
    op = OPS[name]
    values, state = _values(op, n, 3, seed), _state(op, 3, seed)
    y, last = _run(CpuBackend(), op, [values], state)
    for i in range(3):
        one = slice(i, i + 1)
        alone = _run(CpuBackend(), op, [_part(values, seqs=one)], np.ascontiguousarray(state[one]))
        np.testing.assert_array_equal(y[one], alone[0])
        np.testing.assert_array_equal(last[one], alone[1])


@pytest.mark.parametrize("name", OPS)
def test_one_model_serves_every_number_of_tokens(name: str) -> None:
    """OpenVINO compiles once for one token and a few times for the rest, and agrees with the reference on each step."""
    op, seed = OPS[name], 7
    chunks = [_values(op, n, 1, seed + n) for n in (5, 7, 1, 1, 3, 9, 1, 4)]
    for c in chunks:
        c.update({k: chunks[0][k] for k in FIXED})
    state = _state(op, 1, seed)
    want = _run(CpuBackend(), op, chunks, state)
    backend = OpenVinoStateless()
    got = _run(backend, op, chunks, state)
    for a, b in zip(want, got, strict=True):
        assert float(((a - b) ** 2).sum() / (a**2).sum()) < 1e-11
    assert _compiles(op, chunks, state) <= 4


def _compiles(op: Op, chunks: list[dict[str, Array]], state: Array) -> int:
    cache = new_tensor(F32, state.size, name="cache_s_l0")
    steps = [_step(op, cache, c, _tokens(c), 1) for c in chunks]
    with OpenVinoStateless().open(Case("test/x@0", {cache: state.reshape(-1).view("u1")}, steps)) as session:
        for step in steps:
            session.compute(step.graph, step.inputs, step.outputs)
        return session.witness().compiles


def test_states_that_no_token_left_are_not_written() -> None:
    """Asked for more states than tokens, GATED_DELTA_NET gives as many as tokens; the latest comes first."""
    values = _values(OPS["GATED_DELTA_NET"], 3, 1, 1)
    state = _state(OPS["GATED_DELTA_NET"], 1, 1)
    inputs = {k: new_tensor(F32, *x.shape[:1:-1], *x.shape[1::-1], name=k, flags=1) for k, x in values.items()}
    cache = new_tensor(F32, SIZE, SIZE, HEADS, name="cache")
    g, beta = (B.reshape_4d(inputs[k], 1, HEADS, 3, 1) for k in ("g", "beta"))
    out = B.gated_delta_net(
        inputs["q"], inputs["k"], inputs["v"], g, beta, B.reshape_4d(cache, SIZE, SIZE, HEADS, 1), 5
    )
    graph = B.build_forward_expand(out)
    given_ = {t: values[t.name].reshape(-1).view("u1") for t in graph.leafs() if t.name in values}
    case = Case("test/x@0", {cache: state.reshape(-1).view("u1")}, [Step(graph, given_, (out,))])
    with CpuBackend().open(case) as session:
        found = session.compute(graph, given_, (out,))[out].view("<f4")
    states = found[3 * HEADS * SIZE :].reshape(5, *state.shape)
    for i in range(3):
        _, last = _run(CpuBackend(), OPS["GATED_DELTA_NET"], [_part(values, tokens=slice(3 - i))], state)
        np.testing.assert_array_equal(states[i], last)
    assert not states[3:].any()


def test_what_ggml_would_read_past_the_end_is_refused() -> None:
    """Tokens that do not share out among sequences, and operands of another type, are errors of the graph."""
    x, half = new_tensor(F32, 4, 2, 5), new_tensor(I32, 4, 2, 6)
    with pytest.raises(GraphError, match="n_tokens % n_seqs"):
        B.build_forward_expand(B.gated_linear_attn(x, x, x, x, new_tensor(F32, 32, 2), 1.0)).validate()
    y = new_tensor(F32, 4, 2, 6)
    with pytest.raises(GraphError, match=r"v->type == GGML_TYPE_F32"):
        B.build_forward_expand(B.gated_linear_attn(y, half, y, y, new_tensor(F32, 32, 2), 1.0)).validate()
