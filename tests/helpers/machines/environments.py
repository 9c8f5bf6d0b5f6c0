"""Fresh virtual environments that need no network: they see the packages of the interpreter that runs the tests."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path


def environment(folder: Path) -> Path:
    """The interpreter of a fresh environment with nothing in it but what runs these tests."""
    venv.create(folder, with_pip=False)
    (packages,) = (p for p in folder.rglob("site-packages") if p.is_dir())
    lines = [f"import site; site.addsitedir({p!r})" for p in dict.fromkeys([*site.getsitepackages(), *sys.path]) if p]
    (packages / "parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    for script, module in (("conform", "conformance.cli"), ("pytest", "pytest")):
        path = python.parent / script
        path.write_text(f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n", encoding="utf-8")
        path.chmod(0o755)
    return python


def install(python: Path, package: Path, *how: str) -> None:
    """`pip install [-e] PACKAGE`, without an index."""
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *offline, *how, str(package)]
    if tuple(map(int, version("setuptools").split(".")[:2])) < (70, 1):  # it cannot build a wheel by itself
        setup = "import setuptools; setuptools.setup()"
        command = [str(python), "-W", "ignore", "-c", setup, "-q", "develop", "--no-deps"]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
