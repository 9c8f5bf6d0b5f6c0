"""The service that loads a build: `{"probe": path}` gives the fields of `Build` beyond its name and path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.ggml.lib.library import Library, rpc_server
from conformance.ggml.lib.llama import Llama, find_llama
from conformance.process.service import Frame, Service, failure

_METADATA = "_nlcBuildMetadata.json"
"""In npm's packages of node-llama-cpp: from which release of llama.cpp they were built."""


def main() -> None:
    """Answer requests to their end."""

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            return describe(Path(header["probe"])), ()
        except ConformanceError as e:
            return failure(e)

    Service().serve(answer)
    os._exit(0)  # a library's own clean-up proves nothing, and there is nothing to save


def describe(path: Path) -> dict[str, Any]:
    """The fields of a build; UnavailableError as of `Library`."""
    library = Library(str(path))
    library.load_devices()
    llama, left_out = True, [*library.left_out, *(f"a device: {text}" for text in library.refusals())]
    try:
        with_llama = Llama(str(find_llama(path)))
        left_out += [text for text in with_llama.left_out if text not in left_out]
    except UnavailableError as e:
        llama = False
        left_out.append(f"llama.cpp is not driven: {e}")
    devices = [
        {
            "name": name,
            "type": library.device_type(device),
            "description": library.description(device),
            "software": library.software(device),
            "buffer_types": list(library.buffer_types(device)),
        }
        for name, device in library.devices().items()
    ]
    cpu = next((d for d in library.devices().values() if library.device_type(d) == "CPU"), None)
    return {
        "ggml": library.version,
        "number": number(library),
        "devices": devices,
        "features": [] if cpu is None else library.features(cpu),
        "llama": llama,
        "left_out": left_out,
        "variants": library.variants(),
        "meta": llama and library.ggml.backend_meta_device is not None,
        "server": library.registry("RPC") is not None and rpc_server(library.folder) is not None,
    }


def number(library: Library) -> str:
    """llama.cpp's build number, as its package or the library tells; else ggml's commit, else ""."""
    try:
        release = json.loads((library.folder / _METADATA).read_text("utf-8"))["buildOptions"]["llamaCpp"]["release"]
    except (OSError, ValueError, KeyError, TypeError):
        return library.build
    return str(release)


if __name__ == "__main__":
    main()
