"""Two builds compared by their machine code: what was edited is found, and nothing else."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.builds.changes import changes, sentences
from conformance.builds.code import shown
from conformance.builds.contents import contents_of
from conformance.builds.difference import Difference, Named, difference
from conformance.builds.reach import Impact
from conformance.cli import main
from conformance.ggml.errors import UnavailableError

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or not sys.platform.startswith("linux"), reason="compiles ELF libraries with gcc"
)

SOURCE = r"""
#include <math.h>
#include <stddef.h>
extern void ggml_abort(const char *, int, const char *, ...);
#define GGML_ASSERT(x) if (!(x)) ggml_abort(__FILE__, __LINE__, "GGML_ASSERT(%s) failed", #x)
struct ggml_tensor { int type; void *buffer; long ne[4]; size_t nb[4]; int op; int params[16]; };
static const char * GGML_OP_NAME[] = {"NONE", "ADD", OPS};
enum { NONE, ADD, NUMBERS };
struct traits { const char *name; long size; void (*to)(float *); };
static const struct traits type_traits[] = {{"f32", 4}, {"f16", 2}};
static const float ggml_grid[5] = {1, 2, 3, GRID, 7};
__attribute__((noinline)) static float ggml_helper(const float *x, int n) {
    GGML_ASSERT(n > 0);
    return x[0] * 2.5f + sinf(x[n - 1]);
}
const char *ggml_op_name(int op) { return GGML_OP_NAME[op]; }
const char *ggml_type_name(int type) { return type_traits[type].name; }
float ggml_compute_forward_norm(float *x, int n) {
    float sum = ggml_helper(x, n);
    for (int i = 0; i < n; i++) { sum += x[i] * EPS; }
    GGML_ASSERT(sum > 0);
    return sum;
}
float ggml_compute_forward_add(float *x, int n) {
    GGML_ASSERT(x && n);
    if (n > 100) { ggml_abort(__FILE__, __LINE__, "too many: %d", n); }
    return ggml_helper(x, n) + ggml_grid[n & 3];
}
void ggml_build_mul(struct ggml_tensor *t) { t->op = MUL; }
float ggml_add1(float x) { return x + 1; }
const char *gguf_key(void) { return KEY; }
const unsigned char norm_f32_data[40] = {3, 2, 35, 7, 0, 5, 1, 0, GENERATOR, 0, 0, 0, 9, 0, 0, 0, SPIRV};
const char cl[] = KERNELS;
"""
KERNELS = (
    "// shared by both kernels of this file, which is long enough to be a source"
    + "." * 256
    + r"""
