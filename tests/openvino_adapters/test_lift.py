"""Templates and symbols: what two cgraphs of a trajectory have in common, and what tells them apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from growing_graphs import Decoder, Streams
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import random_cases

from backends.openvino.translating.engine import Fingerprint
from backends.openvino.translating.plan import Plan, Role
from backends.openvino.translating.template import (
    Sample,
    Sym,
    Template,
    assumptions,
    copied,
    evaluate,
    expr_of,
    same,
    sample_of,
    template_of,
)
from conformance.case.case import Case
from conformance.case.casefile import read_one
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor, nelements, new_tensor
from conformance.ggml.types import F16, F32, I32, I64
from conformance.llama.captured import GOLDEN

B = Builder()
FIELDS = ("type", "ne", "nb", "op", "op_params", "view_offs", "flags")


def described(g: Graph) -> list[tuple[object, ...]]:
    """Every field of every tensor but its name; edges as places."""
    tensors = g.tensors()
    index: dict[Tensor | None, int] = {t: i for i, t in enumerate(tensors)}
    index[None] = -1
    made = set(g.nodes)
    return [
        (*(getattr(t, f) for f in FIELDS), [index[s] for s in t.src], index[t.view_src], t in made) for t in tensors
    ]


def template_key(
    tensors: list[Tensor], roles: dict[Tensor, Role], digests: dict[Tensor, bytes], outputs: list[Tensor], g: Graph
) -> object:
    """The key of the template of `g`, planned with these roles, digests of weights and outputs."""
    index = {t: i for i, t in enumerate(tensors)}
    key = (tuple((roles.get(t), digests.get(t)) for t in tensors), tuple(index[t] for t in outputs))
    return Fingerprint.of(Plan(g, tensors, index, roles, tuple(outputs), key)).template


def key(g: Graph) -> object:
    """The template key without roles, digests and outputs."""
    return template_key(g.tensors(), {}, {}, g.nodes[-1:], g)


def sample(g: Graph) -> Sample:
    """`g` as an instance of its template."""
    return sample_of(g.tensors(), g.nodes)


def bind(template: Template, g: Graph) -> tuple[int, ...] | None:
    """The symbols' values in `g`; None if it is not an instance, by structure or numbers."""
    symbolic = template.graph(template.generic)
    if sample(symbolic).structure != sample(g).structure:
        return None
    return template.bind(sample(g).numbers)


def traced(template: Template, g: Graph) -> Graph:
    """The symbolic graph with the numbers of `g`."""
    bindings = bind(template, g)
    assert bindings is not None
    return template.graph(bindings)


def refined(graphs: list[Graph], g: Graph) -> Template:
    """The template of one more graph, which is added to `graphs`."""
    graphs.append(g)
    return template_of(graphs, own_inputs(graphs[0]))


def own_inputs(g: Graph) -> list[Tensor]:
    """Leaves flagged as inputs."""
    return [t for t in g.leafs() if t.flags & 1]


# -- captured trajectories ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama-fa-1seq", "llama-fa-4seq-streams"])
def capture(request: pytest.FixtureRequest) -> Case:
    """A trajectory of llama.cpp."""
    return read_one(GOLDEN / f"{request.param}.gguf")


def test_all_decode_steps_of_a_capture_bind_to_a_template_of_any_two(capture: Case) -> None:
    """Lifted from two decode steps, whether or not n_kv grew between them, a template binds every decode step."""
    graphs = [s.graph for s in capture.steps]
    decode = range(1, len(graphs))
    for k, j in [(1, 2), (1, len(graphs) - 1), (1, min(8, len(graphs) - 1))]:
        template = template_of([graphs[k], graphs[j]], list(capture.steps[k].inputs))
        assert all(_is_instance(template, graphs[i]) for i in decode), (k, j)
        assert bind(template, graphs[0]) is None


def test_prefill_and_decode_are_two_templates(capture: Case) -> None:
    """An extent that is 1 here and more there is a difference of kind; extents above 1 are not."""
    keys = {key(s.graph) for s in capture.steps}
    assert len(keys) == 2


def test_a_lifted_prefill_has_symbols_for_tokens_and_cache_but_not_for_the_model(capture: Case) -> None:
    """Every extent of an input above 1 is a symbol, less those that a rule ties to the model's own sizes."""
    step = capture.steps[0]
    template = template_of([step.graph], list(step.inputs))
    place = {t: i for i, t in enumerate(step.graph.tensors())}
    symbolic = traced(template, step.graph).tensors()
    for t in step.inputs:
        free = [d for d in range(4) if isinstance(symbolic[place[t]].ne[d], Sym)]
        wanted = [d for d in range(4) if t.ne[d] > 1]
        if t.name == "inp_mixed_embd":
            wanted = [1]
        if t.name == "attn_inp_kq_mask":
            wanted = [d for d in wanted if d != 3]  # all streams of the cache
        assert free == wanted, t
    for t, c in zip(step.graph.tensors(), symbolic, strict=True):
        if t in capture.persistent:
            assert not any(isinstance(n, Sym) for n in (*c.ne, *c.nb))


