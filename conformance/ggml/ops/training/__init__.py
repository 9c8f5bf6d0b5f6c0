"""Ops of training: gradients, losses, optimiser steps."""

from . import gradients, steps

__all__ = ["gradients", "steps"]
