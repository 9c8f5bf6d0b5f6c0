"""The scheduler as a backend: `sched?devices=xdna2,cpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conformance.backend.interface import YES, Backend, BufferType, DeviceInfo, Support, no
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import UnavailableError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor

from .assign import DECLARED, labels, memory_of, read_devices
from .plan import Plan, ask, plan, refusal
from .session import SchedSession

NAME = "sched"
_KEPT = 8
"""Plans that are kept."""


class SchedBackend(Backend):
    """Several backends, in order of priority; the last takes what no other does.

    Args:
        devices: their specs, joined by commas: `xdna2:k=64+128,cpu`; see `devices.read_devices`.
        buffers: `declared` or `apart`; see `devices.memory_of`.

    Raises:
        UsageError: an option of another form.
    """

    def __init__(self, devices: str = "xdna2,cpu", buffers: str = DECLARED) -> None:
        self.specs = read_devices(devices)
        self.labels = labels(self.specs)
        self._how = buffers
        memory_of((), buffers)
        self.devices: list[Backend] = []
        self._plans: dict[Case, Plan] = {}

    def attach(self, opener: Callable[[Spec], Backend]) -> SchedBackend:
        """Open the devices; nothing runs before.

        Raises:
            UsageError: an unknown device or option.
            UnavailableError: this machine cannot have one of them.
        """
        try:
            for spec in self.specs:
                self.devices.append(opener(spec))
        except BaseException:
            self.close()
            raise
        self._memory = memory_of(self.devices, self._how)
        return self

    def info(self) -> DeviceInfo:
        """What executes: each device's own words."""
        infos = [d.info() for d in self.devices]
        described = "; ".join(f"{label}: {i.description}" for label, i in zip(self.labels, infos, strict=True))
        versions = {k: v for i in infos for k, v in i.versions.items()}
        return DeviceInfo(NAME, "+".join(i.device for i in infos), described, versions)

    def buffer_types(self) -> Sequence[BufferType]:
        """The default one of the device that takes what no other does."""
        return self.devices[-1].buffer_types()[:1]

    def arithmetic(self) -> Arithmetic:
        """That of the last device; each node's own is in `arithmetic_in`."""
        return self.devices[-1].arithmetic()

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """Each node as the device it runs on rounds."""
        return self.plan(case).arithmetic

    def supports_op(self, node: Tensor) -> Support:
        """Whether any device takes it, or every device's reason."""
        return self.supports(Graph([node]))[0]

    def supports(self, graph: Graph) -> list[Support]:
        """`supports_op` of every node, each device asked once."""
        answers = ask(self.devices, graph)
        return [
            YES if any(said) else no(refusal(node, self.labels, said))
            for node, *said in zip(graph, *answers, strict=True)
        ]

    def supports_case(self, case: Case) -> Support:
        """No where weights and caches live so that no device is left, or where a device refuses its share."""
        try:
            shared = self.plan(case)
        except UnavailableError as e:
            return no(str(e))
        for label, device, own in zip(self.labels, self.devices, shared.cases, strict=True):
            answer = YES if own is None else device.supports_case(own)
            if not answer:
                return no(f"{label}: {answer.reason}")
        return YES

    def open(self, case: Case) -> SchedSession:
        """A session on every device that has a part in the case.

        Raises:
            UnavailableError: no device is left for a node; names it, its shapes and every backend's reason.
        """
        return SchedSession(self.devices, self.labels, case, self.plan(case))

    def plan(self, case: Case) -> Plan:
        """How `case` is shared out.

        Raises:
            UnavailableError: as `open`.
        """
        if case not in self._plans:
            while len(self._plans) >= _KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[case] = plan(case, self.devices, self.labels, self._memory)
        return self._plans[case]

    def close(self) -> None:
        """Close the devices."""
        while self.devices:
            self.devices.pop().close()
