"""Snippets: the Python program makes the same case; the C++ test_case compiles where g++ and ggml's source are."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.cases import FAMILIES
from conformance.cgraph import codec
from conformance.cgraph.case import Case
from conformance.report.calls import call_of
from conformance.report.snippet import python
from conformance.report.snippet_cpp import cpp
from conformance.run.select import build

SAMPLE = FAMILIES["ops"].ids("smoke")[::9]
TRAJECTORY = "kv_growth/llama-l=2,embd=32,heads=2,kv=1,ff=32,vocab=32,seqs=2,run=p3.d2@1"
SOURCE = os.environ.get("GGML_SOURCE", "")
"""A checkout of llama.cpp or ggml, for the test that compiles."""


def _again(case: Case, folder: Path) -> Case:
    path = folder / "snippet.py"
    path.write_text(python(case), encoding="utf-8")
    made: Case = runpy.run_path(str(path))["case"]
    return made


def _bare(case: Case) -> tuple[object, dict[str, bytes]]:
    case.provenance, case.generator = {}, 1
    for step in case.steps:
        step.expected, step.note = {}, None
    document, blobs = codec.dump(case)
    return document, {name: data.tobytes() for name, data in blobs.items()}


@pytest.mark.parametrize("case_id", [*SAMPLE, TRAJECTORY])
def test_the_program_makes_the_same_case(case_id: str, tmp_path: Path) -> None:
    """Same graphs, strides, parameters, names, flags and bytes."""
    case = build(case_id)
    assert _bare(_again(case, tmp_path)) == _bare(case)


def test_decoders_are_made_of_constructors() -> None:
    """Every node of a decoder is one call of a constructor, as in llama.cpp."""
    assert all(call_of(t) is not None for s in build(TRAJECTORY).steps for t in s.graph)


def test_the_struct_holds_what_ggml_asks_for() -> None:
    """vars, build_graph and initialize_tensors; every leaf is named and filled, and the last result is given back."""
    case = build("ops/" + next(i for i in FAMILIES["ops"].ids("smoke") if "FLASH_ATTN_EXT" in i).partition("/")[2])
    text = cpp(case)
    for part in ("struct test_shrunk : public test_case", "vars() override", "ggml_flash_attn_ext(ctx, ", "return n0_"):
        assert part in text
    leaves = [*case.persistent, *case.steps[0].inputs]
    assert text.count("ggml_new_tensor_4d") == text.count("ggml_backend_tensor_set") == len(leaves)


@pytest.mark.skipif(
    not (SOURCE and shutil.which("g++")), reason="set GGML_SOURCE to a checkout of llama.cpp, and have g++"
)
def test_the_structs_compile_in_ggmls_own_test_file(tmp_path: Path) -> None:
    """Put into tests/test-backend-ops.cpp they are legal C++ against its test_case."""
    root = Path(SOURCE)
    whole = (root / "tests/test-backend-ops.cpp").read_text(encoding="utf-8")
    at = whole.index("static std::vector<std::unique_ptr<test_case>> make_test_cases_eval(")
    structs = [cpp(build(i), f"test_shrunk_{k}") for k, i in enumerate([*SAMPLE, TRAJECTORY])]
    source = tmp_path / "all.cpp"
    source.write_text("\n".join([whole[:at], *structs, whole[at:]]), encoding="utf-8")
    include = [f"-I{root / p}" for p in ("ggml/include", "ggml/src", "tests", "common", "include", "vendor")]
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", *include, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
