"""Outputs of ops with requantised weights, computed without the framework's quantisers; writes golden/requant.json.

Written from the rules of ggml-openvino (`quantize_q4_0`, `quantize_q8_0`, `ggml_openvino_get_requant_type`), in plain
Python floats that are rounded to float32 after each step. Block types are unpacked by the package `gguf`. To write the
file: `PYTHONPATH=tests/helpers/graphs python tests/helpers/graphs/independent_requant.py`.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.tensor import FLAG_INPUT, Tensor, is_contiguous

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
FILE = GOLDEN / "requant.json"
LARGEST = 2000
"""Maximum bytes of a stored output."""
GROUP = 128
"""Values per scale of Q4_0_128."""
OPS = frozenset({"MUL_MAT", "MUL_MAT_ID", "GET_ROWS"})
PLAIN = frozenset({"f32", "f16", "bf16", "i32"})


def single(x: float) -> float:
    """Round to float32."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def half(x: float) -> float:
    """Round to float16."""
    return float(struct.unpack("<e", struct.pack("<e", x))[0])


def away(x: float) -> int:
    """Round to an integer, halves away from zero."""
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


def four_bits(group: Sequence[float]) -> list[float]:
    """Q4_0: the scale is the value of largest magnitude / -8."""
    largest = max(group, key=abs)  # the first one
    d = single(largest / -8)
    if d == 0:
        return [0.0] * len(group)
    inverse = single(1 / d)
    return [single(max(-8, min(7, away(single(x * inverse)))) * half(d)) for x in group]


def eight_bits(row: Sequence[float], scale: Callable[[float], float]) -> list[float]:
    """Q8_0 with one scale per row: the largest magnitude / 127, rounded by `scale` after the quants are known."""
    d = single(max(map(abs, row)) / 127)
    inverse = single(1 / d) if d else 0.0
    return [single(away(single(x * inverse)) * scale(d)) for x in row]


def q4_0_128(row: Sequence[float]) -> list[float]:
    """Groups of 128 values."""
    return [y for k in range(0, len(row), GROUP) for y in four_bits(row[k : k + GROUP])]


def q8_0_c(row: Sequence[float]) -> list[float]:
    """A float16 scale per row."""
    return eight_bits(row, half)


def int8_row(row: Sequence[float]) -> list[float]:
    """A float32 scale per row."""
    return eight_bits(row, single)


def f16(row: Sequence[float]) -> list[float]:
    """Floats without a scale."""
    return list(map(half, row))


Form = Callable[[Sequence[float]], list[float]]


def npu(op: str, type_name: str) -> Form | None:
    """On an NPU: the embedding is F16 for Q6_K, else Q8_0_C; Q6_K is the output projection; others are Q4_0_128."""
    if type_name in PLAIN:
        return None
    if op == "GET_ROWS":
        return f16 if type_name == "q6_K" else q8_0_c
    return q8_0_c if type_name == "q6_K" else q4_0_128


def channel8(op: str, type_name: str) -> Form | None:
    """On CPU and GPU: the embedding, Q5_K and Q6_K are Q8_0_C; others keep their type."""
    if type_name in PLAIN:
        return None
    return q8_0_c if op == "GET_ROWS" or type_name in {"q5_K", "q6_K"} else None


def int8xrow(op: str, _type_name: str) -> Form | None:
    """On an integer matrix engine: every weight of a product."""
    return None if op == "GET_ROWS" else int8_row


MODES = {"requant-npu": npu, "requant-channel8": channel8, "requant-int8xrow": int8xrow}
"""Name of the arithmetic -> the form of a weight, by op and type; None if it stays as it is."""


def weights(t: Tensor, data: np.ndarray, form: Form) -> np.ndarray:
    """Unpack, requantise row by row; shape `ne` reversed."""
    name = t.type.name.upper()
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    kind = GGMLQuantizationType[name]
    rows = dequantize(raw.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8)), kind)
    x = np.asarray(rows, np.float32).reshape(-1, t.ne[0])
    return np.array([form(row) for row in x.tolist()], np.float64).reshape(t.shape)


def product(w: np.ndarray, x: np.ndarray) -> list[float]:
    """A matrix (m, k) times a vector: exact products, sums rounded once."""
    return [single(math.fsum(a * b for a, b in zip(row, x.tolist(), strict=True))) for row in w.tolist()]


def output(case: Case, form: Form) -> bytes:
    """The bytes of the only node of a case."""
    (step,) = case.steps
    (node,) = step.outputs
    data = {**case.persistent, **step.inputs}
    a, b = node.src[0], node.src[1]
    assert a is not None
    assert b is not None
    w = weights(a, data[a], form)
    if node.op == "GET_ROWS":
        ids = data[b].view(np.int32).reshape(b.shape)
        out = [w[i3, i2, i] for i3, i2, i1 in np.ndindex(ids.shape[1:]) for i in ids[0, i3, i2 : i2 + 1, i1]]
        return np.array(out, np.float32).tobytes()
    x = data[b].view(np.float32).reshape(b.shape).astype(np.float64)
    if node.op == "MUL_MAT_ID":
        assert node.src[2] is not None
        ids = data[node.src[2]].view(np.int32).reshape(node.src[2].shape)[0, 0]
        out = [product(w[0, e], x[0, t, u % x.shape[2]]) for t, row in enumerate(ids) for u, e in enumerate(row)]
        return np.array(out, np.float32).tobytes()
    r3, r2 = x.shape[0] // w.shape[0], x.shape[1] // w.shape[1]
    out = [product(w[i3 // r3, i2 // r2], x[i3, i2, i1]) for i3, i2, i1 in np.ndindex(x.shape[:3])]
    return np.array(out, np.float32).tobytes()


def chosen() -> Iterator[tuple[str, Case, Form]]:
    """Yield the golden cases of ops whose weight a mode requantises, with small outputs."""
    for case in casefile.read(GOLDEN / "ops.gguf"):
        (step,) = case.steps
        node, *more = step.graph
        if more or node.op not in OPS or 4 * math.prod(node.ne) > LARGEST:
            continue
        a, b = node.src[:2]
        assert a is not None
        assert b is not None
        if b.type.name not in {"f32", "i32"} or not all(s is None or is_contiguous(s) for s in node.src):
            continue
        if a.flags & FLAG_INPUT or any(s and (s.op != "NONE" or s.view_src) for s in node.src):
            continue
        for name, of in MODES.items():
            form = of(node.op, a.type.name)
            if form is None or (form is q4_0_128 and a.ne[0] % GROUP):
                continue
            yield name, case, form


def document() -> dict[str, Any]:
    """The whole file."""
    outputs: dict[str, dict[str, str]] = {name: {} for name in MODES}
    for name, case, form in chosen():
        outputs[name][case.id] = base64.b64encode(output(case, form)).decode()
    return {"schema": 1, "outputs": outputs}


def text(made: Mapping[str, Any]) -> str:
    """The file's text."""
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(document()), encoding="ascii")
