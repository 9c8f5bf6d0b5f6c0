"""Find the first build that has a cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.backend.registry import Spec
from conformance.builds.build import Build
from conformance.judge.verdict import EXECUTED, Result

from .causes import fails

RunCase = Callable[[Spec, str], Result]
"""Runs a case, or a unit, by its id on a backend."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One build and its result for the case."""

    build: Build
    result: Result

    @property
    def has(self) -> bool:
        """True if the case fails; a build that refuses it does not have the fault."""
        return fails(self.result)


@dataclass(frozen=True, slots=True)
class Bisection:
    """The builds that ran, in their order."""

    tried: Sequence[Tried]

    @property
    def found(self) -> bool:
        """True if some builds have the cause and others do not."""
        return len({t.has for t in self.tried}) > 1

    def sentence(self) -> str:
        """Return the answer as one line."""
        builds = [t.build.name for t in self.tried]
        bad = [t.has for t in self.tried]
        if not any(t.result.verdict in EXECUTED for t in self.tried):
            return f"the case ran in none of the tested builds: {', '.join(builds)}"
        if not any(bad):
            return f"in none of the tested builds: {', '.join(builds)}"
        if not bad[-1]:
            last = max(i for i, has in enumerate(bad) if has)
            return f"{builds[last]} is the last build with it, {builds[last + 1]} no longer has it"
        if all(bad):
            return f"in every tested build, from {builds[0]} on"
        first = max(i for i, has in enumerate(bad) if not has) + 1
        return f"{builds[first]} is the first build with it, {builds[first - 1]} does not have it"


def bisect(
    case_id: str, spec: Spec, builds: Sequence[Build], run: RunCase, tell: Callable[[Tried], None] = lambda _: None
) -> Bisection:
    """Run a case on some of the ordered `builds`, until two neighbours differ.

    `spec` names the device; its library is replaced by each build's. The first and the last build run first: if they
    agree, bisection cannot find anything, and no other build runs.
    """
    tried: dict[int, Tried] = {}

    def has(i: int) -> bool:
        tried[i] = Tried(builds[i], run(on(spec, builds[i]), case_id))
        tell(tried[i])
        return tried[i].has

    first, last = has(0), has(len(builds) - 1)
    low, high = 0, len(builds) - 1
    while first != last and high - low > 1:
        middle = (low + high) // 2
        if has(middle) == first:
            low = middle
        else:
            high = middle
    return Bisection([tried[i] for i in sorted(tried)])


def on(spec: Spec, build: Build) -> Spec:
    """Return `spec` with the library of `build`."""
    return Spec(spec.name, (("lib", str(build.path)), *without_library(spec).options))


def without_library(spec: Spec) -> Spec:
    """Return `spec` without its library."""
    return Spec(spec.name, tuple((k, v) for k, v in spec.options if k != "lib"))
