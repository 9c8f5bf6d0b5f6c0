"""Scenarios of the zoo: what pairs of results say, what a library may lack, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import conform_here
from marks import needs_wheel
from scenario_bugs import BUGS, LLAMA, model, planted, played

from conformance.backend.registry import Spec
from conformance.ggml.errors import BackendCrashError, BackendTimeoutError, UnavailableError
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.live.arch import FEW
from conformance.llama.live.comparison import SILENT, Comparison, judge_all, saved
from conformance.llama.live.scenario import FAMILY, Player, id_of, ids_of, in_turns
from conformance.llama.live.scenarios.harness import Harness
from conformance.llama.live.scenarios.table import SCENARIOS
from conformance.run.isolation.isolate import Isolation

PAIR = Pair("scenario/x@1", "ggml")


@needs_wheel
@pytest.mark.parametrize("scenario", ["state-fresh", "lora-removed", "sampler", "seq-div"])
def test_an_absent_function_is_named(scenario: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library that lacks a function of a scenario makes it UNSUPPORTED, and the reason names the symbol."""
    lacking = {
        "state-fresh": "state_get_size", "lora-removed": "adapter_lora_init", "sampler": "set_sampler",
        "seq-div": "memory_seq_div",
    }[scenario]  # fmt: skip
    monkeypatch.setattr(model(LLAMA).library.llama, lacking, None)
    reply = model(LLAMA).scenario({"changes": {}, "scenario": scenario, "part": 0, "folder": str(tmp_path)})
    assert reply == {"unsupported": f"this llama.cpp has no llama_{lacking}"}


@needs_wheel
def test_an_rpc_server_is_asked_for_its_device() -> None:
    """llama.cpp registers the devices behind `rpc=` as the adapter does; the wheel has no RPC, which is said."""
    spec = "ggml?device=RPC0&rpc=127.0.0.1:1"
    ended = conform_here("run", "--case", id_of("llama", "state-same"), "--backend", spec)
    assert ended.exit_code != 0
    assert "has no RPC device; a build with libggml-rpc expected" in " ".join(ended.output.split())


@needs_wheel
def test_a_sampler_may_be_left_to_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A device without the op of a sampler gives no token, which llama.cpp says in its log: no fault of either."""
    library = model(LLAMA).library
    said = "device 'X' does not have support for op ARGMAX needed for sampler 'greedy'"

    def leaves(*_: object) -> bool:
        library.log.lines.append(said)
        return True

    monkeypatch.setattr(library.llama, "set_sampler", leaves)
    reply = model(LLAMA).scenario({"changes": {}, "scenario": "sampler", "part": 0, "folder": str(tmp_path)})
    library.log.lines.clear()
    assert said in str(reply["unsupported"])


@needs_wheel
@pytest.mark.parametrize("wrong", [False, True])
def test_the_host_applies_the_samplers_that_a_device_lacks(*, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that samples with none of a chain leaves its logits as they are: no fault, unless they are wrong."""
    llama = model(LLAMA).library.llama
    n_vocab = llama.vocab_n_tokens(llama.model_get_vocab(model(LLAMA).model))
    zeros = np.zeros(n_vocab, np.float32)
    monkeypatch.setattr(llama, "set_sampler", lambda *_: True)
    monkeypatch.setattr(llama, "get_sampled_logits_count_ith", lambda *_: n_vocab)
    given = (lambda *_: zeros.ctypes.data) if wrong else llama.get_logits_ith
    monkeypatch.setattr(llama, "get_sampled_logits_ith", given)
    assert played("sampler-chains").verdict is (Verdict.FAIL if wrong else Verdict.PASS)


def _pair(actual: list[float], expected: list[float], *, exact: bool = False, differs: bool = False) -> Comparison:
    return Comparison("x", np.array([actual], np.float32), np.array([expected], np.float32), exact, differs)


