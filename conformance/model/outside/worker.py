"""The service of a voice from outside. Its requests, in this order:

`load` (a module of this folder), `model` (a GGUF), `folder` (for its files). `prompt`, `tokens` and `logits`: decodes
the prompt at once, then each token by itself over living caches, and writes the logits of the prompt's last row and
of each token, `[1 + len(tokens), n_vocab]` in float32, to the file `logits`.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import BackendError
from conformance.process.service import Frame, Service, failure


class Program(Protocol):
    """A model in another program."""

    def read(self, tokens: list[int]) -> NDArray[np.float32]:
        """The logits after `tokens`, which follow all that were read before: `[n_vocab]`."""


def main() -> None:
    """Answer requests to their end."""
    programs: list[Program] = []

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            if "load" in header:
                module = import_module(f".{header['load']}", __package__)
                programs.append(module.Program(Path(header["model"]), Path(header["folder"])))
            else:
                steps = [header["prompt"], *([token] for token in header["tokens"])]
                np.save(header["logits"], np.stack([programs[-1].read(step) for step in steps]))
        except Exception as e:  # noqa: BLE001  # whatever a program raises: it is the answer
            return failure(BackendError(f"{type(e).__name__}: {' '.join(str(e).split())[:400]}"))
        return {}, ()

    Service().serve(answer)
    os._exit(0)  # a library's own clean-up proves nothing, and there is nothing to save


if __name__ == "__main__":
    main()
