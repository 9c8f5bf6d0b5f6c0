"""Devices that are compiled here: with a compiler that is a script, and without OpenCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import conform_here
from marks import needs_cc, needs_wheel

from backends.ggml import GgmlBackend
from conformance import shipped
from conformance.builds import archive, devices, emulator, make, source
from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.made import NOTES, notes

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the fake programs are scripts of a shell")
CL = """\
#include <stddef.h>
#define CL_CALLBACK
#define CL_SUCCESS 0
#define CL_INVALID_VALUE (-30)
#define CL_DEVICE_TYPE 0x1000
#define CL_DEVICE_NAME 0x102B
#define CL_DEVICE_EXTENSIONS 0x1030
#define CL_DEVICE_OPENCL_C_FEATURES 0x106F
#define CL_DRIVER_VERSION 0x102D
#define CL_DEVICE_MAX_COMPUTE_UNITS 0x1002
#define CL_DEVICE_LOCAL_MEM_SIZE 0x1023
#define CL_QUEUE_CONTEXT 0x1090
#define CL_QUEUE_DEVICE 0x1091
#define CL_KERNEL_LOCAL_MEM_SIZE 0x11B2
#define CL_PROGRAM_CONTEXT 0x1161
#define CL_PROGRAM_DEVICES 0x1163
#define CL_PROGRAM_SOURCE 0x1164
#define CL_PROGRAM_BINARY_SIZES 0x1165
#define CL_PROGRAM_BINARIES 0x1166
#define CL_DEVICE_TYPE_CPU 2
typedef int cl_int; typedef unsigned cl_uint; typedef unsigned long cl_ulong, cl_device_type;
typedef cl_uint cl_device_info, cl_program_info;
typedef void * cl_device_id, * cl_program, * cl_context, * cl_kernel, * cl_command_queue, * cl_event;
typedef struct { unsigned version; char name[64]; } cl_name_version;
cl_int clGetProgramInfo(cl_program, cl_uint, size_t, void *, size_t *);
cl_int clReleaseProgram(cl_program);
cl_program clCreateProgramWithBinary(cl_context, cl_uint, const cl_device_id *, const size_t *, const unsigned char **,
                                     cl_int *, cl_int *);
