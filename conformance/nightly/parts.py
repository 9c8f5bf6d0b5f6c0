"""The table of parts: what a nightly runs, in this order, each by one command of `conform`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.process import words
from conformance.run.session.select import LARGEST
from conformance.run.session.shard import WHOLE, Shard

CONFORM = tuple(words("conformance.cli"))
HOUR = 3600.0
ROUND = 30
"""Fresh cases of one round."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked of a nightly."""

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
    """What generated cases of this night are drawn from."""
    base: Path | None = None
    """A virtual environment with the build that gates against a baseline are held against."""


@dataclass(frozen=True, slots=True)
class Here:
    """Where a part finds and leaves its files."""

    document: Path
    journal: Path
    documents: tuple[Path, ...]
    """What other parts wrote so far."""
    round: int = 0
    """Which round it is, of a part that repeats."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part."""

    name: str
    says: str
    """What it is, for people."""
    command: Callable[[Asked, Here], Sequence[str]]
    limit: float
    """Seconds after which it is ended."""
    kind: str = ""
    """Of the document that it must write; empty where it writes none."""
    shared: bool = False
    """Whether each shard does its share; what is not shared is done whole by one of them."""
    repeats: bool = False
    """Whether it runs in rounds until the time budget is used."""
    last: bool = False
    """Whether it is about what the others wrote, and so runs in every shard, and again where anything ran again."""


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for v in values for word in (option, v)]


def _conform(*words: object) -> list[str]:
    return [*CONFORM, *map(str, words)]


def _run(asked: Asked, here: Here, *words: object, level: str = "") -> list[str]:
    return _conform(
        "run", "--level", level or asked.level, *_each("--backend", asked.backends), *_each("--family", asked.families),
        *words, "--isolate", "--save-failures", asked.folder / "failures",
        "--journal", here.journal, "--json", here.document,
    )  # fmt: skip


def _conformance(asked: Asked, here: Here) -> list[str]:
    return _run(asked, here, "--shard", asked.shard)


def _seeded(asked: Asked, here: Here) -> list[str]:
    return _run(asked, here, *_seed(asked), level="smoke")


def _fresh(asked: Asked, here: Here) -> list[str]:
    return _run(asked, here, "--only-fresh", "--fresh", ROUND, *_seed(asked, here.round))


def _seed(asked: Asked, more: int = 0) -> list[object]:
    return [] if asked.seed is None else ["--seed", (asked.seed + more) % LARGEST]


def _planted(asked: Asked, here: Here) -> list[str]:
    level = "smoke" if asked.level == "smoke" else "standard"  # where every fault is noticed
    return _conform("planted", *_each("--family", asked.families), "--level", level, "--json", here.document)


def _audit(asked: Asked, here: Here) -> list[str]:
    return _conform("audit", *_each("--backend", asked.backends), "--json", here.document,
                    "--save-failures", asked.folder / "failures")  # fmt: skip


def _perf(asked: Asked, here: Here) -> list[str]:
    return _conform("perf", "run", "--level", asked.level, *_each("--backend", asked.backends), "--json", here.document)


def _gates(asked: Asked, here: Here) -> list[str]:
    base = ["--base", asked.base] if asked.base else []
    return _conform("perf", "gate", *base, "--budget", f"{asked.gate_budget:g}", "--json", here.document)


def _history(asked: Asked, here: Here) -> list[str]:
    return _conform("history", "import", "--nightly", "--store", asked.store, *here.documents)


def _report(asked: Asked, here: Here) -> list[str]:
    kept = ["--history", asked.store] if asked.store.is_file() else []
    return _conform("report", "--level", asked.level, *kept, "-o", asked.folder / "page", *here.documents)


PARTS = (
    Part("conformance", "every listed case on every backend", _conformance, 3 * HOUR, "conformance", shared=True),
    Part("seeded", "level smoke under the seed of this night, so that no answer can be known before", _seeded, HOUR,
         "conformance"),
    Part("fresh", "new random cases until the time is used; they are filed and fail nothing", _fresh, HOUR / 2,
         "conformance", shared=True, repeats=True),
    Part("planted", "known bugs, planted, are noticed", _planted, HOUR, "planted"),
    Part("audit", "what backends say of weights in buffers, held against runs", _audit, HOUR, "audit"),
    Part("perf", "speed of every work unit", _perf, HOUR, "perf"),
    Part("gates", "speed against its limits", _gates, HOUR, "perf"),
    Part("history", "all of it into the history", _history, HOUR / 4, last=True),
    Part("report", "the page", _report, HOUR / 4, last=True),
)  # fmt: skip


def shown(command: Sequence[str]) -> str:
    """A command as a person types it."""
    words = list(command)
    if tuple(words[: len(CONFORM)]) == CONFORM:
        words[: len(CONFORM)] = ["conform"]
    return " ".join(f"'{w}'" if set(w) & set("*?&;|<>$ '\"()[]") else w for w in words)
