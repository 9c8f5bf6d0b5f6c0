"""Measures energy with the machine's counters: RAPL, NVML, hwmon, or battery discharge.

A counter gives either joules since an arbitrary start, or present watts, which are sampled and integrated. Every
counter includes other programs on its part of the machine. Two kinds may count the same part (an integrated GPU's hwmon
is in the processor's RAPL package), so a sum is of one kind, or of RAPL and NVML, whose parts never overlap.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, get_args

from conformance.ggml.errors import UnavailableError

Kind = Literal["RAPL", "NVML", "hwmon", "battery"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SYSFS = Path("/sys")
PERIOD = 0.1
"""Seconds between two samples of a power counter."""
_NVML = "libnvidia-ml.so.1"
_NAMES = 96
"""`NVML_DEVICE_NAME_V2_BUFFER_SIZE`."""
_HWMON = ("amdgpu", "amdxdna", "amd_energy", "i915", "xe", "nouveau")
"""Drivers whose hwmon device measures a whole processor, GPU or NPU, not a rail or fan."""
_DISJOINT: tuple[frozenset[Kind], ...] = (
    frozenset({"RAPL", "NVML"}),
    frozenset({"hwmon"}),
    frozenset({"battery"}),
)
"""Kinds that may be summed; the first set with a counter on this machine is used."""


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter of a machine."""

    kind: Kind
    name: str
    """Name of the measured part, such as `package-0`."""
    read: Callable[[], float]
    """Joules, or watts if `power`."""
    turn: float = 0.0
    """Joules at which the counter wraps to 0; 0 if it never does."""
    power: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(slots=True)
class Energy:
    """Energy of a stretch of time, by counter."""

    joules: dict[str, float | None] = field(default_factory=dict)
    """Counter -> joules; None if it did not change: too little time, or a broken counter."""

    @property
    def total(self) -> float | None:
        """The sum; None if a counter did not change, because the sum would lack a part."""
        values = list(self.joules.values())
        return sum(v for v in values if v is not None) if values and None not in values else None


@dataclass(frozen=True, slots=True)
class Meter:
    """Counters that are read together; their parts of the machine do not overlap."""

    counters: Sequence[Counter]
    lacks: str = ""
    """Reasons why other kinds that could be added are missing."""
    period: float = PERIOD

    def __str__(self) -> str:
        return ", ".join(map(str, self.counters))

    @contextmanager
    def measure(self) -> Iterator[Energy]:
        """Measure the energy of the block; the yielded record is complete once the block has ended."""
        energy = Energy()
        with ExitStack() as stack:
            uses = [stack.enter_context(_used(c, self.period)) for c in self.counters]
            yield energy
        for counter, use in zip(self.counters, uses, strict=True):
            energy.joules[str(counter)] = use.joules or None


@dataclass(slots=True)
class _Use:
    """Joules of one counter; 0 if it did not change or could not be read at the end."""

    joules: float = 0.0


@contextmanager
def _used(counter: Counter, period: float) -> Iterator[_Use]:
    use, last = _Use(), (time.perf_counter(), _value(counter))
    done = threading.Event()

    def sample() -> None:
        nonlocal last
        now = time.perf_counter(), _value(counter)
        use.joules += (now[0] - last[0]) * (now[1] + last[1]) / 2
        last = now

    def run() -> None:
        while not done.wait(period):
            sample()

    thread = threading.Thread(target=run, daemon=True)
    if counter.power:
        thread.start()
    try:
        yield use
    finally:
        done.set()
        if counter.power:
            thread.join()
    if counter.power:
        sample()
    else:
        used = _value(counter) - last[1]
        use.joules = used % counter.turn if counter.turn else used
    if not isfinite(use.joules):
        use.joules = 0.0


def _value(counter: Counter) -> float:
    """Return the counter's value; NaN if it can no longer be read."""
    try:
        return counter.read()
    except (OSError, ValueError, UnavailableError):
        return nan


def meter(sysfs: Path = SYSFS, nvml: str = _NVML) -> Meter:
    """Return the counters of the first available set of `_DISJOINT`; `nvml` is NVIDIA's library.

    UnavailableError if there are none, with a reason for each kind.
    """
    finders: Mapping[Kind, Callable[[], list[Counter]]] = {
        "RAPL": lambda: _rapl(sysfs / "class" / "powercap"),
        "NVML": lambda: _nvml(nvml),
        "hwmon": lambda: _hwmon(sysfs / "class" / "hwmon"),
        "battery": lambda: _battery(sysfs / "class" / "power_supply"),
    }
    reasons: list[str] = []
    for kinds in _DISJOINT:
        counters: list[Counter] = []
        lacks = len(reasons)
        for name in (k for k in KINDS if k in kinds):
            try:
                counters += finders[name]()
            except UnavailableError as e:
                reasons.append(str(e))
        if counters:
            return Meter(counters, "; ".join(reasons[lacks:]))
    raise UnavailableError("; ".join(reasons))


