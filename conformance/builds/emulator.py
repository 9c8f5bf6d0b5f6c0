"""Set up qemu-user with a Python for another processor, and run worker processes in it.

Both are packages of Debian, unpacked once into the user's cache: no root, and nothing is installed. apt checks their
signatures; its state lies in a temporary folder. `unpacked` does so with any package.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance.ggml.errors import UnavailableError
from conformance.process import call

from .archive import cache, fresh_folder, settle
from .isa import ISAS, Isa, host, known

HERE = "trixie"
"""Release of Debian whose packages run on this processor: the emulator, headers."""
MIRROR = "CONFORMANCE_DEBIAN"
"""Variable with the address of a Debian mirror, for a system whose own apt names none."""
TIME_LIMIT = 1800.0
"""Time limit in seconds of a command of apt or dpkg."""
PACKAGES = ("python3-msgspec", "python3-numpy", "python3-psutil", "libgomp1", "libstdc++6")
"""Packages that a worker needs; apt adds their dependencies."""
_DEBIAN = {"x86_64": "amd64", **{i.machine: i.debian for i in ISAS.values()}}
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_MACHINES = sorted({i.machine for i in ISAS.values()})
PURE = ("gguf", "tqdm", "yaml")
"""Packages without machine code, which a worker imports from this Python."""
_DROPPED = ("PYTHON", "LD_")
"""Prefixes of variables that name files of this processor."""


def start(isa: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the arguments that let a `Worker` run on `isa`; only its environment if "".

    The first use sets the emulator up (`folders`), which downloads 100 MB.

    Raises:
        UsageError: an unknown processor.
        UnavailableError: apt is missing, or a package cannot be downloaded.
    """
    if not isa:
        return {"env": env}
    of = known(isa)
    return {"interpreter": _words(of), "env": _environment(of, os.environ if env is None else env)}


def folders(isa: str) -> tuple[Path, Path]:
    """Return where qemu and the files for `isa` are, once they are unpacked."""
    of = known(isa)
    programs, packages = (hashlib.sha256(" ".join(names).encode()).hexdigest()[:8] for names in (_MACHINES, PACKAGES))
    return _home() / f"{HERE}-qemu-{programs}", _home() / f"{of.suite}-{of.debian}-{packages}"


def unpacked(package: str) -> Path:
    """Return the folder of a Debian package's files, for this processor, downloaded once.

    Raises:
        UnavailableError: apt is missing, or there is no such package.
    """
    folder = _home() / f"{HERE}-{package}"
    if not folder.is_dir():
        with _unpacked(HERE, _DEBIAN.get(host(), host()), package) as made:
            settle(made, folder)
    return folder


def _home() -> Path:
    return cache().with_name("emulator")


def _words(isa: Isa) -> list[str]:
    """Return the command that is the Python of `isa`; set it up if needed."""
    qemu, root = folders(isa.name)
    if not qemu.is_dir():
        with _unpacked(HERE, _DEBIAN.get(host(), host()), "qemu-user") as made:
            kept = made.with_name("kept")
            kept.mkdir()
            for name in _MACHINES:
                (made / "usr" / "bin" / f"qemu-{name}").rename(kept / f"qemu-{name}")
            settle(kept, qemu)
    if not root.is_dir():
        with _unpacked(isa.suite, isa.debian, *PACKAGES) as made:
            for name in ("lib", "lib64"):
                if (made / "usr" / name).is_dir() and not (made / name).exists():
                    (made / name).symlink_to(f"usr/{name}")
            settle(made, root)
    return [f"{qemu}/qemu-{isa.machine}", "-cpu", isa.cpu, "-L", str(root), f"{root}/usr/bin/python3"]


def _environment(isa: Isa, env: Mapping[str, str]) -> dict[str, str]:
    _, root = folders(isa.name)
    libraries = root / "usr" / "lib" / isa.triplet
    kept = {k: v for k, v in env.items() if not k.startswith(_DROPPED)}
    return {
        **kept,
        "LD_LIBRARY_PATH": f"{libraries}/blas:{libraries}/lapack",  # where update-alternatives would link them
        "PYTHONPATH": str(_pure(root / "pure")),
        "PYTHONPYCACHEPREFIX": f"{root}.pyc",
    }


def _pure(folder: Path) -> Path:
    """Return `folder` with links to `PURE`, as they are now."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PURE:
        found, link = find_spec(name), folder / name
        if found is None or found.origin is None:
            raise UnavailableError(f"emulator: the package {name} expected, not found; install it with pip")
        target = Path(found.origin).parent
        if not link.is_symlink() or link.readlink() != target:
            with TemporaryDirectory(dir=folder) as made:
                (Path(made) / name).symlink_to(target)
                (Path(made) / name).replace(link)
    return folder


@contextmanager
def _unpacked(suite: str, architecture: str, *packages: str) -> Iterator[Path]:
    """Unpack Debian packages and their dependencies into a folder that is removed afterwards."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnavailableError(
            f"Debian: apt-get and dpkg-deb expected, to download {', '.join(packages)} for {architecture}; "
            "use Debian or Ubuntu, or a container of one"
        )
    with fresh_folder(_home()) as made:
        apt, root = _apt(made / "apt", suite, architecture), made / "root"
        _run([*apt, "update"], made)
        _run([*apt, "--yes", "--download-only", "--no-install-recommends", "install", *packages], made)
        root.mkdir()
        for deb in sorted((made / "apt" / "archives").glob("*.deb")):
            _run(["dpkg-deb", "-x", str(deb), str(root)], made)
        yield root


def _apt(state: Path, suite: str, architecture: str) -> list[str]:
    """Return a command of apt with its own state and sources, which needs no root."""
    (state / "lists" / "partial").mkdir(parents=True)
    (state / "archives" / "partial").mkdir(parents=True)
    (state / "status").touch()
    signed = f" [signed-by={_KEYRING}]" if _KEYRING.exists() else ""
    (state / "sources.list").write_text(f"deb{signed} {_mirror(state)} {suite} main\n", "utf-8")
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Dir::Cache": state,
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": state,
        "Dir::State::status": state / "status",
    }
    return ["apt-get", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]


def _mirror(folder: Path) -> str:
    """Return the address of a Debian mirror: the user's, or the one that this system uses."""
    if chosen := os.environ.get(MIRROR):
        return chosen
    _, said = call(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        folder,
        "stdout",
        seconds=TIME_LIMIT,
    )
    for address in said:
        if address.rstrip("/").endswith("/debian"):
            return address
    raise UnavailableError(f"no Debian mirror among the sources of apt; set {MIRROR} to the address of one")


def _run(command: Sequence[str], folder: Path) -> None:
    code, said = call(command, folder, "stderr", seconds=TIME_LIMIT)
    if code:
        raise UnavailableError(f"Debian: {command[0]} failed: {' / '.join(said) or f'exit status {code}'}")
