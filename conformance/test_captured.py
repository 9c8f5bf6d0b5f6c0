"""Trajectories captured from llama.cpp, held against what it recorded."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "captured"


def test_captured(conformance_case: Result) -> None:
    """Every step gives the recorded logits and caches; every node, fed from the record, the recorded value."""
    check(conformance_case)
