"""Cases that ggml is known to fail: by themselves, with a process that nobody shares afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import pytest

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.judge import waivers
from conformance.judge.verdict import Result, Verdict
from conformance.run.attempt import UnderTest
from conformance.run.isolation.isolate import IsolatedBackend
from conformance.run.runner import Runner
from conformance.run.session.settings import WaiverBook
from conformance.suite.ops import build

WAIVED = "ops/SQR-f32-ne=18x6x3x2,src0=p1023@1"
TABLE = f"""
[[waiver]]
case = "{WAIVED[:-1]}*"
verdict = "CRASH"
reason = "asserts"
link = "https://example.org"
expiry = 2999-12-31
"""


def _runner(text: str = TABLE) -> Runner:
    return Runner(waivers=WaiverBook({Spec("ggml"): waivers.parse(text, "w.toml")}, date(2026, 1, 1)))


def test_a_waived_case_shares_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours keep theirs: no crash of a batch, no case that is wrong beside it only."""
    cases = [build(c) for c in ("ops/SQR-f32-ne=67x4@1", WAIVED, "ops/SQR-f32-ne=67x4@2")]
    runner = _runner()
    groups: list[Sequence[str]] = []
    batch = Runner._run_batch

    def seen(self: Runner, tested: UnderTest, group: Sequence[Case]) -> list[Result]:
        groups.append([c.id for c in group])
        return batch(self, tested, group)

    monkeypatch.setattr(Runner, "_run_batch", seen)
    try:
        results = runner.run(Spec("ggml"), cases)
    finally:
        runner.close()
    assert [r.verdict for r in results] == [Verdict.PASS, Verdict.XFAIL, Verdict.PASS]
    assert [WAIVED] in groups


def test_a_process_that_survives_what_kills_it_is_replaced() -> None:
    """A case waived as CRASH that passes: its process may be damaged, so the next case gets another."""
    runner = _runner(TABLE.replace("p1023@", "pad@"))
    backend = runner.backend(Spec("ggml"))
    assert isinstance(backend, IsolatedBackend)
    before = backend._alive()
    try:
        (result,) = runner.run(Spec("ggml"), [build(WAIVED.replace("p1023", "pad"))])
        assert result.verdict is Verdict.XPASS
        assert backend._alive() is not before
    finally:
        runner.close()
