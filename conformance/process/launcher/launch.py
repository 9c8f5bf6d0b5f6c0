"""Run a module, script or command for `conformance.process.spawn` in its own process group.

Python puts the folder of a script first on `sys.path`, not the current folder, and this file removes that entry too. It
imports only the standard library: it also runs under the Python of another environment, which may have another version
of this package or none.

On POSIX it forks before anything is loaded. The child becomes the target and leads a new process group. The parent
becomes its supervisor, with one thread and none of the child's state. It kills the group when its own parent is gone
(then the pipe from there closes) or sends SIGTERM. When the child has ended, it kills processes that the child left
running. It does not depend on locks of the child's interpreter.

Linux: the supervisor is the subreaper of its descendants, so it also finds and kills processes that left the group
through `setsid`, and the child dies with its supervisor. On other POSIX systems a process that leaves the group is not
killed. Windows has no fork and no supervisor: `conformance.process.spawn` uses a job object there.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from contextlib import suppress

SUBREAPER, PARENT_DEATH, DUMPABLE = 36, 1, 4
"""Options of Linux' `prctl`."""
GLANCE = 1.0
"""Seconds between two checks that the parent is alive: a fork of it may keep the pipe open."""
PATIENCE = 5.0
"""Seconds to wait for killed processes: a driver may block one forever."""
PACKAGE = "conformance"


def children(pid: int) -> list[int]:
    """Return the child pids of a process on Linux, oldest first; empty elsewhere."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  # 20 times a second
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123  # as above
                found += map(int, file.read().split())
        except FileNotFoundError:
            if thread == str(pid) and os.path.isdir(f"/proc/{pid}"):  # noqa: PTH112  # as above
                return _scan(pid)  # this kernel lacks that file
        except OSError:
            pass
    return found


def _scan(parent: int) -> list[int]:
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  # as above
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123  # as above
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.append(int(name))
        except (OSError, IndexError, ValueError):
            pass
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, nearest first."""
    found = children(pid)
    for child in found:  # grows while iterating
        found += [c for c in children(child) if c not in found]
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        try:
            import ctypes  # noqa: PLC0415  # some builds of Python lack it

            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
        except (ImportError, OSError, AttributeError):
            pass


if sys.platform != "win32":  # there a job object replaces the supervisor (process.spawn)

    def fork(lifeline: int) -> None:
        """Return in the child; the parent becomes its supervisor and never returns.

        `lifeline` is the read end of a pipe that closes when the parent of this process is gone.
        """
        handled = {signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        os.setpgid(0, 0)  # no new session: Linux schedules sessions in turn, so a worker's would have to wait
        _prctl(SUBREAPER, 1)
        supervisor, starter = os.getpid(), os.getppid()
        child = os.fork()
        if child:
            with suppress(OSError):
                os.setpgid(child, child)  # in both processes, whichever is first
            try:
                code = _Supervisor(child, lifeline, starter).keep()
            finally:
                _kill(child)
            _end_as(code)
        os.setpgid(0, 0)
        _prctl(PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        os.close(lifeline)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)

    class _Supervisor:
        """Waits until its child or its parent ends, or for SIGTERM."""

        def __init__(self, child: int, lifeline: int, starter: int) -> None:
            self._child = child
            self._starter = starter
            self._lifeline = lifeline
            self._code: int | None = None
            self._over = False
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)  # the child's streams end with the child
            self._wake, wake = os.pipe()
            for end in (self._wake, wake):
                os.set_blocking(end, False)
            signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
            for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, _nothing)
            signal.signal(signal.SIGINT, self._pass_on)
            signal.signal(signal.SIGTERM, self._end)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())

        def keep(self) -> int:
            """Wait for the child, kill its descendants, and return its exit code, -N for signal N."""
            import select  # noqa: PLC0415  # not before the fork

            while not self._over and not self._reap():
                ready, _, _ = select.select([self._lifeline, self._wake], [], [], GLANCE)
                if self._wake in ready:
                    os.read(self._wake, 4096)
                if (self._lifeline in ready and not os.read(self._lifeline, 1)) or os.getppid() != self._starter:
                    break
            deadline = time.monotonic() + PATIENCE
            _kill(self._child)
            while not self._gone() and time.monotonic() < deadline:
                _kill(self._child)
                time.sleep(0.001)
            return -signal.SIGKILL if self._code is None else self._code

        def _reap(self) -> bool:
            """Collect the status of ended processes; return True if the child has ended."""
            self._gone()
            return self._code is not None

        def _gone(self) -> bool:
            """Collect the status of ended processes; return True if no child is left."""
            try:
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == self._child:
                        self._code = os.waitstatus_to_exitcode(ended[1])
            except ChildProcessError:
                return True
            return False

        def _pass_on(self, number: int, _frame: object) -> None:
            with suppress(OSError):
                os.killpg(self._child, number)

        def _end(self, *_: object) -> None:
            self._over = True

    def _nothing(*_: object) -> None:
        """Handle a signal without effect; an ignored signal would stay ignored in the child."""

    def _kill(group: int) -> None:
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)

    def _end_as(code: int) -> None:
        """End with the child's status, so that the parent sees it."""
        if code >= 0:
            os._exit(code)
        _prctl(DUMPABLE, 0)
        try:
            import resource  # noqa: PLC0415  # not before the fork

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(-code, signal.SIG_DFL)
        except (ImportError, OSError, ValueError):  # SIGKILL has no handler
            pass
        os.kill(os.getpid(), -code)
        time.sleep(GLANCE)
        os._exit(128 - code)


def main(lifeline: str, root: str, how: str, target: str, *arguments: str) -> None:
    """Become the target: the module, script or command (see `how`), with its own arguments.

    `lifeline` is a descriptor as for `fork`; empty for none. `root` is the folder that contains this package, to run
    one of its modules; empty to use the environment's own.
    """
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # importing pathlib takes as long as a fork
    sys.path[:] = [p for p in sys.path if os.path.realpath(p) != os.path.realpath(here)]
    if lifeline and sys.platform != "win32":
        fork(int(lifeline))
    if how == "command":
        for name in ("SIGPIPE", "SIGXFSZ", "SIGINT"):  # a signal that Python ignores stays ignored after exec
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_DFL)
        try:
            os.execvp(target, [target, *arguments])  # noqa: S606  # the caller's command, without a shell
        except OSError as e:
            os.write(2, f"{target} could not be started: {e.strerror}\n".encode())
            os._exit(127)
    spare_collections()
    sys.argv = [target, *arguments]
    if root:
        _find(root)
    import runpy  # noqa: PLC0415  # not before the current directory is off the path

    if how == "script":
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def spare_collections() -> None:
    """Run the garbage collector less often, and not at exit.

    Objects created by imports stay alive; with the default threshold, scanning them takes a fifth of the start-up time.
    """
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)


def _find(root: str) -> None:
    """Make `root`'s package importable: first on the path if there is another one, else last."""
    from importlib.util import find_spec  # noqa: PLC0415  # not before the current directory is off the path

    found = find_spec(PACKAGE)
    if found is None:
        sys.path.append(root)
        return
    own = os.path.realpath(os.path.join(root, PACKAGE))  # noqa: PTH118  # as above
    if own not in map(os.path.realpath, found.submodule_search_locations or ()):
        sys.path.insert(0, root)


if __name__ == "__main__":
    main(*sys.argv[1:])
