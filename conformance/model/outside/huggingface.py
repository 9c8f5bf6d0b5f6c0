"""transformers' own reading of a GGUF: all weights widened to float32, and computed by torch on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Program:
    """The model of `AutoModelForCausalLM`; ValueError for an architecture that it does not read."""

    def __init__(self, model: Path, _folder: Path) -> None:
        import torch  # noqa: PLC0415  # an extra of the user's
        import transformers  # noqa: PLC0415  # as above

        self._torch = torch
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(str(model.parent), gguf_file=model.name, dtype=torch.float32, local_files_only=True)
        self._model.eval()
        self._past: Any = None

    def read(self, tokens: list[int]) -> NDArray[np.float32]:
        """As `worker.Program`."""
        with self._torch.no_grad():
            out = self._model(
                input_ids=self._torch.tensor([tokens]), past_key_values=self._past, use_cache=True, return_dict=True
            )
        self._past = out.past_key_values
        logits: NDArray[np.float32] = out.logits[0, -1].float().numpy()
        return logits
