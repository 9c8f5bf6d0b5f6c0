"""Backends by spec `name?key=value`; `env.NAME=VALUE` sets a variable of the process.

A name is an adapter of the entry-point group `conformance.backends`, or a name that the settings define (`define`): an
adapter with options and an environment.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import unquote

from conformance.ggml.errors import BrokenError, ConformanceError, UnavailableError, UsageError, nearest
from conformance.ggml.text import error_text
from conformance.installed import Installed, entries, load

from .interface import Backend, class_faults

GROUP = "conformance.backends"
REFERENCE = "cpu"
"""The adapter that computes expected values."""
ON_REQUEST = frozenset({"xdna2"})
"""Adapters that run only when `--backend` names them; all others run by default.

`xdna2` supports only MUL_MAT, so nearly every case is UNSUPPORTED."""
VARIABLE = "env."
"""Prefix of options that set an environment variable of the backend's process."""
ISA = "isa"
"""Option that runs the backend's process on an emulated processor (`builds.isa`)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A backend as the user names it: `ggml?device=CPU&buffer=CPU_REPACK`."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse `name?key=value`, with percent escapes but no plus for a space; else UsageError."""
        name, _, query = text.partition("?")
        pairs = [pair.partition("=") for pair in query.split("&")] if query else []
        if not all(equals for _, equals, _ in pairs):
            raise UsageError(f"backend {text!r}: options must read key=value&key=value")
        options = tuple((unquote(key), unquote(value)) for key, _, value in pairs)
        if not name:
            raise UsageError(f"backend {text!r}: name or name?key=value expected; known: {_known()}")
        return cls(name, options)

    def with_defaults(self, options: Iterable[tuple[str, str]]) -> Spec:
        """Return the spec with those of `options` that it does not set itself."""
        own = dict(self.options)
        return Spec(self.name, (*self.options, *((k, v) for k, v in options if k not in own)))

    def __str__(self) -> str:
        """Format the spec so that `parse` reads it back."""
        options = "&".join(f"{_escaped(k, '%&=')}={_escaped(v, '%&')}" for k, v in self.options)
        return f"{self.name}?{options}" if options else self.name


def _escaped(text: str, signs: str) -> str:
    """Escape `signs`, and characters not allowed in a command's word, as percent escapes."""
    return "".join(f"%{ord(c):02X}" if c in signs or ord(c) < ord(" ") else c for c in text)


@dataclass(frozen=True, slots=True)
class Named:
    """An installed adapter under another name."""

    adapter: str
    options: tuple[tuple[str, str], ...] = ()
    """Default options; those of a spec override them."""
    environment: tuple[tuple[str, str | None], ...] = ()
    """Environment variables of its worker, set before anything is loaded; None unsets one."""
    where: str = ""
    """Place of its definition, for messages."""
    chosen: bool = False
    """True if the user named the settings file.

    Else the file was in the current directory, and only `--backend` opens the name."""


class Composed(Backend):
    """A backend that consists of others."""

    @abstractmethod
    def attach(self, opener: Callable[[Spec], Backend]) -> Backend:
        """Open the others before any run, and return itself; errors as of `create`."""


_named: dict[str, Named] = {}
_provided: dict[str, type[Backend]] = {}


def provide(name: str, cls: type[Backend]) -> None:
    """Register a backend composed of others; `names` does not list it, as it is no adapter."""
    _provided[name] = cls


def define(named: Mapping[str, Named]) -> None:
    """Define these names in addition to the installed adapters, replacing earlier definitions."""
    _named.clear()
    _named.update(named)
    adapter.cache_clear()


def defined() -> Mapping[str, Named]:
    """Return the names defined by `define`."""
    return dict(_named)


def pack() -> dict[str, Any]:
    """Encode the defined names as JSON, for another process."""
    return {n: [d.adapter, d.options, d.environment, d.where] for n, d in _named.items()}


def unpack(packed: Mapping[str, Any]) -> None:
    """Define the names that `pack` encoded in another process."""
    define({n: Named(a, tuple(map(tuple, o)), tuple(map(tuple, e)), where) for n, (a, o, e, where) in packed.items()})


def resolve(spec: Spec) -> Spec:
    """Return the installed adapter that `spec` names, with all its options."""
    name, options = _resolved(spec)
    return Spec(name, tuple((k, v) for k, v in options.items() if k != ISA))


def isa_of(spec: Spec) -> str:
    """Return the processor that is emulated for `spec`; "" if none."""
    return _resolved(spec)[1].get(ISA, "")


def _resolved(spec: Spec) -> tuple[str, dict[str, str]]:
    named = _named.get(spec.name)
    name, options = (spec.name, ()) if named is None else (named.adapter, named.options)
    return name, {**dict(options), **{k: v for k, v in spec.options if not k.startswith(VARIABLE)}}


def environment(spec: Spec) -> Mapping[str, str | None]:
    """Return variables for the process of `spec` (None unsets one); UsageError if invalid."""
    named = _named.get(spec.name)
    own = {k.removeprefix(VARIABLE): v for k, v in spec.options if k.startswith(VARIABLE)}
    for key, value in own.items():
        if not key.isidentifier() or "\0" in value:
            raise UsageError(f"{spec}: {VARIABLE}NAME=VALUE expected, {VARIABLE}{key} found")
    return {**({} if named is None else dict(named.environment)), **own}


_adopted: list[Installed] = []


