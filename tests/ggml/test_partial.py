"""Partial graphs: parts run one after the other give what the whole gives, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_cases import random_cases

from backends.cpu import CpuBackend
from backends.openvino import OpenVinoStateless
from conformance.backend.interface import Backend, Session
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.partial import Part, partial
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, is_empty, nbytes, new_tensor
from conformance.ggml.types import F16, F32, I32, I64, Q8_0
from conformance.judge.compare import compare
from conformance.llama.captured import GOLDEN

CAPTURES = sorted(GOLDEN.glob("*.gguf"))
B = Builder()
CPU = CpuBackend()
OPENVINO = OpenVinoStateless()
ROUNDED = 1e-6
"""NMSE allowed where OpenVINO compiles parts apart: F16 values that fusion rounded the other way."""


def split(
    graph: Graph, cuts: Iterable[int], *, persistent: Collection[Tensor] = (), outputs: Collection[Tensor] = ()
) -> list[Part]:
    """The whole of `graph` as parts, cut before each node whose index is in `cuts`; other arguments as `partial`."""
    places = sorted({0, *cuts, len(graph)})
    return [partial(graph, a, b, persistent=persistent, outputs=outputs) for a, b in pairwise(places)]


def _floats(rng: np.random.Generator, *ne: int) -> Bytes:
    return rng.standard_normal(int(np.prod(ne))).astype(np.float32).view(np.uint8)


def _computed(graph: Graph) -> tuple[Tensor, ...]:
    return tuple(n for n in graph if n.flags & FLAG_COMPUTE and not is_empty(n))


def _state(session: Session, case: Case) -> dict[Tensor, Bytes]:
    return {t: session.read(t) for t in case.caches()}


def _write(session: Session, state: dict[Tensor, Bytes]) -> None:
    for t, data in state.items():
        session.write(t, data)


def _check(
    session: Session, case: Case, step: Step, outputs: Sequence[Tensor], cuts: Sequence[Sequence[int]], allowed: float
) -> None:
    """The step whole, and in parts at each of `cuts`, from the same state: same outputs, same caches afterwards."""
    before = _state(session, case)
    whole = session.compute(step.graph, step.inputs, outputs)
    after = _state(session, case)
    for places in cuts:
        _write(session, before)
        parts = split(step.graph, places, persistent=case.persistent, outputs=outputs)
        for part in parts:
            part.graph.validate()
        found = compute_parts(session, parts, step.inputs)
        assert set(found) == set(outputs)
        left = _state(session, case)
        for t, want in (*whole.items(), *after.items()):
            got = found[t] if t in found else left[t]
            if allowed and t.type in {F32, F16}:
                assert compare(t, want, got).nmse <= allowed, f"{t} after cuts at {places}"
            else:
                assert np.array_equal(want, got), f"{t} after cuts at {places}"
    _write(session, after)


def _trajectory(backend: Backend, case: Case, steps: Sequence[int], every: int) -> None:
    with backend.open(case) as session:
        for k, step in enumerate(case.steps[: max(steps) + 1]):
            n = len(step.graph)
            cuts: list[list[int]] = [[i] for i in range(1 + k % every, n, every)] if k in steps else []
            _check(
                session,
                case,
                step,
                _computed(step.graph),
                [*cuts, [n // 3 + k, 2 * n // 3]],
                0.0 if backend is CPU else ROUNDED,
            )


def compute_parts(session: Session, parts: Sequence[Part], inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
    """Run `parts`, the whole of one graph in order, and give what `Session.compute` of the whole would.

    Args:
        session: opened with the case of the whole graph.
        parts: as `ggml.partial.split` gives them.
        inputs: leaf of the whole graph -> its bytes.

    Returns:
        Output of the whole graph -> its packed bytes.

    Raises:
        BackendError: the backend failed.
    """
    held: dict[Tensor, Bytes] = dict(inputs)
    found: dict[Tensor, Bytes] = {}
    for part in parts:
        if not part.graph.nodes:
            continue
        fed = {
            leaf: held[root] if root in held else np.zeros(nbytes(root), np.uint8) for leaf, root in part.inputs.items()
        }
        values = session.compute(part.graph, fed, part.outputs)
        found.update((whole, values[node]) for node, whole in part.wanted.items())
        held.update((root, values[node]) for node, root in part.passed.items())
    return found


@pytest.mark.parametrize("path", CAPTURES, ids=lambda p: p.stem)
def test_captured_steps_cut_anywhere_on_the_reference(path: Path) -> None:
    """Each split point in one of the captured steps, and a cut in three in each: every node's value, to the bit."""
    (case,) = casefile.read(path)
    _trajectory(CPU, case, range(len(case.steps)), len(case.steps))


