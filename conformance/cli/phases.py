"""`conform phases`: prefill and decode by themselves, their energy, and what each device is good for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from math import isfinite
from pathlib import Path

import click

from conformance.backend.interface import Backend, describe
from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.cli.options import backend_option, isolation, json_option
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.perf.phases.energy import KINDS, Kind, Meter, meter
from conformance.perf.phases.phase import MODEL, Phase, generation, measure, prompt
from conformance.perf.phases.without import SAME, Difference, differences, left_out
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.session.environment import header
from conformance.run.session.select import parse_specs

ABSENT = "not available"
COLUMNS = ("backend", "test", "tokens/s", "W", "J/token", "splits", "share of the time")
LEFT_OUT = ("backend", "test", "without", "its share", "time without / with", "results", "answer")
EACH = "each"
"""`--without` of every device that can be left out."""
BUDGET = 60.0
"""Seconds of measuring one phase with and without one device."""
Test = tuple[str, int, Case]
"""Name, tokens and case of a phase."""


def _sizes(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    parts = [p for p in text.split(",") if p]
    if any(not p.isdecimal() or not int(p) for p in parts):
        raise click.BadParameter(f"numbers from 1 joined by commas expected, {text!r} found")
    return tuple(map(int, parts))


@click.command()
@backend_option
@click.option("--model", default=MODEL, show_default=True, metavar="DECODER", help="As in a kv_growth id, without run.")
@click.option("--pp", default="512,1024,2048,4096,8192", show_default=True, callback=_sizes, help="Prompts, in tokens.")
@click.option("--tg", default="64", show_default=True, callback=_sizes, help="Tokens to decode one by one.")
@click.option("--energy", type=click.Choice(KINDS, case_sensitive=False),
              help="The counters; default: RAPL and NVML, else hwmon, else the battery.")  # fmt: skip
@click.option("--without", metavar="DEVICE", multiple=True,
              help=f"Leave out a device of those that share the graphs, or {EACH} in turn; repeatable.")  # fmt: skip
@click.option("--unchanged", is_flag=True, help="Fail unless nothing changes without them.")
@click.option("--budget", type=click.FloatRange(min=1), default=BUDGET, show_default=True, metavar="SECONDS",
              help="Of measuring each phase with and without a device.")  # fmt: skip
@json_option
@isolation
def phases(
    backends: Sequence[str],
    model: str,
    pp: Sequence[int],
    tg: Sequence[int],
    energy: Kind | None,
    without: Sequence[str],
    unchanged: bool,
    budget: float,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Time prefill (pp) and decode (tg) of a decoder: tokens per second, energy, and each device's share.

    Energy is what the machine's counters say, whoever used it. With --without it is also timed, in turns, whether a
    device makes any difference.
    """
    if not pp and not tg:
        raise UsageError("phases: at least one size with --pp or --tg expected, none found")
    if unchanged and not without:
        raise UsageError(f"phases: --unchanged: --without DEVICE (or {EACH}) expected beside it")
    specs = parse_specs(backends)
    less = [(spec, device, other) for spec in specs for device, other in _chosen(spec, without)]
    tests = [
        *((f"pp{n}", n, prompt(model, n)) for n in pp),
        *((f"tg{n}", n, generation(model, n)) for n in tg),
    ]
    counters, why = _meter(energy)
    document: dict[str, JSON] = {}
    found: dict[str, Sequence[Phase | tuple[str, str]]] = {}
    reasons: dict[str, str] = {}
    for spec in specs:
        try:
            backend = open_backend(spec, isolation)
        except UnavailableError as e:
            reasons[str(spec)] = str(e)
            document[str(spec)] = {"available": False, "reason": str(e)}
            continue
        with closing(backend):
            found[str(spec)] = [_one(backend, case, name, n, counters) for name, n, case in tests]
            phases_ = [_json(p) for p in found[str(spec)]]
            document[str(spec)] = {**describe(backend.info()), "phases": phases_}
    line(f"model {model}")
    rows = [(name, *_row(p)) for name, own in found.items() for p in own]
    rows += [(name, ABSENT, "", "", "", "", reason) for name, reason in reasons.items()]
    table(rows, COLUMNS, disable_numparse=True, maxcolwidths=[40, *[None] * 5, 60])
    if len(tests) > 1 and found:
        _wide(found, [name for name, _, _ in tests])
    line(f"energy: {counters}" if counters else f"energy {ABSENT}: {why}")
    if counters and why:
        line(f"not counted: {why}")
    apart = list(_differences(less, tests, budget, isolation))
    if apart:
        table([_left_out(spec, d) for spec, d in apart], LEFT_OUT, disable_numparse=True,
              maxcolwidths=[40, *[None] * 5, 60])  # fmt: skip
    if json_path:
        told = str(counters) if counters else why
        extra: dict[str, JSON] = {"without": [{"backend": str(s), **_apart(d)} for s, d in apart]} if apart else {}
        write_json(json_path, {**header("phases"), "model": model, "energy": told, "backends": document, **extra})
    leave(_changed(apart) if unchanged else Outcome())


