"""OpenVINO backends: cgraphs translated to OpenVINO models."""

from .backend import OpenVinoStateless

__all__ = ["OpenVinoStateless"]
