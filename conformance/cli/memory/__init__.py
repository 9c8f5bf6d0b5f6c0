"""`conform memory`: what llama.cpp says it holds, against what is resident; weights that are held twice."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.cli.llama import device
from conformance.cli.options import ExistingFile, backend_option, json_option
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.types import TYPES
from conformance.judge.outcome import Outcome, Why
from conformance.model.memory import COPIES, Copies, Held, Pair, copies, large, measure, of_file, small
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.run.session.environment import header
from conformance.suite.zoo.family import Request
from conformance.suite.zoo.play import Device

COLUMNS = ("memory breakdown [MiB]", "self", "model", "context", "compute", "resident", "unaccounted", "peak")
ANSWERS = ("backend", "weights held", "at the peak", "answer")
ONCE, MORE, UNKNOWN = "once", "more than once", "not measured"


@click.command()
@click.argument("model", required=False, type=ExistingFile, metavar="[MODEL.gguf]")
@backend_option
@click.option("--weight-type", type=click.Choice(list(TYPES)), default="q4_0", show_default=True,
              help="Of the made-up matrices.")  # fmt: skip
@click.option("--copies", "limit", type=click.FloatRange(min=0, min_open=True), default=COPIES, show_default=True,
              help="Of the weights that a backend may hold.")  # fmt: skip
@json_option
def memory(model: Path | None, backends: Sequence[str], weight_type: str, limit: float, json_path: Path | None) -> None:
    """Load a model on ggml devices as llama.cpp does, and say what it says of memory, what is resident, and how often
    the weights are held beside llama.cpp's own CPU.

    The model is MODEL.gguf or made up; a small one is measured beside it, and what both take cancels.

    Exit codes: 0 every backend holds the weights once, 1 one holds more or could not be measured beside others, 3 none
    could be measured: see docs/exit-codes.md.
    """
    if not backends:
        raise UsageError("memory: --backend NAME expected: a ggml library and its device, as ggml?lib=DIR&device=NAME")
    devices = [device(Spec.parse(text)) for text in backends]
    progress = Progress()
    found: dict[str, Pair] = {}
    reasons: dict[str, str] = {}
    answers: dict[str, Copies] = {}
    with tempfile.TemporaryDirectory(prefix="conformance-memory-") as name:
        folder = Path(name)
        with progress.of(since("making models")):
            little = small(folder, weight_type)
            much = of_file(model, little) if model else large(folder, weight_type)
        for d in devices:
            own = Device(f"llama.cpp's CPU{f' ({d.lib})' if d.lib else ''}", d.lib)
            for each in (own, d):
                if each.name not in found and each.name not in reasons:
                    with progress.of(since(f"measuring {each.name}")):
                        _measure(each, little, much, found, reasons)
            if d.name in found and own.name in found:
                try:
                    answers[d.name] = copies(found[d.name], found[own.name])
                except UsageError as e:
                    reasons[d.name] = str(e)
    _print(found, reasons, answers, limit)
    if json_path:
        document = {name: _json(found.get(name), answers.get(name), reasons.get(name), limit) for name in
                    dict.fromkeys((*found, *reasons))}  # fmt: skip
        write_json(json_path, {**header("memory"), "model": model.name if model else weight_type, "backends": document})
    twice = [f"{n}: {a.held:.2f} times the weights, at most {limit:g}" for n, a in answers.items() if a.held > limit]
    unmeasured = [f"{d.name}: {UNKNOWN}" for d in devices if d.name not in answers]
    leave(
        Outcome.of(Why.FAILED, twice)
        + Outcome.of(Why.MISSING if answers else Why.UNEXECUTED, dict.fromkeys(unmeasured))
    )


def _measure(d: Device, little: Request, much: Request, found: dict[str, Pair], reasons: dict[str, str]) -> None:
    try:
        found[d.name] = Pair(measure(little, d), measure(much, d))
    except ConformanceError as e:
        reasons[d.name] = str(e)


def _print(found: dict[str, Pair], reasons: dict[str, str], answers: dict[str, Copies], limit: float) -> None:
    rows: list[Sequence[str]] = []
    for name, pair in found.items():
        held = pair.large
        sizes = (held.stated, held.model, held.stated - held.model - _compute(held), _compute(held))
        rows.append((name, *map(_mib, (*sizes, held.all, held.all - held.stated, held.peak))))
        rows += [
            (f"  - {buft}", *map(_mib, (p.self, p.model, p.context, p.compute)), "", "", "")
            for buft, p in held.parts.items()
        ]
        if held.device is not None:
            rows.append(("  - on the device", "", "", "", "", _mib(held.device), "", ""))
    table(rows, COLUMNS, disable_numparse=True, colalign=["left", *["right"] * 7] if rows else None)
    line("")
    told = [(n, f"{a.held:.2f} x", f"{a.peak:.2f} x", ONCE if a.held <= limit else MORE) for n, a in answers.items()]
    told += [(name, "", "", f"{UNKNOWN}: {why}") for name, why in reasons.items()]
    table(told, ANSWERS, disable_numparse=True, maxcolwidths=[60, None, None, 80])


def _compute(held: Held) -> int:
    return sum(p.compute for p in held.parts.values())


def _mib(n: int) -> str:
    return f"{n / (1 << 20):.1f}"


def _json(pair: Pair | None, answer: Copies | None, reason: str | None, limit: float) -> dict[str, JSON]:
    out: dict[str, JSON] = {"reason": reason}
    if pair is not None:
        out |= {
            which: {
                "parts": {n: {"model": p.model, "context": p.context, "compute": p.compute}
                          for n, p in held.parts.items()},
                "resident": held.held, "peak": held.peak, "device": held.device,
            }
            for which, held in (("small", pair.small), ("large", pair.large))
        }  # fmt: skip
    if answer is not None:
        out |= {"copies": answer.held, "peak_copies": answer.peak, "limit": limit,
                "answer": ONCE if answer.held <= limit else MORE}  # fmt: skip
    return out
