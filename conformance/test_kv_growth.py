"""Decoders whose KV cache grows past 256 cells, is rewound, emptied and filled again."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "kv_growth"


def test_kv_growth(conformance_case: Result) -> None:
    """Each step gives the reference's logits and caches, run freely and from the caches that the step itself found."""
    check(conformance_case)
