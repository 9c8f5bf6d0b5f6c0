"""The family `memory`: copies of a model's weights, leaks, and sizes of builds.

`memory/w=TYPE@1` counts copies; `copies=N` sets the limit, `model=FILE` names a model for llama.cpp, with a comma
written as `%2C`. A process also contains code and JIT kernels. So a small and a large model of one kind are measured,
and only the difference counts. llama.cpp on a ggml device is compared with its own CPU; for any other adapter
`perf.held` measures a decoder.

`memory/ARCH-key=value@1`, with the keys of the family `zoo`, fails if decoded tokens or loads leak. With
`of=METRIC,limit=BYTES,expected=BYTES` it fails instead if that metric is over the limit: `differing` makes such ids
from the results of two builds, and any build can run them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import ceil
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
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.zoo.family import Request, prepare, read
from conformance.perf.held import HELD_MARGIN, PEAK_MARGIN, Allowed, weights_held
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.live import LiveFamily, without_steps
from conformance.suite.family import Key, Level, keys, read_keys, split_id, text, without, word

from .llama import GGML, Device, Models, device, read_id

NAME = "memory"
_KEYS = {"w": word("q4_0", *TYPES), "copies": text("", "a number"), "model": text("", "a file")}
COPIES = 1 + HELD_MARGIN
"""Default limit of copies of the weights in llama.cpp: those in the device's buffer."""
_SANE = (0.9, 1.2)
"""Range for llama.cpp's own CPU; outside it the measurement is invalid."""
_SMALL, _LARGE = 256, 32768
"""`feed_forward_length` of the two generated models."""
_MATRIX = 1 / 3
"""Share of one matrix in the additional weights of the large model: three projections."""
_TOKENS = 32
"""Largest `n_ubatch`; compute buffers grow with it."""
_SET = "embedding_length:1024+block_count:2+attention.head_count:16+attention.head_count_kv:4+feed_forward_length:{}"
_TIME = 600.0
"""Time limit of one measurement of copies, in seconds."""
_REQUESTS = 3
"""Requests whose time a measurement of leaks may take: one use, its steps, its loads."""
_FIXED = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1",
          "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # fmt: skip
"""Environment in which neither processors nor earlier allocations change memory."""
_OWN: dict[str, Key] = {"of": text("", "a metric"), **keys("expected=0 limit=0")}
BUILDS = (
    f"{NAME}/llama-real=1,w=q4_0,ctx=2048,set={_SET.format(1024)}@1",
    f"{NAME}/gemma3-real=1,seqs=4,unified=0,swa=window,fa=0,cache=f32,ctx=1024@1",
    f"{NAME}/qwen3next-real=1,seqs=4,ctx=512@1",
)
"""Cases for builds: a KV cache; windows without flash attention; recurrent states."""
REPEATS = 3
"""Further runs of the side with less memory, which learn the noise of a metric."""
RELEVANT = 0.01
"""Share by which a size must differ; of a buffer, the share of all of its kind."""
LEAK = 16
"""Bytes per step or load that are no leak: half of malloc's smallest chunk."""
_LEAKS = ("step", "cycle")
_KINDS = ("model", "context", "compute")
_SPREAD = 3
"""Ranges of the noise beyond the largest value that a limit allows."""


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
    loading: int = 0
    """The largest growth while the model was loaded."""
    step: float = 0.0
    """Growth per decoded token, if it was measured."""
    cycle: float = 0.0
    """Growth per load of model and context, likewise."""

    @property
    def buffers(self) -> dict[str, float]:
        """Bytes of each kind in each buffer type, such as `context in CPU`."""
        return {f"{kind} in {name}": float(getattr(p, kind)) for name, p in self.parts.items() for kind in _KINDS}

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


def measure(request: Request, device: Device, limits: Isolation | None = None, *, grows: bool = False) -> Held:
    """Measure the memory of a process with a model on `device`, and with `grows` its leaks.

    Raises:
        BackendCrashError: it dies.
        BackendTimeoutError: it does not answer in time.
        UnavailableError: there is no such device, or the system does not report the memory of a process.
    """
    limits = limits or Isolation(_TIME)
    if limits.until.is_over():
        raise BackendTimeoutError("the time of the run is over")
    process = device.process(_FIXED)
    deadline = limits.deadline(emulated=limits.emulated)
    worker = Worker("conformance.llama.live.worker", deadline=deadline, emulated=limits.emulated, **process)
    asked = {"memory": asdict(replace(request, lib=device.lib)), "grows": grows, **device.asked}
    try:
        found: dict[str, Any] = worker.ask(asked)[0]
    except WorkerTimeoutError as e:
        raise BackendTimeoutError(e.how) from None
    except WorkerDiedError as e:
        text = f"its process died ({e.how}): {' / '.join(e.lines[-3:])}"
        raise BackendCrashError(text, words="\n".join(e.lines), died=e.how) from None
    except ConformanceError as e:
        raise UnavailableError(str(e)) from None
    finally:
        worker.close()
    parts = {name: Parts(**p) for name, p in found.pop("parts").items()}
    return Held(parts, **{f.name: found[f.name] for f in fields(Held) if f.name in found})


