"""Each architecture's sublayers alone."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "blocks"


def test_blocks(conformance_case: Result) -> None:
    """Each step gives the reference's logits and caches, run freely and from the caches that the step itself found."""
    check(conformance_case)
