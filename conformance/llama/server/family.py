"""The live family `server`: asks a build's server in ways whose answers a fresh run gives.

An id is `server/ARCH-key=value,do=WAY@seed`, with the keys of the family `zoo` but for `FIXED`. `growth` is a way that
only measures memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.live.arch import spell, unlisted
from conformance.llama.live.llama import Device, Models, device, read_id
from conformance.llama.model import turns
from conformance.llama.model.check import ModelCheck
from conformance.llama.model.family import LLAMA, ggml_device
from conformance.llama.model.llama_process import LlamaProcess, Setting
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.model import Value, lacks
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, without_steps
from conformance.suite.family import Level, without

from . import growth
from .judge import ServerJudge, in_float64
from .running import RunningServer, of_device
from .ways import WAYS

NAME, GROWTH = "server", "growth"
NAMES = (*WAYS, GROWTH)
FIXED = ("run=", "nodes=", "seqs=")
"""Keys of the family `zoo` that have no meaning here."""
N_VOCAB = 128
METADATA: Mapping[str, Value] = {
    "context_length": 1024,  # a slot has no more cells
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, N_VOCAB))],
    "tokenizer.ggml.add_bos_token": False,
}
"""Further keys of each model: a server needs texts of tokens, of whole characters."""
STANDARD: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("llama", {"unified": 1}),
    ("llama", {"cache": "q8_0"}),
    ("lfm2", {}),  # states beside caches
    ("mamba2", {}),
    ("gemma3", {"swa": "window"}),
)
"""Architectures and contexts that `standard` adds to a plain llama."""
FULL = ("qwen35", "gpt-oss", "deepseek2", "qwen3moe", "rwkv7", "granitehybrid")


def id_of(arch: str, way: str, **keys: object) -> str:
    """Return the id of a way with an architecture, without empty keys."""
    return spell(NAME, arch, {"real": 1, "ctx": 512, **keys, "do": way})


def _ids(level: Level) -> list[str]:
    more = {"smoke": (), "standard": STANDARD, "full": (*STANDARD, *((arch, {}) for arch in FULL))}[level]
    return [id_of(arch, way, **keys) for arch, keys in (("llama", {}), *more) for way in NAMES]


def _way(case_id: str) -> str:
    body = case_id.partition("/")[2].rpartition("@")[0]
    name = without(body, {"do"})[1].removeprefix("do=")
    if name not in NAMES:
        raise UsageError(f"case {case_id!r}: do: one of {', '.join(NAMES)} expected")
    fixed = [key for key in FIXED if key in body.replace("-", ",").split(",set=")[0]]
    if fixed:
        raise UsageError(f"case {case_id!r}: {fixed[0]} is not a key of this family")
    return name


def _build(case_id: str) -> Case:
    _way(case_id)
    read_id(case_id)
    return without_steps(case_id)


class Player:
    """Asks the server of one backend."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the server. UnavailableError if the backend's build has none."""
        self._spec, self._device, self._isolation = spec, device(spec), isolation
        self._start = of_device(self._device)
        self._models = Models(isolation, METADATA)
        self._opened = ExitStack()
        self._of: tuple[str, str] = "", ""
        """The model and the context that are open."""

    def play(self, case_id: str) -> Result:
        """Ask in one way.

        Raises:
            UnavailableError: the server does not start, or does not offer it.
            BackendCrashError: it ended.
            BackendTimeoutError: it did not answer in time.
        """
        way, pair = _way(case_id), Pair(case_id, str(self._spec))
        try:
            if way == GROWTH:
                return self._grows(pair, case_id)
            return self._open(case_id).judge([way]).result(*pair)
        except UnavailableError:
            raise
        except BaseException:  # it is in an unknown state
            self._close()
            raise

    def _open(self, case_id: str) -> ServerJudge:
        """Start the server and llama.cpp with the model of a case, unless they run."""
        request = self._models.use(case_id)
        own = request.stream, repr(_context(request))
        if own != self._of:
            self._close()
            opened = ExitStack()
            with opened:
                self._made = _judge(request, self._device, self._start, self._isolation, opened)
                self._opened, self._of = opened.pop_all(), own
        return self._made[0]

    def _grows(self, pair: Pair, case_id: str) -> Result:
        self._open(case_id)
        judge, running = self._made
        found = growth.measure(judge.server, running.pid, judge.llama.n_vocab)
        metrics = {"growth": found.bytes, "resident": float(found.held)}
        if found.over:
            return Result(*pair, Verdict.FAIL, error=Error(found.sentence()), metrics=metrics)
        return Result(*pair, Verdict.PASS, notes=(found.sentence(),), metrics=metrics)

    def _close(self) -> None:
        self._opened.close()
        self._of = "", ""

    def close(self) -> None:
        """End the server and llama.cpp, and remove the model."""
        self._close()
        self._models.close()


def _context(request: Request) -> dict[str, object]:
    """Return the fields of a context that a server also has."""
    return {name: getattr(request, name) for name in ("unified", "swa_full", "flash_attn", "type_k", "type_v",
                                                      "n_ubatch")}  # fmt: skip


def _judge(
    request: Request, on: Device, start: Mapping[str, Any], limits: Isolation, opened: ExitStack
) -> tuple[ServerJudge, RunningServer]:
    """Start a server and its judge; `opened` closes them."""
    model, seconds = Path(request.model), limits.deadline().each
    llama, packed = (
        opened.enter_context(closing(LlamaProcess(model, where, time_limit=seconds)))
        for where in (LLAMA, replace(LLAMA, device="CPU"))
    )
    running = RunningServer(start, model, lambda: llama.words(range(llama.n_vocab)), seconds, on.process(),
                            request.n_ctx, _context(request))  # fmt: skip
    opened.callback(running.close)

    exact = in_float64(llama, lambda recording: ModelCheck(model, recording, ggml_device, limits))
    return ServerJudge(running.client, llama, packed, exact, partial(_setting, request)), running


def _setting(request: Request, text: str) -> Setting:
    """Parse a setting, with the caches of the case where it names none."""
    how = turns.setting(text, flash_attn=request.flash_attn)
    own = {} if "cache" in text else {"type_k": request.type_k, "type_v": request.type_v}
    return replace(how, changes={**how.changes, **own})


FAMILY = LiveFamily(
    NAME,
    "ask the server of a build of llama.cpp for tokens that a fresh run also gives",
    _ids,
    _build,
    lacks=lacks,
    player=Player,
    unlisted=partial(unlisted, NAME, NAMES),
    columns=("kl_max", "e_value", "tokens", "growth", "resident"),
)
