"""The service that runs llama.cpp with one model on one device.

Its requests, in this order:

`load` (`family.Request`'s fields) and `device` ("" for the plain CPU): replies `{"words": bool, "n_vocab": n}`: True if
the vocabulary has text, and its size. `tokens` (a text): replies `{"tokens": […]}`. `words` (a list of tokens): replies
`{"words": […]}`, the text of each. `chat` (messages: role and text): replies `{"text": …}`, as the model's template
formats them. `play` (`llama_process.DecodeRequest`'s fields): plays conversations; writes the logits of every row,
`[rows, n_vocab]` in float32, to the file `logits`, and, if `case` names a file, the graphs. Replies
`{"answers": […], "places": […]}`: the tokens of each slot's turns, and the `LogitsRow` of each row.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.llama.live.worker import DeviceModel
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import LacksError, new_context
from conformance.llama.zoo.recorder import Recorder, references, step
from conformance.llama.zoo.worker import Drive, with_tokens
from conformance.process.service import Frame, Service, failure
from conformance.suite.decoder.memory import Ubatch

from .graphs import logits_of
from .llama_process import F32, DecodeRequest, LogitsRow, Setting, Turn

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
            return models[-1].replied(header), ()
        except UnavailableError as e:
            return failure(e)
        except ConformanceError as e:
            return failure(e, UsageError.__name__)

    Service().serve(answer)
    os._exit(0)  # a library's own clean-up proves nothing, and there is nothing to save


def _request(talk: list[list[dict[str, Any]]], setting: dict[str, Any], **fields: Any) -> DecodeRequest:  # noqa: ANN401
    turns = [[Turn(**turn) for turn in slot] for slot in talk]
    return DecodeRequest(turns, Setting(**setting), **fields)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that one slot decodes in one batch."""

    tokens: Sequence[int]
    turn: int
    first: int
    """`LogitsRow.token` of the first one."""


def conversation(
    turns: Sequence[Turn], batch: int, forget: Callable[[], None], ends: Callable[[int], bool]
) -> Generator[Span, F32, list[list[int]]]:
    """Play one slot: yield tokens, get the logits after the last one; return the answers.

    `forget` is called before each further turn; `ends` is True for tokens that end an answer.
    """
    answers: list[list[int]] = []
    for t, turn in enumerate(turns):
        if t:
            forget()
        n, row = len(turn.prompt), np.zeros(0, np.float32)
        for i in range(0, n, batch or max(1, n)):
            row = yield Span(turn.prompt[i : i + batch] if batch else turn.prompt, t, i - n + 1)
        answers.append([])
        for k in range(turn.decode if turn.forced is None else len(turn.forced)):
            token = int(row.argmax()) if turn.forced is None else turn.forced[k]
            if turn.forced is None and ends(token):
                break
            answers[-1].append(token)
            row = yield Span([token], t, k + 1)
    return answers


class Reader(Drive):
    """Decodes given tokens."""

    def read(self, spans: Mapping[int, Sequence[int]], *, every: bool = False) -> None:
        """Decode further tokens of slots; return results of each slot's last, or of `every`."""
        self._given = spans
        self.active = list(spans)
        self.prompt([len(tokens) for tokens in spans.values()], every=every)

    def batch(self, n_tokens: list[int], n_vocab: int, *, every: bool) -> Ubatch:
        """Return the batch of the given tokens; UsageError for one that the vocabulary lacks."""
        given = np.concatenate([np.array(tokens, np.int64) for tokens in self._given.values()])
        if not len(given) or given.min() < 0 or given.max() >= n_vocab:
            raise UsageError(f"tokens from 0 to {n_vocab - 1} expected, {given.tolist()[:20]} found")
        return replace(super().batch(n_tokens, n_vocab, every=every), tokens=given)

    def forget(self, slot: int, n: int, keep: int) -> None:
        """Remove the `n` tokens of a slot behind its first `keep` ones, and move the others down."""
        if n:
            self.active = [slot]
            self.shift(n, keep)


