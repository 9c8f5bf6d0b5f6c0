"""`conform phases`: the table of prefill and decode that an accelerator's project publishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
from tabulate import tabulate

from conformance.backend.interface import Backend, describe
from conformance.case.case import JSON, Case
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.perf.phases import MODEL, Meter, Phase, generation, measure, meter, prompt
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.session.environment import header
from conformance.run.session.select import parse_specs

from .options import backend_option, isolation, json_option

ABSENT = "not available"
COLUMNS = ("backend", "test", "tokens/s", "W", "J/token", "splits", "share of the time")


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
@json_option
@isolation
def phases(
    backends: Sequence[str],
    model: str,
    pp: Sequence[int],
    tg: Sequence[int],
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Time prefill (pp) and decode (tg) of a decoder: tokens per second, energy, and each device's share.

    Energy is what the processor packages used by their own counters (RAPL), whoever used it.
    """
    if not pp and not tg:
        raise UsageError("phases: at least one size with --pp or --tg expected, none found")
    tests: list[tuple[str, int, Callable[[str, int], Case]]] = [
        *((f"pp{n}", n, prompt) for n in pp),
        *((f"tg{n}", n, generation) for n in tg),
    ]
    energy, why = _meter()
    rows: list[Sequence[str]] = []
    document: dict[str, JSON] = {}
    for spec in parse_specs(backends):
        try:
            backend = open_backend(
                spec,
                isolate=isolation.isolate,
                time_limit=isolation.time_limit,
                memory_limit=isolation.memory_limit,
            )
        except UnavailableError as e:
            rows.append((str(spec), ABSENT, "", "", "", "", str(e)))
            document[str(spec)] = {"available": False, "reason": str(e)}
            continue
        try:
            found = [_one(backend, make(model, n), name, n, energy) for name, n, make in tests]
            document[str(spec)] = {**describe(backend.info()), "phases": [_json(p) for p in found]}
        finally:
            backend.close()
        rows += [(str(spec), *_row(p)) for p in found]
    click.echo(f"model {model}")
    click.echo(tabulate(rows, COLUMNS, disable_numparse=True, maxcolwidths=[40, *[None] * 5, 60]))
    if why:
        click.echo(f"energy {ABSENT}: {why}")
    if json_path:
        write_json(json_path, {**header("phases"), "model": model, "energy": why or "RAPL", "backends": document})


def _meter() -> tuple[Meter | None, str]:
    try:
        return meter(), ""
    except UnavailableError as e:
        return None, str(e)


def _one(backend: Backend, case: Case, name: str, n: int, energy: Meter | None) -> Phase | tuple[str, str]:
    """A row, or its name and why there is none."""
    try:
        return measure(backend, case, name, n, energy)
    except (BackendError, UnavailableError) as e:
        return name, str(e)


def _row(phase: Phase | tuple[str, str]) -> Sequence[str]:
    if isinstance(phase, tuple):
        return (phase[0], ABSENT, "", "", "", phase[1])
    shares = ", ".join(f"{device} {100 * share:.0f} %" for device, share in phase.shares.items())
    joules, watts = (ABSENT if x is None else f"{x:.3g}" for x in (phase.joules_per_token, phase.watts))
    return (phase.name, f"{phase.rate:.1f}", watts, joules, str(phase.splits or ""), shares)


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
        "nodes": phase.nodes,
        "splits": phase.splits,
        "shares": dict(phase.shares),
    }
