"""Builds for another processor, without network and emulator."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from conformance.backend.registry import Named, Spec, define, isa_of, located, resolve
from conformance.builds import archive, cross, emulator, source
from conformance.builds.build import Build, DeviceOf
from conformance.builds.emulator import folders, start
from conformance.builds.isa import ISAS, host, known, machine
from conformance.builds.source import locate
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.llama.release.target import targets
from conformance.process import call
from conformance.process.spawn import LAUNCHER, words
from conformance.run.isolation.isolate import open_backend, runs_here
from conformance.run.session.select import build

READY = all(p.is_dir() for p in folders("arm64"))
posix = pytest.mark.skipif(os.name != "posix", reason="the fake programs are scripts of a shell")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of builds that is this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return archive.cache()


def elf(e_machine: int) -> bytes:
    """The start of a 64-bit library for a processor, with a symbol of ggml's devices."""
    return b"\x7fELF\x02\x01\x01".ljust(18, b"\0") + e_machine.to_bytes(2, "little") + b"ggml_backend_dev_count\0"


def program(folder: Path, name: str, script: str) -> None:
    """Put a shell script on a folder of programs."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    (folder / name).chmod(0o755)


def test_the_command_of_each_processor_is_qemu_with_its_cpu(cache: Path) -> None:
    """Nothing is downloaded again, and no variable leads to files of this processor."""
    for isa in ISAS.values():
        for folder in folders(isa.name):
            folder.mkdir(parents=True, exist_ok=True)
        made = start(isa.name, {"LD_PRELOAD": "x.so", "PYTHONPATH": "x", "HOME": "/h"})
        qemu, root = folders(isa.name)
        assert made["interpreter"] == [
            f"{qemu}/qemu-{isa.machine}", "-cpu", isa.cpu, "-L", str(root), f"{root}/usr/bin/python3",
        ]  # fmt: skip
        assert sorted(made["env"]) == ["HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX"]
        pure = Path(made["env"]["PYTHONPATH"])
        (pure / "gguf").unlink()
        (pure / "gguf").symlink_to("/nowhere")  # of a Python that is gone
        assert start(isa.name, {"HOME": "/h"})["env"] == made["env"]
        assert {p.name: p.is_dir() for p in pure.iterdir()} == dict.fromkeys(emulator.PURE, True)
        assert words("a.b", made["interpreter"])[6:] == [LAUNCHER, "", words("a.b")[3], "module", "a.b"]
    assert {f.parent for f in folders("arm64")} == {cache.parent / "emulator"}
    assert start("", {"A": "b"}) == {"env": {"A": "b"}}


def test_unknown_processors_are_refused_with_the_known_ones() -> None:
    """The error has the nearest name and all of them."""
    with pytest.raises(UsageError, match="isa 'arm65' is unknown; did you mean arm64\\? known: arm64, arm64-dotprod"):
        known("arm65")


@posix
def test_the_emulator_is_set_up_from_packages_of_debian(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apt gets its own state and the system's mirror; few of qemu's programs are kept."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    names = sorted({f"qemu-{i.machine}" for i in ISAS.values()})
    program(
        programs,
        "apt-get",
        f"""
echo "$@" >> {log}
case "$*" in
*indextargets*) echo http://mirror.invalid/security/; echo http://mirror.invalid/debian/ ;;
*install*) for w; do case $w in Dir::State=*) touch "${{w#*=}}/archives/a.deb"; cat "${{w#*=}}/sources.list" >> {log} ;;
esac; done ;;
esac""",
    )
    program(
        programs,
        "dpkg-deb",
        f"""
mkdir -p "$3/usr/bin" "$3/usr/lib"
for name in {" ".join(names)} qemu-hexagon python3; do touch "$3/usr/bin/$name"; done""",
    )
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(emulator.MIRROR, raising=False)
    start("arm64")
    qemu, root = folders("arm64")
    assert sorted(p.name for p in qemu.iterdir()) == names
    assert (root / "usr/bin/python3").is_file()
    assert (root / "lib").is_symlink()
    said = log.read_text("utf-8")
    assert f"http://mirror.invalid/debian/ {known('arm64').suite} main" in said
    assert "APT::Architecture=arm64" in said
    assert f"install {' '.join(emulator.PACKAGES)}" in said
    log.unlink()
    start("arm64-sve")
    assert not log.exists()
    assert sorted(p.name for p in cache.with_name("emulator").iterdir()) == sorted(p.name for p in (qemu, root))


@posix
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo http://mirror.invalid/ubuntu/", "no Debian mirror among the sources of apt; set CONFORMANCE_DEBIAN"),
        ('case "$*" in *indextargets*) echo http://x.invalid/debian ;; *) echo E: no >&2; exit 100 ;; esac',
         "apt-get failed: E: no"),
        (None, "apt-get and dpkg-deb expected, to download qemu-user"),
    ],
)  # fmt: skip
def test_a_failed_set_up_says_why(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, message: str
) -> None:
    """No apt, no mirror or an error of apt; nothing is left behind."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("apt-get", "dpkg-deb") if script else ():
        program(programs, name, script or "")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep * 2}/bin" if script else str(programs))
    monkeypatch.delenv(emulator.MIRROR, raising=False)
    with pytest.raises(UnavailableError, match=message):
        start("riscv64-v")
    assert not list(cache.with_name("emulator").glob("*"))


