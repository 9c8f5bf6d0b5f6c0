"""The family `arch`: compares a whole model on a device with llama.cpp's own CPU, per batch.

An id is `arch/ARCH-key=value@seed`, with the keys of the family `zoo`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, UnavailableError
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.model import lacks, runnable
from conformance.llama.zoo.recorder import flips, load_choices
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, is_glob, split_glob, without_steps
from conformance.suite.family import Level

from .comparison import SILENT, TOLERANCE, judge_runs, nmse, vacuous
from .llama import Device, Models, device, read_id, without_reference
from .placement import witness

NAME = "arch"
RUNS = {"1": {}, "2 streams": {"seqs": 2, "unified": 0}, "2 unified": {"seqs": 2, "unified": 1}}
"""Run name -> the id keys that it sets."""
FEW = ("llama", "jamba", "mamba", "bert")
"""Architectures of level smoke: with KV cache, cache and states, states, no memory."""
NARROW = (
    *((arch, "attention.indexer.top_k:4") for arch in ("deepseek32", "glm-dsa")),
    *((arch, "attention.sliding_window:8") for arch in ("gemma3", "gpt-oss", "cohere2")),
)
"""Architectures whose attention excludes cells of the prompt, with the keys that cause it."""


def id_of(arch: str, run: str = "1", **keys: object) -> str:
    """Return the id of a run of an architecture, without empty keys."""
    return spell(NAME, arch, {"real": 1, **keys, **RUNS[run]})


def spell(family: str, arch: str, keys: dict[str, object], seed: int = 1) -> str:
    """Format an id, without empty keys."""
    text = ",".join(f"{k}={v}" for k, v in keys.items() if v not in ("", None))
    return f"{family}/{arch}{'-' if text else ''}{text}@{seed}"


def _ids(level: Level) -> list[str]:
    if level == "smoke":
        return [id_of(arch) for arch in FEW]
    own = {"real": 1, "run": "p20.d4"}
    narrow = [spell(NAME, arch, {**own, "set": keys, **run}) for arch, keys in NARROW for run in RUNS.values()]
    return [*(id_of(arch, run) for arch in runnable(with_variants=True) for run in RUNS), *narrow]


def _unlisted(glob: str) -> list[str]:
    archs, rest = split_glob(glob)
    return [] if is_glob(rest) else [f"{NAME}/{a}-{rest}" for a in fitting(archs)]


def unlisted(family: str, names: Collection[str], glob: str) -> list[str]:
    """Return the ids `FAMILY/ARCH-KEYS,do=NAME@SEED` that match a glob, with a name of `names`."""
    archs, rest = split_glob(glob)
    keys, _, last = rest.partition("do=")
    name, _, seed = last.partition("@")
    if is_glob(keys) or is_glob(seed):
        return []
    return [f"{family}/{a}-{keys}do={n}@{seed}" for a in fitting(archs) for n in names if fnmatchcase(n, name)]


def fitting(glob: str) -> list[str]:
    """Return the runnable architectures and variants that match a glob."""
    return [a for a in runnable(with_variants=True) if fnmatchcase(a, glob)]


def _build(case_id: str) -> Case:
    read_id(case_id)
    return without_steps(case_id)


@dataclass(slots=True)
class Run:
    """The outputs of one run."""

    results: list[NDArray[np.float32]]
    """Results of the run, one array per batch."""
    notes: dict[str, float]
    """Number of nodes and splits of the graph, from llama.cpp's log."""
    choices: Path | None = None
    """The file of router choices; None unless the run was watched."""
    spoilt: str = ""
    """The first NaN; empty unless the run was watched."""


