"""Windows: a job object holds a process and all that it starts, and the system ends them when its handle is closed,
which it is when whoever holds it is gone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    _KILL_ON_JOB_CLOSE = 0x2000
    _EXTENDED_LIMIT = 9

    class _Basic(ctypes.Structure):
        _fields_ = (
            ("PerProcessUserTimeLimit", wintypes.LARGE_INTEGER),
            ("PerJobUserTimeLimit", wintypes.LARGE_INTEGER),
            ("LimitFlags", wintypes.DWORD),
            ("MinimumWorkingSetSize", ctypes.c_size_t),
            ("MaximumWorkingSetSize", ctypes.c_size_t),
            ("ActiveProcessLimit", wintypes.DWORD),
            ("Affinity", ctypes.c_size_t),
            ("PriorityClass", wintypes.DWORD),
            ("SchedulingClass", wintypes.DWORD),
        )

    class _Extended(ctypes.Structure):
        _fields_ = (
            ("Basic", _Basic),
            ("IoInfo", ctypes.c_ulonglong * 6),
            ("ProcessMemoryLimit", ctypes.c_size_t),
            ("JobMemoryLimit", ctypes.c_size_t),
            ("PeakProcessMemoryUsed", ctypes.c_size_t),
            ("PeakJobMemoryUsed", ctypes.c_size_t),
        )

    def job(popen: subprocess.Popen[bytes]) -> Callable[[], None]:
        """Put a process that has just begun into a job of its own; what is given ends it and all that it started."""
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.CreateJobObjectW.restype = wintypes.HANDLE
        kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, wintypes.LPCWSTR)
        kernel.SetInformationJobObject.argtypes = (wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD)
        kernel.AssignProcessToJobObject.argtypes = (wintypes.HANDLE, wintypes.HANDLE)
        kernel.CloseHandle.argtypes = (wintypes.HANDLE,)
        handle = kernel.CreateJobObjectW(None, None)
        limits = _Extended()
        limits.Basic.LimitFlags = _KILL_ON_JOB_CLOSE
        kernel.SetInformationJobObject(handle, _EXTENDED_LIMIT, ctypes.byref(limits), ctypes.sizeof(limits))
        kernel.AssignProcessToJobObject(handle, int(popen._handle))  # type: ignore[attr-defined]  # noqa: SLF001  # there is no other way to it

        def close() -> None:
            kernel.CloseHandle(handle)

        return close