def _is_instance(template: Template, g: Graph) -> bool:
    """Whether `g` binds; and if so, that it comes back field by field, and traced with the same numbers."""
    bindings = bind(template, g)
    if bindings is None:
        return False
    assert tuple(evaluate(e, bindings) for e in template.number_exprs) == sample(g).numbers
    assert described(copied(g)) == described(g)
    symbolic = traced(template, g)
    assert described(symbolic) == described(g)
    row = sample(symbolic).numbers
    assert all(evaluate(expr_of(n), bindings) == n for n in row)
    return True


# -- synthetic trajectories --------------------------------------------------------------------------------------------


SHAPES = [
    # the last three: a head of 256 as n_kv at first, n_tokens as heads, and as the size of a head
    (64, 4, 2), (32, 8, 8), (256, 2, 1), (16, 8, 4), (8, 4, 4),
]  # fmt: skip


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_with_moving_cache_writes_takes_one_template_from_0_to_4096(
    shape: tuple[int, int, int], v_trans: bool, flat: bool
) -> None:
    """Lifted at the first mismatch (step 1, or past step 256), one template binds every later step to 4,096."""
    d = Decoder(*shape, 4096, v_trans=v_trans, flat=flat)
    for first, second in ((0, 1), (5, 6), (10, 300), (255, 256)):
        g = d.graph(first)
        template = template_of([g, d.graph(second)], own_inputs(g))
        assert key(g) == key(d.graph(second))
        for n_past in (0, 1, 2, 7, 63, 64, 255, 256, 511, 512, 1000, 2047, 2048, 4000, 4094, 4095):
            assert _is_instance(template, d.graph(n_past)), (first, second, n_past)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_of_any_length_binds_after_the_first_mismatch(shape: tuple[int, int, int], v_trans: bool) -> None:
    """Lifted from two prefills, one template binds chunks of other lengths at other places of the cache."""
    d = Decoder(*shape, 4096, v_trans=v_trans, flat=False)
    for first, second in (((0, 8), (8, 8)), ((0, 8), (8, 5)), ((0, 512), (512, 512)), ((0, 512), (0, 100))):
        g = d.graph(*first)
        graphs = [g]
        template = refined(graphs, d.graph(*second))
        for n_past, n in ((0, 8), (8, 8), (16, 3), (19, 500), (519, 2), (0, 64), (1000, 16), (3000, 1096), (0, 4096)):
            other = d.graph(n_past, n)
            if bind(template, other) is None:
                template = refined(graphs, other)
            assert _is_instance(template, other), (first, second, n_past, n)
        assert len(graphs) <= 3, (first, second)
        assert _is_instance(template, g)


@pytest.mark.parametrize("shape", [(64, 4, 2), (32, 8, 8), (256, 2, 1), (8, 4, 4)])
def test_streams_that_join_and_leave_take_one_template(shape: tuple[int, int, int]) -> None:
    """Any number of streams above 1, first stream, n_kv and chunk: one template for decode, one for prefill."""
    d = Streams(*shape, n_ctx=1024, n_stream=8)
    for first, second, others in (
        ((256, 1, 0, 4, 4), (256, 1, 1, 3, 3), [(256, 1, 0, 2, 2), (512, 1, 3, 5, 5), (1024, 1, 0, 8, 8)]),
        ((256, 8, 0, 4, 4), (256, 60, 4, 2, 2), [(512, 8, 2, 2, 16), (1024, 33, 0, 8, 8), (256, 2, 3, 4, 2)]),
    ):
        g = d.graph(*first)
        graphs = [g]
        template = refined(graphs, d.graph(*second))
        for at in (first, second, *others):
            if bind(template, d.graph(*at)) is None:
                template = refined(graphs, d.graph(*at))
            assert _is_instance(template, d.graph(*at)), at
        assert len(graphs) <= 3


