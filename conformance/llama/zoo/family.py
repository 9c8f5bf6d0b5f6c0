"""The family `zoo`: graphs and results of llama.cpp itself, for every architecture it knows.

An id is `zoo/ARCH-key=value,key=value@seed`; an omitted key has its default. `seqs` sequences of `ctx` cells each (or,
`unified=1`, together), flash attention `fa`, `swa=window` for a small cache where the attention window slides, cache
types `cache` and `cache_v`, tokens per graph `ubatch`, type of the matrices `w`, `real=1` without the weights that
llama.cpp does not require, `nodes=2` with the value of every node of the first two graphs, `set` of metadata keys
(`set=block_count:1+attention.head_count:2/0`) and the plan `run` (`suite/decoder/plan.py`).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from conformance.case import casefile
from conformance.case.case import Case
from conformance.case.recipe import MAKEABLE
from conformance.ggml.errors import BackendTimeoutError, UnavailableError, UsageError
from conformance.ggml.types import TYPES
from conformance.process import Deadline, Worker, WorkerDiedError, WorkerTimeoutError
from conformance.suite.family import Family, Key, Level, Table, ids_of, keys, read_keys, split_id, text, with_seed
from conformance.suite.grid import grid

from . import model
from .model import Value, architecture, chosen_types, full_key, parse_value, write_metadata, write_model

_MISSING = re.compile(r"missing tensor '([^']+)'|tensor '([^']+)' not found")
"""llama.cpp's message about a missing weight."""
TIME_LIMIT = 120.0
"""Seconds that one recording may take."""
ENVIRONMENT = {"GGML_NO_BACKTRACE": "1"}
"""Environment variables added for processes of llama.cpp."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the worker: record a case, or list a model's weights."""

    id: str
    stream: str
    """Name of all random streams: the id, unless another case's bytes are wanted."""
    model: str = ""
    """A GGUF file: metadata only, or a whole model."""
    output: str = ""
    """The case file to write; "" to list the weights instead."""
    from_file: bool = False
    """Load the file's own weights; otherwise generate them while the model is built."""
    recipes: bool = True
    """True if the weights come from `model.recipe`, wherever they are stored."""
    by_reference: bool = False
    """True if weights in the model file stay there."""
    lib: str = ""
    plan: str = "p5.d4"
    n_ctx: int = 256
    """Cells of one stream."""
    n_seq_max: int = 1
    n_ubatch: int = 512
    unified: bool = False
    swa_full: bool = True
    """True if sliding-window layers have as many cells as the others, as by default."""
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    type_w: str = "f32"
    """Type of matrices that need not be F32."""
    nodes: int = 0
    """Number of graphs, from the first on, whose nodes and caches are all recorded."""
    embeddings: bool = False
    family: str = "zoo"
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)


def prepare(
    path: Path, request: Request, arch: str, keys: Mapping[str, Value], whole: bool, time_limit: float = TIME_LIMIT
) -> Request:
    """Make the model file at `path` and return the request that loads it.

    `whole`: write a model file without optional weights; otherwise metadata only, and a weight for every place that
    llama.cpp has for one.

    Raises:
        ConformanceError: see `ask`.
    """
    if whole:
        make_model(path, request, arch, keys, time_limit)
        return replace(request, model=str(path), from_file=True)
    write_metadata(path, arch, keys, {})
    entry = architecture(arch)
    if request.type_w != "f32" or entry.types:
        weights = ask(replace(request, model=str(path), output=""), time_limit)["weights"]
        write_metadata(path, arch, keys, chosen_types(weights, request.type_w, entry))
    return replace(request, model=str(path))


