"""Content of everything that decides a result, as digests.

A name such as `lib=build` says nothing of what it names: the library may be another one the next time. A result of an
earlier start is reused only if all of these digests are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import Distribution, entry_points
from importlib.util import find_spec
from pathlib import Path

from conformance import shipped
from conformance.backend.registry import GROUP, Spec, build_of, environment, isa_of, resolve, third_party, uses_builds
from conformance.builds.archive import digest
from conformance.builds.source import contents, locate
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.ggml.lib.files import WHEEL
from conformance.run.live import LIVE
from conformance.suite import FAMILIES

from .environment import environment as machine


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests (SHA-256, hex) of what a run tests through one backend."""

    suite: str
    """The suite's code, data and golden outputs, families of others, and versions of packages."""
    adapter: str
    """The third-party distribution of the adapter, its version and files; empty for ours."""
    library: str
    """Libraries of the builds that its options name, or of the wheel; empty without ggml."""
    options: str
    """Options, environment and emulated processor, with names of the settings resolved."""
    waivers: str
    """The known failures of this backend."""

    def differences(self, other: dict[str, JSON]) -> list[str]:
        """Return the names of the digests that differ from those of an earlier `to_json`."""
        return [name for name, value in asdict(self).items() if other.get(name) != value]

    def to_json(self) -> dict[str, JSON]:
        """Encode as name -> digest."""
        return asdict(self)


def identity(spec: Spec, waivers: object = ()) -> Identity:
    """Return the identity of a backend; a build that cannot be read has none.

    `waivers`: its known failures, whose `repr` has their content.
    """
    library = ""
    with suppress(ConformanceError):
        library = build_of(spec) or (contents(locate(WHEEL)) if uses_builds(spec) else "")
    whole = resolve(spec)
    options = [str(whole), sorted(environment(spec).items(), key=str), isa_of(spec)]
    own = adapter(whole.name) if third_party(spec) else ""
    return Identity(suite(), own, library, _digest(options), _digest([repr(waivers)]))


@cache
def suite() -> str:
    """Return the digest of this package, its golden outputs and versions of packages.

    Families of other distributions count, whether or not a run uses them.
    """
    package = shipped.path()
    folders = (package, package.parent / "backends", shipped.golden())
    others = (part for parts in (FAMILIES, LIVE) for n in parts.others() for part in _provided(parts.group, n))
    return _digest([machine()["packages"], *(_tree(f) for f in folders), *others])


@cache
def adapter(name: str) -> str:
    """Return the digest of the distribution that provides an adapter: name, version and files."""
    return _digest(_provided(GROUP, name))


def _provided(group: str, name: str) -> list[JSON]:
    """Return name, version and files of the distribution that provides an entry point.

    An editable installation lists no files: those of its top-level package count in any case.
    """
    found: list[JSON] = []
    for entry in entry_points(group=group, name=name):
        dist = entry.dist
        found += [entry.value, *([] if dist is None else [dist.name, dist.version, *map(_content, _installed(dist))])]
        top = find_spec(entry.module.partition(".")[0])
        places = () if top is None else top.submodule_search_locations or ()
        found += [_tree(Path(p)) for p in places]
        if top is not None and top.origin and not places:
            found.append(_content(Path(top.origin)))
    return found


def _installed(dist: Distribution) -> Sequence[Path]:
    return [Path(str(dist.locate_file(f))) for f in sorted(dist.files or (), key=str) if _counts(Path(str(f)))]


def _tree(folder: Path) -> JSON:
    return [[str(p.relative_to(folder)), _content(p)] for p in sorted(_files(folder))]


def _files(folder: Path) -> Iterable[Path]:
    return (p for p in folder.rglob("*") if _counts(p) and p.is_file())


def _counts(path: Path) -> bool:
    return "__pycache__" not in path.parts and path.suffix not in {".pyc", ".pyo"}


def _content(path: Path) -> str:
    try:
        return digest(path)
    except UnavailableError:  # an unreadable file cannot change a result
        return ""


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()