def _read(case_id: str) -> tuple[str, float | None, Path | None]:
    """Return weight type, limit and model of an id; UsageError if it is invalid."""
    body, _ = split_id(case_id, NAME, "w=TYPE,copies=N,model=FILE")
    values, _ = read_keys(case_id, body, _KEYS)
    try:
        limit = float(values["copies"]) if values["copies"] else None
    except ValueError:
        raise UsageError(f"case {case_id!r}: copies: a number expected") from None
    return values["w"], limit, Path(unquote(values["model"])) if values["model"] else None


def _is_of_builds(case_id: str) -> bool:
    """Return True if an id names an architecture."""
    return case_id.partition("/")[2].partition("=")[0] not in _KEYS


def _read_of_builds(case_id: str) -> tuple[str, dict[str, Any]]:
    """Return the id without the keys of `_OWN`, and their values; UsageError if it is invalid."""
    body, at, seed = case_id.partition("/")[2].rpartition("@")
    rest, own = without(body, _OWN)
    plain = f"{NAME}/{rest}{at}{seed}"
    read_id(plain)
    return plain, read_keys(case_id, own, _OWN)[0]


def differing(build: Result, base: Result, again: Callable[[Result], Result]) -> Iterator[str]:
    """Yield an id for each metric in which two builds' results of a case of `BUILDS` differ.

    `again` runs the case of a result on its backend: the side with less memory, a few times. The limit is the largest
    of its values, their range `_SPREAD` times, and `RELEVANT`; so the other side fails the id if it needs more.
    """
    pairs = {} if _read_of_builds(build.case)[1]["of"] else dict(_suspects(build, base))
    for less, more in ((base, build), (build, base)):
        names = sorted((k for k, low in pairs.items() if low is less), key=lambda k: k not in _LEAKS)
        cases = [_id_of(build.case, names[0])] * REPEATS if names else []  # a case of a leak measures all
        runs = [less, *(again(replace(less, case=i)) for i in cases)]
        for name in names:
            values = [r.metrics.get(name, 0.0) for r in runs if r.metrics]
            limit = max(values) + _SPREAD * (max(values) - min(values)) + _margin(name, less)
            if more.metrics.get(name, 0.0) > limit:
                yield _id_of(build.case, name, max(values), limit)


def _suspects(build: Result, base: Result) -> Iterator[tuple[str, Result]]:
    """Yield metrics whose values differ, and the side with the smaller one.

    Sizes of buffers are compared only if both builds report some of that kind.
    """
    for name in dict.fromkeys((*build.metrics, *base.metrics)) if build.metrics and base.metrics else ():
        less, more = sorted((base, build), key=lambda r: r.metrics.get(name, 0.0))
        known = all(_whole(name, r) for r in (build, base)) or name in _LEAKS
        if known and more.metrics.get(name, 0.0) > less.metrics.get(name, 0.0) + _margin(name, less):
            yield name, less


def _margin(name: str, result: Result) -> float:
    return LEAK if name in _LEAKS else RELEVANT * _whole(name, result)


def _whole(name: str, result: Result) -> float:
    """Return a metric, or for a buffer the bytes of its kind in all buffer types."""
    kind, of, _ = name.partition(" in ")
    return sum(n for k, n in result.metrics.items() if k.partition(" in ")[:2] == (kind, of))


def _id_of(case_id: str, name: str, expected: float = 0, limit: float = 0) -> str:
    body, at, seed = case_id.rpartition("@")
    return f"{body},of={name.replace(' in ', '.')},expected={ceil(expected)},limit={ceil(limit)}{at}{seed}"


def _build(case_id: str) -> Case:
    (_read_of_builds if _is_of_builds(case_id) else _read)(case_id)
    return without_steps(case_id)


