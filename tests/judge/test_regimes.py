"""Data by design holds what it promises, and a check of ties takes every answer that ggml leaves open."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from trust.copies import load
from trust.faults import Fault

from conformance.backend.registry import Spec, create
from conformance.case.case import Case
from conformance.case.streams import Stream
from conformance.ggml.quants import to_float
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.types import BF16, F16, F32, MXFP4, NVFP4, Q4_0, Q4_K, GGMLType
from conformance.run.execute import execute
from conformance.suite.ops import build, ids
from conformance.suite.ops.regimes import regimes

NE = (256, 32, 1, 1)
SORTING = [i for i in ids("standard") if "data=ties" in i]


def _made(word: str, regime: str, type_: GGMLType, leaf: str = "a") -> Bytes:
    return regimes(word, "X", (type_, F32))[regime][leaf](type_, Stream("x", leaf), NE)


def _values(word: str, regime: str, type_: GGMLType) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    data = _made(word, regime, type_)
    raw = data.view(type_.dtype or "<u2") if not type_.is_quantized else data.reshape(-1, 1, type_.type_size)
    return to_float(type_, raw).astype(np.float64).reshape(-1, NE[0])


@pytest.mark.parametrize(("type_", "least"), [(F32, 2.0**-126), (F16, 2.0**-14), (BF16, 2.0**-126)])
def test_a_range_reaches_from_subnormal_to_huge(type_: GGMLType, least: float) -> None:
    """Each regime holds magnitudes of its own alone, so that none hides another; all is finite."""
    small = np.abs(_values("range", "subnormal", type_))
    assert (small <= least).all()
    assert (small > 0).any()
    assert (np.abs(_values("range", "least", type_)) >= least).all()
    assert (_values("range", "positive", type_) > 0).all()
    assert (_values("range", "falling", type_) < 0).all()
    curve = np.abs(_values("range", "curve", type_))
    assert curve.max() > 89
    assert not ((curve > 87.5) & (curve < 88.5)).any()
    assert np.abs(_values("range", "huge", type_)).min() >= (2.0**13 if type_ is F16 else 2.0**124)
    assert np.signbit(_values("range", "mixed", type_)[_values("range", "mixed", type_) == 0]).any()


def test_casts_stand_at_the_borders_of_f16() -> None:
    """Between the largest F16 and the next, among its subnormals, on ties, beyond all."""
    x = np.abs(_values("casts", "", F32))
    assert ((x > 65504) & (x < 65520)).any()
    assert np.isinf(x).any()
    assert np.isnan(x).any()
    assert ((x > 0) & (x < 2.0**-14)).any()


def test_borders_tie_and_vanish() -> None:
    """Blocks of two extremes of one magnitude, with a maximum one step below a power of two, and of zeros."""
    blocks = _values("borders", "", F32).reshape(-1, 32)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    assert ((blocks == top).any(axis=1) & (blocks == -top).any(axis=1) & (top[:, 0] > 0)).any()
    assert (top == np.nextafter(np.float32(4), np.float32(0))).any()
    assert (top == 0).any()


@pytest.mark.parametrize("type_", [Q4_0, Q4_K, MXFP4, NVFP4])
def test_scales_are_the_least_and_the_largest(type_: GGMLType) -> None:
    """Subnormal F16, the exponents 0 and 1, and the other end; every value is a number."""
    least, most = (_made("scales", r, type_).view(BLOCK[type_]) for r in ("least", "most"))
    if type_ is MXFP4:
        assert set(least["e"]) == {0, 1}
        assert most["e"].min() >= 250
    elif type_ is NVFP4:
        assert least["d"].max() < 8
        assert set(least["d"].reshape(-1)) >= {0, 1}
    else:
        assert np.abs(least["d"]).max() < 2.0**-14
        assert np.abs(most["d"]).min() >= 2.0**15
    for regime in ("least", "most"):
        assert np.isfinite(_values("scales", regime, type_)).all()


def _outputs(backend: object, case: Case) -> dict[Tensor, bytes]:
    return {t: x.tobytes() for t, x in execute(backend, case).steps[0].outputs.items()}  # type: ignore[arg-type]


REVERSED = Fault(
    "equals-reversed", "of equals the last comes first", "cpu", ("ops",), "backends/cpu/rows.py",
    'top: NDArray[Any] = np.argsort(-x, axis=-1, kind="stable")[..., : node.ne[0]]',
    'top = x.shape[-1] - 1 - np.argsort(-x[..., ::-1], axis=-1, kind="stable")[..., : node.ne[0]]',
)  # fmt: skip
FIRST = Fault(
    "first-of-equals", "ARGMAX takes the first", "cpu", ("ops",), "backends/cpu/rows.py",
    "x.shape[-1] - 1 - np.asarray(np.argmax(x[..., ::-1], axis=-1))",
    "np.asarray(np.argmax(x, axis=-1))",
)  # fmt: skip
SORTED = Fault(
    "argsort-equals-reversed", "of equals the last comes first", "cpu", ("ops",), "backends/cpu/rows.py",
    'order: NDArray[Any] = np.argsort(-x if node.params.order == SORT_ORDER.DESC else x, axis=-1, kind="stable")',
    "y = (-x if node.params.order == SORT_ORDER.DESC else x)[..., ::-1]\n"
    '    order = x.shape[-1] - 1 - np.argsort(y, axis=-1, kind="stable")',
)  # fmt: skip


@pytest.mark.parametrize("other", [REVERSED, FIRST, SORTED], ids=lambda f: f.name)
def test_ties_may_fall_either_way(other: Fault) -> None:
    """A backend that orders equals in another way gives the same outputs, though its indices differ."""
    with closing(create(Spec.parse("cpu"))) as ours, closing(load(other)) as theirs:
        for case_id in SORTING:
            case = build(case_id)
            assert _outputs(ours, case) == _outputs(theirs, case), case_id
