"""Lines of test-backend-ops: what the format holds survives a round trip, and each line becomes a case again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import contiguous_nb
from conformance.ggml.types import F16, F32, I64, TYPES
from conformance.run.session.select import build, case_ids
from conformance.suite.exchange.build import case_of
from conformance.suite.exchange.line import Line, Numbers, Source, lines_of, read_lines

pytest.importorskip("xllamacpp")
DIMS = st.tuples(*[st.integers(0, 2**40)] * 4)
SOURCES = st.builds(Source, st.sampled_from(list(TYPES.values())), DIMS, DIMS)
PARAMS = st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 16)
LINES = st.builds(
    Line, st.sampled_from(["ADD", "ROPE", "MUL_MAT", "SET_ROWS"]), st.sampled_from(list(TYPES.values())), DIMS, PARAMS,
    st.lists(SOURCES, max_size=10).map(tuple), st.text("abc_-.0", max_size=9).filter(lambda s: s != "-"),
)  # fmt: skip


@pytest.fixture(scope="module")
def numbers() -> Numbers:
    """The wheel's."""
    return Numbers.of(Library())


@given(LINES)
def test_a_line_is_read_as_it_was_written(line: Line) -> None:
    """Op, types, shapes, strides, parameters and the name, whatever they are."""
    numbers = Numbers.of(_LIBRARY)
    assert numbers.read(numbers.write(line), "here") == line


_LIBRARY = Library()


def test_sub_ops_have_the_numbers_of_the_library(numbers: Numbers) -> None:
    """A case counts sub-ops in its own order; a file has ggml's."""
    (line,) = lines_of(build("ops/UNARY.GELU_ERF-f32-ne=10x5@1"))
    words = numbers.write(line).split()
    assert int(words[7]) == numbers.sub_ops["UNARY"][1]["GELU_ERF"]
    assert numbers.read(numbers.write(line), "here") == line


def test_every_op_of_smoke_comes_back_as_a_case(numbers: Numbers) -> None:
    """A case read from a line is written as the same line: types, shapes, parameters.

    Few are left out: a source that a later one needs is absent, and the format ends there.
    """
    left = []
    for case_id in case_ids(("ops",), (), "smoke"):
        for line in lines_of(build(case_id)):
            if any(0 in s.ne for s in line.sources):
                continue
            try:
                case = case_of(numbers.read(numbers.write(line), case_id))
            except UsageError as e:
                left.append(f"{case_id}: {e}")
                continue
            case.validate()
            (again,) = [x for x in lines_of(case) if x.op == line.op]
            assert [(s.type, s.ne) for s in again.sources] == [(s.type, s.ne) for s in line.sources], case_id
            assert (again.type, again.ne, again.op_params) == (line.type, line.ne, line.op_params), case_id
    assert len(left) <= 12, left


def test_the_values_of_a_strided_source_are_at_its_strides() -> None:
    """Indices of SET_ROWS differ from each other wherever they lie, and stay within the rows."""
    ne, nb = (4, 2, 1, 1), (8, 64, 128, 128)
    rows = Source(F32, (32, 4, 2, 1), contiguous_nb(F32, (32, 4, 2, 1)))
    cache = Source(F16, (32, 16, 2, 1), contiguous_nb(F16, (32, 16, 2, 1)))
    case = case_of(Line("SET_ROWS", F16, (32, 16, 2, 1), (0,) * 16, (rows, Source(I64, ne, nb), cache)))
    (index,) = [data for t, data in case.steps[0].inputs.items() if t.type is I64]
    found = index.view("<i8").reshape(-1)
    taken = np.array([[found[r * 8 + i] for i in range(4)] for r in range(2)])
    assert all(len(set(row)) == len(row) for row in taken.tolist())
    assert taken.min() >= 0
    assert taken.max() < 16
    assert [t.name for t in case.caches()] == ["src2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "none found"),
        ("x", "line 1: word 1: an op, a number, expected, 'x' found"),
        ("9999 0", "line 1: a number of an op of .* expected, 9999 found"),
        ("2 0 1 1", "word 5: ne, a number, expected, the end of the line found"),
        ("2 777 1 1 1 1", "a number of `enum ggml_type` expected, 777 found"),
        ("2 0 1 1 1 1 99", "0 to 16 op_params expected, 99 found"),
    ],
)
def test_a_wrong_file_is_refused(text: str, said: str, numbers: Numbers) -> None:
    """The message names the line, the word, what was expected and what came."""
    with pytest.raises(UsageError, match=said):
        read_lines(text, numbers, "f.txt")


