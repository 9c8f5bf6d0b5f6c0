"""`openvino-stateless`: one OpenVINO model per distinct cgraph, caches bound as its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from conformance.backend.interface import BufferType, DeviceInfo, Support, Witness, no
from conformance.backend.measure import Peak
from conformance.backend.translating.dynamic import TracedPlan
from conformance.backend.translating.engine import TranslatingBackend, TranslatingSession
from conformance.backend.translating.plan import Emitter, Plan, Role
from conformance.case.case import Case, writes_in_place
from conformance.ggml.arithmetic import Arithmetic, requantising
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.quants.requant import mode_named, weight_form
from conformance.ggml.tensor import Tensor

from .cache import ModelCache
from .compile import compiler
from .support import overwritten, refusal

if TYPE_CHECKING:
    from .bind import HostMemory, Request
    from .weights import Stored


ATTENTION = ("manual", "sdpa", "sdpa5d")
SHARED = "shared"
MEMORIES = ("constant", SHARED)
"""Kinds of memory for weights, the default first; caches are the modes' own (bound, or variables)."""


def _reads(src: Tensor | None, root: Tensor) -> bool:
    return src is not None and src.root is root


class OpenVinoStateless(TranslatingBackend):
    """cgraph to OpenVINO model, compiled once per distinct graph.

    Args:
        device: one of OpenVINO's devices on this machine.
        precision: `accuracy` (f32 throughout) or `default` (whatever the device likes best).
        fusion: `on`, `off`, or `auto`: the CPU plugin fuses elementwise kernels in models with weights in them, not in
            single ops, where fusing takes longer than everything else.
        dynamic: `on`, or `off`: one model per distinct graph, even where graphs differ in sizes and offsets only.
        stage: `run`, or `translate`, which runs the translated model by `Model.evaluate` and compiles nothing.
        attention: how FLASH_ATTN_EXT is expressed: `manual` (products and a softmax; K and V stay at their own heads),
            `sdpa` (the operator, K and V repeated to all heads) or `sdpa5d` (the operator, nothing repeated).
        cache_dir: where compiled models are kept for other processes; empty for nowhere.
        requant: how quantised weights are stored: `none` (exactly), `channel8` or `npu` (`quants.requant`).
    """

    batch: ClassVar[int] = 100
    stages: ClassVar[tuple[str, ...]] = ("translate", "run")
    places: ClassVar[frozenset[str] | None] = frozenset({"cache_dir"})

    def __init__(
        self,
        device: str = "CPU",
        precision: str = "accuracy",
        fusion: str = "auto",
        dynamic: str = "on",
        stage: str = "run",
        requant: str = "none",
        attention: str = "manual",
        cache_dir: str = "",
    ) -> None:
        super().__init__()
        self._arithmetic = requantising(requant)
        self.requant = mode_named(requant)
        if stage not in self.stages:
            raise UsageError(f"stage: one of {', '.join(self.stages)} expected, {stage!r} given")
        self.stage = stage
        if dynamic not in {"on", "off"}:
            raise UsageError(f"dynamic: one of on, off expected, {dynamic!r} given")
        self.lifts = dynamic == "on"
        if attention not in ATTENTION:
            raise UsageError(f"attention: one of {', '.join(ATTENTION)} expected, {attention!r} given")
        self._attention = attention
        self._options = (device, precision, fusion, stage, requant, attention)
        self._cache = ModelCache(Path(cache_dir)) if cache_dir and stage == "run" else None
        self.device = device
        self._compiler = compiler(device, precision, fusion, stage)

    def info(self) -> DeviceInfo:
        """Device name, OpenVINO's and the plugin's versions."""
        c = self._compiler
        return DeviceInfo("openvino-stateless", self.device, c.description(), c.versions())

    def arithmetic(self) -> Arithmetic:
        """Exact, but for weights that `requant` stores in another form and what `precision=default` lets go."""
        products = self._compiler.products()
        if products == self._arithmetic.products:
            return self._arithmetic
        return replace(self._arithmetic, name=f"{self._arithmetic.name}-{products}", products=products)

    def bakes_weights(self, case: Case) -> bool:
        """Also where there are quantised weights: only a constant can be read compressed."""
        caches = set(case.caches())
        return super().bakes_weights(case) or any(t.type.is_quantized and t not in caches for t in case.persistent)

    def buffer_types(self) -> Sequence[BufferType]:
        """Where a weight can be: a constant of each model, or host memory that is bound to an input of it."""
        return [BufferType(name) for name in MEMORIES]

    def role_of(self, case: Case, weight: Tensor) -> Role:
        """As `Case.placement` says, if that can be; else whatever serves the case best."""
        place = case.placement.get(weight)
        if place is None or len(self.buffer_types()) == 1:
            return super().role_of(case, weight)
        shared = place.buffer % len(MEMORIES) and not weight.type.is_quantized
        return "input" if shared else "weight"

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """As `supports`; a quantised weight is no input, as only a constant is read compressed."""
        said = self.supports(graph)
        types = self.buffer_types()
        if types[buffer % len(types)].name != SHARED or not tensor.type.is_quantized:
            return said
        return [
            no(f"{n.op}: a weight of {tensor.type} can only be a constant")
            if any(_reads(s, tensor) for s in n.src)
            else a
            for n, a in zip(graph, said, strict=True)
        ]

    def emitters(self) -> Mapping[str, Emitter]:
        """The table of all topics."""
        from .emit.attention import FORMS  # noqa: PLC0415  # needs openvino, which may be absent until one is constructed
        from .emit.emitters import EMITTERS  # noqa: PLC0415  # as above

        return {**EMITTERS, "FLASH_ATTN_EXT": FORMS[self._attention]}

    def refuses(self, node: Tensor) -> str:
        """What OpenVINO, or this translation, cannot express."""
        return refusal(node)

    def supports(self, graph: Graph) -> list[Support]:
        """As `supports_op`, and no to what cannot be read any more once the graph has overwritten it."""
        caches = {n.root for n in graph if writes_in_place(n) and n.root.op == "NONE"}
        asked = zip(graph, overwritten(graph), strict=True)
        return [
            no(f"{n.op}: {found}") if (found := why or self._frozen(n, caches)) else self.supports_op(n)
            for n, why in asked
        ]

    def _frozen(self, node: Tensor, caches: AbstractSet[Tensor]) -> str:
        if weight_form(node, self.requant.weights, self.requant.rows) and node.src[0] in caches:
            return f"{node.src[0]} is written by the graph and read as a weight, which would be requantised each time"
        return ""

    def memory(self, case: Case) -> HostMemory:
        """Persistent tensors on the host."""
        from .bind import HostMemory  # noqa: PLC0415  # as above

        return HostMemory(case, self.requant)

    def translate(self, plan: Plan, memory: HostMemory) -> Request:
        """Walk and emit, compile, make the request."""
        from .bind import Request  # noqa: PLC0415  # as above
        from .walk import Walk  # noqa: PLC0415  # as above

        own = plan.own if isinstance(plan, TracedPlan) else plan.tensors

        def compressed(node: Tensor) -> Stored | None:
            assert node.src[0] is not None  # the walk found a weight there
            return memory.weights.get(node, own[plan.index[node.src[0]]], memory.look)

        emitted = Walk(plan, lambda t: memory.look(own[plan.index[t]]), compressed).run(self.emitters())
        if not emitted.results:
            return Request(None, emitted)
        plan.check_assumptions()
        served = "weight" in plan.roles.values()
        compiler = self._compiler
        with Peak() as peak:
            if self._cache is None:
                compiled = compiler.compiled(emitted.results, emitted.parameters, served=served)
            else:
                name = self._cache.name(plan, (self._options, served, sorted(compiler.versions().items())))
                compiled, note = self._cache.compiled(
                    compiler, name, lambda: compiler.compiled(emitted.results, emitted.parameters, served=served)
                )
                emitted.notes[note] += 1
        return Request(compiled, emitted, peak.bytes)

    def open(self, case: Case) -> OpenVinoSession:
        """A session whose witness names what OpenVINO executed."""
        return OpenVinoSession(self, case)


class OpenVinoSession(TranslatingSession):
    """Adds to the engine's counts what OpenVINO tells of its programs."""

    def __init__(self, backend: OpenVinoStateless, case: Case) -> None:
        super().__init__(backend, case)
        self._stage = backend.stage

    def witness(self) -> Witness:
        """Execution devices, layer types, views and bytes of every program that ran here."""
        from .proof import testify  # noqa: PLC0415  # as above

        w = super().witness()
        testify(w, self.programs(), self._stage)  # type: ignore[arg-type]  # programs of this backend are Requests
        w.state = "bound" if "cache" in self._roles.values() else ""
        w.bytes["weights"] = self._memory.weights.nbytes  # type: ignore[attr-defined]  # a HostMemory
        w.notes += [f"compiled one by one: {r}" for r in self._reasons]
        return w
