"""The real ggml under another name, which dies or interrupts at GET_ROWS.

Its option says how; signals go to the process that runs it. Found by its entry point.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from planted_adapter import planted_adapter

ADAPTER = """
import os, signal, time
from pathlib import Path
import psutil
from backends.ggml import GgmlBackend
from conformance.backend.interface import Backend

class Dying(GgmlBackend):
    delegates = ("ggml",)

    def __init__(self, how="", mark=""):
        super().__init__()
        self.by_case = True
        self.how, self.mark = how, Path(mark)

    def supports_case(self, case):
        if "GET_ROWS" in case.id:
            self.die()
        return Backend.supports_case(self, case)

    def open(self, case):
        session = super().open(case)
        if self.how == "abort" and any(n.op == "GET_ROWS" for s in case.steps for n in s.graph):
            session.compute = lambda *_, **__: os.abort()
        return session

    def die(self):
        if self.how == "exit":
            raise SystemExit(0)
        if self.how == "gone":
            self.send(signal.SIGKILL)
        if self.how == "killed once" and not self.mark.exists():
            self.mark.touch()
            self.send(signal.SIGKILL)
        if self.how == "interrupt":
            self.send(signal.SIGINT)

    def send(self, number):
        os.kill(psutil.Process(os.getppid()).ppid(), number)
        time.sleep(60)
"""
DEADLY = "ops/GET_ROWS-f32+i32-a=288x7,n=2,va=pad@906"
HARMLESS = "ops/ADD-*"


@contextmanager
def installed(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """An adapter called `dying`, here and in child processes, which leave what they were doing in `folder`."""
    patch.setenv("TMPDIR", str(folder))
    with planted_adapter(folder, patch, "dying", ADAPTER, "Dying"):
        yield
