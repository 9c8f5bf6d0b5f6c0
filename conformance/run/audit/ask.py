"""What a backend answers about a weight in a buffer type, and whether its answers go together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from conformance.backend.interface import Backend, Support
from conformance.case.case import Case
from conformance.ggml.errors import BackendTimeoutError, ConformanceError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor

from .cells import Finding
from .uses import kind, made_up, spell, work

Equal = Mapping[tuple[int, Hashable], Tensor]
"""Buffer and work -> a use that is taken there."""


@dataclass(slots=True)
class Asked:
    """The backend's answers for one cell."""

    case: Case
    weight: Tensor
    buffer: int
    said: dict[Tensor, Support] = field(default_factory=dict)
    """Use -> answer."""
    made: dict[Tensor, Support] = field(default_factory=dict)
    """llama.cpp's made-up use -> answer."""
    error: str = ""
    """What happened instead of an answer."""
    hung: bool = False

    @property
    def taken(self) -> list[Tensor]:
        """Uses to which it says yes."""
        return [n for n, s in self.said.items() if s]

    @property
    def refused(self) -> list[Tensor]:
        """Uses to which it says no."""
        return [n for n, s in self.said.items() if not s]


def weights(case: Case) -> list[Tensor]:
    """Persistent tensors that some node reads and none writes."""
    caches = frozenset(case.caches())
    return [t for t in case.persistent if t not in caches and case.uses(t)]


def ask(backend: Backend, case: Case, weight: Tensor, buffer: int) -> Asked:
    """Every use of `weight`, and llama.cpp's made-up one of each kind."""
    asked = Asked(case, weight, buffer)
    uses = case.uses(weight)
    made = made_up(weight, uses)
    whole = Graph(dict.fromkeys(n for s in case.steps for n in s.graph))

    def answers() -> None:
        said = dict(zip(whole, backend.supports_placed(whole, weight, buffer), strict=True))
        asked.said = {n: said[n] for n in uses}
        if made:
            asked.made = dict(zip(made, backend.supports_placed(Graph(made), weight, buffer), strict=True))

    asked.error, asked.hung = caught(answers)
    return asked


def caught(do: Callable[[], None]) -> tuple[str, bool]:
    """What went wrong, in words, empty where nothing did; and whether it was that nobody answered in time."""
    try:
        do()
    except ConformanceError as e:
        return str(e), isinstance(e, BackendTimeoutError)
    except Exception as e:  # noqa: BLE001  # an adapter's own fault must cost one cell, not the table
        return f"the adapter raised {type(e).__name__}: {e}", False
    return "", False


def consistent(asked: Asked, equal: Equal) -> tuple[Finding, str]:
    """Whether the answers go together: over batch dimensions, and with what is taken elsewhere in that buffer type."""
    first: dict[Hashable, tuple[Tensor, Support]] = {}
    for node, support in (*asked.said.items(), *asked.made.items()):
        other, said = first.setdefault(kind(node, asked.weight), (node, support))
        if bool(said) != bool(support):
            yes, refused, why = (other, node, support) if said else (node, other, said)
            return Finding.UNSOUND, f"takes {spell(yes)}, not {spell(refused)}: {why.reason}"
    for node in asked.refused:
        taken = equal.get((asked.buffer, work(node, asked.weight)))
        if taken is not None:
            why = asked.said[node]
            return Finding.UNDERCLAIM, f"refuses {spell(node)} and takes {spell(taken)}: {why.reason}"
    return Finding.AGREED, asked.said[asked.refused[0]].reason if asked.refused else ""
