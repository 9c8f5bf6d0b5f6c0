"""Checks a model on backends, against llama.cpp on its own CPU and against float64.

Two correct runs of one model differ: ggml rounds activations to blocks of 8 bits before a product, other devices do
not. The size of this difference is measured: the reference runs the same graphs in float64 and in the backend's
arithmetic. A correct backend may differ from llama.cpp by the difference of these two, plus llama.cpp's own difference
from float64. The backend cannot influence this allowance.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.backend.interface import Backend
from conformance.backend.registry import REFERENCE, Spec, resolve
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor
from conformance.judge.evidence import to_json
from conformance.judge.judge import Judged
from conformance.llama.live.llama import Device
from conformance.process.memory import resident
from conformance.run.isolation.isolate import Isolation, Workers, open_backend
from conformance.run.locate import describe, sentence
from conformance.run.oracle import Oracle

from . import figures, graphs, locate
from .answer import LARGE, NOT_RUN, RIGHT, ROUNDING, SAME, WRONG, Answer
from .graphs import Say, Trajectory, silent
from .llama_process import PLAIN, Decoded, LlamaProcess, Place, Setting, Talk, alone
from .locate import Found, Inspected, Lost, Unplaced

F32 = NDArray[np.float32]
FACTOR = 4.0
"""Factor on the reference's own NMSE, because another run rounds differently."""
FLOAT32 = 1e-9
"""NMSE of logits that another summation order causes over a whole model."""
GGML = "ggml"
"""The adapter whose libraries run llama.cpp."""
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
    """Ctrl-C during a check; `answer` has what is known."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


@dataclass(slots=True)
class Float64:
    """A run of the reference, which goes on as far as it is needed."""

    arithmetic: Arithmetic
    steps: Iterator[Trajectory]
    ran: Trajectory = field(default_factory=Trajectory)
    seconds: float = 0.0
    """Processor time so far."""


@dataclass(slots=True)
class Check:
    """One model, one conversation, and their results from llama.cpp on its CPU."""

    model: Path
    case: Case
    """The recorded graphs."""
    talk: Talk
    """The prompt, or the conversations."""
    reference: Decoded
    device: Callable[[Spec], Device]
    """Return the device that llama.cpp uses for a spec of the adapter `ggml`."""
    isolation: Isolation = field(default_factory=Isolation)
    setting: Setting = PLAIN
    float64: float = 120.0
    """Seconds of processor time for the reference in each arithmetic.

    Rows beyond it are judged by the rounding of earlier rows."""
    text: Text | None = None
    folder: Path | None = None
    """Folder for the shrunk case of a wrong backend; None to save nothing."""
    budget: float = 60.0
    """Seconds of shrinking."""
    say: Say = silent
    oracle: Oracle = field(default_factory=Oracle)
    told: Say = silent
    """Prints a line before the answer is known."""
    _float64: list[Float64] = field(default_factory=list)

    @property
    def choices(self) -> list[int]:
        """The rows of logits by which a token is chosen."""
        return [row for row, place in enumerate(self.reference.places) if place.token >= 0]

    def place(self, k: int) -> Place:
        """Return the first slot's last place in step `k`, or in the next step that has any."""
        steps = self._steps()
        at = min(step for step in steps if step >= k)
        here = [p for p, step in zip(self.reference.places, steps, strict=True) if step == at]
        return [p for p in here if p.slot == here[0].slot][-1]

    def last(self, answer: Answer) -> Place:
        """Return the first wrong place of an answer, or the last place of the first slot."""
        return answer.place or [p for p in self.reference.places if p.slot == 0][-1]

    def words(self, k: int) -> str:
        """Format the place of step `k`, counted from 0."""
        steps, places = self._steps(), self.reference.places
        here = [p for p, step in zip(places, steps, strict=True) if step == k]
        if [len(turns) for turns in self.talk] == [1]:
            return step_words(k, prompt=any(p.token <= 0 for p in here))
        if not here:  # it only moves positions
            return f"the shift before {self.words(k + 1)}"
        last = {p.slot: p for p in here}
        return " and ".join(place_words(p, len(self.talk)) for p in last.values())

    @property
    def replayed(self) -> Talk:
        """The conversations with llama.cpp's answers."""
        return [
            [replace(turn, forced=answer) for turn, answer in zip(turns, answers, strict=True)]
            for turns, answers in zip(self.talk, self.reference.answers, strict=True)
        ]

    def close(self) -> None:
        """Close the reference."""
        self.oracle.close()

    def of(self, spec: Spec) -> Answer:
        """Check one backend; its failures are part of the answer.

        UsageError or UnavailableError if the backend cannot be opened, InterruptedCheckError on Ctrl-C.
        """
        answer, begun = Answer(str(spec), self.setting.text), time.monotonic()
        with self._opened(spec) as backend:
            try:
                self._judge(spec, backend, answer)
            except BackendError as e:
                at = "" if e.step is None else f"in the {self.words(e.step)}: "
                answer.verdict, answer.wrong = WRONG, f"{at}{e}"
                answer.place = None if e.step is None else self.place(e.step)
                answer.first_divergence = {"kind": "error", "step": e.step}
            except KeyboardInterrupt:
                answer.wrong = "interrupted"
                raise InterruptedCheckError(answer) from None
        answer.seconds = time.monotonic() - begun
        return answer

    @contextmanager
    def _opened(self, spec: Spec) -> Iterator[Backend]:
        self.say(f"{spec}: opening it")
        with closing(open_backend(spec, Workers(self.isolation))) as backend:
            yield backend

    def _judge(self, spec: Spec, backend: Backend, answer: Answer) -> None:
        say = self._saying(str(spec))
        refused = self._refusal(backend)
        found = None
        if resolve(spec).name == GGML:
            logits = self._llama_logits(spec, answer)
        elif refused:
            answer.verdict, answer.wrong = NOT_RUN, refused
            return
        else:
            for found in graphs.steps(backend, self.case, say):
                if len(logits := found.logits(self.case)) and not answer.figures:
                    answer.figures = figures.measure(logits, self.reference.logits[: len(logits)])
                    self.told(f"{spec}: {answer.figures.sentence()}")
            if self.text is not None:
                self._read(answer, graphs.run(backend, self.text.case, say=say).logits(self.text.case))
            answer.resident = resident(os.getpid())
        arithmetic, lost = backend.arithmetic_in(self.case), None
        hints = self._compare(answer, logits, arithmetic)
        if why := self._not_by_nodes(spec, refused):
            answer.notes.append(f"not judged node by node: {why}")
        else:
            hints, lost = self._by_nodes(spec, backend, answer, found, hints)
        if answer.verdict == WRONG:
            return
        if hints:
            cause = lost.words if lost else AROUND if found is None and not refused else GROWN
            self._unplaced(answer, min(hints), logits, cause, located=lost is None)
        else:
            self._conclude(answer, logits, arithmetic)

    def _by_nodes(
        self, spec: Spec, backend: Backend, answer: Answer, found: Trajectory | None, hints: Sequence[int]
    ) -> tuple[list[int], Unplaced | None]:
        """Judge a run by its chains of nodes, and every node of three steps alone.

        It puts the first wrong node into `answer`, or notes nodes over budget if no output is wrong. `hints` are steps
        with wrong logits.

        Returns:
            Steps that are wrong for another reason than a near-tie of experts, and why no node is named although one is
            wrong.
        """
        say, last = self._saying(str(spec)), len(self.case.steps) - 1
        arithmetic = backend.arithmetic_in(self.case)
        reference = self.oracle.reference_in(arithmetic)
        over = self._by_chain(found, arithmetic) if found else []
        chained = [] if not hints and found and self._same(found, arithmetic) else [j.step for j in over]
        wrong = sorted({*hints, *chained})
        steps = sorted({*self._notable(), last})
        inspected = [(run, run.wrong(reference)) for run in graphs.inspect(backend, self.case, steps, say=say)]
        if not wrong:
            answer.notes += self._over(backend, reference, inspected, over)
            return [], None
        say("looking for the first wrong node")
        first = locate.first(backend, reference, self.case, inspected, partial(self._opened, spec), say)
        if first is None and found is not None and hints and not chained:
            answer.notes.append(
                "some rows that were not computed in float64 differ more from llama.cpp; each step is right"
            )
            return [], None
        if first is None:
            return wrong, None
        answer.notes += self._minor(first)
        if not isinstance(first, Found):
            return wrong, first
        if first.fault is None:
            answer.notes.append(f"{first.words}; what follows is not judged")
            return [k for k in wrong if k < first.run.step], None
        self._name(spec, answer, first)
        return wrong, None

    def _over(
        self, backend: Backend, reference: Backend, inspected: Sequence[Inspected], over: Sequence[Judged]
    ) -> list[str]:
        """Return a note on nodes, or outputs and caches, that are over budget with right logits."""
        found = [(run, judged) for run, wrong in inspected for judged in wrong]
        if not found:
            said = [f"{sentence(j, self.case)}, {self.words(j.step)}" for j in over[:1]]
            return [f"over its budget: {words}; {ROUNDED}" for words in said]
        run, judged = found[0]
        first = locate.alone(backend, reference, run, judged)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        which = self.words(run.step)
        named = first.named if isinstance(first, Lost) else first.judged
        if named is None:
            return [f"{first.words}, {which}{more}"]
        return [f"over its budget: {sentence(named, run.case)}, {which}{more}; {ROUNDED}"]

    def _minor(self, first: Found | Unplaced) -> list[str]:
        """Return a note about nodes whose error is too small to explain the result."""
        if not first.minor:
            return []
        said, more = sentence(first.minor[0], first.run.case), len(first.minor) - 1
        said += f" (and {more} more)" if more else ""
        return [f"over its budget, by too little to explain the result: {said}"]

    def _read(self, answer: Answer, logits: F32) -> None:
        """Store a backend's results for the text."""
        assert self.text is not None
        answer.reading = figures.measure(logits, self.text.decoded.logits)
        answer.perplexity = figures.perplexity(logits, self.text.tokens)

    def _saying(self, name: str) -> Say:
        return lambda text: self.say(f"{name}: {text}")

    def _refusal(self, backend: Backend) -> str:
        """Return why the backend does not run the graphs, or an empty text."""
        for k in self._notable():
            step = self.case.steps[k]
            for node, answer in zip(step.graph, backend.supports(step.graph), strict=True):
                if not answer:
                    return f"{node.op} {node.name} of the {self.words(k)}: {answer.reason}"
        answer = backend.supports_case(self.case)
        return "" if answer else answer.reason

    def _llama_logits(self, spec: Spec, answer: Answer) -> F32:
        """Return the logits of llama.cpp on a device for the reference's tokens."""
        self.say(f"{spec}: decoding with llama.cpp")
        try:
            with closing(
                LlamaProcess(self.model, self.device(spec), time_limit=5 * self.isolation.time_limit)
            ) as llama:
                decoded = llama.play(self.replayed, self.setting)
                if self.text is not None:
                    self._read(answer, llama.play(alone(self.text.tokens), every=True).logits)
        except ConformanceError as e:
            raise BackendError(str(e)) from None
        answer.resident = decoded.resident
        return decoded.logits

    def _not_by_nodes(self, spec: Spec, refused: str) -> str:
        """Return why nodes are not judged one by one, or an empty text."""
        if resolve(spec).name == REFERENCE:
            return "it is the reference itself"
        if refused:
            return f"it does not support {refused}"
        weights = sum(data.nbytes for data in self.case.persistent.values())
        if resolve(spec).name == GGML and weights > COPIED:
            return f"its process would have a second copy of {weights >> 20} MiB of weights"
        return ""

    # -- the logits ------------------------------------------------------------------------------------------------

    def trajectory(self, arithmetic: Arithmetic, upto: int = 0) -> Trajectory:
        """Run the reference up to the first logits, and for `upto` steps if the time allows."""
        own = next((own for own in self._float64 if own.arithmetic == arithmetic), None)
        if own is None:
            say = self._saying(f"float64, rounding as {arithmetic.name}")
            steps = graphs.steps(self.oracle.reference_in(arithmetic), self.case, say)
            self._float64.append(own := Float64(arithmetic, steps))
        begun, first = time.process_time(), self._steps()[0] + 1
        while len(own.ran.outputs) < max(first, upto) and (len(own.ran.outputs) < first or own.seconds < self.float64):
            own.ran = next(own.steps)
            own.seconds += time.process_time() - begun
            begun = time.process_time()
        return own.ran

    def _compare(self, answer: Answer, logits: F32, arithmetic: Arithmetic) -> list[int]:
        """Compare the logits with llama.cpp's; return the steps whose difference is not rounding.

        The reference computes the first step, and more if rows disagree beyond the rounding of these.
        """
        reference = self.reference.logits
        every = figures.measure(logits, reference)
        answer.figures = figures.measure(logits[self.choices], reference[self.choices])
        answer.tokens = [int(t) for t in logits[self.choices].argmax(1)]
        self.told(f"{answer.backend}: {answer.figures.sentence()}")
        if every.agree.all() and every.nmse.max() <= FLOAT32:
            return []
        steps, upto, known = self._steps(), 0, -1
        while True:
            exact, own = (self.trajectory(a, upto).logits(self.case) for a in (EXACT, arithmetic))
            pairs = (exact, own), (exact, reference)
            flips = figures.flips(logits, reference, rounding(*pairs))
            over = {int(row) for row in np.flatnonzero(~(every.nmse <= allowance(*pairs)))}
            over |= {f.row for f in flips if not f.near}
            if not over or min(len(exact), len(own)) == known:
                break
            known = min(len(exact), len(own))
            upto = min((steps[row] + 1 for row in over if row >= known), default=len(self.case.steps))
        answer.flips = [f for f in flips if f.row in self.choices]
        if over and known < len(reference):
            answer.notes.append(
                f"computed in float64: {known} of {len(reference)} rows in {self.float64:g} s of processor time"
            )
        return sorted({steps[row] for row in over})

    def _steps(self) -> list[int]:
        """Return the step of each row of logits."""
        return [k for k, s in enumerate(self.case.steps) for _ in range(graphs.rows_of(s))]

    def _notable(self) -> list[int]:
        """Return the first step of the first two prompts and of their answers."""
        first: dict[tuple[int, bool], int] = {}
        for place, k in zip(self.reference.places, self._steps(), strict=True):
            if place.turn < 2 and place.token <= 1:
                first.setdefault((place.turn, place.token > 0), k)
        return sorted({0, *first.values()})

    def _by_chain(self, found: Trajectory, arithmetic: Arithmetic) -> list[Judged]:
        """Return outputs and final caches whose error exceeds the budget of their chain."""
        judged = graphs.judge(self.case, found, self.trajectory(arithmetic), arithmetic)
        return [j for j in judged if j.used > 1]

    def _same(self, found: Trajectory, arithmetic: Arithmetic) -> bool:
        """Return True if the distributions equal those of the reference in the backend's arithmetic."""
        mine, reference = found.logits(self.case), self.trajectory(arithmetic).logits(self.case)
        return worst(figures.divergence, mine, reference) <= SAME

    def _conclude(self, answer: Answer, logits: F32, arithmetic: Arithmetic) -> None:
        f = answer.figures
        assert f is not None
        answer.verdict = RIGHT if f.kl_max <= SAME and f.agree.all() else ROUNDING
        if f.kl_max > LARGE:
            exact, ours = (self.trajectory(a).logits(self.case) for a in (EXACT, arithmetic))
            n, reference = len(exact), self.reference.logits
            theirs = worst(figures.divergence, reference, exact)
            mine = worst(figures.divergence, ours, logits)
            answer.cause = (
                f"llama.cpp's CPU rounds activations before products: float64 on the same graphs differs from it by KL "
                f"{theirs:.1g}; this backend differs by KL {mine:.1g} from the reference that rounds as it declares "
                f"({arithmetic.name}), over {n} rows"
            )

    # -- where it is wrong -----------------------------------------------------------------------------------------

    def _name(self, spec: Spec, answer: Answer, found: Found) -> None:
        """Name the first wrong node in the answer, and shrink and save its case."""
        case, t = found.run.case, found.judged.tensor
        graph = case.steps[0].graph
        layer = layer_of(found.node, graph)
        at = f"from layer {layer} on: " if layer is not None else "outside the layers: "
        which = self.words(found.run.step)
        numbers = describe(found.judged, case).numbers
        assert numbers is not None
        answer.verdict, answer.place = WRONG, self.place(found.run.step)
        answer.wrong = f"{at}{sentence(found.judged, case)}, {which}"
        answer.cause = found.words
        answer.first_divergence = {
            "kind": str(found.fault), **to_json(numbers), "step": found.run.step, "layer": layer,
            "node": graph.nodes.index(found.node) if found.node in graph.nodes else None,
            "op": found.node.op, "name": found.node.name or t.name,
        }  # fmt: skip
        if self.folder is not None:
            saved = locate.save(
                spec, found, self.case, self.folder, self.isolation, self.budget, self._saying(str(spec))
            )
            answer.saved = str(saved.path)
            answer.notes.append(saved.words)

    def _unplaced(self, answer: Answer, step: int, logits: F32, cause: str, *, located: bool) -> None:
        """Report wrong logits although no node is wrong, or although none can be `located`."""
        rows = [r for r, k in enumerate(self._steps()) if k == step]
        nmse = max(figures.nmse(logits[r], self.reference.logits[r]) for r in rows)
        kl = max(figures.divergence(logits[r], self.reference.logits[r]) for r in rows)
        answer.verdict, answer.place = WRONG, self.place(step)
        answer.wrong = f"in the logits: NMSE {nmse:.2g}, KL {kl:.2g}, {self.words(step)}"
        answer.wrong += "" if located else "; cannot locate the node"
        answer.cause = cause
        answer.first_divergence = {"kind": "graph", "step": step, "layer": None, "name": graphs.LOGITS, "nmse": nmse}