def test_what_pairs_say() -> None:
    """Bits where they must be equal, else the tolerance; nothing compared, or nothing changed, is VACUOUS."""
    near = [1.0, 2.000001]
    assert judge_all(PAIR, "x", [_pair(near, [1.0, 2.0])], on_cpu=True).verdict is Verdict.PASS
    assert judge_all(PAIR, "x", [_pair(near, [1.0, 2.0], exact=True)], on_cpu=True).verdict is Verdict.FAIL
    assert judge_all(PAIR, "x", [_pair(near, [1.0, 2.0], exact=True)], on_cpu=False).verdict is Verdict.PASS
    assert judge_all(PAIR, "x", [_pair([1.0], [1.2])], on_cpu=False).verdict is Verdict.FAIL
    assert judge_all(PAIR, "x", [_pair([1.0], [1.01])], on_cpu=False).verdict is Verdict.PASS
    assert judge_all(PAIR, "x", [_pair([1.0], [1.01])], on_cpu=True).verdict is Verdict.FAIL
    assert (
        judge_all(PAIR, "x", [_pair([1.0], [1.0]), _pair([1.0], [1.0], differs=True)], on_cpu=True).verdict
        is Verdict.VACUOUS
    )
    assert judge_all(PAIR, "x", [_pair([0.0], [0.0])], on_cpu=True).verdict is Verdict.VACUOUS
    assert judge_all(PAIR, "x", [], on_cpu=True).verdict is Verdict.VACUOUS


def test_results_that_must_differ_differ_by_more_than_equal_ones_may() -> None:
    """On a CPU by less than elsewhere; what equals by the measured spread of roundings does not differ."""
    equal, found = _pair([1.0], [1.0]), _pair([1.0], [1.01], differs=True)
    for pair, on_cpu, verdict in [(found, True, "PASS"), (found, False, "VACUOUS"),
                                  (replace(found, spread=1e-4), True, "VACUOUS")]:  # fmt: skip
        assert judge_all(PAIR, "x", [pair, equal], on_cpu=on_cpu).verdict == verdict


def test_zeros_that_must_differ_are_named_as_zeros() -> None:
    """So that a model without logits is asked for its embeddings; only one side of zeros does differ."""
    equal, silent = _pair([1.0], [1.0]), _pair([0.0], [0.0], differs=True)
    assert judge_all(PAIR, "x", [silent, equal], on_cpu=True).detail.endswith(SILENT)
    assert judge_all(PAIR, "x", [_pair([1.0], [0.0], differs=True), equal], on_cpu=True).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("actual", "kind", "error"),
    [([1.1, 0.0], "numbers", 0.01), ([0.0, 0.0], "zeros", 1.0), ([float("nan"), 0.0], "not finite", float("inf"))],
)
def test_a_failure_states_its_error_for_waivers(actual: list[float], kind: str, error: float) -> None:
    """A waiver with `nmse` or `wrong` can excuse it."""
    wrong = judge_all(PAIR, "x", [_pair(actual, [1.0, 0.0])], on_cpu=True).wrong
    assert wrong is not None
    assert wrong.kind == kind
    assert wrong.nmse == pytest.approx(error, rel=1e-5)


def test_masked_logits_hide_no_others() -> None:
    """What a model never gives is left out of the error, and must be the same in both ways."""
    low = float(np.finfo(np.float32).min)
    assert judge_all(PAIR, "x", [_pair([low, 1.0], [low, 1.0])], on_cpu=True).verdict is Verdict.PASS
    assert judge_all(PAIR, "x", [_pair([low, 1.0], [low, 2.0])], on_cpu=True).verdict is Verdict.FAIL
    other = judge_all(PAIR, "x", [_pair([low, 1.0], [0.5, 1.0])], on_cpu=True)
    assert (other.verdict, "other tokens are masked" in other.detail) == (Verdict.FAIL, True)


@needs_wheel
def test_shifts_of_a_quantised_cache_are_no_failure_of_the_cpu() -> None:
    """Keys that are turned and stored again have another draw of roundings, which the limit knows."""
    player = Player(Spec("ggml"), Isolation(), None)
    ids = [id_of("llama", name, cache="q8_0") for name in ("seq-add", "seq-add-back", "shift")]
    assert [player.play(i).verdict for i in ids] == [Verdict.PASS] * 3
    player.close()


def test_a_pair_is_wider_by_what_it_is_worth() -> None:
    """And by no more: no other pair, and no exact one."""
    right = np.ones((1, 1000), np.float32)
    off = right.copy()
    off[0, 0] += np.float32(0.2)  # NMSE 4e-5
    assert judge_all(PAIR, "x", [Comparison("shift", off, right)], on_cpu=True).verdict is Verdict.FAIL
    assert judge_all(PAIR, "x", [Comparison("shift", off, right, allowance=1e-4)], on_cpu=True).verdict is Verdict.PASS
    assert judge_all(PAIR, "x", [Comparison("shift", off, right, allowance=1e-5)], on_cpu=True).verdict is Verdict.FAIL
    assert (
        judge_all(PAIR, "x", [Comparison("shift", off, right, exact=True, allowance=1e-4)], on_cpu=True).verdict
        is Verdict.FAIL
    )


