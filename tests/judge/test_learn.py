"""What a device is learnt to round, and that no fault passes for rounding: on stand-ins that compute in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backend import profile, registry
from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import Kernel, KernelBackend, Raw, Sources
from conformance.backend.registry import Spec
from conformance.ggml import quants
from conformance.ggml.arithmetic import Arithmetic, limit_of
from conformance.ggml.tensor import Tensor
from conformance.judge.verdict import Verdict
from conformance.run import learn
from conformance.run.learn import blind, measure
from conformance.run.oracle import Oracle
from conformance.run.runner import Runner
from conformance.suite.family import with_seed
from conformance.suite.ops import build

Array = NDArray[Any]
Product = Callable[[Array, Array], Array]


def _bf16(x: Array) -> Array:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    y: Array = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return y


def _f16(x: Array) -> Array:
    y: Array = x.astype(np.float16).astype(np.float32)
    return y


def _blocks(x: Array) -> Array:
    """Rounded to 8 bits in blocks of 32, each with an F16 scale."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    q = np.round(np.divide(groups * 127, top, out=np.zeros_like(groups), where=top > 0))
    y: Array = (q * _f16(top / 127)).reshape(x.shape).astype(np.float32)
    return y


def _plain(w: Array, x: Array) -> Array:
    return (x.astype(np.float64) @ w.swapaxes(-1, -2).astype(np.float64)).astype(np.float32)


def _summed(w: Array, x: Array) -> Array:
    w16, x16 = w.astype(np.float16), x.astype(np.float16)
    total = np.zeros((*x.shape[:-1], w.shape[-2]), np.float16)
    for k in range(w.shape[-1]):
        total = total + x16[..., k, None] * w16[..., None, :, k]
    return total.astype(np.float32)


def _loose(w: Array, x: Array) -> Array:
    """Products of a device that nobody knows: every term is off by a little."""
    noise = np.random.default_rng(1).standard_normal(w.shape)
    return _plain(w * (1 + 2e-3 * noise), x)


DEVICES: Mapping[str, Product] = {
    "exact": _plain,
    "operands f16": lambda w, x: _plain(_f16(w), _f16(x)),
    "operands bf16": lambda w, x: _plain(_bf16(w), _bf16(x)),
    "operands f16, sums f16": _summed,
    "activations q8_0": lambda w, x: _plain(w, _blocks(x)),
    "loose": _loose,
}
FAULTS = ("", "scale", "element", "percent", "row", "zero")


