"""The list of faults: each is where it says, and one of each kind is noticed by its case."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from scenario_bugs import BUGS

from conformance.judge.verdict import FAILURES
from conformance.llama.live.transfers import WAYS
from conformance.suite import FAMILIES
from trust.faults import FOLDER, Bundle, Fault, PlantError, original, read
from trust.hunt import hunt
from trust.inject import UNLOADABLE, Injector

FAULTS = {f.name: f for f in read([FOLDER])}
BLIND = {f.name: f for f in read([FOLDER / "blind"])}
"""Written without a look at the suite, which nothing may be chosen by."""


def test_each_stands_in_the_source_and_changes_it() -> None:
    """A fault whose place has moved is an error, not a survivor; names differ and families exist."""
    assert len(FAULTS) == len(read([FOLDER])) >= 200
    assert not FAULTS.keys() & BLIND.keys()
    for fault in (*FAULTS.values(), *BLIND.values()):
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


KINDS = [f for f in FAULTS.values() if f.kind]
"""Faults of kinds that an earlier suite did not see."""
LIVE = {
    "parts of tensors set, read and cleared": "set",
    "copies between buffers": "copy",
    "a K-shift of quantised keys": "a K-shift of a quantised cache is not stored",
    "a state that is cut off": "a refused sequence is taken",
    "a window smaller than the prompt": "of a window a single token sees the cells before",
    "sparse attention that leaves cells out": "tokens share what sparse attention chose",
    "snapshots of recurrent states": "seq_rm of recurrent states does nothing",
}
"""Kinds that no case with a graph shows -> a bug of llama.cpp, or a way to bytes: `tests/llama/live` injects both."""


def test_kinds_are_proven_where_they_say() -> None:
    """At most a quarter of the kinds needs `standard` or a live family."""
    assert len(KINDS) >= 55
    assert set(LIVE.values()) <= BUGS.keys() | WAYS.keys()
    kinds = {f.kind for f in KINDS}
    assert not kinds & LIVE.keys()
    assert 4 * len({f.kind for f in KINDS if f.level == "smoke"}) >= 3 * len(kinds | LIVE.keys())


@pytest.mark.parametrize("fault", KINDS, ids=lambda f: f.name)
def test_each_kind_of_faults_is_noticed(fault: Fault) -> None:
    """Its case fails with the fault; each adapter's tests show that it passes without."""
    assert fault.case in FAMILIES[fault.case.partition("/")[0]].ids(fault.level)
    with closing(Injector([fault])) as runner:
        (result,) = runner.run(fault.spec, [runner.case(fault.case)])
    assert result.verdict in FAILURES
    assert UNLOADABLE not in result.detail
