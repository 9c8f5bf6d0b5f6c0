"""`npu?path=llm`: a decoder on token ids, which OpenVINO itself makes static (`NPUW_LLM`).

The input is one stateful model of any size: the fused form of `openvino-stateful` with token ids, an attention mask,
positions and beams as inputs, and logits as output. OpenVINO finds them and the caches by the names of Hugging Face
models. OpenVINO runs prompts with one model, and up to 8 tokens at a time with another. The caches cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Model, Node, PartialShape, Type

from backends.openvino.backend import OpenVinoSession, OpenVinoStateless
from backends.openvino.bind import HostMemory
from backends.openvino.compile import words
from backends.openvino.nodes import Constants, Shape, Value
from backends.openvino.state.append_log import caches_of, roles_in
from backends.openvino.state.variables import StateContext, StateRoots
from backends.openvino.translating.plan import Plan, Role
from backends.openvino.translating.template import Const, Expr, Symbol, assumptions, expr_of, template_of
from conformance.backend.interface import YES, Support, Witness, no
from conformance.backend.measure import Peak
from conformance.backend.snapshot import Snapshot
from conformance.case.case import Case
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, computes

from .compile import DEVICE, WRAPPER, NpuCompiler
from .decoder import Decoder, Form, Run, UnfitError, decoder, follow_step

AT_ONCE = 8
"""Maximum tokens of one run after the prompt: OpenVINO rounds up to 8.

OpenVINO returns logits for as many tokens, also at the end of a prompt."""
GRAIN = 64
"""OpenVINO rounds the sizes of prompts and answers up to a multiple of this."""
SAMPLES = (AT_ONCE, AT_ONCE + 3)
"""Numbers of tokens from which the model is lifted."""
LLM = {"NPU_USE_NPUW": "YES", "NPUW_LLM": "YES", "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": str(AT_ONCE)}
ON_CPU = {**WRAPPER, "NPUW_FOLD": "NO", "KV_CACHE_PRECISION": "f32"}
"""Options without an NPU.

With functions folded (2026.4.1) an F32 model has NMSE 5e-8 instead of 2e-14. Caches are float16 by default; new rows
already have the cache's type."""
LOWEST = -65504.0
"""Mask value that hides a cell: the lowest number of float16, in which an NPU computes."""


# -- a case as one sequence -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Course:
    """A case that is one sequence of tokens, computed by one decoder."""

    decoders: Mapping[Graph, Decoder]
    """Decoder of each step's graph."""
    samples: tuple[Form, Form]
    prompt: int
    """Tokens of the longest prompt."""
    past: int
    """Maximum tokens of the sequence."""
    keys: Mapping[int, Hashable]
    """Keys of the forms with one token and with `AT_ONCE`."""

    def admit(self, d: Decoder) -> None:
        """Raise UnfitError if `d` is not the decoder of this course."""
        n = 1 if d.n_tokens == 1 else AT_ONCE
        if d.at(n).key != self.keys[n]:
            raise UnfitError("steps differ in more than the number of tokens")


def course(case: Case) -> Course:
    """Return the course of a case; UnfitError, which names the step, if it has none."""
    roles, cells = _persistent(case), np.empty(0, np.int64)
    decoders: dict[Graph, Decoder] = {}
    runs: list[Run] = []
    for k, step in enumerate(case.steps):
        try:
            if step.graph not in decoders:
                decoders[step.graph] = decoder(step.graph, roles, tuple(step.outputs), step.inputs.keys())
            runs.append(follow_step(decoders[step.graph], step.inputs, cells))
            cells = runs[-1].cells
        except UnfitError as e:
            raise UnfitError(f"step {k}: {e}") from e
    base = next((d for d in decoders.values() if d.n_tokens > 1), None)
    if base is None:
        raise UnfitError("no step has more than one token, so the token axis is unknown")
    first, second = (base.at(n) for n in SAMPLES)
    prompt, past = max(len(r.tokens) for r in runs if r.first == 0), max(r.past for r in runs)
    found = Course(decoders, (first, second), prompt, past, {1: base.at(1).key, AT_ONCE: first.key})
    for d in decoders.values():
        found.admit(d)
    return found


def _persistent(case: Case) -> dict[Tensor, Role]:
    caches = set(case.caches())
    return {t: "cache" if t in caches else "weight" for t in case.persistent}


def fits(case: Case) -> Support:
    """Return support for a case by `NPUW_LLM`, or the reason against it."""
    try:
        course(case)
    except UnfitError as e:
        return no(f"path=llm: {e}")
    return YES


