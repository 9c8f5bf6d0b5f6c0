"""Run llama.cpp itself on a device and compare its results with those of its own CPU run, step by step.

One process per device plays all runs of a model; a run that ends the process is lost, and a new one plays the rest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import ConformanceError
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError

from .family import ENVIRONMENT, Request, prepare, read
from .recorder import flips, load_choices

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TOLERANCE = 5e-4
"""NMSE of a step's logits, as for a free run against a recording."""
RUNS: dict[str, dict[str, Any]] = {
    "1": {"n_seq_max": 1, "unified": False},
    "2 streams": {"n_seq_max": 2, "unified": False},
    "2 unified": {"n_seq_max": 2, "unified": True},
}
"""Name of a run -> the fields of the request that it sets."""
UNSUPPORTED = "UNSUPPORTED"
PASSES = ("PASS", "NO REFERENCE", UNSUPPORTED)
"""Verdicts that are no device's fault."""
LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs."""

    name: str
    """The title of its column."""
    lib: str = ""
    """The library with llama.cpp; the wheel's if empty."""
    device: str = ""
    """As `ggml_backend_dev_name` has it; "" for the CPU alone."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that its process has beside our own environment; None takes one away."""
    rpc: str = ""
    """The RPC server that has the device: `HOST:PORT`, or `loopback`, one of the same build that its process starts."""
    judge: str | None = None
    """The library whose CPU run judges it; its own where None, the wheel's where empty."""

    @property
    def asked(self) -> dict[str, str]:
        """What a worker's request says of it."""
        return {"device": self.device, "rpc": self.rpc}


@dataclass(slots=True)
class Played:
    """One run on one device."""

    verdict: str
    """PASS, FAIL (numbers), ERROR (llama.cpp reports one), CRASH, TIMEOUT, VACUOUS, NO REFERENCE, UNSUPPORTED (of a
    verb: the model or the library has no such thing, or llama.cpp refuses it).
    """
    detail: str = ""
    nmse: float | None = None
    """The largest of all steps."""
    step: int | None = None
    """The first batch out of tolerance."""
    notes: dict[str, int] = field(default_factory=dict)
    """Nodes and splits of the graph, from llama.cpp's log."""
    results: list[NDArray[np.float32]] = field(default_factory=list)
    choices: Path | None = None
    """The file of the run's choices, if it was watched."""
    spoilt: str = ""
    """Its first value that is NaN, if it was watched."""


def compare(played: Played, reference: Played) -> Played:
    """Judge the results of `played` by those of `reference`."""
    if played.verdict != "PASS":
        return played
    errors = [nmse(ours, theirs) for ours, theirs in zip(played.results, reference.results, strict=True)]
    played.nmse = max(errors, default=0.0)
    played.step = next((k for k, error in enumerate(errors) if not error <= TOLERANCE), None)
    if played.step is not None:
        at = errors[played.step]
        played.verdict = "FAIL"
        played.detail = f"batch {played.step} of {len(errors)}: NMSE {at:.2g}, at most {TOLERANCE:g} expected"
    return played


