"""The families `gqa`, `multi_sequence`, `weight_placement` and `blocks`: what their cases are, and what sees them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from conformance.backend.registry import Spec
from conformance.case import codec
from conformance.case.case import Placement
from conformance.ggml.errors import CaseFileError, GraphError, UsageError
from conformance.ggml.tensor import new_tensor
from conformance.ggml.types import F32
from conformance.judge.verdict import Verdict
from conformance.llama.zoo import family as zoo
from conformance.run.execute import execute
from conformance.run.isolation.isolate import open_backend
from conformance.run.runner import Runner
from conformance.suite import FAMILIES, LEVELS, weight_placement
from conformance.suite.blocks import Block, block_of
from conformance.suite.decoder import elements, split_arch

NAMES = ("gqa", "multi_sequence", "weight_placement", "blocks")
_PLACED = "weight_placement/parts-w=q4_0,buffer=1@100"


@pytest.mark.parametrize("name", NAMES)
def test_levels_hold_one_another(name: str) -> None:
    """Ids are different from each other, and a level has all those of the ones below it, first."""
    below: tuple[str, ...] = ()
    for level in LEVELS:
        ids = tuple(FAMILIES[name].ids(level))
        assert len(set(ids)) == len(ids)
        assert ids[: len(below)] == below
        below = ids


@pytest.mark.parametrize("name", ["gqa", "multi_sequence"])
def test_small_decoders_come_first(name: str) -> None:
    """Within what a level adds, no model comes before a smaller one."""
    added = 0
    for level in LEVELS:
        ids = FAMILIES[name].ids(level)
        sizes = [elements(i.partition("/")[2].rpartition("@")[0]) for i in ids[added:]]
        assert sizes == sorted(sizes)
        added = len(ids)


@pytest.mark.parametrize("name", NAMES)
def test_cases_are_legal_and_the_same_each_time(name: str) -> None:
    """Every fifth case up to `standard` is valid, has something to check, and is built twice to the same bytes."""
    ids = [i for i in FAMILIES[name].ids("standard") if "nodes=2" not in i]
    for case_id in ids[::5]:
        case = FAMILIES[name].build(case_id)
        case.validate()
        assert case.id == case_id
        assert case.family == name
        assert all(s.outputs for s in case.steps)
        (doc, blobs), (doc2, blobs2) = codec.dump(case), codec.dump(FAMILIES[name].build(case_id))
        assert doc == doc2
        assert {k: v.tobytes() for k, v in blobs.items()} == {k: v.tobytes() for k, v in blobs2.items()}


def test_placements_of_a_model_have_its_bytes() -> None:
    """Where weights lie changes nothing but where they lie."""
    here, there = (weight_placement.build(f"weight_placement/rows-w=q8_0{p}@5") for p in ("", ",buffer=1,usage=any"))
    assert list(here.placement.values()) == [Placement(0)]
    assert list(there.placement.values()) == [Placement(1, "any")]
    assert [d.tobytes() for d in here.persistent.values()] == [d.tobytes() for d in there.persistent.values()]


def test_placement_travels_with_the_case() -> None:
    """A case's document says where its weights lie, and a malformed one is refused by the field."""
    case = weight_placement.build(_PLACED)
    doc, blobs = codec.dump(case)
    assert list(codec.load(doc, blobs).placement.values()) == list(case.placement.values())
    good = doc["placement"][0]
    bad: list[dict[str, Any]] = [
        {"persistent": 9},
        {"buffer": -1},
        {"buffer": True},
        {"usage": "compute"},
        {"usage": 1},
        {"more": 0},
    ]
    for change in bad:
        with pytest.raises(CaseFileError, match="placement"):
            codec.load({**doc, "placement": [{**good, **change}]}, blobs)
    with pytest.raises(CaseFileError, match="already"):
        codec.load({**doc, "placement": [good, good]}, blobs)
    with pytest.raises(GraphError, match="placement"):
        replace(case, placement={new_tensor(F32, 1): Placement()}).validate()


