"""Service in whose process llama.cpp records a case; a wrong metadata key may abort it.

A request has `record`, the fields of `family.Request`: the case is written to its `output`; without one the reply lists
the model's weights.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.case.recipe import MAKEABLE, make
from conformance.case.streams import Stream
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.layout import Batch
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import Tensor
from conformance.process.service import Frame, Service, failure
from conformance.suite.decoder.memory import Ubatch, split
from conformance.suite.decoder.plan import Player

from .family import Request
from .load import load_model, new_context
from .model import recipe
from .recorder import Recorder, references, step


class Drive(Player):
    """A player of plans on one context; it calls `begin` and `each` around every batch."""

    def __init__(
        self,
        library: Llama,
        model: int,
        context: int,
        request: Request,
        *,
        begin: Callable[[str], None] = lambda _: None,
        each: Callable[[Ubatch], None],
    ) -> None:
        super().__init__(request.n_seq_max, Stream(request.stream, "inp_tokens"))
        self._library, self._c = library, library.llama
        self._context = context
        self._memory = self._c.get_memory(context)
        self._n_ctx = int(self._c.n_ctx(context))
        self._request = request
        self._begin, self._each = begin, each
        self._n_vocab = self._c.vocab_n_tokens(self._c.model_get_vocab(model))
        self._encodes = bool(self._c.model_has_encoder(model))
        self._decodes = bool(self._c.model_has_decoder(model))
        self._next = [0] * request.n_seq_max
        """Sequence -> the position of its next token."""

    def start(self, n_past: int) -> None:
        """Raise UsageError: llama.cpp cannot start with generated caches."""
        raise UsageError(f"run: at{n_past}: llama.cpp cannot start with generated caches; decode a prompt first")

    def prompt(self, n_tokens: list[int], *, every: bool = False) -> None:
        """Decode or encode new tokens of active sequences; UsageError if llama.cpp fails."""
        batch = self.batch(n_tokens, self._n_vocab, every=every)
        self._want_results(batch)
        if self._encodes and not self._decodes:
            batch.outputs[:] = True
            self._call("encode", batch)
            self._each(batch)
            return
        if self._encodes and not any(self._next):
            self._call("encode", replace(batch, outputs=np.ones_like(batch.outputs)))
            self._each(batch)
        self._call("decode", batch)
        for seq, pos in zip(batch.seqs.tolist(), batch.pos.tolist(), strict=True):
            self._next[seq] = pos + 1
        self._each(batch)

    def _want_results(self, batch: Ubatch) -> None:
        """Give every ubatch an output: the last token of each ubatch that would have none."""
        numbered = replace(batch, tokens=np.arange(batch.n_tokens))
        unified = self._request.unified or self._request.n_seq_max == 1
        for part in split(numbered, self._request.n_ubatch, unified=unified):
            if not part.outputs.any():
                batch.outputs[part.tokens[-1]] = True

    def _call(self, function: str, b: Ubatch) -> None:
        self._begin(function)
        n = b.n_tokens
        if n > self._n_ctx:
            raise UsageError(f"run: a batch of {n} tokens, but only {self._n_ctx} cells; set a larger ctx")
        tokens, pos, ids = (np.ascontiguousarray(a, np.int32) for a in (b.tokens, b.pos, b.seqs))
        pointers = (ids.ctypes.data + 4 * np.arange(n, dtype=np.uint64)).astype(np.uint64)
        arrays: list[NDArray[Any]] = [tokens, pos, np.ones(n, np.int32), pointers, b.outputs.astype(np.int8)]
        at = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        status = getattr(self._c, function)(self._context, Batch(n, at[0], None, at[1], at[2], at[3], at[4]))
        if status:
            log = " / ".join(line for line in list(self._library.log.lines)[-3:] if line)
            raise UsageError(f"run: llama_{function} of {n} tokens returned {status}: {log}")

    def n_past(self, seq: int) -> int:
        """Return the position of a sequence's next token."""
        return self._next[seq]

    def shift(self, n: int, keep: int = 0) -> None:
        """Remove `n` tokens of every sequence behind its first `keep`; the others move down."""
        can_shift = self._c.memory_can_shift
        if not self._memory or can_shift is None or not can_shift(self._memory):
            raise UsageError("run: the memory of this architecture cannot shift positions")
        super().shift(n, keep)

    def share(self, seq: int) -> None:
        """Replace the tokens of the other active sequences by those of `seq`."""
        if not self._request.unified:
            raise UsageError("run: cp: sequences have a stream each, and llama.cpp copies bytes; unified=1 expected")
        super().share(seq)

    def reset(self) -> None:
        """Clear all cells; their bytes remain."""
        if self._memory:
            self._c.memory_clear(self._memory, False)  # C's signature
        self._next = [0] * self._request.n_seq_max

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Remove positions p0 to p1 (None: all from p0 on) of a sequence."""
        last = -1 if p1 is None else p1
        if self._memory and not self._c.memory_seq_rm(self._memory, seq, p0, last):
            raise UsageError(
                f"run: the memory of this architecture cannot remove positions {p0} to {last} of a sequence"
            )
        if p1 is None:
            self._next[seq] = p0

    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Add `shift` to the positions of a sequence from p0 on."""
        self._c.memory_seq_add(self._memory, seq, p0, -1, shift)
        self._next[seq] = max(0, self._next[seq] + shift)

    def seq_cp(self, src: int, dst: int) -> None:
        """Copy all tokens of `src` to `dst`."""
        self._c.memory_seq_cp(self._memory, src, dst, 0, self._next[src])
        self._next[dst] = self._next[src]


