"""The live family `model`: what `conform check-model` checks, one case on one backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from conformance.backend.registry import REFERENCE, Spec, adapter, resolve
from conformance.case.case import Case
from conformance.cli.cases import architecture_of
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.verdict import Pair, Result
from conformance.llama.live.llama import Device, device
from conformance.llama.zoo.model import table as architectures
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, without_steps

from . import filecheck, modelfile, turns
from .check import ModelCheck
from .finding import Finding
from .graphs import silent
from .layers import Files
from .llama_process import LlamaProcess, Setting, Turn
from .modelcase import LAYERS, NAME, ModelCase
from .modelfile import ModelFile
from .recording import ModelRecording

LLAMA = Device("llama.cpp")
"""llama.cpp of the wheel on its CPU, by which backends are judged."""
LOADING = 10
"""Requests whose time llama.cpp may take on its CPU."""
BATCH = 512
"""Tokens of a prompt in one graph: llama-bench's n_ubatch."""
STRIDE = 7919
"""Distance of timed tokens in the vocabulary: a prime, so that experts change."""


def load(model: Path, cpu: Device, time_limit: float) -> LlamaProcess:
    """Start llama.cpp with the model; UsageError with advice if it cannot load it."""
    arch = architecture_of(model)
    try:
        return LlamaProcess(model, cpu, time_limit=time_limit)
    except UsageError as e:
        known = "; conform capture lists the architectures that it knows, --lib BUILD selects another llama.cpp"
        hint = known if arch not in architectures() else "; is the file complete?" if "cannot load" in str(e) else ""
        raise UsageError(f"{model}: {e}{hint}") from None


def ggml_device(spec: Spec) -> Device:
    """Return the device for a spec; by default the library's CPU with repacked weights."""
    found = device(spec)
    return found if found.device else replace(found, device="CPU")


def setting_of(model: Path) -> Callable[[str], Setting]:
    """Return the function that reads settings, with the default of the model's architecture."""
    known = architectures().get(architecture_of(model))
    return partial(turns.setting, flash_attn=known is None or known.flash_attn)


class Player:
    """Checks models on one backend."""

    def __init__(self, spec: Spec, isolation: Isolation, save: Path | None) -> None:
        """Find the backend; UsageError if it is not installed."""
        adapter(resolve(spec).name)
        self._spec, self._isolation, self._save = spec, isolation, save
        self._findings: dict[tuple[Path, Path | None], tuple[ModelFile, list[Finding]]] = {}

    def play(self, case_id: str) -> Result:
        """Check the model on the backend, or a part of its file.

        Raises:
            UnavailableError: llama.cpp refuses the model, or a part of a file is not checked by this backend.
            BackendError: the backend failed.
        """
        asked = ModelCase.read(case_id)
        return self._of_file(asked) if asked.at else self._decoded(asked, Pair(case_id, str(self._spec)))

    def _load(self, model: Path) -> LlamaProcess:
        return load(model, LLAMA, LOADING * self._isolation.time_limit)

    def _decoded(self, asked: ModelCase, pair: Pair) -> Result:
        setting = setting_of(asked.model)(asked.setting)
        with closing(self._load(asked.model)) as llama:
            recording = ModelRecording.of(llama, turns.spread(asked.talk(llama), setting.slots), setting, pair.case)
        made = ModelCheck(asked.model, recording, ggml_device, self._isolation, folder=self._save)
        with closing(made) as check:
            result = check.of(self._spec).result()
        assert result is not None
        return result

    def _of_file(self, asked: ModelCase) -> Result:
        if resolve(self._spec).name != REFERENCE:
            raise UnavailableError(f"the file of a model is checked by the reference: --backend {REFERENCE}")
        architecture_of(asked.model)
        file, compared = self._files(asked)
        if asked.at == LAYERS:
            if compared is None:
                raise UsageError(f"case {asked.id!r}: compare=FILE expected, with which layers are compared")
            setting = setting_of(asked.model)("")
            both = Files(file, compared)
            return filecheck.by_layers(both, self._load, asked.first, setting, silent, silent).result(asked)
        found = self._found(file, compared)
        if asked.at not in {*file.tensors, *file.keys, *(f.where for f in found)}:
            raise UsageError(f"case {asked.id!r}: at={asked.at}: a tensor or key of {asked.model} expected")
        return filecheck.result(asked, asked.at, [f for f in found if f.where == asked.at])

    def _files(self, asked: ModelCase) -> tuple[ModelFile, ModelFile | None]:
        return modelfile.read(asked.model), modelfile.read(asked.compare) if asked.compare else None

    def _found(self, file: ModelFile, compared: ModelFile | None) -> list[Finding]:
        """Return all findings about a file; they are searched for once."""
        key = file.path, compared.path if compared else None
        if key not in self._findings:
            found = [*filecheck.of_headers(file, compared), *filecheck.of_values(file, compared, silent)]
            self._findings[key] = file, found
        return self._findings[key][1]

    def close(self) -> None:
        """Forget the files."""
        self._findings.clear()


def _recorded(model: Path, prompt: int, decode: int) -> Case:
    """Record llama.cpp on an empty cache: a prompt in batches, then tokens one by one.

    UsageError if it cannot load the model.
    """
    setting = replace(setting_of(model)(""), batch=BATCH)
    with closing(load(model, LLAMA, LOADING * Isolation().time_limit)) as llama:
        tokens = [t * STRIDE % llama.n_vocab for t in range(1, prompt + decode + 1)]
        first = max(prompt, 1)
        return llama.record([[Turn(tokens[:first], forced=tokens[first:])]], setting)[1]


def _build(case_id: str) -> Case:
    ModelCase.read(case_id)
    return without_steps(case_id)


FAMILY = LiveFamily(
    NAME,
    "decode a model's file and compare with llama.cpp on its CPU (`conform check-model`)",
    lambda _: (),
    _build,
    seeded=False,
    player=Player,
    recorded=_recorded,
    columns=("kl_max", "kl_mean", "top1", "flips", "resident"),
)
