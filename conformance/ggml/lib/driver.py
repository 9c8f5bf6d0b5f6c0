"""The driver of a device, by the loaders of Vulkan and OpenCL in this process.

A ggml library has loaded them, but does not name the driver. Its version decides which faults are known, and another
driver tells whose a fault is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

_P, _U32, _Size = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t
_MOST = 16
"""Maximum number of platforms and of devices that are asked."""
_DEVICE_NAME, _DRIVER_VERSION, _PLATFORM_NAME = 0x102B, 0x102D, 0x0902
_ALL_TYPES = 0xFFFFFFFF
_INSTANCE, _APPLICATION, _PROPERTIES, _DRIVER = 1, 0, 1000059001, 1000196000
"""Values of VkStructureType."""
_VULKAN_1_2 = 1 << 22 | 2 << 12


class _ApplicationInfo(ctypes.Structure):
    _fields_ = (
        ("type", _U32), ("next", _P), ("name", ctypes.c_char_p), ("version", _U32),
        ("engine", ctypes.c_char_p), ("engine_version", _U32), ("api", _U32),
    )  # fmt: skip


class _InstanceInfo(ctypes.Structure):
    _fields_ = (
        ("type", _U32), ("next", _P), ("flags", _U32), ("application", ctypes.POINTER(_ApplicationInfo)),
        ("n_layers", _U32), ("layers", _P), ("n_extensions", _U32), ("extensions", _P),
    )  # fmt: skip


class _DriverProperties(ctypes.Structure):
    _fields_ = (
        ("type", _U32), ("next", _P), ("id", _U32), ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256), ("conformance", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Properties(ctypes.Structure):
    """VkPhysicalDeviceProperties2; its limits are not read."""

    _fields_ = (
        ("type", _U32), ("next", ctypes.POINTER(_DriverProperties)), ("numbers", _U32 * 5),
        ("device", ctypes.c_char * 256), ("rest", ctypes.c_uint64 * 128),
    )  # fmt: skip


def driver_of(description: str) -> str:
    """Return name and version of the driver of a device that ggml describes so; "" if unknown.

    A library before the loader may have put words behind the device's own name.
    """
    for soname, ask in (("libvulkan.so.1", _vulkan), ("libOpenCL.so.1", _opencl)):
        loader = _loaded(soname)
        if loader is not None:
            for device, driver in ask(loader):
                if device and description.startswith(device):
                    return driver
    return ""


def _loaded(soname: str) -> ctypes.CDLL | None:
    """Return a library that this process has loaded; None if it has not."""
    no_load = getattr(os, "RTLD_NOLOAD", None)
    try:
        return None if no_load is None else ctypes.CDLL(soname, mode=no_load | os.RTLD_LAZY)
    except OSError:
        return None


def _opencl(cl: ctypes.CDLL) -> Iterator[tuple[str, str]]:
    """Yield name and driver of each OpenCL device."""
    for platform in _handles(cl.clGetPlatformIDs):
        name = _text(cl.clGetPlatformInfo, platform, _PLATFORM_NAME)
        for device in _handles(cl.clGetDeviceIDs, _P(platform), ctypes.c_uint64(_ALL_TYPES)):
            version = _text(cl.clGetDeviceInfo, device, _DRIVER_VERSION)
            yield _text(cl.clGetDeviceInfo, device, _DEVICE_NAME), f"{name} {version}"


def _handles(ask: ctypes._NamedFuncPointer, *of: object) -> list[int]:
    """Return the handles that a function of OpenCL gives; none if it fails."""
    found, n = (_P * _MOST)(), _U32()
    return [] if ask(*of, _U32(_MOST), found, ctypes.byref(n)) else [h for h in found[: min(n.value, _MOST)] if h]


def _text(ask: ctypes._NamedFuncPointer, handle: int, what: int) -> str:
    text = ctypes.create_string_buffer(1024)
    return "" if ask(_P(handle), _U32(what), _Size(1024), text, None) else text.value.decode(errors="replace").strip()


def _vulkan(vk: ctypes.CDLL) -> Iterator[tuple[str, str]]:
    """Yield name and driver of each Vulkan device."""
    application = _ApplicationInfo(type=_APPLICATION, api=_VULKAN_1_2)
    about, instance = _InstanceInfo(type=_INSTANCE, application=ctypes.pointer(application)), _P()
    if vk.vkCreateInstance(ctypes.byref(about), None, ctypes.byref(instance)):
        return
    found, n = (_P * _MOST)(), _U32(_MOST)
    if vk.vkEnumeratePhysicalDevices(instance, ctypes.byref(n), found) >= 0:  # VK_INCOMPLETE is positive
        for device in found[: n.value]:
            driver = _DriverProperties(type=_DRIVER)
            properties = _Properties(type=_PROPERTIES, next=ctypes.pointer(driver))
            vk.vkGetPhysicalDeviceProperties2(_P(device), ctypes.byref(properties))
            said = f"{driver.name.decode(errors='replace')} {driver.info.decode(errors='replace')}"
            yield properties.device.decode(errors="replace"), said.strip()
    vk.vkDestroyInstance(instance, None)
