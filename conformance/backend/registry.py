"""Backends by name: found through the entry-point group `conformance.backends`, opened by a spec `name?key=value`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from urllib.parse import parse_qsl

from conformance.cgraph.errors import UnavailableError, UsageError

from .interface import Backend

GROUP = "conformance.backends"


@dataclass(frozen=True, slots=True)
class Spec:
    """A backend as the user names it: `ggml?device=CPU&buffer=CPU_REPACK`."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read `name` or `name?key=value&key=value`; percent escapes as in a URL.

        Raises:
            UsageError: the text has another form.
        """
        name, _, query = text.partition("?")
        try:
            options = tuple(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        except ValueError:
            raise UsageError(f"backend {text!r}: options must read key=value&key=value") from None
        if not name:
            raise UsageError(f"backend {text!r}: name or name?key=value expected; known: {', '.join(names())}")
        return cls(name, options)

    def __str__(self) -> str:
        return self.name + ("?" + "&".join(f"{k}={v}" for k, v in self.options) if self.options else "")


@cache
def _installed() -> dict[str, str]:
    return {e.name: e.value for e in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def names() -> list[str]:
    """Names of all installed adapters."""
    return list(_installed())


@cache
def adapter(name: str) -> type[Backend]:
    """The adapter class behind `name`.

    Raises:
        UsageError: nothing of that name is installed.
        UnavailableError: the adapter cannot be imported here.
    """
    found = [e for e in entry_points(group=GROUP) if e.name == name]
    if not found:
        raise UsageError(f"backend {name!r} is not installed; known: {', '.join(names()) or 'none'}")
    try:
        cls = found[0].load()
    except (ImportError, OSError) as e:
        raise UnavailableError(f"{name}: its adapter {found[0].value} cannot be imported: {e}") from e
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise UsageError(f"{name}: {found[0].value} is no subclass of conformance.backend.interface.Backend")
    return cls


def create(spec: Spec) -> Backend:
    """A backend in this process.

    Raises:
        UsageError: unknown name or option.
        UnavailableError: the machine lacks what it needs.
    """
    cls = adapter(spec.name)
    parameters = inspect.signature(cls).parameters
    for key, _ in spec.options:
        if key not in parameters:
            legal = ", ".join(parameters) or "none"
            raise UsageError(f"{spec.name}: option {key!r} is unknown; its options: {legal}")
    return cls(**dict(spec.options))
