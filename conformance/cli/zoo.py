"""`conform zoo`: llama.cpp itself runs every architecture on a device, and is held against its own CPU run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from conformance.backend.registry import Spec, environment, resolve
from conformance.ggml.errors import UsageError
from conformance.ggml.text import printable
from conformance.ggml.types import TYPES
from conformance.report.runfile import write_json
from conformance.run.session.environment import header
from conformance.suite.zoo import family as zoo
from conformance.suite.zoo import metadata
from conformance.suite.zoo.play import PASSES, RUNS, Device, Played, play

from .options import backend_option, json_option

_GGML = "ggml"
"""The adapter whose libraries llama.cpp runs on."""
_LIBLLAMA = ("libllama.so", "libllama.so.*", "libllama.dylib", "llama.dll")


@click.command("zoo")
@backend_option
@click.option(
    "--arch", "globs", multiple=True, metavar="GLOB", help="Architectures; repeatable. Default: all that run."
)
@click.option("--runs", default=",".join(RUNS), show_default=True, help="Which runs, joined by commas.")
@click.option("--run", "plan", default="p5.d4", show_default=True, metavar="PLAN", help="What each sequence decodes.")
@click.option("--context", type=click.IntRange(1), default=256, show_default=True, help="Cells of one stream.")
@click.option("--flash-attn", type=click.Choice(["on", "off"]), help="Default: on, where the architecture can.")
@click.option("--weight-type", type=click.Choice(list(TYPES)), default="f32", show_default=True)
@click.option("--cache-type", type=click.Choice(list(TYPES)), default="f16", show_default=True)
@click.option("--all-weights", is_flag=True, help="With weights that llama.cpp has a place for and model files lack.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), default=60.0, metavar="SECONDS")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Architectures at the same time.")
@json_option
def zoo_matrix(  # click shows the options' help
    backends: Sequence[str],
    globs: Sequence[str],
    runs: str,
    plan: str,
    context: int,
    flash_attn: str | None,
    weight_type: str,
    cache_type: str,
    all_weights: bool,  # a click flag
    time_limit: float,
    jobs: int,
    json_path: Path | None,
) -> None:
    """Let llama.cpp run every architecture on devices and compare its logits with those of its own CPU run.

    Each architecture runs in processes of its own, so what a crash or a hang costs is one cell. Exit code 1: a cell
    failed; 3: none passed or failed.
    """
    if not backends:
        raise UsageError("zoo: --backend NAME expected: a ggml library and its device, as ggml?lib=DIR&device=NAME")
    devices = [device(Spec.parse(text)) for text in backends]
    chosen = {name: dict(RUNS[name]) for name in _runs(runs)}
    archs = [a for a in metadata.runnable() if not globs or any(fnmatchcase(a, g) for g in globs)]
    if not archs:
        raise UsageError(f"zoo: no architecture fits {', '.join(globs)}; conform capture --list shows them")
    said = {
        "real": "" if all_weights else "1", "w": weight_type if weight_type != "f32" else "",
        "fa": {"on": "1", "off": "0"}.get(flash_attn or "", ""), "ctx": context if context != 256 else "",
        "cache": cache_type if cache_type != "f16" else "", "run": plan if plan != zoo.KEYS["run"].default else "",
    }  # fmt: skip
    keys = ",".join(f"{key}={value}" for key, value in said.items() if value)
    found: dict[tuple[str, str, str], Played] = {}

    def one(arch: str) -> None:
        case_id = f"zoo/{arch}{'-' if keys else ''}{keys}@1"
        for (name, run), played in play(case_id, devices, chosen, time_limit).items():
            found[arch, name, run] = played
            if played.verdict not in PASSES or played.detail:
                said = f"{played.verdict} {arch} on {name}, {run}: {played.detail[:300]}"
                click.echo(printable(said), err=True)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, archs))
    except KeyboardInterrupt:
        click.echo("interrupted; what ran is shown", err=True)
    ran = [a for a in archs if (a, devices[0].name, next(iter(chosen))) in found]
    if json_path:
        write_json(json_path, {**header("zoo"), "results": record(found)})
    columns = [(d.name, run) for d in devices for run in chosen]
    rows = [(a, *(cell(found.get((a, *column))) for column in columns)) for a in ran]
    click.echo(tabulate(rows, ["architecture", *(f"{d}\n{run}" for d, run in columns)]))
    for column in columns:
        verdicts = Counter(p.verdict for (_, d, run), p in found.items() if (d, run) == column)
        click.echo(f"{column[0]}, {column[1]}: {', '.join(f'{n} {v}' for v, n in sorted(verdicts.items()))}")
    judged = [p for p in found.values() if p.verdict != "NO REFERENCE"]
    sys.exit(3 if not judged else int(any(p.verdict not in PASSES for p in judged)))


def device(spec: Spec) -> Device:
    """Where llama.cpp runs for a backend.

    Raises:
        UsageError: it is no ggml library.
    """
    whole = resolve(spec)
    options = dict(whole.options)
    if whole.name != _GGML:
        raise UsageError(f"zoo: {spec}: llama.cpp runs on ggml's own backends only: a spec of the adapter {_GGML}")
    lib = Path(options["lib"]) if options.get("lib") else None
    return Device(str(spec), str(libllama(lib)) if lib else "", options.get("device", ""), environment(spec))


def libllama(lib: Path) -> Path:
    """The library with llama.cpp: in the folder `lib`, beside the file `lib`, or that file itself.

    Raises:
        UsageError: the folder has none.
    """
    folder = lib if lib.is_dir() else lib.parent
    for pattern in _LIBLLAMA:
        for path in sorted(folder.glob(pattern)):
            return path
    if lib.is_dir():
        raise UsageError(f"zoo: {lib}: no {_LIBLLAMA[0]} there, so llama.cpp cannot run on this library")
    return lib


def _runs(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in RUNS:
            raise UsageError(f"--runs: one of {', '.join(RUNS)} expected, {name!r} found")
    return names


def cell(played: Played | None) -> str:
    """What one run came to: its largest NMSE, and its verdict where that is not PASS."""
    if played is None:
        return ""
    error = f"{played.nmse:.1e}" if played.nmse is not None else ""
    splits = played.notes.get("splits", 0)
    where = f" ({splits} splits)" if splits > 1 else ""
    return f"{error}{where}" if played.verdict == "PASS" else f"{played.verdict} {error}".strip()


def record(found: Mapping[tuple[str, str, str], Played]) -> list[dict[str, Any]]:
    """Every cell as JSON."""
    return [
        {
            "architecture": arch, "backend": name, "run": run, "verdict": p.verdict, "detail": p.detail,
            "nmse": p.nmse if p.nmse is None or p.nmse < float("inf") else "inf", "batch": p.step, **p.notes,
        }
        for (arch, name, run), p in sorted(found.items())
    ]  # fmt: skip
