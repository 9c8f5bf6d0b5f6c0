"""`npu?path=llm`: a decoder given as token ids, which OpenVINO itself makes static (`NPUW_LLM`).

One stateful model of any size goes in, token ids and positions come, logits leave. The caches are OpenVINO's own, and
nobody can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.openvino.backend import OpenVinoSession
from backends.openvino.sources import src
from conformance.backend.interface import YES, Support, Witness, no
from conformance.backend.measure import Peak
from conformance.case.case import Case
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, computes

from .llm_form import Decoder, Form, UnfitError, decoder, roles_in
from .llm_history import History, Run
from .llm_machine import AT_ONCE, SAMPLES, Machine, model_of, sizes_for

if TYPE_CHECKING:
    from conformance.backend.translating.dynamic import TracedPlan
    from conformance.backend.translating.plan import Role

    from .backend import OpenVinoNpu
    from .compile import NpuCompiler
    from .llm_walk import LlmWalk


@dataclass(frozen=True, slots=True)
class Course:
    """A case as one sequence that one decoder follows."""

    decoders: Mapping[Graph, Decoder]
    """The decoder at each step."""
    samples: tuple[Form, Form]
    prompt: int
    """Tokens of the longest prompt."""
    past: int
    """Tokens of the sequence at its longest."""


def course(case: Case) -> Course:
    """The course of a case.

    Raises:
        UnfitError: it has none; the message names the step.
    """
    roles, history = _persistent(case), History()
    decoders: dict[Graph, Decoder] = {}
    runs: list[Run] = []
    for k, step in enumerate(case.steps):
        try:
            if step.graph not in decoders:
                decoders[step.graph] = decoder(step.graph, roles, tuple(step.outputs), step.inputs.keys())
            runs.append(history.step(decoders[step.graph], step.inputs))
        except UnfitError as e:
            raise UnfitError(f"step {k}: {e}") from e
    base = next((d for d in decoders.values() if d.n_tokens > 1), None)
    if base is None:
        raise UnfitError("no step has more than one token, and nothing else tells what of a graph counts tokens")
    first, second = (base.at(n) for n in SAMPLES)
    forms = {1: base.at(1), SAMPLES[0]: first}
    for d in decoders.values():
        n = 1 if d.n_tokens == 1 else SAMPLES[0]
        if d.at(n).key != forms[n].key:
            raise UnfitError("the graph of one step is not that of another with more or fewer tokens")
    prompt, past = max(len(r.tokens) for r in runs if r.first == 0), max(r.past for r in runs)
    return Course(decoders, (first, second), prompt, past)


def _persistent(case: Case) -> dict[Tensor, Role]:
    caches = set(case.caches())
    return {t: "cache" if t in caches else "weight" for t in case.persistent}


def fits(case: Case) -> Support:
    """Whether `NPUW_LLM` can run a case, and why not."""
    try:
        course(case)
    except UnfitError as e:
        return no(f"path=llm: {e}")
    return YES


class LlmSession(OpenVinoSession):
    """A case on one `Machine`, which is made at the first step."""

    def __init__(self, backend: OpenVinoNpu, npu: NpuCompiler, case: Case) -> None:
        super().__init__(backend, case)
        try:
            self._course = course(case)
        except UnfitError as e:
            raise BackendError(f"{case.id}: path=llm: {e}") from e
        self._emitters = backend.emitters()
        self._npu = npu
        self._own = _persistent(case)
        self._history = History()
        self._machine: Machine | None = None

    def opaque(self) -> frozenset[Tensor]:
        """The caches: OpenVINO's `query_state` shows how many tokens are stored, and not what."""
        return frozenset(t for t, r in self._own.items() if r == "cache")

    def read(self, tensor: Tensor) -> Bytes:
        """The bytes of a weight.

        Raises:
            BackendError: it is a cache.
        """
        if tensor in self.opaque():
            raise BackendError(f"{tensor}: a cache, which NPUW_LLM shows to nobody")
        return super().read(tensor)

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a weight, before the first step.

        Raises:
            BackendError: it is a cache, or the model is made.
        """
        if tensor in self.opaque() or self._machine is not None:
            raise BackendError(f"{tensor}: NPUW_LLM takes weights with its model, and the contents of caches never")
        super().write(tensor, data)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Go on with the sequence, or back in it.

        Raises:
            BackendError: the step is none of the case's, or OpenVINO failed.
        """
        d = self._course.decoders.get(graph)
        if d is None or any(t is not d.logits for t in outputs):
            raise UnfitError("a graph of the case and its logits expected, another graph or output asked for")
        run = self._history.step(d, inputs)
        w = self._witness
        w.path = "cached" if self._machine is not None else "translated"
        w.compiles += self._machine is None
        w.cache_hits += self._machine is not None
        if self._machine is None:
            self._machine = self._compiled()
        logits = self._machine.step(run)
        w.nodes += sum(computes(n) for n in graph)
        return {t: logits.reshape(-1).view(np.uint8) for t in outputs}

    def _compiled(self) -> Machine:
        prompt, total = sizes_for(self._course.prompt, self._course.past)
        samples = self._course.samples
        with Peak() as peak:
            model = model_of(samples, roles_in(samples[0].graph, self._own), (AT_ONCE, prompt), self._walk)
            machine = Machine(self._npu, model, prompt, total)
        self._witness.peak_compile_bytes = peak.bytes
        return machine

    def _walk(self, plan: TracedPlan, leaves: tuple[Tensor, Tensor]) -> LlmWalk:
        from .llm_walk import LlmWalk  # noqa: PLC0415  # needs openvino, which may be absent until now

        memory = self._memory

        def compressed(node: Tensor) -> Any:  # noqa: ANN401  # a Stored, or None
            weight = plan.own[plan.index[src(node, 0)]]
            return memory.weights.get(node, weight, memory.read)  # type: ignore[attr-defined]  # a HostMemory

        walk = LlmWalk(plan, leaves, lambda t: memory.read(plan.own[plan.index[t]]), compressed)
        walk.run(self._emitters)
        return walk

    def witness(self) -> Witness:
        """What ran; the wrapper tells no layers."""
        w, m = self._witness, self._machine
        w.state, w.notes = "NPUW_LLM", ["caches cannot be read"]
        if m is not None:
            w.notes += [
                f"EXECUTION_DEVICES says {m.compiled.get_property('EXECUTION_DEVICES')}",
                f"{m.runs} runs of models for {m.prompt} tokens of a prompt and {AT_ONCE} after it, {m.total} in all",
            ]
        return w

    def close(self) -> None:
        """Let the model go."""
        self._machine = None
        super().close()
