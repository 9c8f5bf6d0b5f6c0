"""Checks a model on backends, against llama.cpp on its own CPU and against float64.

Two correct runs of one model differ: ggml rounds activations to blocks of 8 bits before a product, other devices do
not. The size of this difference is measured: the reference runs the same graphs in float64 and in the backend's
arithmetic. A correct backend may differ from llama.cpp by the difference of these two, plus llama.cpp's own difference
from float64. The backend cannot influence this allowance.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.backend.interface import Backend
from conformance.backend.registry import REFERENCE, Spec, resolve
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.judge.evidence import Fault, Place
from conformance.judge.judge import Judged, how_wrong
from conformance.judge.verdict import Verdict
from conformance.judge.wrong import Wrong
from conformance.llama.live.llama import GGML, Device
from conformance.llama.live.placement import witness
from conformance.process.memory import resident
from conformance.run.isolation.isolate import Isolation, Workers, open_backend
from conformance.run.locate import describe, sentence
from conformance.run.oracle import Oracle

from . import figures, graphs, locate
from .graphs import GraphOutputs, Say, silent
from .llama_process import Decoded, LlamaEndedError, LlamaProcess, alone
from .locate import Culprit, Inspected, LostOutput, Unplaced
from .modelrun import ROUNDING, ModelRun
from .recording import ModelRecording, layer_of
from .references import FLOAT32, References, worst

F32 = NDArray[np.float32]
LARGE = 1e-3
"""KL divergence above which the cause of a difference is stated."""
COPIED = 1 << 30
"""Maximum bytes of weights for a ggml device to run graphs node by node, too."""
AROUND = "each node alone is right there, so the fault is in llama.cpp around them (scheduler, placement or "
AROUND += "repacking of weights)"
ROUNDED = "the logits differ by rounding alone"
GROWN = "each step alone is right when it runs again: nondeterminism, or the error grows from step to step"


@dataclass(frozen=True, slots=True)
class Text:
    """A text for measuring perplexity: tokens, llama.cpp's results, and recorded graphs."""

    tokens: Sequence[int]
    decoded: Decoded
    case: Case

    @property
    def perplexity(self) -> float:
        """The perplexity of llama.cpp on its CPU."""
        return figures.perplexity(self.decoded.logits, self.tokens)


class InterruptedCheckError(KeyboardInterrupt):
    """Ctrl-C during a check; `run` has what is known."""

    def __init__(self, run: ModelRun) -> None:
        super().__init__()
        self.run = run


