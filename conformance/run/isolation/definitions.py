"""Names that settings define, on their way into a worker process: one argument of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from conformance.backend.registry import Named, define, defined


def definitions() -> list[str]:
    """What `take` needs to know the names that this process knows."""
    named = {n: [d.adapter, d.options, d.environment, d.where] for n, d in defined().items()}
    return [json.dumps(named)] if named else []


def take(arguments: Sequence[str]) -> None:
    """Know the names that the process which gave `arguments` knew."""
    for text in arguments:
        pairs = json.loads(text).items()
        define({n: Named(a, tuple(map(tuple, o)), tuple(map(tuple, e)), where) for n, (a, o, e, where) in pairs})
