"""The base of backends that translate a whole cgraph before anything runs: walk, emit, compile, bind.

An adapter gives a table op -> emitter, a memory that holds persistent tensors, and `translate`, which turns a `Plan`
into a `Program`. The engine makes the plan, keeps compiled programs by everything they depend on, and binds.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from conformance.cgraph.case import Case
from conformance.cgraph.errors import BackendError, UsageError
from conformance.cgraph.graph import Graph
from conformance.cgraph.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, is_empty

from .interface import YES, Backend, Session, Support, Witness, no

Role = Literal["input", "weight", "cache"]
"""What a leaf is to a program: bound at every run, part of the program, or state that some step writes."""
Emitter = Callable[[Any, Tensor], None]
"""`f(context, node)`: add to the translation what computes `node`, and store the value in the context."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One graph and what a translation of it may depend on; nothing else may reach a program."""

    graph: Graph
    tensors: list[Tensor]
    index: dict[Tensor, int]
    """Tensor -> its place in `tensors`: the name under which a program knows it, so that it serves equal graphs."""
    roles: dict[Tensor, Role]
    """Leaves that own their bytes -> what they are."""
    outputs: tuple[Tensor, ...]
    key: Hashable
    """Equal for two plans exactly when one program serves both."""

    def computed(self) -> Iterator[Tensor]:
        """The nodes that compute something, in order.

        Raises:
            BackendError: one of them reads a tensor that its graph leaves uncomputed.
        """
        dead = {n for n in self.graph if n.view_src is None and n.op not in VIEW_OPS and not n.flags & FLAG_COMPUTE}
        for node in self.graph:
            if not computes(node):
                continue
            for s in node.src:
                if s is not None and s.root in dead:
                    raise BackendError(f"{node}: reads {s}, which the graph does not compute")
            yield node


class Memory(ABC):
    """Where a session's persistent tensors live between steps."""

    @abstractmethod
    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor; `data` stays the caller's."""

    @abstractmethod
    def read(self, tensor: Tensor) -> Bytes:
        """The bytes of a persistent tensor as ggml would hold them."""


AnyMemory: TypeAlias = Any
"""The `Memory` of the adapter's own kind that its programs work on."""


