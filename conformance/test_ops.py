"""Single ops: every type, broadcast, stride and op_params that ggml's CPU accepts."""

from conformance.judge.verdict import Result

from .plugin import check

FAMILY = "ops"


def test_ops(conformance_case: Result) -> None:
    """Each op gives what the reference gives, in the arithmetic that the backend declares."""
    check(conformance_case)
