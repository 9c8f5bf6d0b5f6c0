"""What a backend *is*: the one interface, a mirror of `ggml_backend`.

An adapter subclasses `Backend` and `Session`. Tensors are compared by identity, outputs travel packed
(`conformance.ggml.tensor.pack`: gaps closed, `ne[0]` fastest).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar

from conformance.case.case import JSON, Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor

from .strict import kind, plain


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
    places: ClassVar[frozenset[str] | None] = None
    """Options that name a file, a folder, a library or an address: a case file may not choose them for the user. None:
    the adapter does not say, and whatever sounds like a place is taken for one."""
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
    """Any of this module's records as strict JSON, NumPy's numbers as numbers.

    Raises:
        BackendError: names the field that is no JSON, or too much of it.
    """
    kinds = (Support, Arithmetic, DeviceInfo, BufferType, Witness)
    kind_of = next((c for c in kinds if isinstance(value, c)), None)
    if kind_of is None:
        raise BackendError(f"one of {', '.join(c.__name__ for c in kinds)} expected, {kind(value)} found")
    return {f: plain(getattr(value, f), f"{kind_of.__name__}.{f}") for f in kind_of.__slots__}


_COUNTS = ("nodes", "compiles", "cache_hits", "splits", "copies")
_COUNTED = ("bytes", "kernels", "symbols", "views")


def witnessed(found: object) -> Witness:
    """A copy of an adapter's witness, each field of its own kind.

    Raises:
        BackendError: it is none, or names the field that holds something else.
    """
    if not isinstance(found, Witness):
        raise BackendError(f"a Witness expected, {kind(found)} found")
    said = describe(found)
    for name, value in said.items():
        if not _fits(name, value):
            raise BackendError(f"Witness.{name}: {_WANTED.get(name, 'a text')} expected, {kind(value)} found")
    return Witness(**said)


_WANTED = {
    **dict.fromkeys(_COUNTS, "a whole number"),
    **dict.fromkeys(_COUNTED, "whole numbers by name"),
    "seconds": "numbers by name",
    "notes": "a list of texts",
    "peak_compile_bytes": "a whole number or None",
}


def _fits(field: str, value: JSON) -> bool:
    if field in _COUNTS:
        return type(value) is int
    if field == "peak_compile_bytes":
        return value is None or type(value) is int
    if field == "notes":
        return isinstance(value, list) and all(isinstance(x, str) for x in value)
    if field == "seconds":
        return isinstance(value, dict) and all(type(x) in (int, float) for x in value.values())
    if field in _COUNTED:
        return isinstance(value, dict) and all(type(x) is int for x in value.values())
    return isinstance(value, str)
