"""llama.cpp itself on the devices of two builds: models of every architecture, made up. A run of one is a result, and,
of a few architectures, every verb.

A device other than the CPU is judged by the CPU of its own library. A CPU is judged by the CPU of the llama.cpp that is
installed here, so that a fault in what all of a build's devices share is seen as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from conformance.backend.registry import Spec
from conformance.causes.cause import Cause
from conformance.judge.old import error_of
from conformance.judge.verdict import Result, Verdict
from conformance.run.signature import innermost
from conformance.suite.zoo.model import runnable
from conformance.suite.zoo.play import RUNS, Device, Played, play
from conformance.suite.zoo.verbs.play import play_verbs
from conformance.suite.zoo.verbs.table import VERBS

from .target import CPU, Target
from .work import alike

STAGE = "zoo"
KEYS = "real=1,run=p5.d4"
"""Of every model: as model files are, five tokens and four steps."""
VERB_ARCHITECTURES = ("llama", "jamba", "mamba", "bert")
"""Those that play verbs, before all others: a cache, a cache beside states, states, none."""
_VERDICTS = {"ERROR": Verdict.OVERCLAIM, "NO REFERENCE": Verdict.UNSUPPORTED}
"""What a cell says -> the verdict of its result, where the two differ."""


@dataclass(frozen=True, slots=True)
class Models:
    """Whole models, of which a case is an architecture and a run or verb, `zoo/ARCHITECTURE-…@1 RUN`."""

    device: Callable[[Spec], Device]
    """Where llama.cpp runs for a backend."""
    time_limit: float = 60.0
    """Seconds of one run."""

    def play(self, spec: Spec, arch: str, names: Iterable[str] | None = None) -> list[Result]:
        """A result for each run and verb of `names`; left out, every run, and every verb where they are played."""
        if names is None:
            names = [*RUNS, *(VERBS if arch in VERB_ARCHITECTURES else ())]
        device = self.device(spec)
        on_cpu = device.device in ("", CPU)
        case_id = f"zoo/{arch}-{KEYS}@1"
        runs = {name: RUNS[name] for name in names if name in RUNS}
        verbs = [name for name in names if name in VERBS]
        played = play(case_id, [replace(device, judge="" if on_cpu else None)], runs, self.time_limit) if runs else {}
        played.update(play_verbs(case_id, [device], verbs, self.time_limit) if verbs else {})
        return [_result(f"{case_id} {run}", spec, p) for (_, run), p in played.items()]

    def find(self, results: Sequence[Result], _seconds: float) -> list[Cause]:
        """A cause for each way in which runs fail: the verdict, and the innermost message without numbers; of wrong
        numbers in a verb its name.
        """
        return alike(STAGE, results, _message, _words)

    def again(self, spec: Spec, case_id: str) -> Result:
        """The run of a case, played again."""
        model, _, run = case_id.partition(" ")
        (result,) = self.play(spec, model.removeprefix("zoo/").partition(f"-{KEYS}@")[0], [run])
        return result


@dataclass(slots=True)
class Zoo:
    """The architectures on one target."""

    target: Target
    models: Models
    left: list[str] = field(default_factory=lambda: list(dict.fromkeys((*VERB_ARCHITECTURES, *runnable()))))
    """Architectures that did not run yet, in order."""
    results: dict[Spec, list[Result]] = field(default_factory=dict)
    hung: dict[str, list[str]] = field(default_factory=dict)
    stage: ClassVar[str] = STAGE

    @property
    def kind(self) -> Models:
        """What finds the causes of its failures."""
        return self.models

    def run(self, _: object, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Run what is left, for so long; the architecture that is under way then is brought to its end."""
        end = clock() + seconds
        while self.left and clock() < end:
            for spec in self.target.specs:
                self.results.setdefault(spec, []).extend(self.models.play(spec, self.left[0]))
            del self.left[0]


def _result(case: str, spec: Spec, played: Played) -> Result:
    verdict = _VERDICTS.get(played.verdict) or Verdict(played.verdict)
    return Result(case, str(spec), verdict, nmse=played.nmse, error=error_of(played.detail) if played.detail else None)


def _message(r: Result) -> str:
    """What failing runs must share to have one cause."""
    name, said = r.case.partition(" ")[2], "" if r.error is None else innermost(r.error)
    if r.verdict in (Verdict.FAIL, Verdict.VACUOUS):
        return f"verb {name}" if name in VERBS else "" if r.verdict is Verdict.FAIL else said
    return said


def _words(verdict: Verdict, message: str, rows: Sequence[Result]) -> tuple[str, dict[str, int]]:
    architectures = {r.case.partition("-")[0] for r in rows}
    wrong = f"wrong logits in {message}" if message else "wrong logits"
    how = wrong if verdict is Verdict.FAIL else f"{verdict}: {message}"
    n = len(architectures)
    sentence = f"llama.cpp decodes {n} architecture{'s' if n > 1 else ''}: {how} ({len(rows)} runs fail)"
    return sentence, {"architectures": n, "failed": len(rows)}
