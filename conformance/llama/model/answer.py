"""The verdict on one backend: right, differs by rounding, or wrong and where."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.case.case import JSON

from .figures import Figures, Flip
from .llama_process import Place

RIGHT, ROUNDING, WRONG, NOT_RUN = "right", "rounding", "wrong", "not run"
"""Verdicts."""
SAME = 1e-6
"""Maximum KL divergence in nats of equal distributions: above float32 rounding."""
LARGE = 1e-3
"""KL divergence above which the cause of a difference is stated."""


@dataclass(slots=True)
class Answer:
    """The verdict on one backend with its measurements."""

    backend: str
    setting: str = ""
    """The setting of the context; "" for llama.cpp's defaults."""
    verdict: str = NOT_RUN
    figures: Figures | None = None
    """Comparison with llama.cpp on its CPU."""
    tokens: list[int] = field(default_factory=list)
    """The backend's most likely token after each of the reference's tokens."""
    flips: list[Flip] = field(default_factory=list)
    reading: Figures | None = None
    """Comparison with llama.cpp on its CPU for a given text; it is not judged."""
    perplexity: float | None = None
    """The perplexity of that text."""
    wrong: str = ""
    """Description of the first wrong result, or the reason why the model was not run."""
    cause: str = ""
    """Cause of the difference."""
    first_divergence: dict[str, JSON] | None = None
    place: Place | None = None
    """The first wrong place."""
    fresh: str = ""
    """Verdict on the same tokens as one prompt of a fresh context."""
    saved: str = ""
    """File of the shrunk case."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    resident: int | None = None
    """Resident bytes of the backend's process after the run."""

    @property
    def name(self) -> str:
        """The backend, and the setting if there is one."""
        return f"{self.backend} ({self.setting})" if self.setting else self.backend

    def summary(self) -> dict[str, JSON]:
        """Return the answer to one setting in short."""
        f = self.figures
        return {"setting": self.setting, "answer": self.sentence(), "kl_max": number(f.kl_max) if f else None}

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        if self.verdict == NOT_RUN:
            return f"not run: {self.wrong}"
        if self.verdict == WRONG:
            return f"wrong {self.wrong}"
        if self.verdict == RIGHT or self.figures is None:
            return "right"
        return f"differs by rounding: KL {self.figures.kl_max:.1g}, {self._changed()}"

    def _changed(self) -> str:
        if not self.flips:
            return "no greedy token changed"
        worst = max(self.flips, key=lambda f: f.margin)
        many = "1 greedy token" if len(self.flips) == 1 else f"{len(self.flips)} greedy tokens"
        return f"{many} changed at a margin of {worst.margin:.2g}, below the rounding of {worst.rounding:.2g}"

    def to_json(self) -> dict[str, JSON]:
        """Return the fields of the record; NaN and infinity become null."""
        f, r = self.figures, self.reading
        return {
            "answer": self.sentence(),
            "verdict": self.verdict,
            "kl": {"max": number(f.kl_max), "mean": number(f.kl_mean)} if f else None,
            "top1": f.top1 if f else None,
            "greedy_equal": bool(f.agree.all()) if f else None,
            "first_divergence": self.first_divergence,
            "setting": self.setting,
            "place": self.place._asdict() if self.place else None,
            "fresh": self.fresh or None,
            "cause": self.cause or None,
            "tokens": list(self.tokens),
            "flips": [
                {"row": p.row, "expected": p.expected, "found": p.found, "margin": number(p.margin),
                 "rounding": number(p.rounding)}
                for p in self.flips
            ],
            "kl_rows": [number(x) for x in f.kl.tolist()] if f else None,
            "perplexity": None if r is None or self.perplexity is None else {
                "value": number(self.perplexity), "kl": {"max": number(r.kl_max), "mean": number(r.kl_mean)},
                "top1": r.top1,
            },
            "case": self.saved or None,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "resident_bytes": self.resident,
        }  # fmt: skip


def number(x: float) -> float | None:
    """Return `x`, or None if it is NaN or infinite, which JSON cannot express."""
    return x if abs(x) < float("inf") else None
