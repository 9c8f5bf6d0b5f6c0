"""Snippets: the Python program makes the same case; the C++ test_case compiles where g++ and ggml's source are."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.case import codec
from conformance.case.case import Case
from conformance.report.snippet import call_of, cpp, python
from conformance.run.session.select import build
from conformance.suite import FAMILIES

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


NASTY = st.text(st.characters(), max_size=40) | st.sampled_from(
    [
        '"""\nopen(CANARY, "w")\n"""',
        "'''\nopen(CANARY, 'w')",
        "\\",
        "*/ ??/",
        "a\nopen('canary', 'w')\n#",
        "\0",
        "\ud800",
        "\u202e",
        "{title}",
        "%s%n",
        "\r\x0b\x0c\x85\u2028import os",
        "'); open('canary', 'w'); ('",
        "//\\\n#error",
        '??/"',
    ]
)
"""Texts that end a literal, a comment or a line of a program."""


def _nasty(texts: list[str]) -> Case:
    case = build(SAMPLE[0])
    case.id, case.family = texts[0], texts[1]
    case.params = {texts[2]: texts[3], "deep": [{texts[1]: [texts[2], None, True, 1.5]}]}
    case.provenance = {texts[4]: texts[0], "detail": texts[5]}
    tensors = [*case.persistent, *(t for s in case.steps for t in s.graph.tensors())]
    for i, t in enumerate(tensors):
        t.name = texts[i % len(texts)].encode("utf-8", "ignore").decode()[:15]
    return case


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(st.lists(NASTY, min_size=6, max_size=6), min_size=1, max_size=12))
def test_a_program_holds_texts_as_data(batch: list[list[str]], tmp_path: Path) -> None:
    """Whatever ids, names and parameters hold, the program is ASCII, runs none of it, and makes an equal case."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for i, texts in enumerate(batch):
        case = _nasty(texts)
        text = python(case)
        assert text.isascii()
        assert text.isprintable() or set(text) - {"\n"} <= set(map(chr, range(32, 127)))
        (folder / f"p{i:02}.py").write_text(text, encoding="utf-8")
    before = sorted(p.name for p in folder.iterdir())
    program = (
        "import runpy, sys, json\nfor p in sys.argv[1:]:\n    c = runpy.run_path(p, {'CANARY': 'canary'})['case']\n"
    )
    program += "    print(json.dumps([c.id, c.family, c.params, [t.name for s in c.steps for t in s.graph.tensors()]]))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, *before],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in folder.iterdir()) == before
    for line, texts in zip(done.stdout.splitlines(), batch, strict=True):
        case = _nasty(texts)
        assert json.loads(line) == [
            case.id, case.family, case.params, [t.name for s in case.steps for t in s.graph.tensors()]
        ]  # fmt: skip


@given(st.lists(NASTY, min_size=6, max_size=6))
def test_a_struct_holds_texts_in_one_line(texts: list[str]) -> None:
    """Ids and names add no line, no quote, no splice and no trigraph to the C++, the same lines without them."""
    found, plain = cpp(_nasty(texts)).split("\n"), cpp(_nasty(["x"] * 6)).split("\n")
    assert len(found) == len(plain)
    for line, other in zip(found, plain, strict=True):
        assert line.isascii()
        assert line.count('"') == other.count('"')
        assert "\\" not in line
        assert "??" not in line
        assert line.partition("//")[0].rstrip() == other.partition("//")[0].rstrip() or "vars() override" in line


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
@pytest.mark.parametrize("standard", ["c++11", "gnu++17"])
def test_nasty_comments_and_literals_compile(tmp_path: Path, standard: str) -> None:
    """A compiler with trigraphs sees comments that end where they end, and literals that stay closed."""
    lines: list[str] = ["#include <string>"]
    for i, text in enumerate(["*/ ??/", 'a\n#error ran\n"', "x\\", '??/"', "\ud800\u202e", "%s\\\n#error ran"]):
        struct = cpp(_nasty([text] * 6), f"t{i}").split("\n")
        at = next(line for line in struct if "vars() override" in line)
        lines += [at.replace("vars() override", f"f{i}()")]
        lines += [
            f"int g{i}; {line[line.index('//') :]}\nint h{i}_{k};" for k, line in enumerate(struct) if ";  //" in line
        ][:1]
    path = tmp_path / "x.cpp"
    path.write_text("\n".join(lines))
    command = ["g++", f"-std={standard}", "-Wall", "-Werror", "-Wno-unused", "-fsyntax-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
