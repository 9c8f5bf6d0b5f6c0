"""Devices that run without their hardware: what each needs, and the commands that add it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .isa import ISAS
from .make import beside, intel_driver

SOURCE = "pypi:llama-cpp-python==0.3.36"
"""A package with the source of all backends, in the commands that are shown."""
VULKAN = "npm:@node-llama-cpp/linux-x64-vulkan@3.22.1"
"""A package with ggml-vulkan, likewise."""
_OPS = "conform run --family ops --level smoke --backend"


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a device needs on a machine."""

    what: str
    command: str
    """Adds it, on Debian and Ubuntu."""
    present: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Device:
    """A device that runs without its hardware."""

    name: str
    needs: tuple[Need, ...]
    commands: tuple[str, ...]
    """Run it, once nothing is lacking."""

    def lacks(self) -> list[Need]:
        """Return what this machine does not have."""
        return [n for n in self.needs if not n.present()]

    def to_json(self) -> dict[str, Any]:
        """Return a strict JSON object."""
        lacks = [{"what": n.what, "command": n.command} for n in self.lacks()]
        return {"name": self.name, "lacks": lacks, "commands": list(self.commands)}


def devices() -> list[Device]:
    """Return all devices, those that need least first."""
    made = f"conform build make opencl --from {SOURCE} -o opencl", f"{_OPS} 'ggml?lib=opencl&device=GPUOpenCL'"
    vulkan = f"GGML_VK_VISIBLE_DEVICES=0 {_OPS} 'ggml?lib={VULKAN}&device=Vulkan0'"
    return [
        Device("CPU", (), (f"{_OPS} ggml",)),
        *(
            Device(f"CPU {isa} under qemu-user", (APT, CMAKE), (f"{_OPS} 'ggml?lib={SOURCE}&isa={isa}'",))
            for isa in ISAS
        ),
        Device("Vulkan on Mesa's lavapipe", (NPM, LOADER, LAVAPIPE), (vulkan,)),
        Device("OpenCL on Intel's runtime for CPUs", (CMAKE, COMPILER, HEADERS, INTEL, INTEL_MATHS), made),
        Device("OpenCL on pocl", (CMAKE, COMPILER, HEADERS, POCL), made),
    ]


def _debian(package: str, present: Callable[[], object]) -> Need:
    return Need(package, f"apt-get install {package}", present)


def _program(name: str, package: str) -> Need:
    return _debian(package, partial(shutil.which, name))


def _named(folders: Sequence[str], pattern: str) -> Callable[[], object]:
    """Return a search for a file in some folders."""
    return lambda: any(p for f in folders for p in Path(f).glob(pattern))


APT = Need("apt-get and dpkg-deb", "use Debian or Ubuntu, or a container of one",
           lambda: shutil.which("apt-get") and shutil.which("dpkg-deb"))  # fmt: skip
CMAKE, COMPILER, NPM = _program("cmake", "cmake"), _program("c++", "g++"), _program("npm", "npm")
HEADERS = _debian("opencl-headers", _named(("/usr/include", "/usr/local/include"), "CL/cl.h"))
LOADER = _debian("libvulkan1", partial(find_library, "vulkan"))
LAVAPIPE = _debian("mesa-vulkan-drivers", _named(("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"), "lvp_icd*.json"))
POCL = _debian("pocl-opencl-icd", _named((os.environ.get("OCL_ICD_VENDORS") or "/etc/OpenCL/vendors",), "pocl*.icd"))
INTEL = Need("intel-opencl-rt", "pip install intel-opencl-rt", intel_driver)
INTEL_MATHS = Need("intel-cmplr-lib-rt", "pip install intel-cmplr-lib-rt", partial(beside, "libsvml.so"))
