"""Cases of vision, audio and diffusion graphs, by topic as in `conformance.ggml.ops.media`."""

from . import conv, images, signals

__all__ = ["conv", "images", "signals"]