class Model(DeviceModel):
    """A model on a device; UsageError if llama.cpp cannot load it or it decodes no text."""

    def __init__(self, request: Request, device: str, rpc: str = "") -> None:
        super().__init__(request, device, rpc)
        self._vocab = self.library.llama.model_get_vocab(self.model)
        c = self.library.llama
        if c.model_has_encoder(self.model) or not c.model_has_decoder(self.model):
            raise UsageError("it has an encoder, and only decoders are checked; the live family `arch` runs this kind")

    def replied(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to any other request than `load`."""
        if "tokens" in header:
            return {"tokens": self.tokens(header["tokens"], first=header["first"])}
        if "chat" in header:
            return {"text": self.chat(header["chat"])}
        if "words" in header:
            return {"words": [self.word(t) for t in header["words"]]}
        return self.run(_request(**header["play"]))

    def about(self) -> dict[str, Any]:
        """Return the reply to `load`."""
        c = self.library.llama
        has_words = c.tokenize is not None and c.detokenize is not None and c.vocab_type is not None
        return {
            "words": has_words and c.vocab_type(self._vocab) != NO_VOCABULARY,
            "n_vocab": c.vocab_n_tokens(self._vocab),
            "placed": self.placed(),
            "adds_bos": c.vocab_get_add_bos is not None and bool(c.vocab_get_add_bos(self._vocab)),
        }

    def tokens(self, text: str, *, first: bool) -> list[int]:
        """Tokenise a text, special tokens too; with leading tokens if it is the `first`."""
        raw = text.encode()
        room = len(raw) + 16
        found = (ctypes.c_int32 * room)()
        n = self.library.llama.tokenize(self._vocab, raw, len(raw), found, room, first, True)
        if n <= 0:
            raise UsageError(f"llama.cpp makes {max(n, 0)} tokens of this text; a longer one expected")
        return list(found[:n])

    def chat(self, messages: Sequence[Sequence[str]]) -> str:
        """Format messages by the model's chat template; UsageError if llama.cpp lacks it."""
        c = self.library.llama
        if c.chat_apply_template is None or c.model_chat_template is None:
            raise LacksError("llama_chat_apply_template")
        template = c.model_chat_template(self.model, None)
        if template is None:
            return "".join(text for _, text in messages)
        texts = [(role.encode(), text.encode()) for role, text in messages]
        table = (ctypes.c_char_p * (2 * len(texts)))(*chain.from_iterable(texts))
        room = 2 * sum(len(text) for _, text in texts) + 1024 * len(texts)
        out = ctypes.create_string_buffer(room)
        n = c.chat_apply_template(template, table, len(texts), True, out, room)
        if not 0 <= n <= room:
            raise UsageError("llama.cpp does not recognise the model's chat template; give tokens in place of texts")
        return out.raw[:n].decode()

    def word(self, token: int) -> str:
        """Return the text of a token."""
        room = 256
        text = ctypes.create_string_buffer(room)
        n = self.library.llama.detokenize(self._vocab, (ctypes.c_int32 * 1)(token), 1, text, room, False, True)
        return text.raw[: max(n, 0)].decode(errors="replace")

    def run(self, play: DecodeRequest) -> dict[str, Any]:
        """Play the request's conversations and write its files; return the reply."""
        self.library.log.lines.clear()
        request = replace(self._request, **play.changes)
        recorder = Recorder(self.library) if play.case else None
        context = new_context(self.library, self.model, request, recorder.callback if recorder else None)
        batches: list[tuple[Ubatch, F32]] = []
        steps: list[Step] = []

        def each(batch: Ubatch) -> None:
            batches.append((batch, self._results(context, batch, request)))
            if recorder:
                recorder.flush()
                steps.extend(with_tokens([step(r) for r in recorder.graphs], batch))
                recorder.graphs.clear()

        begin = recorder.begin if recorder else lambda _: None
        reader = Reader(self.library, self.model, context, request, begin=begin, each=each)
        places, answers = self._converse(reader, play, batches)
        logits = np.concatenate([rows for _, rows in batches])
        np.save(play.logits, logits)
        if recorder:
            recorded = [s.expected[logits_of(s)] for s in steps if s.outputs]
            if not np.array_equal(np.concatenate(recorded), logits.view(np.uint8).reshape(-1)):
                raise UsageError("its graphs order tokens of several slots in another way than batches; use slots=1")
            self._write(Path(play.case), request, recorder, steps)
        self.library.llama.free(context)
        return {"answers": answers, "places": places}

    def _converse(
        self, reader: Reader, play: DecodeRequest, batches: Sequence[tuple[Ubatch, F32]]
    ) -> tuple[list[LogitsRow], list[list[list[int]]]]:
        """Play all slots at once; return places of rows, and answers.

        A batch has the next token or prompt of each slot. Slots start one batch apart, so that both share batches.
        """
        is_end = self.library.llama.vocab_is_eog

        def ends(token: int) -> bool:
            return is_end is not None and bool(is_end(self._vocab, token))

        how = play.setting
        live = {
            s: conversation(turns, how.batch, partial(reader.forget, s, how.shift, how.keep), ends)
            for s, turns in enumerate(play.talk)
        }
        answers: list[list[list[int]]] = [[] for _ in live]
        places: list[LogitsRow] = []
        after: dict[int, F32] = {}
        while live:
            spans: dict[int, Span] = {}
            for s in [s for s in live if s <= len(batches)]:
                try:
                    spans[s] = live[s].send(after[s]) if s in after else next(live[s])
                except StopIteration as e:
                    answers[s] = e.value
                    del live[s]
            if not spans:
                continue
            reader.read({s: span.tokens for s, span in spans.items()}, every=play.every)
            batch, rows = batches[-1]
            every = [LogitsRow(s, x.turn, x.first + i) for s, x in spans.items() for i in range(len(x.tokens))]
            here = [place for place, wanted in zip(every, batch.outputs, strict=True) if wanted]
            places += here
            after.update({place.slot: row for place, row in zip(here, rows, strict=True)})
        return places, answers

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