@dataclass(slots=True)
class ModelCheck:
    """One model, and the conversations that llama.cpp played on its CPU, to check backends by."""

    model: Path
    recording: ModelRecording
    device: Callable[[Spec], Device]
    """Return the device that llama.cpp uses for a spec of the adapter `ggml`."""
    isolation: Isolation = field(default_factory=Isolation)
    float64: float = 120.0
    """Seconds of processor time for the reference in each arithmetic."""
    text: Text | None = None
    folder: Path | None = None
    """Folder for the shrunk case of a wrong backend; None to save nothing."""
    budget: float = 60.0
    """Seconds of shrinking."""
    say: Say = silent
    oracle: Oracle = field(default_factory=Oracle)
    told: Say = silent
    """Prints a line before the answer is known."""
    references: References = field(init=False)

    def __post_init__(self) -> None:
        self.references = References(self.recording, self.float64, self.say, self.oracle)

    def close(self) -> None:
        """Close the reference."""
        self.references.close()

    def of(self, spec: Spec) -> ModelRun:
        """Check one backend; its failures are part of the run.

        UsageError or UnavailableError if the backend cannot be opened, InterruptedCheckError on Ctrl-C.
        """
        recording, begun = self.recording, time.monotonic()
        run = ModelRun(recording.id, str(spec), recording.setting.text, steps=len(recording.case.steps))
        with self._opened(spec) as backend:
            try:
                self._judge(spec, backend, run)
            except BackendError as e:
                run.fail(e, "" if e.step is None else f"in the {recording.words(e.step)}: ")
                run.row = None if e.step is None else recording.row_of(e.step)
            except KeyboardInterrupt:
                run.wrong = "interrupted"
                raise InterruptedCheckError(run) from None
        run.seconds = time.monotonic() - begun
        return run

    @contextmanager
    def _opened(self, spec: Spec) -> Iterator[Backend]:
        self.say(f"{spec}: opening it")
        with closing(open_backend(spec, Workers(self.isolation))) as backend:
            yield backend

    def _judge(self, spec: Spec, backend: Backend, run: ModelRun) -> None:
        say, case = self._saying(str(spec)), self.recording.case
        refused = self._refusal(backend)
        found = None
        if resolve(spec).name == GGML:
            logits = self._llama_logits(spec, run)
        elif refused:
            run.refuse(refused)
            return
        else:
            for found in graphs.steps(backend, case, say):
                if len(logits := found.logits(case)) and not run.figures:
                    run.figures = figures.measure(logits, self.recording.decoded.logits[: len(logits)])
                    self.told(f"{spec}: {run.figures.sentence()}")
            if self.text is not None:
                self._read(run, graphs.run(backend, self.text.case, say=say).logits(self.text.case))
            run.resident = resident(os.getpid())
        arithmetic, lost = backend.arithmetic_in(case), None
        hints = self._compare(run, logits, arithmetic)
        if why := self._not_by_nodes(spec, refused):
            run.notes.append(f"not judged node by node: {why}")
        else:
            hints, lost = self._by_nodes(spec, backend, run, found, hints)
        if run.is_wrong:
            return
        if hints:
            cause = lost.words if lost else AROUND if found is None and not refused else GROWN
            self._unplaced(run, min(hints), logits, cause, located=lost is None)
        else:
            self._conclude(run, logits, arithmetic)

    def _by_nodes(
        self, spec: Spec, backend: Backend, run: ModelRun, found: GraphOutputs | None, hints: Sequence[int]
    ) -> tuple[list[int], Unplaced | None]:
        """Judge a run by its chains of nodes, and every node of three steps alone.

        It puts the first wrong node into `run`, or notes nodes over budget if no output is wrong. `hints` are steps
        with wrong logits.

        Returns:
            Steps that are wrong for another reason than a near-tie of experts, and why no node is named although one is
            wrong.
        """
        say, case = self._saying(str(spec)), self.recording.case
        arithmetic = backend.arithmetic_in(case)
        reference = self.references.backend(arithmetic)
        over = self.references.over(found, arithmetic) if found else []
        is_same = not hints and found is not None and self.references.is_same(found, arithmetic)
        chained = [] if is_same else [j.step for j in over]
        wrong = sorted({*hints, *chained})
        steps = sorted({*self.recording.notable, len(case.steps) - 1})
        inspected = [(alone, alone.wrong(reference)) for alone in graphs.inspect(backend, case, steps, say=say)]
        if not wrong:
            run.notes += self._over(backend, reference, inspected, over)
            return [], None
        say("looking for the first wrong node")
        first = locate.first(backend, reference, case, inspected, partial(self._opened, spec), say)
        if first is None and found is not None and hints and not chained:
            run.notes.append(
                "some rows that were not computed in float64 differ more from llama.cpp; each step is right"
            )
            return [], None
        if first is None:
            return wrong, None
        run.notes += self._minor(first)
        if not isinstance(first, Culprit):
            return wrong, first
        if first.fault is None:
            run.notes.append(f"{first.words}; what follows is not judged")
            return [k for k in wrong if k < first.run.step], None
        self._name(spec, run, first)
        return wrong, None

    def _over(
        self, backend: Backend, reference: Backend, inspected: Sequence[Inspected], over: Sequence[Judged]
    ) -> list[str]:
        """Return a note on nodes, or outputs and caches, that are over budget with right logits."""
        found = [(run, judged) for run, wrong in inspected for judged in wrong]
        if not found:
            said = [f"{sentence(j, self.recording.case)}, {self.recording.words(j.step)}" for j in over[:1]]
            return [f"over its budget: {words}; {ROUNDED}" for words in said]
        run, judged = found[0]
        first = locate.alone(backend, reference, run, judged)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        which = self.recording.words(run.step)
        named = first.named if isinstance(first, LostOutput) else first.judged
        if named is None:
            return [f"{first.words}, {which}{more}"]
        return [f"over its budget: {sentence(named, run.case)}, {which}{more}; {ROUNDED}"]

    def _minor(self, first: Culprit | Unplaced) -> list[str]:
        """Return a note about nodes whose error is too small to explain the result."""
        if not first.minor:
            return []
        said, more = sentence(first.minor[0], first.run.case), len(first.minor) - 1
        said += f" (and {more} more)" if more else ""
        return [f"over its budget, by too little to explain the result: {said}"]

    def _read(self, run: ModelRun, logits: F32) -> None:
        """Store a backend's results for the text."""
        assert self.text is not None
        run.reading = figures.measure(logits, self.text.decoded.logits)
        run.perplexity = figures.perplexity(logits, self.text.tokens)

    def _saying(self, name: str) -> Say:
        return lambda text: self.say(f"{name}: {text}")

    def _refusal(self, backend: Backend) -> str:
        """Return why the backend does not run the graphs, or an empty text."""
        for k in self.recording.notable:
            step = self.recording.case.steps[k]
            for node, answer in zip(step.graph, backend.supports(step.graph), strict=True):
                if not answer:
                    return f"{node.op} {node.name} of the {self.recording.words(k)}: {answer.reason}"
        answer = backend.supports_case(self.recording.case)
        return "" if answer else answer.reason

    def _llama_logits(self, spec: Spec, run: ModelRun) -> F32:
        """Return the logits of llama.cpp on a device for the reference's tokens."""
        self.say(f"{spec}: decoding with llama.cpp")
        try:
            with closing(
                LlamaProcess(self.model, self.device(spec), time_limit=5 * self.isolation.time_limit)
            ) as llama:
                decoded = llama.play(self.recording.replayed, self.recording.setting)
                if self.text is not None:
                    self._read(run, llama.play(alone(self.text.tokens), every=True).logits)
        except LlamaEndedError as e:
            raise e.failure from None
        except ConformanceError as e:
            raise BackendError(str(e)) from None
        run.resident = decoded.resident
        run.witness = witness(self.device(spec).device, llama.placed)
        return decoded.logits

    def _not_by_nodes(self, spec: Spec, refused: str) -> str:
        """Return why nodes are not judged one by one, or an empty text."""
        if resolve(spec).name == REFERENCE:
            return "it is the reference itself"
        if refused:
            return f"it does not support {refused}"
        weights = sum(data.nbytes for data in self.recording.case.persistent.values())
        if resolve(spec).name == GGML and weights > COPIED:
            return f"its process would have a second copy of {weights >> 20} MiB of weights"
        return ""

    # -- the logits ------------------------------------------------------------------------------------------------

    def _compare(self, run: ModelRun, logits: F32, arithmetic: Arithmetic) -> list[int]:
        """Compare the logits with llama.cpp's; return the steps whose difference is not rounding.

        The reference computes the first step, and more if rows disagree beyond the rounding of these.
        """
        reference, choices, steps = self.recording.decoded.logits, self.recording.choices, self.recording.steps
        every = figures.measure(logits, reference)
        run.figures = figures.measure(logits[choices], reference[choices])
        run.tokens = [int(t) for t in logits[choices].argmax(1)]
        self.told(f"{run.backend}: {run.figures.sentence()}")
        worst_row = float(every.nmse.max())
        if every.agree.all() and worst_row <= FLOAT32:
            run.used = worst_row / FLOAT32
            return []
        upto, known = 0, -1
        while True:
            allowed = self.references.allowed(arithmetic, upto)
            flips = figures.flips(logits, reference, allowed.difference)
            over = {int(row) for row in np.flatnonzero(~(every.nmse <= allowed.nmse))}
            over |= {f.row for f in flips if not f.near}
            if not over or allowed.rows == known:
                break
            known = allowed.rows
            upto = min((steps[row] + 1 for row in over if row >= known), default=len(self.recording.case.steps))
        run.flips, run.used = [f for f in flips if f.row in choices], worst_row / allowed.nmse
        if over and known < len(reference):
            run.notes.append(
                f"computed in float64: {known} of {len(reference)} rows in {self.float64:g} s of processor time"
            )
        return sorted({steps[row] for row in over})

    def _conclude(self, run: ModelRun, logits: F32, arithmetic: Arithmetic) -> None:
        run.verdict = Verdict.PASS
        if run.figures is not None and run.word == ROUNDING and run.figures.kl_max > LARGE:
            exact, ours = (self.references.logits(a) for a in (EXACT, arithmetic))
            theirs = worst(figures.divergence, self.recording.decoded.logits, exact)
            mine = worst(figures.divergence, ours, logits)
            run.cause = (
                f"llama.cpp's CPU rounds activations before products: float64 on the same graphs differs from it by KL "
                f"{theirs:.1g}; this backend differs by KL {mine:.1g} from the reference that rounds as it declares "
                f"({arithmetic.name}), over {len(exact)} rows"
            )

    # -- where it is wrong -----------------------------------------------------------------------------------------

    def _name(self, spec: Spec, run: ModelRun, found: Culprit) -> None:
        """Name the first wrong node in the run, and shrink and save its case."""
        case, steps = found.run.case, len(self.recording.case.steps)
        graph = case.steps[0].graph
        run.layer = layer_of(found.node, graph)
        at = f"from layer {run.layer} on" if run.layer is not None else "outside the layers"
        which = self.recording.words(found.run.step)
        assert found.fault is not None
        where = describe(found.judged, case, found.fault)
        if found.node is not found.judged.tensor and found.node in graph.nodes:  # of a cache the node that writes it
            where = replace(where, node=graph.nodes.index(found.node), op=found.node.op)
        run.verdict, run.row = Verdict.FAIL, self.recording.row_of(found.run.step)
        run.where = replace(where, step=found.run.step, steps=steps)
        run.how_wrong, run.used = how_wrong([found.judged]), found.judged.used
        run.wrong, run.within = f"{at}: {sentence(found.judged, case)}, {which}", f"{at}, {which}"
        run.cause = found.words
        if self.folder is not None:
            saved = locate.save(
                spec, found, self.recording.case, self.folder, self.isolation, self.budget, self._saying(str(spec))
            )
            run.saved = str(saved.path)
            run.notes.append(saved.words)

    def _unplaced(self, run: ModelRun, step: int, logits: F32, cause: str, *, located: bool) -> None:
        """Report wrong logits although no node is wrong, or although none can be `located`."""
        recording = self.recording
        rows = [r for r, k in enumerate(recording.steps) if k == step]
        nmse = max(figures.nmse(logits[r], recording.decoded.logits[r]) for r in rows)
        kl = max(figures.divergence(logits[r], recording.decoded.logits[r]) for r in rows)
        run.verdict, run.row = Verdict.FAIL, recording.row_of(step)
        run.wrong = f"in the logits: NMSE {nmse:.2g}, KL {kl:.2g}, {recording.words(step)}"
        run.wrong += "" if located else "; cannot locate the node"
        run.cause = cause
        run.where = Place(Fault.GRAPH, step, name=graphs.LOGITS, steps=len(recording.case.steps))
        run.how_wrong = Wrong("not finite" if nmse == float("inf") else "numbers", nmse)
