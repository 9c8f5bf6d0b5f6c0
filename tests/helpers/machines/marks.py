"""What a test needs of the machine that it runs on."""

from __future__ import annotations

import importlib.util

import pytest

from conformance.ggml.lib.library import WHEEL

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec(WHEEL) is None, reason=f"{WHEEL} has no wheel for this machine"
)
"""The real ggml and llama.cpp."""
