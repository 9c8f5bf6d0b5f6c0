"""The backend interface, a mirror of `ggml_backend`.

An adapter subclasses `Backend` and `Session`. Tensors are compared by identity; outputs are packed
(`conformance.ggml.tensor.pack`: without gaps, `ne[0]` fastest).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
    """Answer of `supports_op`: yes, or no with a reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Support(True)


def no(reason: str) -> Support:
    """Refuse with a reason: the property of the node, and what the backend supports."""
    return Support(False, reason)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Device and libraries that really execute: queried, never guessed."""

    backend: str
    device: str
    description: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library -> version; `driver`: name and version of the device's driver."""

    @property
    def driver(self) -> str:
        """Name and version of the driver; empty if the device has none, or it is unknown."""
        return self.versions.get("driver", "")


@dataclass(frozen=True, slots=True)
class BufferType:
    """A `ggml_backend_buffer_type`."""

    name: str
    is_host: bool = True
    alignment: int = 1
    max_size: int | None = None


@dataclass(slots=True)
class Witness:
    """Record of what ran."""

    device: str
    """Device that executed."""
    path: str
    """How graphs were executed.

    `eager` (node by node), `translated` (compiled this step), `cached` (a compiled graph was reused), `interpreted`
    (translated, and run without compiling) or `split` (shared among backends)."""
    nodes: int = 0
    """Nodes computed in all steps, without view ops and nodes without the COMPUTE flag."""
    compiles: int = 0
    cache_hits: int = 0
    splits: int = 0
    copies: int = 0
    cache_bytes: int = 0
    """Bytes moved into caches in all steps, in their own types; 0 if not counted."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Buffer type or kind of memory -> bytes."""
    kernels: dict[str, int] = field(default_factory=dict)
    """Executed kernel or layer type -> count."""
    placed: dict[str, dict[str, int]] = field(default_factory=dict)
    """Device -> op -> nodes, in their order, if a scheduler shares graphs among devices."""
    notes: list[str] = field(default_factory=list)
    stage: str = "run"
    """Stage of the backend that produced the values."""
    template: str = ""
    """Hash of the template of the last step; empty if a backend has none."""
    symbols: dict[str, int] = field(default_factory=dict)
    """Symbol of a lifted template -> its value in the last step."""
    views: dict[str, int] = field(default_factory=dict)
    """`slice`, `gather`, `concat`, `scatter`, `rows` (method of accessing views) -> count."""
    state: str = ""
    """Location of caches; empty if a backend does not distinguish.

    `bound`: inputs and outputs over a session's memory; `fused` or `slots`: variables of the model."""
    peak_compile_bytes: int | None = None
    """Largest rise of resident memory during a compilation; None if unknown or none ran."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Device -> seconds of computing, if several share a graph."""
    counters: dict[str, int] = field(default_factory=dict)
    """Other counters of a device, such as `columns` in use, or `least_rows` of a kernel.

    `programs`: compiled programs whose layers `kernels` counts."""
    promises: list[str] = field(default_factory=list)
    """Cost properties that the backend always declares: `case.demands` lists them."""
    libraries: list[str] = field(default_factory=list)
    """Libraries that computed: each with its version or path.

    If an adapter leaves it empty, the suite fills it from `DeviceInfo.versions`; in a worker it adds the delegates
    of the adapter."""


