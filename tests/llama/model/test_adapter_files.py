"""`conform check-model` on LoRA adapters: pairs of factors, and the model that they change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import conform_here
from trust.files import Draft

from conformance.ggml.types import F32

EXPERTS, RANK, IN, OUT = 4, 2, 32, 64
WEIGHT = "blk.0.ffn_up_exps.weight"
PLAIN = "blk.0.attn_q.weight"
MODEL = {WEIGHT: (IN, OUT, EXPERTS), PLAIN: (IN, OUT)}
RIGHT = {
    f"{WEIGHT}.lora_a": (IN, RANK, EXPERTS),
    f"{WEIGHT}.lora_b": (RANK, OUT, EXPERTS),
    f"{PLAIN}.lora_a": (IN, RANK),
    f"{PLAIN}.lora_b": (RANK, OUT),
}


def _write(path: Path, shapes: dict[str, tuple[int, ...]], **keys: str) -> Path:
    rng = np.random.default_rng(1)
    raw = {n: rng.standard_normal(int(np.prod(ne))).astype(np.float32).view(np.uint8) for n, ne in shapes.items()}
    named = {f"{section}.type": value for section, value in keys.items()}
    Draft("llama", {"llama.block_count": 1, **named}, dict.fromkeys(shapes, F32), shapes, raw).write(path)
    return path


def _adapter(path: Path, **changed: tuple[int, ...] | None) -> Path:
    shapes = {n: changed.get(n[-1], ne) if n.startswith(WEIGHT) else ne for n, ne in RIGHT.items()}
    return _write(path, {n: ne for n, ne in shapes.items() if ne}, general="adapter", adapter="lora")


def _checked(*paths: Path) -> tuple[int, str]:
    compared = ("--compare", paths[1]) if len(paths) > 1 else ()
    ended = conform_here("check-model", paths[0], *compared)
    return ended.exit_code, " ".join(ended.output.split())


def test_an_adapter_that_fits_passes(tmp_path: Path) -> None:
    """Alone, and against its model."""
    model, adapter = _write(tmp_path / "m.gguf", MODEL), _adapter(tmp_path / "a.gguf")
    assert _checked(adapter)[0] == 0
    code, output = _checked(adapter, model)
    assert code == 0, output
    assert "its factors fit" in output


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"b": (RANK, OUT, EXPERTS // 2)}, "lora_a and lora_b have as many experts, 4 expected, 2 found"),
        ({"b": (RANK + 1, OUT, EXPERTS)}, "ne[0] is the rank of lora_a, 2 expected, 3 found"),
        ({"a": None}, f"there is {WEIGHT}.lora_b"),
    ],
)
def test_a_pair_that_contradicts_itself_is_wrong(
    changed: dict[str, tuple[int, ...] | None], says: str, tmp_path: Path
) -> None:
    """Without the model."""
    code, output = _checked(_adapter(tmp_path / "a.gguf", **changed))
    assert code == 1, output
    assert says in output


def test_half_of_the_experts_is_reported(tmp_path: Path) -> None:
    """Both factors have half of the experts, so only the model shows it."""
    half = {"a": (IN, RANK, EXPERTS // 2), "b": (RANK, OUT, EXPERTS // 2)}
    model, adapter = _write(tmp_path / "m.gguf", MODEL), _adapter(tmp_path / "a.gguf", **half)
    assert _checked(adapter)[0] == 0
    code, output = _checked(adapter, model)
    assert code == 1, output
    for factor in "ab":
        assert f"{WEIGHT}.lora_{factor}: experts of {WEIGHT}, which llama.cpp does not check, 4 expected" in output


def test_an_adapter_of_another_model_is_wrong(tmp_path: Path) -> None:
    """Weights that the model lacks, and other widths."""
    model = _write(tmp_path / "m.gguf", {PLAIN: (IN, 2 * OUT)})
    code, output = _checked(_adapter(tmp_path / "a.gguf"), model)
    assert code == 1, output
    assert f"{WEIGHT}: m.gguf has no such weight" in output
    assert f"{PLAIN}.lora_b: ne[1] of {PLAIN}, 128 expected, 64 found" in output
