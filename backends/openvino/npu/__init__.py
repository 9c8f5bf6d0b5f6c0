"""`npu`: static models: prompts in chunks, one decode model, all cells of the cache.

It runs on an NPU if OpenVINO finds one, otherwise through the NPU plugin's own wrapper on the CPU. With `path=llm`
OpenVINO itself makes a decoder static (`npu/llm.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from backends.openvino.axes import FixedError
from backends.openvino.backend import OpenVinoSession, OpenVinoStateless
from backends.openvino.translating.engine import TranslatingSession
from backends.openvino.translating.plan import Emitter
from conformance.backend.interface import YES, DeviceInfo, Support, Witness, no
from conformance.case.case import Case, writes_in_place
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.quants import to_float
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, computes, strided

from .axes import Spans, follow
from .chunks import Sized, chunks, collect, feeds, fingerprint, indexed, sized
from .compile import npu_compiler

MAX_BATCH = 512
"""Maximum tokens of one graph, as in the real backend (`llama-perplexity -b 512`)."""
MAX_CHUNK = 4096
PATHS = ("static", "llm")


class OpenVinoNpu(OpenVinoStateless):
    """cgraphs as static OpenVINO models.

    Args:
        chunk: tokens of the model for prompts.
        requant: how quantised weights are stored: `npu` as the real backend does, or another mode.
        stage: `run`, or `translate`, which runs the translated model with `Model.evaluate` and compiles nothing.
        path: `static`, or `llm`: decoders with token ids as input, by OpenVINO's `NPUW_LLM`.
    """

    name = "npu"
    promises: tuple[str, ...] = ("static",)

    def __init__(self, chunk: str = "256", requant: str = "npu", stage: str = "run", path: str = "static") -> None:
        self._npu = npu_compiler()
        super().__init__(requant=requant, dynamic="off", stage=stage)
        if not (chunk.isascii() and chunk.isdigit() and 1 < int(chunk) <= MAX_CHUNK):
            raise UsageError(f"chunk: a number of tokens from 2 to {MAX_CHUNK} expected, {chunk!r} given")
        self.chunk = int(chunk)
        if path not in PATHS or (path == "llm" and stage != "run"):
            raise UsageError(f"path: one of {', '.join(PATHS)} expected, llm with stage=run only; {path!r} given")
        self.path = path
        if path == "llm":
            self.batch, self.stages, self.promises = 1, ("run",), ()  # type: ignore[misc]  # a case is a decoder of its own
        if stage == "run":
            self.device = self._npu.label()
            self._compiler = self._npu

    def info(self) -> DeviceInfo:
        """Return the device that really executes, OpenVINO's and the plugin's versions."""
        return DeviceInfo(self.name, self.device, self._npu.description(), self._npu.versions())

    def supports(self, graph: Graph) -> list[Support]:
        """Return the base's answers, but refuse caches of several sequences and large batches."""
        caches = {n.root for n in graph if writes_in_place(n) and n.root.op == "NONE"}
        beyond = (_beyond(node, caches) for node in graph)
        rows = zip(graph, beyond, super().supports(graph), strict=True)
        return [no(f"{n.op}: {why}") if why else answer for n, why, answer in rows]

    def supports_case(self, case: Case) -> Support:
        """With `path=llm`, accept only decoders that take token ids and follow one sequence."""
        if self.path != "llm":
            return YES
        from .llm import fits  # noqa: PLC0415  # needs openvino, which may be absent until one is constructed

        return fits(case)

    def emitters(self) -> Mapping[str, Emitter]:
        """Return the base's emitters, with those for static sizes."""
        from backends.openvino.emit.rope import STATIC  # noqa: PLC0415  # as above

        return {**super().emitters(), **STATIC}

    def open(self, case: Case) -> OpenVinoSession:
        """Open a session that computes at the compiled sizes."""
        if self.path != "llm":
            return NpuSession(self, case)
        from .llm import LlmSession  # noqa: PLC0415  # as above

        return LlmSession(self, self._npu, case)


def _beyond(node: Tensor, caches: AbstractSet[Tensor]) -> str:
    """Return why the device does not support an attention of this size; empty if it does."""
    attends = {"FLASH_ATTN_EXT": (1, 0), "MUL_MAT": (0, 1)}.get(node.op)
    if attends is None:
        return ""
    read, queries = (node.src[i] for i in attends)
    cache = _cache_of(read, caches)
    if cache is None or queries is None:
        return ""
    streams = cache.ne[2] * cache.ne[3]
    if streams > 1:
        return f"a cache of {streams} streams, one for each sequence; the NPU takes a single one"
    if queries.ne[1] > MAX_BATCH:
        return f"{queries.ne[1]} tokens in one graph; the NPU takes {MAX_BATCH} at most"
    return ""


