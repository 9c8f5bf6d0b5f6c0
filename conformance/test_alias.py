"""Two graphs of the same names that differ in one thing, run in turn."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "alias"


def test_alias(conformance_case: Result) -> None:
    """Each graph gives what it gives alone, whatever ran before it under the same names."""
    check(conformance_case)