def test_a_coincidence_in_the_first_samples_is_found_out_by_a_third() -> None:
    """Two inputs of one length in two graphs share a symbol; the first graph where they differ tells them apart."""

    def graph(n: int, m: int) -> Graph:
        a, b = new_tensor(F32, n, 2, flags=1), new_tensor(F32, m, 2, flags=1)
        return B.build_forward_expand(B.scale(a, 2.0), B.scale(b, 3.0))

    g = graph(4, 4)
    template = template_of([g, graph(6, 6)], own_inputs(g))
    assert len(template.symbols) == 3  # one of both lengths, one of each number of rows
    assert bind(template, graph(4, 6)) is None
    template = template_of([g, graph(6, 6), graph(4, 6)], own_inputs(g))
    for n, m in itertools.product((2, 3, 9), repeat=2):
        assert _is_instance(template, graph(n, m))


def test_views_of_views_add_up_their_offsets() -> None:
    """The offset of a view in its root is its own plus its parent's, each in strides of what it is a view of."""
    root = new_tensor(F32, 8, 64, 4)

    def graph(stream: int, row: int, n: int) -> Graph:
        outer = B.view_2d(root, 8, 64, root.nb[1], stream * root.nb[2])
        inner = B.view_2d(outer, 4, n, outer.nb[1], row * outer.nb[1] + 16)
        return B.build_forward_expand(B.scale(inner, 2.0))

    g = graph(0, 1, 2)
    template = template_of([g, graph(1, 5, 3)], ())
    assert len(template.symbols) == 3
    for at in ((0, 0, 2), (3, 60, 4), (2, 2, 62)):
        assert _is_instance(template, graph(*at))
    inner = traced(template, g).tensors()[2]
    assert same(inner.view_offs % inner.nb[1], 16)


def test_a_part_that_happens_to_be_the_whole_is_not_what_a_program_is_made_from() -> None:
    """At n_kv == n_ctx the view of a cache is contiguous by chance; the other sample is traced."""
    d = Decoder(16, 4, 4, 512, v_trans=True, flat=False)
    g = d.graph(300)
    template = template_of([g, d.graph(7)], own_inputs(g))
    view = next(t for t in template.graph(template.generic).tensors() if t.op == "VIEW" and t.ne[1] == 16)
    assert view.ne[0] == 256
    assert not template.guards
    assert _is_instance(template, g)


def test_guards_hold_later_graphs_to_what_a_walk_decided() -> None:
    """A template held to an assumption binds only graphs in which it holds."""
    d = Decoder(16, 4, 4, 1024, v_trans=False, flat=False)
    g = d.graph(0)
    template = template_of([g, d.graph(300)], own_inputs(g))
    view = next(t for t in traced(template, g).tensors() if t.op == "VIEW" and t.ne[1] == 256)
    with assumptions() as found:
        assert view.ne[1] < 600
    held = template.guarded(found)
    assert bind(held, d.graph(300)) == bind(template, d.graph(300))
    assert bind(held, d.graph(700)) is None
    assert bind(template, d.graph(700)) is not None


def test_sizes_that_rules_tie_together_share_a_symbol() -> None:
    """Tokens, positions and what follows from both have one symbol, though no two graphs told them apart."""
    x, pos, free = new_tensor(F32, 8, 2, 6, flags=1), new_tensor(I32, 6, flags=1), new_tensor(F32, 6, flags=1)
    root = new_tensor(F32, 64)
    g = B.build_forward_expand(B.rope(x, pos, 8, 0), B.scale(free, 2.0), B.scale(B.view_1d(root, 12, 0), 2.0))
    template = template_of([g], (x, pos, free))
    assert [t.ne[0] for t in template.tensors if t.op == "NONE"] == [8, 6, 6, 64]
    tied, also, other = (template.tensors[g.tensors().index(t)].ne for t in (x, pos, free))
    assert same(tied[2], also[0])
    assert not same(tied[2], other[0])


def test_a_multiple_of_a_symbol_is_none_of_its_own() -> None:
    """The extent of a view that grows in proportion to an input follows from it."""
    root = new_tensor(F32, 64)

    def graph(n: int) -> Graph:
        return B.build_forward_expand(B.scale(new_tensor(F32, n, flags=1), 2.0), B.cont(B.view_1d(root, 3 * n, 0)))

    g = graph(2)
    template = template_of([g, graph(5)], own_inputs(g))
    assert len(template.symbols) == 1
    assert _is_instance(template, graph(20))


def test_offsets_beyond_32_bits_come_back() -> None:
    """A VIEW's offset takes two of its `op_params`."""
    root = new_tensor(F32, 2**20, 2**12)
    graphs = [B.build_forward_expand(B.cont(B.view_1d(root, 8, k * root.nb[1]))) for k in (1, 1500, 4095)]
    template = template_of(graphs[:2], ())
    assert all(_is_instance(template, g) for g in graphs)
    assert bind(template, graphs[2]) == (4095,)


