"""Compare two installed builds of this package, each in a long-lived process of its own environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.case.strict import expect
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, UnavailableError, UsageError
from conformance.judge.verdict import FAILURES, Verdict
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError
from conformance.suite.family import Level

from .measure import Rounds, Subject
from .statistics import Decision, decide
from .units import Unit

WORKER = Path(__file__).with_name("compare_worker.py")
TIME_LIMIT = 600.0
"""Seconds that a request may take; the first one of a unit also runs its case."""
CLOSING = 10.0
"""Seconds that a build gets to end by itself."""
PYTHONS = ("bin/python", "Scripts/python.exe")
BASE, HEAD = "base", "head"


def is_number(value: JSON) -> bool:
    """Whether it is a number that float64 can hold."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


_Rule = tuple[str, Callable[[JSON], bool]]
_TEXT: _Rule = "text", lambda value: isinstance(value, str)
_VERDICT: _Rule = "a verdict", lambda value: value in [v.value for v in Verdict]
REPLIES: dict[str, dict[str, _Rule]] = {
    "starting": {"version": _TEXT, "python": _TEXT},
    "open": {"case": _TEXT, "verdict": _VERDICT, "detail": _TEXT},
    "missing": {"missing": _TEXT},
    "run": {"seconds": ("a finite number", is_number)},
}
"""Request -> what its reply holds; `missing` is a reply to `open`. The other build may be of any version."""


class UncomparableError(UnavailableError):
    """A unit that cannot be compared: a build lacks it, has another case for it, or does not pass it."""

    def __init__(self, message: str, *, broke: bool = False) -> None:
        super().__init__(message)
        self.broke = broke
        """Whether a case failed."""


class Build:
    """One build, measured in its own process; every backend gets a process of its own for each life.

    Raises:
        UsageError: it has no Python, or this package is not installed there or too old.
    """

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        python = next((venv / p for p in PYTHONS if (venv / p).is_file()), None)
        if python is None:
            raise UsageError(f"{venv}: a virtual environment expected, no {' or '.join(PYTHONS)} found in it")
        # neither the current directory nor PYTHONPATH may give it another build than its own
        self._worker = Worker(
            WORKER,
            time_limit=TIME_LIMIT,
            python=python.absolute(),
            cwd=venv,
            patience=CLOSING,
        )
        try:
            self.about = self._answer("starting")
        except UsageError:
            self.close()
            raise
        except BackendError as e:
            self.close()
            raise UsageError(
                f"{venv}: a build of ggml-conformance that can be measured expected, and it says: {e}; "
                f"{python} -m pip install ggml-conformance installs one there"
            ) from None

    def ask(self, do: str, **request: JSON) -> Mapping[str, JSON]:
        """One request and its reply.

        Raises:
            BackendError: the build says that it failed.
            BackendCrashError: its process ended.
            BackendTimeoutError: it did not answer in time.
            UsageError: its reply lacks a field or has another type; names the field.
        """
        return self._answer(do, {"do": do, **request})

    def close(self) -> None:
        """End the process and all that it started."""
        self._worker.close()

    def _answer(self, doing: str, request: dict[str, JSON] | None = None) -> Mapping[str, JSON]:
        try:
            reply, _ = self._worker.ask(request)
        except WorkerTimeoutError as e:
            raise BackendTimeoutError(f"{self.venv}: {doing}: {e}") from None
        except WorkerDiedError as e:
            raise BackendCrashError(f"{self.venv}: {doing}: {e}") from None
        for name, (what, ok) in REPLIES.get("missing" if "missing" in reply else doing, {}).items():
            expect(ok(reply.get(name)), f"{self.venv}: {doing}: {name}", what, reply.get(name))
        return reply


class Pair:
    """Base and head, to be measured in turns; errors as of `Build`."""

    def __init__(self, base: Path, head: Path, level: Level) -> None:
        self.builds = {BASE: Build(base)}
        with ExitStack() as stack:
            stack.callback(self.close)
            self.builds[HEAD] = Build(head)
            stack.pop_all()
        self.level = level
        self.seconds: dict[tuple[Unit, Spec], dict[str, list[float]]] = {}
        """Of a unit on a backend: base's and head's seconds, one per round."""

    def decide(self, unit: Unit, backend: Spec, limit: float, budget: float) -> Decision:
        """Whether head's time is at most `limit` times base's; arguments as in `statistics.decide`.

        Raises:
            UncomparableError: a build lacks the unit or does not pass its case, or the cases differ.
            BackendError: a measurement failed.
        """
        request = {"level": self.level, "unit": unit.name, "backend": str(backend)}
        try:
            for side, answer in [(side, build.ask("open", **request)) for side, build in self.builds.items()]:
                _check(side, answer, unit)
            rounds = Rounds(
                [Subject(side, partial(_seconds, build), partial(_renew, build)) for side, build in self.builds.items()]
            )
            decision = decide(rounds, HEAD, BASE, limit, budget)
        finally:
            for build in self.builds.values():
                with suppress(BackendError):  # it ended, and an earlier request said so
                    build.ask("close")
        self.seconds[unit, backend] = {side: list(s) for side, s in rounds.seconds.items()}
        return decision

    def close(self) -> None:
        """End both."""
        for build in self.builds.values():
            build.close()


def _check(side: str, answer: Mapping[str, JSON], unit: Unit) -> None:
    if "missing" in answer:
        raise UncomparableError(f"{side} has {answer['missing']}")
    if answer["case"] != unit.case_id:
        raise UncomparableError(
            f"{side} measures {answer['case']} under the name {unit.name}, and here it is {unit.case_id}"
        )
    if answer["verdict"] != Verdict.PASS.value:
        failed = Verdict(answer["verdict"]) in FAILURES
        raise UncomparableError(f"{side}: {answer['verdict']} {unit.case_id}: {answer['detail']}", broke=failed)


def _seconds(build: Build) -> float:
    return float(build.ask("run")["seconds"])


def _renew(build: Build) -> None:
    build.ask("renew")
