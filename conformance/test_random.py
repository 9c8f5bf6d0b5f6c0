"""Legal graphs grown at random, run in several sizes over living caches."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "random"


def test_random(conformance_case: Result) -> None:
    """Each step gives the reference's outputs and caches, run freely and from the caches that the step itself found."""
    check(conformance_case)
