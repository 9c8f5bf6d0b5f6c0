"""Running a graph part by part, as a scheduler does that splits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from conformance.backend.interface import Session
from conformance.ggml.partial import Part
from conformance.ggml.tensor import Bytes, Tensor, nbytes


def compute_parts(session: Session, parts: Sequence[Part], inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, Bytes]:
    """Run `parts`, the whole of one graph in order, and give what `Session.compute` of the whole would.

    Args:
        session: opened with the case of the whole graph.
        parts: as `cgraph.partial.split` gives them.
        inputs: leaf of the whole graph -> its bytes.

    Returns:
        Output of the whole graph -> its packed bytes.

    Raises:
        BackendError: the backend failed.
    """
    held: dict[Tensor, Bytes] = dict(inputs)
    found: dict[Tensor, Bytes] = {}
    for part in parts:
        if not part.graph.nodes:
            continue
        fed = {
            leaf: held[root] if root in held else np.zeros(nbytes(root), np.uint8) for leaf, root in part.inputs.items()
        }
        values = session.compute(part.graph, fed, part.outputs)
        found.update((whole, values[node]) for node, whole in part.wanted.items())
        held.update((root, values[node]) for node, root in part.handed.items())
    return found