def test_strides_in_another_order_are_another_template() -> None:
    """Whether a view is permuted is a matter of kind."""
    root = new_tensor(F32, 8, 8, 8)

    def graph(nb1: int, nb2: int) -> Graph:
        return B.build_forward_expand(B.cont(B.view_3d(root, 8, 4, 4, nb1, nb2, 0)))

    assert key(graph(32, 256)) == key(graph(64, 256))
    assert key(graph(32, 256)) != key(graph(256, 32))


def test_graphs_of_two_templates_cannot_be_lifted_together() -> None:
    """What differs in kind is said so."""
    d = Decoder(16, 4, 4, 1024, v_trans=False, flat=False)
    with pytest.raises(UsageError, match="one template"):
        template_of([d.graph(0), d.graph(0, 2)], ())


# -- random graphs -----------------------------------------------------------------------------------------------------

_OPS: tuple[Callable[[Tensor, Tensor, int], Tensor], ...] = (
    lambda a, b, _: B.add(a, b),
    lambda a, b, _: B.mul_mat(a, b),
    lambda a, *_: B.view_2d(a, a.ne[0] // 2, a.ne[1], a.nb[1], a.ne[0] // 2 * a.nb[0]),
    lambda a, _, n: B.view_3d(a, a.ne[0], n, a.ne[2], a.nb[1], a.nb[2], 0),
    lambda a, _, n: B.view_1d(a, a.ne[0] * n, n * a.nb[1]),
    lambda a, *_: B.transpose(a),
    lambda a, *_: B.permute(a, 2, 0, 1, 3),
    lambda a, *_: B.cont(a),
    lambda a, *_: B.cont_2d(a, a.ne[0], a.ne[1] * a.ne[2] * a.ne[3]),
    lambda a, *_: B.reshape_1d(a, nelements(a)),
    lambda a, *_: B.reshape_3d(a, 2, a.ne[0] // 2, nelements(a) // (a.ne[0] // 2 * 2)),
    lambda a, b, _: B.cpy(a, b),
    lambda a, *_: B.cast(a, F16),
    lambda a, *_: B.silu_inplace(a),
    lambda a, *_: B.rms_norm(a, 1e-5),
    lambda a, _, n: B.repeat_4d(a, a.ne[0], a.ne[1] * n, a.ne[2], a.ne[3]),
    lambda a, b, _: B.concat(a, b, 1),
    lambda a, *_: B.soft_max(a),
    lambda a, *_: B.swiglu(a),
    lambda a, _, n: B.top_k(a, min(n, a.ne[0])),
    lambda a, *_: B.pad(a, 1, 2, 0, 0),
    lambda a, *_: B.sum_rows(a),
)


def _build(program: list[tuple[int, int, int]], weight: Tensor, n: int, m: int) -> Graph | None:
    x, y = new_tensor(F32, 8, n, m, flags=1), new_tensor(F32, 8, n, flags=1)
    pool = [x, y, weight]
    for op, i, j in program:
        try:
            pool.append(_OPS[op](pool[i % len(pool)], pool[j % len(pool)], n))
        except (GraphError, ZeroDivisionError):
            continue
    g = B.build_forward_expand(*[t for t in pool if t.op != "NONE"][-3:])
    try:
        g.validate()
    except GraphError:
        return None
    return g if g.nodes else None


_programs = st.lists(
    st.tuples(st.integers(0, len(_OPS) - 1), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=7
)
_sizes = st.tuples(st.integers(2, 7), st.integers(2, 5))


@settings(max_examples=150)
@given(_programs, st.lists(_sizes, min_size=1, max_size=4))
def test_a_graph_that_binds_comes_back_field_by_field(
    program: list[tuple[int, int, int]], sizes: list[tuple[int, int]]
) -> None:
    """Random programs at several sizes: each graph a template was lifted or refined from binds and comes back.

    A graph that only bound need not bind once the template is refined: k of TOP_K is a least of two extents, and one of
    two samples may tie it to a third.
    """
    weight = new_tensor(F32, 8, 4)
    template = None
    samples: list[Graph] = []
    for size in sizes:
        g = _build(program, weight, *size)
        if g is None:
            continue
        if template is None:
            template = template_of([g], own_inputs(g))
            samples.append(g)
        elif sample(g).structure != sample(samples[0]).structure:
            assert bind(template, g) is None
            continue
        elif bind(template, g) is None:
            template = refined(samples, g)
        assert all(_is_instance(template, s) for s in (*samples, g))


@settings(max_examples=40)
@given(random_cases())
def test_graphs_of_any_types_come_back_too(case: Case) -> None:
    """Random cases with weights of every type: lifted with and without its inputs, each graph is its own instance."""
    for step in case.steps:
        assert _is_instance(template_of([step.graph], ()), step.graph)
        assert _is_instance(template_of([step.graph], list(step.inputs)), step.graph)


# -- what a template covers --------------------------------------------------------------------------------------------


def _changes(t: Tensor, others: list[Tensor]) -> Iterator[tuple[str, object]]:
    """Every field of `t` but its name, with another value."""
    yield "type", F16 if t.type is not F16 else I64
    yield "op", "SQR" if t.op != "SQR" else "SQRT"
    yield "flags", t.flags ^ FLAG_COMPUTE
    yield "view_offs", t.view_offs + 4
    for k in range(4):
        yield "ne", (*t.ne[:k], t.ne[k] + 1, *t.ne[k + 1 :])
        yield "nb", (*t.nb[:k], t.nb[k] + 4, *t.nb[k + 1 :])
    for k in (0, 1, 2, 15):
        yield "op_params", (*t.op_params[:k], t.op_params[k] ^ 1, *t.op_params[k + 1 :])
    for other in others[:1]:
        yield "view_src", other if t.view_src is not other else None
        for k in range(len(t.src)):
            if t.src[k] is not other:
                yield "src", (*t.src[:k], other, *t.src[k + 1 :])
    yield "src", (*t.src, None)


def _assert_every_change_shows(g: Graph, template: Template) -> None:
    """Change each field of each tensor alone: another key, or other bindings, or none."""
    row, before = bind(template, g), key(g)
    assert row is not None
    tensors = g.tensors()
    for i, t in enumerate(tensors):
        for name, value in _changes(t, tensors[:i]):
            old = getattr(t, name)
            setattr(t, name, value)
            try:
                if g.tensors() == tensors:
                    assert key(g) != before or bind(template, g) != row, (t, name, value)
            finally:
                setattr(t, name, old)


def test_every_changed_field_of_a_decoder_shows() -> None:
    """Over a decoder with moving views: no field of any tensor goes unseen."""
    d = Decoder(16, 4, 2, 512, v_trans=True, flat=False)
    g = d.graph(5, 3)
    _assert_every_change_shows(g, template_of([g, d.graph(300, 7)], own_inputs(g)))


@settings(max_examples=40)
@given(_programs, _sizes, _sizes)
def test_every_changed_field_of_a_random_graph_shows(
    program: list[tuple[int, int, int]], size: tuple[int, int], other: tuple[int, int]
) -> None:
    """Over random programs: no field of any tensor goes unseen."""
    weight = new_tensor(F32, 8, 4)
    g, h = _build(program, weight, *size), _build(program, weight, *other)
    if g is None or h is None:
        return
    graphs = [g, h] if sample(g).structure == sample(h).structure else [g]
    _assert_every_change_shows(g, template_of(graphs, own_inputs(g)))


def test_roles_digests_and_outputs_are_part_of_the_key(capture: Case) -> None:
    """A leaf of another role, a weight of other bytes, another wanted output: another template."""
    g = capture.steps[1].graph
    tensors = g.tensors()
    leaf = g.leafs()[0]
    roles: dict[Tensor, Role] = dict.fromkeys(g.leafs(), "weight")
    digests = dict.fromkeys(g.leafs(), b"0")
    outputs = g.nodes[-1:]
    before = template_key(tensors, roles, digests, outputs, g)
    assert before == template_key(tensors, dict(roles), dict(digests), list(outputs), g)
    others = [
        template_key(tensors, {**roles, leaf: "input"}, digests, outputs, g),
        template_key(tensors, roles, {**digests, leaf: b"1"}, outputs, g),
        template_key(tensors, roles, digests, g.nodes[-2:-1], g),
        template_key(tensors, roles, digests, g.nodes[-2:], g),
        template_key(tensors, roles, digests, outputs, Graph(g.nodes[:-1])),
    ]
    assert before not in others


def test_names_mean_nothing(capture: Case) -> None:
    """Renaming every tensor changes neither key nor binding."""
    g, h = capture.steps[1].graph, copied(capture.steps[1].graph)
    template = template_of([g], list(capture.steps[1].inputs))
    for k, t in enumerate(h.tensors()):
        t.name = f"cache_k_l{k}"
    assert key(h) == key(g)
    assert bind(template, h) == bind(template, g)
    for t in h.tensors():
        t.name = "same"
    assert key(h) == key(g)
    assert bind(template, h) == bind(template, g)
