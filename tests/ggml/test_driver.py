"""The driver of a device, from loaders of Vulkan and OpenCL that are compiled here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OPENCL = """\
#include <string.h>
int clGetPlatformIDs(unsigned n, void ** out, unsigned * found) { out[0] = (void *) 1; *found = 1; return 0; }
int clGetDeviceIDs(void * p, unsigned long t, unsigned n, void ** out, unsigned * found) {
    out[0] = (void *) 2; out[1] = (void *) 3; *found = 2; return 0;
}
int clGetPlatformInfo(void * p, unsigned what, size_t size, char * text, size_t * needed) {
    strcpy(text, "rusticl"); return 0;
}
int clGetDeviceInfo(void * d, unsigned what, size_t size, char * text, size_t * needed) {
    if (d == (void *) 2) return -33;
    strcpy(text, what == 0x102B ? "llvmpipe" : "25.0.7"); return 0;
}
"""
VULKAN = """\
#include <stdint.h>
#include <string.h>
typedef struct { uint32_t type; void * next; uint32_t id; char name[256], info[256]; } driver;
typedef struct { uint32_t type; driver * next; uint32_t numbers[5]; char device[256]; } properties;
int vkCreateInstance(const void * about, const void * a, void ** out) { *out = (void *) 1; return 0; }
int vkEnumeratePhysicalDevices(void * i, uint32_t * n, void ** out) { out[0] = (void *) 2; *n = 1; return 0; }
void vkGetPhysicalDeviceProperties2(void * d, properties * p) {
    strcpy(p->device, "llvmpipe (LLVM 19)");
    if (p->next->type == 1000196000) strcpy(p->next->name, "llvmpipe"), strcpy(p->next->info, "Mesa 25.0.7");
}
void vkDestroyInstance(void * i, const void * a) {}
"""
ASKS = """
import ctypes, sys
from conformance.ggml.lib.driver import driver_of

print(driver_of("llvmpipe"))
ctypes.CDLL(sys.argv[1])
print(driver_of(sys.argv[2]))
print(driver_of("another device"))
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
@pytest.mark.parametrize(
    ("source", "name", "device", "driver"),
    [
        (OPENCL, "libOpenCL.so.1", "llvmpipe, a CPU called Intel", "rusticl 25.0.7"),
        (VULKAN, "libvulkan.so.1", "llvmpipe (LLVM 19)", "llvmpipe Mesa 25.0.7"),
    ],
)
def test_a_loader_tells_the_driver_of_a_device(
    tmp_path: Path, source: str, name: str, device: str, driver: str
) -> None:
    """Name and version come from the loader that is loaded; without one, or for another device, there is none."""
    (tmp_path / "loader.c").write_text(source, "utf-8")
    library = tmp_path / name
    subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", library, tmp_path / "loader.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(library), device], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["", driver, "", ""]
