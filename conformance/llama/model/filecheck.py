"""Checks the file of a model: each tensor, key or graph of it is a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from conformance.backend.registry import REFERENCE, Spec
from conformance.ggml.text import printable
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.run.failed import unsupported
from conformance.run.isolation.isolate import open_backend

from . import adapter, against, figures, layers, plausible
from .figures import Figures
from .finding import Finding
from .graphs import Say
from .layers import Files
from .llama_process import LlamaProcess, Setting, alone
from .modelcase import LAYERS, ModelCase
from .modelfile import ModelFile

Load = Callable[[Path], LlamaProcess]
"""Starts llama.cpp with a model; UsageError if it cannot load it."""


def of_headers(a: ModelFile, b: ModelFile | None) -> Iterator[Finding]:
    """Yield findings about layout, metadata and tokenizer; also differences from `b`.

    `b` may be the model of an adapter.
    """
    alone = chain(plausible.header(a), adapter.header(a))
    if b and adapter.is_adapter(a) > adapter.is_adapter(b):
        return chain(alone, adapter.against(a, b))
    return chain(alone, against.header(a, b) if b else ())


def of_values(a: ModelFile, b: ModelFile | None, say: Say) -> Iterator[Finding]:
    """Yield findings about the values of each tensor; also differences from `b`."""
    comparable = b and adapter.is_adapter(a) == adapter.is_adapter(b)
    return chain(against.tensors(a, b, say) if b and comparable else (), plausible.values(a, say))


@dataclass(frozen=True, slots=True)
class PromptCompared:
    """A prompt that llama.cpp decoded with two files of a model."""

    tokens: Sequence[int]
    logits: Figures | None
    """None if the files differ in the size of the vocabulary."""
    found: Finding | None
    """The first node that differs by more than the types of the files cost."""

    def result(self, case: ModelCase) -> Result:
        """Return the result of `at=layers`."""
        kl = {"kl_max": self.logits.kl_max, "kl_mean": self.logits.kl_mean, "top1": self.logits.top1} if (
            self.logits) else {}  # fmt: skip
        made = result(case, LAYERS, [self.found] if self.found else [])
        return replace(made, metrics={**made.metrics, **{k: v for k, v in kl.items() if figures.number(v) is not None}})


def by_layers(
    files: Files, load: Load, prompt: Callable[[LlamaProcess], Sequence[int]], setting: Setting, say: Say, told: Say
) -> PromptCompared:
    """Decode a prompt with two files, and compare node by node.

    `told` gets the difference of the logits in words.

    ConformanceError if llama.cpp refuses a file, or the graphs cannot be computed.
    """
    with ExitStack() as opened:
        both = [opened.enter_context(closing(load(file.path))) for file in (files.b, files.a)]
        asked = prompt(both[0])
        (expected, right), (decoded, case) = [llama.record(alone(asked), setting, every=True) for llama in both]
        logits = None
        if decoded.logits.shape == expected.logits.shape:
            logits = figures.measure(decoded.logits, expected.logits)
            told(logits.sentence())
        reference = opened.enter_context(closing(open_backend(Spec(REFERENCE))))
        return PromptCompared(asked, logits, layers.first(files, case, right, reference, say))


def results(case: ModelCase, file: ModelFile, findings: Sequence[Finding]) -> list[Result]:
    """Return a result for each tensor of the file, and for whatever else has a finding."""
    found: dict[str, list[Finding]] = {name: [] for name in file.tensors}
    for f in findings:
        found.setdefault(f.where, []).append(f)
    unreadable = file.tensors.keys() - {t.name for t in file.readable()}
    return [
        unread(case, name) if name in unreadable and not own else result(case, name, own) for name, own in found.items()
    ]


def result(case: ModelCase, name: str, findings: Iterable[Finding]) -> Result:
    """Return the result for a tensor, a key or the graph: a PASS unless a finding is wrong.

    Its backend is the reference, which reads the files.
    """
    pair = pair_of(case, name)
    ordered = sorted(findings, key=lambda f: f.rank)
    wrong = [f for f in ordered if f.wrong]
    notes = tuple(f"unusual, {f.sentence()}" for f in ordered if not f.wrong)
    if not wrong:
        return Result(*pair, Verdict.PASS, notes=notes)
    first, said = wrong[0], "; ".join(f.sentence() for f in wrong)
    return Result(
        *pair, Verdict.FAIL, budget_used=first.excess, where=first.place, error=Error(said, first.kind.value),
        notes=notes, metrics=first.metrics,
    )  # fmt: skip


def unread(case: ModelCase, name: str) -> Result:
    """Return the result of a tensor whose values are not in the file, or of an unknown type."""
    return unsupported(
        pair_of(case, name), Error(f"{printable(name)}: its values cannot be read", "its values cannot be read")
    )


def refused(case: ModelCase, why: str) -> Result:
    """Return the result of `at=layers` if a file is refused."""
    return unsupported(pair_of(case, LAYERS), Error(why, why))


def pair_of(case: ModelCase, name: str) -> Pair:
    """Return the pair of a tensor, a key or the graph of a case's file."""
    asked = case if name == LAYERS else replace(case, tokens=(), prompt=None)
    return Pair(replace(asked, at=name, answer=(), turns=None, setting="").id, REFERENCE)
