"""The parts of a night, as `parts.toml` lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conformance import shipped
from conformance.case.strict import parse_toml, read_text
from conformance.ggml.text import shell
from conformance.process import words
from conformance.run.session.select import LARGEST
from conformance.run.session.shard import WHOLE, Shard

CONFORM = tuple(words("conformance.cli"))
HOUR = 3600.0
_VALUE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    folder: Path
    level: str = "standard"
    backends: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    shard: Shard = WHOLE
    budget: float = 0.0
    """Seconds for parts that repeat."""
    gate_budget: float = 90.0
    """Seconds of measuring per gate."""
    store: Path = Path("history.sqlite")
    """The history."""
    seed: int | None = None
    """Generated cases of this night are drawn from it."""
    base: Path | None = None
    """A virtual environment with the build that gates compare with."""
    release: str = ""
    """A build of llama.cpp."""
    release_base: str = ""
    """The build before."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a part finds and leaves its files."""

    document: Path
    journal: Path
    documents: tuple[Path, ...]
    """What other parts wrote so far."""
    round: int = 0
    """Which round it is, of a part that repeats."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part; `parts.toml` says what its fields are."""

    name: str
    says: str
    command: Sequence[str]
    """A program and its arguments; `{name}` stands for values."""
    limit: float
    """Seconds after which it is ended."""
    kind: str = ""
    leaves: str = ""
    shared: bool = False
    repeats: bool = False
    needs: tuple[str, str] | None = None
    last: bool = False

    def words(self, o: Options, p: Paths) -> list[str]:
        """The command of a night."""
        return list(self._words(o, p))

    def _words(self, o: Options, p: Paths) -> Iterator[str]:
        known = values(o, p if self.repeats else replace(p, round=0))
        for word in self.command:
            name = _VALUE.fullmatch(word)
            if name:
                yield from map(str, known[name[1]])
            else:
                yield word.replace("{folder}/", f"{o.folder}/")

    def idle(self, o: Options) -> str:
        """Why it was given nothing to do; empty where it was given something."""
        return self.needs[1] if self.needs and not getattr(o, self.needs[0]) else ""


def values(o: Options, p: Paths) -> dict[str, Sequence[object]]:
    """What stands for `{name}` in a command."""
    return {
        "level": [o.level],
        "hunted": ["smoke" if o.level == "smoke" else "standard"],
        "backends": [word for b in o.backends for word in ("--backend", b)],
        "families": [word for f in o.families for word in ("--family", f)],
        "shard": [o.shard],
        "seed": [] if o.seed is None else ["--seed", (o.seed + p.round) % LARGEST],
        "gate_budget": [f"{o.gate_budget:g}"],
        "base": ["--base", o.base] if o.base else [],
        "release": [o.release],
        "release_base": ["--against", o.release_base] if o.release_base else [],
        "store": [o.store],
        "history": ["--history", o.store] if o.store.is_file() else [],
        "folder": [o.folder],
        "document": [p.document],
        "documents": p.documents,
        "journal": [p.journal],
    }


def _read(path: Path) -> Iterator[Part]:
    for row in parse_toml(read_text(path), str(path))["part"]:
        command = (*CONFORM, *row.pop("command").split())
        needs = tuple(row.pop("needs", ())) or None
        yield Part(command=command, limit=row.pop("hours") * HOUR, needs=needs, **row)


PARTS = tuple(_read(shipped.path("nightly", "parts.toml")))


def shown(command: Sequence[str]) -> str:
    """A command as a person types it."""
    n = len(CONFORM)
    return shell(["conform", *command[n:]] if tuple(command[:n]) == CONFORM else command)