def nmse(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Energy of the error / energy of the expected values; inf where shapes differ or a value is not finite."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return inf
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    energy = float(np.sum(e * e))
    return float(np.sum((a - e) ** 2)) / energy if energy else (0.0 if not a.any() else inf)


def play(
    case_id: str, devices: Sequence[Device], runs: Mapping[str, Mapping[str, Any]], time_limit: float = 60.0
) -> dict[tuple[str, str], Played]:
    """Run a model on devices, every run also on the CPU of the library that judges the device, and compare.

    `runs`: name -> the fields of the request that it sets. `time_limit`: seconds that one run may take.

    Returns:
        (device's name, run's name) -> what came of it. Where the CPU run itself fails, its verdict is `NO REFERENCE`.
    """
    out: dict[tuple[str, str], Played] = {}
    references: dict[str, tuple[Request, dict[str, Played]]] = {}
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as name:
        folder = Path(name)
        try:
            # The wheel's llama.cpp makes the model, whatever library plays it.
            model = prepare(folder / "model.gguf", *read(case_id))
        except ConformanceError as e:
            return {(d.name, run): Played("NO REFERENCE", f"no model: {e}") for d in devices for run in runs}
        for d in devices:
            judge = d.lib if d.judge is None else d.judge
            if judge not in references:
                references[judge] = _reference(replace(model, lib=judge), runs, folder, time_limit)
            request, reference = references[judge]
            request = replace(request, lib=d.lib)
            possible = {run: changes for run, changes in runs.items() if reference[run].verdict == "PASS"}
            played = _run(request, d, possible, folder, time_limit)
            for run, changes in runs.items():
                if run not in possible:
                    why = f"on the CPU: {reference[run].verdict} {reference[run].detail}"
                    out[d.name, run] = Played("NO REFERENCE", why)
                    continue
                out[d.name, run] = compare(played[run], reference[run])
                if played[run].verdict == "FAIL":
                    explain(played[run], Look(request, d, {run: changes}, folder, time_limit))
    return out


def _reference(
    request: Request, runs: Mapping[str, Mapping[str, Any]], folder: Path, time_limit: float
) -> tuple[Request, dict[str, Played]]:
    """The CPU's own runs, and the request that gave them: with embeddings for an encoder, which has no logits."""
    cpu = Device("CPU", request.lib)
    played = _run(request, cpu, runs, folder, time_limit)
    if not any(_tells(p) for p in played.values()):
        request = replace(request, embeddings=True)
        played = _run(request, cpu, runs, folder, time_limit)
    for p in played.values():
        if p.verdict == "PASS" and not _tells(p):
            p.verdict, p.detail = "VACUOUS", "every result is 0"
    return request, played


@dataclass(frozen=True, slots=True)
class Look:
    """Plays a run again, watched."""

    request: Request
    device: Device
    run: Mapping[str, Mapping[str, Any]]
    folder: Path
    time_limit: float

    def again(self, device: Device, forced: Path | None = None, *, values: bool = False) -> Played:
        """The run on `device`, its choices recorded, or replaced by those in the file `forced`."""
        watch = {"forced": str(forced) if forced else None, "values": values}
        (played,) = _run(self.request, device, self.run, self.folder, self.time_limit, watch).values()
        return played


def explain(played: Played, look: Look) -> None:
    """Add the cause to the detail of a run that failed; a run that only chose other experts at a near-tie passes.

    A device may choose another expert where two scores are closer than it rounds. Then the CPU plays the run with the
    device's experts, and the device is compared with that.
    """
    if any(not np.isfinite(r).all() for r in played.results):
        again = look.again(look.device, values=True)
        played.detail += f"; {again.spoilt}" if again.spoilt else ""
        return
    watched = look.again(look.device)
    if watched.verdict != "PASS" or watched.choices is None:
        played.detail += f"; its choices could not be recorded: {watched.verdict} {watched.detail}".rstrip()
        return
    own = load_choices(watched.choices)
    if not own:
        return
    file = watched.choices.replace(watched.choices.with_name("choices-of-device.npz"))
    forced = look.again(Device("CPU", look.device.lib), file)
    if forced.verdict != "PASS" or forced.choices is None:
        played.detail += f"; the CPU could not be given its choices: {forced.verdict} {forced.detail}".rstrip()
        return
    notes, wrong = flips(own, load_choices(forced.choices))
    if wrong:
        played.detail += f"; {wrong}"
    elif notes:
        _judge_again(played, watched, forced, notes)


def _judge_again(played: Played, watched: Played, forced: Played, notes: Sequence[str]) -> None:
    """Judge `played` by the CPU's run with the same experts."""
    more = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
    if any(not nmse(a, b) <= TOLERANCE for a, b in zip(played.results, watched.results, strict=True)):
        played.detail += f"; {notes[0]}{more}, but it gives other results while it is watched"
        return
    same = compare(replace(watched), forced)
    text = f"{notes[0]}{more}; with the same experts NMSE {same.nmse:.2g}"
    if same.verdict == "PASS":
        played.detail = f"{text}, with the CPU's own {played.nmse:.2g}"
        played.verdict, played.nmse, played.step = "PASS", same.nmse, None
    else:
        played.detail += f"; {text}"


def _tells(played: Played) -> bool:
    """Whether there is anything to compare with."""
    return any(r.any() for r in played.results)


def _run(
    request: Request,
    device: Device,
    runs: Mapping[str, Mapping[str, Any]],
    folder: Path,
    time_limit: float,
    watch: Mapping[str, Any] | None = None,
) -> dict[str, Played]:
    asks: dict[str, dict[str, Any]] = {
        name: {"run": i, "changes": dict(changes), "folder": str(folder), "watch": watch}
        for i, (name, changes) in enumerate(runs.items())
    }
    return conduct(
        request, device, asks, lambda n, reply: _played(reply, folder, asks[n]["run"], watched=bool(watch)), time_limit
    )


def conduct(
    request: DataclassInstance,
    device: Device,
    asks: Mapping[str, Mapping[str, Any]],
    read: Callable[[str, Mapping[str, Any]], Played],
    time_limit: float,
    service: str = "conformance.suite.zoo.worker",
) -> dict[str, Played]:
    """Have a worker load the model and answer requests, and another one those that are left if it dies.

    `request`: the fields of what the module `service` loads. `asks`: name -> a request. `read` makes of a request's
    name and its reply what came of it. `time_limit`: seconds of one; it may take what a few that are left do not need.
    """
    played: dict[str, Played] = {}
    while left := [n for n in asks if n not in played]:
        variables = {**os.environ, **ENVIRONMENT, **device.environment}
        env = {k: v for k, v in variables.items() if v is not None}
        seconds = time_limit * min(len(left), len(RUNS))
        worker = Worker(service, time_limit=seconds, env=env)
        try:
            try:
                worker.ask({"load": asdict(request), **device.asked})
            except WorkerDiedError:
                raise
            except ConformanceError as e:
                return {n: Played("ERROR", str(e)) for n in asks}
            for name in left:
                reply, _ = worker.ask(dict(asks[name]), seconds=seconds)
                played[name] = read(name, reply)
        except WorkerTimeoutError:
            played[next(n for n in left if n not in played)] = Played("TIMEOUT", f"no answer within {seconds:g} s")
        except WorkerDiedError as e:
            words = " / ".join(e.lines)[-LAST_WORDS:]
            played[next(n for n in left if n not in played)] = Played("CRASH", f"{e.how}: {words}")
        finally:
            worker.close()
    return played


def _played(reply: Mapping[str, Any], folder: Path, number: int, *, watched: bool) -> Played:
    """What a worker replied of run `number`, with the results that it left in `folder`."""
    if "failed" in reply:
        words = " / ".join(reply["complaints"])
        return Played("ERROR", words or reply["failed"], notes=reply["notes"])
    with np.load(folder / f"{number}.npz") as file:
        played = Played("PASS", notes=reply["notes"], results=[file[k] for k in file.files])
    played.spoilt = reply["spoilt"]
    played.choices = folder / f"choices-{number}.npz" if watched else None
    return played
