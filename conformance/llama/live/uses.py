"""Asks a backend about each use of a weight, and cuts nodes out as cases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from conformance.backend.interface import Backend, Support
from conformance.case.case import Case, Step
from conformance.ggml.errors import BackendTimeoutError, ConformanceError, GraphError, UnavailableError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor, is_contiguous, new_tensor
from conformance.ggml.types import F32, TYPES
from conformance.suite.batch import isolated_nodes

T = TypeVar("T")


Equal = Mapping[tuple[int, Hashable], Tensor]
"""Buffer type and work -> a use that is supported there."""


@dataclass(slots=True)
class Answers:
    """The backend's answers for one weight in one buffer type."""

    case: Case
    weight: Tensor
    buffer: int
    said: dict[Tensor, Support] = field(default_factory=dict)
    """Use -> answer."""
    made: dict[Tensor, Support] = field(default_factory=dict)
    """llama.cpp's example use -> answer."""
    error: str = ""
    """Error raised instead of an answer."""
    absent: str = ""
    """Reason why this version of the library cannot represent such a tensor at all."""
    hung: bool = False

    @property
    def taken(self) -> list[Tensor]:
        """Supported uses."""
        return [n for n, s in self.said.items() if s]

    @property
    def refused(self) -> list[Tensor]:
        """Unsupported uses."""
        return [n for n, s in self.said.items() if not s]


def weights(case: Case) -> list[Tensor]:
    """Return the persistent tensors that some node reads and none writes."""
    caches = frozenset(case.caches())
    return [t for t in case.persistent if t not in caches and case.uses(t)]


def ask(backend: Backend, case: Case, weight: Tensor, buffer: int) -> Answers:
    """Ask about every use of `weight`, and about llama.cpp's example use of each kind."""
    answers = Answers(case, weight, buffer)
    uses = case.uses(weight)
    made = made_up(weight, uses)
    whole = Graph(dict.fromkeys(n for s in case.steps for n in s.graph))

    def fill() -> None:
        try:
            said = dict(zip(whole, backend.supports_placed(whole, weight, buffer), strict=True))
            answers.said = {n: said[n] for n in uses}
            if made:
                answers.made = dict(zip(made, backend.supports_placed(Graph(made), weight, buffer), strict=True))
        except BackendTimeoutError:
            answers.hung = True
            raise
        except UnavailableError as e:
            answers.absent = str(e)

    _, answers.error = attempt(fill)
    return answers


