"""The family `order`: a build's scheduler runs on lazy, eager and random devices.

An id is `order/PROGRAM-key=value@seed`, where PROGRAM is one of `lazy.programs`, or the name of an architecture: then
llama.cpp runs a model, with the other keys of the family `zoo`. The seed decides when queued operations take effect,
and the values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, UnavailableError, UsageError
from conformance.ggml.lib.rpc import Server
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, without_steps
from conformance.suite.family import Level, keys, read_keys, split_id, without

from .lazy.device import NAMES
from .lazy.programs import CELLS, PROGRAMS, ROW, RPC
from .lazy.run import ASKS, COUNTED, DROP, SORTS, Fail, Setting
from .lazy.timeline import Moment
from .llama import Models, Process, device, read_id
from .scenarios.table import SCENARIOS

NAME, MODEL = "order", "model"
FORM = "PROGRAM-key=value"
KEYS = keys(
    "devices=1 lazy= refuse= host=0 shared=0 offload=0 uid=0 blocking=0 largest=0 extra=0 optimize=0 fail= "
    "copies=1 n=NUMBERS reserve=0 pin=0 deep=0 again=0 side=0 threads=1 piece=0 "
    "tensor=0 shares=NUMBERS layers=999 do="
)
PARAMS = ["copies", "reserve", "pin", "deep", "again", "side", "threads", "piece", "tensor", "layers", "do"]
"""Keys that a program reads itself."""
BATCHES = (4, 1, 4)
MOST_THREADS = 4
PLAYABLE = frozenset(name for name, scenario in SCENARIOS.items() if scenario.parts == 1)
"""Scenarios that lazy devices can play."""
LARGEST = CELLS * ROW
"""Bytes of a cache, which must fit into one buffer."""
MOMENTS = get_args(Moment)
REPORTED = ("alloc", "compute", "lost", "memory", "init", DROP)
"""Failures that ggml reports; `event` is only slow."""
AVOIDABLE = ("alloc", "memory")
"""Failures after which llama.cpp may try to do with less memory."""
FAILURES = (*REPORTED, "event")
COMPUTES = ("graph_compute", "graph_plan_compute", "rpc_bytes")
"""Calls, or bytes, of which a run without failures must have some."""


@dataclass(frozen=True, slots=True)
class Load:
    """The fields of a worker's `load` request."""

    lib: str
    llama: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed id."""

    program: str
    model: str
    """Id of a model; empty for a program of ggml alone."""
    params: dict[str, Any]
    devices: list[int]
    setting: Setting


_SPLIT = ("refuse=RMS_NORM", "devices=2", "devices=2,refuse=RMS_NORM,copies=4,n=4x4x4x4x4x4,reserve=4")
_MODEL = "llama-real=1,ubatch=8"
_LLAMA = "llama-real=1,ubatch=4,run=p24.d3"
_MIXED = ("last+first", "first+last", "any+last", "any+first")
_FAILS = ("alloc:2", "alloc:9", "compute:1", "compute:9", "lost:1", "lost:7", "memory:40000", "event:1", "init:2")
_ROWS: dict[Level, tuple[str, ...]] = {
    "smoke": (
        *(f"streams-lazy={lazy}" for lazy in MOMENTS),
        *(f"sched-{split},lazy={lazy}" for lazy in MOMENTS for split in _SPLIT),
        "sched-devices=2,threads=2,lazy=any",
        "plan-again=2,lazy=any",
        "streams-blocking=1,lazy=last",
        "sched-refuse=RMS_NORM,blocking=1,lazy=last",
        "sched-devices=2,copies=4,reserve=4,pin=1,lazy=last",
        f"sched-devices=2,n=4x1x32x16,largest={LARGEST},lazy=last",
        "sched-devices=2,n=3x1x5x7,extra=20,lazy=last",
        "sched-n=5x3,deep=1,extra=1000,lazy=last",
        *(f"sched-fail={fail}" for fail in ("compute:2", "alloc:1", "lost:2")),
        f"{_LLAMA},lazy=last",
        f"{_LLAMA},devices=2,lazy=last+first",
    ),
    "standard": (
        "sched-devices=3,refuse=RMS_NORM+SCALE,lazy=last+first+any",
        "sched-devices=2,n=16x1x4x16,reserve=16,lazy=last",
        "sched-devices=2,again=1,copies=4,n=4x4,lazy=last+first",
        "sched-devices=2,copies=4,n=4x4x4x4x4x4x4,reserve=4,lazy=last",
        "sched-devices=2,n=4x1x32,reserve=16,lazy=last",
        "sched-devices=2,refuse=RMS_NORM,copies=4,threads=3,n=4x4x4,lazy=last",
        "sched-refuse=RMS_NORM,shared=1,lazy=last",
        *(f"sched-devices=2,side=1,again=1,copies=4,optimize={k},lazy=any" for k in (SORTS, ASKS)),
        *(f"rpc-{key}" for key in ("piece=7", "piece=1000,n=16x1x32,reserve=32", "piece=100,again=2")),
        *(f"rpc-fail={DROP}:{n}" for n in (1, 9, 100, 30_000, 70_000)),
        "sched-refuse=RMS_NORM,again=2,lazy=any",
        "sched-devices=2,refuse=RMS_NORM,copies=4,blocking=1,lazy=last",
        "sched-devices=2,again=1,blocking=1,lazy=any",
        "plan-again=1,blocking=1,lazy=last",
        "sched-n=16x4x1,reserve=16,pin=1,again=1,lazy=any",
        f"sched-n=16x32,reserve=32,refuse=RMS_NORM,largest={LARGEST},lazy=any",
        f"sched-devices=2,n=4x1x8x16x32,copies=4,largest={LARGEST},lazy=last",
        "sched-refuse=RMS_NORM,host=1,side=1,lazy=last",
        "sched-refuse=RMS_NORM,host=1,n=4x4x4,reserve=4,lazy=last",
        f"{_LLAMA},devices=3,lazy=any+last+first",
        f"{_LLAMA},layers=1,lazy=last",
        f"{_LLAMA},uid=1,lazy=last",
        f"{_LLAMA},shared=1,lazy=last",
        f"{_LLAMA},devices=2,blocking=1,lazy=last",
        f"{_LLAMA},largest=262144,lazy=last",
        "sched-devices=2,n=5x3x1x1x2,reserve=5,extra=1000,refuse=RMS_NORM,lazy=any",
        f"{_LLAMA},extra=20,lazy=last",
        *(f"{_LLAMA},devices=2,optimize={k},lazy=last" for k in (SORTS, ASKS)),
        f"{_MODEL},do=contexts-threads,devices=2,lazy=any",
        *(f"{_MODEL},do={scenario},lazy=last" for scenario in ("in-flight", "loads", "state-seq", "sets", "draft-2")),
        "sched-devices=2,refuse=RMS_NORM,again=2,copies=4,uid=1,lazy=last",
        f"{_LLAMA},layers=0,offload=1,lazy=last",
        "qwen3moe-real=1,ubatch=8,run=p20.d4,layers=0,offload=1,lazy=last",
        f"{_LLAMA},devices=2,refuse=ROPE,lazy=last",
        f"{_LLAMA},devices=2,tensor=1,lazy=last",
        f"{_LLAMA},devices=2,tensor=1,shares=1x0,lazy=last",
        *(
            f"{arch}-real=1,ubatch=8,run=p20.d4,devices=2,lazy=last"
            for arch in ("gemma3", "mamba", "jamba", "qwen3moe")
        ),
        *(f"{_LLAMA},devices=2,fail={fail}" for fail in ("alloc:5", "compute:5", "lost:3", "init:2", "memory:300000")),
        *(f"sched-devices=2,copies=4,refuse=RMS_NORM,fail={fail}" for fail in _FAILS),
    ),
    "full": tuple(f"sched-{split},lazy={lazy}" for split in _SPLIT for lazy in _MIXED),
}
_SEEDS: dict[Level, int] = {"smoke": 1, "standard": 1, "full": 10}
"""Seeds of each row with `any`."""


def _ids(level: Level) -> Sequence[str]:
    levels: list[Level] = ["smoke", "standard", "full"]
    rows = [row for each in levels[: levels.index(level) + 1] for row in _ROWS[each]]
    return [f"{NAME}/{row}@{k + 1}" for row in rows for k in range(_SEEDS[level] if "any" in row else 1)]


def read(case_id: str) -> Request:
    """Parse an id; UsageError if it is invalid."""
    body, seed = split_id(case_id, NAME, FORM)
    whole, own = without(body, KEYS)
    program, model = (whole, "") if whole in PROGRAMS else (MODEL, f"{NAME}/{whole}@{seed}")
    if model:
        read_id(model)
    it, _ = read_keys(case_id, own, KEYS)
    count = 3 if program == "streams" else it["devices"]

    def must(key: str, ok: bool, expected: str) -> None:
        if not ok:
            raise UsageError(f"case {case_id!r}: {key}: {expected} expected, {it[key]!r} found")

    batches = it["n"] or BATCHES
    must("devices", 1 <= it["devices"] <= len(NAMES), f"1 to {len(NAMES)}")
    must("copies", it["copies"] in (1, 4), "1 or 4")
    must("n", min(batches) > 0 and sum(batches) <= CELLS, f"tokens of batches, together up to {CELLS},")
    must("reserve", 0 <= it["reserve"] <= CELLS, f"0 to {CELLS}")
    must("again", 0 <= it["again"] <= CELLS, f"0 to {CELLS}")
    must("threads", 1 <= it["threads"] <= MOST_THREADS, f"1 to {MOST_THREADS}")
    must("optimize", it["optimize"] in (0, SORTS, ASKS), f"0, {SORTS} or {ASKS}")
    must("do", not it["do"] or bool(model and it["do"] in PLAYABLE), "a model's scenario with one part")
    for key in ("host", "shared", "side", "tensor", "offload", "uid", "pin", "deep", "blocking"):
        must(key, it[key] in (0, 1), "0 or 1")
    moments: list[Any] = (it["lazy"] or MOMENTS[1]).split("+")
    must("lazy", set(moments) <= set(MOMENTS), f"{', '.join(MOMENTS)}, joined by +,")
    what, _, n = it["fail"].partition(":")
    must("fail", not what or (what in FAILURES and n.isdecimal() and int(n) > 0), f"{', '.join(FAILURES)} and :N")
    must("fail", (what == DROP) <= (program == RPC), f"{DROP} with the program {RPC} only")
    must("largest", it["largest"] == 0 or it["largest"] >= LARGEST, f"0 or at least {LARGEST} bytes")
    must("extra", it["extra"] >= 0, "bytes")
    must("pin", not it["pin"] or it["reserve"] >= max(batches), "reserve of at least each batch")
    alone = program == "sched" and it["devices"] == 1 and not (it["refuse"] or it["side"])
    must("deep", not it["deep"] or alone, "the program sched on one device that refuses nothing, without side=1,")
    must("piece", it["piece"] >= 0, "bytes")
    refused = frozenset(filter(None, it["refuse"].split("+")))
    setting = Setting(
        moments, seed, refused, bool(it["host"]), bool(it["offload"]), bool(it["uid"]), bool(it["shared"]),
        bool(it["blocking"]), it["largest"], it["extra"], it["optimize"], Fail(what, int(n or 1)),
    )  # fmt: skip
    params = {"n": list(batches), **{key: it[key] for key in PARAMS}}
    params["shares"] = list(it["shares"])
    return Request(program, model, params, [0, 0, 1] if program == "streams" else list(range(count)), setting)


def _build(case_id: str) -> Case:
    read(case_id)
    return without_steps(case_id)


class Player:
    """Runs programs on lazy devices of one build."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the library. UnavailableError if there is no such library, or a device is named."""
        self._spec, found = spec, device(spec)
        if found.device not in ("", "CPU"):
            raise UnavailableError(f"{spec}: the family {NAME} tests a build on devices of its own: name no device")
        self._lib, self._models = found.lib, Models(isolation)
        self._server: Server | None = None
        self._processes = {
            llama: Process("conformance.llama.live.lazy.worker", found, Load(found.lib, llama), isolation)
            for llama in (False, True)
        }

    def play(self, case_id: str) -> Result:
        """Return the result; raises as `Process.ask`."""
        request = read(case_id)
        params = request.params
        if request.model:
            params = {**params, "request": asdict(replace(self._models.use(request.model), lib=self._lib))}
        if request.program == RPC:
            params = {**params, "endpoint": self._endpoint()}
        begun = time.perf_counter()
        setting = {**asdict(request.setting), "refused": sorted(request.setting.refused)}
        asked = {"program": request.program, "params": params, "setting": setting}
        try:
            said = self._processes[bool(request.model)].ask(**asked, devices=request.devices)
        except BackendCrashError as e:
            if request.model and self._dies_alone(asked):
                raise BackendCrashError(f"{e}; on the CPU alone, too", words=e.words, died=e.died) from None
            if request.setting.fail.what != DROP or "RPC" not in str(e):
                raise
            said = self._after_drop(asked, request.devices, str(e))
        seconds = time.perf_counter() - begun
        result = Result(case_id, str(self._spec), Verdict.PASS, seconds=seconds, metrics=said["calls"])
        return judge(result, request.setting.fail, said)

    def _dies_alone(self, asked: dict[str, Any]) -> bool:
        """Return True if the model crashes the build on the CPU alone, too."""
        try:
            self._processes[True].ask(**asked, devices=[])
        except BackendCrashError:
            return True
        return False

    def _endpoint(self) -> str:
        """Return the address of a server of this build; UnavailableError if it has none."""
        if not self._lib:
            raise UnavailableError(f"the program {RPC} needs a build with an RPC server; the wheel has none")
        if self._server is None:
            path = Path(self._lib)
            self._server = Server(path if path.is_dir() else path.parent)
        return self._server.endpoint

    def _after_drop(self, asked: dict[str, Any], devices: Sequence[int], reported: str) -> dict[str, Any]:
        """Return the same server's reply without the failure, which ended the client."""
        again = self._processes[False].ask(
            **{**asked, "setting": {**asked["setting"], "fail": asdict(Fail())}}, devices=devices
        )
        wrong = f"after the failure, {again['wrong']}" if again["wrong"] else ""
        return {**again, "wrong": wrong, "reported": reported, "failures": 1}

    def close(self) -> None:
        """End all processes."""
        if self._server is not None:
            self._server.close()
        self._models.close()
        for process in self._processes.values():
            process.close()


