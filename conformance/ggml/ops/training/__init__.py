"""Ops of training: gradients, losses, steps of an optimiser."""

from . import gradients, steps

__all__ = ["gradients", "steps"]
