"""What a compressed weight costs, in memory and time: `pytest tests/benchmarks/bench_weights.py -s`.

Each weight is measured in a process of its own, which has compiled and run a small model of the same form before, so
that the plugin's code and threads are not counted. Times are ratios to the same product with float32 weights in the
same process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

import backends.openvino  # noqa: F401  # keeps openvino's telemetry from the network
from backends.openvino.compile import executed
from backends.openvino.weights import ENCODINGS, packed_copies, stored
from conformance.ggml.quants import from_float
from conformance.ggml.quants.requant import FORMS
from conformance.ggml.tensor import Bytes
from conformance.ggml.types import GGMLType, type_named

ACCURACY = {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
ROWS, NE0 = 16384, 4096
TOKENS = (1, 64)
ALLOWED = 1.05
"""Resident memory after the first inference, over the constants and the plugin's packed copy of them."""

KINDS = [(t.name, "") for t in ENCODINGS] + [("f16", ""), ("bf16", "")] + [("q6_K", form) for form in FORMS]


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _bytes(type_: GGMLType, rows: int, ne0: int) -> Bytes:
    """Bytes of normal weights, 16 rows over and over."""
    x = np.random.default_rng(0).standard_normal((16, ne0)).astype(np.float32)
    return np.tile(np.ascontiguousarray(from_float(type_, x)).reshape(-1).view(np.uint8), rows // 16)


class Product:
    """A compiled MUL_MAT with one weight."""

    def __init__(self, weight: Any, ne0: int) -> None:  # noqa: ANN401  # openvino ships no type information
        ov, o = importlib.import_module("openvino"), importlib.import_module("openvino.opset15")
        x = o.parameter([-1, ne0], ov.Type.f32)
        model = ov.Model([o.result(o.matmul(x, weight, False, True))], [x])
        self.compiled = ov.Core().compile_model(model, "CPU", ACCURACY)
        self._request = self.compiled.create_infer_request()
        self._ne0 = ne0

    def seconds(self, tokens: int, times: int = 15) -> float:
        """Median time of one inference."""
        x: NDArray[np.float32] = np.ones((tokens, self._ne0), np.float32)
        taken = []
        for _ in range(times + 1):
            start = time.perf_counter()
            self._request.infer([x])
            taken.append(time.perf_counter() - start)
        return median(taken[1:])


def measure(name: str, form: str) -> dict[str, float]:
    """Bytes and times of one weight."""
    o = importlib.import_module("openvino.opset15")
    type_ = type_named(name)
    small = stored(type_, _bytes(type_, 64, 512), (512, 64, 1, 1), form)
    assert small is not None  # every kind listed has a compressed form
    Product(small.matrix(), 512).seconds(1, 1)
    data = _bytes(type_, ROWS, NE0)
    before = _resident()
    start = time.perf_counter()
    held = stored(type_, data, (NE0, ROWS, 1, 1), form)
    packing = time.perf_counter() - start
    assert held is not None  # as above
    product = Product(held.matrix(), NE0)
    product.seconds(1, 1)
    resident = _resident() - before
    found = {
        "bytes_in_ggml": data.nbytes,
        "constants": held.nbytes,
        "packed_copies": packed_copies(executed(product.compiled)),
        "resident": resident,
        "seconds_to_pack": packing,
    }
    plain = Product(o.constant(np.ones((ROWS, NE0), np.float32)), NE0)
    for n in TOKENS:
        found[f"time_to_f32_{n}"] = product.seconds(n) / plain.seconds(n)
    return found


@pytest.mark.parametrize(("name", "form"), KINDS)
def test_resident_memory_and_speed(benchmark: BenchmarkFixture, name: str, form: str) -> None:
    """No more than the constants and one packed copy stay resident; times are printed."""

    def run() -> dict[str, float]:
        command = [sys.executable, "-W", "error", __file__, name, form]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)  # itself
        return dict(json.loads(done.stdout))

    found = benchmark.pedantic(run, rounds=1)  # type: ignore[no-untyped-call]  # pytest-benchmark's
    ratio = found["resident"] / (found["constants"] + found["packed_copies"])
    mib = {k: round(found[k] / 2**20, 1) for k in ("bytes_in_ggml", "constants", "packed_copies", "resident")}
    rest = {k: round(v, 2) for k, v in found.items() if k not in mib}
    benchmark.extra_info.update({**mib, **rest, "ratio": round(ratio, 3)})
    print(f"\n{name} {form}: {benchmark.extra_info}")  # noqa: T201  # the figure is what this file is for
    assert ratio <= ALLOWED


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2])))  # noqa: T201  # read by the process that started this one
