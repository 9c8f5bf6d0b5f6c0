"""Prepares the test of a build: devices, setups, precision profiles and stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from conformance.builds.build import Build, probe
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.perf.units import Unit
from conformance.run.isolation.isolate import Isolation
from conformance.run.session.impact import Impacted, impacted
from conformance.suite.family import Level

from .cases import Cases
from .profiles import LEARNING, LEARNING_BESIDE, Profiles, folder
from .release import Release, ids_of, plan
from .target import CPU, Target, targets

PATIENCE = 1 / 20
"""Maximum share of the budget for one request, since requests may hang.

Not on an emulated device: its driver keeps a kernel for later runs only if it may compile to the end."""
LEAST = 20.0
"""Minimum time limit of a request in seconds, with any budget."""
VULKAN = {"GGML_VK_VISIBLE_DEVICES": "0"}
"""Environment in which ggml-vulkan lists drivers that run on the CPU."""

Say = Callable[[str], None]


def inspect(text: str, say: Say, isa: str = "") -> Build:
    """Inspect a build, including a Vulkan driver that runs on the CPU if it has no other."""
    say(f"inspecting {text}{' on ' * bool(isa)}{isa}")
    found = probe(text, isa=isa)
    if not isa and not any(d.name.startswith("Vulkan") for d in found.devices):
        again = probe(text, VULKAN)
        if len(again.devices) > len(found.devices):
            os.environ.update(VULKAN)
            say(f"{text}: {' '.join(f'{k}={v}' for k, v in VULKAN.items())} shows its Vulkan device")
            found = again
    return found


def prepare(
    new: Build,
    old: Build | None,
    devices: Sequence[str],
    seconds: float,
    level: Level,
    isolation: Isolation,
    say: Say,
    path: Path | None = None,
    units: Sequence[Unit] = (),
    jobs: int | None = None,
) -> Release:
    """Return the test of a build on targets that begin with a name of `devices`.

    UsageError if there is no such target, or if `units` are to be counted and the CPU is not among them.
    """
    cut = min(isolation.time_limit, max(LEAST, seconds * PATIENCE))
    isolation = replace(isolation, time_limit=cut, emulated_limit=isolation.deadline(emulated=True).each)
    profiles = Profiles(folder(), isolation, progress=say)
    chosen = profiles.give(targets(new, old, devices), new, old)
    if units and not any(t.name == CPU for t in chosen):
        raise UsageError(f"--device {', '.join(devices)}: {CPU} expected among them, on which units are counted")
    found = None if old is None else _impacted(new, old, chosen, level, say)
    models = new.llama and (old is None or old.llama)
    work = plan(chosen, level, models=models, changed=found.first if found else {})
    return Release(
        new,
        old,
        chosen,
        work,
        seconds,
        isolation,
        Cases(isolation, say, jobs=jobs),
        say,
        path=path,
        profiles=profiles,
        level=level,
        learning=LEARNING if old is None else LEARNING_BESIDE,
        units=units,
        jobs=jobs,
        impacted=found,
    )


def _impacted(new: Build, old: Build, chosen: Sequence[Target], level: Level, say: Say) -> Impacted | None:
    """Compare the builds; None, and a line, if their libraries cannot be compared."""
    try:
        found = impacted(new, old, ids_of(chosen, level))
    except UnavailableError as e:
        say(f"the cases run in their general order, since machine code could not be compared: {e}")
        return None
    say(f"code: {found.summary}")
    return found
