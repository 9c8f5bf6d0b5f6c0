"""The backend `sched?devices=xdna2,cpu`: each split of a case runs on its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

from conformance.backend.interface import YES, Backend, BufferType, DeviceInfo, Session, Support, Witness, no
from conformance.backend.registry import Composed, Spec, provide, resolve
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import GraphError, UnavailableError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import written
from conformance.ggml.tensor import Bytes, Tensor, computes, nbytes

from .assign import DECLARED, labels, memory_of, read_devices
from .handover import Handover, Passed, Watched, find
from .plan import Plan, Share, Shared, plan, refusal, summary, zeros

NAME = "sched"
_MAX_PLANS = 8
"""Maximum number of cached plans."""


class SchedBackend(Composed):
    """Several backends in order of priority; the last runs nodes that no other accepts.

    `devices` is parsed by `read_devices`, `buffers` by `memory_of`; UsageError for an invalid value.
    """

    fixed_graphs = True

    def __init__(self, devices: str = "xdna2,cpu", buffers: str = DECLARED) -> None:
        self.specs = read_devices(devices)
        self.labels = labels(self.specs)
        self._how = buffers
        memory_of((), buffers)
        self.devices: list[Backend] = []
        self._plans: dict[Case, Plan] = {}

    def attach(self, opener: Callable[[Spec], Backend]) -> SchedBackend:
        """Open the devices before any run; UsageError if unknown, UnavailableError if not available."""
        with ExitStack() as stack:
            stack.callback(self.close)
            for spec in self.specs:
                self.devices.append(opener(spec))
            stack.pop_all()
        self._memory = memory_of(self.devices, self._how)
        return self

    def info(self) -> DeviceInfo:
        """Return the combined descriptions of the devices."""
        infos = [d.info() for d in self.devices]
        described = "; ".join(f"{label}: {i.description}" for label, i in zip(self.labels, infos, strict=True))
        versions = {k: v for i in infos for k, v in i.versions.items()}
        return DeviceInfo(NAME, "+".join(i.device for i in infos), described, versions)

    def buffer_types(self) -> Sequence[BufferType]:
        """Return the default buffer type of the last device."""
        return self.devices[-1].buffer_types()[:1]

    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic of the last device; `arithmetic_in` has that of each node."""
        return self.devices[-1].arithmetic()

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """Return the arithmetic of each node's device."""
        return self.plan(case).arithmetic

    def supports_op(self, node: Tensor) -> Support:
        """Return yes if any device supports the node, else every device's reason."""
        return self.supports(Graph([node]))[0]

    def supports(self, graph: Graph) -> list[Support]:
        """Return `supports_op` of every node, with one request per device."""
        answers = [d.supports(graph) for d in self.devices]
        return [
            YES if any(said) else no(refusal(node, self.labels, said))
            for node, *said in zip(graph, *answers, strict=True)
        ]

    def supports_case(self, case: Case) -> Support:
        """Return no if no device is left for a node, or a device rejects its part of the case."""
        try:
            shared = self.plan(case)
        except UnavailableError as e:
            return no(str(e))
        for label, device, own in zip(self.labels, self.devices, shared.cases, strict=True):
            answer = YES if own is None else device.supports_case(own)
            if not answer:
                return no(f"{label}: {answer.reason}")
        return YES

    def open(self, case: Case) -> _SchedSession:
        """Open a session on every device that has a part of the case.

        UnavailableError if no device is left for a node; names the node, its shapes and every backend's reason.
        """
        return _SchedSession(self.devices, self.labels, case, self.plan(case))

    def handover(self, case: Case) -> Handover | None:
        """Return the first value of `case` that differs between devices; BackendError if one failed."""
        return find(self.open, case)

    def plan(self, case: Case) -> Plan:
        """Return the splits of `case`; UnavailableError as for `open`."""
        if case not in self._plans:
            while len(self._plans) >= _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[case] = plan(case, self.devices, self.labels, self._memory)
        return self._plans[case]

    def renew(self) -> None:
        """Renew each device's backend."""
        for device in self.devices:
            device.renew()

    def close(self) -> None:
        """Close the devices."""
        while self.devices:
            self.devices.pop().close()


provide(NAME, SchedBackend)