cl_program clCreateProgramWithSource(cl_context, cl_uint, const char **, const size_t *, cl_int *);
cl_kernel clCreateKernel(cl_program, const char *, cl_int *);
cl_int clSetKernelArg(cl_kernel, cl_uint, size_t, const void *);
cl_int clGetCommandQueueInfo(cl_command_queue, cl_uint, size_t, void *, size_t *);
cl_int clGetKernelWorkGroupInfo(cl_kernel, cl_device_id, cl_uint, size_t, void *, size_t *);
"""
"""The declarations of CL/cl.h that `opencl.c` needs."""
DRIVER = """\
#include <string.h>
#include <CL/cl.h>
char name[64], extensions[64], options[256]; cl_device_type type; cl_name_version feature;
cl_int clGetDeviceInfo(cl_device_id d, cl_device_info what, size_t size, void * value, size_t * needed) {
    if (needed) *needed = strlen(name) + 1;
    if (value && what == CL_DEVICE_TYPE) memcpy(value, &type, size);
    if (value && what == CL_DEVICE_LOCAL_MEM_SIZE) *(cl_ulong *) value = 4096;
    if (value && what == CL_DEVICE_MAX_COMPUTE_UNITS) *(cl_uint *) value = 2;
    if (value && what == CL_DEVICE_NAME) strcpy(value, name);
    if (value && what == CL_DEVICE_EXTENSIONS) strcpy(value, extensions);
    if (what == CL_DEVICE_OPENCL_C_FEATURES) memcpy(value, &feature, *needed = sizeof feature);
    return CL_SUCCESS;
}
char source[64], calls[64]; cl_int status = -11;
cl_int clGetProgramInfo(cl_program p, cl_uint what, size_t size, void * value, size_t * needed) {
    if (needed) *needed = strlen(source) + 1;
    if (value && what == CL_PROGRAM_SOURCE) strcpy(value, source);
    if (value && what == CL_PROGRAM_BINARY_SIZES) *(size_t *) value = 4;
    if (value && what == CL_PROGRAM_BINARIES) memcpy(*(char **) value, "code", 4);
    if (value && (what == CL_PROGRAM_CONTEXT || what == CL_PROGRAM_DEVICES)) *(void **) value = p;
    return 0;
}
static void note(char what, cl_program p) { strncat(calls, (char[]) {what, '0' + (int) (long) p, ' ', 0}, 3); }
cl_int clBuildProgram(cl_program p, cl_uint n, const cl_device_id * d, const char * o, void * f, void * x) {
    strcpy(options, o);
    note('b', p);
    return status;
}
cl_program clCreateProgramWithBinary(cl_context c, cl_uint n, const cl_device_id * d, const size_t * size,
                                     const unsigned char ** bytes, cl_int * a, cl_int * e) {
    return *size == 4 && !memcmp(*bytes, "code", 4) ? (cl_program) 9 : NULL;
}
cl_kernel clCreateKernel(cl_program p, const char * name, cl_int * e) { note('k', p); return p; }
cl_int clReleaseProgram(cl_program p) { note('r', p); return 0; }
cl_program clCreateProgramWithSource(cl_context c, cl_uint n, const char ** s, const size_t * l, cl_int * e) {
    return (cl_program) 7;
}
cl_ulong local, filled; size_t started;
cl_int clSetKernelArg(cl_kernel k, cl_uint i, size_t size, const void * value) {
    if (!value) filled = size;
    return 0;
}
cl_int clGetCommandQueueInfo(cl_command_queue q, cl_uint what, size_t size, void * value, size_t * needed) {
    *(void **) value = q;
    return 0;
}
cl_int clGetKernelWorkGroupInfo(cl_kernel k, cl_device_id d, cl_uint what, size_t size, void * value, size_t * needed) {
    *(cl_ulong *) value = local;
    return 0;
}
cl_int clEnqueueNDRangeKernel(cl_command_queue q, cl_kernel k, cl_uint n, const size_t * offset, const size_t * items,
                              const size_t * group, cl_uint waits, const cl_event * events, cl_event * event) {
    note('s', k);
    started = *items;
    return 0;
}
"""
"""A libOpenCL with one device."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and scripts for cmake and cc that note how they were called."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for key in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(key, raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "cmake": """
case $1 in
--build) mkdir -p $2/bin; echo ELF > $2/bin/libggml.so.0; ln -sf libggml.so.0 $2/bin/libggml.so
    echo $GIT_CEILING_DIRECTORIES >> LOG ;;
esac""",
        "cc": """
[ "$1" = --version ] && echo 'cc 12.2' && exit
while [ "$1" != -o ]; do shift; done; echo shim > $2""",
        "c++": """
echo 'c++ 12.2'""",
    }
    for name, script in scripts.items():
        text = f'#!/bin/sh\necho "{name} $@" >> LOG{script}\n'.replace("LOG", str(tmp_path / "log"))
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder that has the source of llama.cpp below it."""
    path = tmp_path / "package" / "vendor" / "llama.cpp"
    (path / "ggml" / "src").mkdir(parents=True)
    (path / "CMakeLists.txt").touch()
    (path / "ggml" / "src" / "ggml.c").touch()
    return path


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("driver", ["", "libintelocl.so"])
def test_opencl_is_compiled_with_what_a_cpu_needs(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    """The folder has the libraries with their links, ours between, the driver of this Python, and what was changed."""
    found = tmp_path / driver if driver else None
    monkeypatch.setattr(make, "intel_driver", lambda: found)
    for _ in range(2):
        done = conform_here("make", "opencl", "--from", tree.parents[1], "-o", tmp_path / "out")
        assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    assert f"driver: {found or 'those of the system'}" in done.output
    assert (out / "libggml.so").readlink() == Path("libggml.so.0")
    assert (out / "libconform-opencl.so").read_text("utf-8") == "shim\n"
    named = [p.read_text("utf-8") for p in (out / "vendors").glob("*.icd")] if driver else (out / "vendors").exists()
    assert named == ([f"{found}\n"] if driver else False)
    said = json.loads((out / NOTES).read_text("utf-8"))
    assert said == {"made from": str(tree.parents[1]), "compiler": "cc 12.2, c++ 12.2", "opencl.c": make.CHANGED}
    log = (tmp_path / "log").read_text("utf-8")
    (below,) = (archive.cache() / "made").iterdir()  # both went to one place
    assert "-DGGML_OPENCL=ON -DGGML_OPENCL_USE_ADRENO_KERNELS=OFF" in log
    assert f"-DOpenCL_LIBRARY={below / 'libconform-opencl.so'}" in log
    assert (f"-rpath,{tmp_path}" in log) is bool(driver)
    assert f"\n{tree.parent}\n" in log  # a repository above has not its commit


def test_a_build_without_sources_or_compiler_says_what_to_do(programs: Path, tree: Path, tmp_path: Path) -> None:
    """A folder of libraries is no source; npm has none; without a compiler or headers nothing is written."""
    (tmp_path / "libs").mkdir()
    for name, why in (
        ("npm:x@1", "npm:x@1 is no folder or archive"),
        (str(tmp_path / "libs"), "the source of llama.cpp or ggml"),
    ):
        done = conform_here("make", "cpu", "--from", name, "-o", tmp_path / "out")
        assert done.exit_code == 2
        assert why in done.stderr
    done = conform_here("make", "opencl", "--from", tree, "--isa", "arm64", "-o", tmp_path / "out")
    assert (done.exit_code, "--isa: cpu expected, opencl found" in done.stderr) == (2, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "no-compiler")
        done = conform_here("make", "cpu", "--from", tree, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "no-compiler: a compiler expected; install one (apt-get install g++), or set CC" in done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "'c++")
        done = conform_here("make", "cpu", "--from", tree, "-o", tmp_path / "out")
    assert done.stderr == 'conform: CXX: the command of a compiler expected, found "\'c++": No closing quotation\n'
    text = "#!/bin/sh\n[ $1 = --version ] && echo cc && exit\necho 'CL/cl.h: No such file' >&2; exit 1\n"
    (programs / "cc").write_text(text, "utf-8")
    done = conform_here("make", "opencl", "--from", tree, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "CL/cl.h: No such file; `conform build devices` says what OpenCL needs here" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("programs")
def test_a_message_names_what_the_user_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package keeps its prefix, and headers are not the emulator's."""
    monkeypatch.setattr(source, "call", lambda *_, **__: (1, ["ERROR: no such version"]))
    monkeypatch.setattr(emulator, "call", lambda *_, **__: (100, ["E: no such package"]))
    done = conform_here("make", "cpu", "--from", "pypi:x==1", "-o", tmp_path / "out")
    assert done.stderr == "conform: build pypi:x==1: it cannot be downloaded: ERROR: no such version\n"
    monkeypatch.setenv(emulator.MIRROR, "http://localhost/debian")
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(UnavailableError, match=r"^Debian: apt-get failed: E: no such package$"):
        emulator.unpacked("x")


