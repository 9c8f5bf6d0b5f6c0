"""`xdna2`: an NPU that multiplies matrices in int8 and nothing else; a functional model, no hardware."""

from .backend import Xdna2Backend

__all__ = ["Xdna2Backend"]
