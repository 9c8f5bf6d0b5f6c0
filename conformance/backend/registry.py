"""Backends by name, opened by a spec `name?key=value`.

A name is an adapter, found through the entry-point group `conformance.backends`, or what settings define (`define`): an
adapter with options and an environment of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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
            raise UsageError(f"backend {text!r}: name or name?key=value expected; known: {_known()}")
        return cls(name, options)

    def __str__(self) -> str:
        return self.name + ("?" + "&".join(f"{k}={v}" for k, v in self.options) if self.options else "")


@dataclass(frozen=True, slots=True)
class Named:
    """An installed adapter under another name."""

    adapter: str
    options: tuple[tuple[str, str], ...] = ()
    """What a spec of this name starts from; the spec's own options come on top."""
    environment: tuple[tuple[str, str | None], ...] = ()
    """Variables of its worker process, set before anything is loaded; None is a variable that is not set."""
    where: str = ""
    """Where it is defined, for messages."""


_named: dict[str, Named] = {}


_provided: dict[str, type[Backend]] = {}


def provide(name: str, cls: type[Backend]) -> None:
    """Know a backend that is made of others; it is no adapter, so `names` does not list it."""
    _provided[name] = cls


def define(named: Mapping[str, Named]) -> None:
    """Know these names, and none defined before, beside the installed adapters."""
    _named.clear()
    _named.update(named)
    adapter.cache_clear()


def defined() -> Mapping[str, Named]:
    """The names that `define` gave."""
    return dict(_named)


def resolve(spec: Spec) -> Spec:
    """The installed adapter behind `spec`, and all options that it gets."""
    named = _named.get(spec.name)
    if named is None:
        return spec
    return Spec(named.adapter, tuple({**dict(named.options), **dict(spec.options)}.items()))


def environment(spec: Spec) -> Mapping[str, str | None]:
    """Variables that the process of `spec` must have; None is one that it must not have."""
    named = _named.get(spec.name)
    return {} if named is None else dict(named.environment)


@cache
def _installed() -> dict[str, str]:
    return {e.name: e.value for e in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def names() -> list[str]:
    """Names of all installed adapters."""
    return list(_installed())


def _known() -> str:
    return ", ".join([*names(), *_provided, *_named]) or "none"


@cache
def adapter(name: str) -> type[Backend]:
    """The adapter class behind `name`.

    Raises:
        UsageError: nothing of that name is installed.
        UnavailableError: the adapter cannot be imported here.
    """
    installed = _named[name].adapter if name in _named else name
    if installed in _provided:
        return _provided[installed]
    found = [e for e in entry_points(group=GROUP) if e.name == installed]
    if not found:
        raise UsageError(f"backend {installed!r} is not installed; known: {_known()}")
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
    given = dict(spec.options)
    options = dict(resolve(spec).options)
    for key in options:
        if key not in parameters:
            legal = ", ".join(parameters) or "none"
            where = spec.name if key in given else f"{_named[spec.name].where} options"
            raise UsageError(f"{where}: option {key!r} is unknown; its options: {legal}")
    return cls(**options)
