"""A profile on disk while it is measured; an interrupted measurement continues from it."""

from __future__ import annotations

from pathlib import Path

from conformance.backend.profile import Profile, read
from conformance.ggml.errors import UsageError

_SAME = ("suite", "device", "description", "versions", "build")
"""Fields that identify what was measured; entries are not valid for any other value."""


def beside(path: Path) -> Path:
    """Return the path of the partial profile for `path`."""
    return path.with_name(f"{path.name}.partial")


def resume(path: Path, begun: Profile) -> Profile:
    """Return the partial profile at `path`, or `begun` if there is none.

    UsageError if the file is damaged, or has another device, driver, build or suite than `begun`.
    """
    if not path.exists():
        return begun
    try:
        profile = read(path)
    except UsageError as e:
        raise UsageError(f"{e}; remove it to start again") from None
    for name in _SAME:
        was, now = getattr(profile, name), getattr(begun, name)
        if was != now:
            raise UsageError(f"{path}: begun with {name} {was}, here is {now}; remove it to start again")
    return profile
