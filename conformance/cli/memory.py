"""`conform memory`: weights that are held twice, by llama.cpp on its devices or by an adapter."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from conformance.backend.registry import Spec, adapter, resolve
from conformance.case.case import JSON
from conformance.cli.options import ExistingFile, backend_option, json_option
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.types import TYPES
from conformance.judge.outcome import Outcome, Why
from conformance.live.llama import GGML, Device, device
from conformance.model.memory import COPIES, Copies, Held, Pair, copies, large, measure, of_file, small
from conformance.perf.held import Weights, allowance, weights_held
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.session.environment import header
from conformance.suite.zoo.family import Request

COLUMNS = ("memory breakdown [MiB]", "self", "model", "context", "compute", "resident", "unaccounted", "peak")
ANSWERS = ("backend", "weights held", "at the peak", "answer")
ONCE, MORE, UNKNOWN = "once", "more than once", "not measured"
STATED, BEYOND = "as stated", "more than stated"
"""Of an adapter, whose allowance docs/memory.md states."""


@click.command()
@click.argument("model", required=False, type=ExistingFile, metavar="[MODEL.gguf]")
@backend_option
@click.option("--weight-type", type=click.Choice(list(TYPES)), default="q4_0", show_default=True,
              help="Of the made-up matrices.")  # fmt: skip
@click.option("--copies", "limit", type=click.FloatRange(min=0, min_open=True), metavar="N",
              help=f"Times the weights that may be held. [default: {COPIES}; of an adapter as stated]")  # fmt: skip
@json_option
def memory(
    model: Path | None, backends: Sequence[str], weight_type: str, limit: float | None, json_path: Path | None
) -> None:
    """Measure how often backends hold a model's weights, on their processes.

    On a ggml device llama.cpp loads MODEL.gguf or a made-up model, says what it holds, and is compared with its own
    CPU. Any other adapter runs a made-up decoder. A small model is measured beside it, and what both take cancels.

    Exit codes: 0 every backend holds the weights once, an adapter as often as stated; 1 one holds more or could not be
    measured beside others; 3 none could be measured: see docs/exit-codes.md.
    """
    if not backends:
        raise UsageError("memory: --backend NAME expected: an adapter, or a ggml device as ggml?lib=DIR&device=NAME")
    specs = [Spec.parse(text) for text in backends]
    progress = Progress()
    devices = [device(s) for s in specs if resolve(s).name == GGML]
    documents, failed = _on_devices(devices, model, weight_type, COPIES if limit is None else limit, progress)
    adapters = [s for s in specs if resolve(s).name != GGML]
    more, others = _of_adapters(adapters, model, weight_type, limit, progress)
    documents |= more
    if json_path:
        write_json(json_path, {**header("memory"), "model": model.name if model else weight_type,
                               "backends": documents})  # fmt: skip
    asked = dict.fromkeys((*(d.name for d in devices), *map(str, adapters)))
    unmeasured = [f"{name}: {UNKNOWN}" for name in asked if not documents.get(name, {}).get("answer")]
    why = Why.MISSING if len(unmeasured) < len(asked) else Why.UNEXECUTED
    leave(Outcome.of(Why.FAILED, [*failed, *others]) + Outcome.of(why, unmeasured))


def _on_devices(
    devices: Sequence[Device], model: Path | None, weight_type: str, limit: float, progress: Progress
) -> tuple[dict[str, JSON], list[str]]:
    """What llama.cpp holds on devices, printed; the documents, and a sentence for each that holds more than `limit`."""
    found: dict[str, Pair] = {}
    reasons: dict[str, str] = {}
    answers: dict[str, Copies] = {}
    if not devices:
        return {}, []
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
    documents = {
        name: _json(found.get(name), answers.get(name), reasons.get(name), limit)
        for name in dict.fromkeys((*found, *reasons))
    }
    return documents, [_too_much(n, a.held, limit) for n, a in answers.items() if a.held > limit]


def _of_adapters(
    specs: Sequence[Spec], model: Path | None, weight_type: str, limit: float | None, progress: Progress
) -> tuple[dict[str, JSON], list[str]]:
    """The same of adapters, with a made-up model."""
    documents: dict[str, JSON] = {}
    told: list[Sequence[str]] = []
    for spec in specs:
        adapter(spec.name)  # UsageError where nothing of that name is installed
        allowed = allowance(spec, weight_type) if limit is None else limit
        reason, held = "", None
        if model is not None:
            reason = f"{model.name} is a model for llama.cpp, on a ggml device; an adapter runs a made-up one"
        elif allowed is None:
            reason = f"what it may hold of {weight_type} is not stated: give --copies N"
        else:
            try:
                with progress.of(since(f"measuring {spec}")):
                    held = weights_held(spec, partial(open_backend, spec, Isolation(isolate=True)), weight_type)
            except ConformanceError as e:
                reason = str(e)
        documents[str(spec)] = _document(held, allowed, reason)
        told.append(_cells(spec, held, allowed, reason))
    if told:
        table(told, ANSWERS, disable_numparse=True, maxcolwidths=[60, None, None, 80])
    return documents, [_too_much(n, d["copies"], d["limit"]) for n, d in documents.items() if d.get("answer") == BEYOND]


def _too_much(name: str, held: float, limit: float) -> str:
    return f"{name}: {held:.2f} times the weights, at most {limit:g}"


def _document(held: Weights | None, allowed: float | None, reason: str) -> dict[str, JSON]:
    out: dict[str, JSON] = {"reason": reason or None}
    if held is not None and allowed is not None:
        out |= {"model": held.model, "weights": held.nbytes, "copies": held.held, "peak_copies": held.peak,
                "limit": allowed, "answer": STATED if held.held <= allowed else BEYOND}  # fmt: skip
    return out


def _cells(spec: Spec, held: Weights | None, allowed: float | None, reason: str) -> Sequence[str]:
    if held is None or allowed is None:
        return str(spec), "", "", f"{UNKNOWN}: {reason}"
    answer = STATED if held.held <= allowed else BEYOND
    return str(spec), f"{held.held:.2f} x", f"{held.peak:.2f} x", f"{answer}, {allowed:.2f} x at most"


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
