"""Stages: points in a backend at which it can return values, so that a failure says where it began.

A translating backend may return the values of its translation, before anything is compiled (`translate`), beside those
of the compiled program (`run`). A stage is an option of the backend, `name?stage=translate`, so a result, a saved
failure and `conform repro` name it as any other option.
"""

from __future__ import annotations

from collections.abc import Sequence

from conformance.backend import registry
from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.verdict import Result, Verdict

from .isolation.isolate import Isolation
from .session.select import available, parse_specs, probe

OPTION = "stage"
RUN = "run"
TRANSLATE = "translate"

BLAMED: dict[Verdict, str] = {
    Verdict.FAIL: "a kernel or fusion is at fault",
    Verdict.OVERCLAIM: "the compiler or the device is at fault",
    Verdict.CRASH: "the compiler or the device is at fault",
    Verdict.TIMEOUT: "the compiler or the device is at fault",
}
"""Verdict of a run -> what is to blame where its translation is right."""


def stage_of(spec: Spec) -> str:
    """The stage that `spec` names."""
    return dict(registry.resolve(spec).options).get(OPTION, RUN)


def staged(spec: Spec, stage: str) -> Spec:
    """The same backend at another stage."""
    plain = Spec(spec.name, tuple((k, v) for k, v in spec.options if k != OPTION))
    return plain if stage_of(plain) == stage else Spec(spec.name, (*plain.options, (OPTION, stage)))


def translation_of(spec: Spec, backend: Backend, verdict: Verdict) -> Spec | None:
    """The backend that tells a wrong translation from a wrong kernel; None where none is needed or there is none."""
    if verdict not in BLAMED or stage_of(spec) != RUN or TRANSLATE not in backend.stages:
        return None
    return staged(spec, TRANSLATE)


def stage_hint(verdict: Verdict, translation: Result) -> str:
    """Which half is at fault in a run that ended in `verdict`, by the result of its translation."""
    if translation.verdict is Verdict.PASS:
        return f"the translation is right, so {BLAMED[verdict]}"
    if translation.verdict is Verdict.FAIL:
        return "the translation itself is wrong"
    if translation.verdict in BLAMED:
        return f"the translation itself fails: {translation.detail}"
    return f"the translation cannot be checked by itself: {translation.detail}"


def choose(
    texts: Sequence[str], stage: str | None, isolation: Isolation | None = None
) -> tuple[list[Spec], dict[Spec, str]]:
    """The backends of a run that this machine has, and why it lacks the others.

    Args:
        texts: as the user named them; all installed ones where none is named.
        stage: for all of them; None leaves each at the stage it names.
        isolation: of the run: they are opened in the kind of process in which they will run.

    Raises:
        UsageError: an unknown name, option or stage, or a named backend that does not have the stage.
    """
    specs = parse_specs(texts)
    if stage is None:
        return available(specs, isolation)
    able: list[Spec] = []
    lack: dict[Spec, str] = {}
    known: dict[str, None] = {}
    for spec in specs:
        try:
            have = probe(spec, isolation).stages
        except UnavailableError as e:
            lack[spec] = str(e)
            continue
        known.update(dict.fromkeys(have))
        if stage in have:
            able.append(staged(spec, stage))
        elif texts:
            raise UsageError(f"--stage {stage}: {spec} does not have it; its stages: {', '.join(have)}")
        else:
            lack[spec] = f"has no stage {stage}"
    if not able and stage not in known and known:
        raise UsageError(f"--stage {stage}: no backend has it; stages: {', '.join(known)}")
    here, absent = available(able, isolation)
    return here, {**lack, **absent}
