"""`conform run --changed`: only the cases that reach code which differs between two builds."""

from __future__ import annotations

from dataclasses import replace

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.builds.changes import changes, sentences
from conformance.builds.difference import difference
from conformance.builds.reach import code_of, impact
from conformance.builds.source import is_build, locate
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.files import find
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import counted
from conformance.run.session.spread import one_each, small_first, subject
from conformance.suite import ops
from conformance.testrun import Chosen

from .output import leave, line

LIB = "lib"
"""Option of an adapter that names a build."""


def against_build(chosen: Chosen) -> Chosen:
    """Return the selection with the backend of the build that --against names, if it names one.

    UsageError unless one backend is named that can take a build. None is opened yet.
    """
    if chosen.against is None or not is_build(chosen.against):
        return chosen
    spec = _only(chosen, f"--against {chosen.against}")
    options = {**dict(spec.options), LIB: chosen.against}
    return replace(chosen, against=str(Spec(spec.name, tuple(options.items()))))


def _only(chosen: Chosen, option: str) -> Spec:
    specs = chosen.asked
    if len(specs) != 1 or not registry.uses_builds(specs[0]):
        raise UsageError(f"{option}: one backend expected that takes a build, such as --backend 'ggml?lib=build'")
    return specs[0]


def only_changed(chosen: Chosen) -> Chosen:
    """Return the selection of the cases that reach changed code, and say what is left out.

    The level is `standard` unless one is chosen. If nothing differs, or no case reaches what does, the command ends.
    If a compiler changed everything, all cases are kept.
    """
    spec = _only(chosen, "--changed")
    base = chosen.base
    if base is None:
        raise UsageError("--changed: a build to compare with expected, as --against build.old")
    if why := chosen.lacking.get(str(spec)):  # no case is planned for it
        raise why
    chosen = replace(chosen, level=chosen.level or "standard")
    builds = [dict(registry.resolve(s).options) for s in (spec, base)]
    new, old = (locate(options.get(LIB, "")) if options.get(LIB) else find() for options in builds)
    found = difference(new, old)
    if found.is_empty:
        line("no function, shader or kernel differs: nothing to run")
        leave(Outcome())
    ids = [c for c in chosen.cases_of(spec) if isinstance(c, str)]
    code, setup = code_of(found, builds[0])
    order = small_first(ids)
    of = impact(code, order, setup)
    for text in sentences(changes(found, [of])):
        line(text)
    if found.rebuilt:
        return chosen
    first = of.first()
    each = one_each(order, first, _group) if of.shared else []
    if not (first or each):
        leave(Outcome.of(Why.UNEXECUTED, ["no case reaches what changed"]))
    left = len(ids) - len(first) - len(each)
    texts = [f"{counted(len(first), 'case')} that {'reaches' if len(first) == 1 else 'reach'} changed code"]
    texts += [f"{counted(len(each), 'case')}, one of each other op and family"] if each else []
    line(f"level {chosen.level}: {' and '.join(texts)}; left out: {left:,} of {len(ids):,}, and all live families")
    wanted = [*first, *each]
    return replace(chosen, only={str(spec): wanted})


def _group(case_id: str) -> str:
    """Return the op of a case of `ops`, else its family."""
    family, _, _ = case_id.partition("/")
    return subject(case_id) if family == ops.NAME else family