# -- the session ------------------------------------------------------------------------------------------------------
class LlmSession(OpenVinoSession):
    """A case on one `Machine`, which is created at the first step."""

    def __init__(self, backend: OpenVinoStateless, npu: NpuCompiler, case: Case) -> None:
        super().__init__(backend, case)
        try:
            self._course = course(case)
        except UnfitError as e:
            raise BackendError(f"{case.id}: path=llm: {e}", words=f"path=llm: {e}") from e
        self._emitters = backend.emitters()
        self._npu = npu
        self._own = _persistent(case)
        self._known = {
            s.graph: (tuple(s.outputs), Snapshot(s.graph), self._course.decoders[s.graph]) for s in case.steps
        }
        self._cells = np.empty(0, np.int64)
        self._machine: Machine | None = None

    def opaque(self) -> frozenset[Tensor]:
        """Return the caches: OpenVINO's `query_state` shows only how many tokens are stored."""
        return frozenset(t for t, r in self._own.items() if r == "cache")

    def read(self, tensor: Tensor) -> Bytes:
        """Return the bytes of a weight; BackendError for a cache."""
        if tensor in self.opaque():
            raise BackendError(f"{tensor}: a cache, which NPUW_LLM does not expose")
        return super().read(tensor)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a weight; BackendError after the first step, and for a cache."""
        if tensor in self.opaque() or self._machine is not None:
            raise BackendError(f"{tensor}: NPUW_LLM takes weights only with its model, and cannot set caches")
        super().write(tensor, data)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Continue or rewind the sequence; BackendError for a step of another case or a failure."""
        run = follow_step(self._decoder(graph, tuple(outputs), inputs.keys()), inputs, self._cells)
        self._cells = run.cells
        w, known = self._witness, self._machine is not None
        w.path = "cached" if known else "translated"
        w.compiles += not known
        w.cache_hits += known
        self._machine = self._machine or self._compiled()
        logits = self._machine.step(run)
        w.nodes += sum(computes(n) for n in graph)
        return {t: logits.reshape(-1).view(np.uint8) for t in outputs}

    def _decoder(self, graph: Graph, outputs: tuple[Tensor, ...], inputs: AbstractSet[Tensor]) -> Decoder:
        """Return the decoder of `graph`, analysed again if its memory was reused for another."""
        known = self._known.get(graph)
        if known is not None and known[0] == outputs and known[1].shows(graph):
            return known[2]
        d = decoder(graph, self._own, outputs, inputs)
        self._course.admit(d)
        self._known[graph] = outputs, Snapshot(graph), d
        return d

    def _compiled(self) -> Machine:
        prompt, total = sizes_for(self._course.prompt, self._course.past)
        with Peak() as peak:
            machine = Machine(self._npu, self._model(*self._course.samples, (AT_ONCE, prompt)), prompt, total)
        self._witness.peak_compile_bytes = peak.bytes
        return machine

    def _model(self, first: Form, second: Form, sizes: tuple[int, ...]) -> Model:
        """Return the decoder as one stateful model; BackendError if it does not apply to `sizes`."""
        tensors = first.graph.tensors()
        roles = roles_in(first.graph, self._own)
        index = {t: i for i, t in enumerate(tensors)}
        plan = Plan(first.graph, tensors, index, roles, (first.logits,), first.key)
        template = template_of([first.graph, second.graph], [t for t, r in roles.items() if r == "input"])
        if len(template.symbols) != 1:
            symbols = ", ".join(template.symbols) or "none"
            raise BackendError(f"one symbol expected, the number of tokens; {symbols} found")
        symbolic = template.symbolic(plan)
        with assumptions() as made:
            leaves = [symbolic.tensors[index[t]] for t in (first.tokens, first.positions)]
            roots = LlmRoots(symbolic, leaves, self._memory)  # type: ignore[arg-type]  # a HostMemory
            context = LlmContext(symbolic, roots)
            context.run(self._emitters)
            model = context.decoder(symbolic.outputs[0])
        template = template.guarded(made)
        for n in sizes:
            broken = template.broken((n,))
            if broken is not None:
                raise BackendError(f"{n} tokens: the model is valid only while {broken}")
        return model

    def witness(self) -> Witness:
        """Return the witness; the wrapper reports no layers."""
        w, m = self._witness, self._machine
        w.state, w.notes = "NPUW_LLM", ["caches cannot be read"]
        if m is not None:
            w.notes += [
                f"EXECUTION_DEVICES says {m.compiled.get_property('EXECUTION_DEVICES')}",
                f"{m.runs} runs of models for {m.prompt} tokens of a prompt and {AT_ONCE} after it, {m.total} in all",
            ]
        return w

    def close(self) -> None:
        """Release the model."""
        self._machine = None
        super().close()


