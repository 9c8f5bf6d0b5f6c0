"""Drivers of this machine for Vulkan and OpenCL, with the variables that select each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .archive import cache
from .make import intel_driver

VULKAN = tuple(Path(f) for f in ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"))
"""Folders with a file for each Vulkan driver."""
OPENCL = Path("/etc/OpenCL/vendors")
"""Folder with a file for each OpenCL driver."""
_MESA = {
    "RUSTICL_ENABLE": "llvmpipe",
    "RUSTICL_FEATURES": "fp16",
    # sub-groups of 16 work-items, which ggml's kernels for Intel ask for, and the extension by which they ask
    "LP_NATIVE_VECTOR_WIDTH": "512",
    "CONFORM_OPENCL_ADD": "-Wno-incompatible-pointer-types -Dcl_intel_required_subgroup_size",
}
"""Variables with which Mesa's OpenCL has a CPU device that ggml-opencl takes."""


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver that a loader finds."""

    name: str
    """Name of its file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that let a process use it alone."""


def drivers(device: str) -> list[Driver]:
    """Return the drivers for a device such as `Vulkan0` or `GPUOpenCL`; none for others."""
    if device.startswith("Vulkan"):
        files = (p for folder in VULKAN for p in sorted(folder.glob("*.json")))
        return [Driver(p.name, {"VK_DRIVER_FILES": str(p), "VK_ICD_FILENAMES": str(p)}) for p in files]
    return list(_opencl()) if device.startswith("GPUOpenCL") else []


def _opencl() -> Iterator[Driver]:
    own = intel_driver()
    named = {} if own is None else {"intel.icd": str(own)}
    for path in sorted(OPENCL.glob("*.icd")):
        with suppress(OSError, ValueError):
            named.setdefault(path.name, path.read_text("utf-8").strip())
    for name, library in named.items():
        more = _MESA if "rusticl" in library.lower() else {}
        yield Driver(name, {"OCL_ICD_VENDORS": str(_alone(name, library)), **more})


def _alone(name: str, library: str) -> Path:
    """Return a folder that names one OpenCL driver: loaders have no variable for a file."""
    folder = cache().with_name("drivers") / hashlib.sha256(library.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{library}\n", "utf-8")
    return folder
