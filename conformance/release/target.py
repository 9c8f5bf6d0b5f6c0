"""What is tested of a build: each of its devices, in the setups in which faults hid before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.builds.build import Build, DeviceOf
from conformance.ggml.errors import UsageError

ADAPTER = "ggml"
THREADS = "8"
"""More than most cases have heads or rows: faults of the past needed 3 (more threads than heads) and 8 (chunks)."""
CPU = "CPU"
RPC = "RPC0"
"""The first device of a server of the same build on this machine."""
PLACED = ("CPU_REPACK",)
"""Buffer types of a CPU that have kernels of their own."""
KERNELS = {"threads", "variant"}
"""Options that choose other kernels of the same device."""
BESIDE = ("ACCEL",)
"""Types of devices that compute a few ops beside the CPU, so that only a scheduler's graph reaches them."""


@dataclass(frozen=True, slots=True)
class Target:
    """One device in one setup, on the build and, where it is there too, on its base."""

    name: str
    """As `CPU threads=8`."""
    build: Spec
    base: Spec | None
    """None: there is no base, or it has no such device."""
    only_ops: bool = False
    """Whether it differs from another target by its kernels alone, so that trajectories tell nothing more."""

    @property
    def specs(self) -> Sequence[Spec]:
        """The build's, and the base's."""
        return (self.build,) if self.base is None else (self.build, self.base)


KINDS = ("BLAS", "RPC", "Vulkan", "OpenCL", "OPENVINO", "CUDA", "ROCm", "SYCL", "MTL", "CANN")
"""How the names of devices begin that a build may have."""


def absent(build: Build) -> list[str]:
    """Of `KINDS`, those that a build has not, on this machine."""
    return [k for k in KINDS if not any(name.startswith(k) for name, _ in _setups(build))]


def targets(build: Build, base: Build | None, devices: Sequence[str] = ()) -> list[Target]:
    """Every target of `build`; only those whose name begins with one of `devices`, in any case of letters, if any.

    UsageError lists the targets if none is left.
    """
    before = {} if base is None else dict(_setups(base))
    every = [
        Target(
            name,
            _spec(build.path, options),
            _spec(base.path, before[name]) if base and name in before else None,
            bool(options.keys() & KERNELS),
        )
        for name, options in _setups(build)
    ]
    chosen = [t for t in every if not devices or any(t.name.lower().startswith(d.lower()) for d in devices)]
    if not chosen:
        has = ", ".join(t.name for t in every) or "none"
        raise UsageError(f"{build.name}: device {' or '.join(devices) or 'of any name'} expected; it has {has}")
    return chosen


def _setups(build: Build) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Name of a setup -> options of the adapter."""
    for device in build.devices:
        yield from _of_device(device)
    for variant in build.variants:
        yield f"{CPU} variant={variant}", {"variant": variant}
    if build.server:
        yield RPC, {"device": RPC, "rpc": "loopback"}


def _of_device(device: DeviceOf) -> Iterator[tuple[str, Mapping[str, str]]]:
    if device.type in BESIDE:
        yield device.name, {"device": device.name, "mode": "sched"}
        return
    options = {} if device.name == CPU else {"device": device.name}
    yield device.name, options
    if device.type != CPU:
        return
    yield f"{device.name} threads={THREADS}", {**options, "threads": THREADS}
    for name in device.buffer_types:
        if name in PLACED:
            yield f"{device.name} buffer={name}", {**options, "buffer": name}


def _spec(path: Path, options: Mapping[str, str]) -> Spec:
    return Spec(ADAPTER, (("lib", str(path)), *options.items()))
