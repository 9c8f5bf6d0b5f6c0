"""Sequences of different lengths that come, go and share their cells."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "multi_sequence"


def test_multi_sequence(conformance_case: Result) -> None:
    """Each step gives the reference's logits and caches, run freely and from the caches that the step itself found."""
    check(conformance_case)
