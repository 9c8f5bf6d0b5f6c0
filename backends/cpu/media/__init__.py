"""Ops of vision, audio and diffusion graphs, by topic as in `conformance.ggml.ops.media`."""

from __future__ import annotations

from backends.cpu.takes import Table

from . import conv, images, signals

TABLE: Table = conv.TABLE | images.TABLE | signals.TABLE
