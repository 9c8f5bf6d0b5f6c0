"""Which case reaches which function: the measured table, and the names where it has nothing."""

from __future__ import annotations

import pytest

from conformance.builds import reach
from conformance.builds.reach import REPACK, SETUPS, Impact, Reach, impact, measured
from conformance.run.session.select import case_ids

IDS = case_ids((), (), "standard")


def test_the_table_fits_the_suite() -> None:
    """Nearly all cases of `standard` were measured; the others are matched by op and types."""
    known = measured().cases
    assert sum(i in known for i in IDS) > 0.95 * len(IDS)


@pytest.mark.parametrize(
    ("function", "begin", "setup"),
    [
        ("ggml_compute_forward_concat", "ops/CONCAT-", ""),
        ("ggml_vec_dot_q4_K_q8_K", "ops/MUL_MAT-q4_K", ""),
        ("ggml_compute_forward_flash_attn_ext", "ops/FLASH_ATTN_EXT-", ""),
        ("ggml_gemv_q4_K_8x8_q8_K", "ops/MUL_MAT-q4_K", REPACK),
    ],
)
def test_a_kernel_is_reached_by_the_cases_of_its_op(function: str, begin: str, setup: str) -> None:
    """Measured, also for kernels whose name has no op, and in the setup that selects them."""
    ids = [i for i in IDS if SETUPS[setup].match(i)]
    found = impact([function], ids, setup).cases[function]
    assert any(i.startswith(begin) for i in found)
    assert sum(i.startswith(("ops/ROPE", "ops/NORM", "ops/CPY")) for i in found) == 0


def test_what_every_case_reaches_is_shared() -> None:
    """A function of each graph has no cases of its own, and one of a writer of GGUF files has none at all."""
    found = impact(["ggml_graph_compute", "gguf_write_to_file"], IDS)
    assert (dict(found.cases), found.shared, found.unreached) == ({}, ["ggml_graph_compute"], ["gguf_write_to_file"])


@pytest.mark.parametrize(
    ("name", "ops", "types"),
    [
        ("flash_attn_f32_f16_q8_0_f16acc", {"FLASH_ATTN_EXT"}, {"q8_0"}),
        ("mul_mat_vec_id_q4_k_f32", {"MUL_MAT_ID"}, {"q4_K"}),
        ("matmul_iq4_nl_f32_aligned", {"MUL_MAT"}, {"iq4_nl"}),
        ("l2_norm_f32", {"L2_NORM"}, set()),
        ("kernel_soft_max_4_f16", {"SOFT_MAX"}, set()),
        ("get_rows_q5_1_f32", {"GET_ROWS"}, {"q5_1"}),
        ("_ZL30ggml_compute_forward_rope_of_a_new_kindPK19ggml_compute_paramsP11ggml_tensor", {"ROPE"}, set()),
        ("ggml_backend_set_something", set(), set()),
    ],
)
def test_names_decide_where_nothing_was_measured(name: str, ops: set[str], types: set[str]) -> None:
    """Shaders and kernels that the wheel lacks: op and quantised types in the name."""
    found = [i for ids in impact([name], IDS).cases.values() for i in ids]
    assert {i.partition("/")[2].partition("-")[0] for i in found} == ops
    assert all(any(t in i for t in types) for i in found) or not types


def test_a_new_case_goes_by_op_and_types() -> None:
    """A case that was not measured is assumed to reach what its neighbours do."""
    of = Reach(["f", "g"], [[0], [1]], {"ops/ADD-f32+f32-a=1@1": 0, "ops/ADD-f16+f32-a=1@1": 1})
    assert of.reaching("f", ["ops/ADD-f32+f32-a=2@1", "ops/ADD-f16+f32-a=2@1", "ops/SUB-f32-a=1@1"]) == [
        "ops/ADD-f32+f32-a=2@1"
    ]


def test_rare_functions_come_first() -> None:
    """The first case of each function precedes the second of any; among them that of few cases."""
    found = Impact({"often": ["a", "b", "c", "d"], "rare": ["e", "b"]})
    assert found.first() == ["e", "a", "b", "c", "d"]


def test_aliases_name_ops() -> None:
    """Each alias stands for an op of the suite."""
    ops = {i.partition("/")[2].partition("-")[0].lower() for i in IDS}
    assert [a for a in reach.ALIASES.values() if a not in ops] == []
