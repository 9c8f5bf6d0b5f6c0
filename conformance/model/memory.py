"""Does a backend hold a model's weights once? What llama.cpp says it holds, against what its process holds.

A runtime holds much that is no weight: its code's data, a JIT's kernels. So a small and a large model of one kind are
measured, and what matters is by how much more the large one takes, beside llama.cpp's own CPU on both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.ggml.errors import UsageError
from conformance.ggml.lib.breakdown import Parts
from conformance.live.llama import Device
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError
from conformance.suite.zoo.family import ENVIRONMENT, Request, prepare, read

COPIES = 1.5
"""Weights that a backend may hold, in units of those of the file: half-way between once and twice."""
_SANE = (0.9, 1.2)
"""What llama.cpp's own CPU must come to; elsewhere the measurement says nothing."""
_SMALL, _LARGE = 256, 32768
"""`feed_forward_length` of the two made-up models."""
_TOKENS = 32
"""Of a graph, at most: a compute buffer grows with it."""
_SET = "embedding_length:1024+block_count:2+attention.head_count:16+attention.head_count_kv:4+feed_forward_length:{}"
_TIME = 600.0
"""Seconds that one measurement may take."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one process held; bytes."""

    parts: Mapping[str, Parts]
    """Buffer type -> what llama.cpp says."""
    held: int
    """In this machine's memory, more than before the model was loaded."""
    peak: int
    """The most meanwhile."""
    device: int | None
    """In the device's memory, if it has one."""

    @property
    def model(self) -> int:
        """Weights, as llama.cpp says."""
        return sum(p.model for p in self.parts.values())

    @property
    def stated(self) -> int:
        """Everything that llama.cpp speaks of."""
        return sum(p.self for p in self.parts.values())

    @property
    def all(self) -> int:
        """In both memories."""
        return self.held + (self.device or 0)


@dataclass(frozen=True, slots=True)
class Pair:
    """One backend with a small and a large model."""

    small: Held
    large: Held

    @property
    def more(self) -> int:
        """Bytes that the large one takes more."""
        return self.large.all - self.small.all

    @property
    def peak(self) -> int:
        """The same at the worst moment."""
        return self.large.peak - self.small.peak + (self.large.device or 0) - (self.small.device or 0)


@dataclass(frozen=True, slots=True)
class Copies:
    """How often a backend holds the weights."""

    held: float
    """In the end; 1 is as llama.cpp's own CPU."""
    peak: float
    """At the worst moment."""


def copies(pair: Pair, cpu: Pair) -> Copies:
    """How often `pair` holds the weights that `cpu` holds once; UsageError where `cpu` itself does not.

    Caches and buffers of activations are the same in both, and so cancel.
    """
    weights = cpu.large.model - cpu.small.model
    if weights <= 0:
        raise UsageError(f"memory: a model of more weights than {cpu.small.model:,} bytes expected")
    others = (cpu.large.stated - cpu.large.model) - (cpu.small.stated - cpu.small.model)
    low, high = (int(limit * weights) for limit in _SANE)
    if not low <= cpu.more <= high + max(0, others):
        raise UsageError(
            f"memory: llama.cpp's own CPU holds {cpu.more:,} bytes for {weights:,} bytes of weights; {low:,} to "
            f"{high + max(0, others):,} expected, so this machine's figures say nothing"
        )
    return Copies(1 + (pair.more - cpu.more) / weights, 1 + (pair.peak - cpu.peak) / weights)


def small(folder: Path, weight_type: str) -> Request:
    """A made-up llama of few weights, its file in `folder`; UsageError as `prepare`."""
    return _made(folder / "small.gguf", weight_type, _SMALL)


def large(folder: Path, weight_type: str) -> Request:
    """The same with many more weights, and nothing else that is larger."""
    return _made(folder / "large.gguf", weight_type, _LARGE)


def of_file(model: Path, like: Request) -> Request:
    """A user's model, in a context as `like`."""
    return replace(like, model=str(model.resolve()), id=f"model/{model.stem}@0", params={"model": model.name})


def _made(path: Path, weight_type: str, length: int) -> Request:
    request = prepare(path, *read(f"zoo/llama-real=1,w={weight_type},set={_SET.format(length)}@1"))
    return replace(request, n_ubatch=_TOKENS)


def measure(request: Request, device: Device) -> Held:
    """What a process of its own holds with a model on `device`; UsageError if it cannot, or dies."""
    variables = {**os.environ, **ENVIRONMENT, **device.environment}
    env = {k: v for k, v in variables.items() if v is not None}
    worker = Worker("conformance.live.worker", time_limit=_TIME, env=env)
    try:
        found: dict[str, Any] = worker.ask({"memory": asdict(replace(request, lib=device.lib)), **device.asked})[0]
    except WorkerTimeoutError:
        raise UsageError(f"{device.name}: no answer within {_TIME:g} s") from None
    except WorkerDiedError as e:
        raise UsageError(f"{device.name}: its process died: {' / '.join(e.lines[-3:]) or e.how}") from None
    finally:
        worker.close()
    parts = {name: Parts(**p) for name, p in found["parts"].items()}
    return Held(parts, found["held"], found["peak"], found["device"])
