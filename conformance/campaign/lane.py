"""Service of a lane: `{"chunk": …}` runs a chunk and sends a reply after each group.

NumPy gets one thread here, because each core has a lane. A backend does not inherit that: it is tested with the threads
that it has elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import asdict

from conformance.process.service import Frame, Header, Service

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with the number of threads of NumPy's library."""


def main() -> None:
    """Answer requests until the caller closes the connection."""
    service = Service()  # before any library may write to stdout
    ours = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    from .chunk import Chunk, Reply, end_journal, execute  # noqa: PLC0415  # imports NumPy, which reads the variables once

    for name in ours:
        del os.environ[name]

    def show(reply: Reply) -> None:
        service.send({"reply": asdict(reply)})

    def answer(header: Header, _: object) -> Frame:
        return {"reply": asdict(execute(Chunk.unpack(header["chunk"]), header["lane"], show))}, ()

    service.serve(answer)
    end_journal()
    os._exit(0)  # skip the libraries' own clean-up; there is nothing to save


if __name__ == "__main__":
    main()