kernel void kernel_mul(global float * x) { x[0] *= 2; }
kernel void kernel_sqr(global float * x) { x[0] *= %s; }
"""
)
VALUES = {
    "OPS": '"MUL"', "NUMBERS": "MUL", "EPS": "1e-5f", "GRID": "4", "KEY": '"general.name"', "GENERATOR": "1",
    "SPIRV": "1",
    "KERNELS": '"' + KERNELS.replace("\n", "\\n").replace("%s", "x[0]") + '"',
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare without what an earlier run cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def built(folder: Path, *options: str, text: str = SOURCE, **values: str) -> Path:
    """Compile the source with other values in its place, as libggml.so in `folder`."""
    folder.mkdir(parents=True)
    source, library = folder / "ggml.c", folder / "libggml.so"
    source.write_text(text)
    defined = [f"-D{k}={v}" for k, v in (VALUES | values).items()]
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", *options, *defined, "-o", library, source], check=True)
    return library


def test_a_rebuilt_copy_is_equal(tmp_path: Path) -> None:
    """Another folder, and lines inserted above each assertion, change nothing."""
    moved = SOURCE.replace("GGML_ASSERT(x && n)", "\n\n\nGGML_ASSERT(x && n)").replace(
        "GGML_ASSERT(sum", "\n\nGGML_ASSERT(sum"
    )
    found = difference(built(tmp_path / "other" / "place", text=moved), built(tmp_path / "a"))
    assert (found.is_empty, found.exported, found.ops) == (True, difference(*2 * [tmp_path / "a"]).exported, [])
    assert list(sentences(changes(found, []))) == ["no function, shader or kernel differs"]


@pytest.mark.parametrize(
    ("values", "functions"),
    [
        ({"EPS": "2e-5f"}, ["ggml_compute_forward_norm"]),
        ({"GRID": "5"}, ["ggml_compute_forward_add"]),
        ({"OPS": '"SUB","MUL"', "NUMBERS": "SUB,MUL"}, []),
    ],
)
def test_an_edit_is_in_its_function_alone(tmp_path: Path, values: dict[str, str], functions: list[str]) -> None:
    """A constant, an element of a table; a new op moves numbers and changes no function that only uses them."""
    found = difference(built(tmp_path / "b", **values), built(tmp_path / "a"))
    assert found.functions.changed == functions
    assert bool(found.ops) == ("OPS" in values)


def test_a_helper_belongs_to_its_symbol(tmp_path: Path) -> None:
    """An edit of a helper that is not inlined changes it, not its callers; with other code between, addresses move."""
    edited = SOURCE.replace("2.5f", "3.5f").replace(
        "float ggml_add1", "float ggml_add2(float x) { return x + 2; }\nfloat ggml_add1"
    )
    found = difference(built(tmp_path / "b", text=edited), built(tmp_path / "a"))
    assert (found.functions.changed, found.functions.added) == (["ggml_helper"], ["ggml_add2"])
    assert found.exported.added == ["ggml_add2"]


def test_the_interface_is_compared(tmp_path: Path) -> None:
    """Numbers of ops and types, keys of GGUF files."""
    new = SOURCE.replace('{"f16", 2}', '{"bf16", 2}, {"f16", 2}')
    found = difference(built(tmp_path / "b", text=new, OPS='"SUB","MUL"', KEY='"general.title"'), built(tmp_path / "a"))
    assert found.ops == ["SUB = 2 is new", "MUL: +1, MUL is 3, was 2"]
    assert found.types == ["bf16 = 1 is new", "f16: +1, f16 is 2, was 1"]
    assert (found.keys.added, found.keys.removed) == (["general.title"], ["general.name"])


def test_structs_are_read_from_debugging_information(tmp_path: Path) -> None:
    """A field that moves is a difference of the struct."""
    text = SOURCE + "struct ggml_tensor ggml_first;\n"
    new = text.replace("int op;", "int pad; int op;")
    found = difference(built(tmp_path / "b", "-g", text=new), built(tmp_path / "a", "-g", text=text))
    assert found.structs.changed == ["ggml_tensor"]


def test_installed_headers_are_compared(tmp_path: Path) -> None:
    """Parameters, fields and values of enums count; comments, macros and line breaks do not. One side is not enough."""
    header = """
    #define GGML_ROWS(a) \\
        struct not_this { int a; };
    enum ggml_order { GGML_FIRST, GGML_SECOND };
    struct ggml_pair { int a; /* one */ struct { int x; } b; };
    GGML_API float ggml_one(struct ggml_pair * p, int n);
    DEPRECATED(GGML_API float ggml_two(int n), "use ggml_one");
    """
    edits = [
        ("GGML_FIRST, ", "GGML_FIRST, GGML_NEW, "),
        ("int a; /* one */", "int a; /* another */ int c;"),
        ("ggml_two(int n)", "ggml_two(int n, int m)"),
        ("ggml_one(struct", "ggml_one(  // rows\n struct"),
    ]
    for name in ("a", "b", "c"):
        built(tmp_path / name / "lib")
    for name, texts in (("a", []), ("b", edits)):
        folder = tmp_path / name / "include"
        folder.mkdir()
        text = header
        for old, new in texts:
            text = text.replace(old, new)
        (folder / "ggml.h").write_text(text)
    a, b, c = (tmp_path / name / "lib" for name in "abc")
    assert difference(b, a).declared.changed == ["enum ggml_order", "ggml_two()", "struct ggml_pair"]
    assert not difference(c, a).declared


def test_shaders_and_sources_are_compared(tmp_path: Path) -> None:
    """A module's code counts, its compiler's version does not; of two kernels in a text only the edited one differs."""
    other = VALUES["KERNELS"].replace("*= x[0]", "*= 3")
    same = difference(built(tmp_path / "b", GENERATOR="2"), built(tmp_path / "a"))
    found = difference(built(tmp_path / "c", SPIRV="2", KERNELS=other), tmp_path / "a")
    assert (same.is_empty, found.shaders.changed, found.sources.changed) == (True, ["norm_f32"], ["kernel_sqr"])


def test_modules_without_symbols_are_found_by_magic_number(tmp_path: Path) -> None:
    """A stripped library still shows that a module differs."""
    for name, word in (("a", 0x0001003B), ("b", 0x0001003C)):
        data = struct.pack("<45I", 0x07230203, 0x10500, 1, 9, 0, *(40 * [word]))
        values = ",".join(map(str, data + bytes(8)))
        text = f"static const unsigned char d[] = {{{values}}};\nconst void *ggml_d(void) {{ return d; }}"
        built(tmp_path / name, "-s", text=text)
    found = difference(tmp_path / "b", tmp_path / "a")
    assert (len(found.shaders.added), len(found.shaders.removed)) == (1, 1)


def test_stripped_libraries_are_compared_by_frames(tmp_path: Path) -> None:
    """An exported function has its name; a local one is counted, by the borders in `.eh_frame`."""
    found = difference(built(tmp_path / "b", "-s", text=SOURCE.replace("2.5f", "3.5f")), built(tmp_path / "a", "-s"))
    assert (found.functions.changed, found.nameless) == ([], 1)
    assert "1 functions without a name differ" in changes(found, []).note


def test_another_compiler_is_not_taken_for_an_edit(tmp_path: Path) -> None:
    """If nearly all functions differ, the difference says so and shows no place."""
    many = "".join(f"float ggml_f{i}(float *x) {{ return x[{i}] * {i}; }}\n" for i in range(40))
    found = difference(built(tmp_path / "b", "-O0", text=SOURCE + many), built(tmp_path / "a", text=SOURCE + many))
    assert "functions differ: another compiler or other options" in found.rebuilt


def test_the_second_look_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with the same bytes is not disassembled again; a damaged entry is."""
    library = built(tmp_path / "a")
    first = contents_of(library)
    (kept,) = (tmp_path / "cache").rglob("contents/*.json")
    with monkeypatch.context() as m:
        m.setattr("conformance.builds.contents.functions", None)
        assert contents_of(library) == first
    kept.write_text("{")
    assert contents_of(library) == first


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A message says what was expected."""
    (tmp_path / "libggml.so").write_bytes(b"MZ")
    with pytest.raises(UnavailableError, match="a library in ELF format expected"):
        difference(tmp_path, tmp_path)


def test_a_symbol_is_shown_as_people_read_it() -> None:
    """Without parameters, with what tells instances apart."""
    assert shown("ggml_rope") == "ggml_rope"
    assert shown("_ZN4ggml3cpu6repack6repackI10block_q4_KLl8ELl8EEEiP11ggml_tensorPKvm").startswith(
        "ggml::cpu::repack::repack"
    )


def test_at_most_forty_lines() -> None:
    """However much differs."""
    names = [f"ggml_f{i}" for i in range(500)]
    many = difference_of(names)
    found = changes(many, [Impact({n: ["x"] for n in names[:300]}, names[300:400], names[400:])])
    assert 10 < len(list(sentences(found))) <= 40


def difference_of(names: list[str]) -> Difference:
    """A difference in which all of these differ, in each kind and in the interface."""
    each = Named(names, names, names, len(names))
    return Difference(each, each, each, each, each, names, names, each, each, each, (["a"], ["b"]), 3)


def test_the_command_prints_it(tmp_path: Path) -> None:
    """`conform build diff` names the function and the interface."""
    new, old = built(tmp_path / "b", EPS="2e-5f", KEY='"general.title"'), built(tmp_path / "a")
    ran = CliRunner().invoke(main, ["build", "diff", str(new), str(old)])
    assert ran.exit_code == 0, ran.output
    assert "functions: 2 changed of 8" in ran.output
    assert "cases  ggml_compute_forward_norm" in ran.output
    assert "GGUF keys: +general.title, -general.name" in ran.output
