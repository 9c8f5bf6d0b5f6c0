"""llama.cpp itself on a device, its results against those of its own CPU run, step by step.

A model is run in one process per device, all runs after each other; where one ends the process, that run is lost and
the others go on in a new one.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import ConformanceError
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError

from . import choices, metadata
from .capture import ENVIRONMENT, ask, make_model
from .family import read
from .model_file import chosen_types
from .request import Request

TOLERANCE = 5e-4
"""NMSE of a step's logits, as for a free run against a recording."""
RUNS: dict[str, dict[str, Any]] = {
    "1": {"n_seq_max": 1, "unified": False},
    "2 streams": {"n_seq_max": 2, "unified": False},
    "2 unified": {"n_seq_max": 2, "unified": True},
}
"""Name of a run -> what of the request it sets."""
PASSES = ("PASS", "NO REFERENCE")
"""Verdicts that speak against no device."""
LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs."""

    name: str
    """How its column is called."""
    lib: str = ""
    """The library with llama.cpp; the wheel's if empty."""
    device: str = ""
    """As `ggml_backend_dev_name` has it; "" for the CPU alone."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """What its process has beside this one's own; None is a variable that it does not have."""


@dataclass(slots=True)
class Played:
    """One run on one device."""

    verdict: str
    """PASS, FAIL (numbers), ERROR (llama.cpp said so), CRASH, TIMEOUT; of a reference run PASS or not."""
    detail: str = ""
    nmse: float | None = None
    """The largest of all steps."""
    step: int | None = None
    """The first batch out of tolerance."""
    notes: dict[str, int] = field(default_factory=dict)
    """Nodes and splits of the graph, as llama.cpp says them."""
    results: list[NDArray[np.float32]] = field(default_factory=list)
    choices: Path | None = None
    """The file of what the run chose, where it was watched."""
    spoilt: str = ""
    """Its first value that is NaN, likewise."""


def compare(found: Played, reference: Played) -> Played:
    """`found`, its results judged by those of `reference`."""
    if found.verdict != "PASS":
        return found
    worst, first = 0.0, None
    for k, (got, want) in enumerate(zip(found.results, reference.results, strict=True)):
        error = nmse(got, want)
        worst = max(worst, error)
        if first is None and not error <= TOLERANCE:
            first = k
    found.nmse, found.step = worst, first
    if first is not None:
        at = nmse(found.results[first], reference.results[first])
        found.verdict = "FAIL"
        found.detail = f"batch {first} of {len(found.results)}: NMSE {at:.2g}, at most {TOLERANCE:g} expected"
    return found


