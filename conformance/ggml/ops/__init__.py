"""Every op of ggml: what its constructors make and assert. Importing this package declares them all."""

from . import attention, elementwise, matmul, media, recurrent, rope, rows, training, views, windows

__all__ = ["attention", "elementwise", "matmul", "media", "recurrent", "rope", "rows", "training", "views", "windows"]
