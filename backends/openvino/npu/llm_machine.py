"""A decoder that `NPUW_LLM` has made static and runs: prompts by one model, up to 8 tokens at a time by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.openvino.compile import words
from conformance.backend.translating.dynamic import TracedPlan, traced
from conformance.backend.translating.lift import lift, values
from conformance.backend.translating.plan import Plan, Role
from conformance.backend.translating.sym import assumptions
from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Tensor

from .compile import DEVICE, WRAPPER, NpuCompiler
from .llm_form import Form
from .llm_history import Run

if TYPE_CHECKING:
    from .llm_walk import LlmWalk

AT_ONCE = 8
"""Tokens of one run after the prompt at most: OpenVINO rounds up to 8. It gives logits for as many, at the end of a
prompt too."""
GRAIN = 64
"""OpenVINO rounds prompts and answers up to it."""
SAMPLES = (AT_ONCE, AT_ONCE + 3)
"""Numbers of tokens that the model is lifted from."""
LLM = {"NPU_USE_NPUW": "YES", "NPUW_LLM": "YES", "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": str(AT_ONCE)}
ON_CPU = {**WRAPPER, "NPUW_FOLD": "NO", "KV_CACHE_PRECISION": "f32"}
"""Where there is no NPU. With functions folded (2026.4.1) an F32 model has NMSE 5e-8 instead of 2e-14.
Caches are float16 unless told, and what goes into them has the cache's own type already."""

Walker = Callable[[TracedPlan, tuple[Tensor, Tensor]], "LlmWalk"]
"""`f(plan, (token ids, positions))`: the walk that has emitted the decoder."""


def model_of(samples: tuple[Form, Form], roles: dict[Tensor, Role], sizes: tuple[int, ...], walker: Walker) -> Any:  # noqa: ANN401  # an openvino.Model
    """The decoder as one stateful model for any number of tokens.

    Args:
        samples: the decoder at the numbers of tokens of `SAMPLES`.
        roles: what the leaves of the first are.
        sizes: numbers of tokens that it will be made static for.
        walker: emits.

    Raises:
        BackendError: it cannot be emitted, or not so that it holds for `sizes`.
    """
    first, second = samples
    tensors = first.graph.tensors()
    index = {t: i for i, t in enumerate(tensors)}
    plan = Plan(first.graph, tensors, index, roles, (first.logits,), first.key)
    template = lift([first.graph, second.graph], [t for t, r in roles.items() if r == "input"])
    if len(template.symbols) != 1:
        raise BackendError(f"one symbol expected, the number of tokens; {', '.join(template.symbols) or 'none'} found")
    with assumptions() as found:
        symbolic = traced(template, plan, values(tensors), found)
        ids, positions = (symbolic.tensors[index[t]] for t in (first.leaves.tokens, first.leaves.positions))
        model = walker(symbolic, (ids, positions)).decoder(symbolic.outputs[0])
    for n in sizes:
        wrong = next((a for a in found if not a.holds((n,))), None)
        if wrong is not None:
            raise BackendError(f"{n} tokens: the model holds only while {wrong}")
    return model


def sizes_for(prompt: int, past: int) -> tuple[int, int]:
    """Tokens of the model for prompts, and cells of the other.

    Args:
        prompt: tokens of the longest prompt.
        past: tokens of the sequence at its longest.
    """
    own = _up(max(prompt, AT_ONCE + 1))
    return own, own + _up(max(past + 2 * AT_ONCE - own, 1))


def _up(n: int) -> int:
    return -(-n // GRAIN) * GRAIN


class Machine:
    """A model that OpenVINO has split and compiled, with one request.

    Args:
        npu: the compiler.
        model: what `model_of` gave.
        prompt: tokens of the model for prompts.
        total: cells of the other.

    Raises:
        BackendError: OpenVINO refused the model.
    """

    def __init__(self, npu: NpuCompiler, model: Any, prompt: int, total: int) -> None:  # noqa: ANN401  # an openvino.Model
        config = {
            **LLM,
            **({} if npu.real else ON_CPU),
            "NPUW_LLM_MAX_PROMPT_LEN": str(prompt),
            "NPUW_LLM_MIN_RESPONSE_LEN": str(total - prompt),
        }
        self.prompt, self.total, self.runs = prompt, total, 0
        self._tensor = npu.ov.Tensor
        try:
            self.compiled = npu.core.compile_model(model, DEVICE, config)
            self._request = self.compiled.create_infer_request()
        except RuntimeError as e:
            raise BackendError(f"OpenVINO NPUW_LLM refused the model: {words(e)}") from e

    def step(self, run: Run) -> NDArray[np.float32]:
        """Logits of the tokens that are wanted, shape (wanted, vocabulary).

        Raises:
            BackendError: OpenVINO failed, or the sequence is longer than the model was made for.
        """
        n, at = len(run.tokens), 0
        if run.past > self.total - AT_ONCE or (run.first == 0 and n > self.prompt):
            raise BackendError(
                f"position {run.past - 1}: the model was made for prompts of {self.prompt} tokens and for "
                f"{self.total - AT_ONCE} in all"
            )
        found: dict[int, NDArray[np.float32]] = {}
        if run.first == 0 and n > 1:
            # of a prompt come the last tokens' logits only; what stands behind those is given piece by piece
            at = min([n, *(run.wanted + AT_ONCE)])
            self._run(run, 0, at, np.ones(at, np.int64), found)
        while at < n:
            end = min(n, at + AT_ONCE)
            # OpenVINO overwrites as much of its own mask as it is given: with less than all of it, cells that the
            # sequence left when it went back would be seen again
            mask = np.zeros(self.total, np.int64)
            mask[: run.first + at] = 1
            self._run(run, at, end, mask, found)
            at = end
        return np.array([found[int(i)] for i in run.wanted], np.float32)

    def _run(self, run: Run, at: int, end: int, mask: NDArray[np.int64], found: dict[int, NDArray[np.float32]]) -> None:
        given = {
            "input_ids": run.tokens[None, at:end],
            "attention_mask": mask[None],
            "position_ids": self.positions(run.first + at, run.first + end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        try:
            for name, x in given.items():
                self._request.set_tensor(name, self._tensor(np.ascontiguousarray(x)))
            self._request.infer()
            rows = self._request.get_tensor("logits").data[0]
        except RuntimeError as e:
            raise BackendError(f"OpenVINO NPUW_LLM failed at position {run.first + at}: {words(e)}") from e
        self.runs += 1
        for i in run.wanted[(run.wanted >= at) & (run.wanted < end)]:
            place = len(rows) - (end - int(i))
            if place < 0:
                raise BackendError(f"logits of {end - int(i)} tokens expected, of {len(rows)} found")
            found[int(i)] = rows[place].astype(np.float32)

    @staticmethod
    def positions(first: int, end: int) -> NDArray[np.int64]:
        """Positions of the tokens of a run; one from 0 on, of several tokens, is a prompt."""
        return np.arange(first, end, dtype=np.int64)
