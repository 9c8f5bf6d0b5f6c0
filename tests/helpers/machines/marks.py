"""What a test needs of the machine that it runs on."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from conformance.ggml.lib.files import WHEEL

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec(WHEEL) is None, reason=f"{WHEEL} has no wheel for this machine"
)
"""The real ggml and llama.cpp."""
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
"""A compiler of the machine's own, which CI has: sources of ours are compiled and called."""
