r"""Base of backends that compile a whole cgraph before it runs.

An adapter provides a table op -> emitter, a memory for persistent tensors, `emit`, which turns a `Plan` into nodes of a
model, and `compile`, which turns these into a `Program`. The engine makes plans, caches programs by everything on which
they depend, and runs them. It compiles a template's first graph as it is, the next one with symbols, so that one
program serves all its graphs. A step goes this way:

    compute -> plan -> program of an equal plan? ------------------------------------> bind -> run
                  \-> program of its template that binds its numbers? --------------/
                   \-> first graph of its template? emit -> compile ---------------/
                    \-> template_of(graphs) -> symbolic plan -> emit -> compile ---/
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast
from weakref import WeakKeyDictionary

from conformance.backend.interface import YES, Backend, Session, Support, Witness, no
from conformance.backend.snapshot import Snapshot
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, computes

from .plan import AnyEmitted, AnyMemory, Emitter, Memory, Plan, Program, Role
from .template import Template, assumptions, copied, sample_of, template_of

LIFTS = 3
"""Maximum number of times a template is lifted, each time with one more graph.

After that its graphs are compiled one by one."""


class UnfitError(BackendError):
    """A translation that does not fit its graph."""


class TemplateKey:
    """Key of a plan without its values, with a cached hash."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TemplateKey) and (other is self or other._parts == self._parts)

    def digest(self) -> str:
        """Return a short name that is the same on every machine."""
        return hashlib.blake2b(repr(self._parts).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Template and numbers of a plan."""

    template: TemplateKey
    numbers: tuple[int, ...]
    """`Sample.numbers`."""
    kinds: Hashable
    """`Sample.kinds`."""

    @classmethod
    def of(cls, plan: Plan) -> Fingerprint:
        """Compute the fingerprint of `plan`."""
        parts, outputs = cast("tuple[tuple[tuple[Hashable, ...], ...], Hashable]", plan.key)
        sample = sample_of(plan.tensors, plan.graph.nodes)
        template = (sample.structure, tuple([p[-2:] for p in parts]), outputs)
        return cls(TemplateKey(template), sample.numbers, sample.kinds)


@dataclass(frozen=True, slots=True)
class Instance:
    """A program, and the bindings to run it with."""

    program: Program
    hit: bool
    """True if the program existed already."""
    template: str = ""
    symbols: tuple[str, ...] = ()
    bindings: tuple[int, ...] = ()
    reason: str = ""
    """Why the template's graphs are compiled one by one, if they are."""


class TemplateState:
    """The graphs seen of one template, and their program once it is lifted."""

    def __init__(self, plan: Plan, fingerprint: Fingerprint) -> None:
        self.digest = fingerprint.template.digest()
        self.reason = ""
        """Why its graphs are compiled one by one, if they are."""
        self.numbers: tuple[int, ...] | None = None
        """Numbers of the latest graph that was compiled as it is."""
        self.kinds: set[Hashable] = {fingerprint.kinds}
        """Kinds of its graphs so far."""
        self.split = False
        """True if graphs of every other kind have a `TemplateState` of their own."""
        first = copied(plan.graph)
        self._graphs = [first]
        """The first graph, and each with which it was lifted."""
        self._inputs = [
            c
            for t, c in zip(plan.tensors, first.tensors(), strict=True)
            if t.op == "NONE" and plan.roles.get(t) == "input"
        ]
        self._template: Template | None = None
        self._program: Program | None = None

    def instance(self, numbers: tuple[int, ...]) -> Instance | None:
        """Return the lifted program for a graph with these numbers, if it serves it."""
        bindings = None if self._template is None else self._template.bind(numbers)
        if self._template is None or self._program is None or bindings is None:
            return None
        return Instance(self._program, True, self.digest, self._template.symbols, bindings)

    def lift(self, plan: Plan, fingerprint: Fingerprint, backend: TranslatingBackend, memory: Memory) -> None:
        """Make a program that also serves `plan`; else record the reason, or split by kind."""
        self.kinds.add(fingerprint.kinds)
        if self.reason or len(self._graphs) > LIFTS:
            return
        try:
            self._template, self._program = self._lifted(plan, fingerprint.numbers, backend, memory)
        except UnfitError as e:
            # a graph with one row differs from those with many: split by kind
            self.split = len(self.kinds) > 1
            self.reason = "" if self.split else str(e)
        except BackendError as e:
            self.reason = str(e)

    def _lifted(
        self, plan: Plan, numbers: tuple[int, ...], backend: TranslatingBackend, memory: Memory
    ) -> tuple[Template, Program]:
        self._graphs.append(copied(plan.graph))
        template = template_of(self._graphs, self._inputs)
        bindings = template.bind(numbers)
        if bindings is None:
            raise UnfitError("no numbers of the template's symbols give this graph")
        symbolic = template.symbolic(plan)
        with assumptions() as made:
            emitted = backend.emit(symbolic, memory)
        template = template.guarded(made)
        broken = template.broken(bindings)
        if broken is not None:
            raise UnfitError(f"{broken}, which does not hold for every graph of the template")
        return template, backend.compile(symbolic, emitted)


class TranslatingBackend(Backend):
    """A backend that compiles graphs."""

    device: str = ""
    """Device in a witness until a program reports what executed."""
    capacity: ClassVar[int] = 16
    """Size of the cache of compiled programs (least recently used out first)."""
    lifts: bool = False
    """True if `emit` accepts symbols, so that one program serves a whole template."""
    promises: tuple[str, ...] = ()
    """`Witness.promises`."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._templates: OrderedDict[Hashable, TemplateState] = OrderedDict()

    @abstractmethod
    def emitters(self) -> Mapping[str, Emitter]:
        """Return op -> its emitter; view ops need none."""

    @abstractmethod
    def memory(self, case: Case) -> Memory:
        """Make a memory with the case's persistent tensors."""

    @abstractmethod
    def emit(self, plan: Plan, memory: AnyMemory) -> AnyEmitted:
        """Emit a plan as nodes of a model; BackendError if that fails."""

    @abstractmethod
    def compile(self, plan: Plan, emitted: AnyEmitted) -> Program:
        """Compile what `emit` made of `plan`; BackendError if that fails."""

    def refuses(self, node: Tensor) -> str:
        """Return why the emitter of `node.op` cannot translate `node`; empty if it can."""
        del node
        return ""

    def bakes_weights(self, case: Case) -> bool:
        """Return True if weights become constants of a program, which then fits only these weights."""
        return len(case.steps) > 1

    def role_of(self, case: Case, weight: Tensor) -> Role:
        """Return `weight` for a constant of programs, `input` for a binding to host memory."""
        del weight
        return "weight" if self.bakes_weights(case) else "input"

    def supports_op(self, node: Tensor) -> Support:
        """Accept view ops and ops of the table unless `refuses` gives a reason."""
        if node.op in VIEW_OPS:
            return YES
        reason = self.refuses(node) if node.op in self.emitters() else "there is no emitter for it"
        return no(f"{node.op}: {reason}") if reason else YES

    def open(self, case: Case) -> TranslatingSession:
        """Open a session with the case's persistent tensors in the backend's memory."""
        return TranslatingSession(self, case)

    def program(self, plan: Plan, memory: Memory) -> Instance:
        """Return the program for `plan` alone."""
        program = self._programs.get(plan.key)
        if program is not None:
            self._programs.move_to_end(plan.key)
            return Instance(program, hit=True)
        program = self._programs[plan.key] = self.compile(plan, self.emit(plan, memory))
        if len(self._programs) > self.capacity:
            self._programs.popitem(last=False)
        return Instance(program, hit=False)

    def instance(self, plan: Plan, memory: Memory, fingerprint: Fingerprint) -> Instance:
        """Return a program for `plan`: its template's, if it occurred before with other numbers."""
        state = self._state(fingerprint.template, plan, fingerprint)
        instance = state.instance(fingerprint.numbers)
        if instance is None and state.split:
            state = self._state((fingerprint.template, fingerprint.kinds), plan, fingerprint)
            instance = state.instance(fingerprint.numbers)
        if instance is not None:
            return instance
        if state.numbers is None or fingerprint.numbers == state.numbers or plan.key in self._programs:
            state.numbers = fingerprint.numbers
            return replace(self.program(plan, memory), template=state.digest)
        state.lift(plan, fingerprint, self, memory)
        instance = state.instance(fingerprint.numbers)
        if instance is None:
            return replace(self.program(plan, memory), template=state.digest, reason=state.reason)
        return replace(instance, hit=False)

    def _state(self, key: Hashable, plan: Plan, fingerprint: Fingerprint) -> TemplateState:
        state = self._templates.get(key)
        if state is None:
            state = self._templates[key] = TemplateState(plan, fingerprint)
            if len(self._templates) > self.capacity:
                self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        return state

    def close(self) -> None:
        """Free the compiled programs."""
        self._programs.clear()
        self._templates.clear()


@dataclass(slots=True)
class GraphState:
    """Data of a session about a graph."""

    plan: Plan
    work: int
    """Number of nodes computed."""
    snapshot: Snapshot
    """Fields of the graph when it was planned."""
    held: tuple[Tensor, ...]
    """Persistent tensors that are inputs of its program."""
    instance: Instance | None = None
    fingerprint: Fingerprint | None = None


class TranslatingSession(Session):
    """Plans each step, gets or compiles its program, runs it and counts."""

    def __init__(self, backend: TranslatingBackend, case: Case) -> None:
        self._backend = backend
        self._memory = backend.memory(case)
        self._persistent = case.persistent.keys()
        caches = set(case.caches())
        self._roles: dict[Tensor, Role] = {
            t: "cache" if t in caches else backend.role_of(case, t) for t in case.persistent
        }
        self._digests: dict[Tensor, bytes] = {}
        self._witness = Witness(backend.device, "translated", promises=[*backend.promises])
        self._programs: dict[int, Program] = {}
        self._reasons: dict[str, None] = {}
        self._templates: dict[TemplateKey, TemplateKey] = {}
        self._numbers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._latest: dict[TemplateKey, tuple[tuple[int, ...], Instance]] = {}
        """Template -> the latest numbers and their program."""
        self._lifts = backend.lifts and len(case.steps) > 1
        self._graphs: WeakKeyDictionary[Graph, GraphState] = WeakKeyDictionary()
        if self._lifts:
            for step in case.steps:
                self._prepare(step.graph, step.outputs)

    def _prepare(self, graph: Graph, outputs: Sequence[Tensor]) -> None:
        """Compute the data that depends only on the graph."""
        self._fingerprint(self._planned(graph, outputs))

    def _check(self, tensor: Tensor) -> None:
        if tensor not in self._persistent:
            raise UsageError(f"{tensor}: a persistent tensor of the session's case expected")

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor; invalidate programs compiled with its old bytes."""
        self._check(tensor)
        self._memory.write(tensor, data)
        if self._digests.pop(tensor, None) is not None:
            self._graphs.clear()
            self._latest.clear()

    def read(self, tensor: Tensor) -> Bytes:
        """Return the bytes of a persistent tensor."""
        self._check(tensor)
        return self._memory.read(tensor)

    def witness(self) -> Witness:
        """Return counts of all steps so far; the adapter adds data of its device."""
        return self._witness

    def programs(self) -> Iterable[Program]:
        """Return the programs that ran in this session."""
        return self._programs.values()

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Plan, get or compile the program, run it; BackendError if any of these fails."""
        state = self._planned(graph, outputs)
        instance = state.instance or self._instance(state)
        if state.instance is None:
            state.instance = instance if instance.hit else replace(instance, hit=True)
        if state.held:
            inputs = {**inputs, **{t: self._memory.look(t) for t in state.held}}
        instance.program.bind(instance.bindings)
        values = instance.program.run(state.plan, self._memory, inputs)
        w = self._witness
        w.path = "cached" if instance.hit else "translated"
        w.compiles += not instance.hit
        w.cache_hits += instance.hit
        w.nodes += state.work
        w.template = instance.template
        w.symbols = dict(zip(instance.symbols, instance.bindings, strict=True))
        if instance.reason:
            self._reasons[instance.reason] = None
        self._programs[id(instance.program)] = instance.program
        return values

    def _instance(self, state: GraphState) -> Instance:
        if not self._lifts:
            return self._backend.program(state.plan, self._memory)
        fingerprint = self._fingerprint(state)
        latest = self._latest.get(fingerprint.template)
        if latest is None or latest[0] is not fingerprint.numbers:  # rare: n_kv grows by many cells at a time
            instance = self._backend.instance(state.plan, self._memory, fingerprint)
            latest = self._latest[fingerprint.template] = (
                fingerprint.numbers,
                instance if instance.hit else replace(instance, hit=True),
            )
            return instance
        return latest[1]

    def _fingerprint(self, state: GraphState) -> Fingerprint:
        if state.fingerprint is None:
            fingerprint = Fingerprint.of(state.plan)
            # one object per template and per tuple of numbers, for fast comparison
            template = self._templates.setdefault(fingerprint.template, fingerprint.template)
            numbers = self._numbers.setdefault(fingerprint.numbers, fingerprint.numbers)
            state.fingerprint = replace(fingerprint, template=template, numbers=numbers)
        return state.fingerprint

    def _digest(self, tensor: Tensor) -> bytes:
        if tensor not in self._digests:
            self._digests[tensor] = hashlib.blake2b(self._memory.look(tensor).data, digest_size=16).digest()
        return self._digests[tensor]

    def _planned(self, graph: Graph, outputs: Sequence[Tensor]) -> GraphState:
        """Return the state of `graph`; the previous one if graph and outputs are unchanged."""
        state = self._graphs.get(graph)
        wanted = tuple(outputs)
        if state is None or state.plan.outputs != wanted or not self._same(state):
            plan = self._new_plan(graph, wanted)
            held = tuple([t for t, r in plan.roles.items() if r == "input" and t in self._persistent])
            state = GraphState(plan, sum(computes(n) for n in graph), Snapshot(graph), held)
            self._graphs[graph] = state
        return state

    def _same(self, state: GraphState) -> bool:
        """Return True if its graph is unchanged since it was planned."""
        return state.snapshot.shows(state.plan.graph)

    def _new_plan(self, graph: Graph, wanted: tuple[Tensor, ...]) -> Plan:
        tensors = graph.tensors()
        index = {t: i for i, t in enumerate(tensors)}
        nodes = set(graph.nodes)
        roles: dict[Tensor, Role] = {
            t: self._roles.get(t, "input") for t in tensors if t.view_src is None and t not in nodes
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
                t in nodes,
                roles.get(t),
                self._digest(t) if roles.get(t) == "weight" else None,
            )
            for t in tensors
        )
        return Plan(graph, tensors, index, roles, wanted, (parts, tuple(index[t] for t in wanted)))

    def close(self) -> None:
        """Drop the session's programs; the backend's cache retains the latest."""
        self._programs.clear()
        self._graphs.clear()
        self._latest.clear()
