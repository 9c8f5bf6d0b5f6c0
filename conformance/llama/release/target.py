"""Targets of a build: its devices, each in setups that revealed bugs before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.backend.registry import ISA, Spec
from conformance.builds.build import Build, DeviceOf
from conformance.ggml.errors import UsageError

ADAPTER = "ggml"
THREADS = "8"
"""Threads of a setup. Bugs occurred with more threads than heads (3), and with 8 (chunks)."""
GUARDED = {"guard": "on", "threads": "32"}
"""Options that notice writes outside a tensor, with more threads than most have rows."""
CPU = "CPU"
RPC = "RPC0"
"""First device of an RPC server of the same build on this machine."""
PLACED = {"CPU_REPACK": frozenset({"MUL_MAT", "MUL_MAT_ID"})}
"""CPU buffer type with its own kernels -> their ops."""
OPS, TRAJECTORIES, MODELS = "ops", "trajectories", "models"
ALL = frozenset({OPS, TRAJECTORIES, MODELS})
KERNELS = frozenset({OPS})
"""Kinds of cases for a setup that only changes kernels: trajectories add nothing."""
GRAPHS = frozenset({OPS, TRAJECTORIES})
"""Kinds of cases for a setup that llama.cpp cannot select."""
BEHIND = frozenset({OPS, MODELS})
"""Kinds of cases for a device that leaves small products to the CPU.

No single arithmetic fits a trajectory of both, and weights are in the CPU's buffers, so there is nothing to audit."""
META = f"{CPU}+{CPU}"
"""The CPU twice behind a meta device, which splits tensors as `-sm tensor` does."""
BESIDE = ("ACCEL",)
"""Types of devices that compute only a few ops, so they need a scheduler."""


@dataclass(frozen=True, slots=True)
class Target:
    """One device in one setup, on the build and on its base if that has the device."""

    name: str
    """Name, such as `CPU threads=8`."""
    build: Spec
    base: Spec | None
    """Backend of the base; None if there is no base, or it lacks the device."""
    runs: frozenset[str] = ALL
    """Kinds of cases that run on it: single ops, trajectories, whole models."""
    software: bool = False
    """True if the CPU emulates the device, whose driver may be at fault."""
    kernels: frozenset[str] = frozenset()
    """Ops with their own kernels in this setup; single ops of others do not run. Empty: all."""

    @property
    def is_measured(self) -> bool:
        """True if its rounding is measured, because its device declares none."""
        return "profile" in dict(self.build.options)

    @property
    def on_cpu(self) -> bool:
        """True if it is the CPU itself."""
        return self.name.partition(" ")[0] == CPU

    @property
    def specs(self) -> Sequence[Spec]:
        """The specs of the build and of the base."""
        return (self.build,) if self.base is None else (self.build, self.base)


KINDS = ("BLAS", "RPC", "Vulkan", "OpenCL", "OPENVINO", "CUDA", "ROCm", "SYCL", "MTL", "CANN")
"""Prefixes of device names that a build may have."""


def absent(build: Build) -> list[str]:
    """Return the prefixes of `KINDS` that a build lacks on this machine."""
    return [k for k in KINDS if not any(name.startswith(k) for name, *_ in _setups(build))]


def targets(build: Build, base: Build | None, devices: Sequence[str] = ()) -> list[Target]:
    """Return targets of `build`: all, or by the beginning of a name in `devices`.

    UsageError lists the targets if none is left.
    """
    before = {} if base is None else {name: options for name, options, _ in _setups(base)}
    every = [
        Target(
            name,
            _spec(build, options),
            _spec(base, before[name]) if base and name in before else None,
            runs,
            any(d.software for d in build.devices if d.name == options.get("device")),
            PLACED.get(options.get("buffer", ""), frozenset()),
        )
        for name, options, runs in _setups(build)
    ]
    chosen = [t for t in every if not devices or any(t.name.lower().startswith(d.lower()) for d in devices)]
    if not chosen:
        has = ", ".join(t.name for t in every) or "none"
        raise UsageError(f"{build.name}: device {' or '.join(devices) or 'of any name'} expected; it has {has}")
    return chosen


_Setup = tuple[str, Mapping[str, str], frozenset[str]]
"""Name, options of the adapter, and kinds of cases."""


def _setups(build: Build) -> Iterator[_Setup]:
    for device in build.devices:
        yield from _of_device(device)
    if build.meta:
        yield META, {"device": META}, frozenset({MODELS})
    if build.server:
        yield RPC, {"device": RPC, "rpc": "loopback"}, ALL
    for variant in build.variants:
        yield f"{CPU} variant={variant}", {"variant": variant}, KERNELS


def _of_device(device: DeviceOf) -> Iterator[_Setup]:
    if device.type in BESIDE:
        yield device.name, {"device": device.name, "mode": "sched"}, BEHIND
        return
    options = {} if device.name == CPU else {"device": device.name}
    yield device.name, options, ALL
    if device.type != CPU:
        return
    yield f"{device.name} threads={THREADS}", {**options, "threads": THREADS}, KERNELS
    yield " ".join((device.name, *(f"{k}={v}" for k, v in GUARDED.items()))), {**options, **GUARDED}, KERNELS
    for name in device.buffer_types:
        if name in PLACED:
            yield f"{device.name} buffer={name}", {**options, "buffer": name}, GRAPHS
            both = {**options, "buffer": name, "threads": THREADS}
            yield f"{device.name} buffer={name} threads={THREADS}", both, KERNELS


def _spec(build: Build, options: Mapping[str, str]) -> Spec:
    """Return the spec of a build under the user's name for it."""
    here = Path(build.name)
    lib = ("lib", str(here.absolute()) if here.exists() else build.name)
    return Spec(ADAPTER, (lib, *options.items(), *((ISA, i) for i in [build.isa] if i)))
