"""The list of faults: each is where it says, and one of each class is noticed by a case of `smoke`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from conformance.judge.verdict import FAILURES
from conformance.suite import FAMILIES
from trust.faults import FOLDER, Bundle, Fault, PlantError, original, read
from trust.hunt import hunt
from trust.inject import UNLOADABLE, Injector

FAULTS = {f.name: f for f in read([FOLDER])}


def test_each_stands_in_the_source_and_changes_it() -> None:
    """A fault whose place has moved is an error, not a survivor; names differ and families exist."""
    assert len(FAULTS) == len(read([FOLDER])) >= 200
    for fault in FAULTS.values():
        assert fault.sources()[fault.file] != original(fault.file)
        assert set(fault.families) <= FAMILIES.keys()
        assert fault.families
    assert len([f for f in FAULTS.values() if f.report and f.level == "smoke"]) >= 40


def test_a_fault_that_cannot_be_injected_is_an_error() -> None:
    """A text that is not there, or two faults at one place, are never counted as survivors."""
    fault = FAULTS["mask-off-by-one"]
    with pytest.raises(PlantError, match="expected once"):
        hunt([replace(fault, old="no such line")], "smoke")
    with pytest.raises(PlantError, match="expected once"):
        Bundle("two", (fault, fault)).sources()


TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
CLASSES = {
    "types": ("iq4-xs-scale-off-by-one", "ops/GET_ROWS-iq4_xs+i32-a=256x5,n=9@466"),
    "values": ("silu-overflows", "ops/UNARY.SILU-f32-ne=67x4,data=range@983"),
    "ties": ("argmax-adds-equals-up", "ops/ARGMAX-f32-ne=64x9,data=ties@3"),
    "shapes": (
        "mask-of-first-head",
        "ops/FLASH_ATTN_EXT-f32+f32-q=64x3x6x4,k=64x32x3x4,mask=32x5x6x2,hide=bias,vm=off@696",
    ),
    "sizes": ("rows-by-16-bits", "ops/GET_ROWS-q4_0+i32-a=32x131080,n=40@547"),
    "prompts": (
        "npu-tokens-of-first-chunk",
        f"kv_growth/llama-{TINY},cache=f16,ctx=1024,ubatch=1024,run=at255.p257.d1@877",
    ),
    "xdna2 alone": (
        "xdna2-scale-of-next-row",
        "blocks/llama-l=1,embd=2048,heads=4,kv=2,head=16,ff=32,vocab=32,ctx=256,w=f16,run=at20.p3.d1,block=attn_q@783",
    ),
    "devices": ("sched-cache-not-carried", "weight_placement/shared-w=f32,d=2048@138"),
    "weights in mid-session": ("session-weight-form-stays", f"relations/weights-{TINY},w=q8_0,run=p9.d2@714"),
    "caches nobody reads": ("session-rows-lost-unread", f"relations/unread-{TINY},run=p9.d3@693"),
    "other outputs": ("session-plan-of-first-outputs", f"relations/reused-{TINY},run=p9.d4@838"),
    "equal but for a parameter": ("session-size-without-op-params", "alias/differs=eps,of=decoder@645"),
    "cost": ("ov-lifting-off", f"kv_growth/llama-{TINY},write=cpy,fa=0,run=at254.d4.reset.p3.d1@800"),
    "threads": ("ov-thread-part-lost", f"relations/threads-{TINY},run=p9.d2@550"),
    "softcap": ("softcap-before-scale", "gqa"),
    "streams": ("streams-swapped", "multi_sequence"),
    "blocks of types": ("nibbles-swapped", "weight_placement"),
    "experts": ("next-expert", "blocks"),
    "activations beyond F16": (
        "report-experts-overflow-f16",
        "ops/MUL_MAT_ID-q8_0+f32-as=256x5x4,n_used=2,n_tokens=9,data=beyond@250",
    ),
    "scores beyond F16": (
        "report-scores-overflow-f16",
        "ops/FLASH_ATTN_EXT-f32+f32-q=64x9x4,k=64x96x2,mask=96x65,data=large@705",
    ),
    "rising rows": ("report-maximum-of-first-block", "ops/SOFT_MAX-f32-ne=2049x3,data=rising@751"),
    "an expert twice": (
        "report-expert-once-a-token",
        "ops/MUL_MAT_ID-q6_K+f32-as=256x9x5,n_used=3,n_tokens=9,pick=twice@551",
    ),
    "tails of rows": ("report-q6-k-rows-of-128", "ops/MUL_MAT-q6_K+f32-a=256x129,b=256x9@60"),
    "factors of norms": ("report-fused-factor-offset", "ops/RMS_NORM-f32-ne=40x5x2,by=first,vby=pad@406"),
}
"""What mutants showed that earlier suites did not see -> a fault of that class, and a case of `smoke` or a family."""


@pytest.mark.parametrize(("name", "where"), CLASSES.values(), ids=CLASSES)
def test_each_class_of_faults_is_noticed(name: str, where: str) -> None:
    """A case of `smoke` fails with the fault; each adapter's tests show that it passes without."""
    fault: Fault = FAULTS[name]
    if where in FAMILIES:
        (found,) = hunt([replace(fault, families=(where,))], "smoke")
        assert found.noticed
        return
    assert where in FAMILIES[where.partition("/")[0]].ids("smoke")
    with closing(Injector([fault])) as runner:
        (result,) = runner.run(fault.spec, [runner.case(where)])
    assert result.verdict in FAILURES
    assert UNLOADABLE not in result.detail
