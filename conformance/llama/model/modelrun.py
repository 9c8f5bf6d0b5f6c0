"""A model on one backend: its measurements, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from conformance.case.case import JSON
from conformance.ggml.errors import BackendError
from conformance.judge.evidence import Error, Place
from conformance.judge.verdict import FAILURES, Pair, Result, Verdict
from conformance.judge.wrong import Wrong
from conformance.run.failed import result_of_error

from .figures import Figures, Flip, number
from .llama_process import LogitsRow
from .references import SAME

RIGHT, ROUNDING, WRONG, NOT_RUN = "right", "rounding", "wrong", "not run"
"""Words for verdicts: a PASS is right or differs by rounding."""


@dataclass(slots=True)
class ModelRun:
    """Measurements of a model on one backend in one setting; `result` is made of them."""

    case: str
    backend: str
    setting: str = ""
    """The setting of the context; "" for llama.cpp's defaults."""
    verdict: Verdict | None = None
    """None until the backend is judged."""
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
    where: Place | None = None
    """The first wrong node, cache or output, in a step of the recorded graphs."""
    within: str = ""
    """Layer and step of `where`, in words."""
    layer: int | None = None
    error: Error | None = None
    """How the backend failed, or why it does not run the model."""
    how_wrong: Wrong | None = None
    used: float | None = None
    """Fraction of the tolerance that the logits, or the first wrong node, used."""
    cause: str = ""
    """Cause of the difference."""
    row: LogitsRow | None = None
    """The first wrong row of logits."""
    fresh: str = ""
    """Word for the same tokens as one prompt of a fresh context."""
    saved: str | None = None
    """File of the shrunk case."""
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    """Number of steps of the recorded graphs."""
    seconds: float = 0.0
    resident: int | None = None
    """Resident bytes of the backend's process after the run."""
    witness: dict[str, JSON] | None = None
    """Where llama.cpp computed its nodes, if it ran on a device."""

    @property
    def name(self) -> str:
        """The backend, and the setting if there is one."""
        return f"{self.backend} ({self.setting})" if self.setting else self.backend

    @property
    def is_wrong(self) -> bool:
        """True if its verdict is a failure."""
        return self.verdict in FAILURES

    @property
    def word(self) -> str:
        """The verdict in one of the words for people."""
        if self.is_wrong:
            return WRONG
        if self.verdict is not Verdict.PASS:
            return NOT_RUN
        f = self.figures
        return RIGHT if f is None or (f.kl_max <= SAME and f.agree.all()) else ROUNDING

    def fail(self, error: BackendError, at: str) -> None:
        """Take the failure of the backend; `at` is its step in words."""
        failed = result_of_error(Pair(self.case, self.backend), error)
        self.verdict, self.where, self.error = failed.verdict, failed.where, failed.error
        self.wrong = f"{at}{error}"

    def refuse(self, why: str) -> None:
        """Take the reason why the backend does not run the model."""
        self.verdict, self.wrong, self.error = Verdict.UNSUPPORTED, why, Error(why, why)

    def take(self, fresh: ModelRun, row: LogitsRow, at: str) -> None:
        """Take the failure of a fresh run of the same tokens, up to `row`; `at` says so."""
        self.verdict, self.cause, self.row, self.saved = fresh.verdict, fresh.cause, row, fresh.saved
        self.where, self.error, self.how_wrong, self.layer = fresh.where, fresh.error, fresh.how_wrong, fresh.layer
        self.used, self.within = fresh.used, ", ".join(filter(None, (at, fresh.within)))
        self.wrong = f"{at}: {fresh.wrong}"

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        if self.word == NOT_RUN:
            return f"not run: {self.wrong}"
        if self.word == WRONG:
            return f"wrong {self.wrong}"
        if self.word == RIGHT or self.figures is None:
            return "right"
        return f"differs by rounding: KL {self.figures.kl_max:.1g}, {self._changed()}"

    def _changed(self) -> str:
        if not self.flips:
            return "no greedy token changed"
        worst = max(self.flips, key=lambda f: f.margin)
        many = "1 greedy token" if len(self.flips) == 1 else f"{len(self.flips)} greedy tokens"
        return f"{many} changed at a margin of {worst.margin:.2g}, below the rounding of {worst.rounding:.2g}"

    def result(self) -> Result | None:
        """Return the result; None if the backend was not judged to the end."""
        if self.verdict is None:
            return None
        said = "" if self.error or self.word == RIGHT else self.sentence()
        if self.where is not None and self.where.numbers is not None:
            said = self.within
        f = self.figures
        return Result(
            self.case,
            self.backend,
            self.verdict,
            budget_used=self.used,
            nmse=float(f.nmse.max()) if f else None,
            seconds=self.seconds,
            steps=self.steps,
            witness=self.witness,
            where=self.where,
            error=self.error,
            wrong=self.how_wrong,
            saved=self.saved,
            notes=tuple(filter(None, (said, self.cause, *self.notes))),
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        f, r = self.figures, self.reading
        found: dict[str, float | None] = {"layer": self.layer, "flips": len(self.flips), "resident": self.resident}
        if f is not None:
            found |= {"kl_max": f.kl_max, "kl_mean": f.kl_mean, "top1": f.top1}
        if r is not None:
            found |= {"perplexity": self.perplexity, "text_kl_max": r.kl_max, "text_kl_mean": r.kl_mean,
                      "text_top1": r.top1}  # fmt: skip
        if self.row is not None:
            found |= self.row._asdict()
        return {k: float(v) for k, v in found.items() if v is not None and isfinite(v)}

    def to_json(self) -> dict[str, JSON]:
        """Return what a `Result` has no field for: tokens, flips, and the KL of each row."""
        f = self.figures
        return {
            "case": self.case,
            "backend": self.backend,
            "answer": self.sentence(),
            "fresh": self.fresh or None,
            "tokens": list(self.tokens),
            "flips": [
                {"row": p.row, "expected": p.expected, "found": p.found, "margin": number(p.margin),
                 "rounding": number(p.rounding)}
                for p in self.flips
            ],
            "kl_rows": [number(x) for x in f.kl.tolist()] if f else None,
        }  # fmt: skip
