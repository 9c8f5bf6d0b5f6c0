"""Verbs of the zoo: what pairs of results say, what a library may lack, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from commands import conform
from marks import needs_wheel
from verb_bugs import LLAMA, model

from conformance.cli import main
from conformance.suite.zoo.family import read
from conformance.suite.zoo.play import RUNS, Device, Played
from conformance.suite.zoo.verbs import play
from conformance.suite.zoo.verbs.desk import Pair
from conformance.suite.zoo.verbs.play import judge_pairs
from conformance.suite.zoo.verbs.table import VERBS


@needs_wheel
@pytest.mark.parametrize("verb", ["state-fresh", "lora-removed", "sampler", "seq-div"])
def test_an_absent_function_is_named(verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library that lacks a function of a verb makes it UNSUPPORTED, and the reason names the symbol."""
    lacking = {
        "state-fresh": "state_get_size", "lora-removed": "adapter_lora_init", "sampler": "set_sampler",
        "seq-div": "memory_seq_div",
    }[verb]  # fmt: skip
    monkeypatch.setattr(model(LLAMA).library.llama, lacking, None)
    reply = model(LLAMA).verb({"verb": verb, "part": 0, "folder": str(tmp_path)})
    assert reply == {"unsupported": f"this llama.cpp has no llama_{lacking}"}


@needs_wheel
def test_an_rpc_server_is_asked_for_its_device() -> None:
    """llama.cpp registers the devices behind `rpc=` as the adapter does; the wheel has no RPC, which is said."""
    spec = "ggml?device=RPC0&rpc=127.0.0.1:1"
    ended = CliRunner().invoke(main, ["zoo", "--arch", "llama", "--verb", "state-same", "--backend", spec])
    assert ended.exit_code != 0
    assert "has no RPC device; a build with libggml-rpc expected" in " ".join(ended.output.split())


