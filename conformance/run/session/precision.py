"""Advice about a device that declares no rounding."""

from __future__ import annotations

from conformance.backend.registry import Spec
from conformance.ggml.arithmetic import UNDECLARED, Arithmetic, Mixed
from conformance.ggml.text import shell

PROFILE = "PROFILE.toml"


def undeclared(arithmetic: Arithmetic) -> bool:
    """Return True if some node is judged by upstream's limits, as its device declares nothing."""
    return any(a == UNDECLARED for a in (arithmetic.nodes.values() if isinstance(arithmetic, Mixed) else (arithmetic,)))


def advice(spec: Spec) -> str:
    """Return one line on how to measure the precision of the device of `spec`."""
    learn = shell(["conform", "precision", str(spec), "-o", PROFILE])
    judged = shell(["--backend", str(Spec(spec.name, (*spec.options, ("profile", PROFILE))))])
    return (
        f"{spec} declares no precision, so it is judged by the limits of test-backend-ops (max_nmse_err). Measure it "
        f"with `{learn}`, then judge by that: `{judged}`"
    )
