"""Ops of ggml: what constructors make and assert; importing this package declares them."""

from . import attention, elementwise, matmul, media, recurrent, rope, rows, training, views, windows

__all__ = ["attention", "elementwise", "matmul", "media", "recurrent", "rope", "rows", "training", "views", "windows"]
