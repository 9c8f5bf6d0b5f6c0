"""The digest of a case: of everything that a backend is given. Run it to print those that a test pins."""

from __future__ import annotations

import hashlib
import json

from conformance.case.case import Case
from conformance.ggml.tensor import Tensor
from conformance.run.session.select import build
from conformance.suite import FAMILIES

SAMPLES: dict[str, int] = {
    "ops": 8, "kv_growth": 4, "gqa": 3, "multi_sequence": 3, "weight_placement": 4, "blocks": 4, "alias": 4,
    "random": 6, "relations": 6, "tbo": 3,
}  # fmt: skip
"""Family -> how many ids of its smoke level are pinned."""


def digest(case: Case) -> str:
    """The first 16 hex digits of a SHA-256 of the graphs, every tensor's bytes, parameters and seed."""
    h = hashlib.sha256()
    number: dict[Tensor, int] = {}
    for t, data in case.persistent.items():
        _tensor(h, t, number)
        h.update(data.tobytes())
    for step in case.steps:
        for t in step.graph.tensors():
            _tensor(h, t, number)
        for t, data in step.inputs.items():
            h.update(f"input {number[t]}".encode())
            h.update(data.tobytes())
        h.update(f"nodes {[number[t] for t in step.graph]} outputs {[number[t] for t in step.outputs]}".encode())
        h.update(json.dumps(step.note, sort_keys=True).encode())
    h.update(json.dumps([case.id, case.params, case.seed, case.generator], sort_keys=True).encode())
    return h.hexdigest()[:16]


def _tensor(h: hashlib._Hash, t: Tensor, number: dict[Tensor, int]) -> None:
    if t in number:
        return
    number[t] = len(number)
    src = [None if s is None else number[s] for s in t.src]
    view = None if t.view_src is None else number[t.view_src]
    h.update(f"{t.type} {t.ne} {t.nb} {t.op} {t.op_params} {src} {view} {t.view_offs} {t.flags} {t.name}".encode())


def sample() -> list[str]:
    """The pinned ids."""
    found = []
    for family, n in SAMPLES.items():
        ids = [i for i in FAMILIES[family].ids("smoke") if "nodes=" not in i]  # those are recorded from llama.cpp
        found += ids[:: max(1, len(ids) // n)][:n]
    return found


if __name__ == "__main__":
    print(json.dumps({i: digest(build(i)) for i in sample()}, indent=4))  # noqa: T201  # its output