def test_the_command_to_try_has_the_processor(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for another processor is refused without it."""
    monkeypatch.setattr(make, "compiled", lambda *_: tree)
    done = conform_here("make", "cpu", "--from", tree, "--isa", "s390x", "-o", tmp_path / "out")
    assert done.stdout.endswith(f"written; try conform list builds {tmp_path / 'out'} --isa s390x\n")


@pytest.mark.usefixtures("programs")
def test_llama_is_compiled_around_ggml(tree: Path, tmp_path: Path) -> None:
    """A source of ggml alone gives ggml; that of llama.cpp its library, too, for scenarios and whole models."""
    asked = []
    for _ in range(2):
        make.make("cpu", [str(tree)], tmp_path / "out")
        asked.append((tmp_path / "log").read_text("utf-8").rpartition("--target ")[2].split()[0])
        (tree / "include").mkdir(exist_ok=True)
        (tree / "include" / "llama.h").touch()
    assert asked == ["ggml", "llama"]


@pytest.mark.usefixtures("programs")
def test_headers_come_from_a_package_of_debian(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compilers get its folder, and the record names it; a build has one source."""
    monkeypatch.setattr(make, "unpacked", lambda name: tmp_path / name)
    monkeypatch.setattr(make, "intel_driver", lambda: None)
    words = ["opencl", "--from", str(tree), "--from", "debian:headers", "-o", str(tmp_path / "out")]
    assert conform_here("make", *words).exit_code == 0
    log = (tmp_path / "log").read_text("utf-8")
    assert f" -I{tmp_path}/headers/usr/include " in log
    assert f" -DOpenCL_INCLUDE_DIR={tmp_path}/headers/usr/include" in log
    assert notes(tmp_path / "out")["made from"] == f"{tree} debian:headers"
    done = conform_here("make", *words, "--from", "pypi:a==1")
    assert (done.exit_code, "one source of ggml and packages debian:NAME expected" in done.stderr) == (2, True)


@pytest.mark.parametrize("key", ["CC", "CXX", "CXXFLAGS"])
def test_a_changed_compiler_compiles_again(
    programs: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The place in the cache follows both compilers, their options and flags, which a record then has."""
    (programs / "other").write_text("#!/bin/sh\necho other 13\n", "utf-8")
    (programs / "other").chmod(0o755)
    said = [make.make("cpu", [str(tree)], tmp_path / "out").notes["compiler"]]
    monkeypatch.setenv(key, "other -O1")
    said.append(make.make("cpu", [str(tree)], tmp_path / "out").notes["compiler"])
    changed = {"CC": "other 13 -O1, c++ 12.2", "CXX": "cc 12.2, other 13 -O1"}
    assert said == ["cc 12.2, c++ 12.2", changed.get(key, "cc 12.2, c++ 12.2, CXXFLAGS=other -O1")]
    assert len(list((archive.cache() / "made").iterdir())) == 2


def test_two_that_compile_the_same_wait_for_each_other(programs: Path, tree: Path, tmp_path: Path) -> None:
    """Two programs of cmake in one build tree break each other; a killed one leaves no lock."""
    text = f"""#!/bin/sh
mkdir {tmp_path}/busy || exit 1
sleep 0.3
mkdir -p $2/bin; echo ELF > $2/bin/libggml.so
rmdir {tmp_path}/busy
"""
    (programs / "cmake").write_text(text, "utf-8")
    command = [sys.executable, "-m", "conformance.cli", "build", "make", "cpu", "--from", str(tree), "-o"]
    both = [subprocess.Popen([*command, str(tmp_path / name)], stderr=subprocess.PIPE) for name in "ab"]
    assert [(p.communicate()[1], p.returncode) for p in both] == [(b"", 0)] * 2


@needs_wheel
def test_a_record_says_what_was_made(tmp_path: Path) -> None:
    """The notes beside a library are among the versions of its device; a file that is no object counts for nothing."""
    for path in Library().folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for text, expected in (('{"opencl.c": "changed"}', "changed"), ("[1]", None), ("{", None)):
        (tmp_path / NOTES).write_text(text, "utf-8")
        assert notes(tmp_path).get("opencl.c") == expected
    (tmp_path / NOTES).write_text('{"opencl.c": "changed"}', "utf-8")
    backend = GgmlBackend(lib=str(tmp_path / Library().files[0].name))
    assert backend.info().versions["opencl.c"] == "changed"
    backend.close()
    named = f"ggml?lib={tmp_path / Library().files[0].name}"
    case = "ops/ADD-f32+f32-a=1x1x1,b=1x1x1@1"
    done = conform_here("run", "--backend", named, "--case", case, "--json", tmp_path / "run.json")
    assert done.exit_code == 0, done.output
    (result,) = json.loads((tmp_path / "run.json").read_text("utf-8"))["results"]
    assert "opencl.c: changed" in result["witness"]["libraries"]


CALLS = """
import ctypes, sys

real = ctypes.CDLL(sys.argv[1] + "/libOpenCL.so.1", ctypes.RTLD_GLOBAL)
ours = ctypes.CDLL(sys.argv[1] + "/between.so")
device, relaxed = ctypes.c_void_p(1), b"-cl-std=CL2.0 -cl-unsafe-math-optimizations -cl-fast-relaxed-math -DA=1"
changed = b"-cl-std=CL2.0 -DA=1 -Wno-incompatible-pointer-types"
for kind, given, expected, options in (
    (2, b"AMD EPYC", b"AMD EPYC, a CPU called Intel", changed),
    (2, b"Intel(R) Core(TM)", b"Intel(R) Core(TM)", changed),
    (4, b"Graphics", b"Graphics", relaxed),
):
    ctypes.c_ulong.in_dll(real, "type").value = kind
    (ctypes.c_char * 64).in_dll(real, "name").value = given
    found, needed = ctypes.create_string_buffer(64), ctypes.c_size_t()
    assert ours.clGetDeviceInfo(device, 0x102B, ctypes.c_size_t(64), found, ctypes.byref(needed)) == 0
    assert (found.value, needed.value) == (expected, len(expected) + 1), (found.value, needed.value)
    assert ours.clBuildProgram(device, 0, None, relaxed, None, None) == -11
    told = (ctypes.c_char * 256).in_dll(real, "options").value
    assert told == options, told
assert ours.clGetDeviceInfo(device, 0x102B, ctypes.c_size_t(64), found, None) == 0
for kind, feature, given, expected in (
    (2, b"__opencl_c_subgroups", b"cl_khr_fp16", b"cl_khr_fp16 cl_khr_subgroups"),
    (2, b"__opencl_c_subgroups", b"cl_khr_subgroups", b"cl_khr_subgroups"),
    (2, b"__opencl_c_images", b"cl_khr_fp16", b"cl_khr_fp16"),
    (4, b"__opencl_c_subgroups", b"cl_khr_fp16", b"cl_khr_fp16"),
):
    ctypes.c_ulong.in_dll(real, "type").value = kind
    (ctypes.c_char * 68).in_dll(real, "feature").raw = bytes(4) + feature.ljust(64, bytes(1))
    (ctypes.c_char * 64).in_dll(real, "extensions").value = given
    assert ours.clGetDeviceInfo(device, 0x1030, ctypes.c_size_t(64), found, None) == 0
    assert found.value == expected, found.value
"""


KEPT = """
import ctypes, os, pathlib, sys

folder = pathlib.Path(os.environ["GGML_OPENCL_KERNEL_CACHE_DIR"])
real = ctypes.CDLL(sys.argv[1] + "/libOpenCL.so.1", ctypes.RTLD_GLOBAL)
ours = ctypes.CDLL(sys.argv[1] + "/between.so")
calls = (ctypes.c_char * 64).in_dll(real, "calls")

def built(program, source, options, kind=2, status=0):
    calls.value = b""
    ctypes.c_ulong.in_dll(real, "type").value = kind
    ctypes.c_int.in_dll(real, "status").value = status
    (ctypes.c_char * 64).in_dll(real, "source").value = source
    handle = ctypes.c_void_p(program)
    found = ours.clBuildProgram(handle, 0, None, options, None, None)
    ours.clCreateKernel(handle, b"name", None)
    ours.clReleaseProgram(handle)
    return found, calls.value.decode().strip()

assert built(1, b"a", b"-DA", status=-11) == (-11, "b1 k1 r1")  # one that fails is not kept
assert built(1, b"a", b"-DA", kind=4) == (0, "b1 k1 r1")  # nor that of a GPU
assert not list(folder.iterdir())
assert built(1, b"a", b"-DA") == (0, "b1 k1 r1")
(file,) = folder.iterdir()
assert file.read_bytes() == b"code"
assert built(2, b"a", b"-DA") == (0, "b9 k9 r9 r2")  # 9 is the kept one
assert built(3, b"b", b"-DA") == built(3, b"a", b"-DB") == (0, "b3 k3 r3")
assert len(list(folder.iterdir())) == 3
file.write_bytes(b"cod")
assert built(4, b"a", b"-DA") == (0, "b4 k4 r4")  # damaged: compiled and kept again
assert file.read_bytes() == b"code"
"""


FILLED = """
import ctypes, sys

real = ctypes.CDLL(sys.argv[1] + "/libOpenCL.so.1", ctypes.RTLD_GLOBAL)
ours = ctypes.CDLL(sys.argv[1] + "/between.so")
calls, one = (ctypes.c_char * 64).in_dll(real, "calls"), ctypes.c_size_t(1)
ctypes.c_int.in_dll(real, "status").value = 0

def started(local, kind=2):
    calls.value = b""
    ctypes.c_ulong.in_dll(real, "type").value = kind
    ctypes.c_ulong.in_dll(real, "local").value = local
    queue, kernel = ctypes.c_void_p(5), ctypes.c_void_p(3)
    assert ours.clEnqueueNDRangeKernel(queue, kernel, 1, None, ctypes.byref(one), ctypes.byref(one), 0, None, None) == 0
    assert ctypes.c_size_t.in_dll(real, "started").value == 1
    return calls.value.decode().strip()

assert started(0) == started(64, kind=4) == "s3"
assert started(64) == "b7 k7 s7 s3"
assert started(64) == "s7 s3"
assert ctypes.c_ulong.in_dll(real, "filled").value == 4096
"""


def _compiled(folder: Path) -> None:
    """Compile `opencl.c` as between.so, and the libOpenCL that it calls."""
    (folder / "CL").mkdir()
    (folder / "CL" / "cl.h").write_text(CL, "utf-8")
    (folder / "driver.c").write_text(DRIVER, "utf-8")
    words = ["cc", "-shared", "-fPIC", f"-I{folder}", "-o"]
    subprocess.run([*words, folder / "libOpenCL.so.1", folder / "driver.c"], check=True)
    between = shipped.path() / "builds" / make.BETWEEN
    links = ["-Wl,--no-as-needed", f"-Wl,-rpath,{folder}", f"-L{folder}", "-l:libOpenCL.so.1", "-ldl"]
    subprocess.run([*words, folder / "between.so", between, *links], check=True)


@needs_cc
def test_what_was_compiled_for_a_cpu_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same source with the same options is loaded from its file, and compiled if that is damaged."""
    _compiled(tmp_path)
    (tmp_path / "kernels").mkdir()
    monkeypatch.setenv("GGML_OPENCL_KERNEL_CACHE_DIR", str(tmp_path / "kernels"))
    done = subprocess.run([sys.executable, "-c", KEPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_cc
def test_local_memory_of_a_cpu_is_filled(tmp_path: Path) -> None:
    """All of it, before each kernel that uses local memory; not before others, and not on a GPU."""
    _compiled(tmp_path)
    done = subprocess.run([sys.executable, "-c", FILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_cc
def test_only_a_cpu_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name has Intel, its sub-groups are an extension, two flags go and one comes; a GPU stays as it is."""
    _compiled(tmp_path)
    for name in ("CONFORM_OPENCL_DROP", "CONFORM_OPENCL_ADD", "LD_LIBRARY_PATH", "GGML_OPENCL_KERNEL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # in a process of its own: OpenVINO may have loaded the machine's libOpenCL into this one
    done = subprocess.run([sys.executable, "-c", CALLS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_devices_name_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without programs each device but the CPU lacks some, with the command that adds them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = conform_here("devices", "--json", tmp_path / "devices.json")
    assert done.exit_code == 0, done.output
    read = {d["name"]: d for d in json.loads((tmp_path / "devices.json").read_text("utf-8"))["devices"]}
    assert [name for name, d in read.items() if not d["lacks"]] == ["CPU"]
    opencl = read["OpenCL on Intel's runtime for CPUs"]
    assert opencl["lacks"][:2] == ["cmake", "g++"]
    assert "apt-get install cmake g++" in opencl["adding"]
    for text in (*opencl["adding"], *opencl["running"]):
        assert f"\n  {text}\n" in done.stdout
    assert all(d.running for d in devices.devices())
