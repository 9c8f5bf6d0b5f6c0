"""Dawn in an add-on for Node.js, and headers of another package."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import conform_here

from conformance.builds.dawn import dawn
from conformance.ggml.errors import UnavailableError

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64") or shutil.which("cc") is None,
    reason="needs Linux on x86-64 and a C compiler",
)
ADDON = """\
static const int * procs;
int napi_create_error(void);
int (*expected_of_node)(void) = napi_create_error;
void napi_register_module_v1(void) {}
__attribute__((visibility("hidden"))) void dawnProcSetProcs(const int * p) { procs = p; }
__attribute__((visibility("hidden"))) const int * get(void) __asm__("_ZN4dawn6native8GetProcsEv");
const int * get(void) { static const int own = 40; return &own; }
__attribute__((visibility("hidden"))) int wgpuAdd(int a) { return *procs + a; }
__attribute__((visibility("hidden"))) int wgpuSubtract(int a) { return *procs - a; }
"""
HEADER = "int wgpuAdd(int a); int wgpuSubtract(int a); typedef struct WGPUDevice_ wgpuDevice;\n"
CALLS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print(library.wgpuAdd(2), library.wgpuSubtract(2))
"""


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    """Folders with an add-on of this processor and of another, and with headers."""
    addon, headers = tmp_path / "webgpu" / "dist", tmp_path / "native" / "cpp" / "webgpu"
    for folder in (addon / "linux-x64", addon / "linux-arm64", headers):
        folder.mkdir(parents=True)
    (tmp_path / "addon.c").write_text(ADDON, "utf-8")
    words = ["cc", "-shared", "-fPIC", "-o", str(addon / "linux-x64" / "dawn.node"), str(tmp_path / "addon.c")]
    subprocess.run(words, check=True)
    (addon / "linux-arm64" / "dawn.node").write_bytes(b"\x7fELF\x02\x01" + bytes(12) + b"\xb7\x00")
    (headers / "webgpu.h").write_text(HEADER, "utf-8")
    (headers / "webgpu_cpp.h").touch()
    return [tmp_path / "webgpu", tmp_path / "native"]


def test_functions_that_an_addon_hides_are_called(packages: list[Path], tmp_path: Path) -> None:
    """The library finds the add-on beside it, stands in for Node.js, and chooses Dawn's own implementation."""
    below, moved = tmp_path / "below", tmp_path / "moved"
    below.mkdir()
    moved.mkdir()
    made = dawn(packages, below, ["cc"])
    config = (below / "DawnConfig.cmake").read_text("utf-8")
    assert f'"{below / "libwebgpu_dawn.so"}" INTERFACE_INCLUDE_DIRECTORIES "{packages[1] / "cpp"}"' in config
    for path in made:
        path.rename(moved / path.name)
    words = [sys.executable, "-c", CALLS, str(moved / "libwebgpu_dawn.so")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("42 38\n", "")


def test_packages_of_different_versions_are_refused(packages: list[Path], tmp_path: Path) -> None:
    """A header with another function, and a package that is missing, say what to name."""
    with pytest.raises(UnavailableError, match=r"1 and 0 found; name npm:webgpu@VERSION"):
        dawn(packages[:1], tmp_path, ["cc"])
    (packages[1] / "cpp" / "webgpu" / "webgpu.h").write_text(f"{HEADER}int wgpuNewer(void);\n", "utf-8")
    with pytest.raises(UnavailableError, match=r"1 differ \(wgpuNewer\); name packages of about the same day"):
        dawn(packages, tmp_path, ["cc"])


def test_only_webgpu_takes_packages_of_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For another device a package of npm is no source; WebGPU without one says what is missing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree = tmp_path / "ggml"
    (tree / "src").mkdir(parents=True)
    (tree / "CMakeLists.txt").touch()
    (tree / "src" / "ggml.c").touch()
    done = conform_here("make", "cpu", "--from", tree, "--from", "npm:webgpu@1.0.0", "-o", tmp_path / "out")
    assert (done.exit_code, "one source of ggml" in done.stderr) == (2, True)
    done = conform_here("make", "webgpu", "--from", tree, "-o", tmp_path / "out")
    assert (done.exit_code, "0 and 0 found" in done.stderr) == (2, True)
