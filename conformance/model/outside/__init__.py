"""Voices from outside: other programs that read the same model and decode the same tokens. They decide nothing.

Each runs in a process of its own, which may die or hang without harm. A program is a module of this folder with a class
`Program`; `worker.py` serves it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError
from conformance.model.answer import number
from conformance.model.figures import Figures, Flip
from conformance.process import Worker
from conformance.process.memory import resident

F32 = NDArray[np.float32]
AGREES, DISAGREES, NOT_HEARD = "agrees", "disagrees", "not heard"
"""What comes of a voice."""


@dataclass(frozen=True, slots=True)
class Outsider:
    """A program that has a voice."""

    module: str
    """Of this folder."""
    packages: Sequence[str]
    """What it imports."""
    install: str
    """How to get them."""

    def lacks(self) -> str:
        """The first package that is not here; empty where all are."""
        return next((name for name in self.packages if find_spec(name) is None), "")


OUTSIDERS = {
    "openvino-genai": Outsider("genai", ("openvino_genai",), "pip install openvino-genai"),
    "transformers": Outsider(
        "huggingface", ("transformers", "torch", "accelerate"), "pip install transformers torch accelerate"
    ),
}


@dataclass(slots=True)
class Opinion:
    """What a voice says of the reference's tokens."""

    voice: str
    verdict: str = NOT_HEARD
    figures: Figures | None = None
    """Against llama.cpp on its CPU, row by row of what chooses a token."""
    exact: float | None = None
    """The largest KL divergence from float64, of the rows that float64 reached."""
    tokens: list[int] = field(default_factory=list)
    """What it would take after each of the reference's tokens."""
    flips: list[Flip] = field(default_factory=list)
    why: str = ""
    """Why it was not heard, or with whom it disagrees."""
    seconds: float = 0.0
    resident: int | None = None
    """Bytes that its process held."""

    def sentence(self) -> str:
        """The opinion in one sentence."""
        if self.figures is None:
            return f"{NOT_HEARD}: {self.why}"
        changed = (
            f"{len(self.flips)} of {len(self.figures.agree)} greedy tokens changed"
            if self.flips
            else "no greedy token changed"
        )
        if self.flips:
            worst = max(self.flips, key=lambda f: f.margin)
            changed += f", at margins up to {worst.margin:.2g} where rounding is worth {worst.rounding:.2g}"
        exact = "" if self.exact is None else f"; KL {self.exact:.1g} from float64"
        said = f"{self.verdict}: KL {self.figures.kl_max:.1g} from llama.cpp, {changed}{exact}"
        return f"{said}; {self.why}" if self.why else said

    def to_json(self) -> dict[str, JSON]:
        """As the record has it."""
        f = self.figures
        return {
            "opinion": self.sentence(),
            "verdict": self.verdict,
            "kl": {"max": number(f.kl_max), "mean": number(f.kl_mean)} if f else None,
            "kl_float64": None if self.exact is None else number(self.exact),
            "top1": f.top1 if f else None,
            "greedy_equal": bool(f.agree.all()) if f else None,
            "tokens": list(self.tokens),
            "seconds": round(self.seconds, 2),
            "resident_bytes": self.resident,
        }


def heard(
    name: str, model: Path, prompt: Sequence[int], tokens: Sequence[int], seconds: float
) -> tuple[F32, int | None]:
    """The logits of a program, `[1 + len(tokens), n_vocab]`: after the prompt and after each token; and the bytes that
    it held. ConformanceError if it dies, does not take the model, or needs longer than `seconds` for one of both.
    """
    worker = Worker("conformance.model.outside.worker", time_limit=seconds)
    with tempfile.TemporaryDirectory(prefix="conformance-voice-") as folder:
        try:
            worker.ask({"load": OUTSIDERS[name].module, "model": str(model.resolve()), "folder": folder})
            file = Path(folder, "logits.npy")
            worker.ask({"prompt": list(prompt), "tokens": list(tokens), "logits": str(file)})
            logits: F32 = np.load(file)
            held = resident(worker.pid)
        finally:
            worker.close()
    return logits, held


def opinion(
    name: str, model: Path, prompt: Sequence[int], tokens: Sequence[int], seconds: float
) -> tuple[Opinion, F32 | None]:
    """What a voice says, before it is held against others; no logits where it could not be heard."""
    missing = OUTSIDERS[name].lacks()
    if missing:
        return Opinion(name, why=f"{missing} is not installed: {OUTSIDERS[name].install}"), None
    begun = time.monotonic()
    try:
        logits, held = heard(name, model, prompt, tokens, seconds)
    except ConformanceError as e:
        return Opinion(name, why=str(e), seconds=time.monotonic() - begun), None
    return Opinion(name, seconds=time.monotonic() - begun, resident=held), logits