# -- the model --------------------------------------------------------------------------------------------------------
def sizes_for(prompt: int, past: int) -> tuple[int, int]:
    """Return tokens of the prompt model and cells in all, for the longest prompt and sequence."""
    own = _up(max(prompt, AT_ONCE + 1))
    return own, own + _up(max(past + 2 * AT_ONCE - own, 1))


def _up(n: int) -> int:
    return -(-n // GRAIN) * GRAIN


OPS: dict[str, Callable[[Value, Value], Node]] = {
    "+": o.add, "-": o.subtract, "*": o.multiply, "//": o.divide, "%": o.floor_mod,
}  # fmt: skip


class TokenConstants(Constants):
    """Constants whose symbol, the number of tokens, is computed from the token ids' shape."""

    def __init__(self, tokens: Node) -> None:
        super().__init__()
        self._tokens = tokens
        self._nodes: dict[Expr, Node] = {}

    def symbol(self, n: int) -> Node:
        """Return the expression of `n`, of shape [1]."""
        return self._node(expr_of(n))

    def _node(self, e: Expr) -> Node:
        if isinstance(e, Const):
            return self.i64(e.n)
        if isinstance(e, Symbol):
            return self._tokens
        if e not in self._nodes:
            self._nodes[e] = OPS[e.op](self._node(e.left), self._node(e.right))
        return self._nodes[e]


def _input(name: str, type_: Type, rank: int) -> Node:
    node = o.parameter(PartialShape([-1] * rank), type_)
    node.output(0).set_names({name})
    node.set_friendly_name(name)
    return node


class LlmRoots(StateRoots):
    """Roots of a decoder: token ids and positions are inputs with OpenVINO's names."""

    def __init__(self, plan: Plan, leaves: Sequence[Tensor], memory: HostMemory) -> None:
        self.ids, self.positions = _input("input_ids", Type.i64, 2), _input("position_ids", Type.i64, 2)
        self.tokens = o.gather(o.shape_of(self.ids), o.constant([1], Type.i64), o.constant(0, Type.i64))
        """Number of tokens, of shape [1]."""
        super().__init__(plan, memory, constants=TokenConstants(self.tokens))
        self._ports = dict(zip(leaves, (self.ids, self.positions), strict=True))

    def parameter(self, t: Tensor, form: str, dtype: str, shape: Shape) -> Value:
        """Return a part of a leaf; token ids and positions in the shape of the cgraph's."""
        if t not in self._ports:
            return super().parameter(t, form, dtype, shape)
        flat = o.reshape(o.convert(self._ports[t], Type.i32), self.c.i64(*[1] * (len(shape) - 1), -1), False)
        return self.c.shaped(flat, shape)


class LlmContext(StateContext):
    """Context of a decoder in its `Form`, traced over one symbol: the number of tokens."""

    def __init__(self, plan: Plan, roots: LlmRoots) -> None:
        super().__init__(plan, roots)
        self._mask_in, self._beams = _input("attention_mask", Type.i64, 2), [_input("beam_idx", Type.i32, 1)]
        self._inputs = [roots.ids, self._mask_in, roots.positions, *self._beams]
        self._named: dict[Tensor, str] = {}
        for layer, node in enumerate(self._logs[0].attentions):
            for cache, kind in zip(caches_of(node), ("key", "value"), strict=True):
                if self._named.setdefault(cache, f"{layer}.{kind}") != f"{layer}.{kind}":
                    raise BackendError(f"cache {cache}: one attention layer that reads it expected, two found")
        self._laid[0] = self._causal(roots.tokens)

    def _causal(self, tokens: Node) -> Value:
        """Return a causal mask over existing tokens: float32 (1, 1, tokens, past + tokens).

        OpenVINO's static models have the tokens at the end of the keys, and mark the existing ones in the attention
        mask.
        """
        c = self.c
        total = o.squeeze(o.gather(o.shape_of(self._mask_in), c.i64(1), c.axis(0)), c.axis(0))
        first = o.subtract(total, o.squeeze(tokens, c.axis(0)))
        keys = o.unsqueeze(o.range(c.axis(0), total, c.axis(1), Type.i64), c.axis(0))
        queries = o.unsqueeze(o.range(first, total, c.axis(1), Type.i64), c.axis(1))
        there = o.unsqueeze(o.convert(self._mask_in, Type.boolean), c.i64(1, 2))
        seen = o.logical_and(o.unsqueeze(o.less_equal(keys, queries), c.i64(0, 1)), there)
        return o.select(seen, c.f32(0.0), c.f32(LOWEST))

    def _log_name(self, cache: Tensor) -> str:
        return f"past_key_values.{self._named[cache]}present.{self._named[cache]}"

    def decoder(self, logits: Tensor) -> Model:
        """Return the emitted model with `logits`, (batch, tokens, vocabulary), as its only result.

        OpenVINO cuts the model before the last product and makes a separate model of it. BackendError if there is none.
        """
        value = self.number(logits)
        node = value if isinstance(value, Node) else value.get_node()
        while node.get_type_name() == "Reshape":
            node = node.input_value(0).get_node()
        if node.get_type_name() != "MatMul":
            raise BackendError(f"logits {logits}: a MatMul as their last node expected, a {node.get_type_name()} found")
        x, weight = node.input_value(0), node.input_value(1)
        width = logits.src[1]
        assert width is not None  # of the product
        rows = o.reshape(x, self.c.i64(1, -1, int(width.ne[0])), False)
        result = o.result(o.matmul(rows, weight, False, True))
        result.output(0).set_names({"logits"})
        return Model(results=[result], sinks=self._out.sinks, parameters=self._inputs, name="decoder")


# -- the model, compiled ----------------------------------------------------------------------------------------------
class Machine:
    """A model that OpenVINO has split and compiled, with one request.

    It supports prompts of up to `prompt` tokens, and `total` cells after them. BackendError if OpenVINO refuses the
    model.
    """

    def __init__(self, npu: NpuCompiler, model: Any, prompt: int, total: int) -> None:  # noqa: ANN401  # an openvino.Model
        config = {
            **LLM,
            **({} if npu.real else ON_CPU),
            "NPUW_LLM_MAX_PROMPT_LEN": str(prompt),
            "NPUW_LLM_MIN_RESPONSE_LEN": str(total - prompt),
        }
        self.prompt, self.total, self.runs = prompt, total, 0
        try:
            self.compiled = npu.core.compile_model(model, DEVICE, config)
            self._request = self.compiled.create_infer_request()
        except RuntimeError as e:
            raise BackendError(f"OpenVINO NPUW_LLM refused the model: {words(e)}") from e

    def step(self, run: Run) -> NDArray[np.float32]:
        """Return logits (wanted, vocabulary); BackendError on failure or too long a sequence."""
        n, at = len(run.tokens), 0
        if run.past > self.total - AT_ONCE or (run.first == 0 and n > self.prompt):
            raise BackendError(
                f"position {run.past - 1}: the model was made for prompts of {self.prompt} tokens and for "
                f"{self.total - AT_ONCE} in all"
            )
        logits: dict[int, NDArray[np.float32]] = {}
        if run.first == 0 and n > 1:
            # a prompt returns the last tokens' logits only; the tokens after those are run piece by piece
            at = min([n, *(run.wanted + AT_ONCE)])
            self._run(run, 0, at, np.ones(at, np.int64), logits)
        while at < n:
            end = min(n, at + AT_ONCE)
            # OpenVINO overwrites as much of its own mask as it is given: with less than all of it, cells that the
            # sequence left when it went back would be visible again
            mask = np.zeros(self.total, np.int64)
            mask[: run.first + at] = 1
            self._run(run, at, end, mask, logits)
            at = end
        return np.array([logits[int(i)] for i in run.wanted], np.float32)

    def _run(
        self, run: Run, at: int, end: int, mask: NDArray[np.int64], logits: dict[int, NDArray[np.float32]]
    ) -> None:
        feeds = {
            "input_ids": run.tokens[None, at:end],
            "attention_mask": mask[None],
            "position_ids": self.positions(run.first + at, run.first + end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        try:
            for name, x in feeds.items():
                self._request.set_tensor(name, ov.Tensor(np.ascontiguousarray(x)))
            self._request.infer()
            rows = self._request.get_tensor("logits").data[0]
        except RuntimeError as e:
            raise BackendError(f"OpenVINO NPUW_LLM failed at position {run.first + at}: {words(e)}") from e
        self.runs += 1
        for i in run.wanted[(run.wanted >= at) & (run.wanted < end)]:
            place = len(rows) - (end - int(i))
            if place < 0:
                raise BackendError(f"logits of {end - int(i)} tokens expected, of {len(rows)} found")
            logits[int(i)] = rows[place].astype(np.float32)

    @staticmethod
    def positions(first: int, end: int) -> NDArray[np.int64]:
        """Return positions of the tokens of a run; several from 0 on are a prompt."""
        return np.arange(first, end, dtype=np.int64)