K_QUANTS = {"w": "q5_K", "set": "embedding_length:256"}


@needs_wheel
@pytest.mark.parametrize("type_", ["q4_K", "q5_K", "q6_K"])
def test_k_quants_are_no_failure_of_the_cpu(type_: str, tmp_path: Path) -> None:
    """Results that differ as flipped roundings do pass, and the spread of such results is in the record."""
    case, out = id_of("llama", "batch-8", **{**K_QUANTS, "w": type_}), tmp_path / "run.json"
    ended = conform_here("run", "--case", case, "--backend", "ggml", "--json", out)
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert row["verdict"] == "PASS"
    assert row["nmse"] > 1e-5
    assert row["metrics"]["spread"] > row["nmse"] / 4


@needs_wheel
@pytest.mark.parametrize(
    ("what", "scenario"),
    [("a mask stays", "chunks"), ("rows of results stay", "batch-8"), ("indices of cells stay", "chunks"),
     ("a gate leaves the last row", "chunks"), ("one mask serves all streams", "batch-8"),
     ("a mask stays", "sets"), ("a K-shift leaves a layer", "shift"), ("a K-shift is lost", "seq-add")],
)  # fmt: skip
def test_the_spread_of_roundings_hides_no_fault(
    what: str, scenario: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A planted bug fails over K-quants, too, although the spread is measured on the library with the bug."""
    case, worker = id_of("llama", scenario, **K_QUANTS), model(f"llama-w={K_QUANTS['w']},set={K_QUANTS['set']}")
    player = Player(Spec("ggml"), Isolation(), None)

    def compared(name: str, _: object, **more: object) -> list[Comparison]:
        reply = worker.scenario({"changes": {}, "scenario": name, "part": 0, "folder": str(tmp_path), **more})
        return saved(reply["comparisons"], tmp_path / f"{name}.npz")

    monkeypatch.setattr(player, "_compared", compared)
    bug = replace(BUGS[what], arch=f"llama-w={K_QUANTS['w']},set={K_QUANTS['set']}")
    with planted(bug):
        found = player.play(case)
    right = player.play(case)
    player.close()
    assert (found.verdict, right.verdict) == (Verdict.FAIL, Verdict.PASS)
    assert found.nmse is not None
    assert found.nmse > 10 * found.metrics["spread"]


def test_a_device_that_varies_has_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the unchanged model gives other results, a difference stays a failure."""
    player = Player(Spec("ggml"), Isolation(), None)
    draws = iter(range(100))

    def compared(*_: object, **__: int) -> list[Comparison]:
        return [_pair([1.0], [1.2 + 0.01 * next(draws)])]

    monkeypatch.setattr(player, "_compared", compared)
    found = player.play(id_of("llama", "batch-8"))
    player.close()
    assert found.verdict is Verdict.FAIL
    assert "the same model gives other results" in found.detail


def test_a_spread_widens_no_exact_comparison() -> None:
    """Bits that must be equal stay so; other comparisons pass up to four times the spread."""
    right, off = np.ones((1, 1000), np.float32), np.ones((1, 1000), np.float32)
    off[0, 0] += np.float32(0.2)  # NMSE 4e-5
    for spread, exact, verdict in [(1.1e-5, False, "PASS"), (0.9e-5, False, "FAIL"), (1e-3, True, "FAIL")]:
        pair = Comparison("x", off, right, exact=exact, spread=spread)
        assert judge_all(PAIR, "x", [pair], on_cpu=True).verdict == verdict


@needs_wheel
@pytest.mark.parametrize("arch", ["gemma2", "gemma-embedding", "eurobert", "byt5", "afmoe"])
def test_adapters_are_compared_with_merged_weights(arch: str) -> None:
    """Logits below their cap, no head or embeddings alone, an encoder beside a decoder, experts of little effect."""
    player = Player(Spec("ggml"), Isolation(), None)
    found = player.play(id_of(arch, "lora-merged"))
    player.close()
    assert found.verdict is Verdict.PASS, found.detail


def test_quantised_weights_are_listed() -> None:
    """Batches, states and drafts run over weights in blocks of 32 and of 256 at `standard`."""
    ids = FAMILY.ids("standard")
    for w in ("q4_0", "q8_0", "q4_K", "q5_K", "q6_K"):
        own = [i for i in ids if f"w={w}," in i]
        assert {i.rpartition("do=")[2] for i in own} >= {f"{n}@1" for n in ("batch-8", "chunks", "state-seq")}
        assert any("do=draft" in i for i in own)
    assert len(ids) == len(set(ids))
    assert not any(",w=" in i for i in FAMILY.ids("smoke"))


@needs_wheel
def test_scenarios_in_a_run(tmp_path: Path) -> None:
    """Scenarios are recorded as any case, one of two processes too.

    What does not apply to a model, and what llama.cpp refuses, is UNSUPPORTED with the reason.
    """
    out = tmp_path / "scenarios.json"
    names = ("state-process", "shif?", "seq-rm-tail")
    archs = ("llama", "mamba")
    globs = [word for a in archs for n in names for word in ("--case", f"scenario/{a}-real=1,do={n}@1")]
    result = conform_here("run", "--level", "standard", "--backend", "ggml", *globs, "--json", out)
    assert result.exit_code == 0, result.output
    rows = {r["case"]: r for r in json.loads(out.read_text(encoding="utf-8"))["results"]}
    assert {i: r["verdict"] for i, r in rows.items()} == {
        id_of("llama", "state-process"): "PASS", id_of("llama", "shift"): "PASS",
        id_of("llama", "seq-rm-tail"): "PASS", id_of("mamba", "state-process"): "PASS",
        id_of("mamba", "shift"): "UNSUPPORTED", id_of("mamba", "seq-rm-tail"): "UNSUPPORTED",
    }  # fmt: skip
    assert rows[id_of("mamba", "seq-rm-tail")]["detail"] == "refused: llama_memory_seq_rm(0, 13, -1) returned false"
    assert rows[id_of("mamba", "shift")]["detail"] == "does not apply to a model of kind recurrent"


@needs_wheel
def test_a_model_that_dies_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three scenarios, apart from each other, are tried; if one does not die, all are."""
    ids = ids_of("llama")
    names = [i.partition("do=")[2].partition("@")[0] for i in ids]
    assert sorted(names) == sorted(SCENARIOS)
    player = Player(Spec("ggml"), Isolation(), None)
    alive: set[str] = set()

    def once(_pair: Pair, name: str, _request: object) -> Result:
        if name in alive:
            return Result(*PAIR, Verdict.PASS)
        raise BackendCrashError("it died")

    monkeypatch.setattr(player, "_once", once)
    tried = []
    for i in ids[:5]:
        try:
            player.play(i)
        except BackendCrashError:
            tried.append(i)
        except UnavailableError as e:
            assert "so no further scenarios were tried" in str(e)  # noqa: PT017  # another error is the other branch
    assert tried == ids[:3]
    alive.add(names[1])
    player._model = ""
    with suppress(BackendCrashError):
        player.play(ids[0])
    assert player.play(ids[1]).verdict is Verdict.PASS
    for i in ids[2:6]:
        with pytest.raises(BackendCrashError):
            player.play(i)
    player.close()


@needs_wheel
def test_a_model_that_hangs_is_not_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios that are not tried after three time-outs are time-outs, too."""
    player, tried = Player(Spec("ggml"), Isolation(), None), []

    def once(_pair: Pair, name: str, _request: object) -> Result:
        tried.append(name)
        raise BackendTimeoutError("no answer")

    monkeypatch.setattr(player, "_once", once)
    for i in ids_of("llama")[:5]:
        with pytest.raises(BackendTimeoutError):
            player.play(i)
    player.close()
    assert len(tried) == 3


def test_every_scenario_has_its_words() -> None:
    """A scenario says what it does in few words, for some kind of model; at least 20 hold for a plain decoder."""
    assert all(v.does and v.kinds and len(v.does) < 80 for v in SCENARIOS.values())
    assert sum("attention" in v.kinds for v in SCENARIOS.values()) >= 20


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    model.cache_clear()


@needs_wheel
def test_a_scenario_is_first_asked_of_a_model_to_which_it_applies() -> None:
    """The kinds of memory by which `in_turns` chooses are those that llama.cpp has."""
    kinds = {}
    for name in FEW:
        it = model(name)
        kinds[name] = Harness(it.library, it.model, it._request, Path()).kind
    for case_id in in_turns(FEW)[: len(SCENARIOS)]:
        scenario = SCENARIOS[case_id.partition("do=")[2].partition("@")[0]]
        kind = kinds[case_id.partition("/")[2].partition("-real")[0]]
        assert kind in scenario.kinds or not set(kinds.values()) & set(scenario.kinds)
