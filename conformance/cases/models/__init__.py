"""Decoders as llama.cpp lays them out: one configurable model, its KV cache, and trajectories over it.

`config` says what a decoder and its context are, `decoder` builds the graph of one ubatch, `kv` its caches, `cells`
keeps the books on who sits where, `weights` gives the bytes, `trajectory` makes a case of a plan, `grammar` reads ids.
"""

from __future__ import annotations

from .config import Cparams, Hparams
from .grammar import make, with_seed
from .trajectory import Trajectory

__all__ = ["Cparams", "Hparams", "Trajectory", "make", "with_seed"]