class Session(AbstractContextManager["Session"], ABC):
    """A case on a backend: its weights and caches persist here from step to step."""

    @abstractmethod
    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor."""

    @abstractmethod
    def read(self, tensor: Tensor) -> Bytes:
        """Return the bytes of a persistent tensor, bit-exact, as ggml would store them."""

    @abstractmethod
    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph` once and return the packed bytes of `outputs`.

        Nodes without FLAG_COMPUTE are not computed. A node that writes through a view writes into the tensor that owns
        the bytes. An output has the node's value right after it ran.

        Args:
            graph: validated; its leaves are persistent tensors of the session's case or keys of `inputs`.
            inputs: leaf -> its bytes.
            outputs: nodes of `graph`.

        Raises:
            BackendError: the backend failed; the message quotes it.
        """

    @abstractmethod
    def witness(self) -> Witness:
        """Return the record of what ran in this session so far."""

    def clock(self) -> float | None:
        """Return seconds of opening and all `compute` calls; None to use the caller's clock.

        The clock is close to the device. A session needs its own clock if it is in another process, or if each call
        repeats work that an application does once: our ggml session rebuilds its graph for each step, while llama.cpp
        reuses it.
        """
        return None

    def opaque(self) -> frozenset[Tensor]:
        """Return persistent tensors that `read` and `write` cannot reach; they are not checked."""
        return frozenset()

    def close(self) -> None:
        """Free memory; called once."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


API_VERSION = 1
"""Version of this interface; a change that adapters must follow increments it."""
API_CHANGES: Mapping[int, str] = {}
"""Version -> change that an adapter for the previous version needs, in one sentence."""


class Backend(ABC):
    """A device in one execution mode.

    The constructor takes the adapter's options as keyword strings (`name?key=value&key=value` on the command line). It
    raises `UnavailableError` if the machine lacks what it needs, `UsageError` for an unknown value.
    """

    api_version: ClassVar[int] = 1
    """The `API_VERSION` for which the adapter was written, as a literal."""
    batch: ClassVar[int] = 1
    """Number of one-step cases to merge into one graph, for backends whose cost is per graph."""
    stages: ClassVar[tuple[str, ...]] = ("run",)
    """Stages whose values are available; the last, `run`, is the complete run.

    A backend with more than one takes the option `stage=NAME`: `translate` gives the values of the translated model
    before anything is compiled."""
    threads: int | None = None
    """Number of threads that compute; None if unknown, or if another device than the CPU does.

    A single one is measured in processor time, pinned to a processor."""
    fragile: bool = False
    """True if a software driver emulates the device on the CPU.

    Freeing memory may break its process, so trajectories get new ones. Time limits count processor time."""
    fixed_graphs: ClassVar[bool] = False
    """True if its sessions compute only the unchanged graphs of the opened case."""
    by_case: bool = True
    """True if the adapter's own `supports_case` and `arithmetic_in` depend on the case.

    Else they are not called with one."""
    places: ClassVar[frozenset[str] | None] = None
    """Options that name a file, folder, library or address.

    A case file must not choose them for the user. None: unknown, so every option with such a name counts."""
    builds: ClassVar[frozenset[str]] = frozenset()
    """Options that name a build of ggml, as `builds.source.locate` does; it gets a path."""
    delegates: ClassVar[Sequence[str]] = ()
    """Names of other adapters that compute for this one, or from which it derives.

    `ggml` also stands for any ggml library that it opens. Its witness lists them. In a worker, another adapter or a
    ggml library that is not named here makes the cases of a third-party adapter VACUOUS."""
    audited: ClassVar[Mapping[str, str]] = {}
    """Options that an audit adds: with them the adapter detects more bugs, but takes longer."""

    @abstractmethod
    def info(self) -> DeviceInfo:
        """Return what executes, with versions."""

    @abstractmethod
    def supports_op(self, node: Tensor) -> Support:
        """Decide by op, types, shapes, strides and op_params, never by data, if `node` can run."""

    @abstractmethod
    def open(self, case: Case) -> Session:
        """Allocate and fill the case's persistent tensors."""

    def supports(self, graph: Graph) -> list[Support]:
        """Return `supports_op` for each node; one round trip to a backend in another process."""
        return [self.supports_op(node) for node in graph]

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """Return `supports` while leaf `tensor` is in the `buffer`-th of `buffer_types`.

        llama.cpp asks this to decide where a weight goes. With one buffer type it equals `supports`.
        """
        del tensor, buffer
        return self.supports(graph)

    def supports_case(self, case: Case) -> Support:
        """Decide if the steps of `case`, whose nodes are supported, can run one after the other.

        A device that runs whole models, not graphs, may refuse: it may support only one sequence, or only increasing
        positions.
        """
        del case
        return YES

    def buffer_types(self) -> Sequence[BufferType]:
        """Return the kinds of memory for weights, default first."""
        return [BufferType("default")]

    def arithmetic(self) -> Arithmetic:
        """Return the rounding of the device; exact unless declared."""
        return EXACT

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """Return the rounding for `case`; only devices that share nodes differ from `arithmetic`."""
        del case
        return self.arithmetic()

    def computing_in(self, arithmetic: Arithmetic) -> Backend:
        """Return a backend that computes in `arithmetic`; UsageError unless it is a reference."""
        raise UsageError(f"{type(self).__name__} cannot imitate another backend's arithmetic ({arithmetic.name})")

    def takes(self, option: str) -> bool:
        """Return True if the constructor of the backend has this option."""
        return option in inspect.signature(type(self)).parameters

    def renew(self) -> None:  # noqa: B027  # where it has a process of its own, that is replaced
        """Drop all state that a fault may have damaged."""

    def close(self) -> None:  # noqa: B027  # most backends hold nothing
        """Release the device; called once."""


def describe(value: Support | Arithmetic | DeviceInfo | BufferType | Witness) -> dict[str, JSON]:
    """Encode a record as strict JSON; BackendError names a field that is invalid or too large."""
    kinds = (Support, Arithmetic, DeviceInfo, BufferType, Witness)
    kind_of = next((c for c in kinds if isinstance(value, c)), None)
    if kind_of is None:
        raise BackendError(f"one of {', '.join(c.__name__ for c in kinds)} expected, {kind(value)} found")
    return {f: plain(getattr(value, f), f"{kind_of.__name__}.{f}") for f in kind_of.__slots__}


def class_faults(adapter: object, name: str) -> Iterator[str]:
    """Yield a sentence for each fault that makes `adapter` an unusable adapter class."""
    if not (isinstance(adapter, type) and issubclass(adapter, Backend)):
        yield (
            f"{name} is not a class that derives from conformance.backend.interface.Backend; derive it from that, or "
            "from conformance.backend.kernel.KernelBackend, which needs a table of kernels only."
        )
        return
    written_for: object = adapter.api_version
    if not isinstance(written_for, int) or written_for < 1:
        yield f"{name} has {written_for!r:.80} as `api_version`; it must be a whole number from 1."
    elif written_for > API_VERSION:
        yield f"{name} needs version {written_for} of the interface, this is {API_VERSION}; upgrade ggml-conformance."
    else:
        for version in range(written_for + 1, API_VERSION + 1):
            change = API_CHANGES[version]
            yield f"{name} was written for version {version - 1} of the interface; for {version}: {change}"
    delegates: object = adapter.delegates
    if not isinstance(delegates, (tuple, list)) or not all(isinstance(d, str) for d in delegates):
        yield f"{name} has {delegates!r:.80} as `delegates`; it must be a tuple of names of adapters, as ('ggml',)."
    for method in sorted(adapter.__abstractmethods__):
        says = (getattr(Backend, method, None) or getattr(adapter, method)).__doc__ or ""
        first = says.splitlines()[0].rstrip(".") if says else "the interface needs it"
        yield f"{name} has no method `{method}`; write it: {first}."
