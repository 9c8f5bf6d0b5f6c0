"""Energy: what counters of made-up machines say, which are summed, and what is never made up."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.ggml.errors import UnavailableError
from conformance.llama.live.energy import Counter, Meter, meter, nvml_counters

NO_NVML = "libno-such.so"


def _files(folder: Path, **files: str | int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n", encoding="ascii")
    return folder


def _zone(sysfs: Path, name: str, label: str, turn: int = 1_000_000, now: int = 900_000) -> Path:
    zone = _files(sysfs / "class" / "powercap" / name, name=label, max_energy_range_uj=turn, energy_uj=now)
    return zone / "energy_uj"


def _hwmon(sysfs: Path, n: int, driver: str, **files: str | int) -> Path:
    return _files(sysfs / "class" / "hwmon" / f"hwmon{n}", name=driver, **files)


def _battery(sysfs: Path, name: str = "BAT0", status: str = "Discharging", **files: str | int) -> Path:
    return _files(sysfs / "class" / "power_supply" / name, type="Battery", status=status, **files)


def test_packages_are_counted_once_and_over_their_turn(tmp_path: Path) -> None:
    """Cores and memory are parts of a package; a counter that starts from 0 again has not gone backwards."""
    first = _zone(tmp_path, "intel-rapl:0", "package-0")
    _zone(tmp_path, "intel-rapl:0:0", "core", now=5)
    _zone(tmp_path, "intel-rapl:1", "psys", now=5)
    second = _zone(tmp_path, "intel-rapl:2", "package-1", now=10)
    counters = meter(tmp_path, NO_NVML)
    assert str(counters) == "RAPL package-0, RAPL package-1"
    with counters.measure() as energy:
        first.write_text("100000\n", encoding="ascii")
        second.write_text("300010\n", encoding="ascii")
    assert energy.joules == pytest.approx({"RAPL package-0": 0.2, "RAPL package-1": 0.3})
    assert energy.total == pytest.approx(0.5)


def test_absent_or_closed_counters_are_said(tmp_path: Path) -> None:
    """No folder, no zone of a package, a file that may not be read: the reason of each kind, never a number."""
    with pytest.raises(UnavailableError) as e:
        meter(tmp_path, NO_NVML)
    for words in ("no RAPL counters in", "no libno-such.so", "no energy or power of", "no battery in use"):
        assert words in str(e.value)
    _zone(tmp_path, "intel-rapl:0", "psys")
    with pytest.raises(UnavailableError, match="no RAPL counters"):
        meter(tmp_path, NO_NVML)
    _zone(tmp_path, "intel-rapl:1", "package-0").unlink()
    with pytest.raises(UnavailableError, match=r"intel-rapl:1/energy_uj cannot be read"):
        meter(tmp_path, NO_NVML)


def test_kinds_that_overlap_are_not_summed(tmp_path: Path) -> None:
    """RAPL before hwmon, hwmon before the battery: an integrated GPU and the whole machine hold a package again."""
    _battery(tmp_path, power_now=7_000_000)
    assert str(meter(tmp_path, NO_NVML)) == "battery BAT0"
    _hwmon(tmp_path, 0, "amdgpu", power1_average=9_000_000)
    assert str(meter(tmp_path, NO_NVML)) == "hwmon amdgpu hwmon0"
    _zone(tmp_path, "intel-rapl:0", "package-0")
    found = meter(tmp_path, NO_NVML)
    assert str(found) == "RAPL package-0"
    assert found.lacks == "no libno-such.so"


def test_a_driver_that_counts_energy_is_read_as_such(tmp_path: Path) -> None:
    """Of a card its energy before its power, the whole before its parts; sockets before cores; no other drivers."""
    card = _hwmon(tmp_path, 2, "xe", energy1_input=5_000_000, energy1_label="card", energy2_input=1, power1_input=7)
    cpu = _hwmon(tmp_path, 3, "amd_energy", energy1_input=1, energy1_label="Ecore000",
                 energy10_input=2_000_000, energy10_label="Esocket0")  # fmt: skip
    _hwmon(tmp_path, 4, "nvme", power1_input=1)
    counters = meter(tmp_path, NO_NVML)
    assert str(counters) == "hwmon xe hwmon2 card, hwmon amd_energy hwmon3 Esocket0"
    with counters.measure() as energy:
        _files(card, energy1_input=8_500_000)
        _files(cpu, energy10_input=2_250_000)
    assert energy.joules == pytest.approx({"hwmon xe hwmon2 card": 3.5, "hwmon amd_energy hwmon3 Esocket0": 0.25})


@pytest.mark.parametrize("files", [{"power_now": 6_000_000}, {"voltage_now": 12_000_000, "current_now": -500_000}])
def test_a_battery_is_read_while_it_is_in_use(tmp_path: Path, files: dict[str, str | int]) -> None:
    """Power, or volts times amperes, of what is being discharged; one on the mains says nothing."""
    _battery(tmp_path, "BAT1", "Charging", power_now=9)
    with pytest.raises(UnavailableError, match="no battery in use"):
        meter(tmp_path, NO_NVML)
    _battery(tmp_path, "BAT0", "Discharging", **files)
    (counter,) = meter(tmp_path, NO_NVML).counters
    assert counter.read() == pytest.approx(6.0)
    assert counter.power


@given(st.lists(st.floats(0.1, 1000), min_size=3, max_size=8))
def test_watts_become_joules(watts: list[float]) -> None:
    """Trapezoids between samples: never less than the least power over the time, nor more than the most."""
    values = iter([*watts, *([watts[-1]] * 10_000)])
    seen = threading.Event()
    reads = count(1)

    def read() -> float:
        if next(reads) >= len(watts):
            seen.set()
        return next(values)

    ticks = Meter([Counter("battery", "B", read, power=True)], period=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        clock = count()
        patch.setattr("conformance.llama.live.energy.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
        with ticks.measure() as energy:
            assert seen.wait(10)
    (joules,) = energy.joules.values()
    seconds = next(clock) - 1
    assert joules is not None
    assert min(watts) * seconds * (1 - 1e-9) <= joules <= max(watts) * seconds * (1 + 1e-9)


def test_a_counter_that_stands_still_or_vanishes_gives_no_figure(tmp_path: Path) -> None:
    """Everything uses energy: no rise is too short a time; and no sum leaves a part of the machine out."""
    still, moved = _zone(tmp_path, "intel-rapl:0", "package-0"), _zone(tmp_path, "intel-rapl:1", "package-1")
    counters = meter(tmp_path, NO_NVML)
    with counters.measure() as energy:
        moved.write_text("950000", encoding="ascii")
    assert energy.joules == {"RAPL package-0": None, "RAPL package-1": pytest.approx(0.05)}
    assert energy.total is None
    with counters.measure() as energy:
        still.unlink()
        moved.write_text("990000", encoding="ascii")
    assert energy.joules["RAPL package-0"] is None


class _Nvml:
    """NVIDIA's library with two GPUs, the first of which counts nothing."""

    def __init__(self, driver: bool = True) -> None:
        self.driver = driver
        self.millijoules: Iterator[int] = count(1000, 500)

    def nvmlInit_v2(self) -> int:  # noqa: N802  # NVIDIA's name
        return 0 if self.driver else 9

    def nvmlDeviceGetCount_v2(self, n: Any) -> int:  # noqa: N802, ANN401  # the same; ctypes' own
        n._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, i: ctypes.c_uint, device: Any) -> int:  # noqa: N802, ANN401  # as above
        device._obj.value = 100 + i.value
        return 0

    def nvmlDeviceGetName(self, _device: object, name: Any, _n: object) -> int:  # noqa: N802, ANN401  # as above
        name.value = b"Made-up GPU"
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, out: Any) -> int:  # noqa: N802, ANN401
        if device.value == 100:
            return 3
        out._obj.value = next(self.millijoules)
        return 0


def test_nvml_counts_millijoules() -> None:
    """Of the GPUs that count; without a driver, or such a GPU, the reason."""
    (counter,) = nvml_counters(_Nvml())
    assert str(counter) == "NVML 1 Made-up GPU"
    assert counter.read() == 1.5
    assert counter.read() == 2.0
    with pytest.raises(UnavailableError, match="no NVIDIA driver"):
        nvml_counters(_Nvml(driver=False))
