"""`conform zoo`: llama.cpp on a device against its own CPU run, cell by cell."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from gguf import GGUFReader
from marks import needs_wheel

from conformance.cli import main
from conformance.suite.zoo.family import prepare, read
from conformance.suite.zoo.play import RUNS, Device, Look, Played, _run, compare, explain, nmse, play
from conformance.suite.zoo.recorder import Choice, flips, load_choices, save_choices


def test_what_a_cell_says() -> None:
    """Within tolerance PASS, beyond FAIL with the first such batch, a NaN or another shape is infinitely wrong."""
    ones = np.ones((1, 4), np.float32)
    reference = Played("PASS", results=[ones, ones])
    assert compare(Played("PASS", results=[ones, ones]), reference).verdict == "PASS"
    wrong = compare(Played("PASS", results=[ones, ones * 1.1]), reference)
    assert (wrong.verdict, wrong.step) == ("FAIL", 1)
    assert nmse(ones * np.float32(np.nan), ones) == inf
    assert nmse(np.ones((2, 4), np.float32), ones) == inf
    assert compare(Played("CRASH", "SIGABRT"), reference).verdict == "CRASH"


@needs_wheel
def test_a_device_that_is_the_cpu_agrees() -> None:
    """The wheel's CPU device, chosen by name, gives its own logits in every run."""
    found = play("zoo/llama-real=1,set=block_count:1@1", [Device("CPU too", "", "CPU")], RUNS)
    assert {p.verdict for p in found.values()} == {"PASS"}
    assert max(p.nmse or 0.0 for p in found.values()) < 1e-4


@needs_wheel
def test_a_tensor_is_split_over_two_devices() -> None:
    """Each half of the CPU computes its part, so the sums differ in the last bits; who has no such device says so."""
    case, once = "zoo/llama-real=1,set=block_count:1@1", {"1": RUNS["1"]}
    (split,) = play(case, [Device("split", "", "CPU+CPU")], once).values()
    assert split.verdict == "PASS", split.detail
    assert split.nmse
    (lacking,) = play(case, [Device("split", "", "CPU+none")], once).values()
    assert (lacking.verdict, "has no device 'none'" in lacking.detail) == ("ERROR", True)


@needs_wheel
def test_another_library_may_judge_a_cpu() -> None:
    """`judge` names it: here the wheel's own, so that all is equal to the bit."""
    (same,) = play("zoo/llama-real=1,set=block_count:1@1", [Device("x", judge="")], {"1": RUNS["1"]}).values()
    assert (same.verdict, same.nmse) == ("PASS", 0.0)


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


MOE = "zoo/qwen2moe-real=1,set=block_count:1@1"


@needs_wheel
def test_what_follows_a_flip_is_held_to_the_same_experts(tmp_path: Path) -> None:
    """A device that takes another expert at a near-tie passes if the rest is right, and fails if it is not."""
    request = prepare(tmp_path / "model.gguf", *read(MOE))
    run = {"1": RUNS["1"]}
    cpu = Device("CPU")
    (own,) = _run(request, cpu, run, tmp_path, 60.0, {"forced": None, "values": False}).values()
    assert own.choices is not None
    found = load_choices(own.choices)
    assert found
    assert all(0 < c.k < c.scores.shape[1] for c in found)
    flipped, last = tmp_path / "flipped.npz", found[-1]
    order = last.chosen[0]
    order[[last.k - 1, last.k]] = order[[last.k, last.k - 1]]
    a, b = order[last.k - 1], order[last.k]
    save_choices(flipped, found)

    class Flipping(Look):
        """The device takes what stands in a file, and says that two scores were as near as it takes."""

        def again(self, device: Device, forced: Path | None = None, *, values: bool = False) -> Played:
            played = Look.again(self, device, forced or flipped, values=values)
            assert played.choices is not None
            made = load_choices(played.choices)
            made[-1].scores[0, [a, b]] = 0.5 + np.array([1e-6, 0.0] if forced is None else [0.0, 1e-6])
            if forced is None:
                made[-1].chosen[0] = order
            save_choices(played.choices, made)
            return played

    look = Flipping(request, cpu, run, tmp_path, 60.0)
    device = look.again(cpu)
    played = compare(Played("PASS", results=device.results), own)
    assert played.verdict == "FAIL", played.nmse
    explain(played, look)
    assert played.verdict == "PASS", played.detail
    assert "with the same experts NMSE 0" in played.detail
    assert f"expert {a} for {b}" in played.detail
    wrong = compare(Played("PASS", results=[r * np.float32(1.2) for r in device.results]), own)
    explain(wrong, look)
    assert wrong.verdict == "FAIL"


@needs_wheel
def test_the_first_nan_is_charged_to_what_held_it(tmp_path: Path) -> None:
    """The first node with NaN is named, and so is a source that held NaN before it ran."""
    request = prepare(tmp_path / "model.gguf", *read("zoo/llama-real=1,set=block_count:1@1"))
    look = Look(request, Device("CPU"), {"1": RUNS["1"]}, tmp_path, 60.0)
    assert look.again(look.device, values=True).spoilt == ""
    place = next(t.data_offset for t in GGUFReader(request.model).tensors if t.name == "blk.0.ffn_norm.weight")
    with Path(request.model).open("r+b") as file:
        file.seek(place)
        file.write(np.full(1, np.nan, "<f4").tobytes())
    seen = look.again(look.device, values=True)
    assert seen.spoilt == (
        "batch 0: MUL ffn_norm-0 is the first value with NaN; it reads blk.0.ffn_norm.weight, which held NaN before"
    )
    played = Played("FAIL", "batch 0", results=seen.results)
    explain(played, look)
    assert played.detail == f"batch 0; {seen.spoilt}"


@needs_wheel
def test_the_command(tmp_path: Path) -> None:
    """A row per architecture, a cell per run, every cell in the JSON; a device that is absent is an ERROR."""
    out = tmp_path / "zoo.json"
    command = ["zoo", "--backend", "ggml?device=NONE9", "--arch", "llama", "--runs", "1", "--json", str(out)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, result.output
    (row,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert (row["architecture"], row["verdict"]) == ("llama", "ERROR")
    assert "no device 'NONE9'" in row["detail"]


def test_only_ggml_libraries_run_llama_cpp() -> None:
    """Another adapter is refused before anything runs."""
    result = CliRunner().invoke(main, ["zoo", "--backend", "cpu"])
    assert result.exit_code == 2
    assert "llama.cpp runs on ggml's own backends only" in result.output
