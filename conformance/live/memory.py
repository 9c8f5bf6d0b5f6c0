"""The family `memory`: measures how many copies of a model's weights a process has.

An id is `memory/w=TYPE@1` for generated models; `copies=N` sets the limit, `model=FILE` names a model for llama.cpp,
with a comma written as `%2C`. A process also contains code and JIT kernels. So a small and a large model of one kind
are measured, and only the difference counts. llama.cpp on a ggml device is compared with its own CPU; for any other
adapter `perf.held` measures a decoder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from conformance.backend.registry import Spec, adapter, resolve
from conformance.case.case import Case
from conformance.ggml.errors import (
    BackendCrashError,
    BackendTimeoutError,
    ConformanceError,
    UnavailableError,
    UsageError,
)
from conformance.ggml.lib.breakdown import Parts
from conformance.ggml.types import TYPES
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict
from conformance.perf.held import allowance, weights_held
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.live import LiveFamily, without_steps
from conformance.suite.family import Level, read_keys, split_id, text, word
from conformance.suite.zoo.family import ENVIRONMENT, Request, prepare, read

from .llama import GGML, Device, device

NAME = "memory"
_KEYS = {"w": word("q4_0", *TYPES), "copies": text("", "a number"), "model": text("", "a file")}
COPIES = 1.5
"""Default limit of copies of the weights: half-way between one and two."""
_SANE = (0.9, 1.2)
"""Range for llama.cpp's own CPU; outside it the measurement is invalid."""
_SMALL, _LARGE = 256, 32768
"""`feed_forward_length` of the two generated models."""
_TOKENS = 32
"""Largest `n_ubatch`; compute buffers grow with it."""
_SET = "embedding_length:1024+block_count:2+attention.head_count:16+attention.head_count_kv:4+feed_forward_length:{}"
_TIME = 600.0
"""Time limit of one measurement, in seconds."""


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of one process, in bytes."""

    parts: Mapping[str, Parts]
    """Buffer type -> llama.cpp's figures."""
    held: int
    """Growth of host memory since before the model was loaded."""
    peak: int
    """The largest growth during the run."""
    device: int | None
    """Growth of the device's own memory; None if it has none."""

    @property
    def model(self) -> int:
        """Bytes of weights, as llama.cpp reports them."""
        return sum(p.model for p in self.parts.values())

    @property
    def stated(self) -> int:
        """All bytes that llama.cpp reports."""
        return sum(p.self for p in self.parts.values())

    @property
    def all(self) -> int:
        """Bytes in host and device memory."""
        return self.held + (self.device or 0)


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one backend with a small and with a large model."""

    small: Held
    large: Held

    @property
    def more(self) -> int:
        """Bytes that the large model takes beyond the small one."""
        return self.large.all - self.small.all

    @property
    def peak(self) -> int:
        """The same difference at peak."""
        return self.large.peak - self.small.peak + (self.large.device or 0) - (self.small.device or 0)


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the weights that a backend has in memory."""

    held: float
    """Copies after loading; 1 as for llama.cpp's own CPU."""
    peak: float
    """Copies of the weights at peak."""


def copies(growth: Growth, cpu: Growth) -> Copies:
    """Return how many copies `growth` has; UsageError if `cpu` does not have one copy.

    Caches and activation buffers are equal in both and cancel.
    """
    weights = cpu.large.model - cpu.small.model
    if weights <= 0:
        raise UsageError(f"memory: a model of more weights than {cpu.small.model:,} bytes expected")
    others = (cpu.large.stated - cpu.large.model) - (cpu.small.stated - cpu.small.model)
    low, high = (int(limit * weights) for limit in _SANE)
    if not low <= cpu.more <= high + max(0, others):
        raise UsageError(
            f"memory: llama.cpp's own CPU holds {cpu.more:,} bytes for {weights:,} bytes of weights; {low:,} to "
            f"{high + max(0, others):,} expected, so measurements on this machine are invalid"
        )
    return Copies(1 + (growth.more - cpu.more) / weights, 1 + (growth.peak - cpu.peak) / weights)


def small(folder: Path, weight_type: str) -> Request:
    """Generate a small llama in `folder`; UsageError as `prepare`."""
    return _made(folder / "small.gguf", weight_type, _SMALL)


def large(folder: Path, weight_type: str) -> Request:
    """Generate the same model with many more weights and nothing else larger."""
    return _made(folder / "large.gguf", weight_type, _LARGE)


def of_file(model: Path, like: Request) -> Request:
    """Return the request for a user's model, with the context of `like`."""
    return replace(like, model=str(model.resolve()), id=f"model/{model.stem}@0", params={"model": model.name})


def _made(path: Path, weight_type: str, length: int) -> Request:
    request = prepare(path, *read(f"zoo/llama-real=1,w={weight_type},set={_SET.format(length)}@1"))
    return replace(request, n_ubatch=_TOKENS)


