"""openvino-genai's own reading of a GGUF: an OpenVINO model of it, whose logits OpenVINO computes in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MODEL = "openvino_model.xml"
"""What the pipeline writes beside the GGUF (2026.4)."""


class Program:
    """The model of `LLMPipeline`; RuntimeError for an architecture or type that it does not read."""

    def __init__(self, model: Path, folder: Path) -> None:
        import openvino  # noqa: PLC0415  # an extra of the user's
        import openvino_genai  # noqa: PLC0415  # as above

        link = folder / "model.gguf"
        link.symlink_to(model)
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(folder / MODEL), "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
        self._request = compiled.create_infer_request()
        self._names = {i.any_name for i in compiled.inputs}
        self._past = 0

    def read(self, tokens: list[int]) -> NDArray[np.float32]:
        """As `worker.Program`."""
        begin, end = self._past, self._past + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        self._past = end
        logits: NDArray[np.float32] = self._request.get_tensor("logits").data[0, -1].astype(np.float32)
        return logits
