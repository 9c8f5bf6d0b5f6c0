"""Signals: POOL_1D, PAD_REFLECT_1D, TIMESTEP_EMBEDDING."""

from __future__ import annotations

from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.suite.data import normal, uniform
from conformance.suite.grid import grid, shapes
from conformance.suite.ops.bench import Bench, cases


@cases(
    "POOL_1D",
    keys=f"ne=SHAPE vne= op={'|'.join(OP_POOL.__members__)} k=NUMBERS",
    wide=(
        grid("f32 f16", ne="24x5x3x2", op="MAX AVG", k="1x1x0 3x1x1 4x4x0 5x3x2 3x7x1 1x2x0"),
        grid("f32", ne="24x5x3", op="MAX AVG", k="3x2x1", vne="pad off rows"),
    ),
    full=(grid("f32 f16", ne="4096x64", op="MAX AVG", k="8x8x0"),),
    smoke=("POOL_1D-f32-ne=9x3,op=AVG,k=3x2x1",),
    pairs=(
        grid(
            "f32 f16",
            ne=shapes("10 128", "3 5", "1 3"),
            op="MAX AVG",
            k="1x1x0 1x2x0 3x1x0 3x1x1 3x2x0 3x2x1",
            vne="- pad off",
        ),
    ),
)
def _pool_1d(bench: Bench) -> Tensor:
    a = bench.first("a", "ne", normal())
    return bench.b.pool_1d(a, OP_POOL[bench.v["op"]], *bench.v["k"])


@cases(
    "PAD_REFLECT_1D",
    keys="ne=SHAPE by=NUMBERS",
    wide=(
        grid("f32", ne="10x5x4x3 64x3 2x9", by="0x1 1x0 1x1"),
        grid("f32", ne="64x3", by="10x9 63x63"),
    ),
    smoke=("PAD_REFLECT_1D-f32-ne=7x3,by=2x6",),
    full=("PAD_REFLECT_1D-f32-ne=3000x384x4,by=10x9",),
)
def _pad_reflect_1d(bench: Bench) -> Tensor:
    a = bench.leaf("a", bench.types[0], bench.v["ne"], normal())
    return bench.b.pad_reflect_1d(a, *bench.v["by"])


@cases(
    "TIMESTEP_EMBEDDING",
    keys="n=1 dim=2 max_period=10000 most=999",
    types="timesteps",
    wide=(
        grid("f32", n="1 5", dim="2 3 15 320 321"),
        grid("f32", n=2, dim="31 64", max_period="1 100", most="1 999"),
    ),
    smoke=("TIMESTEP_EMBEDDING-f32-n=3,dim=15",),
    full=("TIMESTEP_EMBEDDING-f32-n=1024,dim=1281",),
)
def _timestep_embedding(bench: Bench) -> Tensor:
    """Times from 0 to `most`; an odd `dim` ends with a zero, which old builds of ggml did not write."""
    v = bench.v
    timesteps = bench.leaf("timesteps", bench.types[0], (v["n"], 1, 1, 1), uniform(0.0, float(v["most"])))
    return bench.b.timestep_embedding(timesteps, v["dim"], v["max_period"])