def measure(request: Request, device: Device) -> Held:
    """Measure the memory of a separate process that holds a model on `device`.

    Raises:
        BackendCrashError: it dies.
        BackendTimeoutError: it does not answer in time.
        UnavailableError: there is no such device, or the system does not report the memory of a process.
    """
    variables = {**os.environ, **ENVIRONMENT, **device.environment}
    env = {k: v for k, v in variables.items() if v is not None}
    worker = Worker("conformance.live.worker", time_limit=_TIME, env=env)
    try:
        found: dict[str, Any] = worker.ask({"memory": asdict(replace(request, lib=device.lib)), **device.asked})[0]
    except WorkerTimeoutError:
        raise BackendTimeoutError(f"no answer within {_TIME:g} s") from None
    except WorkerDiedError as e:
        text = f"its process died ({e.how}): {' / '.join(e.lines[-3:])}"
        raise BackendCrashError(text, words="\n".join(e.lines), died=e.how) from None
    except ConformanceError as e:
        raise UnavailableError(str(e)) from None
    finally:
        worker.close()
    parts = {name: Parts(**p) for name, p in found["parts"].items()}
    return Held(parts, found["held"], found["peak"], found["device"])


def _read(case_id: str) -> tuple[str, float | None, Path | None]:
    """Return weight type, limit and model of an id; UsageError if it is invalid."""
    body, _ = split_id(case_id, NAME, "w=TYPE,copies=N,model=FILE")
    values, _ = read_keys(case_id, body, _KEYS)
    try:
        limit = float(values["copies"]) if values["copies"] else None
    except ValueError:
        raise UsageError(f"case {case_id!r}: copies: a number expected") from None
    return values["w"], limit, Path(unquote(values["model"])) if values["model"] else None


def _build(case_id: str) -> Case:
    _read(case_id)
    return without_steps(case_id)


class Player:
    """Measures one backend."""

    def __init__(self, spec: Spec, _isolation: Isolation, _save: Path | None) -> None:
        """Find the backend. UsageError if not installed, UnavailableError without llama.cpp."""
        adapter(resolve(spec).name)
        self._spec = spec
        self._device = device(spec) if resolve(spec).name == GGML else None
        self._folder = Path(tempfile.mkdtemp(prefix="conformance-memory-"))

    def play(self, case_id: str) -> Result:
        """Measure how many copies of the weights the backend has in memory.

        Raises:
            UnavailableError: it cannot be measured.
            BackendError: the backend failed.
        """
        weight_type, limit, model = _read(case_id)
        if self._device is None:
            return self._of_adapter(weight_type, limit, model)
        return self._on_device(self._device, weight_type, COPIES if limit is None else limit, model)

    def close(self) -> None:
        """Remove the models."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of_adapter(self, weight_type: str, limit: float | None, model: Path | None) -> Result:
        allowed = allowance(self._spec, weight_type) if limit is None else limit
        if model is not None:
            raise UnavailableError(
                f"{model.name} is for llama.cpp on a ggml device; other adapters run a generated model"
            )
        if allowed is None:
            raise UnavailableError(f"no limit is known for {weight_type} weights: set copies=N in the id")
        held = weights_held(self._spec, partial(open_backend, self._spec, own=True), weight_type)
        return _judged(held.held, held.peak, allowed, {"weights": float(held.nbytes)})

    def _on_device(self, on: Device, weight_type: str, limit: float, model: Path | None) -> Result:
        little = small(self._folder, weight_type)
        much = of_file(model, little) if model else large(self._folder, weight_type)
        own = Device("CPU", on.lib)
        cpu = Growth(measure(little, own), measure(much, own))
        growth = Growth(measure(little, on), measure(much, on))
        try:
            found = copies(growth, cpu)
        except UsageError as e:
            raise UnavailableError(str(e)) from None
        held = growth.large
        sizes = {"resident": held.held, "peak": held.peak, "stated": held.stated, "device": held.device or 0}
        sizes |= {f"{what} in {buffer}": getattr(p, what) for buffer, p in held.parts.items()
                  for what in ("model", "context", "compute")}  # fmt: skip
        return _judged(found.held, found.peak, limit, {k: float(n) for k, n in sizes.items()})


def _judged(held: float, peak: float, limit: float, sizes: Mapping[str, float]) -> Result:
    """Return the result of a measurement; `sizes` in bytes."""
    metrics = {"copies": held, "peak_copies": peak, "limit": limit, **sizes}
    said = f"{held:.2f} times the weights, limit {limit:g}"
    if held <= limit:
        return Result("", "", Verdict.PASS, notes=(said,), metrics=metrics)
    return Result("", "", Verdict.FAIL, error=Error(said), metrics=metrics)


def _ids(level: Level) -> list[str]:
    return [f"{NAME}/w={w}@1" for w in (("q4_0",) if level == "smoke" else ("q4_0", "q8_0"))]


FAMILY = LiveFamily(
    NAME,
    "measure how many copies of a model's weights a backend's process has in memory",
    _ids,
    _build,
    seeded=False,
    player=Player,
    columns=("copies", "peak_copies", "limit"),
)
