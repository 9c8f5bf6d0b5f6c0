"""The public interface: what an adapter, a family or a reader of records imports.

A name here keeps its meaning until the next major version; every other module may change at any release. A name is
loaded when it is first used, so that an adapter's process loads no more than it needs.
"""
# ruff: noqa: F401  # type checkers read the imports, Python reads `_FROM`; a test compares them

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.backend.contract import Shape, check_adapter
    from conformance.backend.interface import (
        API_VERSION,
        YES,
        Backend,
        BufferType,
        DeviceInfo,
        Session,
        Support,
        Witness,
        no,
    )
    from conformance.backend.kernel import Kernel, KernelBackend, KernelSession, Raw, Sources
    from conformance.case.case import Case, Step
    from conformance.case.casefile import read as read_cases
    from conformance.case.casefile import write as write_cases
    from conformance.case.streams import Stream
    from conformance.ggml.arithmetic import EXACT, GGML_CPU, UNDECLARED, Arithmetic
    from conformance.ggml.errors import BackendError, ConformanceError, GraphError, UnavailableError, UsageError
    from conformance.ggml.graph import Graph
    from conformance.ggml.ops.build import Builder, build_forward_expand
    from conformance.ggml.tensor import FLAG_INPUT, FLAG_OUTPUT, Bytes, Tensor, new_tensor
    from conformance.ggml.types import BF16, F16, F32, I32, I64, TYPES, GGMLType
    from conformance.judge.cause import Cause, Condition
    from conformance.judge.verdict import Missing, Result, Verdict
    from conformance.properties import check, given_ids
    from conformance.report.runs import Runs, read_runs
    from conformance.run.live import LiveFamily, Player, without_steps
    from conformance.suite.data import encode, normal
    from conformance.suite.family import Family, ids_of, keys, read_keys, split_id, with_seed
    from conformance.suite.grid import grid

_ADAPTERS = {
    "conformance.backend.contract": "Shape check_adapter",
    "conformance.backend.interface": "API_VERSION YES Backend BufferType DeviceInfo Session Support Witness no",
    "conformance.backend.kernel": "Kernel KernelBackend KernelSession Raw Sources",
    "conformance.ggml.arithmetic": "EXACT GGML_CPU UNDECLARED Arithmetic",
    "conformance.ggml.errors": "BackendError ConformanceError GraphError UnavailableError UsageError",
}
_GRAPHS = {
    "conformance.case.case": "Case Step",
    "conformance.case.casefile": "read_cases=read write_cases=write",
    "conformance.case.streams": "Stream",
    "conformance.ggml.graph": "Graph",
    "conformance.ggml.ops.build": "Builder build_forward_expand",
    "conformance.ggml.tensor": "FLAG_INPUT FLAG_OUTPUT Bytes Tensor new_tensor",
    "conformance.ggml.types": "BF16 F16 F32 I32 I64 TYPES GGMLType",
}
_FAMILIES = {
    "conformance.properties": "check given_ids",
    "conformance.run.live": "LiveFamily Player without_steps",
    "conformance.suite.data": "encode normal",
    "conformance.suite.family": "Family ids_of keys read_keys split_id with_seed",
    "conformance.suite.grid": "grid",
}
_RECORDS = {
    "conformance.judge.cause": "Cause Condition",
    "conformance.judge.verdict": "Missing Result Verdict",
    "conformance.report.runs": "Runs read_runs",
}
_FROM = {
    name.partition("=")[0]: (module, name.rpartition("=")[2])
    for table in (_ADAPTERS, _GRAPHS, _FAMILIES, _RECORDS)
    for module, names in table.items()
    for name in names.split()
}
"""Public name -> its module, and its name there."""

__all__ = sorted(_FROM)  # noqa: PLE0605  # a list, from the table that loads the names


def __getattr__(name: str) -> object:
    """Load a public name; AttributeError for another one."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names: {', '.join(sorted(_FROM))}")
    module, there = _FROM[name]
    value = globals()[name] = getattr(import_module(module), there)
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(_FROM)
