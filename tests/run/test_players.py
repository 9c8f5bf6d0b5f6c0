"""Players of live families answer for the case that they were given."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from conformance.backend.registry import Spec
from conformance.judge.verdict import Result, Verdict
from conformance.run import live
from conformance.run.isolation.isolate import Workers
from conformance.run.live import Players
from conformance.run.runner import Runner
from conformance.run.session.select import build


@pytest.mark.parametrize(("answered", "verdict"), [("made/a@0", Verdict.PASS), ("made/b@0", Verdict.OVERCLAIM)])
def test_the_result_of_another_case_is_no_pass(
    answered: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A player that confuses its cases is wrong, and the message names both."""
    player = SimpleNamespace(play=lambda _: Result(answered, "ggml", Verdict.PASS), close=lambda: None)
    monkeypatch.setattr(live, "LIVE", {"made": SimpleNamespace(player=lambda *_: player)})
    with closing(Players(Workers(), None)) as players:
        result = players.play(Spec("ggml"), "made/a@0")
    assert (result.case, result.backend, result.verdict) == ("made/a@0", "ggml", verdict)
    assert verdict is Verdict.PASS or "returned the result of 'made/b@0' on 'ggml'" in result.detail


def test_graphs_with_the_name_of_a_live_family_run_as_graphs() -> None:
    """`check-model` shrinks graphs that it recorded: their id begins with `model/`, and they have steps."""
    case = replace(build("ops/SQR-f32-ne=10x5@1"), id="model/tiny-step=0@0")
    with closing(Runner()) as runner:
        (result,) = runner.run(Spec("ggml"), [case])
    assert (result.case, result.verdict) == (case.id, Verdict.PASS)


@pytest.mark.parametrize("said", [0.0, 12.5])
def test_a_case_took_the_time_of_its_player(said: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table says how long each backend ran; a player that measures its own part is believed."""
    player = SimpleNamespace(play=lambda i: Result(i, "ggml", Verdict.PASS, seconds=said), close=lambda: None)
    monkeypatch.setattr(live, "LIVE", {"made": SimpleNamespace(player=lambda *_: player)})
    with closing(Players(Workers(), None)) as players:
        found = players.play(Spec("ggml"), "made/a@0").seconds
    assert found == said if said else 0 < found < 10
