"""Caches that live in models: what the host knows of them, and the requests whose variables hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray
from openvino import Tensor as OvTensor

from backends.openvino.bind import HostMemory, Request
from backends.openvino.compile import CompiledModel
from backends.openvino.forms import NUMBER, decode, encode
from backends.openvino.walk import Emitted, Feed
from conformance.backend.translating.plan import AnyMemory, Plan
from conformance.case.case import Case
from conformance.ggml.quants.requant import Requant
from conformance.ggml.tensor import Bytes, Tensor

from .log import NOTHING, Appending, Logged, Table, to_load
from .walk import LOG, MINUS, name

Arrays = dict[str, NDArray[Any]]
"""Form of a variable -> what it holds."""


@dataclass(slots=True)
class Log:
    """Caches whose newest rows are in the variables of one request."""

    logged: Logged
    table: Table
    holder: StatefulRequest


class StateMemory(HostMemory):
    """Bytes on the host. Those of a cache may be old: then a request holds it, whole or as a log over the old bytes."""

    def __init__(self, case: Case, requant: Requant | None = None) -> None:
        super().__init__(Case(case.id, dict(case.persistent), []), requant)
        self._bytes.update({t: self._bytes[t].copy() for t in case.caches()})  # rows are put into them
        self.appending: Sequence[Appending] = ()
        """What the step that is about to run does to logs."""
        self._logs: dict[Tensor, Log] = {}
        self._wholes: dict[Tensor, StatefulRequest] = {}
        self._newer: set[Tensor] = set()
        """Caches that the host has old bytes of."""

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes; no request holds the tensor afterwards.

        Raises:
            UsageError: not the tensor's size.
        """
        self.settle(tensor)
        super().write(tensor, data)

    def look(self, tensor: Tensor) -> Bytes:
        """The bytes, fetched from the request that holds them."""
        self._fetch(tensor)
        return super().look(tensor)

    def settle(self, t: Tensor) -> None:
        """Move `t`, and the caches in one log with it, from requests to the host."""
        self._fetch(t)
        if t in self._logs:
            for cache in self._logs[t].logged.caches:
                del self._logs[cache]
        self._wholes.pop(t, None)

    def _fetch(self, t: Tensor) -> None:
        if t not in self._newer:
            return
        log = self._logs.get(t)
        if log is None:
            self._bytes[t] = decode(t.type, _joined(self._wholes[t].pull(t))).copy()
            self._newer.discard(t)
            return
        for cache in log.logged.caches:
            self._rows(cache, log)
        log.table.settled = log.table.length
        self._newer.difference_update(log.logged.caches)

    def _rows(self, cache: Tensor, log: Log) -> None:
        """Put the rows that were appended since the last call into their cells."""
        table, logged = log.table, log.logged
        cells = table.cells[:, table.settled :]
        stream, i = np.nonzero(cells != NOTHING)
        held = log.holder.pull(cache)[LOG][:, :, table.settled :]
        rows = decode(cache.type, {NUMBER: held.transpose(0, 2, 1, 3)[stream, i]}).reshape(len(i), -1)
        self._bytes[cache].reshape(-1, cache.nb[1])[(logged.first + stream) * logged.size + cells[stream, i]] = rows

    def release(self, request: StatefulRequest, kept: Mapping[int, Tensor]) -> None:
        """Take back what `request` holds in variables that will hold another cache; `kept` says what each will hold."""
        for index, t in list(request.holds.items()):
            if kept.get(index) is not t:
                self.settle(t)
                del request.holds[index]

    def lend(self, t: Tensor, request: StatefulRequest) -> None:
        """Put the whole of `t` into variables of `request`."""
        holder = self._wholes.get(t)
        if holder is request:
            return
        if holder is not None and request.forms(t) == holder.forms(t):
            request.push(t, holder.pull(t))
        else:
            self.settle(t)
            request.push(t, _parted(encode(t, self._bytes[t])))
        self._wholes[t] = request

    def append(self, a: Appending, request: StatefulRequest) -> Table:
        """Let `request` hold the log that `a` goes on with, laid out anew where the old one does not do.

        The kernel multiplies hidden rows of V by 0, so that NaN among them would reach every query.
        """
        caches = a.log.caches
        log = self._logs.get(caches[0])
        if log is not None and log.logged.key == a.log.key and log.table.serves(a) and not _leaks(log, a):
            if log.holder is not request:
                for t in caches:
                    request.push(t, log.holder.pull(t))
                log.holder = request
            return log.table
        for t in caches:
            self.settle(t)
        cells = to_load(a)
        log = Log(a.log, Table.of(cells, a.log.size), request)
        at = (a.log.first + np.arange(len(cells))[:, None]) * a.log.size + np.maximum(cells, 0)
        log.table.endless = np.zeros(cells.shape, np.bool_)
        for t in caches:
            rows = encode(t, self._bytes[t])[NUMBER].reshape(-1, a.log.heads, a.log.head_size)[at]
            rows[cells == NOTHING] = 0
            log.table.endless |= ~np.isfinite(rows).all(axis=(2, 3))
            request.push(t, {LOG: rows.transpose(0, 2, 1, 3).astype("<f4")})
            self._logs[t] = log
        return log.table

    def newer(self, caches: Iterable[Tensor]) -> None:
        """Note that the holders of `caches` have changed them."""
        self._newer.update(caches)