class Program(ABC):
    """A compiled plan."""

    @abstractmethod
    def run(self, plan: Plan, memory: AnyMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Run once: read caches from `memory`, leave their new contents there, and give `plan.outputs` packed.

        Args:
            plan: the one it was made from, or another of an equal key.
            memory: what the backend's `memory` made.
            inputs: leaf -> its bytes.

        Raises:
            BackendError: the device failed; its words are in the message.
        """


class TranslatingBackend(Backend):
    """A backend that compiles graphs."""

    device: str = ""
    """The device that a witness names until a program has said what executed."""
    capacity: ClassVar[int] = 16
    """How many compiled programs are kept, those used last."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()

    @abstractmethod
    def emitters(self) -> Mapping[str, Emitter]:
        """Op -> what translates it; view ops need none."""

    @abstractmethod
    def memory(self, case: Case) -> Memory:
        """The case's persistent tensors, filled."""

    @abstractmethod
    def translate(self, plan: Plan, memory: AnyMemory) -> Program:
        """Walk, emit and compile.

        Raises:
            BackendError: the plan cannot be translated, or the device's compiler refused it.
        """

    def refuses(self, node: Tensor) -> str:
        """Why the emitter of `node.op` cannot translate `node`; empty where it can."""
        del node
        return ""

    def bakes_weights(self, case: Case) -> bool:
        """Whether weights become part of a program, which then serves only equal weights."""
        return len(case.steps) > 1

    def supports_op(self, node: Tensor) -> Support:
        """Yes for view ops and for every op of the table that `refuses` has nothing against."""
        if node.op in VIEW_OPS:
            return YES
        if node.op not in self.emitters():
            return no(f"{node.op}: there is no emitter for it")
        reason = self.refuses(node)
        return no(f"{node.op}: {reason}") if reason else YES

    def open(self, case: Case) -> TranslatingSession:
        """A session with the case's persistent tensors in the backend's memory."""
        return TranslatingSession(self, case)

    def program(self, plan: Plan, memory: Memory) -> tuple[Program, bool]:
        """The program for `plan`, and whether it was there already."""
        found = self._programs.get(plan.key)
        if found is not None:
            self._programs.move_to_end(plan.key)
            return found, True
        made = self._programs[plan.key] = self.translate(plan, memory)
        if len(self._programs) > self.capacity:
            self._programs.popitem(last=False)
        return made, False

    def close(self) -> None:
        """Let the compiled programs go."""
        self._programs.clear()


class TranslatingSession(Session):
    """The engine: plans each step, finds or makes its program, binds and counts."""

    def __init__(self, backend: TranslatingBackend, case: Case) -> None:
        self._backend = backend
        self._memory = backend.memory(case)
        self._persistent = case.persistent.keys()
        caches = set(case.caches())
        weight: Role = "weight" if backend.bakes_weights(case) else "input"
        self._roles: dict[Tensor, Role] = {t: "cache" if t in caches else weight for t in case.persistent}
        self._digests: dict[Tensor, bytes] = {}
        self._witness = Witness(backend.device, "translated")
        self._programs: dict[int, Program] = {}

    def _known(self, tensor: Tensor) -> None:
        if tensor not in self._persistent:
            raise UsageError(f"{tensor}: a persistent tensor of the session's case expected")

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor; programs with other weights inside no longer serve this session."""
        self._known(tensor)
        self._memory.write(tensor, data)
        self._digests.pop(tensor, None)

    def read(self, tensor: Tensor) -> Bytes:
        """The bytes of a persistent tensor."""
        self._known(tensor)
        return self._memory.read(tensor)

    def witness(self) -> Witness:
        """Counts of all steps so far; the adapter adds what its device tells."""
        return self._witness

    def programs(self) -> Iterable[Program]:
        """Programs that ran in this session."""
        return self._programs.values()

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Plan, find or make the program, run it.

        Raises:
            BackendError: translation, compilation or execution failed.
        """
        plan = self._plan(graph, outputs)
        program, hit = self._backend.program(plan, self._memory)
        given = inputs
        if any(r == "input" and t in self._persistent for t, r in plan.roles.items()):
            held = {t: self._memory.read(t) for t, r in plan.roles.items() if r == "input" and t in self._persistent}
            given = {**inputs, **held}
        found = program.run(plan, self._memory, given)
        w = self._witness
        w.path = "cached" if hit else "translated"
        w.compiles += not hit
        w.cache_hits += hit
        w.nodes += sum(computes(n) for n in graph)
        self._programs[id(program)] = program
        return found

    def _digest(self, tensor: Tensor) -> bytes:
        if tensor not in self._digests:
            self._digests[tensor] = hashlib.blake2b(self._memory.read(tensor).data, digest_size=16).digest()
        return self._digests[tensor]

    def _plan(self, graph: Graph, outputs: Sequence[Tensor]) -> Plan:
        tensors = graph.tensors()
        index = {t: i for i, t in enumerate(tensors)}
        made = set(graph.nodes)
        roles: dict[Tensor, Role] = {
            t: self._roles.get(t, "input") for t in tensors if t.view_src is None and t not in made
        }
        parts = tuple(
            (
                t.op,
                t.op_params,
                t.type.id,
                t.ne,
                t.nb,
                t.view_offs,
                t.flags & FLAG_COMPUTE,
                t.view_src and index[t.view_src],
                tuple(None if s is None else index[s] for s in t.src),
                t in made,
                roles.get(t),
                self._digest(t) if roles.get(t) == "weight" else None,
            )
            for t in tensors
        )
        wanted = tuple(outputs)
        return Plan(graph, tensors, index, roles, wanted, (parts, tuple(index[t] for t in wanted)))

    def close(self) -> None:
        """Let the session's programs go; the backend keeps those used last."""
        self._programs.clear()


def computes(node: Tensor) -> bool:
    """Whether running `node` changes any byte: no view op, flagged for computation, not empty."""
    return node.op not in VIEW_OPS and bool(node.flags & FLAG_COMPUTE) and not is_empty(node)
