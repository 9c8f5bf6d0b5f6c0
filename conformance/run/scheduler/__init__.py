"""`sched`: several backends share each graph, as `ggml_backend_sched` lets them.

`assign` places weights and caches, gives every node its device and cuts the graph; `plan` makes parts of a case of it;
`session` runs the parts; `backend` is the whole as a `Backend`.
"""

from __future__ import annotations

from .backend import SchedBackend

__all__ = ["SchedBackend"]