def judge(result: Result, fail: Fail, said: dict[str, Any]) -> Result:
    """Return the result with its verdict: FAIL for races, wrong values, unreported failures.

    VACUOUS if a failure on request did not occur, or no device computed anything; UNSUPPORTED if this ggml makes fewer
    calls than the one that fails, and did the rest right.
    """
    if not fail.what and not said["wrong"] and not any(said["calls"].get(name) for name in COMPUTES):
        return replace(result, verdict=Verdict.VACUOUS, error=Error(*2 * ("no device computed anything",)))
    wrong = [*said["races"], said["wrong"]]
    if fail.what in REPORTED:
        calls = sum(said["calls"].get(name, 0) for name in COUNTED.get(fail.what, ()))
        if not said["failures"] and not (calls and any(wrong)):
            why = f"fail={fail.what}:{fail.n} did not occur{f', only {calls} calls of it' if calls else ''}"
            return replace(result, verdict=Verdict.UNSUPPORTED if calls else Verdict.VACUOUS, error=Error(why, why))
        if said["failures"] and not said["reported"] and fail.what not in AVOIDABLE:
            wrong.append(f"fail={fail.what}:{fail.n}: no function of ggml reported it")
    if any(wrong):
        return replace(result, verdict=Verdict.FAIL).noted(*wrong)
    return result.noted(said["reported"])


FAMILY = LiveFamily(
    NAME,
    "a build's scheduler runs on devices of our own that are as lazy, or as eager, as the interface allows",
    _ids,
    _build,
    player=Player,
)
