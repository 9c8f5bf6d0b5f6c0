"""Let libmtmd encode made-up images and sounds on devices, and judge the embeddings."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from conformance.ggml.errors import UsageError
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError
from conformance.suite.zoo.family import ENVIRONMENT, TIME_LIMIT
from conformance.suite.zoo.play import UNSUPPORTED, Device, Played, compare, conduct
from conformance.suite.zoo.verbs.desk import Pair
from conformance.suite.zoo.verbs.play import ON_CPU, judge_pairs

from .encoder import Load, Medium
from .files import write_projector, write_text_model
from .relations import MEDIA
from .table import projector

ROOT = "clip/"
"""What the name of a projector's row begins with, beside those of architectures."""
SERVICE = "conformance.suite.zoo.projectors.worker"


def play_projector(
    name: str,
    devices: Sequence[Device],
    runs: Sequence[str],
    type_w: str = "f32",
    time_limit: float = 60.0,
) -> dict[tuple[str, str], Played]:
    """Play runs and relations of a projector on devices; a run is judged by the CPU of the same library.

    `runs`: names of `MEDIA` and `RELATIONS`; `type_w` as of `write_projector`; `time_limit`: seconds that one may take.

    Returns:
        (device's name, run's name) -> what came of it. Where the CPU itself fails, its verdict is `NO REFERENCE`.
    """
    out: dict[tuple[str, str], Played] = {}
    references: dict[str, dict[str, Played]] = {}
    with tempfile.TemporaryDirectory(prefix="conformance-projector-") as folder_name:
        folder = Path(folder_name)
        load = prepare(folder, name, type_w)
        for d in devices:
            played = dict(_on(replace(load, lib=d.lib), d, runs, folder, time_limit))
            judge = d.lib if d.judge is None else d.judge
            if judge not in references:
                media = [run for run in runs if run in MEDIA]
                cpu = Device("CPU", judge)
                references[judge] = dict(_on(replace(load, lib=judge), cpu, media, folder, time_limit))
            for run in runs:
                held = _held(played[run], references[judge][run]) if run in MEDIA else played[run]
                out[d.name, run] = held
    return out


def capture_projector(name: str, medium: Medium, output: Path, lib: str = "", type_w: str = "f32") -> None:
    """Write what the CPU computes of a medium as a case file.

    Raises:
        UsageError: there is no such projector or library, or libmtmd cannot; gives its reason.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-projector-") as folder:
        load = replace(prepare(Path(folder), name, type_w), lib=lib)
        worker = Worker(SERVICE, time_limit=TIME_LIMIT, env={**os.environ, **ENVIRONMENT})
        try:
            worker.ask({"load": asdict(load), **Device("").asked})
            worker.ask({"record": medium, "output": str(output.absolute())})
        except WorkerTimeoutError:
            raise UsageError(f"libmtmd gave no answer within {TIME_LIMIT:g} s") from None
        except WorkerDiedError as e:
            raise UsageError(f"libmtmd ended its process: {' / '.join(e.lines[-3:]) or e.how}") from None
        finally:
            worker.close()


def prepare(folder: Path, name: str, type_w: str = "f32") -> Load:
    """The files of a projector, written into `folder`; UsageError for an unknown name."""
    it = projector(name)
    stream = f"{ROOT}{name}"
    file, text = folder / "mmproj.gguf", folder / "text.gguf"
    write_projector(file, it, stream, type_w)
    write_text_model(text, it)
    return Load(name, it.modality, str(file), str(text), it.tile, stream, architecture=it.text)


def _on(load: Load, d: Device, runs: Sequence[str], folder: Path, time_limit: float) -> Iterator[tuple[str, Played]]:
    """Runs and relations on one device, in a process of its own."""
    asks: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run in MEDIA:
            asks[run] = {"run": run, "folder": str(folder), "file": f"{run}.npz"}
        else:
            asks[run] = {"relation": run, "folder": str(folder)}
    on_cpu = d.device in ON_CPU
    yield from conduct(
        load, d, asks, lambda n, reply: judge(n, reply, folder, on_cpu=on_cpu), time_limit, SERVICE
    ).items()


def judge(name: str, reply: Mapping[str, Any], folder: Path, *, on_cpu: bool) -> Played:
    """What came of a run or relation, by the worker's reply and the arrays that it left in `folder`."""
    if "unsupported" in reply:
        return Played(UNSUPPORTED, reply["unsupported"])
    if "failed" in reply:
        return Played("ERROR", reply["failed"])
    with np.load(folder / f"{name}.npz") as file:
        if name in MEDIA:
            return Played("PASS", results=[file[k] for k in file.files])
        pairs = [Pair(**p, actual=file[f"actual{i}"], expected=file[f"expected{i}"])
                 for i, p in enumerate(reply["pairs"])]  # fmt: skip
    return judge_pairs(pairs, on_cpu=on_cpu)


def _held(played: Played, reference: Played) -> Played:
    """A run against the CPU's: each chunk is a batch of its own, and no row of the CPU's is all zeros."""
    if played.verdict == UNSUPPORTED:
        return played
    if reference.verdict != "PASS":
        return Played("NO REFERENCE", f"on the CPU: {reference.verdict} {reference.detail}")
    if not all(rows.any(axis=1).all() for rows in reference.results) or not reference.results:
        return Played("VACUOUS", "on the CPU: a row of embeddings is 0")
    if played.verdict == "PASS" and len(played.results) != len(reference.results):
        detail = f"{len(reference.results)} chunks expected, {len(played.results)} found"
        return Played("FAIL", detail)
    return compare(played, reference)