def _cache_of(t: Tensor | None, caches: AbstractSet[Tensor]) -> Tensor | None:
    """Return the cache of which `t` is a window, or a converted or permuted copy; or None."""
    while t is not None and t.root not in caches:
        t = t.src[0] if t.src and t.op in {*VIEW_OPS, "CPY", "CONT"} else None
    return None if t is None or t.op in {"NONE", "RESHAPE"} else t.root


class NpuSession(OpenVinoSession):
    """Computes each graph at its compiled size, in as many runs as its tokens need."""

    def __init__(self, backend: OpenVinoNpu, case: Case) -> None:
        super().__init__(backend, case)
        self._npu = backend
        self._caches = set(case.caches())
        self._endless = _endless({t: case.persistent[t] for t in self._caches})
        self._whole: Counter[str] = Counter()
        self._sized: dict[Hashable, Sized] = {}

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph` in chunks, or at its own size if required; BackendError for a bad cell."""
        _check_cells(graph, inputs)
        try:
            return self._compute_sized(graph, inputs, outputs)
        except FixedError as e:
            self._whole[str(e)] += 1
        return super().compute(graph, inputs, outputs)

    def _compute_sized(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> dict[Tensor, Bytes]:
        stored, rows = indexed(graph, self._persistent)
        spans = follow(stored, self._persistent, self._npu.chunk)
        if any(t not in spans.axes for t in outputs):
            raise FixedError("an output is a window of a cache right after its write")
        if self._endless:
            raise FixedError("a cache holds NaN or infinity, which no mask hides")
        values = {**inputs, **rows}
        runs = chunks(spans, values)
        kinds = ({x.span.kind for x in spans.axes[t] if x is not None} for t in outputs)
        if len(runs) > 1 and any({"tokens", "cells"} <= k for k in kinds):
            raise FixedError("an output is the scores before the mask, which read cells that later chunks fill")
        small = self._at_size(stored, spans)
        twins = [small.twin[t] for t in outputs]
        results = [super(NpuSession, self).compute(small.graph, x, twins) for x in feeds(small, spans, values, runs)]
        return {t: collect(t, small.twin[t], spans.axes[t], [f[small.twin[t]] for f in results], runs) for t in outputs}

    def _at_size(self, graph: Graph, spans: Spans) -> Sized:
        key = fingerprint(spans, self._persistent)
        small = self._sized.get(key)
        if small is not None:
            return Sized(small.graph, dict(zip(spans.axes, small.twin.values(), strict=True)))
        if len(self._sized) == self._npu.capacity:
            del self._sized[next(iter(self._sized))]
        return self._sized.setdefault(key, sized(graph, spans))

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor."""
        super().write(tensor, data)
        if tensor in self._caches:
            self._endless = (self._endless - {tensor}) | _endless({tensor: data})

    def witness(self) -> Witness:
        """Return the witness; the wrapper reports no layers, and calls itself NPU on any device."""
        w = TranslatingSession.witness(self) if self._stage == "run" else super().witness()
        w.notes = self._own_notes() if self._stage == "run" else w.notes
        w.notes += [f"{n} graphs at their own size: {why}" for why, n in sorted(self._whole.items())]
        return w

    def _own_notes(self) -> list[str]:
        notes: Counter[str] = Counter()
        devices: set[str] = set()
        for p in self.programs():
            notes.update(p.notes)  # type: ignore[attr-defined]  # programs of this backend are Requests
            if p.compiled is not None:  # type: ignore[attr-defined]  # as above
                devices.add(str(p.compiled.get_property("EXECUTION_DEVICES")))  # type: ignore[attr-defined]  # as above
        words = [f"EXECUTION_DEVICES says {', '.join(sorted(devices))}"] if devices else []
        return words + [f"{n} {what}" for what, n in sorted(notes.items())]


def _endless(held: Mapping[Tensor, Bytes]) -> set[Tensor]:
    """Return tensors with an element that is NaN or infinite."""
    return {t for t, data in held.items() if data.any() and not np.isfinite(to_float(t.type, strided(data, t))).all()}


def _check_cells(graph: Graph, inputs: Mapping[Tensor, Bytes]) -> None:
    """Raise BackendError for an index of SET_ROWS beyond its tensor."""
    for node in graph:
        ids = node.src[1] if node.op == "SET_ROWS" and computes(node) else None
        if ids is None or ids not in inputs:
            continue
        x = strided(inputs[ids], ids)
        if x.size and not (x.min() >= 0 and x.max() < node.ne[1]):
            raise BackendError(
                f"{node}: cells {x.min()} to {x.max()} of {node.ne[1]}: the context is over its capacity"
            )
