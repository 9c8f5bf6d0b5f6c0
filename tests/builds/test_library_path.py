"""A path names that file, whatever else the loader would find under its name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import conform
from evil_library import evil, needs_compiler
from marks import needs_wheel

from conformance.ggml.lib.files import find

pytestmark = [needs_wheel, needs_compiler]
OP = "ops/SUM-f32-ne=5x3@1"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the real ggml as `libggml.so`."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "libggml.so").symlink_to(find())
    return folder


@pytest.mark.parametrize("text", ["./libggml.so", "libggml.so", ".", "../here"])
def test_a_path_is_no_name_for_the_loader(here: Path, text: str) -> None:
    """With another library of its name on the loader's path the one that is named runs, and says where it lies."""
    decoy = evil(here.parent / "decoy" / "libggml.so")
    env = {"LD_LIBRARY_PATH": str(decoy.library.parent)}
    done = conform("backends", f"ggml?lib={text}", "--json", here.parent / "out.json", cwd=here, env=env)
    assert (done.returncode, decoy.ran()) == (0, False), done
    (about,) = json.loads((here.parent / "out.json").read_text(encoding="utf-8"))["backends"].values()
    loaded = Path(about["versions"]["library"])
    assert loaded.is_absolute()
    assert (loaded.parent.resolve(), loaded.name) == (here, "libggml.so")


def test_builds_takes_the_folder_that_is_named(here: Path) -> None:
    """`conform list builds .` and `conform list builds libggml.so` list the devices of what lies here."""
    decoy = evil(here.parent / "decoy" / "libggml.so")
    env = {"LD_LIBRARY_PATH": str(decoy.library.parent)}
    for text in (".", "libggml.so"):
        done = conform("builds", text, cwd=here, env=env)
        assert (done.returncode, decoy.ran()) == (0, False), done
        assert "CPU (CPU)" in done.stdout


@pytest.mark.parametrize("text", ["./libggml.so", "libggml.so"])
def test_a_library_that_is_not_there_is_named_whole(tmp_path: Path, text: str) -> None:
    """The message has the absolute path that was looked for."""
    done = conform("run", "--backend", f"ggml?lib={text}", "--case", OP, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path / 'libggml.so'}: no such file or folder" in done.stderr


def _split(folder: Path, *base: str | Path) -> None:
    """A build of two libraries: `libggml.so`, which links the `libggml-base.so` that `base` makes."""
    folder.mkdir(exist_ok=True)
    source = folder / "empty.c"
    source.write_text("int empty_;\n")
    gcc = ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed"]
    if base:
        subprocess.run([*gcc, "-o", folder / "libggml-base.so", source, *base], check=True)
    subprocess.run([*gcc, "-o", folder / "libggml.so", source, folder / "libggml-base.so"], check=True)


@pytest.mark.parametrize("text", [".", "./libggml.so"])
def test_the_parts_of_a_build_are_its_own(tmp_path: Path, text: str) -> None:
    """What libggml links is taken from its folder before the loader's path is searched."""
    soname = "-Wl,-soname,libggml-base.so.0"
    folder = tmp_path / "split"
    _split(folder, soname, find())
    decoy = evil(tmp_path / "decoy" / "libggml-base.so.0")
    done = conform("run", "--backend", f"ggml?lib={text}", "--case", OP, cwd=folder,
                   env={"LD_LIBRARY_PATH": str(decoy.library.parent)})  # fmt: skip
    assert "PASS" in done.stdout + done.stderr, done
    assert not decoy.ran()


def test_a_part_from_elsewhere_is_refused(tmp_path: Path) -> None:
    """A part without a name of its own comes from the loader's path whatever was loaded: that is said, not tested."""
    folder, other = tmp_path / "split", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    shutil.copy(find(), other / "libggml-base.so")
    (folder / "libggml-base.so").symlink_to(find())
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", folder / "libggml.so", "-xc", os.devnull,
                    "-xnone", "-L", folder, "-lggml-base"], check=True, cwd=folder)  # fmt: skip
    done = conform("run", "--backend", "ggml?lib=.", "--case", OP, cwd=folder, env={"LD_LIBRARY_PATH": str(other)})
    assert done.returncode == 2
    assert f"{folder / 'libggml-base.so'} expected, the loader took {other / 'libggml-base.so'}" in done.stderr