@needs_wheel
def test_a_sampler_may_be_left_to_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A device without the op of a sampler gives no token, which llama.cpp says in its log: no fault of either."""
    library = model(LLAMA).library
    said = "device 'X' does not have support for op ARGMAX needed for sampler 'greedy'"

    def leaves(*_: object) -> bool:
        library.log.append(said)
        return True

    monkeypatch.setattr(library.llama, "set_sampler", leaves)
    reply = model(LLAMA).verb({"verb": "sampler", "part": 0, "folder": str(tmp_path)})
    library.log.clear()
    assert said in str(reply["unsupported"])


def _pair(actual: list[float], expected: list[float], *, exact: bool = False, apart: bool = False) -> Pair:
    return Pair("x", np.array([actual], np.float32), np.array([expected], np.float32), exact, apart)


def test_what_pairs_say() -> None:
    """Bits where they must be equal, else the tolerance; nothing compared, or nothing changed, is VACUOUS."""
    near = [1.0, 2.000001]
    assert judge_pairs([_pair(near, [1.0, 2.0])], on_cpu=True).verdict == "PASS"
    assert judge_pairs([_pair(near, [1.0, 2.0], exact=True)], on_cpu=True).verdict == "FAIL"
    assert judge_pairs([_pair(near, [1.0, 2.0], exact=True)], on_cpu=False).verdict == "PASS"
    assert judge_pairs([_pair([1.0], [1.2])], on_cpu=False).verdict == "FAIL"
    assert judge_pairs([_pair([1.0], [1.01])], on_cpu=False).verdict == "PASS"
    assert judge_pairs([_pair([1.0], [1.01])], on_cpu=True).verdict == "FAIL"
    assert judge_pairs([_pair([1.0], [1.0]), _pair([1.0], [1.0], apart=True)], on_cpu=True).verdict == "VACUOUS"
    assert judge_pairs([_pair([0.0], [0.0])], on_cpu=True).verdict == "VACUOUS"
    assert judge_pairs([], on_cpu=True).verdict == "VACUOUS"


def test_masked_logits_hide_no_others() -> None:
    """What a model never gives is left out of the error, and must be the same in both ways."""
    low = float(np.finfo(np.float32).min)
    assert judge_pairs([_pair([low, 1.0], [low, 1.0])], on_cpu=True).verdict == "PASS"
    assert judge_pairs([_pair([low, 1.0], [low, 2.0])], on_cpu=True).verdict == "FAIL"
    other = judge_pairs([_pair([low, 1.0], [0.5, 1.0])], on_cpu=True)
    assert (other.verdict, "other tokens are masked" in other.detail) == ("FAIL", True)


@needs_wheel
def test_shifts_of_a_quantised_cache_are_no_failure_of_the_cpu() -> None:
    """Keys that are turned and stored again have another draw of roundings, which the limit knows."""
    verbs = ["--verb", "seq-add", "--verb", "seq-add-back", "--verb", "shift"]
    done = conform("zoo", "--backend", "ggml", "--arch", "llama", "--cache-type", "q8_0", *verbs)
    assert (done.returncode, "FAIL" in done.stdout + done.stderr) == (0, False), done.stdout + done.stderr


def test_a_pair_is_wider_by_what_it_is_worth() -> None:
    """And by no more: no other pair, and no exact one."""
    right = np.ones((1, 1000), np.float32)
    off = right.copy()
    off[0, 0] += np.float32(0.2)  # NMSE 4e-5
    assert judge_pairs([Pair("shift", off, right)], on_cpu=True).verdict == "FAIL"
    assert judge_pairs([Pair("shift", off, right, worth=1e-4)], on_cpu=True).verdict == "PASS"
    assert judge_pairs([Pair("shift", off, right, worth=1e-5)], on_cpu=True).verdict == "FAIL"
    assert judge_pairs([Pair("shift", off, right, exact=True, worth=1e-4)], on_cpu=True).verdict == "FAIL"


@needs_wheel
def test_the_command_with_verbs(tmp_path: Path) -> None:
    """Verbs stand in the table and in the record as runs do, one of two processes too; what makes no sense for a model,
    and what llama.cpp refuses, is UNSUPPORTED with the reason; a name that fits none is an error of the user.
    """
    out = tmp_path / "zoo.json"
    command = ["zoo", "--backend", "ggml", "--arch", "llama", "--arch", "mamba", "--verb", "state-process", "--json"]
    result = CliRunner().invoke(main, [*command, str(out), "--verb", "shif?", "--verb", "seq-rm-tail"])
    assert result.exit_code == 0, result.output
    assert "state-process" in result.output
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert {(r["architecture"], r["run"]): r["verdict"] for r in rows} == {
        ("llama", "state-process"): "PASS", ("llama", "shift"): "PASS", ("llama", "seq-rm-tail"): "PASS",
        ("mamba", "state-process"): "PASS", ("mamba", "shift"): "UNSUPPORTED", ("mamba", "seq-rm-tail"): "UNSUPPORTED",
    }  # fmt: skip
    reasons = {r["run"]: r["detail"] for r in rows if r["verdict"] == "UNSUPPORTED"}
    assert reasons["seq-rm-tail"] == "refused: llama_memory_seq_rm(0, 13, -1) returned false"
    assert reasons["shift"] == "makes no sense for a model of kind recurrent"


def test_a_model_that_dies_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three verbs, apart from each other, are tried; if one does not die, all are."""
    asked: list[str] = []
    alive: set[str] = set()

    def conduct(*args: Any) -> dict[str, Played]:  # noqa: ANN401
        asked.extend(args[2])
        return {n: Played("PASS" if n in alive else "CRASH") for n in args[2]}

    monkeypatch.setattr(play, "conduct", conduct)
    asks: dict[str, dict[str, Any]] = {n: {} for n in "abcdefg"}
    for name, tried in (("", 3), ("a", 7), ("d", 7), ("g", 7), ("b", 3)):
        asked.clear()
        alive.clear()
        alive.add(name)
        request, _, _, _ = read("zoo/llama@1")
        played = play._alive(request, Device("x"), asks, lambda *_: Played("PASS"), 1.0)
        assert (len(asked), set(played)) == (tried, set(asks))
        assert sum(p.verdict == "NO REFERENCE" for p in played.values()) == 7 - tried


def test_the_names_of_verbs() -> None:
    """A name that fits no verb is an error of the user, and a list shows them all."""
    assert CliRunner().invoke(main, ["zoo", "--backend", "ggml", "--verb", "nothing"]).exit_code == 2
    assert "state-fragmented" in CliRunner().invoke(main, ["zoo", "--list-verbs"]).output


def test_every_verb_has_its_words() -> None:
    """A verb says what it does in few words, for at least one kind of model; at least 20 hold for a plain decoder."""
    assert all(v.does and v.kinds and len(v.does) < 80 for v in VERBS.values())
    assert sum("attention" in v.kinds for v in VERBS.values()) >= 20


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    model.cache_clear()


def test_verbs_and_runs_have_other_names() -> None:
    """A cell is named by either, so no name may be both."""
    assert not set(VERBS) & set(RUNS)
