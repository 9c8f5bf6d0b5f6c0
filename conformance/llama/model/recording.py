"""Conversations that llama.cpp played on its own CPU: its results and its graphs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from conformance.case.case import Case
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor

from .graphs import rows_of
from .llama_process import PLAIN, Decoded, LlamaProcess, LogitsRow, Setting, Talk

UNNAMED = "model/conversation@0"
"""Id of conversations that are in no record."""


@dataclass(frozen=True, slots=True)
class ModelRecording:
    """Conversations that llama.cpp played in one setting, with its graphs as a case."""

    talk: Talk
    """The prompt, or the conversations."""
    decoded: Decoded
    case: Case
    setting: Setting = PLAIN
    id: str = UNNAMED
    """Id of the case of the family `model` that plays them."""
    steps: list[int] = field(init=False)
    """The step of each row of logits."""

    def __post_init__(self) -> None:
        rows = [k for k, s in enumerate(self.case.steps) for _ in range(rows_of(s))]
        object.__setattr__(self, "steps", rows)  # frozen

    @classmethod
    def of(cls, llama: LlamaProcess, talk: Talk, setting: Setting = PLAIN, case_id: str = UNNAMED) -> ModelRecording:
        """Let llama.cpp play conversations; UsageError if it cannot."""
        return cls(talk, *llama.record(talk, setting), setting, case_id)

    @property
    def choices(self) -> list[int]:
        """The rows of logits by which a token is chosen."""
        return [row for row, at in enumerate(self.decoded.places) if at.token >= 0]

    @property
    def replayed(self) -> Talk:
        """The conversations with llama.cpp's answers."""
        return [
            [replace(turn, forced=answer) for turn, answer in zip(turns, answers, strict=True)]
            for turns, answers in zip(self.talk, self.decoded.answers, strict=True)
        ]

    @property
    def notable(self) -> list[int]:
        """The first step of the first two prompts and of their answers."""
        first: dict[tuple[int, bool], int] = {}
        for at, k in zip(self.decoded.places, self.steps, strict=True):
            if at.turn < 2 and at.token <= 1:
                first.setdefault((at.turn, at.token > 0), k)
        return sorted({0, *first.values()})

    def row_of(self, k: int) -> LogitsRow:
        """Return the first slot's last row in step `k`, or in the next step that has any."""
        at = min(step for step in self.steps if step >= k)
        here = [p for p, step in zip(self.decoded.places, self.steps, strict=True) if step == at]
        return [p for p in here if p.slot == here[0].slot][-1]

    @property
    def last(self) -> LogitsRow:
        """The last row of the first slot."""
        return [p for p in self.decoded.places if p.slot == 0][-1]

    def words(self, k: int) -> str:
        """Format step `k`, counted from 0, by its rows of logits."""
        here = [p for p, step in zip(self.decoded.places, self.steps, strict=True) if step == k]
        if [len(turns) for turns in self.talk] == [1]:
            return step_words(k, prompt=any(p.token <= 0 for p in here))
        if not here:  # it only moves positions
            return f"the shift before {self.words(k + 1)}"
        last = {p.slot: p for p in here}
        return " and ".join(row_words(p, len(self.talk)) for p in last.values())


_LAYER = re.compile(r"blk\.(\d+)\.|_l(\d+)\b|-(\d+)(?= \(|$)")
"""A weight, a cache, a node: `blk.7.attn_v.weight`, `cache_k_l7`, `Vcur-7`."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def layer_of(t: Tensor, graph: Graph) -> int | None:
    """Return the layer of a node or cache; None before the first layer and in the head.

    The layer comes from the tensor's own name, from that of a source, or from the last earlier node that has one.
    """
    own = _own(t)
    if own is not None or t not in graph.nodes:
        return own
    at = graph.nodes.index(t)
    before = (_own(n) for n in reversed(graph.nodes[:at]))
    inside = any(_own(n) is not None for n in graph.nodes[at:])
    return next((layer for layer in before if layer is not None), None) if inside else None


def _own(t: Tensor) -> int | None:
    """Return the layer in the tensor's own name, or in that of a weight or cache that it reads."""
    for name in (t.name, *(s.name for s in t.src if s is not None and s.op == "NONE")):
        if found := _LAYER.search(name):
            return int(next(g for g in found.groups() if g is not None))
    return None


def step_words(k: int, *, prompt: bool) -> str:
    """Format step `k`, counted from 0, of a run with one prompt."""
    which = f"{_ORDINALS[k]} step" if k < len(_ORDINALS) else f"step {k + 1}"
    return f"{which} (the prompt)" if prompt else which


def row_words(row: LogitsRow, n_slots: int) -> str:
    """Format a row of one of several conversations, or turns."""
    slot = f"slot {row.slot + 1}, " if n_slots > 1 else ""
    return f"{slot}turn {row.turn + 1}, {f'token {row.token}' if row.token > 0 else 'the prompt'}"
