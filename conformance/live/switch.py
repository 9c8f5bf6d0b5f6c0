"""The family `switch`: with an environment variable a backend is right, as any run is; compared with it without one.

An id is `switch/NAME=VALUE/CASE`, where a `/` of VALUE is written `%2F`. The run with the variable is judged as any
other; `metrics` compare it with the run without. A library reads its environment once, so each side has processes of
its own.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from urllib.parse import quote, unquote

from conformance.backend.registry import Named, Spec, define, defined, environment, resolve
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.execute import execute
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, is_live, without_steps
from conformance.run.relate import held_against
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite.relations import claim

NAME = "switch"
COMPARED, EQUAL, NMSE, STREAMS = "compared", "equal", "nmse_without", "streams"
"""Metrics: 1 where both sides gave values; 1 where these are equal to the bit; the largest NMSE of any value, with that
of the run without the variable as expected, if it is finite; 1 where some node has `ne[3]` over 1, as attention over
several streams.
"""
_NO_VALUES = frozenset({Verdict.UNSUPPORTED, Verdict.OVERCLAIM, Verdict.CRASH, Verdict.TIMEOUT})


def id_of(setting: str, case_id: str) -> str:
    """The id that compares a case with and without `NAME=VALUE`; UsageError for another form of `setting`."""
    name, value = _setting(setting)
    return f"{NAME}/{name}={quote(value, safe='')}/{case_id}"


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise UsageError(f"switch {text!r}: NAME=VALUE expected, such as GGML_OPENVINO_MANUAL_GQA_ATTN=1")
    return name, value


def _parts(case_id: str) -> tuple[str, str]:
    """`NAME=VALUE`, and the id of the case."""
    setting, slash, inner = case_id.removeprefix(f"{NAME}/").partition("/")
    if not slash:
        raise UsageError(f"case {case_id!r}: {NAME}/NAME=VALUE/CASE expected")
    return "=".join(_setting(unquote(setting))), inner


def _build(case_id: str) -> Case:
    build(_parts(case_id)[1])
    return without_steps(case_id)


def sides(spec: Spec, switch: str) -> tuple[Spec, Spec]:
    """`spec` without and with `NAME=VALUE`, as names of their own; UsageError for another form of `switch`."""
    name, value = _setting(switch)
    whole, variables = resolve(spec), dict(environment(spec))
    names = dict(defined())
    made = []
    for label, setting in ((f"{spec.name} without {name}", None), (f"{spec.name} with {switch}", value)):
        made.append(Spec(label))
        names[label] = Named(whole.name, whole.options, tuple({**variables, name: setting}.items()), "--switch")
    define(names)
    return made[0], made[1]


class Sides:
    """One backend with and without environment variables."""

    def __init__(self, spec: Spec, isolation: Isolation, save: Path | None) -> None:
        self._spec = spec
        self._runner = Runner(isolation=isolation, save_failures=save)

    def play(self, case_id: str) -> Result:
        """The result of one case with its variable; UsageError as `id_of`."""
        setting, inner = _parts(case_id)
        case = self._runner.case(inner)
        off, on = sides(self._spec, setting)
        result, without = self._once(on, case), self._once(off, case)
        metrics = {**result.metrics, STREAMS: float(any(n.ne[3] > 1 for s in case.steps for n in s.graph))}
        if is_live(inner) and None not in (result.nmse, without.nmse):
            metrics |= {COMPARED: 1.0, EQUAL: float(result.nmse == without.nmse)}
        elif (
            not is_live(inner) and not claim.applies(case) and {result.verdict, without.verdict}.isdisjoint(_NO_VALUES)
        ):
            metrics |= self._compared(off, on, case)
        note = f"without it {without.verdict}: {without.detail}" if without.verdict in FAILURES else ""
        return replace(result, metrics=metrics).noted(note)

    def close(self) -> None:
        """Close both sides."""
        self._runner.close()

    def _once(self, spec: Spec, case: Case) -> Result:
        """A run; where the process dies a new one has another try: an earlier case may have damaged its memory."""
        with self._runner.looking(locates=True, tells_kept=False):
            (result,) = self._runner.run(spec, [case])
            if result.verdict is Verdict.CRASH:
                self._runner.renew()
                (result,) = self._runner.run(spec, [case])
        return result

    def _compared(self, off: Spec, on: Spec, case: Case) -> dict[str, float]:
        without, with_ = self._runner.backend(off), self._runner.backend(on)
        try:
            before, after = execute(without, case), execute(with_, case)
        except ConformanceError:
            return {}
        apart = [j.difference for j in held_against(case, without.arithmetic_in(case), before, after)]
        nmse = max((inf if d.special else d.nmse for d in apart), default=0.0)
        found = {COMPARED: 1.0, EQUAL: float(not any(d.raw for d in apart))}
        return {**found, NMSE: nmse} if isfinite(nmse) else found


FAMILY = LiveFamily(
    NAME,
    "cases with an environment variable of a library, compared with the same without it",
    lambda _: (),
    _build,
    seeded=False,
    player=Sides,
)
