"""Dawn for ggml-webgpu, from two packages of npm.

`webgpu` has Dawn as an add-on for Node.js, which exports nothing of WebGPU, but names its functions in a symbol table.
`react-native-webgpu` has Dawn's headers for C++. Both are generated from one description, so a header that declares
just the functions of the add-on is taken to be of the same Dawn.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from conformance import shipped
from conformance.ggml.errors import UnavailableError

from .cross import run
from .elf import Image
from .isa import host, machine

SOURCE = "dawn.c"
LIBRARY, ADDON = "libwebgpu_dawn.so", "dawn.node"
"""The library that ggml-webgpu links, and the add-on that it loads from its folder."""
ANCHOR = "napi_register_module_v1"
"""An exported function of each add-on."""
_SET, _GET = "dawnProcSetProcs", "_ZN4dawn6native8GetProcsEv"
_DECLARED = re.compile(r"\b(wgpu[A-Z]\w*)\(")
_CONFIG = """\
add_library(dawn::webgpu_dawn SHARED IMPORTED)
set_target_properties(dawn::webgpu_dawn PROPERTIES
  IMPORTED_LOCATION "{library}" INTERFACE_INCLUDE_DIRECTORIES "{headers}")
"""
_SHOWN = 3
"""Number of functions that a message names."""


def dawn(packages: Sequence[Path], folder: Path, compiler: Sequence[str]) -> list[Path]:
    """Compile `LIBRARY` in `folder`, beside a `DawnConfig.cmake`; return it and the add-on.

    Args:
        packages: folders with the add-on and the headers.
        folder: exists; its files are replaced.
        compiler: the command of a C compiler.

    Raises:
        UnavailableError: no add-on or headers, those of different versions, or a compiler that fails.
    """
    addons = [p for f in packages for p in sorted(f.rglob(ADDON)) if machine(p) == host()]
    headers = [p.parents[1] for f in packages for p in sorted(f.rglob("webgpu/webgpu_cpp.h"))]
    if not addons or not headers:
        raise UnavailableError(
            f"Dawn: {ADDON} for {host()} and webgpu/webgpu_cpp.h expected, {len(addons)} and {len(headers)} found; "
            "name npm:webgpu@VERSION and npm:react-native-webgpu@VERSION"
        )
    image = Image(addons[0])
    places = {s.name: s.address for s in image.symbols}
    names = sorted(n for n in places if _DECLARED.fullmatch(f"{n}("))
    declared = set(_DECLARED.findall((headers[0] / "webgpu" / "webgpu.h").read_text("utf-8")))
    other = sorted(declared.symmetric_difference(names))
    lacking = [n for n in (ANCHOR, _SET, _GET) if n not in places]
    if other or lacking or not names:
        raise UnavailableError(
            f"Dawn: an add-on with the functions of its header expected, {len(other) + len(lacking)} differ "
            f"({', '.join([*lacking, *other][:_SHOWN])}); name packages of about the same day"
        )
    start = places[ANCHOR]
    lines = [f"F({n}, {i}, {places[n] - start})" for i, n in enumerate(names)]
    lines += [f"NODE({n})" for n in image.expected if n.startswith("napi_")]
    (folder / "dawn.inc").write_text("\n".join([*lines, ""]), "utf-8")
    library, addon = folder / LIBRARY, folder / ADDON
    shutil.copy(addons[0], addon)
    defined = {"ANCHOR": f'"{ANCHOR}"', "SET_PROCS": str(places[_SET] - start), "GET_PROCS": str(places[_GET] - start)}
    words = [*compiler, "-O2", "-shared", "-fPIC", f"-I{folder}", *(f"-D{k}={v}" for k, v in defined.items())]
    source = str(shipped.path() / "builds" / SOURCE)
    run([*words, f"-Wl,-soname,{LIBRARY}", "-o", str(library), source, "-ldl"], folder, os.environ)
    (folder / "DawnConfig.cmake").write_text(_CONFIG.format(library=library, headers=headers[0]), "utf-8")
    return [library, addon]
