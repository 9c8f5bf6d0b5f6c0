"""Worker service of the family `order`: runs programs on lazy devices and on the CPU.

`{"load": {"lib": path, "llama": bool}}` opens a library, with llama.cpp. `{"program": name, "params": {...},
"devices": [...], "setting": {...}}` returns `{"wrong": text, "races": [...], "reported": text, "failures": n,
"calls": {...}}`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.llama import Llama
from conformance.ggml.lib.rpc import Proxy, connect
from conformance.llama.live.comparison import CLOSE, nmse
from conformance.llama.live.scenarios.harness import Together, in_threads
from conformance.llama.live.worker import open_model
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import SPLIT_LAYER, SPLIT_TENSOR, LacksError, RefusedError, Split
from conformance.process.service import Frame, Service, failure

from . import programs
from .device import NAMES, Machine
from .programs import F32, PROGRAMS, RPC, BrokenError, Caller, ReportedError, in_turn
from .run import DROP, Fail, Setting

COUNTED = (
    "graph_compute", "graph_plan_compute", "cpy_tensor_async", "set_tensor_async", "get_tensor_async", "event_wait",
    "event_synchronize", "synchronize", "graph_reused", "rpc_bytes",
)  # fmt: skip
"""Functions whose calls are reported."""


def play(
    machine: Machine, program: str, params: Mapping[str, Any], devices: Sequence[int], setting: Setting
) -> dict[str, Any]:
    """Run a program on devices, then on the CPU alone, and compare what it returns.

    After a failure on request it runs once more without.
    """
    reported = ""
    try:
        actual = run(machine, program, params, devices, setting)
    except ReportedError as e:
        if not setting.fail.what:
            raise
        actual, reported = [], str(e)
    except BrokenError as e:
        return {"wrong": str(e), "races": [], "reported": "", "failures": 0, "calls": _counted(machine)}
    races, calls, failures = machine.check(), _counted(machine), machine.run.failures
    if machine.alive:
        return {"failed": f"{machine.alive} backends, buffers and events of the device were not freed"}
    if reported:
        actual = run(machine, program, params, devices, replace(setting, fail=Fail()))
    expected = run(machine, program, params, (), setting)
    limit = 0.0 if program in PROGRAMS else CLOSE
    wrong = (_difference(i, a, e, limit) for i, (a, e) in enumerate(zip(actual, expected, strict=True)))
    after = "after the failure, " if reported else ""
    return {
        "wrong": next((after + text for text in wrong if text), ""),
        "races": [str(race) for race in races],
        "reported": reported,
        "failures": failures,
        "calls": calls,
    }


def _counted(machine: Machine) -> dict[str, int]:
    return {name: machine.run.calls[name] for name in COUNTED if name in machine.run.calls}


def run(
    machine: Machine, program: str, params: Mapping[str, Any], devices: Sequence[int], setting: Setting
) -> list[F32]:
    """Run a program on devices, or on the CPU alone if there are none.

    ReportedError if ggml reports a failure.
    """
    machine.begin(setting)
    if program == RPC and devices:
        return _over_rpc(machine, params, setting)
    together = machine.run.timeline.together
    if program not in PROGRAMS:
        if params["tensor"] and machine.g.backend_meta_device is None:
            raise UnavailableError("this ggml exports no ggml_backend_meta_device")
        return decode(params, "+".join(NAMES[i] for i in devices), together if devices else in_threads)
    handles = [machine.devices[i] for i in devices]
    return _call(machine.library, program, params, handles, setting.seed, together if devices else in_turn)


def _call(
    library: Library,
    program: str,
    params: Mapping[str, Any],
    devices: Sequence[int],
    seed: int,
    together: programs.Together = in_turn,
) -> list[F32]:
    backends: list[int] = []
    try:
        for device in devices:
            backend = library.ggml.backend_dev_init(device, None)
            if not backend:
                raise ReportedError("ggml_backend_dev_init returned NULL")
            backends.append(backend)
        backends.append(library.devices.by_name("CPU").start(1))
        caller = Caller(library, backends, seed, together)
        with caller.owned:
            return list(PROGRAMS[program](caller, params))
    finally:
        for backend in backends:
            library.ggml.backend_free(backend)


def _over_rpc(machine: Machine, params: Mapping[str, Any], setting: Setting) -> list[F32]:
    """Run `sched` on a server's device behind a proxy, whose bytes are counted as calls."""
    drop = setting.fail.n if setting.fail.what == DROP else 0
    proxy = Proxy(params["endpoint"], params["piece"], drop, setting.seed)
    try:
        device = machine.g.backend_reg_dev_get(connect(machine.library, proxy.endpoint), 0)
        return _call(machine.library, RPC, params, [device], setting.seed)
    finally:
        machine.run.calls["rpc_bytes"] += proxy.sent
        machine.run.failures += proxy.broke
        proxy.close()


def decode(params: Mapping[str, Any], devices: str, together: Together = in_threads) -> list[F32]:
    """Return the results of a model, per batch, or all that the scenario `do` compares.

    `devices` is "" for the CPU alone. ReportedError if llama.cpp reports a failure, UnavailableError if the scenario
    does not apply.
    """
    try:
        split = Split(SPLIT_TENSOR if params["tensor"] else SPLIT_LAYER, params["shares"], params["layers"])
        model = open_model(Request(**params["request"]), devices, split=split)
    except (LacksError, RefusedError) as e:
        raise UnavailableError(str(e)) from None
    except UsageError as e:
        raise ReportedError(str(e)) from None
    try:
        with TemporaryDirectory(prefix="conformance-order-") as folder:
            file = Path(folder, f"{params['do'] or 'run'}.npz")
            if params["do"]:
                ask = {"scenario": params["do"], "part": 0, "folder": folder, "changes": {}}
                said = model.scenario(ask, together)
            else:
                said = model.reply({"run": str(file), "changes": {}, "watch": None})
            if "unsupported" in said:
                raise UnavailableError(said["unsupported"])
            if "failed" in said:
                raise ReportedError(said["failed"])
            with np.load(file) as arrays:
                return [arrays[k] for k in arrays.files]
    finally:
        model.free()


def _difference(i: int, actual: F32, expected: F32, limit: float) -> str:
    if np.array_equal(actual, expected) or nmse(actual, expected) <= limit:
        return ""
    at = int(np.flatnonzero(actual.reshape(-1) != expected.reshape(-1))[0])
    a, e = actual.reshape(-1)[at], expected.reshape(-1)[at]
    return f"value {at} of result {i}: {e:.6g} expected, as on the CPU alone, {a:.6g} found"


def main() -> None:
    """Answer requests until the caller closes the connection."""
    machines: list[Machine] = []

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            if "load" in header:
                kind = Llama if header["load"]["llama"] else Library
                machines.append(Machine(kind(header["load"]["lib"])))
                if header["load"]["llama"]:
                    machines[-1].register()
                return {}, ()
            made = header["setting"]
            setting = Setting(**{**made, "refused": frozenset(made["refused"]), "fail": Fail(**made["fail"])})
            return play(machines[-1], header["program"], header["params"], header["devices"], setting), ()
        except UnavailableError as e:
            return {"unsupported": str(e)}, ()
        except ReportedError as e:
            return {"failed": str(e)}, ()
        except ConformanceError as e:
            return failure(e, UsageError.__name__)

    Service().serve(answer)
    os._exit(0)  # skip the libraries' own clean-up; there is nothing to save


if __name__ == "__main__":
    main()
