"""Variants of T5 in the zoo: encoder-decoders that llama.cpp runs as one architecture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf import GGUFReader
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.judge.verdict import Verdict
from conformance.llama.live.arch import Player, id_of
from conformance.llama.zoo import model
from conformance.llama.zoo.family import prepare, read
from conformance.run.isolation.isolate import Isolation

RUN = ("byt5", "flan-t5", "madlad400", "t5", "t5-v1.0", "umt5")
"""Encoder-decoders that llama.cpp runs."""
SHALLOW = "t5-deep-decoder"
"""One whose encoder has fewer blocks than its decoder: llama.cpp makes no cache for the other blocks."""


def weights(name: str, tmp_path: Path) -> set[str]:
    """What the file of a made-up model holds."""
    request = prepare(tmp_path / "model.gguf", *read(f"zoo/{name}-real=1@1"))
    file = GGUFReader(request.model)
    assert file.fields["general.architecture"].contents() == "t5"
    assert not any(re.search(model.architecture(name).absent or "^$", t.name) for t in file.tensors)
    return {t.name for t in file.tensors}


def test_variants_stand_beside_the_architectures() -> None:
    """They are found by name and run where architectures are named, and are in no level of cases."""
    variants = {a.name for a in model.table().values() if a.of}
    assert variants == {*RUN, SHALLOW} - {"t5"}
    assert not variants & set(model.runnable())
    assert set(model.runnable(with_variants=True)) == variants | set(model.runnable())
    assert all(key.startswith(("t5.", *model._ROOTS)) for name in variants for key in model.architecture(name).keys)


@needs_wheel
def test_what_variants_hold(tmp_path: Path) -> None:
    """Variants have the layers and tensors that their metadata describes.

    A gate or none, an output of its own or the embedding's, a bias of each block or of the first alone, and as many
    blocks of either half as the metadata says.
    """
    old, new, each, bytes_ = (weights(name, tmp_path) for name in ("t5-v1.0", "flan-t5", "umt5", "byt5"))
    assert not any("ffn_gate" in w or w == "output.weight" for w in old)
    assert {"enc.blk.0.ffn_gate.weight", "dec.blk.0.ffn_gate.weight", "output.weight"} <= new & each & bytes_
    assert {w for w in new if "rel_b" in w} == {"enc.blk.0.attn_rel_b.weight", "dec.blk.0.attn_rel_b.weight"}
    assert {"enc.blk.1.attn_rel_b.weight", "dec.blk.1.attn_rel_b.weight"} <= each
    assert {w.split(".")[2] for w in bytes_ if w.startswith("enc.blk.")} == {"0", "1", "2"}
    assert {w.split(".")[2] for w in bytes_ if w.startswith("dec.blk.")} == {"0"}


@needs_wheel
@pytest.mark.parametrize("name", RUN)
def test_a_variant_runs(name: str) -> None:
    """One sequence and two in one stream, equal to the bit on the CPU called by name."""
    player = Player(Spec.parse("ggml?device=CPU"), Isolation(), None)
    found = [player.play(id_of(name, run)) for run in ("1", "2 unified")]
    player.close()
    assert [(r.verdict, r.nmse) for r in found] == [(Verdict.PASS, 0.0)] * 2, found


@needs_wheel
def test_a_deeper_decoder_has_its_blocks(tmp_path: Path) -> None:
    """The metadata say 1 and 3."""
    held = weights(SHALLOW, tmp_path)
    assert {w.split(".")[2] for w in held if w.startswith("dec.blk.")} == {"0", "1", "2"}
    assert {w.split(".")[2] for w in held if w.startswith("enc.blk.")} == {"0"}
