"""Processors that qemu-user emulates, and the processor that a library was compiled for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conformance.ggml.errors import unknown

_ELF = {21: "ppc64le", 22: "s390x", 62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64"}
"""`e_machine` -> name as `platform.machine` has it on Linux."""
_HOSTS = {"AMD64": "x86_64", "arm64": "aarch64"}
"""Names of Windows and macOS -> those of Linux."""


@dataclass(frozen=True, slots=True)
class Isa:
    """A processor that is emulated."""

    name: str
    machine: str
    """Name of the architecture in Linux, qemu and wheels."""
    debian: str
    """Name of the architecture in Debian."""
    cpu: str
    """Value of qemu's option `-cpu`."""
    target: str
    """Value of the compiler's option `-mcpu`, for kernels that use all of it."""
    suite: str = "trixie"
    """Release of Debian that has its packages."""
    compiler: str = ""
    """Name of the architecture in GNU triplets, if it is another than `machine`."""

    @property
    def triplet(self) -> str:
        """The GNU triplet, as the compiler and Debian's folders have it."""
        return f"{self.compiler or self.machine}-linux-gnu"


ISAS = {
    i.name: i
    for i in (
        Isa("arm64", "aarch64", "arm64", "cortex-a72", "generic"),
        Isa("arm64-dotprod", "aarch64", "arm64", "max,sve=off,sme=off", "generic+v8_2a+fullfp16+dotprod+i8mm"),
        Isa("arm64-sve", "aarch64", "arm64", "neoverse-v1", "generic+v8_2a+fullfp16+dotprod+i8mm+sve"),
        Isa("riscv64-v", "riscv64", "riscv64", "max,vlen=256", "baseline_rv64+v+zfh+zvfh+zicbop+zihintpause"),
        Isa("s390x", "s390x", "s390x", "max", "z15", "sid"),
        Isa("ppc64le", "ppc64le", "ppc64el", "power10", "pwr9", "sid", "powerpc64le"),
        Isa("loongarch64", "loongarch64", "loong64", "max", "la464", "sid"),
    )
}
"""By name: NEON; dotprod, i8mm; SVE of 256 bits; RVV of 256 bits; VXE2; VSX; LASX."""


def known(name: str) -> Isa:
    """Return the processor called `name`; UsageError lists all."""
    if name not in ISAS:
        raise unknown("isa", name, ISAS)
    return ISAS[name]


def host() -> str:
    """Return the architecture of this process, by its name in Linux."""
    return _HOSTS.get(platform.machine(), platform.machine())


def machine(path: Path) -> str:
    """Return the architecture of an ELF file; "" if it is unknown, or for another format."""
    with path.open("rb") as file:
        head = file.read(20)
    order: Literal["little", "big"] = "big" if head[5:6] == b"\2" else "little"
    return _ELF.get(int.from_bytes(head[18:20], order), "") if head.startswith(b"\x7fELF") else ""
