"""Conformance and regression tests for LLM inference backends that execute ggml compute graphs."""

__version__ = "0.1.0"
