"""Two runs that must give the same: a backend against itself."""

from conformance.check.verdict import Result
from conformance.plugin import check

FAMILY = "relations"


def test_relations(conformance_case: Result) -> None:
    """What a relation says is the same, is: within twice the budget, or to the bit."""
    check(conformance_case)
