"""`sched`: several backends share each graph, as `ggml_backend_sched` lets them.

`devices` reads which, `place` says where weights and caches live, `assign` gives every node its device and cuts the
graph, `plan` makes that into parts of a case, `session` runs the parts, `backend` is the whole as a `Backend`.
"""

from __future__ import annotations

from .backend import SchedBackend

__all__ = ["SchedBackend"]
