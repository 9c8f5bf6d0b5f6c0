"""A case and its document are the same thing; whatever else a document says is one error that names the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from random_cases import assert_same, random_cases, small_case

from conformance.case.case import JSON, Case, Step
from conformance.case.codec import dump, dump_graph, load, load_graph
from conformance.ggml.errors import CaseFileError, GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, Bytes, Tensor, new_tensor
from conformance.ggml.types import F32

_STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**200, 1.5, "", "x", "\ud800", [], [None], [-1], [1.0], [2**64], [0] * 20, {}),
    {"persistent": 0},
    {"\ud800": 1},
)


@given(random_cases())
@settings(max_examples=60, deadline=None)
def test_round_trip(case: Case) -> None:
    """Through its document, as text, a case comes back equal in every field, and its tensors as shared as before."""
    doc, blobs = dump(case)
    back = load(json.loads(json.dumps(doc)), blobs)
    assert_same(case, back)
    assert dump(back)[0] == doc


@given(random_cases())
@settings(max_examples=10, deadline=None)
def test_persistent_tensors_are_one_object(case: Case) -> None:
    """A weight or cache is the same object in every step that uses it, and one of the case's persistent tensors."""
    back = load(*dump(case), validate=False)
    names = {"cache_k_l0"}
    found = {t for s in back.steps for t in s.graph.tensors() if t.name in names and t.op == "NONE"}
    assert found <= back.persistent.keys()
    assert len(found) == 1


def test_document_leaves_out_defaults() -> None:
    """A contiguous leaf is its type and shape; trailing ones and zeros, and all that is as usual, are not said."""
    t = new_tensor(F32, 8, 2, 1, 1)
    doc, _ = dump(Case("a/b@0", {t: np.zeros(64, np.uint8)}, []))
    assert doc == {"version": 1, "id": "a/b@0", "persistent": [{"type": "f32", "ne": [8, 2]}], "steps": []}


def test_order_of_dicts_does_not_show() -> None:
    """Two equal cases whose inputs and expected values were filled in another order have the same document."""
    case = small_case()
    turned = Case(
        case.id,
        case.persistent,
        [Step(s.graph, _turned(s.inputs), s.outputs, _turned(s.expected), s.note) for s in case.steps],
        **{
            f: getattr(case, f) for f in ("family", "params", "seed", "generator", "tolerance", "provenance", "demands")
        },
    )
    assert [json.dumps(dump(c)[0]) for c in (case, case)] == [json.dumps(dump(turned)[0])] * 2
    assert list(dump(case)[1]) == list(dump(turned)[1])


def _turned(values: dict[Tensor, Any]) -> dict[Tensor, Any]:
    return dict(reversed(values.items()))


def test_nodes_that_are_not_the_usual_ones() -> None:
    """A NONE tensor in the list of nodes, a view that is a leaf, and nodes in an order of their own come back so."""
    a = new_tensor(F32, 4, name="a")
    view = Tensor(F32, (2, 1, 1, 1), (4, 8, 8, 8), view_src=a, view_offs=8, name="leaf view")
    b = Tensor(F32, (2, 1, 1, 1), (4, 8, 8, 8), "SQR", src=(view, None), flags=FLAG_COMPUTE)
    c = Tensor(F32, (4, 1, 1, 1), (4, 16, 16, 16), "SQR", src=(a,), flags=FLAG_COMPUTE)
    graph = Graph([a, b, c])
    back = load_graph(json.loads(json.dumps(dump_graph(graph))))
    assert [n.op for n in back] == ["NONE", "SQR", "SQR"]
    assert back.nodes[0] is back.nodes[2].src[0]
    assert back.nodes[1].src[1] is None
    assert back.nodes[1].src[0] is not None
    assert back.nodes[1].src[0].view_src is back.nodes[0]


