"""Devices that run without their hardware: what each needs, and the commands that add it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .isa import ISAS
from .make import beside, intel_driver

SOURCE = "pypi:llama-cpp-python==0.3.36"
"""A package of source alone, compiled for any processor, in the commands that are shown."""
OPENCL = "pypi:xllamacpp==2026.10.11549"
"""The package with the newest source, likewise."""
VULKAN = "npm:@node-llama-cpp/linux-x64-vulkan@3.22.1"
"""A package with ggml-vulkan, likewise."""
DAWN = "npm:webgpu@0.6.2", "npm:react-native-webgpu@0.10.2"
"""Packages with Dawn and its headers of the same version, likewise."""
_OPS = "conform run --family ops --level smoke --backend"


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a device needs on a machine."""

    what: str
    """Name of a package, of Debian or PyPI."""
    installer: str
    """Begin of the command that adds it."""
    present: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Device:
    """A device that runs without its hardware."""

    name: str
    needs: tuple[Need, ...]
    running: tuple[str, ...]
    """Commands that run it, once nothing is lacking."""

    def lacks(self) -> list[Need]:
        """Return what this machine does not have."""
        return [n for n in self.needs if not n.present()]

    def adding(self) -> list[str]:
        """Return the commands that add it, one for each installer."""
        by: dict[str, list[str]] = {}
        for need in self.lacks():
            by.setdefault(need.installer, []).append(need.what)
        return [f"{installer} {' '.join(names)}" for installer, names in by.items()]

    def to_json(self) -> dict[str, Any]:
        """Return a strict JSON object."""
        lacks = [n.what for n in self.lacks()]
        return {"name": self.name, "lacks": lacks, "adding": self.adding(), "running": list(self.running)}


def devices() -> list[Device]:
    """Return all devices, those that need least first."""
    headers = "" if _file("usr/include/CL/cl.h") else " --from debian:opencl-headers"
    opencl = (
        f"conform build make opencl --from {OPENCL}{headers} -o opencl",
        f"{_OPS} 'ggml?lib=opencl&device=GPUOpenCL'",
    )
    vulkan = f"GGML_VK_VISIBLE_DEVICES=0 {_OPS} 'ggml?lib={VULKAN}&device=Vulkan0'"
    webgpu = (
        f"conform build make webgpu --from {SOURCE} --from {' --from '.join(DAWN)} -o webgpu",
        f"{_OPS} 'ggml?lib=webgpu&device=WebGPU'",
    )
    return [
        Device("CPU", (), (f"{_OPS} ggml",)),
        *(
            Device(f"CPU {isa} under qemu-user", (APT, CMAKE), (f"{_OPS} 'ggml?lib={SOURCE}&isa={isa}'",))
            for isa in ISAS
        ),
        Device("Vulkan on Mesa's lavapipe", (NPM, LOADER, LAVAPIPE), (vulkan,)),
        Device("WebGPU on Mesa's lavapipe", (CMAKE, COMPILER, NPM, LOADER, LAVAPIPE), webgpu),
        Device(
            "OpenCL on Intel's runtime for CPUs",
            (CMAKE, COMPILER, *((APT,) if headers else ()), INTEL, INTEL_MATHS),
            opencl,
        ),
    ]


def _file(*patterns: str) -> bool:
    """Return True if a file below / matches a pattern."""
    return any(p for pattern in patterns for p in Path("/").glob(pattern))


def _program(name: str, package: str) -> Need:
    return Need(package, _DEBIAN, partial(shutil.which, name))


_DEBIAN, _PYPI = "apt-get install", "pip install"
APT = Need("apt-get and dpkg-deb", "# a Debian or Ubuntu, or a container of one, has",
           lambda: shutil.which("apt-get") and shutil.which("dpkg-deb"))  # fmt: skip
CMAKE, COMPILER, NPM = _program("cmake", "cmake"), _program("c++", "g++"), _program("npm", "npm")
LOADER = Need("libvulkan1", _DEBIAN, partial(_file, "usr/lib*/libvulkan.so.1", "usr/lib/*/libvulkan.so.1"))
LAVAPIPE = Need("mesa-vulkan-drivers", _DEBIAN, partial(_file, "usr/share/vulkan/icd.d/lvp_icd*.json"))
INTEL = Need("intel-opencl-rt", _PYPI, intel_driver)
INTEL_MATHS = Need("intel-cmplr-lib-rt", _PYPI, partial(beside, "libsvml.so"))
