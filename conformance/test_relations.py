"""Two runs that must give the same: a backend against itself."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "relations"


def test_relations(conformance_case: Result) -> None:
    """What a relation says is the same, is: within twice the budget, or to the bit."""
    check(conformance_case)
