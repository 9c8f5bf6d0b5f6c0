"""What a backend *is*: the one interface, a mirror of `ggml_backend`.

An adapter subclasses `Backend` and `Session`. Tensors are compared by identity, outputs travel packed
(`conformance.cgraph.tensor.pack`: gaps closed, `ne[0]` fastest).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar

import numpy as np

from conformance.cgraph.arithmetic import EXACT, Arithmetic
from conformance.cgraph.case import JSON, Case
from conformance.cgraph.errors import BackendError, UsageError
from conformance.cgraph.graph import Graph
from conformance.cgraph.tensor import Bytes, Tensor


@dataclass(frozen=True, slots=True)
class Support:
    """The answer to `supports_op`: yes, or no with the reason in words."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Support(True)


def no(reason: str) -> Support:
    """A no, with its reason: what the node has, and what the backend would take."""
    return Support(False, reason)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What really executes, found out and never guessed."""

    backend: str
    device: str
    description: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Name of a library -> its version."""


@dataclass(frozen=True, slots=True)
class BufferType:
    """One `ggml_backend_buffer_type`."""

    name: str
    is_host: bool = True
    alignment: int = 1
    max_size: int | None = None


@dataclass(slots=True)
class Witness:
    """Proof of what ran."""

    device: str
    """The device that executed."""
    path: str
    """`eager` (node by node), `translated` (compiled this step), `cached` (a compiled graph was used again),
    `interpreted` (translated, and run without compiling) or `split` (shared out among backends)."""
    nodes: int = 0
    """Nodes computed in all steps, view ops and nodes without the COMPUTE flag not counted."""
    compiles: int = 0
    cache_hits: int = 0
    splits: int = 0
    copies: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    """Buffer type or kind of memory -> bytes held."""
    kernels: dict[str, int] = field(default_factory=dict)
    """Name of an executed kernel or layer type -> how many."""
    notes: list[str] = field(default_factory=list)
    stage: str = "run"
    """Which of the backend's stages gave the values."""
    template: str = ""
    """Hash of the template that the last step was an instance of; empty where a backend has none."""
    symbols: dict[str, int] = field(default_factory=dict)
    """Symbol of a lifted template -> its value in the last step."""
    views: dict[str, int] = field(default_factory=dict)
    """How views were read and written (`slice`, `gather`, `concat`, `scatter`, `rows`) -> how many of them."""
    state: str = ""
    """Where caches live: `bound` (inputs and outputs over a session's memory), `fused` or `slots` (variables of the
    model); empty where a backend makes no difference."""
    peak_compile_bytes: int | None = None
    """By how much the resident memory rose at most while a graph was compiled; None where none was or nobody tells."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Device -> seconds spent computing on it, where several share a graph."""


class Session(AbstractContextManager["Session"], ABC):
    """One case's memory on a backend: its weights and caches live here from step to step."""

    @abstractmethod
    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor."""

    @abstractmethod
    def read(self, tensor: Tensor) -> Bytes:
        """The bytes of a persistent tensor, exact to the bit, as ggml would hold them."""

    @abstractmethod
    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph` once and give the packed bytes of `outputs`.

        Nodes without FLAG_COMPUTE are not computed. Nodes that write through a view write into the tensor that owns
        the bytes. An output holds what the node holds right after it ran.

        Args:
            graph: validated; all leaves are persistent tensors of the session's case or keys of `inputs`.
            inputs: leaf -> its bytes.
            outputs: nodes of `graph`.

        Raises:
            BackendError: the backend failed; its own words are in the message.
        """

    @abstractmethod
    def witness(self) -> Witness:
        """What ran so far in this session."""

    def clock(self) -> float | None:
        """Seconds that opening and all of `compute` took so far, by a clock nearer to the device than the caller's.

        For a session that is far away, or that does on every call what an application does once: ggml's graphs are
        rebuilt here for each step, where llama.cpp uses one again. None where the caller's clock tells as much.
        """
        return None

    def opaque(self) -> frozenset[Tensor]:
        """Persistent tensors that `read` and `write` cannot reach, because the device keeps them to itself.

        What a case leaves in them is not checked, which its result says.
        """
        return frozenset()

    def close(self) -> None:
        """Give memory back. Called once."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Backend(ABC):
    """One device in one execution mode.

    The constructor takes the adapter's options as keyword strings (`name?key=value&key=value` on the command line) and
    raises `UnavailableError` where the machine lacks what it needs, `UsageError` for a value it does not know.
    """

    isolate: ClassVar[bool] = False
    """Whether it must run in a process of its own because a fault would take the suite along."""
    batch: ClassVar[int] = 1
    """How many one-step cases to merge into one graph: for backends that pay per graph rather than per node."""
    stages: ClassVar[tuple[str, ...]] = ("run",)
    """Points at which values can be had, the whole of it (`run`) last. A backend that offers more than one takes the
    option `stage=NAME`: `translate` gives the values of the translated model before anything is compiled."""
    threads: int | None = None
    """How many threads compute, where an adapter can say so: one alone is measured on a processor of its own."""
    audited: ClassVar[Mapping[str, str]] = {}
    """Options with which it sees faults that it does not look for otherwise, as they take time; an audit adds them."""

    @abstractmethod
    def info(self) -> DeviceInfo:
        """What executes, with versions."""

    @abstractmethod
    def supports_op(self, node: Tensor) -> Support:
        """Whether `node` can run here, judged by op, types, shapes, strides and op_params: never by data."""

    @abstractmethod
    def open(self, case: Case) -> Session:
        """Allocate and fill the case's persistent tensors."""

    def supports(self, graph: Graph) -> list[Support]:
        """`supports_op` of every node, in order; one round trip where a backend is far away."""
        return [self.supports_op(node) for node in graph]

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """`supports`, asked while `tensor`, a leaf of `graph`, and its views lie in the `buffer`-th of `buffer_types`.

        llama.cpp asks so where a weight is to go. The answer is the device's own, what an adapter makes of it is not in
        it. With one buffer type there is nothing to show, and `supports` says it all.
        """
        del tensor, buffer
        return self.supports(graph)

    def supports_case(self, case: Case) -> Support:
        """Whether the steps of `case`, all of whose nodes are supported, can run one after the other.

        No is for a device that takes whole models and not graphs: it may take one sequence only, or only forward.
        """
        del case
        return YES

    def buffer_types(self) -> Sequence[BufferType]:
        """Kinds of memory that weights can be placed in, the default first."""
        return [BufferType("default")]

    def arithmetic(self) -> Arithmetic:
        """How it rounds; exact unless declared."""
        return EXACT

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """How it rounds when it runs `case`: another than `arithmetic` only where the nodes are shared out."""
        del case
        return self.arithmetic()

    def computing_in(self, arithmetic: Arithmetic) -> Backend:
        """A backend that computes as `arithmetic` says and is exact in all else; only a reference can.

        Raises:
            UsageError: this backend computes in its own arithmetic.
        """
        raise UsageError(f"{type(self).__name__} cannot imitate another backend's arithmetic ({arithmetic.name})")

    def close(self) -> None:  # noqa: B027  # most backends hold nothing
        """Give the device back. Called once."""


