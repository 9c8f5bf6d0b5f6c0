"""What a device of several is good for: the same work with it and without it, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import Literal

from conformance.backend.interface import Backend, Session
from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.compare import compare
from conformance.perf.measure import Rounds, Subject, Values, restore
from conformance.perf.statistics import FINE, REGRESSED, Interval, decide
from conformance.run.scheduler.assign import labels, read_devices
from conformance.run.scheduler.backend import NAME as SCHED

from .phase import check, timed

SAME = 1.05
"""A ratio of times up to this, either way, is no change."""
WITH, WITHOUT = "with", "without"
Answer = Literal["nothing changes", "faster without it", "slower without it", "undecided", "needed"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What became of one phase where a device was left out."""

    device: str
    name: str
    """Of the phase: `pp512`."""
    answer: Answer
    share: float | None = None
    """Of the computing time that the device took while it was there; None if nobody tells."""
    ratio: Interval | None = None
    """Time without it / time with it."""
    nmse: float = 0.0
    """Of all outputs without it, against those with it; 0 where they are equal to the bit."""
    reason: str = ""
    """Why it is needed."""


def left_out(spec: Spec) -> dict[str, Spec]:
    """Each device of `spec` that can be left out -> the backend without it.

    UsageError unless devices share graphs there: `sched?devices=a,b,cpu`, or a ggml device with `mode=sched` before
    the CPU.
    """
    whole = resolve(spec)
    options = dict(whole.options)
    if whole.name == SCHED and "devices" in options:
        parts = options["devices"].split(",")
        names = labels(read_devices(options["devices"]))
        return {
            name: _with(spec, devices=",".join(p for j, p in enumerate(parts) if j != i))
            for i, name in enumerate(names[:-1])
        }
    if options.get("mode") == SCHED and options.get("device", "CPU") != "CPU":
        return {options["device"]: _with(spec, device="CPU")}
    raise UsageError(f"{spec}: devices that share graphs expected: sched?devices=…, or a ggml device with mode=sched")


def _with(spec: Spec, **changes: str) -> Spec:
    return Spec(spec.name, tuple({**dict(spec.options), **changes}.items()))


def differences(
    whole: Backend, less: Backend, device: str, case: Case, name: str, budget: float, same: float = SAME
) -> Difference:
    """Time `case` on both in turns for `budget` seconds, or until it is clear; compare what they give.

    Raises:
        UnavailableError: `whole` refuses the case.
        BackendError: one of them failed.
    """
    check(whole, case)
    try:
        check(less, case)
    except UnavailableError as e:
        return Difference(device, name, "needed", reason=str(e))
    with ExitStack() as stack:
        sessions = {k: stack.enter_context(b.open(case)) for k, b in ((WITH, whole), (WITHOUT, less))}
        values: dict[str, Values] = {}
        rounds = Rounds([Subject(k, _timer(s, case, k, values)) for k, s in sessions.items()])
        slower = decide(rounds, WITHOUT, WITH, same, budget)
        faster = decide(rounds, WITH, WITHOUT, same, budget)
        share = _share(sessions[WITH].witness().seconds, device)
    answers = {slower.answer, faster.answer}
    answer: Answer = (
        "slower without it" if slower.answer == REGRESSED
        else "faster without it" if faster.answer == REGRESSED
        else "nothing changes" if answers == {FINE}
        else "undecided"
    )  # fmt: skip
    return Difference(device, name, answer, share, slower.interval, _nmse(values[WITHOUT], values[WITH], case))


def _timer(session: Session, case: Case, name: str, values: dict[str, Values]) -> Callable[[], float]:
    def run() -> float:
        restore(session, case)
        seconds, values[name] = timed(session, case)
        return seconds

    return run


def _share(seconds: Mapping[str, float], device: str) -> float | None:
    total = sum(seconds.values())
    return seconds.get(device, 0.0) / total if total else None


def _nmse(actual: Values, expected: Values, case: Case) -> float:
    """The largest NMSE of any output; inf where a NaN or an infinity is only in one."""
    apart = [
        compare(t, theirs[t], ours[t])
        for step, ours, theirs in zip(case.steps, actual, expected, strict=True)
        for t in step.outputs
    ]
    return max((inf if d.special else d.nmse for d in apart), default=0.0)
