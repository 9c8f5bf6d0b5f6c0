"""What llama.cpp lays out and computes, for every architecture it knows, replayed on a backend."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "zoo"


def test_zoo(conformance_case: Result) -> None:
    """Each step gives llama.cpp's own results, and each recorded node what llama.cpp computed there."""
    check(conformance_case)
