"""The family `projector`: libmtmd encodes generated images and sounds on a device.

An id is `projector/NAME-do=RUN,w=TYPE@1`: a medium, compared with the CPU, or a relation of two runs on the device.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast, get_args

import numpy as np

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.judge.verdict import Pair, Result
from conformance.llama.zoo.family import ENVIRONMENT, KEYS, TIME_LIMIT
from conformance.llama.zoo.model import lacks
from conformance.process import Deadline, Worker, WorkerDiedError, WorkerTimeoutError
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, is_glob, split_glob, without_steps
from conformance.suite.family import Level, read_keys, split_id, word

from .comparison import F32, judge_all, judge_runs, saved, vacuous
from .llama import Device, Process, device, without_reference
from .projectors.encoder import Load, Medium
from .projectors.files import write_projector, write_text_model
from .projectors.relations import MEDIA, RELATIONS
from .projectors.table import projector, table

NAME = "projector"
SERVICE = "conformance.llama.live.projectors.worker"
DOES = (*MEDIA, *RELATIONS)
_KEYS = {"do": word(*DOES), "w": KEYS["w"]}


def ids_of(name: str) -> list[str]:
    """Return the ids of every run and relation of a projector."""
    return [f"{NAME}/{name}-do={do}@1" for do in DOES]


def _ids(level: Level) -> list[str]:
    return [i for name in (["mlp"] if level == "smoke" else table()) for i in ids_of(name)]


def _unlisted(glob: str) -> list[str]:
    names, rest = split_glob(glob)
    do, comma, last = rest.removeprefix("do=").partition(",")
    if not comma or is_glob(last):
        return []
    return [f"{NAME}/{n}-do={d},{last}" for n in table() if fnmatchcase(n, names) for d in DOES if fnmatchcase(d, do)]


def _read(case_id: str) -> tuple[str, str, str]:
    """Return projector, run and matrix type of an id; UsageError if it is invalid."""
    body, _ = split_id(case_id, NAME, "NAME-do=RUN,w=TYPE")
    name, _, text = body.rpartition("-do=")
    values, _ = read_keys(case_id, f"do={text}", _KEYS)
    return projector(name).name, values["do"], values["w"]


def _build(case_id: str) -> Case:
    _read(case_id)
    return without_steps(case_id)


class Player:
    """Runs projectors on one device."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the device. UnavailableError if the backend is not a ggml library."""
        self._spec, self._device, self._limits = spec, device(spec), isolation
        self._folder = Path(tempfile.mkdtemp(prefix="conformance-projector-"))
        self._made = ("", "")
        self._processes: dict[Device, Process] = {}

    def play(self, case_id: str) -> Result:
        """Run a medium or relation. Raises as `Process.ask`, or as `without_reference`."""
        name, do, type_w = _read(case_id)
        if self._made != (name, type_w):
            self._end()
            load = prepare(self._folder, name, type_w)
            for d in (self._device, self._device.judge):
                self._processes[d] = Process(SERVICE, d, replace(load, lib=d.lib), self._limits)
            self._made = name, type_w
        begun, pair = time.perf_counter(), Pair(case_id, str(self._spec))
        if do in RELATIONS:
            reply = self._processes[self._device].ask(relation=do, folder=str(self._folder))
            comparisons = saved(reply["comparisons"], self._folder / f"{do}.npz")
            result = judge_all(pair, do, comparisons, on_cpu=self._device.on_cpu)
        else:
            expected = self._reference(do)
            if not expected or not tells(expected):
                return vacuous(pair, "no reference: on the CPU a row of embeddings is 0")
            result = judge_runs(pair, self._chunks(self._device, do), expected)
        return replace(result, seconds=time.perf_counter() - begun)

    def _chunks(self, d: Device, medium: str) -> list[F32]:
        file = self._folder / f"{medium}.npz"
        self._processes[d].ask(run=medium, file=str(file))
        with np.load(file) as arrays:
            return [arrays[k] for k in arrays.files]

    def _reference(self, medium: str) -> list[F32]:
        """Encode on the CPU, an array per chunk. Raises as `without_reference`."""
        try:
            return self._chunks(self._device.judge, medium)
        except (BackendError, UnavailableError) as e:
            raise without_reference(e, self._device, lambda: self._chunks(self._device, medium)) from None

    def _end(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def close(self) -> None:
        """End all processes."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)


def tells(chunks: Sequence[F32]) -> bool:
    """Return True if no row of embeddings is all zeros."""
    return all(rows.any(axis=1).all() for rows in chunks)


def capture_projector(name: str, medium: Medium, output: Path, lib: str = "", type_w: str = "f32") -> None:
    """Encode a medium on the CPU and write the result as a case file.

    Raises:
        UsageError: there is no such projector or library, or libmtmd fails; gives its reason.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-projector-") as folder:
        load = replace(prepare(Path(folder), name, type_w), lib=lib)
        worker = Worker(SERVICE, deadline=Deadline(each=TIME_LIMIT), env={**os.environ, **ENVIRONMENT})
        try:
            worker.ask({"load": asdict(load), **Device("").asked})
            worker.ask({"record": medium, "output": str(output.absolute())})
        except WorkerTimeoutError:
            raise UsageError(f"libmtmd gave no answer within {TIME_LIMIT:g} s") from None
        except WorkerDiedError as e:
            raise UsageError(f"libmtmd ended its process: {' / '.join(e.lines[-3:]) or e.how}") from None
        finally:
            worker.close()


def medium_of(case_id: str) -> tuple[str, Medium, str]:
    """Return projector, medium and matrix type of an id like `projector/mlp-do=media-odd@1`."""
    name, do, w = _read(case_id)
    medium = do.removeprefix("media-")
    if medium not in get_args(Medium):
        raise UsageError(f"{case_id}: do=media-{{{'|'.join(get_args(Medium))}}} expected, {do} found")
    return name, cast("Medium", medium), w


def prepare(folder: Path, name: str, type_w: str = "f32") -> Load:
    """Write the files of a projector into `folder`; UsageError for an unknown name."""
    it = projector(name)
    stream = f"clip/{name}"
    file, text = folder / "mmproj.gguf", folder / "text.gguf"
    write_projector(file, it, stream, type_w)
    write_text_model(text, it)
    return Load(name, it.modality, str(file), str(text), it.tile, stream, architecture=it.text)


FAMILY = LiveFamily(
    NAME,
    "libmtmd encodes generated images and sounds on a device, compared with its own CPU",
    _ids,
    _build,
    seeded=False,
    lacks=lacks,
    player=Player,
    unlisted=_unlisted,
)