TOLERANCE = {"nmse": 5e-4}
"""Tolerance of a free run against a recording in ggml's arithmetic."""


def main() -> None:
    """Answer requests until the caller closes the stream."""

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            return record(Request(**header["record"])), ()
        except UnavailableError as e:
            return failure(e)
        except ConformanceError as e:
            return failure(e, UsageError.__name__)

    Service().serve(answer)
    os._exit(0)  # skip the clean-up of libraries


def record(request: Request) -> dict[str, Any]:
    """Record a case and write it to its file; return the weights if the request names no file.

    Raises:
        ConformanceError: the library is absent or has another layout, or the model cannot be loaded, or the plan fails.
    """
    library = Llama(request.lib)
    library.initialise(last_words)
    tensors: list[Tensor] = []

    def weight(t: Tensor, pointer: int) -> None:
        tensors.append(t)
        if request.output:
            library.set(pointer, make(recipe(request.stream, t), t))

    model = load_model(library, request, weight=weight)
    if not request.output:
        return {"weights": [[t.name, t.type.name, list(t.ne)] for t in tensors]}
    recorder = Recorder(library, whole=request.nodes)
    context = new_context(library, model, request, recorder.callback)
    steps: list[Step] = []

    def each(batch: Ubatch) -> None:
        recorder.flush()
        steps.extend(with_tokens([step(r) for r in recorder.graphs], batch))
        recorder.graphs.clear()

    Drive(library, model, context, request, begin=recorder.begin, each=each).run(request.plan)
    provenance = {
        **request.provenance,
        "source": f"{'libllama' if library.path.is_dir() else library.path.name.split('.')[0]} ggml {library.version}",
        "arithmetic": GGML_CPU.name,
    }
    case = Case(
        request.id,
        recorder.persistent,
        steps,
        family=request.family,
        params=request.params,
        seed=request.seed,
        tolerance=dict(TOLERANCE),
        provenance=provenance,
    )
    if request.recipes:
        case.recipes = {t: recipe(request.stream, t) for t in recorder.is_weight if t.type.name in MAKEABLE}
    if request.by_reference:
        weights = {t: recorder.persistent[t] for t in recorder.is_weight}
        case.references = references(Path(request.model), weights)
    casefile.write(Path(request.output), case)
    return {}


def last_words(message: bytes) -> None:
    """Write ggml's last message before it ends the process, on a separate line."""
    os.write(2, b"\n" + message + b"\n")


def with_tokens(steps: list[Step], batch: Ubatch) -> list[Step]:
    """Record in each step of a batch its own tokens, found by its inputs."""
    left = batch.rows()
    for s in steps:
        inputs = {t.name: data.view(np.int32) for t, data in s.inputs.items() if t.name in {"inp_tokens", "inp_pos"}}
        rows = []
        for token, pos in zip(inputs.get("inp_tokens", ()), inputs.get("inp_pos", ()), strict=False):
            row = next((r for r in left if r[0] == token and r[1] == pos), None)
            if row is not None:
                left.remove(row)
                rows.append(row)
        s.note = {"tokens": batch.rows() if len(steps) == 1 else rows}
    return steps


if __name__ == "__main__":
    main()
