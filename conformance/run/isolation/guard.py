"""Guards the suite against an adapter: what it raises, or returns of a wrong type or size, is a `BackendError`.

An adapter in this process also has a time limit, and gets each case read-only: a change is found when the adapter
returns, and the next backend gets the case as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from operator import attrgetter, is_not
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from conformance.backend.interface import (
    YES,
    Backend,
    BufferType,
    DeviceInfo,
    Session,
    Support,
    Witness,
    describe,
    plain_witness,
)
from conformance.backend.strict import clip, error_text, kind
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import Arithmetic, Mixed, faults
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, nbytes, packed_nbytes
from conformance.run.scheduler.backend import SchedBackend

from .isolate import IsolatedBackend
from .watchdog import Watchdog

P = ParamSpec("P")
T = TypeVar("T")
STRANGER = "a third party's adapter in the suite's own process: it could reach the others and the judge"
MOST = 1 << 20
"""Cases that a backend may ask for in one graph."""


def call_guarded(
    request: str, watchdog: Watchdog | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call an adapter's `function`, under the watchdog of this process where no other limit holds. ConformanceError if
    that is the adapter's own, else a `BackendError` that says what it raised; `request` names the backend and the
    method.
    """
    try:
        if watchdog is None:
            return function(*args, **kwargs)
        return watchdog.run(request, function, *args, **kwargs)
    except (ConformanceError, KeyboardInterrupt):
        raise
    except BaseException as e:  # sys.exit and the like must cost a case and not the run
        words = error_text(e)
        raise BackendError(f"{request} raised {words}", words=words) from e


