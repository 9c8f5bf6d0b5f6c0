"""`python -m conformance.cli` runs `conform` with this Python, even if not on PATH."""

import os
import signal
import sys

from conformance.cli import main
from conformance.cli.output import UNWRITABLE
from conformance.process.launcher.launch import spare_collections


def conform() -> None:
    """Run the command line in its own process.

    SIGTERM is Ctrl-C: CI, `timeout`, systemd and Slurm end a job so, and what ran is to be reported.
    """
    spare_collections()
    _check_streams()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    main(prog_name="conform")


def _check_streams() -> None:
    """End a command that was started without stdout.

    A file that it opens would take the number of the stream.
    """
    if sys.stdout is None or sys.stderr is None:
        if sys.stderr is not None:
            sys.stderr.write("conform: cannot write to stdout: it is closed\n")
        os._exit(UNWRITABLE)


if __name__ == "__main__":
    conform()