def test_ggml_places_what_it_can_and_says_what_not() -> None:
    """A weight lies in the buffer type asked for where every use is supported there; else a note says why not."""
    with closing(open_backend(Spec("ggml"))) as backend:
        names = [b.name for b in backend.buffer_types()]
        whole = execute(backend, weight_placement.build("weight_placement/experts-w=q4_0,buffer=1@1"))
        view = execute(backend, weight_placement.build("weight_placement/rows-w=q4_0,buffer=1@1"))
        back = execute(backend, weight_placement.build(f"weight_placement/experts-w=q4_0,buffer={len(names)}@1"))
    if len(names) == 1:
        assert any("one buffer type" in note for note in whole.witness.notes)
        return
    assert names[1] in whole.witness.bytes
    assert not whole.witness.notes
    assert names[1] not in back.witness.bytes
    assert any(f"is not in {names[1]}" in note for note in view.witness.notes)


def test_a_backend_with_one_kind_of_memory_says_so() -> None:
    """The witness of the reference tells that nothing was placed."""
    ran = execute(open_backend(Spec("cpu")), weight_placement.build(_PLACED))
    assert ran.witness.notes == ["the backend has only one buffer type for weights"]


@pytest.mark.parametrize(
    "wrong",
    ["rows-w=q4_0,buffer=-1@1", "rows-w=q4_0,usage=x@1", "rows-w=q4_0,weights=no@1", "rows-x=1@1", "rows-w=q4_0"],
)
def test_wrong_ids_are_refused(wrong: str) -> None:
    """An id that says what cannot be is refused with the reason."""
    with pytest.raises(UsageError, match="weight_placement/"):
        weight_placement.build(f"weight_placement/{wrong}")


def test_blocks_are_told_by_names() -> None:
    """A weight's or cache's name says which sublayer it belongs to."""
    assert block_of("blk.3.attn_q_norm.weight") == Block(3, "attention")
    assert block_of("blk.3.post_attention_norm.weight") == Block(3, "post_attention_norm")
    assert block_of("blk.0.ffn_up_exps.bias") == Block(0, "feedforward")
    assert block_of("cache_s_l2") == Block(2, "recurrent")
    assert block_of("cache_k_l1") == Block(1, "attention")
    assert block_of("output_norm.weight") == Block(0, "head")
    assert block_of("token_embd.weight") is None


def test_a_name_that_begins_like_a_presets_is_an_architecture_of_its_own() -> None:
    """`llama-embed` is recorded, `llama-3.2-1b` built, and neither is `llama` with strange keys."""
    assert split_arch("llama-embed-seqs=2,run=p3") == ("", "llama-embed-seqs=2,run=p3")
    assert split_arch("llama-3.2-1b-l=1") == ("llama-3.2-1b", "l=1")
    assert split_arch("gpt-oss") == ("gpt-oss", "")
    if not zoo.available():
        (case_id,) = (i for i in FAMILIES["blocks"].ids("full") if "llama-embed" in i)
        assert FAMILIES["blocks"].build(case_id).params["arch"] == "llama-embed"


def test_an_unknown_block_names_those_there_are() -> None:
    """A block that the model lacks is refused, and the message lists what it has."""
    with pytest.raises(UsageError, match="attention of layer 1"):
        FAMILIES["blocks"].build("blocks/llama-run=p3,layer=7,block=attention@1")


def test_blocks_of_a_recording_pass() -> None:
    """A recurrence that llama.cpp laid out, cut out, gives the same on the reference and on ggml."""
    if zoo.available():
        pytest.skip(zoo.available())
    case = FAMILIES["blocks"].build("blocks/mamba-seqs=2,nodes=2,run=p3.d1,block=recurrent@1")
    assert {n.op for n in case.steps[0].graph} >= {"SSM_CONV", "SSM_SCAN"}
    assert [r.verdict for r in Runner().run(Spec("ggml"), [case])] == [Verdict.PASS]
