"""Worker service that inspects a build: `{"probe": path}` returns the fields of `Build`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.ggml.lib.files import RPC_SERVERS, program
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.llama import Llama, find_llama
from conformance.process.service import Frame, Service, failure

_METADATA = "_nlcBuildMetadata.json"
"""File in npm packages of node-llama-cpp that names their llama.cpp release."""


def main() -> None:
    """Answer requests until the caller closes the connection."""

    def answer(header: dict[str, Any], _: object) -> Frame:
        try:
            return describe(Path(header["probe"])), ()
        except ConformanceError as e:
            return failure(e)

    Service().serve(answer)
    os._exit(0)  # skip the libraries' own clean-up; there is nothing to save


def describe(path: Path) -> dict[str, Any]:
    """Return the fields of a build other than name and path; UnavailableError as for `Library`."""
    library = Library(str(path))
    library.devices.load_all()
    architectures: list[str] = []
    llama, left_out = True, [*library.left_out, *(f"a device: {text}" for text in library.log.refusals())]
    try:
        with_llama = Llama(str(find_llama(path)))
        architectures = with_llama.architectures()
        left_out += [text for text in with_llama.left_out if text not in left_out]
    except UnavailableError as e:
        llama = False
        left_out.append(f"llama.cpp cannot be used: {e}")
    devices = [
        {
            "name": name,
            "type": device.type,
            "description": device.description,
            "software": device.software,
            "buffer_types": list(device.buffer_types()),
        }
        for name, device in library.devices.registered().items()
    ]
    cpu = next((d for d in library.devices.registered().values() if d.type == "CPU"), None)
    return {
        "ggml": library.version,
        "number": number(library),
        "devices": devices,
        "features": [] if cpu is None else cpu.features(),
        "llama": llama,
        "left_out": left_out,
        "variants": library.devices.variants(),
        "meta": llama and library.ggml.backend_meta_device is not None,
        "architectures": architectures,
        "server": library.devices.reg_by_name("RPC") is not None and program(library.folder, RPC_SERVERS) is not None,
    }


def number(library: Library) -> str:
    """Return llama.cpp's build number from package or library, else ggml's commit, else ""."""
    try:
        release = json.loads((library.folder / _METADATA).read_text("utf-8"))["buildOptions"]["llamaCpp"]["release"]
    except (OSError, ValueError, KeyError, TypeError):
        return library.build
    return str(release)


if __name__ == "__main__":
    main()
