"""Conformance and regression tests for LLM inference backends that execute ggml compute graphs."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ggml-conformance")
except PackageNotFoundError:  # not installed, only on the path
    __version__ = "0"