def adopt(found: Sequence[Sequence[Any]]) -> None:
    """Take the adapters that the parent process has found, to save a worker 30 ms."""
    _adopted[:] = [Installed(*each) for each in found]


def installed() -> tuple[Installed, ...]:
    """Return the entry points of all adapters by name."""
    return tuple(_adopted) or entries(GROUP)


def _entry(name: str) -> Installed | None:
    """Return the entry point called `name`; ours if several distributions have one."""
    entries = [e for e in installed() if e.name == name]
    return next((e for e in entries if e.ours), entries[0] if entries else None)


def entry_of(name: str) -> Installed:
    """Return the entry point of an adapter, not loaded; UsageError if it is not installed."""
    entry = _entry(name)
    if entry is None:
        raise UsageError(f"backend {name!r} is not installed;{nearest(name, _all())} known: {_known()}")
    return entry


def third_party(spec: Spec) -> bool:
    """Return True if another distribution provides the adapter of `spec`; does not import it."""
    name = resolve(spec).name
    entry = None if name in _provided else _entry(name)
    return entry is not None and not entry.ours


def adapters_of_ours() -> dict[str, frozenset[str]]:
    """Return package -> adapter names, of the adapters in this distribution."""
    found: dict[str, set[str]] = {}
    for e in installed():
        if e.ours:
            found.setdefault(".".join(e.module.split(".")[:2]), set()).add(e.name)
    return {package: frozenset(names) for package, names in found.items()}


def is_provided(name: str) -> bool:
    """Return True if `provide` registered `name`."""
    return name in _provided


def names() -> list[str]:
    """Return the names of all installed adapters."""
    return list(dict.fromkeys(e.name for e in installed()))


def defaults() -> list[str]:
    """Return the names of the adapters that a run without `--backend` uses."""
    return [n for n in names() if n not in ON_REQUEST]


def is_taken(name: str) -> bool:
    """Return True if `name` is an adapter or a composed backend: settings may not define it."""
    return name in _provided or name in names()


def _all() -> list[str]:
    return [*names(), *_provided, *_named]


def _known() -> str:
    return ", ".join(_all()) or "none"


@cache
def adapter(name: str) -> type[Backend]:
    """Return the adapter class called `name`.

    UsageError if it is not installed, UnavailableError if it lacks something here, BrokenError if it cannot be imported
    or is not a backend.
    """
    installed = _named[name].adapter if name in _named else name
    if installed in _provided:
        return _provided[installed]
    entry = entry_of(installed)
    cls: Any = load(entry, f"{name}: its adapter")
    faults = [f"{name}: {f}" for f in class_faults(cls, entry.value)]
    if faults:
        raise BrokenError(" ".join(faults))
    return cls  # type: ignore[no-any-return]  # a class that has no fault is a Backend


def create(spec: Spec, opener: Callable[[Spec], Backend] | None = None) -> Backend:
    """Open a backend in this process; `opener` (default: `create`) opens its parts.

    UsageError for an unknown name or option; UnavailableError if the machine lacks what it needs; BrokenError if the
    adapter cannot be imported or raises another error.
    """
    cls = adapter(spec.name)
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError) as e:
        raise UnavailableError(f"{spec.name}: the parameters of its constructor cannot be read: {e}") from e
    given = dict(spec.options)
    options = dict(resolve(spec).options)
    for key in options:
        if key not in parameters:
            legal = ", ".join(parameters) or "none"
            where = spec.name if key in given else f"{_named[spec.name].where} options"
            raise UsageError(f"{where}: option {key!r} is unknown;{nearest(key, parameters)} its options: {legal}")
    for key in cls.builds:
        if options.get(key):
            from conformance.builds.source import locate  # noqa: PLC0415  # archives: a worker seldom needs them

            options[key] = str(locate(options[key]))
    try:
        backend = cls(**options)
    except (ConformanceError, KeyboardInterrupt):
        raise
    except BaseException as e:  # as on import
        raise BrokenError(
            f"{spec}: its constructor raised {error_text(e)}; it must work without arguments, and raise "
            "UnavailableError if the machine lacks what it needs"
        ) from e
    return backend.attach(opener or create) if isinstance(backend, Composed) else backend


def build_of(spec: Spec) -> str:
    """Return the SHA-256 of the libraries that a backend's options name; "" if none.

    UsageError for an unknown backend, UnavailableError for a build that is not on this machine.
    """
    from conformance.builds.source import contents, locate  # noqa: PLC0415  # as above

    options = dict(resolve(spec).options)
    named = [options[key] for key in sorted(adapter(spec.name).builds) if options.get(key)]
    return " ".join(contents(locate(name, isa_of(spec))) for name in named)


def uses_builds(spec: Spec) -> bool:
    """Return True if an option of the backend names a build; UsageError if it is unknown."""
    return bool(adapter(resolve(spec).name).builds)


def located(spec: Spec) -> Spec:
    """Return the adapter of `spec` with paths of its builds, as an emulated process needs them.

    UsageError if a build is missing, since the installed one is for this machine; other errors as for `locate`.
    """
    from conformance.builds.source import locate  # noqa: PLC0415  # as above

    whole, isa = resolve(spec), isa_of(spec)
    options = dict(whole.options)
    for key in sorted(adapter(spec.name).builds):
        if not options.get(key):
            raise UsageError(f"{spec}: with {ISA}={isa} a build for it expected: {key}=BUILD")
        options[key] = str(locate(options[key], isa))
    return Spec(whole.name, tuple(options.items()))