class Device(KernelBackend):
    """MUL_MAT, rounded as `how` says, with a `fault` in cases of more than `above` matrices, by `profile`."""

    name = "stand-in"

    def __init__(self, how: str = "exact", fault: str = "", above: str = "0", profile: str = "") -> None:
        self._how, self._fault, self._above, self._profile = how, fault, int(above), profile

    def info(self) -> DeviceInfo:
        """A name only."""
        return DeviceInfo("stand-in", "stand-in", self._how)

    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic of its profile, or exact without one."""
        return (
            profile.read(Path(self._profile)).arithmetic(f"profile {self._profile}") if self._profile else Arithmetic()
        )

    def kernels(self) -> dict[str, Kernel]:
        """One."""
        return {"MUL_MAT": self._mul_mat}

    def _mul_mat(self, node: Tensor, dst: Raw, src: Sources) -> None:
        (a, b), (w_raw, x_raw) = node.src[:2], src[:2]
        assert a is not None
        assert b is not None
        assert w_raw is not None
        assert x_raw is not None
        w, x = quants.to_float(a.type, w_raw), quants.to_float(b.type, x_raw)
        fault = self._fault if dst.shape[1] > self._above else ""
        if fault == "scale":
            w[0, 0, 1, -32:] *= 2
        w = np.repeat(np.repeat(w, x.shape[1] // w.shape[1], 1), x.shape[0] // w.shape[0], 0)
        y = DEVICES[self._how](w, x)
        if fault == "element":
            y[0, -1, -1, -1] += np.abs(y).max()
        elif fault == "percent":
            y *= np.float32(1.01)
        elif fault == "row":
            y[..., 1] = y[..., 0]
        elif fault == "zero":
            y[:] = 0
        dst[...] = y


registry.provide("stand-in", Device)

SHAPES = ("a=256x20,b=256x12", "a=512x20,b=512x12", "a=256x30,b=256x12")
OTHERS = (
    "a=256x16x3,b=256x24x6",
    "a=512x16x3x2,b=512x9x3x2",
    "a=1024x16x3,b=1024x9x3",
)


def ids(shapes: tuple[str, ...], type_: str) -> list[str]:
    """The products of these shapes with weights of a type."""
    return [with_seed("ops", f"MUL_MAT-{type_}+f32-{shape}") for shape in shapes]


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """One reference for all."""
    oracle = Oracle()
    yield oracle
    oracle.close()


def entry(
    oracle: Oracle, how: str, type_: str, fault: str = "", above: str = "0"
) -> tuple[profile.Profile, profile.Entry]:
    """The profile of a device, and the only entry in it."""
    key = f"MUL_MAT-{type_}+f32@9,batch"
    device = Device(how, fault, above)
    made = replace(learn.learn(learn.begin(device), device, oracle, key, ids(SHAPES, type_)), others=False)
    assert list(made.entries) == [key]
    return made, made.entries[key]


ROUNDING = [
    (how, type_)
    for type_ in ("f32", "q4_0", "q6_K")
    for how in DEVICES
    if how != "loose" and not (type_ == "f32" and how.startswith("activations"))
]
"""Activations of F32 weights are not rounded to blocks."""


@pytest.mark.parametrize(("how", "type_"), ROUNDING)
def test_rounding_is_learnt(oracle: Oracle, how: str, type_: str) -> None:
    """The profile names a device's rounding and allows float32 errors only.

    A few values rounded the other way are allowed beside.
    """
    _, found = entry(oracle, how, type_)
    assert (found.rounding, found.finding, found.blind) == (how, "", "")
    assert found.bound < 1e-6 if how.startswith("activations") else found.bound == 0


@pytest.mark.parametrize("how", list(DEVICES))
def test_other_forms_pass_by_the_profile_of_the_plain_form(oracle: Oracle, how: str, tmp_path: Path) -> None:
    """Broadcasts, batches and longer sums of a right device are no false alarm."""
    made, found = entry(oracle, how, "q4_0")
    assert not found.finding
    assert verdicts(made, tmp_path, how, "") == {Verdict.PASS}


@pytest.mark.parametrize("fault", [f for f in FAULTS if f])
@pytest.mark.parametrize("how", [h for h in DEVICES if h != "loose"])
def test_a_fault_fails_by_the_profile(oracle: Oracle, how: str, fault: str, tmp_path: Path) -> None:
    """A fault in forms that were not measured is seen whatever the device rounds to, a wrong block scale too."""
    made, _ = entry(oracle, how, "q4_0", fault, above="2")
    assert verdicts(made, tmp_path, how, fault) == {Verdict.FAIL}


def verdicts(made: profile.Profile, folder: Path, how: str, fault: str) -> set[Verdict]:
    """Return the verdicts on the other forms, judged with the profile."""
    path = folder / "profile.toml"
    path.write_text(made.to_toml(), encoding="utf-8")
    runner = Runner()
    spec = Spec("stand-in", (("how", how), ("fault", fault), ("above", "2"), ("profile", str(path))))
    try:
        results = runner.run(spec, [runner.case(i) for i in ids(OTHERS, "q4_0")])
    finally:
        runner.close()
    for r in results:
        if fault:
            assert r.verdict is not Verdict.FAIL or f"by profile {path}: {KEY}, " in r.detail
    return {r.verdict for r in results}


KEY = "MUL_MAT-q4_0+f32@9,batch"


@pytest.mark.parametrize("fault", [f for f in FAULTS if f])
def test_a_fault_in_plain_cases_is_a_finding(oracle: Oracle, fault: str) -> None:
    """A device that is wrong where it is measured gets no bound for it."""
    _, found = entry(oracle, "exact", "q4_0", fault)
    assert found.finding
    assert found.bound == 0


def test_a_bound_says_what_it_hides(oracle: Oracle) -> None:
    """Where the residual is large the profile says that a wrong scale would pass, else that none does."""
    _, found = entry(oracle, "loose", "q4_0")
    assert 0 < found.bound <= limit_of("MUL_MAT")
    wide = profile.Entry("exact", 5e-5, 4e-4, 2048)
    case = with_seed("ops", "MUL_MAT-q4_0+f32-a=2048x33x2,b=2048x17x2")
    measured = [measure(Device(), oracle, build(case))]
    assert "block scales" in blind(oracle, measured, KEY, wide)
    assert blind(oracle, measured, KEY, profile.Entry("exact", 1e-8, 8e-8, 2048)) == ""


def test_less_exact_than_its_profile(oracle: Oracle) -> None:
    """A device that came to round more is told with the profile, then and now."""
    before, _ = entry(oracle, "exact", "q4_0")
    now, _ = entry(oracle, "loose", "q4_0")
    (sentence,) = learn.worse(before, now, "profile.toml")
    assert all(word in sentence for word in ("FAIL", KEY, "profile.toml", "then exact", "now"))
    assert learn.worse(now, before, "profile.toml") == []
