"""Runs a command, and ends it with everything it started when whoever started this process is gone, however it went.

It is a group of processes by itself, which is all that can be ended at once, and its standard input is a pipe whose
other end its parent holds: no kill of the parent, not even SIGKILL, leaves the pipe open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def main(descriptor: int, command: Sequence[str]) -> int:
    """The command's exit code, 128 + its signal where one ended it, 127 where it could not be started.

    Args:
        descriptor: a lock, which the command holds too as long as it lives.
        command: a program and its arguments.
    """
    # a handler, since a signal that is ignored stays ignored in what is started
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(descriptor,))  # noqa: S603  # of the table
    except OSError as e:
        print(f"{command[0]} could not be started: {e.strerror}", file=sys.stderr)  # noqa: T201  # its log
        return 127
    code = popen.wait()
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
