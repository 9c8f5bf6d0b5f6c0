"""Whole architectures: llama.cpp on a device against its own CPU run."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import conform_here
from gguf import GGUFReader
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.ggml.errors import BackendCrashError, BackendError, UnavailableError, UsageError
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.live.arch import RUNS, Player, Run, id_of
from conformance.llama.live.comparison import judge_runs, nmse
from conformance.llama.live.llama import Device, Process
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.model import architecture, write_metadata
from conformance.llama.zoo.recorder import Choice, flips, load_choices, save_choices
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.select import build, case_ids

PAIR = Pair("arch/x@1", "ggml")


def test_what_a_run_says() -> None:
    """Within tolerance PASS, beyond FAIL with the first such batch, a NaN or another shape is infinitely wrong."""
    ones = np.ones((1, 4), np.float32)
    assert judge_runs(PAIR, [ones, ones], [ones, ones]).verdict is Verdict.PASS
    wrong = judge_runs(PAIR, [ones, ones * np.float32(1.1)], [ones, ones])
    assert (wrong.verdict, wrong.where and wrong.where.step) == (Verdict.FAIL, 1)
    assert nmse(ones * np.float32(np.nan), ones) == inf
    assert nmse(np.ones((2, 4), np.float32), ones) == inf
    assert judge_runs(PAIR, [ones], [ones, ones]).detail == "2 batches expected, 1 found"


CPU = Device("CPU too", "", "CPU")


def _play(case_id: str, on: Device = CPU) -> Result:
    """A run on a device in the place of one that a backend names."""
    with closing(Player(Spec("ggml"), Isolation(time_limit=60.0), None)) as player:
        player._device = on
        return player.play(case_id)


@needs_wheel
def test_an_architecture_that_a_build_does_not_know_is_unsupported(tmp_path: Path) -> None:
    """A build older than the suite refuses a model of a newer architecture; this is no failure of the build."""
    write_metadata(tmp_path / "m.gguf", "one-of-next-year", architecture("llama").keys, {})
    process = Process(
        "conformance.llama.live.worker", CPU, Request("a", "a", model=str(tmp_path / "m.gguf")), Isolation(60.0)
    )
    with pytest.raises(UnavailableError, match=r"this llama\.cpp has no architecture 'one-of-next-year'"):
        process.ask(run="")


@needs_wheel
def test_a_device_that_is_the_cpu_agrees() -> None:
    """The wheel's CPU device, chosen by name, gives its own logits in every run."""
    with closing(Player(Spec("ggml"), Isolation(time_limit=60.0), None)) as player:
        player._device = CPU
        found = {run: player.play(id_of("llama", run, set="block_count:1")) for run in RUNS}
    assert {(r.verdict, r.nmse, r.metrics["splits"]) for r in found.values()} == {(Verdict.PASS, 0.0, 1)}, found


@needs_wheel
def test_a_tensor_is_split_over_two_devices() -> None:
    """Each half of the CPU computes its part, so the sums differ in the last bits; who has no such device says so."""
    case = id_of("llama", set="block_count:1")
    split = _play(case, Device("split", "", "CPU+CPU"))
    assert split.verdict is Verdict.PASS, split.detail
    assert split.nmse
    with pytest.raises(BackendError, match="has no device 'none'"):
        _play(case, Device("split", "", "CPU+none"))


def test_a_cpu_is_judged_by_the_wheel() -> None:
    """Any other device by the CPU of its own library."""
    assert Device("x", "/lib", "CPU").judge.lib == ""
    assert Device("x", "/lib", "GPU").judge.lib == "/lib"