class Guarded(Backend):
    """A backend whose methods raise `ConformanceError` only and return what the interface says. `watchdog` is this
    process's, None for a backend that has limits of its own. BackendError if a class attribute of the backend is of no
    use.
    """

    def __init__(self, inner: Backend, name: str, watchdog: Watchdog | None) -> None:
        self.inner = inner
        self.name = name
        self.note = ""
        """Is added to each witness."""
        self.shared = not isinstance(inner, IsolatedBackend)
        """Whether it gets our own objects, and no copies in another process."""
        self._watchdog = watchdog if self.shared and not isinstance(inner, SchedBackend) else None
        if isinstance(inner, SchedBackend):  # it waits for its devices, and each of them has a limit
            named = zip(inner.devices, inner.labels, strict=True)
            inner.devices[:] = [guard(d, f"{name}: {label}", watchdog) for d, label in named]
        self.batch = self._checked_batch()  # type: ignore[misc]  # the adapter's
        self.stages = self._checked_stages()  # type: ignore[misc]  # as above
        self.threads = inner.threads
        self._judges_cases = self._overrides("supports_case")
        self._knows_cases = self._overrides("arithmetic_in")
        self._declared: tuple[Case | None, Arithmetic] | None = None
        self._notes: Notes = {}
        """Of the last graph of `supports`: its cases are opened next, and need not be noted again."""

    def _overrides(self, method: str) -> bool:
        return self.inner.by_case and getattr(type(self.inner), method, None) is not getattr(Backend, method)

    def _checked_batch(self) -> int:
        value: object = self.call("batch", lambda: self.inner.batch)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= MOST:
            raise self._wrong("batch", f"a whole number from 1 to {MOST}", value)
        return int(value)

    def _checked_stages(self) -> tuple[str, ...]:
        value: object = self.call("stages", lambda: self.inner.stages)
        if not isinstance(value, (tuple, list)) or not all(isinstance(s, str) for s in value):
            raise self._wrong("stages", "a tuple of texts", value)
        return tuple(value)

    def call(self, method: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the adapter, as `call_guarded`."""
        return call_guarded(f"{self.name}: {method}", self._watchdog, function, *args, **kwargs)

    def _call_with(self, method: str, function: Callable[[Case], object], case: Case) -> object:
        """Call a method with a case, which must be as it was when the method returns."""
        seal, request = self._sealed(case), f"{method} of {case.id}"
        try:
            return self.call(request, function, case)
        finally:
            self._check(seal, request)

    def _wrong(self, method: str, wanted: str, found: object) -> BackendError:
        return BackendError(f"{self.name}: {method} returned {kind(found)}; it must return {wanted}")

    def info(self) -> DeviceInfo:
        """Of texts."""
        found: object = self.call("info", self.inner.info)
        if not isinstance(found, DeviceInfo):
            raise self._wrong("info", "a DeviceInfo", found)
        plain = self.call("info", describe, found)
        texts = (plain["backend"], plain["device"], plain["description"])
        if not all(isinstance(x, str) for x in texts) or not isinstance(plain["versions"], dict):
            raise BackendError(f"{self.name}: info has no texts in it; it must say what really executes")
        return DeviceInfo(*texts, {k: str(v) for k, v in plain["versions"].items()})

    @cached_property
    def libraries(self) -> Sequence[str]:
        """What computes, as far as `info` says it: for a witness that does not name it."""
        try:
            return [f"{name} {version}" for name, version in self.info().versions.items()]
        except ConformanceError:  # whoever asks for `info` itself is told
            return []

    def buffer_types(self) -> Sequence[BufferType]:
        """At least one."""
        found: object = self.call("buffer_types", lambda: list(self.inner.buffer_types()))
        if not isinstance(found, list) or not found or not all(isinstance(b, BufferType) for b in found):
            raise self._wrong("buffer_types", "a list of BufferType, the default first", found)
        return found

    def arithmetic(self) -> Arithmetic:
        """As declared."""
        return self._checked_arithmetic("arithmetic", self.call("arithmetic", self.inner.arithmetic))

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """As declared; the adapter answers once for a case."""
        key = case if self._knows_cases else None
        if self._declared is None or self._declared[0] is not key:
            if key is None:
                self._declared = None, self.arithmetic()
            else:
                found = self._call_with("arithmetic_in", self.inner.arithmetic_in, case)
                self._declared = case, self._checked_arithmetic("arithmetic_in", found)
        return self._declared[1]

    def _checked_arithmetic(self, method: str, found: object) -> Arithmetic:
        """`found` and what it holds for single nodes, each of the plain class and within upstream's limits.

        A subclass could answer anything, and a table may have changed since it was checked.
        """
        if not isinstance(found, Arithmetic):
            raise self._wrong(method, "an Arithmetic", found)
        held = {id(a): a for a in (found, *(found.nodes.values() if isinstance(found, Mixed) else ()))}
        for a in held.values():
            if type(a) not in (Arithmetic, Mixed):
                raise self._wrong(method, "an Arithmetic", a)
            for fault in faults(a):
                raise BackendError(f"{self.name}: {method}: {fault}")
        return found

    def computing_in(self, arithmetic: Arithmetic) -> Backend:
        """Not guarded: only our own reference has it."""
        return self.inner.computing_in(arithmetic)

    def supports_op(self, node: Tensor) -> Support:
        """`supports` of one node."""
        return self.supports(Graph([node]))[0]

    def supports(self, graph: Graph) -> list[Support]:
        """One answer for each node."""
        return self._answers("supports_op", graph, lambda: self.inner.supports(graph))

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """One answer for each node."""
        return self._answers("supports_placed", graph, lambda: self.inner.supports_placed(graph, tensor, buffer))

    def _answers(self, method: str, graph: Graph, ask: Callable[[], object]) -> list[Support]:
        seal = GraphSeal([graph]) if self.shared else None
        if seal is not None:
            self._notes = seal.notes()
        try:
            found = self.call(method, ask)
        finally:
            self._check(seal, method)
        if not isinstance(found, (list, tuple)):
            raise self._wrong(method.replace("supports_op", "supports"), "a list of Support", found)
        if len(found) != len(graph):
            raise BackendError(f"{self.name}: supports gave {len(found)} answers about {len(graph)} nodes")
        return [self._answer(method, x) for x in found]

    def _answer(self, method: str, answer: object) -> Support:
        if not isinstance(answer, Support) or not isinstance(answer.reason, str):
            raise self._wrong(method, "YES or no('the reason')", answer)
        return YES if answer.ok else Support(False, clip(answer.reason))

    def supports_case(self, case: Case) -> Support:
        """Yes without a call where the adapter does not override it."""
        if not self._judges_cases:
            return YES
        return self._answer("supports_case", self._call_with("supports_case", self.inner.supports_case, case))

    def open(self, case: Case) -> _GuardedSession:
        """A session under the same guard."""
        seal = self._sealed(case)
        with ExitStack() as stack:
            stack.callback(self._check, seal, "")
            session: object = self.call(f"open of {case.id}", self.inner.open, case)
            if not isinstance(session, Session):
                raise self._wrong("open", "a Session", session)
            stack.pop_all()
        return _GuardedSession(self, session, case, seal)

    def close(self) -> None:
        """Close it."""
        self.call("close", self.inner.close)

    def _sealed(self, case: Case) -> CaseSeal | None:
        if not self.shared:
            return None
        freeze(case)
        return CaseSeal(case, self._notes)

    def _check(self, seal: CaseSeal | GraphSeal | None, request: str) -> None:
        """Undo changes to what is sealed and raise for them; without `request` only undo them."""
        broken = "" if seal is None else seal.broken()
        if broken and request:
            raise self.changed(request, broken)

    def changed(self, request: str, broken: str) -> BackendError:
        """The error for an adapter that changed a case."""
        words = f"changed {broken}: a case is the suite's and may not be written to"
        return BackendError(f"{self.name}: {request} {words}", words=words)


class _GuardedSession(Session):
    def __init__(self, backend: Guarded, inner: Session, case: Case, seal: CaseSeal | None) -> None:
        self.inner = inner
        self._backend, self._case, self._seal = backend, case, seal

    def _call(self, method: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._backend.call(f"{method} of {self._case.id}", function, *args, **kwargs)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        self._call("write", self.inner.write, tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        found: object = self._call("read", self.inner.read, tensor)
        return self._bytes("read", tensor, found, nbytes(tensor))

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Every output that was asked for, packed, and no other."""
        found: object = self._call("compute", self.inner.compute, graph, inputs, outputs)
        if not isinstance(found, Mapping):
            raise self._wrong("compute", f"{kind(found)}; it must give a mapping with the bytes of every output")
        return {t: self._bytes("compute", t, self._call("compute", found.get, t), packed_nbytes(t)) for t in outputs}

    def witness(self) -> Witness:
        """A copy, each field of its own kind."""
        found = self._call("witness", lambda: plain_witness(self.inner.witness()))
        if not found.libraries:
            found.libraries = list(self._backend.libraries)
        if self._backend.note:
            found.notes.append(self._backend.note)
        return found

    def clock(self) -> float | None:
        found: object = self._call("clock", self.inner.clock)
        if found is not None and not isinstance(found, (int, float)):
            raise self._wrong("clock", f"{kind(found)}; it must give seconds or None")
        return found

    def opaque(self) -> frozenset[Tensor]:
        found: object = self._call("opaque", lambda: frozenset(self.inner.opaque()))
        if not isinstance(found, frozenset) or not found <= self._case.persistent.keys():
            raise self._wrong("opaque", "what is no persistent tensor of the case")
        return found

    def close(self) -> None:
        """Close it, and see that the case is as it was."""
        try:
            self._call("close", self.inner.close)
        finally:
            broken = "" if self._seal is None else self._seal.broken()
        if broken:
            raise self._backend.changed(f"the session of {self._case.id}", broken)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ConformanceError:
            if error is None:  # what came before it says more
                raise

    def _bytes(self, method: str, tensor: Tensor, data: object, size: int) -> Bytes:
        if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape == (size,):
            return data if type(data) is np.ndarray else np.asarray(data)
        what = "nothing" if data is None else kind(data)
        raise self._wrong(method, f"{what} for {tensor}; it must give a one-dimensional uint8 array of {size} bytes")

    def _wrong(self, method: str, what: str) -> BackendError:
        words = f"{method} gave {what}"
        return BackendError(f"{self._backend.name}: {method} of {self._case.id} gave {what}", words=words)


def guard(backend: Backend, name: str, watchdog: Watchdog | None) -> Guarded:
    """`backend` as a `Guarded`, which it may already be."""
    return backend if isinstance(backend, Guarded) else Guarded(backend, name, watchdog)


_FIELDS = ("type", "ne", "nb", "op", "op_params", "src", "view_src", "view_offs", "flags", "name")
_HEAD = ("id", "family", "seed", "generator", "steps")
_STEP = ("graph", "outputs", "inputs", "expected")
_DICTS = ("persistent", "recipes", "references", "placement")
_JSON = ("params", "tolerance", "provenance", "demands")
_Noted = tuple[Any, ...]


def read_only(data: Bytes) -> Bytes:
    """The same bytes, through a view that nobody can make writable again."""
    base: object = data.base
    if isinstance(base, memoryview) and base.readonly:
        return data
    return np.asarray(data.data.toreadonly())


def freeze(case: Case) -> None:
    """Replace the arrays of `case` by read-only views: caches, weights, inputs, recorded values."""
    for values in (case.persistent, *(v for s in case.steps for v in (s.inputs, s.expected))):
        for t, data in values.items():
            values[t] = read_only(data)


Notes = dict[Tensor, _Noted]
"""What was noted of tensors when they were first handed out."""


class GraphSeal:
    """Notes of all that the nodes of `graphs` and the tensors `more` reach, and of the graphs' lists of nodes.

    Notes that are `known`, from an earlier seal that was not broken, are not taken again.
    """

    def __init__(self, graphs: Iterable[Graph], more: Iterable[Tensor] = (), known: Notes | None = None) -> None:
        known = {} if known is None else known
        self._graphs = [(g, list(g.nodes)) for g in graphs]
        reached = _reached([t for _, nodes in self._graphs for t in nodes], more)
        self._tensors = [(t, known[t] if t in known else _note(t)) for t in reached]

    def notes(self) -> Notes:
        """All of them, for another seal of the same tensors."""
        return dict(self._tensors)

    def broken(self) -> str:
        """Undo every change; the name of the first, or empty."""
        found = ""
        for t, noted in self._tensors:
            at = next((i for i, (a, b) in enumerate(zip(_note(t), noted, strict=True)) if a is not b), None)
            if at is not None:
                for name, value in zip(_FIELDS, noted, strict=True):
                    setattr(t, name, value)
                found = found or f"{_FIELDS[at]} of {t}"
        for graph, nodes in self._graphs:
            if len(graph.nodes) != len(nodes) or any(map(is_not, graph.nodes, nodes)):
                graph.nodes = nodes.copy()
                found = found or "the nodes of its graph"
        return found


class CaseSeal:
    """What was noted of a whole case; `known` as of `GraphSeal`."""

    def __init__(self, case: Case, known: Notes | None = None) -> None:
        self._case = case
        self._steps = list(case.steps)
        empty = [n for n in _JSON if not getattr(case, n)]
        names: list[tuple[str, Case | Step, tuple[str, ...]]] = [("", case, (*_HEAD, *_DICTS, *empty))]
        names += [(f" of steps[{k}]", s, _STEP) for k, s in enumerate(case.steps)]
        self._fields = [(where, owner, n, getattr(owner, n)) for where, owner, each in names for n in each]
        self._items = [dict(value) if isinstance(value, dict) else None for *_, value in self._fields]
        self._json = [(n, _copied(getattr(case, n))) for n in _JSON if n not in empty]
        self._graph = GraphSeal(dict.fromkeys(s.graph for s in case.steps), case.persistent, known)

    def broken(self) -> str:
        """Undo every change; the name of the first, or empty."""
        found = [self._graph.broken()]
        for (where, owner, name, value), items in zip(self._fields, self._items, strict=True):
            if getattr(owner, name) is not value or (items is not None and not _same_items(value, items)):
                if items is not None:
                    value.clear()
                    value.update(items)
                setattr(owner, name, value)
                found.append(f"{name}{where}")
        if len(self._case.steps) != len(self._steps) or any(map(is_not, self._case.steps, self._steps)):
            self._case.steps[:] = self._steps
            found.append("steps")
        for name, noted in self._json:
            if getattr(self._case, name) != noted:
                setattr(self._case, name, _copied(noted))
                found.append(name)
        return next(filter(None, found), "")


def _copied(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value


_note: Callable[[Tensor], _Noted] = attrgetter(*_FIELDS)


def _reached(nodes: Iterable[Tensor], more: Iterable[Tensor]) -> list[Tensor]:
    seen = dict.fromkeys(nodes)
    seen.update(dict.fromkeys(more))
    stack = list(seen)
    while stack:
        t = stack.pop()
        for s in (*t.src, t.view_src):
            if s is not None and s not in seen:
                seen[s] = None
                stack.append(s)
    return list(seen)


def _same_items(held: dict[Any, Any], noted: dict[Any, Any]) -> bool:
    return len(held) == len(noted) and all(held.get(k) is v for k, v in noted.items())
