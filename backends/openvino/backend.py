"""`openvino-stateless`: one OpenVINO model per distinct cgraph, caches bound as its inputs and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from conformance.backend.interface import DeviceInfo, Witness
from conformance.backend.translating import Emitter, Plan, TranslatingBackend, TranslatingSession
from conformance.cgraph.case import Case
from conformance.cgraph.tensor import Tensor

from .compile import compiler
from .support import refusal

if TYPE_CHECKING:
    from .bind import HostMemory, Request


class OpenVinoStateless(TranslatingBackend):
    """cgraph to OpenVINO model, compiled once per distinct graph.

    Args:
        device: one of OpenVINO's devices on this machine.
        precision: `accuracy` (f32 throughout) or `default` (whatever the device likes best).
        fusion: `on`, `off`, or `auto`: the CPU plugin fuses elementwise kernels in models with weights in them, not in
            single ops, where fusing takes longer than everything else.
    """

    batch: ClassVar[int] = 100

    def __init__(self, device: str = "CPU", precision: str = "accuracy", fusion: str = "auto") -> None:
        super().__init__()
        self.device = device
        self._compiler = compiler(device, precision, fusion)

    def info(self) -> DeviceInfo:
        """Device name, OpenVINO's and the plugin's versions."""
        c = self._compiler
        return DeviceInfo("openvino-stateless", self.device, c.description(), c.versions())

    def emitters(self) -> Mapping[str, Emitter]:
        """The table of all topics."""
        from .emitters import EMITTERS  # noqa: PLC0415  # needs openvino, which may be absent until one is constructed

        return EMITTERS

    def refuses(self, node: Tensor) -> str:
        """What OpenVINO, or this translation, cannot express."""
        return refusal(node)

    def memory(self, case: Case) -> HostMemory:
        """Persistent tensors on the host."""
        from .bind import HostMemory  # noqa: PLC0415  # as above

        return HostMemory(case)

    def translate(self, plan: Plan, memory: HostMemory) -> Request:
        """Walk and emit, compile, make the request."""
        from .bind import Request  # noqa: PLC0415  # as above
        from .walk import Walk  # noqa: PLC0415  # as above

        emitted = Walk(plan, memory.read).run(self.emitters())
        if not emitted.results:
            return Request(None, emitted)
        served = "weight" in plan.roles.values()
        return Request(self._compiler.compiled(emitted.results, emitted.parameters, served=served), emitted)

    def open(self, case: Case) -> OpenVinoSession:
        """A session whose witness names what OpenVINO executed."""
        return OpenVinoSession(self, case)


class OpenVinoSession(TranslatingSession):
    """Adds to the engine's counts what OpenVINO tells of its programs."""

    def witness(self) -> Witness:
        """Execution devices and layer types of every program that ran here."""
        from .bind import layers  # noqa: PLC0415  # as above

        w = super().witness()
        kernels: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        devices: list[str] = []
        for p in self.programs():
            compiled = p.compiled  # type: ignore[attr-defined]  # programs of this backend are Requests
            notes.update(p.notes)  # type: ignore[attr-defined]  # as above
            if compiled is not None:
                kernels.update(layers(compiled))
                devices += compiled.get_property("EXECUTION_DEVICES")
        w.device = ", ".join(sorted(set(devices))) or w.device
        w.kernels = dict(sorted(kernels.items()))
        w.notes = [f"{n} {what}" for what, n in sorted(notes.items())]
        return w
