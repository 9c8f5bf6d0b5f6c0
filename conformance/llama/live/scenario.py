"""The family `scenario`: two call sequences of llama.cpp's API must give equal logits.

An id is `scenario/ARCH-do=SCENARIO,key=value@seed`, with the other keys of the family `zoo`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, UnavailableError, UsageError
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.model import lacks, runnable
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, without_steps
from conformance.suite.family import Level, without

from .arch import FEW, spell, unlisted
from .comparison import SILENT, Comparison, judge_all, judge_by_spread, saved
from .llama import Models, device, read_id
from .scenarios.harness import AMPLIFIED, Kind, by_rounding
from .scenarios.table import SCENARIOS

NAME = "scenario"
ENVIRONMENT = {"LLAMA_SET_ROWS": "1"}
"""Environment in which llama.cpp builds of summer 2025 reuse graphs, as later ones do."""
TRIED = 3
"""Crashes of a model after which its other scenarios are skipped, unless one of them ran."""


def id_of(arch: str, name: str, **keys: object) -> str:
    """Return the id of a scenario with an architecture, without empty keys."""
    return spell(NAME, arch, {"real": 1, **keys, "do": name})


_NAMES = list(SCENARIOS)
_ORDER = tuple(dict.fromkeys((_NAMES[0], _NAMES[len(_NAMES) // 2], _NAMES[-1], *_NAMES)))
"""Three dissimilar scenarios come first, to detect early a model that always crashes."""


_MEMORY = ("state-", "seq-", "shift", "draft", "clear", "full", "split-state", "split-rm", "split-cp", "split-shift")
_OF_CACHES = tuple(n for n in _ORDER if n.startswith(_MEMORY))
WINDOW = "attention.sliding_window:8"
"""Size of a window; smaller than the prompts."""
VARIANTS: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("llama", {"cache": "q8_0"}),
    ("llama", {"cache": "q8_0", "set": "embedding_length:192"}),  # heads of 96: no multiple of 64
    ("llama", {"unified": 1, "cache": "q4_0", "cache_v": "q4_0"}),
    ("llama", {"unified": 1, "cache": "f32", "cache_v": "f32", "set": "attention.head_count:4"}),
    ("gemma3", {"set": WINDOW}),
    ("gemma3", {"unified": 1, "swa": "window", "cache": "q8_0", "set": WINDOW}),
    ("deepseek32", {"set": "attention.indexer.top_k:4"}),  # sparse attention that leaves cells out
    ("qwen35", {}),  # snapshots of recurrent states
    ("lfm2", {"cache": "q8_0"}),
)
"""Architectures with other caches, head sizes and windows, for scenarios of memory."""
_OF_BLOCKS = ("batch-8", "chunks", "sets", "state-seq", "seq-add", "shift", "drafts", "draft-context")
BLOCKS = tuple(
    ("llama", {"w": w, "set": "embedding_length:256"} if w.endswith("_K") else {"w": w})
    for w in ("q4_0", "q8_0", "q4_K", "q5_K", "q6_K")
)
"""Quantised weights, in rows of whole blocks, for scenarios of batches, states and drafts."""
WITH_KEYS = ("deepseek2", "lfm2", "llama4", "mamba2", "rwkv7")
"""Architectures with keys of their own, for `written`."""
_OF_LORA = tuple(n for n in _ORDER if n.startswith("lora-"))
WITH_EXPERTS = ("qwen3moe", "gpt-oss", "llama4", "nemotron_h_moe")
"""Architectures with experts, for adapters."""
_OF_MTP = tuple(n for n in _ORDER if n.startswith("mtp-"))
_NEXTN = "nextn_predict_layers"
WITH_MTP = (
    ("hy_v3", f"block_count:2+{_NEXTN}:1"),  # its MTP layer is like the other
    ("step35", f"block_count:4+{_NEXTN}:2"),
    ("qwen35", f"block_count:5+{_NEXTN}:1"),  # beside recurrent states
    ("deepseek32", f"block_count:3+{_NEXTN}:1"),  # beside sparse attention
)
"""Architectures with MTP layers, and the keys that add them."""


_KINDS: Mapping[str, Kind] = dict(zip(FEW, ("attention", "hybrid", "recurrent", "encoder"), strict=True))
"""Architecture -> kind of its memory."""


def ids_of(arch: str) -> list[str]:
    """Return the ids of all scenarios."""
    return [id_of(arch, name) for name in _ORDER]


def in_turns(archs: Sequence[str]) -> list[str]:
    """Return the ids of all scenarios: each with one architecture, then each with another.

    So a short run asks every scenario and every kind of memory. First come architectures to which it applies. In a turn
    all scenarios of an architecture follow each other, since a model takes longer to make and load than they do.
    """
    turns: list[list[tuple[str, str]]] = [[] for _ in archs]
    for n, name in enumerate(_ORDER):
        able = [a for a in archs if _KINDS.get(a) in (None, *SCENARIOS[name].kinds)]
        start = n % len(able) if able else 0
        order = [*able[start:], *able[:start], *(a for a in archs if a not in able)]
        for turn, a in zip(turns, order, strict=True):
            turn.append((a, name))
    return [id_of(a, name) for turn in turns for a, name in sorted(turn, key=lambda row: archs.index(row[0]))]


def _ids(level: Level) -> list[str]:
    archs = {"smoke": FEW[:1], "standard": FEW, "full": runnable(with_variants=True)}[level]
    varied = [id_of(arch, name, **keys) for arch, keys in VARIANTS for name in _OF_CACHES] if level != "smoke" else []
    mtp = [id_of(arch, name, set=keys) for arch, keys in WITH_MTP for name in _OF_MTP] if level != "smoke" else []
    blocks = [id_of(arch, name, **keys) for arch, keys in BLOCKS for name in _OF_BLOCKS] if level != "smoke" else []
    experts = [id_of(arch, name) for arch in WITH_EXPERTS for name in _OF_LORA] if level != "smoke" else []
    files = [id_of(arch, "written") for arch in WITH_KEYS] if level != "smoke" else []
    return list(dict.fromkeys([*(i for arch in archs for i in ids_of(arch)), *varied, *mtp, *blocks, *experts, *files]))


def _name(case_id: str) -> str:
    return without(case_id.partition("/")[2].rpartition("@")[0], {"do"})[1].removeprefix("do=")


def _build(case_id: str) -> Case:
    if _name(case_id) not in SCENARIOS:
        raise UsageError(f"case {case_id!r}: do: one of {', '.join(SCENARIOS)} expected")
    read_id(case_id)
    return without_steps(case_id)


class Player:
    """Runs scenarios on one device."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the device. UnavailableError if the backend is not a ggml library."""
        self._spec, found = spec, device(spec)
        self._device = replace(found, environment={**ENVIRONMENT, **found.environment})
        self._models = Models(isolation)
        self._model = ""
        self._died: list[str] | None = []
        """Scenarios that crashed with this model; None once one did not."""
        self._hung = False
        """One of them gave no answer in time."""

    def play(self, case_id: str) -> Result:
        """Run one scenario.

        Raises:
            UnavailableError: the model or the library lacks something, llama.cpp refuses, or this model's first
                scenarios all crashed.
            BackendError: as `Process.ask`.
        """
        request, name = self._models.use(case_id), _name(case_id)
        if request.stream != self._model:
            self._model, self._died, self._hung = request.stream, [], False
        if self._died is not None and len(self._died) >= TRIED:
            kind, does = (BackendTimeoutError, "hangs or dies") if self._hung else (UnavailableError, "dies")
            raise kind(f"its process {does} with {', '.join(self._died)}, so no further scenarios were tried")
        try:
            result = self._play(Pair(case_id, str(self._spec)), name, request)
        except (BackendCrashError, BackendTimeoutError) as e:
            self._hung |= isinstance(e, BackendTimeoutError)
            if self._died is not None:
                self._died.append(name)
            raise
        self._died = None
        return result

    def _play(self, pair: Pair, name: str, request: Request) -> Result:
        begun = time.perf_counter()
        result = self._once(pair, name, request)
        silent = result.verdict is Verdict.VACUOUS and result.detail.endswith(SILENT)
        if silent and not self._models.embeddings:  # it gives embeddings in place of logits
            self._models.embeddings = True
            result = self._once(pair, name, request)
        return replace(result, seconds=time.perf_counter() - begun)

    def _once(self, pair: Pair, name: str, request: Request) -> Result:
        """Run a scenario; measure the spread of roundings if a difference is over the limit."""
        found = self._compared(name, request)
        result = judge_all(pair, name, found, on_cpu=self._device.on_cpu)
        if result.wrong is None or result.wrong.kind != "numbers":
            return result
        try:
            return self._judge_by_spread(name, request, found, result)
        except (BackendError, UnavailableError) as e:
            return result.noted(f"the spread of roundings was not measured: {e}")

    def _judge_by_spread(self, name: str, request: Request, found: Sequence[Comparison], result: Result) -> Result:
        """Judge again with the spread of models whose norm weights differ by a rounding.

        That is a rounding of float32, and the noise of keys that one of the two runs rounds again. Raises as
        `Process.ask`.
        """
        pair, noise = Pair(result.case, result.backend), max(c.allowance for c in found) / AMPLIFIED
        return judge_by_spread(
            result,
            found,
            lambda draw: self._compared(name, request, nudge={"draw": draw, "noise": noise}),
            lambda moved: judge_all(pair, name, moved, on_cpu=self._device.on_cpu),
            by_rounding(noise),
        )

    def _compared(self, name: str, request: Request, **more: object) -> list[Comparison]:
        """Run each part in its own process; parts pass data in files."""
        process, folder, changes = self._models.on(self._device), self._models.folder, self._models.changes(request)
        for part in range(SCENARIOS[name].parts):
            if part:
                process.close()
            reply = process.ask(scenario=name, part=part, folder=str(folder), changes=changes, **more)
        return saved(reply["comparisons"], folder / f"{name}.npz")

    def close(self) -> None:
        """End all processes."""
        self._models.close()


FAMILY = LiveFamily(
    NAME,
    "compare two call sequences of llama.cpp's API on one device, such as with and without a reloaded state",
    _ids,
    _build,
    lacks=lacks,
    player=Player,
    unlisted=partial(unlisted, NAME, _ORDER),
)
