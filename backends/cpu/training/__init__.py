"""Ops of training, by topic as in `conformance.ggml.ops.training`."""

from __future__ import annotations

from backends.cpu.takes import Table

from . import gradients, steps

TABLE: Table = gradients.TABLE | steps.TABLE