def test_dump_refuses_what_is_of_no_step() -> None:
    """An input, output or expected value that its graph does not have is an error, not a silent loss."""
    case = small_case()
    stray = new_tensor(F32, 1)
    step = case.steps[0]
    for wrong in (
        Step(step.graph, {**step.inputs, stray: np.zeros(4, np.uint8)}),
        Step(step.graph, step.inputs, (stray,)),
        Step(step.graph, step.inputs, (), {stray: np.zeros(4, np.uint8)}),
    ):
        with pytest.raises(GraphError, match=r"steps\[0\]"):
            dump(Case("a/b@0", case.persistent, [wrong]))


def test_missing_bytes_are_named() -> None:
    """Each byte array of a document that is not there is named, with the field that it belongs to."""
    doc, blobs = dump(small_case())
    for name in blobs:
        with pytest.raises(CaseFileError, match=f"'{name}' are missing"):
            load(doc, {k: v for k, v in blobs.items() if k != name})


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("version",), 2, "version"),
        (("id",), "", "id"),
        (("seed",), 1.0, "seed"),
        (("tolerance",), {"nmse": -1}, "tolerance.'nmse'"),
        (("extra",), 1, "document.'extra'"),
        (("persistent", 0, "type"), "q9_9", "persistent[0].type"),
        (("persistent", 0, "ne"), [33, 4], "persistent[0].ne"),
        (("persistent", 0, "view_src"), 0, "persistent[0].view_src"),
        (("steps", 1, "tensors", 2, "op"), "NOPE", "steps[1].tensors[2].op"),
        (("steps", 1, "tensors", 2, "src"), [0, 2], "steps[1].tensors[2].src[1]"),
        (("steps", 1, "tensors", 2, "src"), [0] * 11, "steps[1].tensors[2].src"),
        (("steps", 1, "tensors", 2, "ne"), [1, 2, 3, 4, 5], "steps[1].tensors[2].ne"),
        (("steps", 1, "tensors", 2, "nb"), [1, 2, 3], "steps[1].tensors[2].nb"),
        (("steps", 1, "tensors", 2, "op_params"), [2**31], "steps[1].tensors[2].op_params[0]"),
        (("steps", 1, "tensors", 2, "view_offs"), -4, "steps[1].tensors[2].view_offs"),
        (("steps", 1, "tensors", 0, "persistent"), 2, "steps[1].tensors[0].persistent"),
        (("steps", 1, "inputs"), [1, 1], "steps[1].inputs"),
        (("steps", 1, "outputs"), [99], "steps[1].outputs[0]"),
        (("steps", 0, "expected_persistent"), [2], "steps[0].expected_persistent[0]"),
        (("steps", 0, "outputs"), [0], "steps[0]"),
        (("steps", 0, "nodes"), [], "steps[0].'nodes'"),
    ],
)
def test_field_is_named(path: tuple[str | int, ...], value: JSON, field: str) -> None:
    """What is wrong is named by its whole path, as one would write it in Python."""
    doc, blobs = dump(small_case())
    target = doc = json.loads(json.dumps(doc))
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    if field.endswith("'nodes'"):
        field = "steps[0]"  # no node is left, so what it read is of no graph
    with pytest.raises(CaseFileError) as e:
        load(doc, blobs)
    assert e.value.field == field
    assert "\n" not in str(e.value)


def test_every_field_may_be_anything() -> None:
    """Any value of any JSON type in place of any value of a document gives a case or a CaseFileError, nothing else."""
    doc, blobs = dump(small_case())
    doc = json.loads(json.dumps(doc))
    tried = wrong = 0
    for path in list(_paths(doc)):
        for value in _STRANGE:
            changed = copy.deepcopy(doc)
            target = changed
            for part in path[:-1]:
                target = target[part]
            target[path[-1]] = value
            tried += 1
            error = _error(changed, blobs)
            if error is not None:
                wrong += 1
                assert error.field
                assert "\n" not in str(error)
    assert tried > 2000
    assert wrong > tried // 2
    for value in _STRANGE:
        with pytest.raises(CaseFileError):
            load(value, blobs)


def _error(doc: JSON, blobs: dict[str, Bytes]) -> CaseFileError | None:
    try:
        load(doc, blobs)
    except CaseFileError as e:
        return e
    return None


def _paths(value: JSON, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _paths(v, (*at, k))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _paths(v, (*at, i))
