"""Devices that a driver emulates on the processor are known by what they are called, or by whose name they bear."""

from __future__ import annotations

import pytest

from conformance.ggml.lib.library import Library

PROCESSOR = "AMD EPYC 9B14"


class _Described(Library):
    """Two devices of a library, of which one is the processor."""

    def __init__(self, type_: str, description: str) -> None:
        self._devices = [("CPU", PROCESSOR), (type_, description)]

    def devices(self) -> dict[str, int]:
        return {f"device {i}": i for i in range(len(self._devices))}

    def device_type(self, device: int) -> str:
        return self._devices[device][0]

    def description(self, device: int) -> str:
        return self._devices[device][1]


@pytest.mark.parametrize(
    ("type_", "description", "emulated"),
    [
        ("GPU", "llvmpipe (LLVM 15.0.6, 256 bits)", True),
        ("GPU", "AMD EPYC, a CPU called Intel", True),  # by opencl.c
        ("GPU", PROCESSOR, True),
        ("IGPU", PROCESSOR, True),
        ("GPU", "AMD Radeon RX 7900 XTX (RADV NAVI31)", False),
        ("CPU", PROCESSOR, False),
    ],
)
def test_a_device_with_the_processors_name_is_emulated(type_: str, description: str, *, emulated: bool) -> None:
    """Intel's OpenCL runtime calls its device as the processor is called, and gets the limits of an emulation."""
    assert _Described(type_, description).software(1) is emulated
