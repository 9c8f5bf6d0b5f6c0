"""A graph as a table and as a drawing: everything is there, nothing of a stranger's runs or breaks the page."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from random_cases import random_cases, small_case

from conformance.case.case import Case
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS, params_text
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor, new_tensor
from conformance.ggml.types import F32
from conformance.llama.captured import FAMILY
from conformance.report.graphview import layout, svg, table

B = Builder()
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def decoder() -> Graph:
    """A decode step of llama.cpp: 105 tensors."""
    return FAMILY.build("captured/llama-fa-1seq@0").steps[7].graph


def test_table_says_it_all(decoder: Graph) -> None:
    """One line per tensor with its number, shape, op, name, strides where not contiguous, sources and parameters."""
    lines = table(decoder).splitlines()
    assert len(lines) == 2 + len(decoder.tensors()) + 1
    row = next(line for line in lines if "PERMUTE" in line and "cache_k_l0" in line)
    assert re.search(r"\[32,512,2,1\] +PERMUTE +cache_k_l0 \(view\) \(permuted\) +f16 +\[2,128,64,65536\]", row)
    assert "axes=0,2,1,3" in row
    attention = next(line for line in lines if "FLASH_ATTN_EXT" in line)
    assert "scale=0.1767767" in attention
    assert "prec=f32" in attention
    assert any(re.search(r"ROPE .* n_dims=32 .*freq_base=10000 freq_scale=1", line) for line in lines)
    assert any("not computed" in line for line in lines)
    assert lines[-1].startswith("34 leaves, 71 nodes: 15 MUL_MAT")


def test_offsets_and_absent_sources_are_shown() -> None:
    """`view_offs` stands behind the sources, an absent source as a dash, a leaf's op in brackets."""
    a = new_tensor(F32, 8, 2, name="a")
    view = B.view_2d(a, 4, 2, a.nb[1], 16)
    node = Tensor(F32, (4, 2, 1, 1), (4, 16, 32, 32), "SOFT_MAX", src=(view, None), flags=FLAG_COMPUTE)
    text = table(Graph([view, node]))
    assert "0 @16" in text
    assert "1,–" in text
    assert "(none)" in text


def test_every_op_with_params_is_known() -> None:
    """Each declared op shows its op_params by name; an op that is not declared by position."""
    for op, declared in DECLARATIONS.items():
        t = Tensor(F32, (1, 1, 1, 1), (4, 4, 4, 4), op, tuple(range(1, 17)))
        for f in declared.fields:
            assert op == "VIEW" or not f.name or f.text(t.op_params) in params_text(t)
    t = Tensor(F32, (1, 1, 1, 1), (4, 4, 4, 4), "PAD", (0, 0, 5, *(0,) * 13))
    assert params_text(t) == "padding=0,0,5,0,0,0,0,0"
    assert params_text(replace(t, op="FLASH_ATTN_BACK")) == "[2]=5"


def test_drawing_is_whole(decoder: Graph) -> None:
    """A box for every node, one per reader for every leaf, an edge for every source; boxes do not touch each other."""
    root = ET.fromstring(svg(decoder))  # noqa: S314  # our own text
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    numbers = [int(t[1:].split()[0]) for t in titles]
    readers = dict.fromkeys(range(len(decoder.tensors())), 0)
    index = {t: i for i, t in enumerate(decoder.tensors())}
    nodes = set(decoder.nodes)
    for n in decoder:
        for s in {s for s in n.src if s is not None}:
            readers[index[s]] += 1
    for t, i in index.items():
        assert numbers.count(i) == (1 if t in nodes else readers[i]), t
    edges = [e for e in root.iter(f"{SVG}path") if e.get("class") == "e"]
    assert len(edges) == sum(len({s for s in n.src if s is not None}) for n in decoder)
    boxes = [
        tuple(float(r.get(k, "0")) for k in ("x", "y", "width", "height"))
        for g in root.iter(f"{SVG}g")
        for r in g.iter(f"{SVG}rect")
    ]
    assert len(boxes) == len(titles)
    for i, (x, y, w, h) in enumerate(boxes):
        assert 0 <= x <= float(root.get("width", "0")) - w
        assert 0 <= y <= float(root.get("height", "0")) - h
        for x2, y2, w2, h2 in boxes[:i]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_names_cannot_break_the_page() -> None:
    """Markup, quotes and control characters in a name are text; there is no script and nothing is loaded."""
    a = new_tensor(F32, 4, name="</title><script>alert('1')</script>")
    b = new_tensor(F32, 4, name='"&\x00\x1b\x0b\ufffe\ud800')
    graph = Graph([Tensor(F32, a.ne, a.nb, "ADD", src=(a, b), flags=FLAG_COMPUTE, name="<b>\n")])
    text = svg(graph)
    text.encode()
    root = ET.fromstring(text)  # noqa: S314  # our own text
    assert not list(root.iter(f"{SVG}script"))
    assert "alert" in "".join(t.text or "" for t in root.iter(f"{SVG}title"))
    assert "href" not in text
    assert text.count("http") == 1  # the name space
    assert all(line.isprintable() for line in table(graph).splitlines())


@given(random_cases())
@settings(max_examples=25, deadline=None)
def test_any_graph_can_be_shown(case: Case) -> None:
    """Whatever is a legal graph has a table and a drawing that parses; the same graph gives the same text."""
    for step in case.steps:
        assert len(table(step.graph).splitlines()) >= 3 + len(step.graph)
        text = svg(step.graph)
        ET.fromstring(text)  # noqa: S314  # our own text
        assert text == svg(step.graph)


def test_empty_graph() -> None:
    """A graph without nodes is shown as such."""
    assert "0 leaves, 0 nodes" in table(Graph([]))
    ET.fromstring(svg(Graph([])))  # noqa: S314  # our own text


def test_kinds_have_their_colours() -> None:
    """Weights, caches, inputs, views, nodes and in-place nodes each have a colour of the legend."""
    root = ET.fromstring(svg(small_case().steps[0].graph))  # noqa: S314  # our own text
    fills = {}
    for g in root.iter(f"{SVG}g"):
        title, rect = g.find(f"{SVG}title"), g.find(f"{SVG}rect")
        assert title is not None
        assert rect is not None
        fills[(title.text or "").splitlines()[0].split(" ", 1)[1]] = rect.get("fill")
    words = ["NONE blk.0.attn_k.weight", "NONE cache_k_l0", "NONE x", "MUL_MAT node_0", "SCALE out"]
    assert all(w in fills for w in words)
    assert len({fills[w] for w in words[:4]}) == 4
    assert fills["SCALE out"] == fills["MUL_MAT node_0"]
    assert len(set(fills.values())) == 6


def test_layout_puts_edges_downwards() -> None:
    """Every edge goes to a lower layer, through a bend in each layer between; parts without an edge stand apart."""
    edges = [(0, 2), (1, 2), (2, 3), (0, 5), (3, 5), (4, 5), (6, 7)]
    parts = layout(9, edges)
    assert [sorted(i for layer in p.layers for i in layer if i >= 0) for p in parts] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7],
        [8],
    ]
    for part in parts:
        place = {i: k for k, layer in enumerate(part.layers) for i in layer}
        for chain in part.chains.values():
            assert [place[i] for i in chain] == list(range(place[chain[0]], place[chain[-1]] + 1))
        assert min(part.x.values()) == 0
    assert {e for p in parts for e in p.chains} == set(edges)
