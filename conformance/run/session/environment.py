"""Describe where a run took place: versions, kind of machine, commit, branch and CI page.

It has no names of people or hosts. Git is not started, because it would run programs named in an untrusted
`.git/config`, such as a file system monitor. Its files are read instead, with a size limit; unclear content is ignored.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from conformance.case.case import JSON
from conformance.judge.evidence import Count

SCHEMA = 1
"""Version of the run documents."""
MAX_BYTES = 256 << 20
"""Maximum size of a run document; 20,000 results with their witnesses take a tenth of it."""
MAX_MEMORY = 4 << 30
"""Maximum bytes of memory for reading one."""
WRITTEN = "%Y-%m-%dT%H:%M:%SZ"
Time = Annotated[str, Meta(pattern=r"^[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z$")]


class Environment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Machine and software of a run: `environment` and `source`."""

    machine: str
    system: str | None = None
    cpu: str | None = None
    python: str | None = None
    commit: str | None = None
    branch: str | None = None
    ci: str | None = None
    cores: Count | None = None
    packages: dict[str, JSON] | None = None
    settings: dict[str, JSON] | None = None
    unavailable: dict[str, str] | None = None
    """Backend -> why this machine lacks it."""
    identity: dict[str, dict[str, str]] | None = None
    """Backend -> digests of what it tested (`run.session.identity`)."""


_PACKAGES = ("ggml-conformance", "numpy", "gguf", "openvino", "xllamacpp", "pytest", "hypothesis")


def header(kind: str) -> dict[str, JSON]:
    """Return the first fields of a run document: schema, kind, run, written, environment.

    `run` is a random id of 32 hex digits, which identifies the document after merges; `written` is in UTC.
    """
    written = datetime.now(timezone.utc).strftime(WRITTEN)
    where = {**environment(), **source()}
    return {"schema": SCHEMA, "kind": kind, "run": uuid.uuid4().hex, "written": written, "environment": where}


def environment() -> dict[str, JSON]:
    """Return the versions of Python and relevant packages, the system, processor and cores.

    `machine` is a short hash of the last three, equal for machines of one kind.
    """
    system, cpu, cores = f"{platform.system()} {platform.machine()}", _cpu_model(), os.cpu_count()
    return {
        "machine": hashlib.sha256(f"{system}\n{cpu}\n{cores}".encode()).hexdigest()[:12],
        "python": platform.python_version(),
        "system": system,
        "cpu": cpu,
        "cores": cores,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


MOST = 8 << 20
"""Maximum bytes of one of git's files; a larger one is not read."""

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", re.ASCII)
_REF = re.compile(r"refs/(?!.*\.\.)[!-~][ -~]{0,250}", re.ASCII)
_LINK = re.compile(r"https://[A-Za-z0-9][A-Za-z0-9.-]{0,250}(:[0-9]{1,5})?(/[A-Za-z0-9/._~%+,;=&?#()!$*-]*)?", re.ASCII)
_LONGEST_LINK = 1000
_LINKS = (
    "CI_JOB_URL", "BUILD_URL", "CIRCLE_BUILD_URL", "BUILDKITE_BUILD_URL", "TRAVIS_JOB_WEB_URL", "DRONE_BUILD_LINK"
)  # fmt: skip
_BRANCHES = (
    "GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BRANCH_NAME", "CIRCLE_BRANCH", "BUILDKITE_BRANCH"
)  # fmt: skip


class _Unknown(Exception):  # noqa: N818  # not an error
    """Git's files do not contain the answer in a known format."""


def source(folder: Path | None = None, variables: Mapping[str, str] | None = None) -> dict[str, JSON]:
    """Return `commit`, `branch` and `ci` from the checkout around `folder` and the environment.

    `branch` is the CI's if the checkout has none. The function never raises: an unreadable checkout is ignored.
    """
    variables = os.environ if variables is None else variables
    found: dict[str, JSON] = {}
    with suppress(_Unknown, OSError, ValueError, RuntimeError):
        found = _checkout(Path.cwd() if folder is None else folder)
    if "branch" not in found and (branch := next((b for k in _BRANCHES if (b := variables.get(k))), "")):
        found["branch"] = _one_line(branch)
    if link := ci_link(variables):
        found["ci"] = link
    return found


def ci_link(variables: Mapping[str, str]) -> str | None:
    """Return the URL of this CI job from the variables of CI systems; None if absent or no URL.

    Only `https` without a user name, because people click it in reports.
    """
    server, project, run = (variables.get(f"GITHUB_{k}", "") for k in ("SERVER_URL", "REPOSITORY", "RUN_ID"))
    links = [f"{server}/{project}/actions/runs/{run}"] if server and project and run else []
    links += [variables[k] for k in _LINKS if variables.get(k)]
    return next((link for link in links if len(link) <= _LONGEST_LINK and _LINK.fullmatch(link)), None)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)[:250]


def _checkout(folder: Path) -> dict[str, JSON]:
    own, common = _places(folder.resolve())
    head = _text(own / "HEAD").strip()
    found: dict[str, JSON] = {}
    if head.startswith("ref:"):
        name = head.removeprefix("ref:").strip()
        if not _REF.fullmatch(name):
            raise _Unknown
        found["branch"] = _one_line(name.removeprefix("refs/heads/"))
        head = _resolved(name, own, common)
    return {"commit": head, **found} if _COMMIT.fullmatch(head) else found


def _places(folder: Path) -> tuple[Path, Path]:
    """Return the git folder of the checkout around a folder, and that of all its worktrees."""
    for root in (folder, *folder.parents):
        own = root / ".git"
        if own.is_file():
            named = _text(own).strip()
            if not named.startswith("gitdir: "):
                raise _Unknown
            own = root / named.removeprefix("gitdir: ")
        if own.is_dir():
            shared = own / "commondir"
            return own, own / _text(shared).strip() if shared.is_file() else own
    raise _Unknown


def _resolved(name: str, own: Path, common: Path) -> str:
    for place in dict.fromkeys((own, common)):
        with suppress(OSError):
            return _text(place / name).strip()
    with suppress(OSError):
        for line in _text(common / "packed-refs").splitlines():
            commit, _, packed = line.partition(" ")
            if packed == name:
                return commit
    return ""


def _text(path: Path) -> str:
    """Read a regular file without blocking; _Unknown if it is not one, or larger than `MOST`."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as f:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST:
            raise _Unknown
        return f.read(MOST).decode("utf-8")
