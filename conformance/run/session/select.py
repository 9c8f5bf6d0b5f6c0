"""Select cases and backends of a run: families, globs, levels, specs, seeds, stages.

Shared by pytest and the command line.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from pathlib import Path

from conformance.backend import registry
from conformance.backend.interface import Backend, BufferType, DeviceInfo
from conformance.backend.registry import Spec, resolve
from conformance.case.case import JSON, Case
from conformance.case.streams import Stream
from conformance.ggml.errors import (
    CaseFileError,
    ConformanceError,
    GraphError,
    UnavailableError,
    UsageError,
    nearest,
    unknown,
)
from conformance.ggml.text import placed
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Workers, open_backend
from conformance.run.live import LIVE, LiveFamily, family_names, family_or_none
from conformance.run.scheduler.backend import devices_of
from conformance.suite import FAMILIES, by_default
from conformance.suite.family import LEVELS, Family, Level
from conformance.suite.ops import NAME as OPS

_HEAD_ENDS = re.compile(r"[-@*?\[(]")
"""Signs that end family and head of an id or a glob."""
FEW = 100
"""Maximum number of ops for which building them is faster than listing all."""


def family_named(name: str) -> Family:
    """Return the family called `name`; UsageError if it is unknown."""
    if (family := family_or_none(name)) is None:
        raise unknown("family", name, family_names())
    return family


def build(case_id: str) -> Case:
    """Build the case of an id, and check it as far as a `Builder` did not.

    Raises:
        UsageError: the id is unknown, or its family cannot build it or builds an invalid case.
        UnavailableError: this machine lacks what its family needs.
        CaseFileError: the family's file is damaged.
    """
    family = family_named(case_id.partition("/")[0])
    try:
        case = family.build(case_id)
    except (UsageError, UnavailableError, CaseFileError):
        raise
    except Exception as e:  # a mistake in a family is not the backend's
        why = str(e) if isinstance(e, ConformanceError) else placed(e)
        raise UsageError(f"family {family.name!r} cannot build {case_id}: {why}") from e
    try:
        case.validate(graphs=False)
    except GraphError as e:
        raise UsageError(f"family {family.name!r} builds an invalid case {case_id}: {e}") from e
    return case


def listed(family: Family, level: Level) -> Sequence[str]:
    """Return the ids of a family at `level`; UsageError if one is not an id of the family."""
    ids = family.ids(level)
    if wrong := next((i for i in ids if not i.startswith(f"{family.name}/")), None):
        expected = f"{family.name}/PARAMS@SEED expected (with_seed)"
        raise UsageError(f"family {family.name!r} lists the id {wrong!r}; {expected}")
    return ids


def case_ids(families: Sequence[str], globs: Sequence[str], level: Level) -> list[str]:
    """Return ids of families at `level` that match any of `globs` (all without globs).

    Those of lower levels come first. A complete id is included even if no level lists it, and so are ids that a live
    family derives from a glob. Without named families, those that this installation lacks are skipped (see `lacking`),
    and so are live families and those of other distributions that no glob begins with.

    Raises:
        UsageError: a family is unknown, or a glob matches nothing.
        UnavailableError: this installation lacks a family that is named.
    """
    named = [family_named(n) for n in families]
    for f in named:
        if why := f.lacks():
            raise UnavailableError(f"{f.name}: {why}")
    if 0 < len(globs) <= FEW and all(map(_is_op, globs)):
        return [build(g).id for g in dict.fromkeys(globs)]
    chosen = named or by_default(lambda n: not globs or any(_may_match(g, n) for g in globs))
    if globs:
        begun = [] if families else _begun(globs)
        chosen = [f for f in (*chosen, *begun) if any(_may_match(g, f.name) for g in globs)]
    levels = LEVELS[: LEVELS.index(level) + 1]
    ids = list(dict.fromkeys(i for each in levels for f in chosen for i in listed(f, each)))
    if not globs:
        return ids
    place = {i: k for k, i in enumerate(ids)}
    found: set[str] = set()
    unlisted: list[str] = []
    for g in globs:
        matches = re.compile(translate(g)).match
        own = [g] if g in place else list(filter(matches, ids))
        found.update(own)
        if own:
            continue
        if more := [i for f in chosen if isinstance(f, LiveFamily) for i in f.unlisted(g) if matches(i)]:
            build(more[0])
            unlisted += more
            continue
        name = f"{g}@0" if g.startswith("tbo/") and g.endswith(")") else g  # copied from output of test-backend-ops
        if "@" not in name or set("*?") & set(name):
            n = sum(bool(matches(i)) for f in chosen for i in listed(f, LEVELS[-1]))
            known = f" --level full has {n:,}" if n else f"{_near(g)} conform list cases --level full lists them all"
            raise UsageError(f"no case of level {level} matches {g!r};{known}")
        build(name)
        unlisted.append(name)
    return list(dict.fromkeys([*sorted(found, key=place.__getitem__), *unlisted]))


def _begun(globs: Sequence[str]) -> list[Family]:
    """Return the families that do not run by default and with which a glob begins."""
    named = {g.partition("/")[0] for g in globs if "/" in g}
    return [family_named(n) for n in dict.fromkeys((*FAMILIES.others(), *LIVE)) if n in named]


def _near(glob: str) -> str:
    """Return the hint for a glob whose head no id of smoke has; empty if none is like it."""
    heads = dict.fromkeys(_HEAD_ENDS.split(i, 1)[0] for f in by_default() for i in listed(f, LEVELS[0]))
    head = _HEAD_ENDS.split(glob, 1)[0]
    return "" if any(h.startswith(head) for h in heads) else nearest(head, heads)


def _is_op(glob: str) -> bool:
    return glob.startswith(f"{OPS}/") and "@" in glob and not set("*?[") & set(glob)


def _may_match(glob: str, family: str) -> bool:
    """Return True if ids of the family may match `glob` before its first wildcard.

    Listing all ids takes longer than a small run.
    """
    spelt, name = re.split(r"[*?[]", glob, maxsplit=1)[0], f"{family}/"
    return spelt.startswith(name) or name.startswith(spelt)


def record_of(
    levels: Mapping[Spec, Level],
    families: Sequence[str],
    globs: Sequence[str],
    seed: int | None,
    *,
    files: Sequence[str] = (),
    shard: str = "1/1",
) -> dict[str, JSON]:
    """Return the selection for the document of a run."""
    return {
        "levels": {str(spec): n for spec, n in levels.items()},
        "families": list(families),
        "cases": list(globs),
        "seed": seed,
        "files": list(files),
        "shard": shard,
    }


def lacking(families: Sequence[str]) -> dict[str, str]:
    """Return selected families that this installation lacks -> the reason."""
    chosen = [n for n in FAMILIES if n in families] if families else FAMILIES.ours()
    return {n: why for n in chosen if (why := FAMILIES[n].lacks())}


def parse_specs(texts: Sequence[str]) -> list[Spec]:
    """Parse the user's backends, each once, or the default ones.

    UsageError if one, or a device of a scheduler, is malformed or not installed.
    """
    specs = list(dict.fromkeys(map(Spec.parse, texts))) or [Spec(n) for n in registry.defaults()]
    for name in (part.name for s in specs for part in devices_of(s)):
        if not registry.is_provided(name):
            registry.entry_of(name)
    return specs


@dataclass(frozen=True, slots=True)
class Probe:
    """The description of an opened backend."""

    info: DeviceInfo
    buffer_types: Sequence[BufferType]
    stages: tuple[str, ...]


def probe(spec: Spec, workers: Workers | None = None) -> Probe:
    """Open `spec` as a run would, and read its description; the process then waits in `workers`.

    UsageError for an unknown name or option; UnavailableError if this machine lacks it or the adapter is broken.
    """
    try:
        with closing(open_backend(spec, workers)) as backend:
            return Probe(backend.info(), backend.buffer_types(), backend.stages)
    except UnavailableError:
        raise
    except UsageError as e:
        if spec.options or resolve(spec) != spec or spec.name not in registry.names():
            raise
        raise UnavailableError(f"could not be started: {e}") from e  # the user gave no option that could be wrong
    except ConformanceError as e:
        raise UnavailableError(f"could not be started: {e}") from e


def probes(specs: Sequence[Spec], workers: Workers | None = None) -> dict[Spec, Probe | UnavailableError]:
    """Return spec -> `probe`, or why this machine lacks it; the backends open at the same time.

    UsageError as `probe`.
    """
    found: dict[Spec, Probe | UnavailableError] = {}
    here = workers or Workers()
    try:
        here.start(specs)
        for spec in specs:
            try:
                found[spec] = probe(spec, here)
            except UnavailableError as e:
                found[spec] = e
    finally:
        if workers is None:
            here.close()
    return found


def available(specs: Sequence[Spec], workers: Workers | None = None) -> tuple[list[Spec], dict[Spec, UnavailableError]]:
    """Return the backends that this machine has, and why it lacks the others; raises as `probe`."""
    have: list[Spec] = []
    lack: dict[Spec, UnavailableError] = {}
    for spec, about in probes(specs, workers).items():
        if isinstance(about, Probe):
            have.append(spec)
        else:
            lack[spec] = about
    return have, lack


LARGEST = 10**9
"""Upper limit of fresh seeds, exclusive."""
FOLDER = "failures"
"""Default folder of failing fresh cases."""


def new_seed() -> int:
    """Return an unpredictable seed."""
    return secrets.randbelow(LARGEST)


def reseeded(case_id: str, seed: int | None) -> str:
    """Return the id with `seed`; unchanged for None, or if the family does not use seeds."""
    body, at, own = case_id.rpartition("@")
    if seed is None or not at or not re.fullmatch(r"[0-9]+", own, re.ASCII):
        return case_id
    family = family_or_none(case_id.partition("/")[0])
    return case_id if family is None or not family.seeded else f"{body}@{seed}"


def fresh_ids(families: Sequence[str], globs: Sequence[str], level: Level, n: int, seed: int) -> list[str]:
    """Return `n` new ids: ids of each family at `level` in turn, with random seeds.

    Without `families` all that use seeds are included; `globs` match ids apart from seeds. The same `seed` gives the
    same ids. UsageError if a family is unknown, or nothing matches.
    """
    if n < 1:
        return []
    chosen = [f for f in (map(family_named, families) if families else by_default()) if f.seeded and not f.lacks()]
    offered = [[i for i in listed(f, level) if not globs or any(fnmatchcase(i, g) for g in globs)] for f in chosen]
    offered = [ids for ids in offered if ids]
    if not offered:
        raise UsageError("--fresh: none of the chosen cases has a seed")
    stream = Stream("fresh", str(seed))
    found: dict[str, None] = {}
    while len(found) < n:
        ids = offered[len(found) % len(offered)]
        at, own = int(stream.integers(1, 0, len(ids))[0]), int(stream.integers(1, 0, LARGEST)[0])
        found[reseeded(ids[at], own)] = None
    return list(found)


# -- stages: a translating backend may return values before anything is compiled, by the option `stage=translate` -----

OPTION = "stage"
RUN = "run"
TRANSLATE = "translate"

BLAMED: dict[Verdict, str] = {
    Verdict.FAIL: "a kernel or fusion is at fault",
    **dict.fromkeys((Verdict.OVERCLAIM, Verdict.CRASH, Verdict.TIMEOUT), "the compiler or the device is at fault"),
}
"""Verdict of a run -> the cause if its translation is right."""


def stage_of(spec: Spec) -> str:
    """Return the stage of `spec`."""
    return dict(registry.resolve(spec).options).get(OPTION, RUN)


def staged(spec: Spec, stage: str) -> Spec:
    """Return the same backend at another stage."""
    plain = Spec(spec.name, tuple((k, v) for k, v in spec.options if k != OPTION))
    return plain if stage_of(plain) == stage else Spec(spec.name, (*plain.options, (OPTION, stage)))


def translation_of(spec: Spec, backend: Backend, verdict: Verdict) -> Spec | None:
    """Return the backend that runs only the translation; None if not applicable."""
    if verdict not in BLAMED or stage_of(spec) != RUN or TRANSLATE not in backend.stages:
        return None
    return staged(spec, TRANSLATE)


def stage_hint(verdict: Verdict, translation: Result) -> str:
    """Describe which half of a run is wrong, from its verdict and the result of its translation."""
    if translation.verdict is Verdict.PASS:
        return f"the translation is right, so {BLAMED[verdict]}"
    if translation.verdict is Verdict.FAIL:
        return "the translation itself is wrong"
    if translation.verdict in BLAMED:
        return f"the translation itself fails: {translation.detail}"
    return f"the translation cannot be checked by itself: {translation.detail}"


def case_name(case: Case | str) -> str:
    """Return the id of a case; an id is returned unchanged."""
    return case if isinstance(case, str) else case.id


def expect_backend(option: str, text: str) -> None:
    """Raise UsageError if `text`, which is no existing file, names no backend either."""
    name = Path(text.partition("?")[0])
    if name.suffix or len(name.parts) > 1:
        expected = "a run's record (--json), or a backend such as 'ggml?lib=build', expected"
        raise UsageError(f"{option} {text}: no such file or folder; {expected}")
    try:
        parse_specs([text])
    except UsageError as e:
        absent = "" if Path(text).exists() else "no such file or folder, and "
        raise UsageError(f"{option} {text}: {absent}{e}") from None


def choose(
    texts: Sequence[str], stage: str | None, workers: Workers | None = None
) -> tuple[list[Spec], dict[Spec, UnavailableError]]:
    """Return the backends of a run that this machine has, and why it lacks the others.

    `texts` empty means the default ones; `stage` applies to all, None keeps each one's own. UsageError for an unknown
    name, option or stage, or if a named backend lacks the stage.
    """
    specs = parse_specs(texts)
    if stage is None:
        return available(specs, workers)
    able: list[Spec] = []
    lack: dict[Spec, UnavailableError] = {}
    known: dict[str, None] = {}
    for spec in specs:
        try:
            have = probe(spec, workers).stages
        except UnavailableError as e:
            lack[spec] = e
            continue
        known.update(dict.fromkeys(have))
        if stage in have:
            able.append(staged(spec, stage))
        elif texts:
            raise UsageError(f"--stage {stage}: {spec} does not have it; its stages: {', '.join(have)}")
        else:
            lack[spec] = UnavailableError(f"has no stage {stage}")
    if not able and stage not in known and known:
        raise UsageError(f"--stage {stage}: no backend has it; stages: {', '.join(known)}")
    here, absent = available(able, workers)
    return here, {**lack, **absent}
