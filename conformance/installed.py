"""Entry points of distributions: backends, families, live families and commands.

Names come from metadata. `Parts` imports a module when its name is used: a run without the name does not load the
module, and a module that cannot be imported breaks no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, reduce
from typing import Any, Generic, NamedTuple, TypeVar

from conformance.ggml.errors import BrokenError, UnavailableError
from conformance.ggml.text import error_text

DISTRIBUTION = "ggml-conformance"
"""Our distribution; what others add is third-party."""
AGAIN = f"the metadata of this installation lack it; install {DISTRIBUTION} again"
"""Advice for an entry point of ours that is missing, as after an upgrade of a checkout."""
_OURS = ("backends.", "conformance.")
T = TypeVar("T")


class Installed(NamedTuple):
    """An entry point of an installed distribution."""

    name: str
    module: str
    attribute: str
    """The object, in the module."""
    ours: bool
    """True if our distribution has it."""
    distribution: str = ""

    @property
    def value(self) -> str:
        """Return the entry point as a distribution writes it."""
        return f"{self.module}:{self.attribute}"


@cache
def entries(group: str) -> tuple[Installed, ...]:
    """Return the entry points of a group by name, ours first; read once per process."""
    from importlib.metadata import entry_points  # noqa: PLC0415  # slow to import, and no worker needs it

    found = []
    for e in entry_points(group=group):
        module, _, attribute = (part.strip() for part in e.value.partition("[")[0].partition(":"))
        owner = "" if e.dist is None else (e.dist.name or "").lower().replace("_", "-")
        found.append(Installed(e.name, module, attribute, _is_ours(module, owner), owner))
    return tuple(sorted(found, key=lambda e: (e.name, not e.ours, e.distribution)))


def _is_ours(module: str, distribution: str) -> bool:
    return distribution == DISTRIBUTION if distribution else module.startswith(_OURS)


def load(entry: Installed, what: str) -> Any:  # noqa: ANN401  # whatever its distribution has there
    """Import the object of an entry point.

    Raises:
        UnavailableError: a package or library that it imports is missing here; the message begins with `what`.
        BrokenError: importing it fails in another way.
    """
    try:
        return reduce(getattr, entry.attribute.split("."), importlib.import_module(entry.module))
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a broken one must not break the others
        why = str(e) if isinstance(e, (ImportError, OSError)) else error_text(e)
        error = UnavailableError if _lacks(e, entry) else BrokenError
        raise error(f"{what} {entry.value} cannot be imported: {why}") from e


def _lacks(e: BaseException, entry: Installed) -> bool:
    """Return True if an import failed because this machine lacks what the module imports."""
    if isinstance(e, ImportError):  # of its own modules, or ours, none may be missing
        return (e.name or "").partition(".")[0] not in {entry.module.partition(".")[0], "conformance"}
    return isinstance(e, (OSError, UnavailableError))


class Parts(Mapping[str, T], Generic[T]):
    """The entry points of a group, by name; a value is imported when it is read.

    Ours come in `order`, then those of other distributions by name. Ours win over others of the same name.
    """

    def __init__(self, group: str, what: str, fault: Callable[[str, T], str], order: Collection[str] = ()) -> None:
        """Open the group.

        Args:
            group: entry-point group.
            what: word for a value in messages.
            fault: function of name and value that returns why the value is not valid; "" if it is.
            order: names of ours in their order; one of them that the metadata lack is an error when it is read.
        """
        self.group = group
        self._what, self._fault, self._order = what, fault, order

    def entry(self, name: str) -> Installed | None:
        """Return the entry point called `name`, not loaded; None if there is none."""
        found = (e for e in entries(self.group) if e.name == name)
        return next((e for e in found if e.ours or name not in self._order), None)

    def ours(self) -> list[str]:
        """Return the names of our distribution."""
        return list(dict.fromkeys((*self._order, *(e.name for e in entries(self.group) if e.ours))))

    def others(self) -> list[str]:
        """Return the names that only other distributions have."""
        return [n for n in self if n not in self.ours()]

    def __getitem__(self, name: str) -> T:
        """Import a value; UnavailableError if it cannot be imported or is not valid."""
        entry = self.entry(name)
        if entry is None and name in self._order:
            raise UnavailableError(f"{self._what} {name!r}: {AGAIN}")
        if entry is None:
            raise KeyError(name)
        found: T = load(entry, f"{self._what} {name!r}:")
        if fault := self._fault(name, found):
            raise UnavailableError(f"{self._what} {name!r}: {entry.value} of {entry.distribution}: {fault}")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._order or any(e.name == name for e in entries(self.group))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.ours(), *(e.name for e in entries(self.group)))))

    def __len__(self) -> int:
        return len(list(iter(self)))