def _changed(apart: Sequence[tuple[Spec, Difference]]) -> Outcome:
    """It fails where something changes without a device."""
    told = [(d.answer, f"{spec} without {d.device}, {d.name}: {d.answer}") for spec, d in apart]
    return Outcome.of(Why.UNDECIDED, [text for answer, text in told if answer == "undecided"]) + Outcome.of(
        Why.FAILED, [text for answer, text in told if answer not in {"nothing changes", "undecided"}]
    )


def _chosen(spec: Spec, without: Sequence[str]) -> Iterator[tuple[str, Spec]]:
    """The devices to leave out; UsageError for one that is not there."""
    if not without:
        return
    possible = left_out(spec)
    for device in possible if EACH in without else without:
        if device not in possible:
            raise UsageError(f"phases: --without {device}: of {spec} one of {', '.join(possible)} or {EACH} expected")
        yield device, possible[device]


def _meter(kind: Kind | None) -> tuple[Meter | None, str]:
    """The machine's counters, and which it lacks."""
    try:
        counters = meter(kind)
    except UnavailableError as e:
        return None, str(e)
    return counters, counters.lacks


def _one(backend: Backend, case: Case, name: str, n: int, energy: Meter | None) -> Phase | tuple[str, str]:
    """A row, or its name and why there is none."""
    try:
        return measure(backend, case, name, n, energy)
    except (BackendError, UnavailableError) as e:
        return name, str(e)


def _differences(
    less: Sequence[tuple[Spec, str, Spec]], tests: Sequence[Test], budget: float, isolation: Isolation
) -> Iterator[tuple[Spec, Difference]]:
    for spec, device, other in less:
        with ExitStack() as stack:
            line(f"{spec} without {device} …", err=True)
            try:
                whole, rest = (stack.enter_context(closing(open_backend(s, isolation))) for s in (spec, other))
            except UnavailableError as e:
                yield spec, Difference(device, "", "undecided", reason=str(e))
                continue
            for name, _, case in tests:
                try:
                    yield spec, differences(whole, rest, device, case, name, budget)
                except (BackendError, UnavailableError) as e:
                    yield spec, Difference(device, name, "undecided", reason=str(e))


def _row(phase: Phase | tuple[str, str]) -> Sequence[str]:
    if isinstance(phase, tuple):
        return (phase[0], ABSENT, "", "", "", phase[1])
    joules, watts = (ABSENT if x is None else f"{x:.3g}" for x in (phase.joules_per_token, phase.watts))
    return (phase.name, f"{phase.rate:.1f}", watts, joules, str(phase.splits or ""), _shares(phase))


def _shares(phase: Phase) -> str:
    def words(fractions: Mapping[str, float]) -> str:
        return ", ".join(f"{device} {100 * part:.0f} %" for device, part in fractions.items())

    return f"nodes: {words(phase.nodes_on)}" if phase.nodes_on else words(phase.shares)


def _wide(found: dict[str, Sequence[Phase | tuple[str, str]]], tests: Sequence[str]) -> None:
    """A row for each backend, as such figures are published; W, J per token and shares are of the last phase."""
    rows = []
    for name, own in found.items():
        rates = [ABSENT if isinstance(p, tuple) else f"{p.rate:.1f}" for p in own]
        last = own[-1]
        rest = ("", "", "") if isinstance(last, tuple) else (*_row(last)[2:4], _shares(last))
        rows.append((name, *rates, *rest))
    last_test = tests[-1]
    line("")
    headers = ("tokens/s", *tests, f"W, {last_test}", f"J/token, {last_test}", f"share of the time, {last_test}")
    table(rows, headers, disable_numparse=True, maxcolwidths=[40, *[None] * (len(tests) + 2), 40])


def _left_out(spec: Spec, d: Difference) -> Sequence[str]:
    share = "" if d.share is None else f"{100 * d.share:.0f} %"
    time = "" if d.ratio is None else f"{d.ratio.estimate:.3f} ({d.ratio.low:.3f} to {d.ratio.high:.3f})"
    results = "" if d.ratio is None else "equal to the bit" if not d.nmse else f"NMSE {d.nmse:.2g}"
    answer = f"{d.answer}: {d.reason}" if d.reason else d.answer
    return (str(spec), d.name, d.device, share, time, results, answer)


def _json(phase: Phase | tuple[str, str]) -> JSON:
    if isinstance(phase, tuple):
        return {"name": phase[0], "available": False, "reason": phase[1]}
    return {
        "name": phase.name,
        "tokens": phase.tokens,
        "seconds": phase.seconds,
        "tokens_per_second": phase.rate,
        "joules_per_token": phase.joules_per_token,
        "watts": phase.watts,
        "joules": dict(phase.energy),
        "nodes": phase.nodes,
        "nodes_on": dict(phase.nodes_on),
        "splits": phase.splits,
        "shares": dict(phase.shares),
    }


def _apart(d: Difference) -> dict[str, JSON]:
    i = d.ratio
    ratio = None if i is None else {"estimate": i.estimate, "low": i.low, "high": i.high if isfinite(i.high) else None}
    return {
        "device": d.device, "name": d.name, "answer": d.answer, "share": d.share, "ratio": ratio,
        "nmse": d.nmse if isfinite(d.nmse) else None, "same": SAME, "reason": d.reason,
    }  # fmt: skip
