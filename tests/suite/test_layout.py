"""The builder's graphs are llama.cpp's own, and the family `layout` says what moved where they are not."""

from __future__ import annotations

import pytest
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Tensor
from conformance.judge.compare import compare
from conformance.judge.verdict import Verdict
from conformance.llama.live.graphs import SETTINGS, moved, pair
from conformance.run.execute import execute
from conformance.run.isolation.isolate import open_backend
from conformance.run.runner import Runner
from conformance.run.session.select import build, case_ids
from conformance.suite.decoder.layers import B, Sketch

pytestmark = needs_wheel

SAMPLE = [
    ("llama", "fa=0,run=p250.d8"),
    ("llama", "head=64,cache=q8_0,run=p40.d2.shift9.d2"),
    ("qwen3", "seqs=3,run=p5+9+1.d2.rm1.d2.add1.p3.d2"),
    ("qwen3", "seqs=3,unified=1,fa=0,run=p50+90+10.d3.cp0.d2"),
    ("gemma2", "ctx=1024,seqs=2,ubatch=64,fa=0,run=p300+17.d3.p200.d2"),
    ("gemma2", "ctx=1024,swafull=1,ubatch=64,run=p200.shift30.d2"),
    ("gpt-oss", "ctx=1024,ubatch=64,run=p300.d3.p200.d2"),
    ("gpt-oss", "seqs=3,fa=0,run=p5+9+1.d2.rm1.d2"),
    ("lfm2", "l=3,convperiod=3,heads=2,kv=1,head=32,seqs=4,unified=1,run=p4.d1.rm1.d1.add1.p3.d1.cp2.d2"),
    ("lfm2", "fa=0,run=p250.d8"),
]
"""Two of each architecture's settings; the family `layout` has all."""


def test_the_sample_is_of_every_architecture() -> None:
    """What is compared here is what the family has at level standard, and nothing is left out."""
    ids = case_ids(["layout"], [], "standard")
    assert set(ids) >= {f"layout/{arch}-{keys}@0" for arch, keys in SAMPLE}
    assert len(ids) == sum(map(len, SETTINGS.values()))
    assert {arch for arch, _ in SAMPLE} == SETTINGS.keys()
    assert all(keys in SETTINGS[arch] for arch, keys in SAMPLE)


@pytest.mark.parametrize(("arch", "keys"), SAMPLE)
def test_graphs_equal_llama_cpp(arch: str, keys: str) -> None:
    """Every tensor of every step: op, name, type, ne, nb, op_params, flags, edges, and the bytes of every input."""
    theirs, ours = pair(arch, keys)
    assert [str(m) for m in moved(theirs, ours)] == []


@pytest.mark.parametrize("arch", SETTINGS)
def test_logits_equal_llama_cpp(arch: str) -> None:
    """The real ggml gives for our graphs the logits that llama.cpp had over the same weights."""
    theirs, ours = pair(arch, "run=p9.d2")
    backend = open_backend(Spec("ggml"))
    try:
        ran = execute(backend, ours).steps
    finally:
        backend.close()
    for want, got in zip(theirs.steps, ran, strict=True):
        (logits,) = (t for t in want.expected if t.name == "result_output")
        (found,) = got.outputs.values()
        assert compare(logits, want.expected[logits], found).nmse < 1e-10


def test_moves_are_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that only one side has is named with its neighbour, and what reads it with both sources."""
    norm = Sketch.norm

    def copied(g: Sketch, cur: Tensor, weight: str, name: str, il: int, *, rms: bool = False) -> Tensor:
        cur = norm(g, cur, weight, name, il, rms=rms)
        return B.cont(cur) if name == "result_norm" else cur

    monkeypatch.setattr(Sketch, "norm", copied)
    runner = Runner()
    (result,) = runner.run(Spec("ggml"), [runner.case("layout/llama-run=p3@0")])
    runner.close()
    assert result.verdict is Verdict.FAIL
    assert result.error is not None
    assert result.error.words == "MUL result_norm f32[64, 1, 1, 1]: llama.cpp has flags 18, the builder 16"
    assert result.where is not None
    assert result.where.node
    for said in (
        "after MUL result_norm f32[64, 1, 1, 1], llama.cpp has nothing, the builder CONT result_norm",
        "MUL_MAT result_output f32[64, 1, 1, 1]: llama.cpp has src[1] MUL result_norm",
    ):
        assert said in result.detail
    for case in ("layout/llama-run=q@0", "layout/nobody-run=p3@0"):
        with pytest.raises(UsageError):
            build(case)
