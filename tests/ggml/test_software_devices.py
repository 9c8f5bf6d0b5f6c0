"""Devices that a driver emulates on the processor are known by what they are called, or by whose name they bear."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance.ggml.lib.devices import Devices
from conformance.ggml.lib.layout import DEVICE_TYPES, OlderProps
from conformance.ggml.lib.log import Log

PROCESSOR = "AMD EPYC 9B14"


def _devices(*described: tuple[str, str]) -> Devices:
    """Return the devices of a ggml that has these types and descriptions."""
    ggml = SimpleNamespace(
        backend_dev_count=lambda: len(described),
        backend_dev_get=lambda i: i,
        backend_dev_name=lambda i: f"device {i}".encode(),
        backend_dev_type=lambda i: DEVICE_TYPES.index(described[i][0]),
        backend_dev_description=lambda i: described[i][1].encode(),
        backend_dev_get_props=lambda _, at: ctypes.memset(at, 0, 2 * ctypes.sizeof(OlderProps)),
    )
    return Devices(ggml, "ggml", Path(), Log())


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
    assert _devices(("CPU", PROCESSOR), (type_, description)).at(1).software is emulated