def nmse(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Energy of the error / energy of the expected values; inf where shapes differ or a value is not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return inf
    f, e = found.astype(np.float64), expected.astype(np.float64)
    energy = float(np.sum(e * e))
    return float(np.sum((f - e) ** 2)) / energy if energy else (0.0 if not f.any() else inf)


def prepare(case_id: str, lib: str, folder: Path) -> Request:
    """The request of a `zoo/…` id, with its model file made in `folder`.

    Raises:
        ConformanceError: as `capture`.
    """
    request, arch, keys, real = read(case_id, lib)
    model = folder / "model.gguf"
    if real:
        make_model(model, request, arch, keys)
        return replace(request, model=str(model), from_file=True)
    metadata.write(model, arch, keys, {})
    known = metadata.architecture(arch)
    if request.type_w != "f32" or known.types:
        listed = ask(replace(request, model=str(model), output=""))["weights"]
        metadata.write(model, arch, keys, chosen_types(listed, request.type_w, known))
    return replace(request, model=str(model))


def play(
    case_id: str, devices: Sequence[Device], runs: Mapping[str, Mapping[str, Any]], time_limit: float = 60.0
) -> dict[tuple[str, str], Played]:
    """Run a model on devices, every run also on the CPU of the same library, and compare.

    Args:
        case_id: a `zoo/…` id: the architecture, its keys and the plan.
        devices: where to run it.
        runs: name -> what of the request it sets.
        time_limit: seconds that one run may take.

    Returns:
        (device's name, run's name) -> what came of it. Where the CPU run itself fails, its verdict is `NO REFERENCE`.
    """
    out: dict[tuple[str, str], Played] = {}
    references: dict[str, dict[str, Played]] = {}
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as name:
        folder = Path(name)
        try:
            # The model is made by the wheel's llama.cpp; a file is a file.
            request = prepare(case_id, "", folder)
        except ConformanceError as e:
            return {(d.name, run): Played("NO REFERENCE", f"no model: {e}") for d in devices for run in runs}
        for d in devices:
            if d.lib not in references:
                own = replace(request, lib=d.lib)
                references[d.lib] = _run(own, Device("CPU", d.lib), runs, folder, time_limit)
                if not any(_tells(p) for p in references[d.lib].values()):  # an encoder has no logits
                    request = replace(request, embeddings=True)
                    own = replace(own, embeddings=True)
                    references[d.lib] = _run(own, Device("CPU", d.lib), runs, folder, time_limit)
                for p in references[d.lib].values():
                    if p.verdict == "PASS" and not _tells(p):
                        p.verdict, p.detail = "VACUOUS", "every result is 0"
            reference = references[d.lib]
            possible = {run: changes for run, changes in runs.items() if reference[run].verdict == "PASS"}
            found = _run(replace(request, lib=d.lib), d, possible, folder, time_limit)
            for run in runs:
                if run not in possible:
                    why = f"on the CPU: {reference[run].verdict} {reference[run].detail}"
                    out[d.name, run] = Played("NO REFERENCE", why)
                    continue
                played = compare(found[run], reference[run])
                if played.verdict == "FAIL":
                    look = Look(replace(request, lib=d.lib), d, {run: runs[run]}, folder, time_limit)
                    explain(played, look)
                out[d.name, run] = played
    return out


@dataclass(frozen=True, slots=True)
class Look:
    """What plays a run again to look at it more closely."""

    request: Request
    device: Device
    run: Mapping[str, Mapping[str, Any]]
    folder: Path
    time_limit: float

    def again(self, device: Device, forced: Path | None = None, *, values: bool = False) -> Played:
        """The run on `device`, its choices watched, or `forced` on it."""
        watch = {"forced": str(forced) if forced else None, "values": values}
        (played,) = _run(self.request, device, self.run, self.folder, self.time_limit, watch).values()
        return played


def explain(played: Played, look: Look) -> None:
    """Say of a run that failed what spoilt it; where it only took other experts at a near-tie, it passes.

    A device may take another expert where two scores are closer than it rounds. Then the CPU plays the run with the
    device's experts, and its results are what the device is held against.

    Args:
        played: a FAIL with its results.
        look: plays it again.
    """
    if any(not np.isfinite(r).all() for r in played.results):
        seen = look.again(look.device, values=True)
        played.detail += f"; {seen.spoilt}" if seen.spoilt else ""
        return
    watched = look.again(look.device)
    if watched.verdict != "PASS" or watched.choices is None:
        played.detail += f"; what it chose could not be looked at: {watched.verdict} {watched.detail}".rstrip()
        return
    found = choices.load(watched.choices)
    if not found:
        return
    kept = watched.choices.replace(watched.choices.with_name("choices-of-device.npz"))
    forced = look.again(Device("CPU", look.device.lib), kept)
    if forced.verdict != "PASS" or forced.choices is None:
        played.detail += f"; the CPU could not be given its choices: {forced.verdict} {forced.detail}".rstrip()
        return
    flips = choices.flips(found, choices.load(forced.choices))
    if flips.wrong:
        played.detail += f"; {flips.wrong}"
    elif flips.notes:
        _held(played, watched, forced, flips.notes)


def _held(played: Played, watched: Played, forced: Played, notes: Sequence[str]) -> None:
    """`played` judged by the CPU's run with the same experts."""
    more = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
    if any(not nmse(a, b) <= TOLERANCE for a, b in zip(played.results, watched.results, strict=True)):
        played.detail += f"; {notes[0]}{more}, but it gives other results while it is watched"
        return
    same = compare(replace(watched), forced)
    said = f"{notes[0]}{more}; with the same experts NMSE {same.nmse:.2g}"
    if same.verdict == "PASS":
        played.detail = f"{said}, with the CPU's own {played.nmse:.2g}"
        played.verdict, played.nmse, played.step = "PASS", same.nmse, None
    else:
        played.detail += f"; {said}"


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
    found: dict[str, Played] = {}
    while left := [n for n in runs if n not in found]:
        variables = {**os.environ, **ENVIRONMENT, **device.environment}
        env = {k: v for k, v in variables.items() if v is not None}
        deadline = time.monotonic() + time_limit * len(left)
        worker = Worker("conformance.suite.zoo.play_worker", time_limit=time_limit * len(left), env=env)
        try:
            try:
                worker.ask({"request": asdict(request), "device": device.device})
            except WorkerDiedError:
                raise
            except ConformanceError as e:
                return {n: Played("ERROR", str(e)) for n in runs}
            for name in left:
                i = list(runs).index(name)
                header = {"run": i, "changes": dict(runs[name]), "folder": str(folder), "watch": watch}
                reply, _ = worker.ask(header, seconds=max(0.0, deadline - time.monotonic()))
                found[name] = _played(reply, folder, i, watched=watch is not None)
        except WorkerTimeoutError:
            found[next(n for n in left if n not in found)] = Played(
                "TIMEOUT", f"no answer within {time_limit * len(left):g} s"
            )
        except WorkerDiedError as e:
            words = " / ".join(e.lines)[-LAST_WORDS:]
            found[next(n for n in left if n not in found)] = Played("CRASH", f"{e.how}: {words}")
        finally:
            worker.close()
    return found


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
