"""Starting a child process and ending it with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from conformance.ggml.errors import UnavailableError

from .launcher import launch

LAUNCHER: Final = os.path.abspath(launch.__file__)  # noqa: PTH100  # a text, and no link resolved
ROOT: Final = str(Path(LAUNCHER).parents[3])
"""The folder that holds this package."""
POSIX: Final = hasattr(os, "fork")
PATIENCE = 2 * launch.PATIENCE
"""Seconds a keeper gets to end what it keeps."""
REST = 5.0
"""Seconds in which what a child that was ended had written is read."""
Stream = int | IO[Any] | None


class Child(subprocess.Popen[bytes]):
    """A process as `subprocess.Popen` shows it: its exit code, its streams. Its number is its keeper's (`launcher`).

    Every one is ended by `end_group`. One that nobody holds any more, and each when this process ends, is ended by its
    lifeline.
    """

    def __init__(
        self,
        command: Sequence[str],
        lifeline: tuple[int, int] | None,
        pass_fds: Sequence[int],
        **streams: Any,  # noqa: ANN401  # as of Popen
    ) -> None:
        self._owner = os.getpid()
        if lifeline is None:
            super().__init__(command, **streams)
            self._finalizer = weakref.finalize(self, _job(self))
            return
        reading, writing = lifeline
        self._finalizer = weakref.finalize(self, partial(os.close, writing))
        try:
            super().__init__(command, pass_fds=(*pass_fds, reading), **streams)
        except BaseException:
            self._finalizer()
            raise
        finally:
            os.close(reading)

    @property
    def ours(self) -> bool:
        """Whether this very process started it, and no fork of this process asks."""
        return self._owner == os.getpid()

    def release(self) -> None:
        """Close its lifeline: it ends if it has not ended."""
        self._finalizer()


def _job(popen: subprocess.Popen[bytes]) -> Any:  # noqa: ANN401  # a callable; windows has no types elsewhere
    if sys.platform == "win32":
        from .windows import job  # noqa: PLC0415  # that system's alone

        return job(popen)
    raise UnavailableError(f"{sys.platform} has neither fork nor job objects, so nothing would end a child with us")


def spawn(
    module: str,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
) -> Child:
    """Start a module of ours under our own interpreter, the current directory not on its `sys.path`.

    Args:
        module: its full name.
        args: its arguments.
        env: its environment; this process's where None.
        stdin: as of `subprocess.Popen`.
        stdout: as above.
        stderr: as above.
        pass_fds: descriptors that it and its keeper hold too; POSIX only.
        cwd: where it runs; here where None.
    """
    command = [sys.executable, LAUNCHER]
    return _start(
        command, [ROOT, "module", module, *args], env, pass_fds, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd
    )


def spawn_script(
    script: Path,
    args: Sequence[str] = (),
    *,
    python: Path,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    cwd: Path | None = None,
) -> Child:
    """Start a script under another interpreter, on nothing but what is installed there (`python -I`)."""
    command = [str(python), "-I", LAUNCHER]
    rest = ["", "script", str(script), *args]
    return _start(command, rest, None, (), stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd)


def spawn_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start any program; exit code 127 where it cannot be started. Arguments as of `spawn`."""
    rest = ["", "command", *command]
    return _start(
        [sys.executable, "-I", "-S", LAUNCHER], rest, env, pass_fds, stdin=stdin, stdout=stdout, stderr=stderr
    )


def words(module: str) -> list[str]:
    """A command that runs a module of ours as `spawn` does; whoever starts it also ends it."""
    return [sys.executable, LAUNCHER, "", ROOT, "module", module]


def _start(
    command: Sequence[str],
    rest: Sequence[str],
    env: Mapping[str, str] | None,
    pass_fds: Sequence[int],
    **streams: Any,  # noqa: ANN401  # as of Popen
) -> Child:
    streams["env"] = environment(os.environ if env is None else env)
    lifeline = os.pipe() if POSIX else None
    return Child([*command, str(lifeline[0]) if lifeline else "", *rest], lifeline, pass_fds, **streams)


def end_group(popen: Child, patience: float = 0.0) -> None:
    """End a child and all that it started: at once, or where it has not ended by itself after `patience` seconds.

    Its streams are left open: what it wrote can still be read.
    """
    if not popen.ours:
        return
    if not _ended(popen, patience):
        popen.terminate()  # its keeper ends them all, and then itself as the child ended
        if not _ended(popen, PATIENCE):
            for pid in [*launch.descendants(popen.pid), popen.pid]:  # someone stopped the keeper
                with suppress(OSError):
                    os.kill(pid, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
            popen.wait()
    popen.release()


def _ended(popen: Child, patience: float) -> bool:
    try:
        popen.wait(patience)
    except subprocess.TimeoutExpired:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Done:
    """How a child that was given all its input at once ended."""

    code: int
    out: bytes
    err: bytes
    late: bool
    """Whether it was ended because its time was over."""


def run(module: str, given: bytes, seconds: float, env: Mapping[str, str] | None = None) -> Done:
    """Give a module of ours its standard input, wait for its end for so long, and then end what is left of it."""
    pipe = subprocess.PIPE
    popen = spawn(module, env=env, stdin=pipe, stdout=pipe, stderr=pipe)
    late = False
    with popen:
        try:
            try:
                out, err = popen.communicate(given, seconds)
            except subprocess.TimeoutExpired:
                late = True
                end_group(popen)
                out, err = _rest(popen)
        finally:
            end_group(popen)
    return Done(popen.returncode, out, err, late)


def _rest(popen: Child) -> tuple[bytes, bytes]:
    try:
        return popen.communicate(timeout=REST)
    except subprocess.TimeoutExpired as e:  # what left its group on a system that cannot find it holds a stream
        return e.stdout or b"", e.stderr or b""


def interrupt(popen: Child, patience: float) -> None:
    """SIGINT to its group, as Ctrl-C does, and `end_group` where that did not end it after `patience` seconds."""
    if POSIX:
        with suppress(OSError):
            popen.send_signal(signal.SIGINT)
        end_group(popen, patience)
    else:
        end_group(popen)


def worker_pid(popen: Child) -> int | None:
    """The number of the process that does the work, below its keeper; None where the system does not tell."""
    if not POSIX:
        return popen.pid
    return next(iter(launch.children(popen.pid)), None)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env`, its PYTHONPATH without entries that mean the current directory."""
    kept = dict(env)
    if "PYTHONPATH" in kept:
        entries = [e for e in kept["PYTHONPATH"].split(os.pathsep) if e and os.path.normpath(e) != os.curdir]
        kept["PYTHONPATH"] = os.pathsep.join(entries)
        if not entries:
            del kept["PYTHONPATH"]
    return kept
