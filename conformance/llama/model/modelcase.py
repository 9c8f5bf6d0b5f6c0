"""The cases of the family `model`: `model/FILE-key=value,…@0`.

FILE is a path, with a comma written as `%2C`, as in each key with a text. `tokens`, `prompt` or `turns` (a file) are
what llama.cpp decodes on its own CPU and the backend after it, `decode` is the number of tokens of an answer, `answer`
a given one; the keys of `turns.KEYS` set the context. With `at=NAME` the case is a tensor, a key or, for `at=layers`,
the graph of the file itself, by itself or against the file `compare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from conformance.ggml.errors import UsageError
from conformance.suite.family import Key, keys, read_keys, split_id, text, without

from . import turns
from .llama_process import LlamaProcess, Setting, Talk, Turn

NAME = "model"
PROMPT = "The capital of France is"
"""The default prompt."""
MADE_UP = 8
"""Length in tokens of the prompt for a model whose vocabulary has no texts."""
DECODE = 64
"""Default number of tokens of an answer."""
LAYERS = "layers"
"""`at` of the comparison of two files node by node."""
_KEYS: dict[str, Key] = {
    **keys(f"tokens=NUMBERS answer=NUMBERS decode={DECODE}"),
    **{name: text() for name in ("prompt", "turns", "compare", "at")},
}
_FORM = "FILE-tokens=NxN,decode=N,key=value"


@dataclass(frozen=True, slots=True)
class ModelCase:
    """The keys of a case: what llama.cpp decodes, or a part of the file."""

    model: Path
    tokens: Sequence[int] = ()
    answer: Sequence[int] = ()
    decode: int = DECODE
    prompt: str | None = None
    """Its text in place of tokens; None for a default one."""
    turns: Path | None = None
    compare: Path | None = None
    at: str = ""
    setting: str = ""
    """Keys and values of the context, in the notation of `turns.setting`."""

    @classmethod
    def read(cls, case_id: str) -> ModelCase:
        """Parse an id; UsageError if it is invalid."""
        body, _ = split_id(case_id, NAME, _FORM)
        rest, own = without(body, _KEYS)
        file, setting = without(rest, turns.KEYS)
        if not file or "=" in file:
            raise UsageError(f"case {case_id!r}: {NAME}/{_FORM} expected; keys: {', '.join((*_KEYS, *turns.KEYS))}")
        values, given = read_keys(case_id, own, _KEYS)
        turns.setting(setting, flash_attn=True)
        paths: dict[str, Any] = {k: Path(_plain(values[k])) if values[k] else None for k in ("turns", "compare")}
        numbers = {k: values[k] for k in ("tokens", "answer", "decode")}
        return cls(
            Path(_plain(file)), **numbers, **paths, prompt=_plain(values["prompt"]) if "prompt" in given else None,
            at=_plain(values["at"]), setting=setting,
        )  # fmt: skip

    @property
    def id(self) -> str:
        """Its id."""
        given = {
            "tokens": "x".join(map(str, self.tokens)),
            "answer": "x".join(map(str, self.answer)),
            "decode": "" if self.decode == DECODE or self.at else str(self.decode),
            "prompt": None if self.prompt is None else _quoted(self.prompt),
            "turns": self.turns and _quoted(self.turns.as_posix()),
            "compare": self.compare and _quoted(self.compare.as_posix()),
            "at": _quoted(self.at),
        }
        items = [f"{k}={v}" for k, v in given.items() if v or (v is not None and k == "prompt")] + [
            self.setting
        ] * bool(self.setting)
        return f"{NAME}/{'-'.join(filter(None, (_quoted(self.model.as_posix()), ','.join(items))))}@0"

    def of(self, setting: Setting) -> str:
        """Return the id of the case that plays the same in another setting."""
        return replace(self, setting=setting.text).id

    def talk(self, llama: LlamaProcess) -> Talk:
        """Return the conversations; UsageError if the prompt is invalid."""
        if self.turns is not None:
            return turns.talk(llama, self.turns, self.decode)
        return [[Turn(self.first(llama), self.decode, list(self.answer) or None)]]

    def first(self, llama: LlamaProcess) -> list[int]:
        """Return the tokens of the prompt, or of a default one; UsageError if it is invalid."""
        if self.tokens:
            return list(self.tokens)
        if self.prompt is None and not llama.has_words:
            return [t % llama.n_vocab for t in range(1, MADE_UP + 1)]
        return llama.tokens(PROMPT if self.prompt is None else self.prompt)


def _quoted(text: str) -> str:
    return quote(text, safe="/:", errors="surrogateescape")


def _plain(text: str) -> str:
    return unquote(text, errors="surrogateescape")  # a damaged file may have any bytes as a name
