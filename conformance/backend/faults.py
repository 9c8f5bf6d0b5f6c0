"""What makes a class no adapter, in sentences to its author; `check_adapter` and whoever opens one say the same."""

from __future__ import annotations

from collections.abc import Iterator

from .interface import Backend


def class_faults(adapter: object, name: str) -> Iterator[str]:
    """Why `adapter` cannot be opened at all, one sentence each."""
    if not (isinstance(adapter, type) and issubclass(adapter, Backend)):
        yield (
            f"{name} is no class that derives from conformance.backend.interface.Backend; derive it from that, or from "
            "conformance.backend.kernel.KernelBackend, which needs a table of kernels only."
        )
        return
    for method in sorted(adapter.__abstractmethods__):
        says = (getattr(Backend, method, None) or getattr(adapter, method)).__doc__ or ""
        first = says.splitlines()[0].rstrip(".") if says else "the interface needs it"
        yield f"{name} has no method `{method}`; write it: {first}."
