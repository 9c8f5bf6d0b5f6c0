"""The forms that OpenVINO fuses: that they do, and compute what ggml computes; the yardsticks of the bench."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import attention_forms as forms
import numpy as np
import pytest
from attention_forms import layers
from handwritten import TINY, Rope, Sizes, Weights, concat, feeds, reference, rows, slots, stateful
from numpy.typing import NDArray

from backends.openvino.emit.attention import remembered, slopes
from backends.openvino.emit.rope import rope_neox, rope_normal
from backends.openvino.emit.rows import rms
from backends.openvino.nodes import Constants
from conformance.backend.registry import Spec
from conformance.judge.verdict import Verdict
from conformance.run.runner import Runner

ov: Any = importlib.import_module("openvino")  # after the adapter, which keeps its telemetry from the network
o: Any = importlib.import_module("openvino.opset15")

ACCURACY = {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
CORE = ov.Core()
NMSE = 1e-12
FORMS = list(forms.FORMS)
SHAPES = [(2, 3, 9, 8, 2, 16, 16), (1, 1, 40, 4, 4, 16, 8), (3, 1, 7, 6, 1, 32, 32), (1, 17, 17, 4, 2, 64, 64)]
"""Batch, tokens, kv, heads, KV heads, head size of Q and K, of V."""

Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One for all."""
    runner = Runner()
    yield runner
    runner.close()


def _random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _parameter(*dims: int | None, type_: Any = None) -> Any:  # noqa: ANN401  # an openvino Node
    return o.parameter(ov.PartialShape([-1 if d is None else d for d in dims]), type_ or ov.Type.f32)


def _compiled(results: Sequence[Any], parameters: Sequence[Any], sinks: Sequence[Any] = ()) -> Any:  # noqa: ANN401
    model = ov.Model([o.result(r) for r in results], list(sinks), list(parameters))
    return CORE.compile_model(model, "CPU", ACCURACY)