class Player:
    """Runs models on one device."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the device. UnavailableError if the backend is not a ggml library."""
        self._spec, self._device = spec, device(spec)
        self._models = Models(isolation)

    def play(self, case_id: str) -> Result:
        """Run one model. Raises as `Process.ask`, or as `without_reference`."""
        request, pair = self._models.use(case_id), Pair(case_id, str(self._spec))
        expected = self._reference(request)
        if not _tell(expected):
            return vacuous(pair, f"no reference: on the CPU {SILENT}")
        begun = time.perf_counter()
        run = self.run(self._device, request)
        seconds = time.perf_counter() - begun
        result = judge_runs(pair, run.results, expected)
        if result.verdict is Verdict.FAIL:
            result = self._explained(result, run, request)
        ran = witness(self._device.device, self._models.on(self._device).placed)
        return replace(result, seconds=seconds, metrics=run.notes, witness=ran)

    def close(self) -> None:
        """End all processes."""
        self._models.close()

    def _reference(self, request: Request) -> list[NDArray[np.float32]]:
        """Run on the CPU: logits, or embeddings if the model has no logits.

        Raises as `without_reference`.
        """
        try:
            results = self.run(self._device.judge, request).results
            if not _tell(results) and not self._models.embeddings:
                self._models.embeddings = True
                results = self.run(self._device.judge, request).results
        except BackendError as e:
            raise without_reference(e, self._device, lambda: self.run(self._device, request)) from None
        return results

    def run(self, on: Device, request: Request, watch: dict[str, object] | None = None) -> Run:
        """Run on a device; a watched run also saves router choices. Raises as `Process.ask`."""
        file = self._models.folder / "run.npz"
        reply = self._models.on(on).ask(run=str(file), changes=self._models.changes(request), watch=watch)
        with np.load(file) as arrays:
            results = [arrays[k] for k in arrays.files]
        choices = file.with_name(f"choices-{file.name}") if watch else None
        return Run(results, {k: float(n) for k, n in reply["notes"].items()}, choices, reply["spoilt"])

    def _explained(self, result: Result, run: Run, request: Request) -> Result:
        try:
            return self.explain(result, run, request)
        except (BackendError, UnavailableError) as e:
            return result.noted(f"its choices could not be compared: {e}")

    def explain(self, result: Result, run: Run, request: Request) -> Result:
        """Add the cause to a failure; return PASS if the run only chose other experts at a near-tie.

        A device may choose another expert where two scores differ by less than its rounding. Then the CPU runs the
        model with the device's experts, and the device is compared with that. Raises as `Process.ask`.
        """
        if any(not np.isfinite(r).all() for r in run.results):
            return result.noted(self.run(self._device, request, {"forced": None, "values": True}).spoilt)
        watched = self.run(self._device, request, {"forced": None, "values": False})
        assert watched.choices is not None
        own = load_choices(watched.choices)
        if not own:
            return result
        file = watched.choices.replace(watched.choices.with_name("choices-of-device.npz"))
        forced = self.run(self._device.judge, request, {"forced": str(file), "values": False})
        assert forced.choices is not None
        notes, wrong = flips(own, load_choices(forced.choices))
        if wrong or not notes:
            return result.noted(wrong)
        return _judge_again(result, run, watched, forced, notes)


def _judge_again(result: Result, run: Run, watched: Run, forced: Run, notes: Sequence[str]) -> Result:
    """Judge again with a CPU run that used the device's experts."""
    more = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
    if any(not nmse(a, b) <= TOLERANCE for a, b in zip(run.results, watched.results, strict=True)):
        return result.noted(f"{notes[0]}{more}, but its results change when its nodes are observed")
    same = judge_runs(Pair(result.case, result.backend), watched.results, forced.results)
    text = f"{notes[0]}{more}; with the same experts NMSE {same.nmse:.2g}"
    if same.verdict is Verdict.PASS:
        return same.noted(f"{text}, with the CPU's own experts {result.nmse:.2g}")
    return result.noted(text)


def _tell(results: Sequence[NDArray[np.float32]]) -> bool:
    """Return True if any result has a nonzero value."""
    return any(r.any() for r in results)


FAMILY = LiveFamily(
    NAME,
    "llama.cpp runs whole models of every architecture on a device, compared with its own CPU",
    _ids,
    _build,
    lacks=lacks,
    player=Player,
    unlisted=_unlisted,
)
