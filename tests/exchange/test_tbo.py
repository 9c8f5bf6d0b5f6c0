"""The cases of test-backend-ops: all of its list, under its names, with graphs that the declarations check."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.case.case import writes_in_place
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import nbytes, pack
from conformance.run.session.select import case_ids
from conformance.suite import FAMILIES
from conformance.suite.tbo import CASES, FAMILY, SMALL, build, fusions, graph_of, rows

MAX_BYTES = 400_000


def test_the_file_stays_small() -> None:
    """A few hundred kB for some 24,000 cases."""
    assert CASES.stat().st_size <= MAX_BYTES
    assert len(rows()) > 24_000


def test_nearly_all_can_be_said() -> None:
    """At least 99.5 % of the list; each of the rest has its reason, and asking for it says so."""
    refused = [row for row in rows().values() if row.why and not row.why.startswith("computing")]
    assert len(refused) <= 0.005 * len(rows())
    for row in refused:
        with pytest.raises(UsageError, match="CONV_2D_DW"):
            build(f"tbo/{row.name}@0")


def test_few_are_too_large_for_a_level() -> None:
    """Less than 3 % take more than half of what a small machine allows; by its name such a case is found."""
    large = [row for row in rows().values() if row.why.startswith("computing")]
    assert 0 < len(large) <= 0.03 * len(rows())
    assert not {f"tbo/{row.name}@0" for row in large} & set(FAMILY.ids("full"))


def test_each_stands_under_the_name_that_the_program_prints() -> None:
    """A name with brackets, spelled out, is one case; a glob finds all of an op."""
    name = "tbo/SOFT_MAX_BACK(type=f32,ne=[16,16,1,1],scale=1.000000,max_bias=0.000000)@0"
    assert case_ids(["tbo"], [name], "smoke") == [name]
    assert len(case_ids(["tbo"], ["tbo/GET_ROWS_BACK(*"], "full")) == 60
    with pytest.raises(UsageError, match="no such case"):
        build("tbo/SOFT_MAX_BACK(type=f32)@0")


def test_a_level_shows_every_op_that_has_a_small_case() -> None:
    """`standard` leaves out only ops all of whose cases are large, none of them a fusion."""
    small = [row for row in rows().values() if row.size <= SMALL and not row.why]
    ops = {row.name.partition("(")[0] for row in (*small, *fusions("full"))}
    shown = {i.partition("/")[2].partition("(")[0] for i in FAMILY.ids("standard")}
    assert shown == ops
    assert set(FAMILY.ids("smoke")) <= set(FAMILY.ids("standard")) <= set(FAMILY.ids("full"))


@pytest.mark.parametrize("case_id", FAMILY.ids("standard")[::4])
def test_a_graph_has_the_programs_tensors(case_id: str) -> None:
    """Each node stands as its line has it (`check_node`), and each leaf has as many bytes as its tensor."""
    case = build(case_id)
    case.validate()
    graph, result = graph_of(rows()[case_id.removeprefix("tbo/").removesuffix("@0")])
    assert [str(n) for n in graph] == [str(n) for n in case.steps[0].graph]
    assert str(case.steps[0].outputs[0]) == str(result)
    held = {**case.persistent, **case.steps[0].inputs}
    assert all(data.nbytes == nbytes(t) for t, data in held.items())
    assert {n.view_src for n in case.steps[0].graph if writes_in_place(n) and n.root.op == "NONE"} <= set(
        case.persistent
    )


def test_values_stand_where_a_node_reads() -> None:
    """Indices through a view of half of every dimension lie within what they index."""
    ids = [i for i in FAMILIES["tbo"].ids("full") if i.startswith("tbo/GET_ROWS(") and "v=1" in i]
    assert ids
    for case_id in ids[:: len(ids) // 8]:
        step = build(case_id).steps[0]
        node = step.outputs[0]
        a, rows_ = node.src[0], node.src[1]
        assert a is not None
        assert rows_ is not None
        seen = pack(step.inputs[rows_.root], rows_).view(np.int32)
        assert seen.size == rows_.ne[0] * rows_.ne[1] * rows_.ne[2]
        assert (seen >= 0).all()
        assert (seen < a.ne[1]).all()
