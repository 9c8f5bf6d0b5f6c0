"""The service that runs llama.cpp with one model on one device.

Its requests, in this order:

`load` (`family.Request`'s fields) and `device` ("" for the plain CPU): replies `{"words": bool, "n_vocab": n}`: True if
the vocabulary has text, and its size. `tokens` (a text): replies `{"tokens": […]}`. `words` (a list of tokens): replies
`{"words": […]}`, the text of each. `play` (`llama_process.DecodeRequest`'s fields): decodes the prompt and then one
token after the other, each the most likely of this run, or the next of `forced`; writes the logits of every row,
`[rows, n_vocab]` in float32, to the file `logits`, and, if `case` names a file, the graphs. Replies `{"tokens": […]}`,
the tokens after the prompt.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.live.worker import DeviceModel
from conformance.process.service import Frame, Service, failure
from conformance.suite.decoder.memory import Ubatch
from conformance.suite.zoo.family import Request
from conformance.suite.zoo.load import new_context
from conformance.suite.zoo.recorder import Recorder, references, step
from conformance.suite.zoo.worker import Drive, with_tokens

from .llama_process import DecodeRequest

NO_VOCABULARY = 0
"""`LLAMA_VOCAB_TYPE_NONE`."""


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    models: list[Model] = []

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            if "load" in header:
                models.append(Model(Request(**header["load"]), header["device"], header["rpc"]))
                return models[-1].about(), ()
            if "tokens" in header:
                return {"tokens": models[-1].tokens(header["tokens"])}, ()
            if "words" in header:
                return {"words": [models[-1].word(t) for t in header["words"]]}, ()
            return {"tokens": models[-1].run(DecodeRequest(**header["play"]))}, ()
        except UnavailableError as e:
            return failure(e)
        except ConformanceError as e:
            return failure(e, UsageError.__name__)

    Service().serve(answer)
    os._exit(0)  # a library's own clean-up proves nothing, and there is nothing to save


class Reader(Drive):
    """Decodes given tokens in one sequence."""

    def read(self, tokens: list[int], *, every: bool = False) -> None:
        """Decode `tokens` after the previous ones; return results of the last, or of `every`."""
        self._given = np.array(tokens, np.int64)
        self.prompt([len(tokens)], every=every)

    def batch(self, n_tokens: list[int], n_vocab: int, *, every: bool) -> Ubatch:
        """Return the batch of the given tokens; UsageError for one that the vocabulary lacks."""
        if not len(self._given) or self._given.min() < 0 or self._given.max() >= n_vocab:
            raise UsageError(f"tokens from 0 to {n_vocab - 1} expected, {self._given.tolist()[:20]} found")
        (n,) = n_tokens
        outputs = np.full(n, every)
        outputs[-1] = True
        return Ubatch(self._given, self.n_past(0) + np.arange(n), np.zeros(n, np.int64), outputs)


class Model(DeviceModel):
    """A model on a device; UsageError if llama.cpp cannot load it or it decodes no text."""

    def __init__(self, request: Request, device: str, rpc: str = "") -> None:
        super().__init__(request, device, rpc)
        self._vocab = self.library.llama.model_get_vocab(self.model)
        c = self.library.llama
        if c.model_has_encoder(self.model) or not c.model_has_decoder(self.model):
            raise UsageError("it has an encoder, and only decoders are checked; the live family `arch` runs this kind")

    def about(self) -> dict[str, Any]:
        """Return the reply to `load`."""
        c = self.library.llama
        has_words = c.tokenize is not None and c.detokenize is not None and c.vocab_type is not None
        return {
            "words": has_words and c.vocab_type(self._vocab) != NO_VOCABULARY,
            "n_vocab": c.vocab_n_tokens(self._vocab),
        }

    def tokens(self, text: str) -> list[int]:
        """Tokenise a text with leading tokens; names of special tokens are recognised."""
        raw = text.encode()
        room = len(raw) + 16
        found = (ctypes.c_int32 * room)()
        n = self.library.llama.tokenize(self._vocab, raw, len(raw), found, room, True, True)
        if n <= 0:
            raise UsageError(f"llama.cpp makes {max(n, 0)} tokens of this text; a longer one expected")
        return list(found[:n])

    def word(self, token: int) -> str:
        """Return the text of a token."""
        room = 256
        text = ctypes.create_string_buffer(room)
        n = self.library.llama.detokenize(self._vocab, (ctypes.c_int32 * 1)(token), 1, text, room, False, True)
        return text.raw[: max(n, 0)].decode(errors="replace")

    def run(self, play: DecodeRequest) -> list[int]:
        """Decode as the request `play` says, write its files; return the tokens after the prompt."""
        self.library.log.clear()
        request = replace(self._request, n_ctx=play.n_ctx)
        recorder = Recorder(self.library) if play.case else None
        context = new_context(self.library, self.model, request, recorder.callback if recorder else None)
        rows: list[NDArray[np.float32]] = []
        steps: list[Step] = []

        def each(batch: Ubatch) -> None:
            rows.append(self._results(context, batch, request))
            if recorder:
                recorder.flush()
                steps.extend(with_tokens([step(r) for r in recorder.graphs], batch))
                recorder.graphs.clear()

        begin = recorder.begin if recorder else lambda _: None
        reader = Reader(self.library, self.model, context, request, begin=begin, each=each)
        reader.read(play.prompt, every=play.every)
        tokens: list[int] = []
        for k in range(play.decode):
            tokens.append(play.forced[k] if play.forced is not None else int(rows[-1][-1].argmax()))
            reader.read(tokens[-1:])
        np.save(play.logits, np.concatenate(rows))
        if recorder:
            self._write(Path(play.case), request, recorder, steps)
        self.library.llama.free(context)
        return tokens

    def _write(self, path: Path, request: Request, recorder: Recorder, steps: list[Step]) -> None:
        weights = {t: recorder.persistent[t] for t in recorder.is_weight}
        case = Case(
            request.id,
            recorder.persistent,
            steps,
            family=request.family,
            params=request.params,
            provenance={**request.provenance, "source": f"llama.cpp, ggml {self.library.version}",
                        "arithmetic": GGML_CPU.name},
            references=references(Path(request.model), weights),
        )  # fmt: skip
        casefile.write(path, case)


if __name__ == "__main__":
    main()