def attempt(do: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `do`, or None and its error text; an exception affects one case."""
    try:
        return do(), ""
    except ConformanceError as e:
        return None, str(e)
    except Exception as e:  # noqa: BLE001  # the adapter's own
        return None, f"the adapter raised {type(e).__name__}: {e}"


def contradiction(answers: Answers, equal: Equal) -> str:
    """Return how the answers contradict each other, or an empty text.

    Answers contradict each other if they differ between batch sizes, or for equal work in the same buffer type.
    """
    first: dict[Hashable, tuple[Tensor, Support]] = {}
    for node, support in (*answers.said.items(), *answers.made.items()):
        other, said = first.setdefault(kind(node, answers.weight), (node, support))
        if bool(said) != bool(support):
            yes, refused, why = (other, node, support) if said else (node, other, said)
            return f"takes {spell(yes)}, not {spell(refused)}: {why.reason}"
    for node in answers.refused:
        taken = equal.get((answers.buffer, work(node, answers.weight)))
        if taken is not None:
            return f"refuses {spell(node)} and takes {spell(taken)}: {answers.said[node].reason}"
    return ""


def nodes_alone(case: Case, wanted: Collection[Tensor]) -> Iterator[tuple[Case, dict[Tensor, Tensor]]]:
    """Yield for each step a case of its nodes in `wanted` alone, and copy -> original.

    GraphError if `case`, with recorded values, lacks one that is needed.
    """
    wanted = frozenset(wanted)
    for k, step in enumerate(case.steps):
        if wanted.isdisjoint(step.graph):
            continue
        made, original = isolated_nodes(case, k)
        copies = {copy: node for copy, node in original.items() if node in wanted}
        if copies:
            yield cut_to(made, tuple(copies)), copies


def cut_to(case: Case, outputs: tuple[Tensor, ...], nodes: Iterable[Tensor] | None = None) -> Case:
    """Reduce a one-step case to the inputs of `outputs`; `nodes` replaces its graph."""
    (step,) = case.steps
    needed = frozenset(Graph(outputs).tensors())
    graph = Graph(n for n in (step.graph if nodes is None else nodes) if n in needed)
    inputs = {t: data for t, data in step.inputs.items() if t in needed}
    held = {t: data for t, data in case.persistent.items() if t in needed}
    placement = {t: p for t, p in case.placement.items() if t in held}
    steps = [Step(graph, inputs, outputs)]
    return replace(case, persistent=held, steps=steps, placement=placement, provenance={})


MADE_UP_TOKENS = 512
"""`n_seq_tokens` and the rows of every activation in llama.cpp's `weight_buft_supported`."""
MADE_UP_SEQS = 3
"""`n_seqs` there."""
_B = Builder()


def _rows(w: Tensor, *ne: int) -> Tensor:
    """Make F32 activations [`ne[0]` of `w`, `ne`…]."""
    return new_tensor(F32, w.ne[0], *ne, name="b")


def _ids(*ne: int) -> Tensor:
    return new_tensor(TYPES["i32"], *ne, name="ids")


MADE_UP: dict[str, Callable[[Tensor, int], Tensor]] = {
    "MUL_MAT": lambda w, _: _B.mul_mat(w, _rows(w, MADE_UP_TOKENS, *w.ne[2:])),
    "MUL_MAT_ID": lambda w, used: _B.mul_mat_id(w, _rows(w, used, MADE_UP_TOKENS), _ids(used, MADE_UP_TOKENS)),
    "GET_ROWS": lambda w, _: _B.get_rows(w, _ids(MADE_UP_TOKENS)),
    "ADD": lambda w, _: _B.add(_rows(w, *w.ne[1:]), w),
    "MUL": lambda w, _: _B.mul(_rows(w, *w.ne[1:]), w),
    "DIV": lambda w, _: _B.div(_rows(w), w),
    "ADD_ID": lambda w, used: _B.add_id(_rows(w, used, MADE_UP_TOKENS), w, _ids(used, MADE_UP_TOKENS)),
    "SSM_CONV": lambda w, _: _B.ssm_conv(
        new_tensor(F32, w.ne[0] - 1 + MADE_UP_TOKENS, w.ne[1], MADE_UP_SEQS, name="conv_x"), w
    ),
}
"""Op -> (weight, experts in use) -> the example node of `weight_buft_supported`.

For frequency factors, sinks and others it uses a different op, or does not ask, so there is nothing to compare."""


def made_up(weight: Tensor, uses: Sequence[Tensor]) -> list[Tensor]:
    """Return llama.cpp's example node for each kind of use that reads the whole weight."""
    found: dict[Hashable, Tensor] = {}
    for node in uses:
        if node.op in MADE_UP and weight in node.src and kind(node, weight) not in found:
            try:
                made = MADE_UP[node.op](weight, node.ne[1])
            except GraphError:  # the weight is on the other side of an ADD than llama.cpp thinks
                continue
            made.op_params, made.flags, made.name = node.op_params, node.flags | FLAG_COMPUTE, "made up"
            found[kind(node, weight)] = made
    return list(found.values())


def kind(node: Tensor, weight: Tensor) -> Hashable:
    """Return everything on which `supports_op` may depend: all except batch dimensions."""
    sources = [s for s in node.src if s is not None]
    at = next(i for i, s in enumerate(node.src) if s is not None and s.root is weight)
    read = sources[0] if node.src[at] is None else node.src[at]
    assert read is not None
    others = tuple((s.type.name, is_contiguous(s)) for s in sources)
    return (node.op, node.op_params, at, read.ne, read.nb, others, node.type.name, node.ne[0])


def work(node: Tensor, weight: Tensor) -> Hashable:
    """Return a key of equal work, whichever weight is read: op, types, gaps, K and rows."""
    reading = next(s for s in node.src if s is not None and s.root is weight)
    others = tuple((s.type.name, is_contiguous(s)) for s in node.src if s is not None)
    return (node.op, node.op_params, others, node.type.name, reading.ne, reading is weight)


def spell(node: Tensor) -> str:
    """Format a node and its sources, as `MUL_MAT f32[64, 5, 1, 1] of …`."""
    src = ", ".join(f"{s.type}{list(s.ne)}" for s in node.src if s is not None)
    return f"{node.op} {node.name} of {src}".replace("  ", " ")
