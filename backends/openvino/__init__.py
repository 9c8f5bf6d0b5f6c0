"""OpenVINO backends: cgraphs translated to OpenVINO models.

Importing `openvino` sends an event to Google Analytics through the package `openvino_telemetry`, if installed. Hiding
that package here makes OpenVINO use its own empty stand-in.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None is Python's word for "not there"

from .backend import OpenVinoStateless  # noqa: E402  # nothing may import openvino before

__all__ = ["OpenVinoStateless"]
