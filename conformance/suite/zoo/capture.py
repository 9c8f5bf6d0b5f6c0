"""Recordings: a request goes to a worker process with llama.cpp, a case comes back."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError

from .model import Value, architecture, chosen_types, write_metadata, write_model

_MISSING = re.compile(r"missing tensor '([^']+)'|tensor '([^']+)' not found")
TIME_LIMIT = 120.0
"""Seconds that one recording may take."""
ENVIRONMENT = {"GGML_NO_BACKTRACE": "1"}
"""What the processes of llama.cpp have beside our own environment."""


@dataclass(frozen=True, slots=True)
class Request:
    """One recording, or a list of a model's weights: the worker's request."""

    id: str
    stream: str
    """First text of every stream; the id, unless another's bytes are wanted."""
    model: str = ""
    """A GGUF file: metadata alone, or a whole model."""
    output: str = ""
    """The case file to write; "" for a list of the weights instead."""
    from_file: bool = False
    """Load the file's own weights; otherwise they are made while the model is built."""
    recipes: bool = True
    """Its weights are those that `weights.recipe` makes, wherever they lie."""
    by_reference: bool = False
    """Weights that stand in the model file stay there."""
    lib: str = ""
    plan: str = "p5.d4"
    n_ctx: int = 256
    """Cells of one stream."""
    n_seq_max: int = 1
    n_ubatch: int = 512
    unified: bool = False
    swa_full: bool = True
    """Layers with a sliding window keep as many cells as the others, as by llama.cpp's default."""
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    type_w: str = "f32"
    """Of matrices that may have another type than F32."""
    nodes: int = 0
    """Of this many graphs, from the first on, every node and every cache is recorded."""
    embeddings: bool = False
    family: str = "zoo"
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)


def capture(request: Request, arch: str, keys: Mapping[str, Value], *, whole: bool) -> Case:
    """Record an architecture made from metadata; `whole` as of `prepare`.

    Raises:
        ConformanceError: as the worker; or it died: names the last words of llama.cpp.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as folder:
        output = Path(folder, "case.gguf")
        ask(replace(prepare(Path(folder, "model.gguf"), request, arch, keys, whole=whole), output=str(output)))
        return casefile.read_one(output)


def prepare(path: Path, request: Request, arch: str, keys: Mapping[str, Value], *, whole: bool) -> Request:
    """The request for a model, whose file is made at `path`.

    Args:
        path: where to.
        request: what to record.
        arch: the architecture.
        keys: its metadata.
        whole: a model file without what llama.cpp can do without; else metadata alone, and a weight for every place
            that llama.cpp has for one.

    Raises:
        ConformanceError: as `capture`.
    """
    if whole:
        make_model(path, request, arch, keys)
        return replace(request, model=str(path), from_file=True)
    write_metadata(path, arch, keys, {})
    known = architecture(arch)
    if request.type_w != "f32" or known.types:
        weights = ask(replace(request, model=str(path), output=""))["weights"]
        write_metadata(path, arch, keys, chosen_types(weights, request.type_w, known))
    return replace(request, model=str(path))


def record_model(request: Request) -> Case:
    """Record a model that a user has; its weights are part of the case, or stay in the file (`by_reference`).

    Raises:
        ConformanceError: as `capture`.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as folder:
        output = Path(folder, "case.gguf")
        ask(replace(request, output=str(output), from_file=True, recipes=False), time_limit=10 * TIME_LIMIT)
        return casefile.read_one(output, models=[Path(request.model).parent])


def make_model(path: Path, request: Request, arch: str, keys: Mapping[str, Value]) -> None:
    """Write a GGUF file that llama.cpp loads, with made-up weights.

    Raises:
        ConformanceError: as `capture`.
    """
    write_metadata(path, arch, keys, {})
    weights = ask(replace(request, model=str(path), output=""))["weights"]
    missing: set[str] = set()
    for _ in weights:
        write_model(path, request.stream, request.type_w, architecture(arch), keys, weights, missing)
        try:
            ask(replace(request, model=str(path), output="", from_file=True))
        except UsageError as e:
            name = _missing(str(e))
            if not name or name in missing:
                raise
            missing.add(name)
        else:
            return


def _missing(message: str) -> str:
    """The weight that llama.cpp misses, by its own words."""
    match = _MISSING.search(message)
    return match[1] or match[2] if match else ""


def ask(request: Request, time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """The worker's answer.

    Raises:
        ConformanceError: the one that the worker met; or it died or was too slow.
    """
    worker = Worker("conformance.suite.zoo.worker", time_limit=time_limit, env={**os.environ, **ENVIRONMENT})
    try:
        return worker.ask({"record": asdict(request)})[0]
    except WorkerTimeoutError:
        raise UsageError(f"llama.cpp gave no answer within {time_limit:g} s") from None
    except WorkerDiedError as e:
        raise UsageError(f"llama.cpp ended its process: {' / '.join(e.lines[-3:]) or e.how}") from None
    finally:
        worker.close()
