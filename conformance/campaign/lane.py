"""Service of a lane: `{"chunk": …}` runs a chunk and returns its reply."""

from __future__ import annotations

import os
from dataclasses import asdict

from conformance.process.service import Service


def main() -> None:
    """Answer requests until the caller closes the connection."""
    service = Service()  # before any library may write to stdout
    from .chunk import Chunk, end_journal, execute  # noqa: PLC0415  # as above

    service.serve(lambda header, _: ({"reply": asdict(execute(Chunk.unpack(header["chunk"]), header["lane"]))}, ()))
    end_journal()
    os._exit(0)  # skip the libraries' own clean-up; there is nothing to save


if __name__ == "__main__":
    main()