def describe(value: Support | Arithmetic | DeviceInfo | BufferType | Witness) -> dict[str, JSON]:
    """Any of this module's records as JSON, NumPy's numbers as numbers.

    Raises:
        BackendError: an adapter put something into it that is no JSON; names the field.
    """
    kind = type(value).__name__
    fields = {name: getattr(value, name) for name in value.__slots__}
    return {name: v if _easy(v) else plain(v, f"{kind}.{name}") for name, v in fields.items()}


MAX_TEXT = 8192
"""Characters of a text that an adapter gives: a reason, a note, what an exception says."""
SAID = 256
"""Characters by which it may be longer: what is said around it, and that it was longer."""
MAX_ENTRIES = 4096
"""Entries of a list or mapping in one of its records."""
MAX_DEPTH = 8
"""Of lists and mappings in each other."""


def shortened(text: str) -> str:
    """`text`, or its first `MAX_TEXT` characters and how many there are; what was shortened stays as it is."""
    if len(text) <= MAX_TEXT + SAID:
        return text
    size = f"{len(text) / 1e6:.0f} MB" if len(text) >= 1e6 else f"{len(text) / 1e3:.0f} kB"
    return f"{text[:MAX_TEXT]}… ({size} in all)"


def plain(value: object, where: str, depth: int = MAX_DEPTH) -> JSON:
    """`value`, which an adapter gave, as strict JSON of a bounded size: NumPy's numbers as numbers, long texts cut.

    Args:
        value: anything.
        where: what it is called in an error.
        depth: how deep it may be.

    Raises:
        BackendError: it is no JSON, or there is too much of it.
    """
    if _easy(value):
        return value
    if isinstance(value, str):
        return shortened(str(value))
    if isinstance(value, (Mapping, list, tuple)):
        if len(value) > MAX_ENTRIES or not depth:
            raise BackendError(f"{where}: {MAX_ENTRIES} entries in {MAX_DEPTH} levels at most expected, more found")
        if not isinstance(value, Mapping):
            return [v if _easy(v) else plain(v, f"{where}[{i}]", depth - 1) for i, v in enumerate(value)]
        return {
            k if _easy(k) and type(k) is str else _key(k, where): v
            if _easy(v)
            else plain(v, f"{where}[{k!r:.80}]", depth - 1)
            for k, v in value.items()
        }
    return _number(value, where)


def _easy(value: object) -> bool:
    """Whether it is strict JSON as most of it is: for speed alone."""
    kind = type(value)
    return kind is int or kind is bool or value is None or (kind is str and len(value) <= MAX_TEXT)  # type: ignore[arg-type]  # a str


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise BackendError(f"{where}: texts as keys expected, {key!r:.80} found")
    return shortened(str(key))


def _number(value: object, where: str) -> JSON:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)) and math.isfinite(value):
        return float(value)
    raise BackendError(f"{where}: a text, a finite number, a list or a mapping expected, {value!r:.80} found")
