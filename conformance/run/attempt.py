"""A case on a backend: what is tested, what judges it, and what came of it.

`UnderTest` is a backend with its judges. An `Attempt` is one run of a case on it, with the expected values. `trial`
makes attempts; `judgement`, `examine` and `stored` take one and return its `Result`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from conformance.backend.interface import Backend
from conformance.backend.registry import REFERENCE, Spec, resolve
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.judge.verdict import Pair

from .execute import Execution
from .oracle import Expectation, Oracle
from .session.settings import WaiverBook


class Keeper(Protocol):
    """Processes, oracle and settings, which live longer than a case. A `Runner` is one."""

    oracle: Oracle
    waivers: WaiverBook
    locates: bool
    checks_stale_state: bool
    undeclared: dict[Spec, None]

    def backend(self, spec: Spec) -> Backend:
        """Return the backend of `spec`, opened once.

        ConformanceError if it cannot be opened, always the same.
        """

    def open(self, spec: Spec, *, own: bool) -> Backend:
        """Open another backend, in its own process if `own`; raises as `open_backend`."""

    def end(self, name: str, it: Backend) -> None:
        """Close a backend; an error does not affect results."""


@dataclass(frozen=True, slots=True)
class UnderTest:
    """A backend under test, and those that judge it."""

    keeper: Keeper
    spec: Spec
    backend: Backend

    @property
    def oracle(self) -> Oracle:
        """The oracle of the run."""
        return self.keeper.oracle

    @property
    def is_reference(self) -> bool:
        """True if the reference itself is under test."""
        return resolve(self.spec).name == REFERENCE

    def pair(self, case: Case) -> Pair:
        """Return the case and this backend, as a result names them."""
        return Pair(case.id, str(self.spec))

    def at(self, spec: Spec) -> UnderTest:
        """Return another backend of the run; raises as `Keeper.backend`."""
        return UnderTest(self.keeper, spec, self.keeper.backend(spec))

    def declared(self) -> Arithmetic:
        """Return the arithmetic in which the backend is tested, apart from changes by a case."""
        return (self.oracle.second_opinion() if self.is_reference else self.backend).arithmetic()

    def referee(self, case: Case) -> Backend:
        """Return the other side of the comparison: the reference, or for it the real ggml."""
        if self.is_reference:
            return self.oracle.second_opinion()
        return self.oracle.reference_in(self.backend.arithmetic_in(case))

    @contextmanager
    def fresh(self, arithmetic: Arithmetic) -> Iterator[Backend]:
        """Open another such backend (the reference: in `arithmetic`); close it at the end."""
        backend = self.keeper.open(self.spec, own=False)
        try:
            yield backend.computing_in(arithmetic) if self.is_reference else backend
        finally:
            self.keeper.end(str(self.spec), backend)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a case on a backend, with the expected values."""

    tested: UnderTest
    case: Case
    expectation: Expectation
    execution: Execution

    @property
    def pair(self) -> Pair:
        """The case and the backend, as a result names them."""
        return self.tested.pair(self.case)
