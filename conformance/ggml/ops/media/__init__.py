"""Ops of vision, audio and diffusion graphs: convolutions, images, signals."""

from . import conv, images, signals

__all__ = ["conv", "images", "signals"]
