"""The table of parts: a nightly runs them in this order, each by one `conform` command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.ggml.text import shell
from conformance.process import words
from conformance.run.session.select import LARGEST
from conformance.run.session.shard import WHOLE, Shard

CONFORM = tuple(words("conformance.cli"))
HOUR = 3600.0
ROUND = 30
"""Fresh cases of one round."""
CAUSES = 30
"""Minutes per backend to group failures by cause."""
RELEASE = 60
"""Minutes for a build of llama.cpp, its base and their causes."""


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
    """One part."""

    name: str
    says: str
    """What it is, for people."""
    command: Callable[[Options, Paths], Sequence[str]]
    limit: float
    """Seconds after which it is ended."""
    kind: str = ""
    """Of the document that it must write; empty where it writes none."""
    leaves: str = ""
    """A file of the folder that it must write, of a part without a document whose exit code is that of the others."""
    shared: bool = False
    """Whether each shard does its share; what is not shared is done whole by one of them."""
    repeats: bool = False
    """Whether it runs in rounds until the time budget is used."""
    idle: Callable[[Options], str] = lambda _: ""
    """Why it was given nothing to do; empty where it was given something."""
    last: bool = False
    """Whether it is about what the others wrote, and so runs in every shard, and again where anything ran again."""


def _conform(*words: object) -> list[str]:
    return [*CONFORM, *map(str, words)]


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for v in values for word in (option, v)]


def _run(o: Options, p: Paths, *words: object, level: str = "") -> list[str]:
    return _conform(
        "run", "--level", level or o.level, *_each("--backend", o.backends), *_each("--family", o.families),
        *words, "--isolate", "--save-failures", o.folder / "failures", "--journal", p.journal, "--json", p.document,
    )  # fmt: skip


def _conformance(o: Options, p: Paths) -> list[str]:
    return _run(o, p, "--shard", o.shard, "--causes", CAUSES)


def _seeded(o: Options, p: Paths) -> list[str]:
    return _run(o, p, *_seed(o), level="smoke")


def _fresh(o: Options, p: Paths) -> list[str]:
    return _run(o, p, "--only-fresh", "--fresh", ROUND, *_seed(o, p.round))


def _seed(o: Options, more: int = 0) -> list[object]:
    return [] if o.seed is None else ["--seed", (o.seed + more) % LARGEST]


def _golden(o: Options, p: Paths) -> list[str]:
    return _conform("golden", "verify", *_each("--backend", o.backends), "--json", p.document)


def _hunted(o: Options) -> str:
    return "smoke" if o.level == "smoke" else "standard"  # where every planted bug is noticed


def _audit(o: Options, p: Paths) -> list[str]:
    failures = o.folder / "failures"
    return _conform("audit", *_each("--backend", o.backends), "--json", p.document, "--save-failures", failures)


def _perf(o: Options, p: Paths) -> list[str]:
    return _conform("perf", "run", "--level", o.level, *_each("--backend", o.backends), "--json", p.document)


def _gates(o: Options, p: Paths) -> list[str]:
    base = ["--base", o.base] if o.base else []
    return _conform("perf", "gate", *base, "--budget", f"{o.gate_budget:g}", "--json", p.document)


def _release(o: Options, p: Paths) -> list[str]:
    base = ["--base", o.release_base] if o.release_base else []
    return _conform(
        "release", o.release, *base, "--level", _hunted(o), "--minutes", RELEASE, "--results", p.document,
        "-o", o.folder / "release",
    )  # fmt: skip


def _history(o: Options, p: Paths) -> list[str]:
    return _conform("history", "import", "--nightly", "--store", o.store, *p.documents)


def _report(o: Options, p: Paths) -> list[str]:
    history = ["--history", o.store] if o.store.is_file() else []
    return _conform("report", "--level", o.level, *history, "-o", o.folder / "page", *p.documents)


PARTS = (
    Part("conformance", "every listed case on every backend", _conformance, 3 * HOUR, "conformance", shared=True),
    Part("seeded", "level smoke under the seed of this night, so that no answer can be known before", _seeded, HOUR,
         "conformance"),
    Part("fresh", "new random cases until the time is used; they are filed and fail nothing", _fresh, HOUR / 2,
         "conformance", shared=True, repeats=True, idle=lambda o: "" if o.budget else "no time was given to it"),
    Part("golden", "golden outputs computed again, or the named backends judged by them", _golden, HOUR, "conformance"),
    Part("audit", "what backends say of weights in buffers, held against runs", _audit, HOUR, "conformance"),
    Part("release", "a build of llama.cpp on all its devices, against the build before", _release, 2 * HOUR,
         "conformance", idle=lambda o: "" if o.release else "no build was named"),
    Part("perf", "speed of every work unit", _perf, HOUR, "perf"),
    Part("gates", "speed against its limits", _gates, HOUR, "perf"),
    Part("history", "all of it into the history", _history, HOUR / 4, last=True),
    Part("report", "the page", _report, HOUR / 4, leaves="page/index.html", last=True),
)  # fmt: skip


def shown(command: Sequence[str]) -> str:
    """A command as a person types it."""
    n = len(CONFORM)
    return shell(["conform", *command[n:]] if tuple(command[:n]) == CONFORM else command)
