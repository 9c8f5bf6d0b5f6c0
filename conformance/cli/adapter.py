"""`conform new-adapter`: writes the package of a backend from templates.

A template's `$name`, `$module` and `$cls` are replaced with the adapter's own.
"""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import click

from conformance.backend import registry
from conformance.ggml.errors import UsageError

from .options import Folder
from .output import line

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

ADAPTER = '''\
"""$name: ggml's graphs, node by node, in float32 on NumPy. Put your device's calls where NumPy's are."""

from typing import Any

import numpy as np
from conformance.api import F32, DeviceInfo, Kernel, KernelBackend, Raw, Tensor


def kernel(f: Any) -> Kernel:
    """From `f(node, *src)`, over arrays whose shape is `ne` reversed and that may have gaps."""
    return lambda node, dst, src: np.copyto(dst, f(node, *src))


def repeated(b: Raw, shape: tuple[int, ...]) -> Raw:
    """`b`, repeated until it has `shape`: ggml's broadcast."""
    return np.tile(b, [n // m for n, m in zip(shape, b.shape, strict=True)])


KERNELS: dict[str, Kernel] = {
    "ADD": kernel(lambda _, a, b: a + repeated(b, a.shape)),
    "MUL": kernel(lambda _, a, b: a * repeated(b, a.shape)),
    # matrix i of x meets matrix i / r of w
    "MUL_MAT": kernel(
        lambda _, w, x: x @ w.repeat(x.shape[0] // len(w), 0).repeat(x.shape[1] // w.shape[1], 1).swapaxes(-1, -2)
    ),
    "RMS_NORM": kernel(lambda node, x: x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(node.params.eps))),
}


class $cls(KernelBackend):
    """Refuses every op without a kernel; view ops need none. `delegates` names who computes for it."""

    api_version = 1
    name = "$name"

    def kernels(self) -> dict[str, Kernel]:
        return KERNELS

    def refuses(self, node: Tensor) -> str:
        types = [t.type.name for t in (node, *node.src) if t is not None and t.type is not F32]
        return f"only f32 is supported, {types[0]} found" if types else ""

    def info(self) -> DeviceInfo:
        return DeviceInfo("$name", "CPU", "float32 on NumPy", {"numpy": np.__version__})
'''

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name-backend"
version = "0.1.0"
description = "$name for ggml-conformance"
requires-python = ">=3.10"
dependencies = ["ggml-conformance", "numpy"]

[project.entry-points."conformance.backends"]
$name = "$module:$cls"

[tool.setuptools]
py-modules = ["$module"]
"""

TEST = '''\
"""The interface; numbers are the suite's question: `conform run --backend $name`."""

from conformance.api import check_adapter
from $module import $cls


def test_adapter() -> None:
    """Nothing that a backend must have is missing."""
    assert check_adapter($cls) == []
'''

README = """\
# $name

A backend for ggml-conformance: `$module.py` is all of it.

```sh
pip install -e .
pytest                              # is anything of the interface missing?
conform run --backend $name         # are its numbers right?
conform run --backend $name --level standard --save-failures failures
```
"""

FILES: dict[str, str] = {"$module.py": ADAPTER, "test_$module.py": TEST, "pyproject.toml": PROJECT, "README.md": README}
"""File name -> template."""


@click.command("new-adapter")
@click.argument("name")
@click.option("-o", "--output", type=Folder, metavar="DIR", help="Folder to create; default: NAME in the current one.")
def new_adapter(name: str, output: Path | None) -> None:
    """Write a package for a backend called NAME: a working file to extend, and its test."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"new-adapter {name}: lower-case words and digits joined by - expected, as my-npu")
    if name in registry.names():
        raise UsageError(f"new-adapter {name}: a backend of that name is installed; take another name")
    folder = output or Path(name)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"new-adapter: {folder} is not empty; name another folder with -o")
    words = name.split("-")
    names = {
        "name": name,
        # two words, so that no name of a backend hides a module that others import
        "module": f"{name.replace('-', '_')}_backend",
        "cls": "".join(w.capitalize() for w in words),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in FILES.items():
            (folder / Template(path).substitute(names)).write_text(Template(text).substitute(names), encoding="utf-8")
    except OSError as e:
        raise UsageError(f"new-adapter: {folder}: {e.strerror}") from None
    line(f"written: {folder}: {', '.join(Template(p).substitute(names) for p in FILES)}")
    line(f"next: pip install -e {folder} && pytest {folder} && conform run --backend {name}")
