"""`conform doctor`: checks what is installed, and what each backend loads from where."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import click
import psutil
from packaging.requirements import Requirement

from conformance.backend import registry
from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.ggml.errors import BrokenError, ConformanceError, UnavailableError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import counted
from conformance.run.isolation.isolate import Workers, open_backend, pids

from .options import config_option
from .output import leave, line, table

PACKAGE = "ggml-conformance"
LIBRARIES = ("ggml", "llama", "openvino", "xllamacpp", "vulkan", "cuda", "xrt")
"""Prefixes, after `lib`, of libraries that a backend may load."""


@click.command()
@config_option
def doctor() -> None:
    """Check the installation: Python, packages, extras, and what each backend loads from where.

    Exit code 1 if a required package is missing or too old, or a backend is broken; a backend that is not available on
    this machine does not count.
    """
    line(f"Python {platform.python_version()}, {sys.prefix}")
    packages = list(_packages())
    table([row for row, _ in packages], ["package", "version", "needed"])
    extras, missing = _extras()
    line("")
    table(extras, ["extra", "installed"])
    line("")
    with closing(Workers()) as workers:
        workers.start(specs := [Spec(name) for name in (*registry.names(), *registry.defined())])
        backends = [_backend(spec, workers) for spec in specs]
    table([row for row, _ in backends], ["backend", "device", "loads"], maxcolwidths=[None, 60, 80])
    for extra, lacks in missing.items():
        line(f"extra {extra} lacks {', '.join(lacks)}: pip install '{PACKAGE}[{extra}]'")
    broken = [why for _, why in (*packages, *backends) if why]
    leave(Outcome.of(Why.FAILED, [f"{counted(len(broken), 'thing')} broken: {'; '.join(broken)}"] if broken else []))


def _requirements(extra: str) -> list[Requirement]:
    """Return the package's requirements on this machine, for an extra or without one."""
    try:
        texts = distribution(PACKAGE).requires or []
    except PackageNotFoundError:
        return []
    needs = [r for r in map(Requirement, texts) if r.marker is None or r.marker.evaluate({"extra": extra})]
    return [r for r in needs if (r.marker is not None and "extra" in str(r.marker)) is bool(extra)]


def _fault(r: Requirement) -> str:
    """Return why a requirement is not met; empty if it is."""
    try:
        found = version(r.name)
    except PackageNotFoundError:
        return f"{r.name} is not installed: pip install '{r.name}{r.specifier}'"
    if r.specifier.contains(found, prereleases=True):
        return ""
    return f"{r.name} {found} is installed: pip install '{r.name}{r.specifier}'"


def _packages() -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield a row for each required package, and its fault."""
    for r in _requirements(""):
        found = "none"
        with suppress(PackageNotFoundError):
            found = version(r.name)
        yield (r.name, found, str(r.specifier)), _fault(r)


def _extras() -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Return a row for each extra, and extra -> the packages that it lacks."""
    with suppress(PackageNotFoundError):
        names = distribution(PACKAGE).metadata.get_all("Provides-Extra") or []
        missing = {n: [r.name for r in _requirements(n) if _fault(r)] for n in names}
        return [(n, "no" if lacks else "yes") for n, lacks in missing.items()], {n: x for n, x in missing.items() if x}
    return [], {}


def _backend(spec: Spec, workers: Workers) -> tuple[tuple[str, str, str], str]:
    """Return the row of a backend, and the reason if it is broken."""
    try:
        with closing(open_backend(spec, workers)) as backend:
            info = backend.info()
            versions = ", ".join(f"{k} {v}" for k, v in info.versions.items())
            return (str(spec), f"{info.description} ({versions})", ", ".join(_folders(backend))), ""
    except BrokenError as e:
        return (str(spec), f"broken: {e}", ""), f"backend {e}"
    except UnavailableError as e:
        return (str(spec), f"not available: {e}", ""), ""
    except ConformanceError as e:
        return (str(spec), f"broken: {e}", ""), f"backend {spec}: {e}"


def _folders(backend: Backend) -> list[str]:
    """Return the folders of libraries that the processes of a backend have mapped."""
    if sys.platform == "darwin":  # psutil has no maps there
        return []
    found: dict[str, None] = {}
    for pid in pids(backend):
        with suppress(psutil.Error, OSError):  # those of another user are hidden
            for path in (Path(m.path) for m in psutil.Process(pid).memory_maps()):
                if path.name.removeprefix("lib").startswith(LIBRARIES):
                    found[str(path.parent)] = None
    return list(found)