Pair = tuple[F32, F32]
"""Logits of two correct runs, `[rows, n_vocab]`; one may have fewer rows."""


def worst(apart: Callable[[F32, F32], float], one: F32, other: F32) -> float:
    """Return the largest distance between corresponding rows, as measured by `apart`."""
    return max(apart(a, b) for a, b in zip(other, one, strict=False))


def allowance(own: Pair, theirs: Pair) -> float:
    """Return the allowed NMSE of logits: the roundings of both sides, added as roots.

    `own` is the reference in float64 and in the backend's arithmetic, `theirs` is float64 and llama.cpp.
    """
    return max(FLOAT32, sum(sqrt(FACTOR * worst(figures.nmse, *pair)) for pair in (own, theirs)) ** 2)


def rounding(own: Pair, theirs: Pair) -> float:
    """Return how much rounding may change a difference of two logits (see `allowance`)."""
    return 2 * sum(worst(figures.apart, *pair) for pair in (own, theirs))


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


def place_words(place: Place, n_slots: int) -> str:
    """Format a place in one of several conversations, or turns."""
    slot = f"slot {place.slot + 1}, " if n_slots > 1 else ""
    return f"{slot}turn {place.turn + 1}, {f'token {place.token}' if place.token > 0 else 'the prompt'}"