def test_ops_that_ggml_would_not_make_are_refused() -> None:
    """A result of another shape, or strides that no view has."""
    (line,) = lines_of(build("ops/ADD-f32+f32-a=10x5,b=10x5@1"))
    a, b = line.sources
    with pytest.raises(UsageError, match=r"ggml makes f32\[10, 5, 1, 1\] of these sources"):
        case_of(Line("ADD", F32, (9, 5, 1, 1), line.op_params, line.sources))
    with pytest.raises(UsageError, match=r"no view of a leaf has ne .* and nb"):
        case_of(Line("ADD", F32, line.ne, line.op_params, (Source(F32, a.ne, (8, 80, 400, 400)), b)))


@pytest.mark.parametrize(
    ("case_id", "says"),
    [
        ("ops/SET_ROWS-f16+f16+i64-a=31x6,n=5@806", "also compares rows that no op wrote"),
        ("ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1", ""),
        ("ops/SUM-f32-ne=5x3,vne=pad@1", "of a source with gaps"),
        ("ops/SQRT-f32-ne=5x3@1", "half of them give NaN"),
        ("ops/ADD-f32+f32-a=10x5,b=10x5@1", ""),
    ],
)
def test_what_the_program_compares_though_nobody_wrote_it_is_said(case_id: str, says: str) -> None:
    """Rows that SET_ROWS leaves, what lies behind a source with gaps, roots of what is below 0; and nothing else."""
    done = CliRunner().invoke(main, ["list", "cases", case_id, "--format", "test-file"])
    assert done.exit_code == 0, done.output
    assert says in done.output
    assert bool(says) is ("1 nodes, " in done.output)


def test_what_one_command_writes_the_other_runs(tmp_path: Path) -> None:
    """On any backend; and lines of the program's output, whatever stands around a name."""
    path = tmp_path / "ops.txt"
    wrote = CliRunner().invoke(
        main, ["list", "cases", "ops/ROPE-f32-ne=64x3x4,n_dims=32,offs=16,mode=NEOX@322", "--format", "test-file"]
    )
    assert wrote.exit_code == 0, wrote.output
    path.write_text(wrote.stdout)
    ran = CliRunner().invoke(main, ["run", "--backend", "cpu", "--test-file", str(path), "-q"])
    assert ran.exit_code == 0, ran.output
    name = "SOFT_MAX_BACK(type=f32,ne=[16,16,1,1],scale=1.000000,max_bias=0.000000)"
    path.write_text(f"Testing 1 devices\n  {name}: \x1b[1;31mFAIL\x1b[0m\n  SQR(type=f99): OK\n  1/2 tests passed\n")
    copied = CliRunner().invoke(main, ["run", "--backend", "cpu", "--test-file", str(path)])
    assert (copied.exit_code, "1 PASS" in copied.output) == (0, True), copied.output
    assert "left out: case 'tbo/SQR(type=f99)@0'" in copied.output
    assert CliRunner().invoke(main, ["run", "--backend", "cpu", "--case", f"tbo/{name}"]).exit_code == 0
    none = CliRunner().invoke(main, ["list", "cases", "ops/NOTHING-*", "--format", "test-file"])
    assert (none.exit_code, "matches 'ops/NOTHING-*'" in none.output) == (2, True)
