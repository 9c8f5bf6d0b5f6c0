"""The reference under another name, which at GET_ROWS does what its option says; found by its entry point."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.backend import registry

ADAPTER = """
import os, signal
from pathlib import Path
import numpy as np
from backends.cpu import CpuBackend

class Dying(CpuBackend):
    isolate = False

    def __init__(self, how="", mark=""):
        super().__init__()
        self.how, self.mark = how, Path(mark)

    def supports_case(self, case):
        if "GET_ROWS" in case.id:
            self.die()
        return super().supports_case(case)

    def die(self):
        if self.how == "exit":
            raise SystemExit(0)
        if self.how == "gone":
            os._exit(0)
        if self.how == "killed once" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "interrupt":
            raise KeyboardInterrupt
"""
DEADLY = "ops/GET_ROWS-bf16+i32-a=33x7,n=12@*"
HARMLESS = "ops/ADD-*"


@contextmanager
def installed(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """An adapter called `dying`, here and in child processes."""
    (folder / "dying_adapter.py").write_text(ADAPTER)
    info = folder / "dying_adapter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dying-adapter\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[conformance.backends]\ndying = dying_adapter:Dying\n")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    patch.syspath_prepend(folder)
    for cached in (registry.adapter, registry._installed):
        cached.cache_clear()
    yield
    for cached in (registry.adapter, registry._installed):
        cached.cache_clear()
