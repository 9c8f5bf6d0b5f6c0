"""llama.cpp with a model on one device, in its own process."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.live.llama import Device
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError
from conformance.process.memory import resident
from conformance.suite.zoo.family import ENVIRONMENT, Request

F32 = NDArray[np.float32]
CELLS = 256
"""The size of a context is a multiple of this, in which llama.cpp also grows n_kv."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """The fields of a worker's request to decode."""

    prompt: list[int]
    decode: int
    """Number of tokens after the prompt."""
    forced: Sequence[int] | None
    """Tokens to decode; None for the most likely ones."""
    logits: str
    case: str = ""
    every: bool = False
    """True to return results of every token of the prompt, not only of the last."""

    @property
    def n_ctx(self) -> int:
        """Cells of the context."""
        return -(-(len(self.prompt) + self.decode) // CELLS) * CELLS


@dataclass(frozen=True, slots=True)
class Decoded:
    """The results of one run for a prompt and the tokens after it."""

    logits: F32
    """`[rows, n_vocab]`: of each token whose results were requested, in order."""
    tokens: list[int]
    """The tokens after the prompt."""
    resident: int | None
    """Resident bytes of the process after the run."""


class LlamaProcess:
    """llama.cpp with a model on a device.

    UsageError if llama.cpp cannot load the model or its process ends, UnavailableError if there is no llama.cpp;
    `time_limit` in seconds for each request.
    """

    def __init__(self, model: Path, device: Device, *, flash_attn: bool = True, time_limit: float = 600.0) -> None:
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", model.stem)
        self._request = Request(
            id=f"model/{stem}@0",
            stream=stem,
            model=str(model.resolve()),
            from_file=True,
            recipes=False,
            by_reference=True,
            lib=device.lib,
            flash_attn=flash_attn,
            family="model",
            params={"model": model.name},
            provenance={"model": model.name},
        )
        self._model = model
        variables = {**os.environ, **ENVIRONMENT, **device.environment}
        env = {k: v for k, v in variables.items() if v is not None}
        self._worker = Worker("conformance.model.worker", time_limit=time_limit, env=env)
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-model-")
        try:
            about = self._ask({"load": asdict(self._request), **device.asked})
        except BaseException:  # nobody else can close what was never handed out
            self.close()
            raise
        self.has_words: bool = about["words"]
        """True if the vocabulary has text."""
        self.n_vocab: int = about["n_vocab"]

    def tokens(self, text: str) -> list[int]:
        """Tokenise a text; UsageError if the vocabulary has no text, or if there is no token."""
        if not self.has_words:
            raise UsageError(f"{self._model}: its vocabulary has no texts; give tokens: --tokens 1,2,3")
        return list(self._ask({"tokens": text})["tokens"])

    def words(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; its number if the vocabulary has no text."""
        return list(self._ask({"words": list(tokens)})["words"]) if self.has_words else [f"<{t}>" for t in tokens]

    def play(
        self, prompt: Sequence[int], decode: int = 0, forced: Sequence[int] | None = None, *, every: bool = False
    ) -> Decoded:
        """Decode `prompt` and `decode` tokens after it: those of `forced`, or the most likely ones.

        `every`: return the results of each token of the prompt, too.
        """
        return self._play(prompt, decode, forced, "", every)

    def record(self, prompt: Sequence[int], decode: int = 0, *, every: bool = False) -> tuple[Decoded, Case]:
        """Decode the most likely tokens and record the graphs; weights stay in the model's file."""
        file = Path(self._folder.name, "case.gguf")
        decoded = self._play(prompt, decode, None, str(file), every)
        return decoded, casefile.read_one(file, models=[self._model.resolve().parent])

    def _play(
        self, prompt: Sequence[int], decode: int, forced: Sequence[int] | None, case: str, every: bool
    ) -> Decoded:
        file = Path(self._folder.name, "logits.npy")
        play = DecodeRequest(list(prompt), decode, None if forced is None else list(forced), str(file), case, every)
        tokens = self._ask({"play": asdict(play)})["tokens"]
        logits: F32 = np.load(file)
        return Decoded(logits, tokens, resident(self._worker.pid))

    def _ask(self, header: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._worker.ask(header)[0]
        except WorkerTimeoutError as e:
            raise UsageError(f"llama.cpp: {e}; raise --time-limit") from None
        except WorkerDiedError as e:
            raise UsageError(f"llama.cpp ended its process ({e.how}): {' / '.join(e.lines[-3:])}") from None

    def close(self) -> None:
        """End the process and remove its files."""
        self._worker.close()
        self._folder.cleanup()
