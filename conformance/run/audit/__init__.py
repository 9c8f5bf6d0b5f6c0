"""Placement audit: compares a backend's answer for each use of each weight in each buffer type with a run.

llama.cpp decides where a weight lies when it loads it, by asking about one activation that it makes up; the graphs come
later. So a yes must hold for every node of a trajectory that reads the weight, and the numbers must be right there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from conformance.backend.registry import Spec, adapter, resolve
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.run.runner import Runner

from .cells import FAILING, FOUND, Answers, Cell, Finding, ask, weights
from .judge import MOST_HUNG, Bench, Judge
from .uses import work

__all__ = ["CASES", "FAILING", "FOUND", "Cell", "Finding", "audit", "strict"]

_TINY = "l=1,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64"
_WIDE = "l=1,embd=256,heads=4,kv=2,head=64,ff=256,vocab=64"
_KINDS = "attn_q=q4_K,attn_k=q5_K,attn_v=q6_K,attn_output=q2_K,ffn_gate=q3_K,ffn_up=q4_1,ffn_down=mxfp4,output=q5_0"
CASES = (
    *(f"weight_placement/llama-{_TINY},w={w},tied=1,run=p5.d1@0" for w in ("q4_0", "q8_0", "f16")),
    f"weight_placement/llama-{_WIDE},{_KINDS},fa=0,rope=none,alibi=8,run=p5.d1@0",
    f"weight_placement/llama-{_TINY},rope=none,alibi=8,norm=layer,ffn=gelu,run=p5.d1@0",
    f"weight_placement/gpt-oss-{_TINY},w=q4_0,run=p5.d1@0",
    f"weight_placement/gemma2-{_TINY},w=q4_0,run=p5.d1@0",
    f"weight_placement/lfm2-{_TINY.replace('l=1', 'l=2')},w=q4_0,seqs=4,run=p5+3+4+2.d1@0",
)
"""What is audited where no case is named: decoders of many types, experts, soft caps, and short convolutions of 4
sequences, whose products have their sequences in another dimension than their tokens; ALiBi, the only one to whom
`max_bias` says anything."""


def audit(runner: Runner, spec: Spec, cases: Sequence[Case], save: Path | None = None) -> Iterator[Cell]:
    """One cell per weight and buffer type, per op_param, and per case as it is. A fault of the backend never raises.

    Args:
        runner: opens the backend, in a process of its own where a crash must cost one cell only.
        spec: the backend.
        cases: their own placement is ignored.
        save: folder for a case per finding.

    Raises:
        ConformanceError: it cannot be opened at all.
    """
    bench = Bench(runner, spec, save)
    bare = [replace(c, placement={}) for c in cases]
    answers = {c: list(_ask(bench, c)) for c in bare}
    equal = {(a.buffer, work(n, a.weight)): n for each in answers.values() for a in each for n in a.taken}
    known: dict[str, Cell | None] = {}
    for case, each in answers.items():
        judge = Judge(bench, case, equal)
        yield judge.whole()
        yield from map(judge.weight, each)
        yield from judge.op_params(known)
    yield from filter(None, known.values())


def strict(runner: Runner, spec: Spec) -> Spec:
    """`spec` with the options with which its adapter finds more faults (`Backend.audited`), where it takes them.

    Raises:
        UsageError: the backend's name or an option is unknown.
        UnavailableError: this machine cannot have it.
    """
    given = dict(resolve(spec).options)
    more = tuple((k, v) for k, v in adapter(spec.name).audited.items() if k not in given)
    if not more:
        return spec
    try:
        runner.backend(Spec(spec.name, (*spec.options, *more)))
    except UsageError:
        return spec
    return Spec(spec.name, (*spec.options, *more))


def _ask(bench: Bench, case: Case) -> Iterator[Answers]:
    for weight in weights(case):
        for buffer in range(len(bench.types)):
            if bench.hung[buffer] >= MOST_HUNG:
                yield Answers(case, weight, buffer, error=f"not asked: {MOST_HUNG} before it did not answer in time")
                continue
            answers = ask(bench.backend, case, weight, buffer)
            bench.hung[buffer] += answers.hung
            yield answers
