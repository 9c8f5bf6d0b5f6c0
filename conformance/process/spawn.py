"""Start a child process, and end it with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from conformance.ggml.errors import UnavailableError

from .launcher import launch

LAUNCHER: Final = os.path.abspath(launch.__file__)  # noqa: PTH100  # a str, with links unresolved
ROOT: Final = str(Path(LAUNCHER).parents[3])
"""The folder that holds this package."""
POSIX: Final = hasattr(os, "fork")
KILL: Final[int] = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that a process cannot catch; Windows has only TerminateProcess."""
PATIENCE = 2 * launch.PATIENCE
"""Seconds that a supervisor has to kill its group."""


class Child(subprocess.Popen[bytes]):
    """A child process and its supervisor (`launcher`); `pid` is that of the supervisor.

    Its exit code and streams are those of `subprocess.Popen`. It ends with `end_group`, when nothing references it, or
    when this process ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        lifeline: tuple[int, int] | None,
        **streams: Any,  # noqa: ANN401  # as for Popen
    ) -> None:
        self._owner = os.getpid()
        if lifeline is None:
            super().__init__(command, **streams)
            self._finalizer = weakref.finalize(self, _job(self))
            return
        reading, writing = lifeline
        self._finalizer = weakref.finalize(self, partial(os.close, writing))
        try:
            super().__init__(command, pass_fds=(reading,), **streams)
        except BaseException:
            self._finalizer()
            raise
        finally:
            os.close(reading)
        # Popen.wait may keep its lock if Ctrl-C comes before its `try`; a reentrant one lets this thread wait again
        self._waitpid_lock = threading.RLock()

    @property
    def ours(self) -> bool:
        """True in the process that started it, False in its forks."""
        return self._owner == os.getpid()

    def release(self) -> None:
        """Close its lifeline, which ends it."""
        self._finalizer()


def _job(popen: subprocess.Popen[bytes]) -> Callable[[], None]:
    """Return a function that ends a child's job on Windows; UnavailableError elsewhere."""
    if sys.platform == "win32":
        return _win32_job(popen)
    raise UnavailableError(f"{sys.platform} has neither fork nor job objects, so a child could outlive its parent")


def spawn(
    target: str | Path,
    args: Sequence[str] = (),
    *,
    python: Path | None = None,
    env: Mapping[str, str] | None = None,
    **popen: Any,  # noqa: ANN401  # as for Popen
) -> Child:
    """Start a module of this package; the current directory is not on its `sys.path`.

    With `python`, start a script under that interpreter in isolated mode (`-I`). `env` None inherits ours; `popen`
    takes the streams and `cwd` of `subprocess.Popen`.
    """
    if python is None:
        return _start([sys.executable, LAUNCHER], [ROOT, "module", str(target), *args], env, **popen)
    return _start([str(python), "-I", LAUNCHER], ["", "script", str(target), *args], env, **popen)


def spawn_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    **popen: Any,  # noqa: ANN401  # as for Popen
) -> Child:
    """Start any program, as `spawn`; the exit code is 127 if it cannot be started."""
    return _start([sys.executable, "-I", "-S", LAUNCHER], ["", "command", *command], env, **popen)


def words(module: str, interpreter: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module like `spawn`, without a supervisor."""
    return [*(interpreter or [sys.executable]), LAUNCHER, "", ROOT, "module", module]


def _start(
    command: Sequence[str],
    rest: Sequence[str],
    env: Mapping[str, str] | None,
    **popen: Any,  # noqa: ANN401  # as for Popen
) -> Child:
    popen["env"] = environment(os.environ if env is None else env)
    lifeline = os.pipe() if POSIX else None
    return Child([*command, str(lifeline[0]) if lifeline else "", *rest], lifeline, **popen)


def end_group(popen: Child, patience: float = 0.0) -> None:
    """End a child and its descendants, unless it ends by itself within `patience` seconds.

    Its streams stay open, so its output can still be read.
    """
    if not popen.ours:
        return
    if not ended(popen, patience):
        popen.terminate()  # its supervisor kills the group and ends with the child's status
        if not ended(popen, PATIENCE):
            for pid in [*launch.descendants(popen.pid), popen.pid]:  # the supervisor was stopped
                with suppress(OSError):
                    os.kill(pid, KILL)
            popen.wait()
    popen.release()


def ended(popen: Child, patience: float) -> bool:
    """Wait up to `patience` seconds for a child; return True if it has ended."""
    try:
        popen.wait(patience)
    except subprocess.TimeoutExpired:
        return False
    return True


def interrupt(popen: Child, patience: float) -> None:
    """Send SIGINT like Ctrl-C; end the group if it lives after `patience` seconds."""
    if POSIX:
        with suppress(OSError):
            popen.send_signal(signal.SIGINT)
        end_group(popen, patience)
    else:
        end_group(popen)


def worker_pid(popen: Child) -> int | None:
    """Return the pid of the process below its supervisor; None if the system does not report it."""
    if not POSIX:
        return popen.pid
    return next(iter(launch.children(popen.pid)), None)


def is_traced(pid: int) -> bool:
    """Return True if a debugger is attached to a process (Linux only)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return "TracerPid:" in status and "TracerPid:\t0\n" not in status


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without PYTHONPATH entries that name the current directory."""
    out = dict(env)
    entries = [e for e in out.pop("PYTHONPATH", "").split(os.pathsep) if e and os.path.normpath(e) != os.curdir]
    if entries:
        out["PYTHONPATH"] = os.pathsep.join(entries)
    return out


# -- Windows: the system ends all processes of a job object when its last handle is closed --------------------------

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

    def _win32_job(popen: subprocess.Popen[bytes]) -> Callable[[], None]:
        """Put a new process into its own job object; return a function that ends the job."""
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
        kernel.AssignProcessToJobObject(handle, int(popen._handle))  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public access

        def close() -> None:
            kernel.CloseHandle(handle)

        return close