class _SchedSession(Watched):
    """Memory of one case on all devices.

    Every device that uses a persistent tensor has a copy. After a split writes it, only that device's copy is valid,
    until another device needs it. Values pass between splits through the host.
    """

    def __init__(self, backends: Sequence[Backend], labels: Sequence[str], case: Case, plan: Plan) -> None:
        self._labels, self._case, self._plan = labels, case, plan
        self._witness = Witness("+".join(labels), "split", placed={label: {} for label in labels})
        self._splits = dict.fromkeys(labels, 0)
        self._carried = 0
        self._last: Shared | None = None
        with ExitStack() as stack:
            self._sessions: dict[int, Session] = {
                b: stack.enter_context(backends[b].open(own)) for b, own in enumerate(plan.cases) if own is not None
            }
            self._stack = stack.pop_all()
        self._holders = {
            t: [b for b, own in enumerate(plan.cases) if own is not None and t in own.persistent]
            for t in case.persistent
        }
        self._fresh = {t: set(holders) for t, holders in self._holders.items()}
        self._unused = {t: data for t, data in case.persistent.items() if not self._holders[t]}

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set a persistent tensor on every device that uses it; GraphError if unknown."""
        if tensor in self._unused:
            self._unused[tensor] = data.copy()
            return
        for b in self._holders_of(tensor):
            self._sessions[b].write(tensor, data)
        self._fresh[tensor] = set(self._holders[tensor])

    def read(self, tensor: Tensor) -> Bytes:
        """Return a persistent tensor from a device with a valid copy; GraphError if unknown."""
        if tensor in self._unused:
            return self._unused[tensor].copy()
        self._holders_of(tensor)
        return self._sessions[min(self._fresh[tensor])].read(tensor)

    def opaque(self) -> frozenset[Tensor]:
        """Return the persistent tensors that some device cannot read."""
        return frozenset[Tensor]().union(*(s.opaque() for s in self._sessions.values()))

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run the splits of `graph` in order; GraphError if unknown, BackendError if one fails."""
        shared = self._plan.graphs.get(graph)
        if shared is None:
            raise GraphError(f"{self._case.id}: compute takes the graphs of the opened case only")
        held = dict(inputs)
        found: dict[Tensor, Bytes] = {}
        for k, share in enumerate(shared.shares):
            for t in share.uses:
                self._bring(t, share.device)
            session = self._sessions[share.device]
            given = {} if self.passed is None else _shown(session, share.uses)
            fed = {leaf: held[root] if root in held else zeros(root) for leaf, root in share.part.inputs.items()}
            wanted = {share.made[t]: t for t in outputs if t in share.made}
            values = self._run(share, fed, tuple(dict.fromkeys((*wanted, *share.passed))))
            found.update((t, values[node]) for node, t in wanted.items())
            held.update((root, values[node]) for node, root in share.passed.items())
            for t in share.writes:
                self._fresh[t] = {share.device}
            if self.passed is not None:
                given |= {share.part.inputs[leaf]: fed[leaf] for leaf in _read(share)}
                left = {**_results(share, values), **_shown(session, share.writes)}
                self.passed.append(Passed(self._labels[share.device], k, given, left))
        self._last = shared
        self._count(shared)
        return {t: found[t] for t in outputs}

    def _run(self, share: Share, fed: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]) -> Mapping[Tensor, Bytes]:
        label = self._labels[share.device]
        start = time.perf_counter()
        values = self._sessions[share.device].compute(share.part.graph, fed, outputs)
        seconds = self._witness.seconds
        seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - start
        placed = self._witness.placed[label]
        for op, n in share.ops.items():
            placed[op] = placed.get(op, 0) + n
        self._splits[label] += 1
        return values

    def _bring(self, t: Tensor, device: int) -> None:
        """Copy `t` to `device` if its copy is not valid."""
        fresh = self._fresh[t]
        if device in fresh:
            return
        data = self._sessions[min(fresh)].read(t)
        self._sessions[device].write(t, data)
        fresh.add(device)
        self._carried += data.nbytes

    def _count(self, shared: Shared) -> None:
        w = self._witness
        splits = shared.assignment.splits
        w.splits += len(splits)
        w.copies += sum(len(s.inputs) for s in splits)
        w.bytes["copied"] = w.bytes.get("copied", 0) + sum(nbytes(t) for s in splits for t in s.inputs)

    def witness(self) -> Witness:
        """Return splits, copies and bytes like ggml's scheduler; nodes, splits and time per device."""
        w = self._witness
        nodes = {label: sum(ops.values()) for label, ops in w.placed.items()}
        w.nodes = sum(nodes.values())
        w.compiles = w.cache_hits = 0
        w.kernels, w.notes, w.libraries = {}, [], []
        spent = sum(w.seconds.values()) or 1.0
        for b, session in self._sessions.items():
            label, own = self._labels[b], session.witness()
            w.compiles += own.compiles
            w.cache_hits += own.cache_hits
            w.kernels.update({f"{label}: {name}": n for name, n in own.kernels.items()})
            w.bytes.update({f"{label}: {name}": n for name, n in own.bytes.items()})
            w.counters.update({f"{label}: {name}": n for name, n in own.counters.items()})
            share = w.seconds.get(label, 0.0) / spent
            w.notes.append(
                f"{label}: {nodes[label]} nodes in {self._splits[label]} splits, {100 * share:.0f} % of the time"
            )
            w.notes += [f"{label}: {note}" for note in own.notes]
            w.libraries += [f"{label}: {library}" for library in own.libraries]
        if self._last is not None:
            w.notes.append(f"nodes of the last graph: {summary(self._last, self._labels)}")
        if self._carried:
            w.notes.append(f"{self._carried} bytes of caches carried between devices")
        return w

    def close(self) -> None:
        self._stack.close()

    def _holders_of(self, tensor: Tensor) -> list[int]:
        try:
            return self._holders[tensor]
        except KeyError:
            raise GraphError(f"{self._case.id}: {tensor} is not a persistent tensor of the opened case") from None


def devices_of(spec: Spec) -> list[Spec]:
    """Return the devices of a scheduler, or the backend itself, each with all its options."""
    whole = resolve(spec)
    named = dict(whole.options).get("devices", "") if whole.name == NAME else ""
    return [resolve(s) for s in read_devices(named)] if named else [whole]


def _shown(session: Session, tensors: Iterable[Tensor]) -> dict[Tensor, Bytes]:
    hidden = session.opaque()
    return {t: session.read(t) for t in tensors if t not in hidden}


def _read(share: Share) -> list[Tensor]:
    """Return the leaves that a computing node reads, whose bytes matter."""
    read = {s.root for n in share.part.graph if computes(n) for s in n.src if s is not None}
    return [leaf for leaf in share.part.inputs if leaf in read]


def _results(share: Share, values: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
    """Return the bytes after the split, by root of the whole graph, as far as `values` has them."""
    last = {root: n for n in share.part.graph for root in written(n)}
    own = {n: values[copy] for n, copy in share.made.items() if last.get(copy) is copy and copy in values}
    return own | {root: values[node] for node, root in share.passed.items()}
