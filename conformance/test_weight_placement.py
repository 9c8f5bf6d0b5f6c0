"""Weights in every kind of memory, and quantised tensors that are no weights."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "weight_placement"


def test_weight_placement(conformance_case: Result) -> None:
    """Each step gives the reference's logits and caches, run freely and from the caches that the step itself found."""
    check(conformance_case)
