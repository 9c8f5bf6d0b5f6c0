"""Attention with fewer KV heads than heads, in every shape."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "gqa"


def test_gqa(conformance_case: Result) -> None:
    """Each step gives the reference's logits and caches, run freely and from the caches that the step itself found."""
    check(conformance_case)
