"""Two settings of one context: what a healthy build gives, which faults differ, and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from typing import Any

import device_faults as d
import pytest
from commands import conform_here
from faulty_device import Device, Fault
from function_faults import device as on_device
from marks import needs_wheel
from scenario_bugs import LLAMA, WINDOW, Bug, model, planted

from conformance.backend.registry import Spec
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.judge.verdict import Result, Verdict
from conformance.llama.live import comparison
from conformance.llama.live.llama import Models
from conformance.llama.live.scenarios.settings import NO_REUSE
from conformance.llama.live.settings import AXES, FAMILY, Player, ids_of, read
from conformance.llama.zoo.family import Request
from conformance.run.isolation.isolate import Isolation

EVERY = ids_of(LLAMA)
IDS = {LLAMA: EVERY, WINDOW: ids_of("gemma3", set=WINDOW.partition("=")[2])}


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    model.cache_clear()


class Here(Models):
    """A model in this process, where faults can be planted."""

    def __init__(self, arch: str) -> None:
        super().__init__(Isolation())
        self.arch = arch

    def use(self, _case_id: str, _own: frozenset[str] = frozenset()) -> Request:
        """The request of the model, with the sequences of the cases."""
        return replace(model(self.arch)._request, n_seq_max=3)

    def on(self, _device: object) -> Any:  # noqa: ANN401
        """Itself."""
        return self

    def ask(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401
        """Answer as a process does."""
        reply = model(self.arch).settings(request)
        if "unsupported" in reply:
            raise UnavailableError(reply["unsupported"])
        if "failed" in reply:
            raise BackendError(reply["failed"])
        return reply


def _play(case_id: str, arch: str = LLAMA) -> Result:
    with closing(Player(Spec("ggml"), Isolation(), None)) as player:
        player._models.close()
        player._models = Here(arch)
        return player.play(case_id)


def _first_failure(device: Device, arch: str = LLAMA) -> Result | None:
    """The first failing case of an architecture on a device with a fault."""
    with planted(Bug(lambda: {"init_from_model": on_device(device)}, arch, "")):
        results = (_play(case_id, arch) for case_id in IDS[arch])
        return next((r for r in results if r.verdict is Verdict.FAIL), None)


def test_each_two_values_of_two_keys_meet() -> None:
    """In the cases of an architecture with all keys, which are few, and each differs from the defaults."""
    cases = [read(case_id).varied for case_id in IDS[WINDOW]]
    for (a, of_a), (b, of_b) in combinations(AXES.items(), 2):
        met = {(case.get(a, ""), case.get(b, "")) for case in cases}
        lacking = {(x.strip("-"), y.strip("-")) for x in of_a.split() for y in of_b.split()} - met - {("", "")}
        assert not lacking, (a, b)
    assert len(cases) <= 20


@pytest.mark.parametrize(
    ("case_id", "why"),
    [
        ("settings/llama-real=1,seqs=3@1", "a key in which two settings differ expected"),
        ("settings/llama-real=1,fa=0,base=fa:0@1", "a key in which two settings differ expected"),
        ("settings/llama-real=1,fa=0,run=p5@1", "run: the family settings has a plan of its own"),
        ("settings/llama-real=1,fa=2@1", "fa: one of"),
        ("settings/llama-real=1,threads=x@1", "threads: a 32-bit integer expected"),
        ("settings/llama-real=1,fa=0,base=w:q8_0@1", "base: KEY:VALUE expected"),
    ],
)
def test_an_id_that_compares_nothing_is_refused(case_id: str, why: str) -> None:
    """With the reason, before anything runs."""
    with pytest.raises(UsageError, match=why):
        FAMILY.build(case_id)


@needs_wheel
@pytest.mark.parametrize("arch", IDS)
def test_a_healthy_build_agrees(arch: str) -> None:
    """All settings of an architecture agree on the wheel's CPU."""
    found = {case_id: _play(case_id, arch) for case_id in IDS[arch]}
    assert {i: r.detail for i, r in found.items() if r.verdict is not Verdict.PASS} == {}


def _unified(params: d.Params) -> bool:
    return bool(params.kv_unified)


def _without_reuse(_: d.Params) -> bool:
    return NO_REUSE in os.environ


