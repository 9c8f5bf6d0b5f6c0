"""`conform check-model --compare` on a prompt: the first node that differs by more than its types cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from marks import needs_wheel
from trust import files
from trust.files import Draft, Pair

from conformance.cli import main
from conformance.ggml.quants import from_float, to_float
from conformance.llama.cli import model
from conformance.llama.model.finding import FindingKind

pytestmark = needs_wheel
SEED = 1997
"""Draws a llama of two layers in Q4_K, made from F16."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A healthy pair."""
    return files.healthy(SEED, tmp_path_factory.mktemp("zoo"), ["llama"])


def _rope(a: Draft) -> None:
    a.keys["llama.rope.freq_base"] = 500000.0


def _swapped(a: Draft) -> None:
    x, y = "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"
    a.raw[x], a.raw[y] = a.raw[y], a.raw[x]


def _larger(a: Draft) -> None:
    """Every value is 25 % too large, which no single block of four bits shows."""
    name = "blk.1.attn_v.weight"
    type_ = a.types[name]
    x = to_float(type_, a.raw[name].reshape(-1, type_.type_size)) * np.float32(1.25)
    a.raw[name] = from_float(type_, x).reshape(-1).view(np.uint8)


@pytest.mark.parametrize(
    ("damage", "node", "layer"),
    [(_rope, "ROPE Qcur-0", 0), (_swapped, "MUL_MAT ffn_gate-1", 1), (_larger, "MUL_MAT Vcur-1", 1)],
)
def test_the_first_node_that_differs_is_named(
    pair: Pair, tmp_path: Path, damage: Callable[[Draft], None], node: str, layer: int
) -> None:
    """Nodes after it, which only read other values, are not; a factor on a tensor is seen by its node alone."""
    a = replace(pair.a, keys=dict(pair.a.keys), raw=dict(pair.a.raw))
    damage(a)
    damaged = replace(pair, a=a)
    found = damaged.layer(tmp_path)
    assert found is not None
    assert (found.kind, found.where, f"from layer {layer} on" in found.why) == (FindingKind.LAYER, node, True)
    assert ("its parameters differ" in found.why) == (damage is _rope)
    assert any(f.wrong for f in damaged.findings(tmp_path)) == (damage is not _larger)


def test_blocks_of_different_size_cost_what_they_cost(tmp_path: Path) -> None:
    """Channels of very different size, of which the prompt weighs the smaller: a sample gives a fifth of their cost."""
    assert files.healthy(71164, tmp_path).layer(tmp_path) is None


def test_the_command_plays_a_prompt_through_both_files(pair: Pair, tmp_path: Path) -> None:
    """A healthy pair ends with 0 and the KL of its logits, which the record has too; the memory is stated."""
    for draft, name in ((pair.a, "a.gguf"), (pair.b, "b.gguf")):
        draft.write(tmp_path / name)
    a, b, record = (str(tmp_path / n) for n in ("a.gguf", "b.gguf", "r.json"))
    ran = CliRunner().invoke(main, ["check-model", a, "--compare", b, "--tokens", "3,14,15", "--json", record])
    assert ran.exit_code == 0, ran.output
    assert "layers: logits of 3 tokens: KL " in ran.output
    assert "layers: no node differs by more than its types cost" in ran.output
    found = json.loads(Path(record).read_text("utf-8"))["results"]
    (layers,) = (r for r in found if "at=layers" in r["case"])
    assert "tokens=3x14x15" in layers["case"]
    assert 0 < layers["metrics"]["kl_mean"] <= layers["metrics"]["kl_max"] < 1
    assert {r["verdict"] for r in found} == {"PASS"}


def test_a_file_that_llama_refuses_keeps_its_other_findings(pair: Pair, tmp_path: Path) -> None:
    """A missing norm is named, and the reason why no prompt was played."""
    a = replace(pair.a, raw={k: v for k, v in pair.a.raw.items() if k != "output_norm.weight"})
    for draft, name in ((a, "a.gguf"), (pair.b, "b.gguf")):
        draft.write(tmp_path / name)
    ran = CliRunner().invoke(main, ["check-model", str(tmp_path / "a.gguf"), "--compare", str(tmp_path / "b.gguf")])
    assert (ran.exit_code, "missing: output_norm.weight" in ran.output) == (1, True), ran.output
    assert "layers: not compared: " in ran.output


def test_ctrl_c_keeps_what_was_found(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the findings so far; a healthy pair ends with 5, a wrong file with 1."""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_by_layers", stopped)
    record = tmp_path / "r.json"
    bare = replace(pair.a, raw={k: v for k, v in pair.a.raw.items() if k != "output_norm.weight"})
    for a, code in ((pair.a, 5), (bare, 1)):
        for draft, name in ((a, "a.gguf"), (pair.b, "b.gguf")):
            draft.write(tmp_path / name)
        paths = [str(tmp_path / n) for n in ("a.gguf", "b.gguf")]
        ran = CliRunner().invoke(main, ["check-model", paths[0], "--compare", paths[1], "--json", str(record)])
        assert (ran.exit_code, "interrupted; layers were not compared" in ran.output) == (code, True), ran.output
        found = json.loads(record.read_text("utf-8"))
        wrong = [r["case"] for r in found["results"] if r["verdict"] == "FAIL"]
        assert any("at=output_norm.weight" in case for case in wrong) == (code == 1)
        assert [("at=layers" in m["case"], m["cause"]) for m in found["missing"]] == [(True, "interrupted")]