class Player:
    """Measures one backend."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the backend. UsageError if not installed, UnavailableError without llama.cpp."""
        adapter(resolve(spec).name)
        self._spec = spec
        self._device = device(spec) if resolve(spec).name == GGML else None
        self._isolation, self._models = isolation, Models(isolation)
        self._folder = Path(tempfile.mkdtemp(prefix="conformance-memory-"))

    def play(self, case_id: str) -> Result:
        """Measure leaks, one metric, or how many copies of the weights the backend has in memory.

        Raises:
            UnavailableError: it cannot be measured.
            BackendError: the backend failed.
        """
        pair = Pair(case_id, str(self._spec))
        if _is_of_builds(case_id):
            return self._of_build(pair, *_read_of_builds(case_id))
        weight_type, limit, model = _read(case_id)
        if self._device is None:
            return self._of_adapter(pair, weight_type, limit, model)
        return self._on_device(pair, self._device, weight_type, limit, model)

    def close(self) -> None:
        """Remove the models."""
        self._models.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of_build(self, pair: Pair, case_id: str, own: Mapping[str, Any]) -> Result:
        if self._device is None:
            raise UnavailableError("leaks are measured in llama.cpp: --backend ggml")
        request = self._models.use(case_id)
        limits = replace(self._isolation, time_limit=_REQUESTS * self._isolation.time_limit)
        grows = own["of"] in ("", *_LEAKS)
        held = measure(request, self._device, limits, grows=grows)
        metrics = {"resident": float(held.held), "loading": float(held.loading), **held.buffers}
        metrics |= {"step": held.step, "cycle": held.cycle} if grows else {}
        if not own["of"]:
            return _over(pair, case_id, metrics, dict.fromkeys(_LEAKS, (0, LEAK)))
        return _over(pair, case_id, metrics, {own["of"].replace(".", " in "): (own["expected"], own["limit"])})

    def _of_adapter(self, pair: Pair, weight_type: str, limit: float | None, model: Path | None) -> Result:
        if model is not None:
            raise UnavailableError(
                f"{model.name} is for llama.cpp on a ggml device; other adapters run a generated model"
            )
        if Allowed.of(self._spec, weight_type, 1, limit) is None:
            raise UnavailableError(f"no limit is known for {weight_type} weights: set copies=N in the id")
        found = weights_held(self._spec, partial(open_backend, self._spec, own=True), weight_type)
        allowed = Allowed.of(self._spec, weight_type, found.largest, limit)
        assert allowed is not None
        return _judged(pair, found.held, found.peak, allowed, {"weights": float(found.nbytes)})

    def _on_device(self, pair: Pair, on: Device, weight_type: str, limit: float | None, model: Path | None) -> Result:
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
        why = f"1.00 in the device's buffer; {_MATRIX:.2f} at peak for a matrix that is read or converted"
        most = COPIES if limit is None else limit
        allowed = Allowed(most, (1 if limit is None else limit) + _MATRIX + PEAK_MARGIN, why)
        return _judged(pair, found.held, found.peak, allowed, {k: float(n) for k, n in sizes.items()} | held.buffers)


_WORDS = {"resident": "resident memory", "loading": "peak while loading", "step": "growth per decoded token",
          "cycle": "growth per load of model and context"}  # fmt: skip
"""Metric -> words."""


def _over(pair: Pair, case_id: str, metrics: Mapping[str, float], limits: Mapping[str, tuple[int, int]]) -> Result:
    """Compare metrics with `limits`, each with the expected bytes and the largest that pass."""
    said, over = [], []
    for name, (expected, limit) in limits.items():
        value, words = metrics.get(name, 0.0), _WORDS.get(name, name)
        times = f", {value / expected:.2f} times" if expected else ""
        said.append(f"{words}: {round(value):,} bytes, {expected:,} expected{times} (limit {limit:,})")
        over += [words] if value > limit else []
    text = f"{case_id.partition('/')[2].partition('-')[0]}: {'; '.join(said)}"
    if not over:
        return Result(*pair, Verdict.PASS, notes=(text,), metrics=dict(metrics))
    error = Error(text, f"{' and '.join(over)} over the limit")
    return Result(*pair, Verdict.FAIL, error=error, metrics=dict(metrics))


def _judged(pair: Pair, held: float, peak: float, allowed: Allowed, sizes: Mapping[str, float]) -> Result:
    """Return the result of a measurement; `sizes` in bytes."""
    metrics = {"copies": held, "limit": allowed.held, "peak_copies": peak, "peak_limit": allowed.peak, **sizes}
    said = (
        f"{held:.2f} times the weights, limit {allowed.held:.2f}; {peak:.2f} at peak, limit {allowed.peak:.2f} "
        f"({allowed.why})"
    )
    over = [what for what, n, most in (("copies", held, allowed.held), ("peak", peak, allowed.peak)) if n > most]
    if not over:
        return Result(*pair, Verdict.PASS, notes=(said,), metrics=metrics)
    return Result(*pair, Verdict.FAIL, error=Error(said, f"{' and '.join(over)} over the limit"), metrics=metrics)


def _ids(level: Level) -> list[str]:
    return [f"{NAME}/w={w}@1" for w in (("q4_0",) if level == "smoke" else ("q4_0", "q8_0"))]


FAMILY = LiveFamily(
    NAME,
    "measure copies of a model's weights, leaks, and memory of builds of llama.cpp",
    _ids,
    _build,
    seeded=False,
    player=Player,
    columns=("copies", "limit", "peak_copies", "peak_limit", "resident", "loading", *_LEAKS),
)