FAULTS: dict[str, tuple[Device, str]] = {
    # in one setting only
    "without flash attention another scale": (
        d.where(lambda p: not p.flash_attn_type, d.scale_of("SOFT_MAX", 1.0)), LLAMA,
    ),
    "without flash attention one row of the mask": (d.where(lambda p: not p.flash_attn_type, d.mask_of_one_row), LLAMA),
    "threads lose a row": (d.where(lambda p: p.n_threads == 3, d.tail_left("RMS_NORM")), LLAMA),
    "eight threads lose a share": (d.where(lambda p: p.n_threads == 8, d.share_lost("MUL_MAT")), LLAMA),
    "a product elsewhere lacks a share": (d.where(lambda p: not p.op_offload, d.share_lost("MUL_MAT", least=9)), LLAMA),
    "a cache elsewhere is stored late": (d.where(lambda p: not p.offload_kqv, d.own_cell_late), LLAMA),
    "a large cache wraps": (d.where(lambda p: p.n_ctx > 768, d.kept_below(32)), LLAMA),
    "a store of F32 loses its last row": (d.where(lambda p: p.type_k == 0, d.last_row_lost(4)), LLAMA),
    "a store of BF16 loses its last row": (d.where(lambda p: p.type_v == 30, d.last_row_lost(4)), LLAMA),
    "one stream keeps its mask": (d.where(_unified, d.kept("kq_mask")), LLAMA),
    "graphs that are not reused keep positions": (d.where(_without_reuse, d.kept("inp_pos")), LLAMA),
    "small graphs lose a store": (d.where(lambda p: p.n_ubatch == 7, d.last_row_lost(7)), LLAMA),
    "of a window a single token sees the cells before": (d.always(d.window_open(8)), WINDOW),
    # in all settings, as if each device were wrong alike
    "a mask has one row": (d.always(d.mask_of_one_row), LLAMA),
    "a mask stays": (d.always(d.kept("kq_mask")), LLAMA),
    "positions stay": (d.always(d.kept("inp_pos")), LLAMA),
    "views of a cache stay": (d.always(d.views_kept), LLAMA),
    "attention reads the first stream": (d.always(d.first_stream), LLAMA),
    "one mask serves all streams": (d.always(d.one_mask), LLAMA),
    "cells are counted in place of a mask": (d.always(d.mask_by_count), LLAMA),
    "attention ends at a cell": (d.always(d.mask_ends(128)), LLAMA),
    "a store loses its last row": (d.always(d.last_row_lost(9)), LLAMA),
    "a product leaves the last row": (d.always(d.tail_left("MUL_MAT")), LLAMA),
    "a product of many rows lacks a share": (d.always(d.share_lost("MUL_MAT", least=9)), LLAMA),
}  # fmt: skip
"""Fault -> device that has it, and architecture of the model."""


@needs_wheel
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_differs_between_settings(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some case of the architecture fails, and names the keys that it needs."""
    monkeypatch.setattr(comparison, "NUDGES", 2)  # none of them explains a fault
    failed = _first_failure(*FAULTS[what])
    assert failed is not None
    assert "needed: " in failed.detail


@needs_wheel
@pytest.mark.parametrize(
    ("holds", "fault", "key", "node"),
    [
        (lambda p: not p.flash_attn_type, d.tail_left("GLU", rows=1), "fa=0", ("GLU", "ffn_swiglu-0")),
        (lambda p: p.n_threads == 8, d.scale_of("SOFT_MAX", 1.0), "fa=0+threads=8", ("MUL_MAT", "attn_out-0")),
        (lambda p: p.n_ubatch == 7, d.tail_left("RMS_NORM", tile=4), "ubatch=7", ("RMS_NORM", "norm-0")),
    ],
)
def test_a_failure_names_its_keys_and_its_first_node(
    holds: Callable[[d.Params], bool],
    fault: Callable[[], Fault],
    key: str,
    node: tuple[str, str],
) -> None:
    """Only the keys without which both agree, and the first node, with a row per token, that a fault changes."""
    failed = _first_failure(d.where(holds, fault))
    assert failed is not None
    assert f"needed: {key}; " in failed.detail
    assert failed.where is not None
    assert (failed.where.op, failed.where.name) == node, failed.detail


@needs_wheel
def test_other_experts_at_a_near_tie_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all else agrees with the same experts; a product of experts that lacks a share still fails."""
    case_id = "settings/deepseek2-real=1,seqs=3,batch=33@3"
    with closing(Player(Spec("ggml"), Isolation(), None)) as player:
        passed = player.play(case_id)
    assert passed.verdict is Verdict.PASS, passed.detail
    assert "with the same experts NMSE" in passed.detail
    monkeypatch.setattr(comparison, "NUDGES", 2)
    fault = d.where(lambda p: p.n_batch == 33, d.share_lost("MUL_MAT_ID"))
    with planted(Bug(lambda: {"init_from_model": on_device(fault)}, "deepseek2", "")):
        failed = _play(case_id, "deepseek2")
    assert failed.verdict is Verdict.FAIL
    assert failed.where is not None
    assert failed.where.op == "MUL_MAT_ID", failed.detail


@needs_wheel
def test_the_command_line_runs_them() -> None:
    """With caches in blocks, whose cost is measured."""
    ended = conform_here(
        "run", "--backend", "ggml", "--case", "settings/llama-real=1,seqs=3,cache=q8_0@2",
        "--case", "settings/llama-real=1,seqs=3,cache=q4_0,fa=1,ubatch=9,base=cache:q4_0@2",
    )  # fmt: skip
    assert ended.exit_code == 0, ended.output
    assert "2 PASS" in ended.output
