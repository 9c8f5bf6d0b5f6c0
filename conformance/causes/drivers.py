"""Library or driver: smallest cases of an emulated device run with other drivers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conformance.backend.interface import DeviceInfo
from conformance.backend.registry import VARIABLE, Spec
from conformance.builds.drivers import Driver, drivers
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError
from conformance.judge.cause import ALWAYS, Cause, OnDriver
from conformance.judge.verdict import Result
from conformance.process import Deadline
from conformance.run.runner import Runner
from conformance.run.signature import signature_of

Proven = tuple[Cause, Case, Result]
"""A cause with its smallest case, and how that fails."""


def with_drivers(
    found: Sequence[Proven], spec: Spec, info: DeviceInfo, runner: Runner, deadline: Deadline
) -> list[Cause]:
    """Return the causes with the drivers that ran their smallest cases, each in a fresh process.

    A driver that does not have the device, or is that of `info`, is left out, and so is a cause whose case does not
    always fail alone, as a pass with another driver would be no evidence. `runner` has opened nothing.
    """
    causes = [replace(c, drivers=(OnDriver(info.driver, r.verdict, alike=True),)) for c, _, r in found]
    for driver in drivers(info.device):
        other = selecting(spec, driver)
        for i, (cause, case, result) in enumerate(found):
            if deadline.is_over():
                return causes
            if cause.seen not in ("", ALWAYS):
                continue
            runner.restart()
            try:
                name = runner.backend(other).info().driver
            except ConformanceError:
                break
            if name == info.driver:
                break
            with runner.quick(locates=True, checks_stale_state=False):
                (again,) = runner.run(other, [case])
            own = signature_of(result)
            alike = own is not None and own.covers(signature_of(again))
            seen = OnDriver(name or driver.name, again.verdict, alike=alike)
            causes[i] = replace(causes[i], drivers=(*causes[i].drivers, seen))
    return causes


def selecting(spec: Spec, driver: Driver) -> Spec:
    """Return the backend of `spec` in a process that uses one driver."""
    own = {f"{VARIABLE}{name}": value for name, value in driver.environment.items()}
    return Spec(spec.name, tuple({**dict(spec.options), **own}.items()))
