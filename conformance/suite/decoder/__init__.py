"""Decoders as llama.cpp lays them out: one configurable model, its KV cache, and trajectories over it.

`config` says what a decoder and its context are, `presets` which architectures there are, `tensors` lists a model's
weights and `weights` gives their bytes. `decoder` builds the graph of one ubatch from its sublayers (`inputs`,
`attention`, `ffn`, `experts`, `shortconv`, all on a `sketch`), `shift` the one that moves positions. `kv` has the
caches, `memory` the books: `cells` and `states` say who sits where. `trajectory` makes a case of a plan, `grammar`
reads ids, `layout` holds our graphs against llama.cpp's.
"""

from __future__ import annotations

from .config import Cparams, Hparams
from .grammar import make, with_seed
from .trajectory import Trajectory

__all__ = ["Cparams", "Hparams", "Trajectory", "make", "with_seed"]
