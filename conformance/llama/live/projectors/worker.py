"""The service that runs libmtmd in its own process, which a shape or a device may crash.

Its requests, by their fields:

`load` (`encoder.Load`'s fields) and `device` ("" for the CPU alone): load a projector. `run` (a name of
`relations.MEDIA`) and `file`: encode a medium; the reply is `{"chunks": n}`, with an array per chunk in the file, or
`{"failed": text}`. `relation` (a name of `relations.RELATIONS`) and `folder`: the reply is `{"comparisons": [...]}`,
with `folder/NAME.npz`. Both may reply `{"unsupported": text}` if the library lacks a function. `record` (a `Medium`)
and `output`: write the CPU's values as a case file; the reply is empty.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.lib.mtmd import Mtmd
from conformance.ggml.lib.rpc import attach
from conformance.llama.zoo.load import LacksError, RefusedError
from conformance.llama.zoo.worker import last_words
from conformance.process.service import Frame, Service, failure

from .encoder import Encoder, Load, Medium, UnknownError
from .record import record
from .relations import MEDIA, RELATIONS


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    loaded: list[Encoder] = []

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            if "load" in header:
                loaded.append(encoder(Load(**header["load"]), header["device"], header["rpc"]))
                return {}, ()
            if "record" in header:
                return _record(loaded[-1], header["record"], Path(header["output"])), ()
            return reply(loaded[-1], header), ()
        except ConformanceError as e:
            return failure(e, UsageError.__name__)

    Service().serve(answer)
    os._exit(0)  # a library's own clean-up proves nothing, and there is nothing to save


def encoder(load: Load, device: str, rpc: str = "") -> Encoder:
    """Load a projector on a device; ConformanceError if the library is missing."""
    library = Mtmd(load.lib)
    library.initialise(last_words)
    attach(library, rpc)
    return Encoder(library, load, device)


def reply(e: Encoder, ask: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request for a run or a relation."""
    if e.library.absent:
        return {"unsupported": e.library.absent}
    e.library.log.lines.clear()
    try:
        with e.clean():
            return _relation(e, ask["relation"], Path(ask["folder"])) if "relation" in ask else _run(e, ask)
    except LacksError as error:
        return {"unsupported": str(error)}
    except UnknownError as error:
        return {"unsupported": str(error)}
    except RefusedError as error:
        return {"unsupported": f"refused: {error}"}
    except ConformanceError as error:
        return {"failed": str(error)}


def _record(e: Encoder, medium: Medium, output: Path) -> dict[str, Any]:
    if e.library.absent:
        raise UsageError(e.library.absent)
    with e.clean():
        record(e, medium, output)
    return {}


def _run(e: Encoder, ask: Mapping[str, Any]) -> dict[str, Any]:
    chunks = e.look(e.context(), e.medium(MEDIA[ask["run"]]))
    np.savez(Path(ask["file"]), *chunks)
    return {"chunks": len(chunks)}


def _relation(e: Encoder, name: str, folder: Path) -> dict[str, Any]:
    relation = RELATIONS[name]
    if e.load.modality not in relation.modalities:
        return {"unsupported": f"does not apply to {e.load.modality}"}
    comparisons = list(relation.play(e))
    arrays = {f"{k}{i}": getattr(p, k) for i, p in enumerate(comparisons) for k in ("actual", "expected")}
    np.savez(folder / f"{name}.npz", **arrays)
    return {"comparisons": [p.record() for p in comparisons]}


if __name__ == "__main__":
    main()