def _infer(compiled: Any, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:  # noqa: ANN401  # a CompiledModel
    found: NDArray[Any] = compiled.create_infer_request().infer(list(inputs))[0]
    return found


def _close(found: NDArray[Any], want: NDArray[np.float64]) -> None:
    assert found.shape == want.shape
    error = float(((found - want) ** 2).sum())
    power = float((want**2).sum())
    assert error <= NMSE * power, f"NMSE {error / power if power else error:.2e}, at most {NMSE} expected"


@pytest.mark.parametrize("tokens", [None, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_is_one_layer(tokens: int | None, weighted: bool) -> None:
    """RMS norm, with its weight or without, dynamic or static, runs as RMS alone and divides rightly."""
    x, w = _random(1, 1, 3, 96), _random(96, seed=1)
    parameter = _parameter(1, 1, tokens, 96)
    y = rms(Constants(), parameter, 1e-5)
    if weighted:
        y = o.multiply(y, o.constant(w.reshape(1, 1, 1, 96)))
    compiled = _compiled([y], [parameter])
    assert layers(compiled).keys() - {"Const"} == {"Input", "RMS", "Output"}
    exact = x.astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + np.float64(np.float32(1e-5)))
    _close(_infer(compiled, [x]), want * w if weighted else want)


def _angles(positions: NDArray[np.int32], n_dims: int) -> NDArray[np.float64]:
    return np.asarray(positions[:, None] * 10000.0 ** (-2.0 * np.arange(n_dims // 2) / n_dims))


def _turned(x: Floats, theta: NDArray[np.float64], a: slice, b: slice) -> NDArray[np.float64]:
    """`x` (tokens, heads, size) with channels `a` turned towards channels `b`."""
    cos, sin = np.cos(theta)[:, None], np.sin(theta)[:, None]
    y = x.astype(np.float64)
    first, second = y[..., a].copy(), y[..., b].copy()
    y[..., a], y[..., b] = first * cos - second * sin, second * cos + first * sin
    return y


@pytest.mark.parametrize("tokens", [None, 1, 5])
@pytest.mark.parametrize(("heads", "size", "n_dims"), [(8, 64, 64), (1, 128, 128), (4, 96, 64), (2, 80, 20)])
def test_neox_rope_is_one_layer(tokens: int | None, heads: int, size: int, n_dims: int) -> None:
    """Whole heads or part of them, dynamic, one token or several: RoPE alone, and each half turned with the other."""
    n = tokens or 5
    x, theta = _random(1, n, heads, size), _angles(np.arange(3, 3 + n, dtype=np.int32), n_dims)
    cos, sin = (np.tile(f(theta), 2).astype(np.float32).reshape(n, 1, 1, n_dims) for f in (np.cos, np.sin))
    given = [_parameter(1, tokens, heads, size), *(_parameter(tokens, 1, 1, n_dims) for _ in range(2))]
    y = rope_neox(Constants(), given[0], given[1], given[2], heads, size, n_dims)
    compiled = _compiled([y], given)
    found = layers(compiled)
    assert (found.pop("RoPE"), found.keys() <= {"Input", "Output", "Reshape", "Const"}) == (1, True)
    half = n_dims // 2
    want = _turned(x[0], theta, slice(0, half), slice(half, n_dims))
    _close(_infer(compiled, [x, cos, sin]), want[None])


@pytest.mark.parametrize(
    ("heads", "size", "n_dims"), [(8, 64, 64), (1, 128, 128), (4, 96, 64), (3, 80, 20), (2, 32, 32)]
)
def test_normal_rope_is_one_layer(heads: int, size: int, n_dims: int) -> None:
    """With the number of tokens given at run time, neighbours turn in one RoPE layer, for 1 token and for many."""
    x, turns = _parameter(1, None, heads, size), _parameter(None, n_dims)
    count = _parameter(1, type_=ov.Type.i64)
    compiled = _compiled([rope_normal(Constants(), x, turns, count, heads, size, n_dims)], [x, turns, count])
    assert layers(compiled)["RoPE"] == 1
    for n in (1, 5):
        values, theta = _random(1, n, heads, size), _angles(np.arange(7, 7 + n, dtype=np.int32), n_dims)
        table = np.concatenate([np.sin(theta), np.cos(theta)], 1).astype(np.float32)
        want = _turned(values[0], theta, slice(0, n_dims, 2), slice(1, n_dims, 2))
        _close(_infer(compiled, [values, table, np.array([n])]), want[None])


def test_normal_rope_is_right_where_it_cannot_fuse() -> None:
    """With a constant number of tokens the same form runs as several layers and gives the same."""
    x, turns = _parameter(1, 5, 4, 32), _parameter(5, 32)
    c = Constants()
    compiled = _compiled([rope_normal(c, x, turns, c.i64(5), 4, 32, 32)], [x, turns])
    values, theta = _random(1, 5, 4, 32), _angles(np.arange(5, dtype=np.int32), 32)
    table = np.concatenate([np.sin(theta), np.cos(theta)], 1).astype(np.float32)
    _close(_infer(compiled, [values, table]), _turned(values[0], theta, slice(0, 32, 2), slice(1, 32, 2))[None])


@pytest.mark.parametrize("precision", ["accuracy", "default"])
@pytest.mark.parametrize("name", ["openvino-stateless", "openvino-stateful"])
def test_decoders_run_fused_and_rightly(runner: Runner, name: str, precision: str) -> None:
    """Generated decoders pass, with RMS and a RoPE layer for every rotation among what executed."""
    ids = [f"kv_growth/llama-rope={rope},run=p9.d3.back2.d1@5" for rope in ("normal", "neox")]
    demands = {"openvino-*": {"kernels": ["RMS", "RoPE"]}}
    cases = [replace(runner.case(i), demands=demands) for i in ids]
    for result in runner.run(Spec.parse(f"{name}?precision={precision}"), cases):
        assert result.verdict is Verdict.PASS, result.detail
        assert result.witness is not None
        kernels: Any = result.witness["kernels"]
        assert kernels["RoPE"] % 4 == 0  # of two layers, in each program


def _attention(
    h: forms.Heads, q: Floats, k: Floats, v: Floats, mask: Floats | None, sinks: Floats | None, alibi: Floats | None
) -> NDArray[np.float64]:
    """As `ggml_compute_forward_flash_attn_ext`: a row that sees nothing gives zeros."""
    exact = q.astype(np.float64), *(np.repeat(x, h.group, 1).astype(np.float64) for x in (k, v))
    x = np.einsum("bhsd,bhld->bhsl", *exact[:2]) * h.scale
    if h.softcap:
        x = h.softcap * np.tanh(x / h.softcap)
    if mask is not None:
        slope = np.float64(1.0) if alibi is None else alibi.astype(np.float64).reshape(1, -1, 1, 1)
        x = x + np.multiply(mask, slope, where=np.isfinite(mask), out=np.broadcast_to(mask, x.shape).astype(np.float64))
    top = np.maximum(x.max(-1, keepdims=True), -1e300)
    if sinks is not None:
        top = np.maximum(top, sinks)
    w = np.exp(x - top)
    total = w.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks.astype(np.float64) - top))
    return np.asarray(np.einsum("bhsl,bhld->bhsd", w / np.maximum(total, 1e-30), exact[2]))


def _mask(batch: int, tokens: int, kv: int) -> Floats:
    """Finite values, cells hidden at random, and one row that sees nothing where there is more than one row."""
    m = _random(batch, 1, tokens, kv, seed=3)
    m[np.random.default_rng(4).random(m.shape) < 0.3] = -np.inf
    m[0, 0, 0, 0] = 0.5
    if batch * tokens > 1:
        m[-1, 0, -1] = -np.inf
    return m


@pytest.mark.parametrize("kind", ["plain", "mask", "alibi", "softcap", "sinks"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_forms_give_what_ggml_gives(form: str, kind: str) -> None:
    """Every form, compiled without a fixed batch, tokens or kv, at several shapes; what it cannot carry it says."""
    if not forms.carries(form, masked=kind != "plain", softcap=kind == "softcap", sinks=kind == "sinks"):
        assert (form, kind) in {("sdpa", "softcap"), ("sdpa5d", "softcap"), ("sdpa5d", "sinks")}
        return
    for batch, tokens, kv, heads, kv_heads, size, size_v in SHAPES:
        c, h = Constants(), forms.Heads(heads, kv_heads, size**-0.5, 5.0 if kind == "softcap" else 0.0)
        sizes = ((heads, size), (kv_heads, size), (kv_heads, size_v))
        given = [_parameter(None, n, None, d) for n, d in sizes]
        inputs = [_random(batch, n, tokens if i == 0 else kv, d, seed=i) for i, (n, d) in enumerate(sizes)]
        mask, sinks, alibi = None, None, slopes(heads, 8.0) if kind == "alibi" else None
        values: list[Floats | None] = [None, None]
        if kind != "plain":
            given.append(_parameter(None, 1, None, None))
            values[0] = _mask(batch, tokens, kv)
            mask = forms.mask(c, given[-1], alibi)
        if kind == "sinks":
            sinks = _parameter(1, heads, 1, 1)
            given.append(sinks)
            values[1] = _random(1, heads, 1, 1, seed=9)
        compiled = _compiled([forms.FORMS[form](c, h, given[0], given[1], given[2], mask, sinks)], given)
        found = _infer(compiled, [*inputs, *(x for x in values if x is not None)])
        _close(found, _attention(h, inputs[0], inputs[1], inputs[2], values[0], values[1], alibi))


@pytest.mark.parametrize("form", FORMS)
def test_k_and_v_are_repeated_by_sdpa_alone(form: str) -> None:
    """The other forms leave K and V at their own heads: no layer that repeats them runs."""
    given = [_parameter(None, n, None, 64) for n in (8, 2, 2)]
    y = forms.FORMS[form](Constants(), forms.Heads(8, 2, 0.125), given[0], given[1], given[2], None, None)
    assert ("Broadcast" in layers(_compiled([y], given))) <= (form == "sdpa")


@pytest.mark.parametrize("kind", ["plain", "mask", "alibi", "sinks"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "size"), [(1, 8, 2, 64), (3, 4, 4, 16), (2, 6, 1, 32)])
def test_remembered_cache_fuses_and_grows(kind: str, batch: int, heads: int, kv_heads: int, size: int) -> None:
    """One attention kernel with its own cache, no layer that moves K or V, right over a prompt and more."""
    c, h = Constants(), forms.Heads(heads, kv_heads, size**-0.5)
    beam = _parameter(None, type_=ov.Type.i32)
    given = [*(_parameter(None, n, None, size) for n in (heads, kv_heads, kv_heads)), beam]
    kept = [remembered(c, given[i], beam, f"cache{i}", kv_heads, size) for i in (1, 2)]
    mask, sinks, alibi = None, None, slopes(heads, 8.0) if kind == "alibi" else None
    if kind != "plain":
        given.append(_parameter(None, 1, None, None))
        mask = forms.mask(c, given[-1], alibi)
    if kind == "sinks":
        sinks = _parameter(1, heads, 1, 1)
        given.append(sinks)
    y = forms.sdpa(c, h, given[0], kept[0][0], kept[1][0], mask, sinks)
    compiled = _compiled([y], given, [assign for _, assign in kept])
    names = layers(compiled)
    assert (names["ScaledDotProductAttention"], names["MemoryInput"], names["MemoryOutput"]) == (1, 2, 2)
    assert not {"Gather", "MatMul", "Softmax"} & names.keys()
    request = compiled.create_infer_request()
    past: list[list[Floats]] = [[], []]
    for step, tokens in enumerate((5, 1, 1, 2)):
        new = [_random(batch, n, tokens, size, seed=10 * step + i) for i, n in enumerate((heads, kv_heads, kv_heads))]
        for x, more in zip(past, new[1:], strict=True):
            x.append(more)
        k, v = (np.concatenate(x, 2) for x in past)
        inputs: list[NDArray[Any]] = [*new, np.arange(batch, dtype=np.int32)]
        values: list[Floats | None] = [None, None]
        if kind != "plain":
            values[0] = _mask(batch, tokens, k.shape[2])
        if kind == "sinks":
            values[1] = _random(1, heads, 1, 1, seed=9)
        found = request.infer([*inputs, *(x for x in values if x is not None)])[0]
        _close(found, _attention(h, new[0], k, v, values[0], values[1], alibi))


@pytest.mark.parametrize(("rope", "q4_0"), [("normal", False), ("neox", True)], ids=["normal-f32", "neox-q4_0"])
@pytest.mark.parametrize("form", [stateful, slots, concat, rows])
def test_yardsticks_decode_rightly(form: Any, rope: Rope, q4_0: bool) -> None:  # noqa: ANN401  # one of four functions
    """Each decoder written by hand gives the logits of float64 NumPy over a prompt and more tokens, and fuses."""
    s = replace(TINY, rope=rope)
    w = Weights.random(s, q4_0=q4_0)
    ids = np.random.default_rng(5).integers(0, s.vocab, 9).astype(np.int32)
    compiled = CORE.compile_model(form(s, w), "CPU", ACCURACY)
    names = layers(compiled)
    assert (names["RoPE"], names["RMS"]) == (2 * s.layers, 2 * s.layers + 1)
    assert names.get("ScaledDotProductAttention", 0) == (s.layers if form is stateful else 0)
    request, caches, found, past = compiled.create_infer_request(), _caches(s, form), [], 0
    for n in (5, 1, 1, 2):
        given = feeds(s, ids[past : past + n], past, past + n)
        if form is stateful:
            given["beam"] = np.zeros(1, np.int32)
        if form is slots:
            given |= {"slots": np.arange(past, past + n, dtype=np.int32), "n_kv": np.array([past + n])}
        if form is rows:
            given |= {"slots": np.arange(past, past + n, dtype=np.int32)}
            caches = {name: np.concatenate([x, np.zeros_like(x, shape=(1, s.kv_heads, n, s.head))], 2)
                      for name, x in caches.items()}  # fmt: skip
        result = request.infer(given | caches)
        found.append(result[0][0, 0].copy())
        for i, (name, x) in enumerate(caches.items()):
            if form is rows:
                x[:, :, past:] = result[1 + i]
            else:
                caches[name] = result[1 + i].copy()
        past += n
    _close(np.concatenate(found), reference(s, w, ids))


def _caches(s: Sizes, form: Any) -> dict[str, NDArray[Any]]:  # noqa: ANN401  # as above
    names = [] if form is stateful else [f"{x}{i}" for i in range(s.layers) for x in "kv"]
    shape = (1, s.n_ctx, s.kv) if form is slots else (1, s.kv_heads, 0, s.head)
    return {name: np.zeros(shape, np.float32) for name in names}