def test_a_library_for_another_processor_is_named_with_its_options(tmp_path: Path) -> None:
    """The ELF header decides; with the right processor the build is found."""
    other = {"x86_64": 183}.get(host(), 62)
    (tmp_path / "libggml.so").write_bytes(elf(243))
    (tmp_path / "whole.so").write_bytes(elf(other))
    assert machine(tmp_path / "libggml.so") == "riscv64"
    with pytest.raises(UnavailableError, match=rf"libggml\.so for {host()} expected, it is for riscv64; name its proc"):
        locate(str(tmp_path))
    assert locate(str(tmp_path), "riscv64-v") == tmp_path
    with pytest.raises(UnavailableError, match=r"whole\.so for riscv64 expected"):
        locate(str(tmp_path / "whole.so"), "riscv64-v")
    (tmp_path / "text.so").write_bytes(b"MZ")
    assert machine(tmp_path / "text.so") == ""


def test_pip_is_asked_for_wheels_of_the_processor_and_then_for_source() -> None:
    """Every glibc up to that of the emulated system; natively there is one command."""
    wheel, sdist = source._pip("a==1", ISAS["riscv64-v"])  # no test may reach an index
    assert "manylinux_2_41_riscv64" in wheel
    assert sdist[-3:] == ["--no-binary", "a", "a==1"]
    assert ["--platform" in c for c in source._pip("a==1", None)] == [False]  # as above


@posix
def test_source_is_compiled_for_the_processor(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree with source only becomes a build; -mcpu replaces -march."""
    programs, tree, log = tmp_path / "bin", tmp_path / "tree", tmp_path / "log"
    (tree / "ggml/src").mkdir(parents=True)
    (tree / "ggml/src/ggml.c").touch()
    (tree / "CMakeLists.txt").touch()
    library = tmp_path / "made.so"
    library.write_bytes(elf(243))
    program(
        programs,
        "cmake",
        f"""
echo "$@" >> {log}
case $1 in --build) mkdir -p "$2/bin"; cp {library} "$2/bin/libggml.so" ;; esac""",
    )
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    program(tmp_path, "zig", 'echo "$@"')
    monkeypatch.setattr(cross, "_zig", lambda: tmp_path / "zig")
    found = locate(str(tree), "riscv64-v")
    assert found.parent.parent.parent == cache / "cross"
    assert "-DCMAKE_SYSTEM_PROCESSOR=riscv64" in log.read_text("utf-8")
    _, said = call(
        [str(found.parents[1] / "tools" / "cc"), "-march=rv64gcv", "-O3", "a b.c"], tmp_path, "stdout", seconds=60
    )
    assert said == [f"cc -target riscv64-linux-gnu -mcpu={ISAS['riscv64-v'].target} -O3 a b.c"]


def test_the_processor_is_no_option_of_the_adapter(tmp_path: Path) -> None:
    """Any adapter has it, also from the settings; the installed build does not fit."""
    spec = Spec.parse("ggml?isa=riscv64-v&threads=2")
    assert isa_of(spec) == "riscv64-v"
    assert resolve(spec).options == (("threads", "2"),)
    with pytest.raises(UsageError, match="with isa=riscv64-v a build for it expected: lib=BUILD"):
        located(spec)
    (tmp_path / "libggml.so").write_bytes(elf(243))
    with_build = Spec("ggml", (("lib", str(tmp_path)), ("isa", "riscv64-v")))
    assert located(with_build) == Spec("ggml", (("lib", str(tmp_path)),))
    assert runs_here(Spec.parse("cpu"))
    assert not runs_here(Spec.parse("cpu?isa=arm64"))
    with pytest.raises(UsageError, match="variables and isa of its devices"):
        open_backend(Spec.parse("sched?isa=arm64"))
    try:
        define({"mine": Named("ggml", (("isa", "arm64"),))})
        assert isa_of(Spec.parse("mine")) == "arm64"
    finally:
        define({})


def test_targets_of_a_build_are_emulated_like_it() -> None:
    """Every setup of an emulated build has its processor, and a native build none."""
    device = DeviceOf("CPU", "CPU", "a CPU", False, ("CPU", "CPU_REPACK"))
    made = Build("x", Path("x"), "1", "", (device,), (), False, (), isa="arm64-sve")
    assert {dict(t.build.options)["isa"] for t in targets(made, None)} == {"arm64-sve"}


@pytest.mark.skipif(not READY, reason="the emulator is not set up (conform list builds BUILD --isa arm64)")
def test_the_reference_computes_the_same_on_an_emulated_processor() -> None:
    """End to end: a worker under qemu gives the bytes that NumPy gives here."""
    case = build("ops/ADD-f32+f32-a=4x3,b=4x3@1")
    found = []
    for spec in (Spec("cpu"), Spec.parse("cpu?isa=arm64")):
        with closing(open_backend(spec)) as backend, closing(backend.open(case)) as session:
            step = case.steps[0]
            found.append([v.tobytes() for v in session.compute(step.graph, step.inputs, step.outputs).values()])
    assert found[0] == found[1]