def record_model(request: Request) -> Case:
    """Record a user's model; its weights go into the case, or stay in the file (`by_reference`).

    Raises:
        ConformanceError: see `ask`.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as folder:
        output = Path(folder, "case.gguf")
        ask(replace(request, output=str(output), from_file=True, recipes=False), time_limit=10 * TIME_LIMIT)
        return casefile.read_one(output, models=[Path(request.model).parent])


def make_model(
    path: Path, request: Request, arch: str, keys: Mapping[str, Value], time_limit: float = TIME_LIMIT
) -> None:
    """Write a loadable GGUF file with generated weights; ConformanceError: see `ask`."""
    write_metadata(path, arch, keys, {})
    weights = ask(replace(request, model=str(path), output=""), time_limit)["weights"]
    missing: set[str] = set()
    for _ in weights:
        write_model(path, request.stream, request.type_w, architecture(arch), keys, weights, missing)
        try:
            ask(replace(request, model=str(path), output="", from_file=True), time_limit)
        except UsageError as e:
            found = _MISSING.search(str(e))
            name = found and (found[1] or found[2])
            if not name or name in missing:
                raise
            missing.add(name)
        else:
            return


def ask(request: Request, time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """Return the worker's answer.

    Raises:
        BackendTimeoutError: it gave none in time.
        UsageError: it died.
        ConformanceError: it raised one.
    """
    worker = Worker(
        "conformance.llama.zoo.worker", deadline=Deadline(each=time_limit), env={**os.environ, **ENVIRONMENT}
    )
    try:
        return worker.ask({"record": asdict(request)})[0]
    except WorkerTimeoutError:
        raise BackendTimeoutError(f"llama.cpp gave no answer within {time_limit:g} s") from None
    except WorkerDiedError as e:
        raise UsageError(f"llama.cpp ended its process: {' / '.join(e.lines[-3:]) or e.how}") from None
    finally:
        worker.close()


NAME = "zoo"

_CACHES = ("f16", *TYPES)
_WEIGHTS = ("f32", *(t for t in TYPES if t in MAKEABLE - {"f32"}))

KEYS: dict[str, Key] = {
    **keys("seqs=1 unified=|0|1 fa=|0|1 swa=full|window"),
    **keys(f"cache={'|'.join(_CACHES)} cache_v=|{'|'.join(_CACHES)} ctx=256 ubatch=512 w={'|'.join(_WEIGHTS)}"),
    **keys("real=0|1 nodes=0"),
    "set": text("", "KEY:VALUE joined by +"),
    "run": text("p5.d4", "a plan like p5.d4"),
}
"""Key -> its grammar; `unified` and `fa` default to the architecture's own."""

_ID = re.compile(r"(?P<arch>[a-z0-9_.-]+?)(?:-(?P<keys>[a-z_]+=.*))?", re.ASCII)
_BOTH = "seqs=2,nodes=2"
"""Two sequences; the prefill and the first decode step are also compared node by node."""
TABLE: Table = {
    "smoke": (
        "qwen3-seqs=2,nodes=1,set=block_count:1",
        "lfm2-seqs=2",
        "rwkv7-seqs=2,set=block_count:1",
    ),
    "standard": ("gpt-oss-seqs=2,set=block_count:1",),
    "full": (
        grid("llama qwen3 gemma2 gpt-oss falcon deepseek2 lfm2 bloom grok", seqs=2, fa=0),
        grid("llama gemma2 gpt-oss qwen3next", seqs=3, unified="0 1", run="p5+3+7.d2.rm1.d2.add1.p2.d1"),
        grid("llama gemma3 phi3", seqs=2, cache="q8_0 f32 bf16"),
        grid("llama qwen2 olmo2 gpt-oss command-r", seqs=2, w="q4_0 q8_0"),
        grid("llama qwen3 gemma2 gpt-oss lfm2", seqs=2, real=1),
        grid("llama gemma2 phi2 qwen2moe", run="p20.d2.shift5.d2.back2.p4.d1"),
        grid("llama mamba qwen3next t5", run="p7.d1.reset.p9.d2"),
        grid("llama gpt-oss mamba2 rwkv6", seqs=2, ubatch=16, run="p20.d2"),
        "llama-seqs=3,unified=1,run=p9.cp0.d3",
        "llama-ctx=512,run=p253.d6",
    ),
}
"""Level -> ids that it adds, without family and seed; `standard` adds all architectures."""


