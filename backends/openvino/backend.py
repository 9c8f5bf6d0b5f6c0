"""`openvino-stateless`: one OpenVINO model per cgraph, with caches as inputs and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from backends.openvino.translating.engine import TranslatingBackend, TranslatingSession
from backends.openvino.translating.plan import Emitter, Plan, Role
from conformance.backend.interface import BufferType, DeviceInfo, Support, Witness, no
from conformance.backend.measure import Peak
from conformance.case.case import Case, writes_in_place
from conformance.case.demands import PROGRAMS
from conformance.ggml.arithmetic import Arithmetic, requantising
from conformance.ggml.graph import Graph
from conformance.ggml.quants.requant import mode_named, weight_form
from conformance.ggml.tensor import Tensor, computes, contiguous_nb
from conformance.ggml.types import BF16, F16, F32, I32

from .compile import CompiledModel, ModelCache, compiler, executed, one_of
from .storage import BLOCKS

if TYPE_CHECKING:
    from .bind import HostMemory, Request
    from .emitted import EmittedGraph


LAYERED = ("fuses", "layers")
"""Properties that the layers of the CPU plugin show."""
ATTENTION = ("manual", "sdpa", "sdpa5d")
SHARED = "shared"
MEMORIES = ("constant", SHARED)
"""Kinds of memory for weights, default first; caches depend on the mode."""


class OpenVinoStateless(TranslatingBackend):
    """cgraphs as OpenVINO models, compiled once per distinct graph.

    Args:
        device: one of OpenVINO's devices on this machine.
        precision: `accuracy` (f32 throughout) or `default` (the device's preference).
        fusion: `on`, `off`, or `auto`: the CPU plugin fuses elementwise kernels in models with weights, not in
            single ops, where fusing takes longer than everything else.
        dynamic: `on`, or `off`: one model per distinct graph, even if graphs differ in sizes and offsets only.
        stage: `run`, or `translate`, which runs the translated model with `Model.evaluate` and compiles nothing.
        attention: translation of FLASH_ATTN_EXT: `manual` (products and a softmax; K and V with their own heads),
            `sdpa` (the operator, K and V repeated to all heads) or `sdpa5d` (the operator, nothing repeated).
        cache_dir: folder of compiled models for other processes; none if empty.
        threads: number of compute threads; the device's default if empty.
        requant: how quantised weights are stored: `none` (exactly), `channel8` or `npu` (`ggml.quants.requant`).
    """

    name: ClassVar[str] = "openvino-stateless"
    batch: ClassVar[int] = 100
    stages: ClassVar[tuple[str, ...]] = ("translate", "run")
    places: ClassVar[frozenset[str] | None] = frozenset({"cache_dir"})
    promises: tuple[str, ...] = ("appends", "packs", "layers")

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
        threads: str = "",
    ) -> None:
        super().__init__()
        self._arithmetic = requantising(requant)
        self.requant = mode_named(requant)
        self.stage = one_of("stage", stage, self.stages)
        self.lifts = one_of("dynamic", dynamic, ("on", "off")) == "on"
        if dynamic == "on":
            self.promises = (*self.promises, "lifts")
        if device != "CPU":  # other plugins name and fuse layers in their own way
            self.promises = tuple(p for p in self.promises if p not in LAYERED)
        self._attention = one_of("attention", attention, ATTENTION)
        self._options = (device, precision, fusion, stage, requant, attention, threads)
        self._cache = ModelCache(Path(cache_dir)) if cache_dir and stage == "run" else None
        self.device = device
        self._compiler = compiler(device, precision, fusion, stage, threads)
        self.threads = int(threads) if threads and device == "CPU" else None
        if self._cache is not None:  # a file contains one model
            self._compiler = replace(self._compiler, split=False)

    def info(self) -> DeviceInfo:
        """Return device name, OpenVINO's and the plugin's versions."""
        c = self._compiler
        return DeviceInfo(self.name, self.device, c.description(), c.versions())

    def arithmetic(self) -> Arithmetic:
        """Return EXACT, except for weights that `requant` converts and `precision=default`."""
        products = self._compiler.products()
        if products == self._arithmetic.products:
            return self._arithmetic
        return replace(self._arithmetic, name=f"{self._arithmetic.name}-{products}", products=products)

    # -- weights --------------------------------------------------------------------------------------------------

    def bakes_weights(self, case: Case) -> bool:
        """Return True also with quantised weights: only a constant can be read compressed."""
        caches = set(case.caches())
        return super().bakes_weights(case) or any(t.type.is_quantized and t not in caches for t in case.persistent)

    def buffer_types(self) -> Sequence[BufferType]:
        """Return weight memory types: a constant of each model, or host memory bound to an input."""
        return [BufferType(name) for name in MEMORIES]

    def role_of(self, case: Case, weight: Tensor) -> Role:
        """Return the role of `Case.placement` if possible; else the best one for the case."""
        place = case.placement.get(weight)
        if place is None or len(self.buffer_types()) == 1:
            if not _multiplies(case, weight):
                return super().role_of(case, weight)
            return "weight" if weight.type is F16 or self._compiler.knows_bf16() else "input"
        shared = place.buffer % len(MEMORIES) and not weight.type.is_quantized
        return "input" if shared else "weight"

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """Return `supports`, but refuse a quantised weight as input: only constants are compressed."""
        answers = self.supports(graph)
        types = self.buffer_types()
        if types[buffer % len(types)].name != SHARED or not tensor.type.is_quantized:
            return answers
        return [
            no(f"{n.op}: a weight of {tensor.type} can only be a constant")
            if any(s is not None and s.root is tensor for s in n.src)
            else a
            for n, a in zip(graph, answers, strict=True)
        ]

    # -- what can be translated -----------------------------------------------------------------------------------

    def emitters(self) -> Mapping[str, Emitter]:
        """Return the table of all topics."""
        from .emit import EMITTERS  # noqa: PLC0415  # needs openvino, which may be absent until a backend is constructed
        from .emit.attention import FORMS  # noqa: PLC0415  # as above

        return {**EMITTERS, "FLASH_ATTN_EXT": FORMS[self._attention]}

    def refuses(self, node: Tensor) -> str:
        """Return why OpenVINO or this translation cannot express `node`, by op, types and layout."""
        return _strides(node) or _stores(node) or _reads(node)

    def supports(self, graph: Graph) -> list[Support]:
        """Return `supports_op` per node; refuse reads of overwritten data that the host supplies."""
        caches = {n.root for n in graph if writes_in_place(n) and n.root.op == "NONE"}
        return [
            no(f"{n.op}: {reason}") if (reason := why or self._frozen(n, caches)) else self.supports_op(n)
            for n, why in zip(graph, _overwritten(graph), strict=True)
        ]

    def _frozen(self, node: Tensor, caches: AbstractSet[Tensor]) -> str:
        if weight_form(node, self.requant.weights, self.requant.rows) and node.src[0] in caches:
            return f"{node.src[0]} is written by the graph and read as a weight, which would be requantised each time"
        return ""

    # -- translating ----------------------------------------------------------------------------------------------

    def memory(self, case: Case) -> HostMemory:
        """Store persistent tensors on the host."""
        from .bind import HostMemory  # noqa: PLC0415  # as above

        return HostMemory(case, self.requant)

    def emit(self, plan: Plan, memory: HostMemory) -> EmittedGraph:
        """Emit a plan, with caches narrowed to the cells that are read."""
        from .emit_context import EmitContext  # noqa: PLC0415  # as above
        from .roots import Roots  # noqa: PLC0415  # as above

        return EmitContext(plan, Roots(plan, memory)).run(self.emitters())

    def compile(self, plan: Plan, emitted: EmittedGraph) -> Request:
        """Compile the model, and make its request."""
        from .bind import Request  # noqa: PLC0415  # as above

        request = Request(*self.compiled(plan, emitted))
        request.otherwise = self._whole
        return request

    def _whole(self, plan: Plan, memory: HostMemory) -> Request:
        """Translate without narrowing caches to the cells that are read."""
        from .emit_context import EmitContext  # noqa: PLC0415  # as above
        from .roots import Roots  # noqa: PLC0415  # as above

        return self.compile(plan, EmitContext(plan, Roots(plan, memory, whole=True)).run(self.emitters()))

    def compiled(self, plan: Plan, emitted: EmittedGraph) -> tuple[CompiledModel | None, EmittedGraph, int | None]:
        """Return the compiled model, None without results, with `emitted` and the peak of memory."""
        if not emitted.results and not emitted.sinks:
            return None, emitted, None
        with Peak() as peak:
            compiled = self._compiled(plan, emitted)
        return compiled, emitted, peak.bytes

    def _compiled(self, plan: Plan, emitted: EmittedGraph) -> CompiledModel:
        served = "weight" in plan.roles.values()
        nodes = emitted.results, emitted.parameters, emitted.sinks
        compile_ = partial(self._compiler.compiled, *nodes, served=served, halves=emitted.halves)
        if self._cache is None or emitted.sinks:
            return compile_()
        name = self._cache.name(plan, (self._options, served, sorted(self._compiler.versions().items())))
        compiled, note = self._cache.compiled(self._compiler, name, compile_)
        emitted.notes[note] += 1
        return compiled

    def open(self, case: Case) -> OpenVinoSession:
        """Open a session whose witness names what OpenVINO executed."""
        return OpenVinoSession(self, case)


class OpenVinoSession(TranslatingSession):
    """A session whose witness also has what OpenVINO reports about its programs."""

    def __init__(self, backend: OpenVinoStateless, case: Case) -> None:
        super().__init__(backend, case)
        self._stage = backend.stage

    def witness(self) -> Witness:
        """Return execution devices, layer types, views and bytes of every program that ran."""
        w = super().witness()
        _testify(w, self.programs(), self._stage)  # type: ignore[arg-type]  # programs of this backend are Requests
        w.cache_bytes = self._memory.moved  # type: ignore[attr-defined]  # a HostMemory
        w.state = "bound" if "cache" in self._roles.values() else ""
        w.bytes["weights"] = self._memory.weights.nbytes  # type: ignore[attr-defined]  # a HostMemory
        w.notes += [f"compiled one by one: {r}" for r in self._reasons]
        return w


CONSTANTS = frozenset({"Const", "Constant"})
"""Layer types, or node types of an interpreted model, that are constants."""
VIEWS = "views "
"""First word of the context's notes on views; the last word names the method of access."""


def _testify(w: Witness, programs: Iterable[Request], stage: str) -> None:
    """Add to `w` devices, layer types, views, bytes of packed copies and of constants."""
    from .weights import packed_copies  # noqa: PLC0415  # as above

    kernels, notes, sizes = Counter[str](), Counter[str](), Counter[str]()
    devices: set[str] = set()
    peaks: list[int] = []
    w.counters[PROGRAMS] = 0
    for p in programs:
        notes.update(p.notes)
        if p.compiled is None:
            continue
        devices.update(p.compiled.get_property("EXECUTION_DEVICES"))
        peaks += [] if p.peak is None else [p.peak]
        layers = list(executed(p.compiled))
        w.counters[PROGRAMS] += 1
        sizes["packed copies"] += packed_copies(layers)
        for kind, node in layers:
            kernels[kind] += 1
            if kind in CONSTANTS:
                x = node.output(0)
                sizes["constants"] += (prod(x.get_shape()) * x.get_element_type().bitwidth + 7) // 8
    views = Counter[str]()
    for what, n in notes.items():
        if what.startswith(VIEWS):
            views[what.rpartition(" ")[2]] += n
    w.device = ", ".join(sorted(devices)) or w.device
    w.kernels, w.views = dict(sorted(kernels.items())), dict(sorted(views.items()))
    w.bytes = {**w.bytes, **dict(sorted(sizes.items()))}
    w.notes = [f"{n} {what}" for what, n in sorted(notes.items())]
    w.peak_compile_bytes = max(peaks, default=None)
    if stage != "run":
        w.stage, w.path, w.compiles, w.cache_hits, w.peak_compile_bytes = stage, "interpreted", 0, 0, None


def _multiplies(case: Case, weight: Tensor) -> bool:
    """Return True for a 16-bit float matrix in a product: an input would be widened each step."""
    return (
        weight.type in (F16, BF16)
        and weight.ne[2] * weight.ne[3] == 1
        and any(n.op == "MUL_MAT" and n.src[0] is weight for step in case.steps for n in step.graph)
    )


# -- what is refused ---------------------------------------------------------------------------------------------------
MOVES = frozenset({"CPY", "CONT", "DUP", "CONCAT", "REPEAT"})
STORED = frozenset({F32, F16, BF16, I32, *BLOCKS})
"""Types to which the translation can round values."""


def _strides(node: Tensor) -> str:
    if node.view_src is None and node.nb != contiguous_nb(node.type, node.ne):
        return f"its result has strides {node.nb}, those of a contiguous one expected"
    for t in (node, *node.src):
        if t is None:
            continue
        size = t.type.type_size
        if any(x % size for x in (*t.nb[1:], t.view_offs)) or (t.type.blck_size == 1 and t.nb[0] % size):
            return f"strides {t.nb} at offset {t.view_offs} of {t} are not multiples of its type's {size} bytes"
    return ""


def _stores(node: Tensor) -> str:
    """Return why OpenVINO arithmetic cannot round values to the node's type, or ""."""
    a = node.src[0] if node.src else None
    if node.type in STORED or (node.op in MOVES and a is not None and a.type is node.type):
        return ""
    return f"values cannot be stored in {node.type}: its quantiser searches for scales, which this translation does not"


def _reads(node: Tensor) -> str:
    """Return why a node cannot read host-only types that the graph itself wrote, or ""."""
    return next((_unread(s) for s in _host_only(node) if s.root.op != "NONE"), "")


def _overwritten(graph: Graph) -> Iterator[str]:
    """Yield, per node, why it cannot read data that an earlier node wrote into a leaf, or ""."""
    written: set[Tensor] = set()
    for node in graph:
        yield next((_unread(s) for s in _host_only(node) if s.root in written), "") if computes(node) else ""
        if writes_in_place(node) and computes(node) and node.root.op == "NONE":
            written.add(node.root)


def _host_only(node: Tensor) -> Iterator[Tensor]:
    """Yield the sources whose numbers only the host can supply."""
    for s in node.src:
        if s is not None and s.type not in STORED and not (node.op in MOVES and s.type is node.type):
            yield s


def _unread(s: Tensor) -> str:
    return f"reads values of {s.type} that {s.root} of the same graph wrote; only leaves of that type can be read"