@needs_wheel
@pytest.mark.parametrize(
    ("on", "dies", "error", "says"),
    [
        (CPU, {"CPU", "CPU too"}, BackendCrashError, "^CPU too died"),
        (CPU, {"CPU"}, UnavailableError, "^no reference: on the CPU of the wheel: CPU died"),
        (Device("GPU", "", "GPU"), {"CPU", "GPU"}, UnavailableError, "^no reference: on the CPU of the same build:"),
    ],
)
def test_a_cpu_that_dies_is_not_excused_by_its_reference(
    on: Device, dies: set[str], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that kills every CPU is a crash of the CPU under test, and no question to another device."""

    def run(_: Player, device: Device, *__: object) -> Run:
        if device.name in dies:
            raise BackendCrashError(f"{device.name} died")
        return Run([np.ones((1, 4), np.float32)], {})

    monkeypatch.setattr(Player, "run", run)
    with pytest.raises(error, match=says):
        _play(id_of("llama", set="block_count:1"), on)


@needs_wheel
def test_a_reference_of_zeros_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of ours that computes nothing is no model that a device may refuse."""
    monkeypatch.setattr(Player, "run", lambda *_: Run([np.zeros((1, 4), np.float32)], {}))
    found = _play(id_of("llama", set="block_count:1"))
    assert (found.verdict, found.detail) == (Verdict.VACUOUS, "no reference: on the CPU every result is 0")


def _choice(scores: list[float], k: int = 2) -> Choice:
    values = np.array([scores])
    return Choice("ffn_moe_argsort-5", 1, k, values, np.argsort(-values, kind="stable").astype(np.int32))


def test_a_flip_is_told_apart_by_its_margin() -> None:
    """Another expert at a near-tie is noted with its margin; by a large margin, or by wrong scores, it is wrong."""
    right = _choice([1.0, 0.5001, 0.5, -1.0])
    notes, wrong = flips([_choice([1.0, 0.5, 0.5002, -1.0])], [right])
    assert not wrong
    assert notes == ["expert 2 for 1 at ffn_moe_argsort-5, batch 1, token 0: margin 0.0001, scores differ by 0.0002"]
    assert flips([_choice([1.0, 0.5001, 0.5, -1.0])], [right]) == ([], "")
    assert "scores are wrong already" in flips([_choice([1.0, 0.1, 0.9, -1.0])], [right])[1]
    blunt = _choice([1.0, 0.5001, 0.5, -1.0])
    blunt.chosen = np.array([[0, 3, 1, 2]], np.int32)
    assert "the choice itself is wrong" in flips([blunt], [right])[1]


MOE = id_of("qwen2moe", set="block_count:1")


@needs_wheel
def test_what_follows_a_flip_is_held_to_the_same_experts(tmp_path: Path) -> None:
    """A device that takes another expert at a near-tie passes if the rest is right, and fails if it is not."""
    flipped = tmp_path / "flipped.npz"

    class Flipping(Player):
        """The device takes what stands in a file, and says that two scores were as near as it takes."""

        def run(self, on: Device, request: Request, watch: dict[str, Any] | None = None) -> Run:
            if watch is None:
                return Player.run(self, on, request)
            run = Player.run(self, on, request, {**watch, "forced": watch["forced"] or str(flipped)})
            assert run.choices is not None
            made = load_choices(run.choices)
            made[-1].scores[0, [a, b]] = 0.5 + np.array([1e-6, 0.0] if watch["forced"] is None else [0.0, 1e-6])
            if watch["forced"] is None:
                made[-1].chosen[0] = order
            save_choices(run.choices, made)
            return run

    player = Flipping(Spec("ggml"), Isolation(), None)
    try:
        request = player._models.use(MOE)
        own = Player.run(player, player._device, request, {"forced": None, "values": False})
        assert own.choices is not None
        found = load_choices(own.choices)
        assert found
        assert all(0 < c.k < c.scores.shape[1] for c in found)
        last = found[-1]
        order = last.chosen[0]
        order[[last.k - 1, last.k]] = order[[last.k, last.k - 1]]
        a, b = order[last.k - 1], order[last.k]
        save_choices(flipped, found)
        run = player.run(player._device, request, {"forced": None, "values": False})
        result = judge_runs(PAIR, run.results, own.results)
        assert result.verdict is Verdict.FAIL, result.nmse
        explained = player.explain(result, run, request)
        assert explained.verdict is Verdict.PASS, explained.detail
        assert "with the same experts NMSE 0" in explained.detail
        assert f"expert {a} for {b}" in explained.detail
        worse = Run([r * np.float32(1.2) for r in run.results], {})
        assert player.explain(judge_runs(PAIR, worse.results, own.results), worse, request).verdict is Verdict.FAIL
    finally:
        player.close()


@needs_wheel
def test_the_first_nan_is_charged_to_what_held_it() -> None:
    """The first node with NaN is named, and so is a source that held NaN before it ran."""
    player = Player(Spec("ggml"), Isolation(), None)
    values: dict[str, object] = {"forced": None, "values": True}
    try:
        request = player._models.use(id_of("llama", set="block_count:1"))
        assert player.run(player._device, request, values).spoilt == ""
        player._models.on(player._device).close()
        place = next(t.data_offset for t in GGUFReader(request.model).tensors if t.name == "blk.0.ffn_norm.weight")
        with Path(request.model).open("r+b") as file:
            file.seek(place)
            file.write(np.full(1, np.nan, "<f4").tobytes())
        run = player.run(player._device, request, values)
        result = Result(*PAIR, Verdict.FAIL, notes=("batch 0",))
        expected = (
            "batch 0: MUL ffn_norm-0 is the first value with NaN; it reads blk.0.ffn_norm.weight, which contained NaN"
        )
        assert player.explain(result, run, request).notes[1:] == (f"{expected} before",)
    finally:
        player.close()


@needs_wheel
def test_a_whole_model_in_a_run(tmp_path: Path) -> None:
    """A result in the record of any run; a device that is absent is an error of the user."""
    out = tmp_path / "arch.json"
    result = conform_here("run", "--backend", "ggml", "--case", "arch/mamb?-real=1,run=p2@1", "--json", out)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert (row["case"], row["verdict"]) == ("arch/mamba-real=1,run=p2@1", "PASS")
    absent = conform_here("run", "--backend", "ggml?device=NONE9", "--case", "arch/llama-*")
    assert (absent.exit_code, "NONE9" in absent.output) == (2, True)


def test_keys_of_an_id_go_with_globs_of_architectures() -> None:
    """Ids that no level lists: each architecture that fits, each scenario, each run of a projector."""
    assert case_ids([], ["arch/t5*-w=q8_0@1"], "smoke") == [
        f"arch/{name}-w=q8_0@1" for name in ("t5", "t5-deep-decoder", "t5-v1.0", "t5encoder")
    ]
    found = case_ids([], ["scenario/mamba*-cache=q8_0,do=state-s*@1"], "smoke")
    assert {i.partition("/")[2].partition("-")[0] for i in found} == {"mamba", "mamba2"}
    assert {"state-same", "state-seq"} <= {i.partition("do=")[2].removesuffix("@1") for i in found}
    assert case_ids([], ["projector/mlp-do=media-*,w=q8_0@1"], "smoke")[0] == "projector/mlp-do=media-whole,w=q8_0@1"
    for glob in ("arch/no-such*-w=q8_0@1", "arch/llama*-w=q9@1", "scenario/llama-do=nothing@1", "projector/nothing-*"):
        with pytest.raises(UsageError):
            case_ids([], [glob], "smoke")


def test_only_ggml_libraries_run_llama_cpp() -> None:
    """Another adapter is UNSUPPORTED; an id in a file, which may be a stranger's, runs its graphs and nothing else."""
    runner = Runner()
    (unsupported,) = runner.run(Spec("cpu"), [runner.case("arch/llama-real=1@1")])
    graphs = replace(build("weight_placement/both-w=q4_0@0"), id="arch/llama-real=1@1", file="stranger.gguf")
    (ran,) = runner.run(Spec("cpu"), [graphs])
    runner.close()
    assert unsupported.verdict is Verdict.UNSUPPORTED
    assert "llama.cpp runs on ggml's own backends only" in unsupported.detail
    assert (ran.verdict, ran.steps) == (Verdict.PASS, len(graphs.steps))