def _rapl(folder: Path) -> list[Counter]:
    """Return the packages: zones `intel-rapl:N` (AMD's too), without their subzones."""
    zones = sorted(folder.glob("intel-rapl:*"))
    packages = [z for z in zones if z.name.count(":") == 1 and _text(z / "name").startswith("package")]
    if not packages:
        raise UnavailableError(f"no RAPL counters in {folder}")
    return [
        Counter("RAPL", _text(z / "name"), _scaled(z / "energy_uj", 1e-6), _scaled(z / "max_energy_range_uj", 1e-6)())
        for z in packages
        if _readable(z / "energy_uj", z / "max_energy_range_uj")
    ]


def _hwmon(folder: Path) -> list[Counter]:
    """Return each device's first energy counter, or else power counter, or one per socket."""
    found = []
    for device in sorted(folder.glob("hwmon*")):
        driver = _text(device / "name")
        if driver not in _HWMON:
            continue
        energy = sorted(device.glob("energy*_input"), key=_number)
        sockets = [f for f in energy if _label(f).startswith("Esocket")]
        power = sorted((*device.glob("power*_average"), *device.glob("power*_input")), key=_number)
        for file in sockets or energy[:1] or power[:1]:
            if _readable(file):
                name = " ".join(filter(None, (driver, device.name, _label(file))))
                found.append(Counter("hwmon", name, _scaled(file, 1e-6), power=file not in energy))
    if not found:
        raise UnavailableError(f"no energy or power of {', '.join(_HWMON)} in {folder}")
    return found


def _battery(folder: Path) -> list[Counter]:
    """Return the batteries that are discharging; they power the whole machine, screen included."""
    found = []
    for device in sorted(folder.glob("*")):
        if (_text(device / "type"), _text(device / "status")) != ("Battery", "Discharging"):
            continue
        power, volts, amperes = device / "power_now", device / "voltage_now", device / "current_now"
        if power.exists() and _readable(power):
            found.append(Counter("battery", device.name, _scaled(power, 1e-6), power=True))
        elif _readable(volts, amperes):
            found.append(Counter("battery", device.name, _product(volts, amperes), power=True))
    if not found:
        raise UnavailableError(f"no battery in use in {folder}")
    return found


def _nvml(name: str) -> list[Counter]:
    """Return the GPUs that count their energy (Volta and later)."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        raise UnavailableError(f"no {name}") from None
    return nvml_counters(library)


def nvml_counters(library: Any) -> list[Counter]:  # noqa: ANN401  # a ctypes library
    """Return the total energy (mJ) of every GPU by NVML; UnavailableError if none counts it."""
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        raise UnavailableError("NVML does not start: no NVIDIA driver")
    found = []
    for i in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAMES)
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(i), ctypes.byref(device)):
            continue
        library.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAMES))

        def read(device: ctypes.c_void_p = device, i: int = i) -> float:
            millijoules = ctypes.c_ulonglong()
            if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
                raise UnavailableError(f"NVML does not report the energy of GPU {i}")
            return millijoules.value / 1e3

        try:
            read()
        except UnavailableError:
            continue
        found.append(Counter("NVML", f"{i} {name.value.decode('utf-8', 'replace')}", read))
    if not found:
        raise UnavailableError("NVML knows no GPU that counts its energy")
    return found


def _readable(*files: Path) -> bool:
    """Return True if each file holds an integer; UnavailableError if one may not be read."""
    for file in files:
        text = _text(file)
        if not text.removeprefix("-").isdecimal():
            raise UnavailableError(f"{file} cannot be read; by default only root may read it")
    return True


def _scaled(file: Path, unit: float) -> Callable[[], float]:
    return lambda: int(file.read_text(encoding="ascii")) * unit


def _product(volts: Path, amperes: Path) -> Callable[[], float]:
    """Return a reader of watts from µV and µA; a discharge current may be negative."""
    return lambda: _scaled(volts, 1e-6)() * abs(_scaled(amperes, 1e-6)())


def _label(file: Path) -> str:
    return _text(file.with_name(f"{file.name.split('_')[0]}_label"))


def _number(file: Path) -> tuple[int, str]:
    return int("".join(c for c in file.name if c.isdecimal()) or 0), file.name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
