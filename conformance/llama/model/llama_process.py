"""llama.cpp with a model on one device, in its own process."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, UsageError
from conformance.llama.live.llama import Device
from conformance.llama.live.placement import Placed
from conformance.llama.zoo.family import Request
from conformance.process import Deadline, Worker, WorkerDiedError, WorkerTimeoutError
from conformance.process.memory import resident

F32 = NDArray[np.float32]
CELLS = 256
"""The size of a context is a multiple of this, in which llama.cpp also grows n_kv."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and the answer to it."""

    prompt: Sequence[int]
    decode: int = 0
    """Number of tokens of the answer; fewer if the model ends it."""
    forced: Sequence[int] | None = None
    """The answer; None for the most likely tokens."""


Talk = Sequence[Sequence[Turn]]
"""Slot -> its turns. Each slot is a sequence of the same context."""


def alone(prompt: Sequence[int], decode: int = 0) -> Talk:
    """Return one slot with one turn."""
    return [[Turn(list(prompt), decode)]]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a context plays a conversation."""

    text: str = ""
    """Its keys as the user wrote them; "" for llama.cpp's defaults."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `family.Request`."""
    batch: int = 0
    """Maximum tokens of a prompt in one call; 0 for all."""
    slots: int = 1
    """Minimum number of slots: conversations are repeated in further ones."""
    shift: int = 0
    """Number of a slot's first tokens to remove before each further turn; the others move down."""
    keep: int = 0
    """Number of first tokens before these, which stay."""


PLAIN = Setting()


class LogitsRow(NamedTuple):
    """Where a row of logits belongs."""

    slot: int
    turn: int
    token: int
    """0 for the last token of the prompt, below 0 before it, k for the k-th of the answer."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """The fields of a worker's request to decode."""

    talk: Talk
    setting: Setting
    logits: str
    case: str = ""
    every: bool = False
    """True to return results of every token of the prompts, not only of the last."""

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the context's request: enough cells for all slots, and those of the setting."""
        cells = sum(self._cells(turns) for turns in self.talk)
        made = {"n_ctx": -(-cells // CELLS) * CELLS, "n_seq_max": len(self.talk)}
        return {**made, **({"unified": True} if len(self.talk) > 1 else {}), **self.setting.changes}

    def _cells(self, turns: Sequence[Turn]) -> int:
        """Return the largest number of cells that a slot has."""
        most = held = 0
        for turn in turns:
            held = max(0, held - self.setting.shift) if most else 0
            held += len(turn.prompt) + (turn.decode if turn.forced is None else len(turn.forced))
            most = max(most, held)
        return most


@dataclass(frozen=True, slots=True)
class Decoded:
    """The results of one run."""

    logits: F32
    """`[rows, n_vocab]`: of each token whose results were requested, in order."""
    answers: list[list[list[int]]]
    """Slot -> the answer of each of its turns."""
    places: list[LogitsRow]
    """The place of each row."""
    resident: int | None
    """Resident bytes of the process after the run."""

    @property
    def tokens(self) -> list[int]:
        """The answers, joined."""
        return [token for turns in self.answers for answer in turns for token in answer]


class LlamaEndedError(UsageError):
    """llama.cpp's process ended or did not answer; `failure` is the error of a backend."""

    def __init__(self, text: str, failure: BackendError) -> None:
        super().__init__(text)
        self.failure = failure


class LlamaProcess:
    """llama.cpp with a model on a device.

    UsageError if llama.cpp cannot load the model or its process ends, UnavailableError if there is no llama.cpp;
    `time_limit` in seconds for each request.
    """

    def __init__(self, model: Path, device: Device, *, time_limit: float = 600.0) -> None:
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", model.stem)
        self._request = Request(
            id=f"model/{stem}@0",
            stream=stem,
            model=str(model.resolve()),
            from_file=True,
            recipes=False,
            by_reference=True,
            lib=device.lib,
            family="model",
            params={"model": model.name},
            provenance={"model": model.name},
        )
        self._model = model
        self._worker = Worker("conformance.llama.model.worker", deadline=Deadline(each=time_limit), **device.process())
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-model-")
        try:
            about = self._ask({"load": asdict(self._request), **device.asked})
        except BaseException:  # nobody else can close what was never handed out
            self.close()
            raise
        self.has_words: bool = about["words"]
        """True if the vocabulary has text."""
        self.n_vocab: int = about["n_vocab"]
        self.placed: Placed = about["placed"]
        """`DEVICE OP` -> nodes of a graph; empty on the CPU, or if unknown."""
        self.adds_bos: bool = about["adds_bos"]
        """True if texts begin with a token of their own."""

    def tokens(self, text: str, *, first: bool = True) -> list[int]:
        """Tokenise a text; with leading tokens if it is the `first` of its slot.

        UsageError if the vocabulary has no text or lacks a part of this one, or if there is no token.
        """
        if not self.has_words:
            raise UsageError(f"{self._model}: its vocabulary has no texts; give tokens: --tokens 1,2,3")
        try:
            return list(self._ask({"tokens": text, "first": first})["tokens"])
        except LlamaEndedError as e:
            raise LlamaEndedError(f"{e}; tokens need no vocabulary: --tokens 1,2,3", e.failure) from None

    def chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Format messages, role and text, by the model's own chat template, up to the next answer.

        Without a template the texts are joined. UsageError if llama.cpp does not recognise the template.
        """
        return str(self._ask({"chat": list(messages)})["text"])

    def words(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; its number if the vocabulary has no text."""
        return list(self._ask({"words": list(tokens)})["words"]) if self.has_words else [f"<{t}>" for t in tokens]

    def play(self, talk: Talk, setting: Setting = PLAIN, *, every: bool = False) -> Decoded:
        """Play conversations; `every`: return the results of each token of the prompts, too."""
        return self._play(talk, setting, "", every)

    def record(self, talk: Talk, setting: Setting = PLAIN, *, every: bool = False) -> tuple[Decoded, Case]:
        """Play conversations and record the graphs; weights stay in the model's file."""
        file = Path(self._folder.name, "case.gguf")
        decoded = self._play(talk, setting, str(file), every)
        return decoded, casefile.read_one(file, models=[self._model.resolve().parent])

    def _play(self, talk: Talk, setting: Setting, case: str, every: bool) -> Decoded:
        file = Path(self._folder.name, "logits.npy")
        reply = self._ask({"play": asdict(DecodeRequest(talk, setting, str(file), case, every))})
        logits: F32 = np.load(file)
        return Decoded(logits, reply["answers"], [LogitsRow(*p) for p in reply["places"]], resident(self._worker.pid))

    def _ask(self, header: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._worker.ask(header)[0]
        except WorkerTimeoutError as e:
            text = f"llama.cpp: {e}; raise --time-limit"
            raise LlamaEndedError(text, BackendTimeoutError(text)) from None
        except WorkerDiedError as e:
            text = f"llama.cpp ended its process ({e.how}): {' / '.join(e.lines[-3:])}"
            raise LlamaEndedError(text, BackendCrashError(text, words="\n".join(e.lines), died=e.how)) from None

    def close(self) -> None:
        """End the process and remove its files."""
        self._worker.close()
        self._folder.cleanup()
