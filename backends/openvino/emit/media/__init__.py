"""Emitters of the ops of vision, audio and diffusion graphs."""

from __future__ import annotations

from backends.openvino.translating.plan import Emitter

from . import conv, images

EMITTERS: dict[str, Emitter] = conv.EMITTERS | images.EMITTERS
"""Op -> its emitter."""