class StatefulRequest(Request):
    """A compiled model with its one infer request, whose variables hold caches of one session at a time."""

    def __init__(self, compiled: CompiledModel | None, emitted: Emitted, peak: int | None = None) -> None:
        super().__init__(compiled, emitted, peak)
        self.holds: dict[int, Tensor] = {}
        """Place of a cache in a plan -> the cache of `owner` that its variables hold."""
        self._owner: ReferenceType[StateMemory] | None = None
        self._variables: dict[int, list[Feed]] = {}
        for feed in emitted.variables:
            self._variables.setdefault(feed.index, []).append(feed)
        self._written = emitted.written
        self._first_extra = len(emitted.feeds)
        self._place: dict[Tensor, int] = {}
        self._states = {} if self._request is None else {s.name: s for s in self._request.query_state()}

    def forms(self, t: Tensor) -> list[str]:
        """The forms in which variables hold `t`."""
        return [f.form for f in self._variables[self._place[t]]]

    def pull(self, t: Tensor) -> Arrays:
        """A copy of what the variables hold of `t`."""
        return {f.form: np.array(self._states[name(f)].state.data) for f in self._variables[self._place[t]]}

    def push(self, t: Tensor, parts: Mapping[str, NDArray[Any]]) -> None:
        """Let the variables hold `parts` of `t`."""
        for f in self._variables[self._place[t]]:
            self._states[name(f)].state = OvTensor(np.ascontiguousarray(parts[f.form]))

    def run(self, plan: Plan, memory: AnyMemory, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
        """Fetch caches that other requests hold, lay out masks, infer.

        Raises:
            BackendError: OpenVINO's own words.
        """
        if self._request is None:
            return super().run(plan, memory, inputs)
        self._take(plan, memory)
        at = self._first_extra
        for a in memory.appending:
            table = memory.append(a, self)
            table.append(a.cells)
            self._request.set_input_tensor(at, OvTensor(np.arange(a.log.streams, dtype=np.int32)))
            self._request.set_input_tensor(at + 1, OvTensor(np.ascontiguousarray(table.laid(a.mask))))
            at += 2
        values = super().run(plan, memory, inputs)
        memory.newer(plan.tensors[i] for i in self._written)
        return values

    def _take(self, plan: Plan, memory: StateMemory) -> None:
        """Release caches of other plans and sessions; take this plan's whole caches."""
        wanted = {i: plan.tensors[i] for i in self._variables}
        last = None if self._owner is None else self._owner()
        if last is not None:
            last.release(self, wanted if last is memory else {})
        self._owner, self.holds = ref(memory), wanted
        self._place = {t: i for i, t in wanted.items()}
        logged = {t for a in memory.appending for t in a.log.caches}
        for t in wanted.values():
            if t not in logged:
                memory.lend(t, self)


def _leaks(log: Log, a: Appending) -> bool:
    """Whether a position of the log holds NaN or infinity in a row that no query of a step sees.

    Rows are looked at when they are hidden first, all that there are by then: in a window that slides, once for as many
    steps as it is wide.
    """
    hidden = log.table.hidden(a)
    if hidden[:, log.table.endless.shape[1] :].any():
        held = (log.holder.pull(t)[LOG] for t in log.logged.caches)
        log.table.endless = np.logical_or.reduce([~np.isfinite(x).all(axis=(1, 3)) for x in held])
    known = log.table.endless
    return bool((hidden[:, : known.shape[1]] & known).any())


def _parted(parts: Mapping[str, NDArray[Any]]) -> Arrays:
    """A cache's parts as variables hold them."""
    out: Arrays = {}
    for form, x in parts.items():
        out[form] = x
        if x.dtype.kind == "f":
            out[form], out[form + MINUS] = x.astype("<f4"), ((x == 0) & np.signbit(x)).astype(np.uint8)
    return out


def _joined(held: Arrays) -> Arrays:
    """What variables hold as a cache's parts."""
    minus = {form: held[form + MINUS] != 0 for form in held if form + MINUS in held}
    plain = {form: x for form, x in held.items() if not form.endswith(MINUS)}
    return {form: np.where(minus[form], np.float32(-0.0), x) if form in minus else x for form, x in plain.items()}