@pytest.mark.parametrize("path", CAPTURES, ids=lambda p: p.stem)
def test_captured_steps_cut_on_openvino(path: Path) -> None:
    """Every 29th split point of two steps and cuts in three, each part compiled by itself."""
    (case,) = casefile.read(path)
    _trajectory(OPENVINO, case, (0, 2), 29)


# -- random graphs ---------------------------------------------------------------------------------------------------

_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda a: B.scale(a, 0.5),
    lambda a: B.scale_inplace(a, 0.75),
    B.silu_inplace,
    B.cont,
    B.transpose,
    lambda a: B.permute(a, 2, 0, 1, 3),
    lambda a: B.reshape_1d(a, a.ne[0] * a.ne[1] * a.ne[2] * a.ne[3]),
    lambda a: B.view_2d(a, a.ne[0] // 2, a.ne[1], a.nb[1], a.ne[0] // 2 * a.nb[0]),
    lambda a: B.view_1d(a, a.ne[0] // 2, a.ne[0] // 4 * a.nb[0]),
    lambda a: B.cast(a, F16),
    lambda a: B.cast(a, F32),
    lambda a: B.rms_norm(a, 1e-5),
)
_BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (B.add, B.add_inplace, B.mul, B.mul_mat, B.cpy)


@st.composite
def _aliasing(draw: st.DrawFn) -> tuple[Case, tuple[Tensor, ...], list[int]]:
    """A graph over a cache, a weight and two inputs, full of views and of writes through them; outputs; two cuts."""
    rng = np.random.Generator(np.random.PCG64(draw(st.integers(0, 2**32))))
    cache, weight = new_tensor(F32, 8, 6, name="cache"), new_tensor(F32, 8, 4, name="w")
    x, y, ids = new_tensor(F32, 8, 4, name="x"), new_tensor(F32, 8, 4, name="y"), new_tensor(I64, 4, name="ids")
    pool, nodes = [x, y, weight, cache], list[Tensor]()
    for _ in range(draw(st.integers(2, 14))):
        a, b = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        kind = draw(st.integers(0, 9))
        try:
            if kind == 0 and a.root is not cache:
                node = B.set_rows(cache, a, ids)
            elif kind <= 4 and a.root is not b.root:
                node = draw(st.sampled_from(_BINARY))(a, b)
            else:
                node = draw(st.sampled_from(_UNARY))(a)
        except GraphError:
            continue  # what ggml refuses
        if node.root is weight and node.op not in VIEW_OPS:
            continue  # weights are not written
        node.flags |= FLAG_COMPUTE
        pool.append(node)
        nodes.append(node)
    assume(nodes)
    dead: set[Tensor] = set()
    for node in nodes:  # uncomputed at random, and with an uncomputed root whoever reads it
        roots = {s.root for s in (*node.src, node.view_src) if s is not None and s is not node}
        if roots & dead or draw(st.integers(0, 11)) == 0:
            node.flags &= ~FLAG_COMPUTE
            dead |= {node.root} if node.view_src is None else set()
    fit = [n for n in nodes if n.root not in dead]
    assume(fit)
    outputs = draw(st.lists(st.sampled_from(fit), unique=True, min_size=1, max_size=5))
    graph = Graph(nodes)
    values = {x: _floats(rng, 8, 4), y: _floats(rng, 8, 4), ids: rng.permutation(6)[:4].astype("<i8").view(np.uint8)}
    used = set(graph.tensors())
    step = Step(graph, {t: d for t, d in values.items() if t in used}, tuple(outputs))
    case = Case("random/aliasing@0", {cache: _floats(rng, 8, 6), weight: _floats(rng, 8, 4)}, [step])
    case.validate()
    cuts = draw(st.lists(st.integers(0, len(nodes)), min_size=1, max_size=2))
    return case, tuple(outputs), cuts


@settings(max_examples=400, deadline=None)
@given(made=_aliasing())
def test_random_aliasing_graphs_on_the_reference(made: tuple[Case, tuple[Tensor, ...], list[int]]) -> None:
    """Parts of a graph give the same bytes as the whole.

    Views of roots in earlier parts, writes through them across cuts, inputs written in place, nodes left
    uncomputed.
    """
    case, outputs, cuts = made
    with CPU.open(case) as session:
        _check(session, case, case.steps[0], outputs, [cuts], 0.0)


@settings(max_examples=20, deadline=None)
@given(made=_aliasing())
def test_random_aliasing_graphs_on_openvino(made: tuple[Case, tuple[Tensor, ...], list[int]]) -> None:
    """The same with each part compiled by itself."""
    case, outputs, cuts = made
    assume(all(OPENVINO.supports(case.steps[0].graph)))
    with OPENVINO.open(case) as session:
        _check(session, case, case.steps[0], outputs, [cuts], ROUNDED)


@settings(max_examples=60, deadline=None)
@given(case=random_cases(), data=st.data())
def test_random_cases_cut_anywhere(case: Case, data: st.DataObject) -> None:
    """Each step of a random case, of any bytes, at a random cut."""
    with CPU.open(case) as session:
        for step in case.steps:
            if not all(CPU.supports(step.graph)):
                continue
            cut = data.draw(st.integers(0, len(step.graph)))
            step.inputs = {t: (np.zeros_like(d) if t.type is I64 else d) for t, d in step.inputs.items()}
            _check(session, case, step, _computed(step.graph), [[cut]], 0.0)


# -- what a part is --------------------------------------------------------------------------------------------------


def _small() -> tuple[Case, dict[str, Tensor]]:
    """`r = a * w`, a view of `r` scaled in place, the cache written from `r`, the cache's middle read."""
    a, w, cache = new_tensor(F32, 8, 2, name="a"), new_tensor(F32, 8, name="w"), new_tensor(F32, 8, 6, name="cache")
    ids = new_tensor(I64, 2, name="ids")
    r = B.mul(a, w)
    v = B.view_1d(r, 8, r.nb[1])
    s = B.scale_inplace(v, 3.0)
    k = B.set_rows(cache, r, ids)
    m = B.view_2d(k, 8, 3, cache.nb[1], cache.nb[1])
    out = B.sqr(m)
    names = {"r": r, "v": v, "s": s, "k": k, "m": m, "out": out, "a": a, "w": w, "cache": cache, "ids": ids}
    for name, t in names.items():
        t.name = name
        t.flags |= FLAG_COMPUTE if t.op != "NONE" else 0
    rng = np.random.Generator(np.random.PCG64(0))
    graph = Graph([r, v, s, k, m, out])
    inputs = {a: _floats(rng, 8, 2), ids: np.array([1, 3], "<i8").view(np.uint8)}
    case = Case("test/small@0", {w: _floats(rng, 8), cache: _floats(rng, 8, 6)}, [Step(graph, inputs, (r, out))])
    case.validate()
    return case, names


def test_an_output_is_what_it_was_right_after_its_node() -> None:
    """A root that is written in place after its node ran is passed on by a VIEW at the end; the output stays early."""
    case, t = _small()
    part = partial(case.steps[0].graph, 0, 3, persistent=case.persistent, outputs=case.steps[0].outputs)
    assert [n.op for n in part.graph] == ["MUL", "VIEW", "SCALE", "VIEW"]
    assert part.wanted == {part.graph.nodes[0]: t["r"]}
    assert part.passed == {part.graph.nodes[3]: t["r"]}
    with CPU.open(case) as session:
        found = session.compute(part.graph, {x: case.steps[0].inputs[r] for x, r in part.inputs.items()}, part.outputs)
    early, late = (found[n].view(np.float32) for n in part.outputs)
    assert np.array_equal(early[:8], late[:8])
    assert np.array_equal(early[8:] * np.float32(3), late[8:])


def test_only_what_is_needed_travels() -> None:
    """Roots without later readers and persistent tensors are not passed on; unread ones are no leaves."""
    case, t = _small()
    graph = case.steps[0].graph
    last = partial(graph, 3, 6, persistent=case.persistent, outputs=[t["out"]])
    assert last.passed == {}
    assert set(last.inputs.values()) == {t["r"], t["ids"]}
    first = partial(graph, 0, 4, persistent=case.persistent, outputs=[t["out"]])
    assert first.passed == {}
    assert {s for n in first.graph for s in n.src} >= {t["w"]}
    assert {n.view_src for n in first.graph} >= {t["cache"]}


def test_what_is_not_computed_is_not_passed_on() -> None:
    """A node without FLAG_COMPUTE has no value to travel, and one that reads it asks for none."""
    case, t = _small()
    for name in ("r", "s", "k"):
        t[name].flags &= ~FLAG_COMPUTE
    graph = case.steps[0].graph
    assert partial(graph, 0, 3, persistent=case.persistent, outputs=[t["out"]]).passed == {}
    part = partial(graph, 0, 4, persistent=case.persistent, outputs=[t["out"]])
    assert [n.flags & FLAG_COMPUTE for n in part.graph] == [0, FLAG_COMPUTE, 0, 0]
    with CPU.open(case) as session:
        _check(session, case, case.steps[0], [t["out"]], [[i] for i in range(7)], 0.0)
    with OPENVINO.open(case) as session:
        _check(session, case, case.steps[0], [t["out"]], [[3], [4]], 0.0)


def test_an_output_that_shows_a_cache_is_taken_before_the_next_write() -> None:
    """A view of a cache, asked for before a later node writes there, holds what the cache held before."""
    case, t = _small()
    early = B.view_2d(t["cache"], 8, 6, t["cache"].nb[1], 0)
    early.flags |= FLAG_COMPUTE
    step = Step(Graph([early, *case.steps[0].graph]), case.steps[0].inputs, (early, t["out"]))
    whole = Case("test/early@0", case.persistent, [step])
    for backend in (CPU, OPENVINO):
        with backend.open(whole) as session:
            _check(session, whole, step, step.outputs, [[1], [4], [5]], 0.0 if backend is CPU else ROUNDED)
        with backend.open(whole) as session:
            found = session.compute(step.graph, step.inputs, step.outputs)
            assert np.array_equal(found[early], case.persistent[t["cache"]])


def test_views_of_what_an_earlier_part_wrote_are_built_again() -> None:
    """A view chain that goes through a node of an earlier part ends at the root itself."""
    case, t = _small()
    part = partial(case.steps[0].graph, 5, 6, persistent=case.persistent, outputs=[t["out"]])
    view, node = part.graph.nodes
    assert (view.op, view.src, view.view_src, view.view_offs) == ("VIEW", (t["cache"],), t["cache"], t["m"].view_offs)
    assert node.src == (view,)
    assert part.inputs == {}


def test_the_mappings_lead_both_ways() -> None:
    """Every node of the run has its copy and every copy its original, with the same words in all but the edges."""
    case, _ = _small()
    graph = case.steps[0].graph
    for first in range(len(graph)):
        part = partial(graph, first, len(graph), persistent=case.persistent, outputs=case.steps[0].outputs)
        for node in graph.nodes[first:]:
            copy = part.copies[node]
            assert [t for t, c in part.copies.items() if c is copy] == [node]
            assert copy is not node
            for f in ("type", "ne", "nb", "op", "op_params", "view_offs", "flags", "name"):
                assert getattr(copy, f) == getattr(node, f)


def test_the_whole_graph_is_left_as_it_was() -> None:
    """Making parts changes no tensor of the graph they come from."""
    case, _ = _small()
    graph = case.steps[0].graph
    before = [(n, n.src, n.view_src, n.flags) for n in graph]
    split(graph, range(len(graph)), persistent=case.persistent, outputs=case.steps[0].outputs)
    assert [(n, n.src, n.view_src, n.flags) for n in graph] == before


def test_quantised_values_travel_as_their_blocks() -> None:
    """A root of a block type that one part writes and the next reads travels to the bit."""
    a = new_tensor(F32, 32, 2, name="a")
    q = B.cast(a, Q8_0)
    out = B.get_rows(q, ids := new_tensor(I32, 1, name="ids"))
    graph = B.build_forward_expand(out)
    rng = np.random.Generator(np.random.PCG64(3))
    inputs = {a: _floats(rng, 32, 2), ids: np.array([1], "<i4").view(np.uint8)}
    case = Case("test/q@0", {}, [Step(graph, inputs, (out,))])
    with CPU.open(case) as session:
        _check(session, case, case.steps[0], (q, out), [[1]], 0.0)
    part = partial(graph, 1, 2, outputs=(out,))
    assert {t.type: nbytes(t) for t in part.inputs} == {Q8_0: 68, I32: 4}


def test_a_leaf_among_the_nodes_keeps_its_bytes_and_its_flags() -> None:
    """A parameter stands among the nodes: in each part it is a leaf that is fed, or the persistent tensor itself."""
    a, grad, params = new_tensor(F32, 8, 2, name="a"), new_tensor(F32, 8, 2, name="g"), new_tensor(F32, 2, name="p")
    B.set_param(a)
    step = B.opt_step_sgd(a, grad, params)
    graph = B.build_forward_expand(B.sqr(grad), step)
    assert a in graph.nodes
    rng = np.random.Generator(np.random.PCG64(5))
    values = {a: _floats(rng, 8, 2), grad: _floats(rng, 8, 2), params: _floats(rng, 2)}
    for kept in ({}, {a: values[a]}):
        inputs = {t: data for t, data in values.items() if t not in kept}
        case = Case("test/param@0", kept, [Step(graph, inputs, (step,))])
        case.validate()
        parts = split(graph, range(len(graph)), persistent=kept, outputs=(step,))
        assert {t.flags for part in parts for t, whole in part.copies.items() if whole is a} <= {a.flags}
        with CPU.open(case) as session:
            _check(session, case, case.steps[0], (step,), [[i] for i in range(len(graph))], 0.0)


def test_what_an_op_writes_beside_its_result_travels() -> None:
    """AdamW changes its moments: a later part reads them as they then are."""
    a, grad, m, v = (new_tensor(F32, 8, 2, name=name) for name in ("a", "g", "m", "v"))
    hyper = new_tensor(F32, 7, name="hyper")
    B.set_param(a)
    step = B.opt_step_adamw(a, grad, m, v, hyper)
    seen = (B.scale(m, 2.0), B.scale(v, 2.0))
    graph = B.build_forward_expand(step, *seen)
    rng = np.random.Generator(np.random.PCG64(6))
    values = {t: np.abs(_floats(rng, *t.ne).view(np.float32)).view(np.uint8) for t in (a, grad, m, v, hyper)}
    case = Case("test/moments@0", {}, [Step(graph, values, (step, *seen))])
    case.validate()
    with CPU.open(case) as session:
        _check(session, case, case.steps[0], (step, *seen), [[i] for i in range(len(graph))], 0.0)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 1), (0, 99)])
def test_a_run_of_nodes_that_is_none_is_refused(first: int, last: int) -> None:
    """Indices outside the graph, or in the wrong order, are an error that says what was expected."""
    case, _ = _small()
    with pytest.raises(GraphError, match="0 <= first <= last <= 6 expected"):
        partial(case.steps[0].graph, first, last)


def test_an_empty_run_is_an_empty_part() -> None:
    """Cutting at the ends, or twice at one place, adds nothing."""
    case, _ = _small()
    part = partial(case.steps[0].graph, 2, 2)
    assert (part.graph.nodes, part.inputs, part.outputs) == ([], {}, ())
    assert len(split(case.steps[0].graph, [0, 2, 2, 6])) == 2
