"""Learns and caches precision profiles for devices that declare no rounding."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from conformance.backend.profile import Profile
from conformance.backend.registry import Spec
from conformance.builds.archive import cache
from conformance.builds.build import Build
from conformance.builds.source import contents
from conformance.case.leftover import write_whole
from conformance.ggml.errors import BackendTimeoutError, ConformanceError, UsageError
from conformance.run import learn
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.suite.family import LEVELS, Level

from .target import BESIDE, CPU, RPC, Target

LEARNING = 1 / 3
"""Maximum share of the time for measuring."""
LEARNING_BESIDE = 1 / 6
"""The same share with a base: an error that both builds have is not new."""
_PLAIN = re.compile(r"[^A-Za-z0-9.]+")


def folder() -> Path:
    """Return the default folder of profiles, in the user's cache beside the builds."""
    return cache().parent / "profiles"


@dataclass(frozen=True, slots=True)
class Profiles:
    """Profiles in a folder, one for each device and build."""

    folder: Path
    isolation: Isolation
    level: Level = LEVELS[0]
    progress: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic

    def give(self, targets: Sequence[Target], build: Build, base: Build | None) -> list[Target]:
        """Return the targets; those whose devices declare no rounding get the file of a profile.

        With a base its profile is used, so that a device that became less exact fails.
        """
        silent = {d.name for d in build.devices if d.type not in (CPU, *BESIDE)} - {RPC}
        return [
            self._with(t, build, base) if dict(t.build.options).get("device", CPU) in silent else t for t in targets
        ]

    def _with(self, target: Target, build: Build, base: Build | None) -> Target:
        path = self.path(*_measured(target, build, base))
        return replace(
            target,
            build=_with(target.build, path),
            base=None if target.base is None else _with(target.base, path),
        )

    def measure(self, target: Target, build: Build, base: Build | None, seconds: float) -> str:
        """Measure the rounding of a target of `give`; return a note about unmeasured keys, or "".

        They get the limits of upstream's tests; the next run measures them.

        Raises:
            UsageError: the profile cannot be written.
            ConformanceError: the device does not open.
        """
        of, spec = _measured(target, build, base)
        bare = Spec(spec.name, tuple((k, v) for k, v in spec.options if k != "profile"))
        unknown = self._learn(of, bare, seconds)
        return f"{unknown} not measured: upstream's limits hold there" if unknown else ""

    def path(self, build: Build, spec: Spec) -> Path:
        """Return the file of the profile of a build's device."""
        device = dict(spec.options)["device"]
        said = next((d.description for d in build.devices if d.name == device), "")
        words = f"{device} {said} {build.ggml} {build.number}"
        return self.folder / f"{_PLAIN.sub('-', words).strip('-')[:80]}-{sha256(words.encode()).hexdigest()[:8]}.toml"

    def _learn(self, build: Build, spec: Spec, seconds: float) -> str:
        """Write a profile; return which of the level's keys it lacks, or ""."""
        path, end = self.path(build, spec), self.clock() + seconds
        runner = Runner(isolation=self.isolation)
        try:
            backend = runner.backend(spec)
            profile = self._begun(path, learn.begin(backend, contents(build.path) if build.path.exists() else ""))
            self._write(path, profile.to_toml())
            try:
                keys = learn.plain(self.level, partial(self._check, end))
            except BackendTimeoutError:
                return "rounding"
            wanted = learn.left(profile, keys)
            for i, (key, ids) in enumerate(wanted.items()):
                if self.clock() >= end:
                    return f"{len(wanted) - i} of {len(keys)} keys"
                self.progress(
                    f"{spec}: measuring its rounding, {len(keys) - len(wanted) + i + 1} of {len(keys)}: {key}"
                )
                profile = learn.learn(profile, runner.backend(spec), runner.oracle, key, ids)
                self._write(path, profile.to_toml())
        finally:
            runner.close()
        return ""

    def _check(self, end: float) -> None:
        if self.clock() >= end:
            raise BackendTimeoutError("no time is left to measure rounding")

    def _begun(self, path: Path, new: Profile) -> Profile:
        """Return the profile of an earlier run; `new` if there is no valid one."""
        try:
            return learn.resume(path, new)
        except ConformanceError as e:
            self.progress(f"an earlier profile is not used: {e}")
            return new

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as e:
            raise UsageError(f"{path}: a precision profile cannot be written: {e.strerror or e}") from e


def _measured(target: Target, build: Build, base: Build | None) -> tuple[Build, Spec]:
    """Return the build whose rounding is measured, and its backend."""
    return (base, target.base) if base is not None and target.base is not None else (build, target.build)


def _with(spec: Spec, profile: Path) -> Spec:
    return Spec(spec.name, (*spec.options, ("profile", str(profile))))
