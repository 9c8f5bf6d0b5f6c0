"""Compiled models on disk, for the next process: one file each, named by all that the model depends on.

OpenVINO's own CACHE_DIR (2026.4.1) names a model by, among others, the names that its nodes got, which differ with what
else the process made before. Here a file begins with a digest of its name and its bytes: whatever is broken, or was put
there for another model, is compiled again and replaced.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from conformance.backend.translating.plan import Plan
from conformance.backend.translating.sym import Sym, expr_of

from .compile import Compiler

SIZE = 32
"""Bytes of a digest."""


class ModelCache:
    """A folder of compiled models; it is made when the first one is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def name(self, plan: Plan, options: object) -> str:
        """A model's name: of its plan, the weights in it, its symbols, the backend's options, and this translation."""
        h = hashlib.blake2b(_sources(), digest_size=SIZE)
        h.update(repr((plan.key, options)).encode())
        for t in plan.tensors:
            for n in (*t.ne, *t.nb, t.view_offs):
                h.update(str(expr_of(n) if isinstance(n, Sym) else n).encode() + b" ")
        return h.hexdigest()

    def compiled(self, compiler: Compiler, name: str, compile_: Callable[[], Any]) -> tuple[Any, str]:
        """The model of this name, and a note for the witness that says where it came from.

        Args:
            compiler: for its core and device.
            name: what `name` gave.
            compile_: makes it where it is not there, or cannot be trusted.
        """
        path = self._folder / f"{name}.model"
        note = "models compiled and kept in cache_dir"
        try:
            held = path.read_bytes()
        except FileNotFoundError:
            held = b""
        if held:
            if held[:SIZE] == _digest(name, held[SIZE:]):
                try:
                    found = compiler.core.import_model(held[SIZE:], compiler.device, compiler.properties)
                except RuntimeError:
                    note = "models in cache_dir that OpenVINO refused, compiled again"
                else:
                    return found, "models loaded from cache_dir"
            else:
                note = "models in cache_dir broken or of another origin, compiled again"
        made = compile_()
        stream = io.BytesIO()
        made.export_model(stream)
        self._keep(path, name, stream.getvalue())
        return made, note

    def _keep(self, path: Path, name: str, blob: bytes) -> None:
        """Write all or nothing, whoever else writes the same."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(_digest(name, blob) + blob)
        part.replace(path)


def _digest(name: str, blob: bytes) -> bytes:
    h = hashlib.blake2b(name.encode(), digest_size=SIZE)
    h.update(blob)
    return h.digest()


@cache
def _sources() -> bytes:
    """This translation: another version of it makes other models of equal plans."""
    h = hashlib.blake2b(digest_size=SIZE)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        h.update(path.read_bytes())
    return h.digest()