def ids(level: Level) -> Sequence[str]:
    """Return the case ids up to a level; UnavailableError if llama.cpp is not available."""
    if reason := available():
        raise UnavailableError(reason)
    return _ids(level)


@cache
def _ids(level: Level) -> tuple[str, ...]:
    standard = () if level == "smoke" else (*TABLE["standard"], *[f"{arch}-{_BOTH}" for arch in model.runnable()])
    return tuple(ids_of({**TABLE, "standard": standard}, lambda body: with_seed(NAME, body))(level))


def read(case_id: str, lib: str = "") -> tuple[Request, str, dict[str, Value], bool]:
    """Parse an id: request, architecture, metadata keys, True if optional weights are absent.

    Raises:
        UsageError: the id is malformed, or the architecture does not run.
    """
    form = "ARCH-key=value,key=value"
    body, seed = split_id(case_id, NAME, form)
    match = _ID.fullmatch(body)
    if match is None:
        raise UsageError(f"case {case_id!r}: {NAME}/{form}@seed expected")
    values, params = read_keys(case_id, match["keys"] or "", KEYS)
    arch = model.architecture(match["arch"])
    keys = {
        **arch.keys,
        **dict(_setting(case_id, arch.of or arch.name, item) for item in values["set"].split("+") if item),
    }
    request = Request(
        id=case_id,
        stream=case_id,
        lib=lib,
        plan=values["run"],
        n_ctx=values["ctx"],
        n_seq_max=values["seqs"],
        n_ubatch=values["ubatch"],
        unified=values["unified"] == "1" if values["unified"] else arch.unified,
        flash_attn=values["fa"] == "1" if values["fa"] else arch.flash_attn,
        swa_full=values["swa"] == "full",
        type_k=values["cache"],
        type_v=values["cache_v"] or values["cache"],
        type_w=values["w"],
        nodes=values["nodes"],
        embeddings=arch.encodes,
        family=NAME,
        params={"arch": arch.name, **params},
        seed=seed,
        provenance={"arch": arch.name, "keys": keys},
    )
    return request, arch.name, keys, values["real"] == "1" or bool(arch.absent)


def _setting(case_id: str, arch: str, item: str) -> tuple[str, Value]:
    key, colon, value = item.partition(":")
    if not colon or not key:
        raise UsageError(f"case {case_id!r}: set: KEY:VALUE expected, {item!r} found")
    return full_key(arch, key), parse_value(f"[{value.replace('/', ',')}]" if "/" in value else value)


def make(case_id: str, lib: str = "") -> Case:
    """Record the case of an id with llama.cpp in a separate process.

    Raises:
        UsageError: the id is malformed, or llama.cpp refuses it; has the reason.
        UnavailableError: llama.cpp is not available.
        BackendTimeoutError: it gave no answer in time.
    """
    request, arch, keys, whole = read(case_id, lib)
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as folder:
        output = Path(folder, "case.gguf")
        try:
            ask(replace(prepare(Path(folder, "model.gguf"), request, arch, keys, whole), output=str(output)))
            return casefile.read_one(output)
        except UsageError as e:
            raise UsageError(f"case {case_id!r}: {e}") from None
        except BackendTimeoutError as e:
            raise BackendTimeoutError(f"case {case_id!r}: {e}") from None


@lru_cache(maxsize=8)  # so that the next backend need not record them again
def build(case_id: str) -> Case:
    """Return `make(case_id)`; the last 8 are cached."""
    return make(case_id)


def available() -> str:
    """Return the reason why nothing can be recorded here, or ""."""
    from conformance.ggml.lib.files import find  # noqa: PLC0415  # every command imports this family

    try:
        find()
    except UnavailableError as e:
        return str(e)
    return ""


FAMILY = Family(
    NAME,
    "graphs of every architecture that llama.cpp knows, compared with its results",
    ids,
    build,
    lacks=model.lacks,
)
