"""Library or driver: causes run again with other drivers, and the drivers of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from conformance.backend.interface import DeviceInfo
from conformance.backend.registry import Spec, environment
from conformance.builds import drivers as machine
from conformance.builds.drivers import Driver
from conformance.causes import drivers as experiment
from conformance.causes.drivers import selecting, with_drivers
from conformance.cli.output import cause_lines
from conformance.ggml.errors import UnavailableError
from conformance.judge.cause import Cause, OnDriver, Party
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.verdict import Result, Verdict
from conformance.process import FOREVER, Deadline
from conformance.run.runner import Runner
from conformance.suite import ops

SPEC = Spec("ggml", (("device", "GPUOpenCL"), ("env.OCL_ICD_VENDORS", "own")))
CASE = ops.build("ops/ADD-f32+f32-a=4x3@1")
WRONG = Result(CASE.id, str(SPEC), Verdict.FAIL, where=Place(Fault.NODE, 0, 0, "ADD"))
CAUSE = Cause("ADD-1", "ADD is wrong", str(SPEC), Verdict.FAIL, "ADD", "", (), (CASE.id,), "always")
OTHER = replace(WRONG, where=Place(Fault.NODE, 0, 0, "MUL"))
PASSES = Result(CASE.id, str(SPEC), Verdict.PASS)
DIES = Result(CASE.id, str(SPEC), Verdict.CRASH, error=Error("died"))


class Machine:
    """A runner on a machine with several drivers: name of the file -> version, and its result."""

    def __init__(self, has: dict[str, tuple[str, Result]]) -> None:
        self.has, self.fresh = has, False

    def restart(self) -> None:
        """Make the next case run in a fresh process."""
        self.fresh = True

    def backend(self, spec: Spec) -> Machine:
        """Open the device with the driver that the environment names."""
        self.version, self.result = self.has[environment(spec)["OCL_ICD_VENDORS"] or ""]
        if not self.version:
            raise UnavailableError("no device")
        return self

    def info(self) -> DeviceInfo:
        """Return the driver."""
        return DeviceInfo("ggml", "GPUOpenCL", "", {"driver": self.version})

    @contextmanager
    def quick(self, *, locates: bool, checks_stale_state: bool) -> Iterator[None]:
        """Locate failures: an op is part of how a case fails."""
        assert locates > checks_stale_state
        yield

    def run(self, spec: Spec, cases: list[object]) -> list[Result]:
        """Return the driver's result, once for each fresh process."""
        assert (cases, self.fresh, dict(spec.options)["device"]) == ([CASE], True, "GPUOpenCL")
        self.fresh = False
        return [self.result]


def _found(
    monkeypatch: pytest.MonkeyPatch, has: dict[str, tuple[str, Result]], cause: Cause = CAUSE, until: Deadline = FOREVER
) -> Cause:
    there = [Driver(name, {"OCL_ICD_VENDORS": name}) for name in has]
    monkeypatch.setattr(experiment, "drivers", lambda device: there if device == "GPUOpenCL" else [])
    info = DeviceInfo("ggml", "GPUOpenCL", "", {"driver": "intel 1"})
    (found,) = with_drivers([(cause, CASE, WRONG)], SPEC, info, cast("Runner", Machine(has)), until)
    return found


@pytest.mark.parametrize(
    ("has", "party", "told"),
    [
        ({"mesa": ("mesa 2", WRONG)}, Party.LIBRARY, "mesa 2: alike; at fault: library"),
        ({"mesa": ("mesa 2", PASSES)}, Party.ONE_DRIVER, "mesa 2: PASS; at fault: driver, or library that relies"),
        ({"mesa": ("mesa 2", OTHER)}, Party.UNKNOWN, "mesa 2: FAIL; at fault: library or its software driver"),
        ({"mesa": ("mesa 2", DIES)}, Party.UNKNOWN, "mesa 2: CRASH; at fault: library or its software driver"),
        ({"a": ("a 1", PASSES), "b": ("b 1", WRONG)}, Party.LIBRARY, "a 1: PASS, b 1: alike; at fault: library"),
        ({}, Party.UNKNOWN, "emulated by intel 1; at fault: library or its software driver"),
        ({"absent": ("", PASSES), "again": ("intel 1", PASSES)}, Party.UNKNOWN, "emulated by intel 1; at fault"),
    ],
)
def test_another_driver_tells_the_party(
    monkeypatch: pytest.MonkeyPatch, has: dict[str, tuple[str, Result]], party: Party, told: str
) -> None:
    """The library's if one fails alike; undecided if one passes, fails otherwise, does not open or is the same."""
    found = _found(monkeypatch, has)
    assert found.party is party
    assert told in cause_lines([found])[2]
    assert Cause.from_json({k: v for k, v in found.to_json().items() if k != "smallest"}) == found


def test_a_case_that_does_not_always_fail_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass with another driver may be chance, so the party is unknown; after the time limit no case runs."""
    passes = {"mesa": ("mesa 2", PASSES)}
    for cause, until in ((replace(CAUSE, seen="3 of 6"), FOREVER), (CAUSE, Deadline.after(0.0))):
        assert _found(monkeypatch, passes, cause, until).party is Party.UNKNOWN


def test_the_host_and_hardware_need_no_other_driver() -> None:
    """An assertion of ggml's own is the library's, whatever drivers do; a device that is not emulated has none."""
    emulated = replace(CAUSE, drivers=(OnDriver("mesa", Verdict.CRASH, alike=True),))
    assert emulated.party is Party.UNKNOWN
    assert replace(emulated, message="ggml-opencl.cpp:#: GGML_ASSERT(x) failed").party is Party.LIBRARY
    assert (CAUSE.party, CAUSE.emulated, len(cause_lines([CAUSE]))) == (Party.LIBRARY, "", 2)


def test_each_driver_of_the_machine_is_selected_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of Vulkan are named, those of OpenCL lie alone in a folder; other devices have no drivers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "VULKAN", (tmp_path / "icd.d", tmp_path / "none"))
    monkeypatch.setattr(machine, "OPENCL", tmp_path / "vendors")
    monkeypatch.setattr(machine, "intel_driver", lambda: tmp_path / "libintelocl.so")
    for name, text in (("icd.d/lvp.json", "{}"), ("vendors/rusticl.icd", "libRusticlOpenCL.so.1\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    (vulkan,) = machine.drivers("Vulkan0")
    assert vulkan.environment["VK_ICD_FILENAMES"] == str(tmp_path / "icd.d" / "lvp.json")
    mesa, intel = sorted(machine.drivers("GPUOpenCL"), key=lambda d: d.name, reverse=True)
    folders = [Path(d.environment["OCL_ICD_VENDORS"]) for d in (mesa, intel)]
    assert [[p.read_text("utf-8") for p in f.iterdir()] for f in folders] == [
        ["libRusticlOpenCL.so.1\n"], [f"{tmp_path / 'libintelocl.so'}\n"],
    ]  # fmt: skip
    assert (mesa.environment["RUSTICL_ENABLE"], len(intel.environment)) == ("llvmpipe", 1)
    assert machine.drivers("CUDA0") == []
    assert environment(selecting(SPEC, intel)) == intel.environment
