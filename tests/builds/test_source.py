"""What a build may be called, and that an archive of a stranger stays in its folder."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from marks import needs_wheel

from conformance.builds import archive, source
from conformance.builds.build import probe
from conformance.builds.source import locate
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.lib.files import RPC_SERVERS, WHEEL, part, plugins, program
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.log import Log
from conformance.llama.zoo.model import table

LIBRARY = b"\x7fELF stands in for one that exports ggml_backend_dev_count\0"
needs_links = pytest.mark.skipif(os.name != "posix", reason="this system has no links for everybody")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of builds that is this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return archive.cache()


def tar(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """A .tgz at `path`: names with bytes, or with the target of a symbolic link."""
    with tarfile.open(path, "w:gz") as made:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                made.addfile(info)
            else:
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
    return path


def test_a_build_tree_is_named_by_its_root(tmp_path: Path) -> None:
    """Libraries are found below the folder that is named; of two sets the one with llama.cpp, not a repaired copy."""
    for name in ("src/libggml.so", "bin/libggml.so.0", "bin/libllama.so.0", "x.libs/libggml-0a1b2c3d.so",
                 "x.libs/libllama-0a1b2c3d.so"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LIBRARY)
    assert locate(str(tmp_path)) == tmp_path / "bin"
    assert locate(str(tmp_path / "src")) == tmp_path / "src"
    assert locate(str(tmp_path / "x.libs")) == tmp_path / "x.libs"


def test_a_library_has_many_names(tmp_path: Path) -> None:
    """`libggml` is not `libggml-base`, whatever version or digest its name holds."""
    names = ["libggml.so.0", "libggml.b6673.so", "libggml-f21de1e6.so.0.10.0", "libggml.dylib", "ggml.dll"]
    for name in names:
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        for library in (name, name.replace("ggml", "ggml-base"), "libggml-cpu-haswell.so"):
            (folder / library).write_bytes(LIBRARY)
        assert part(folder, "ggml") == folder / name
        assert part(folder, "ggml-base") == folder / name.replace("ggml", "ggml-base")
        assert part(folder, "ggml-vulkan") is None


@pytest.mark.parametrize("suffix", [".tgz", ".tar.gz", ".whl", ".zip"])
def test_an_archive_is_unpacked_once(tmp_path: Path, suffix: str) -> None:
    """An archive gives its library, executables stay executable, and the second look-up unpacks nothing."""
    path = tmp_path / f"build{suffix}"
    if suffix in {".tgz", ".tar.gz"}:
        tar(path, ("pkg/lib/whole.so", LIBRARY), ("pkg/readme", b"text"))
    else:
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("pkg/lib/whole.so", LIBRARY)
            info = zipfile.ZipInfo("pkg/bin/rpc-server")
            info.external_attr = (stat.S_IFREG | 0o755) << 16
            made.writestr(info, b"#!")
    found = locate(str(path))
    assert found.read_bytes() == LIBRARY
    server = found.parents[1] / "bin" / "rpc-server"
    assert not server.exists() or os.access(server, os.X_OK)
    before = found.stat().st_mtime_ns
    assert locate(str(path)) == found
    assert found.stat().st_mtime_ns == before


@needs_links
def test_links_inside_an_archive_hold(tmp_path: Path) -> None:
    """A link to a versioned library, as every build tree has, leads to it."""
    path = tar(tmp_path / "b.tgz", ("lib/libggml.so", "libggml.so.0"), ("lib/libggml.so.0", LIBRARY))
    assert (locate(str(path)) / "libggml.so").read_bytes() == LIBRARY


HOSTILE: dict[str, tuple[tuple[str, bytes | str], ...]] = {
    "climbs": (("../evil.so", LIBRARY),),
    "climbs within": (("a/../../evil.so", LIBRARY),),
    "absolute": (("/var/evil.so", LIBRARY),),
    "drive": (("C:evil.so", LIBRARY),),
    "link out": (("libggml.so", "/etc/passwd"),),
    "link up": (("a/libggml.so", "../../x"),),
    "file behind a link": (("a", "/var"), ("a/evil.so", LIBRARY)),
    "link behind a link": (("a", "."), ("a/b", "x")),
    "circle": (("a", "b"), ("b", "a")),
}


@needs_links
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_an_archive_leaves_its_folder(tmp_path: Path, cache: Path, name: str) -> None:
    """A name that climbs and a link that leads out are refused, and the cache keeps nothing of the archive."""
    path = tar(tmp_path / "b.tgz", *HOSTILE[name])
    with pytest.raises(UnavailableError, match=r"b\.tgz: an archive of a build .* expected"):
        locate(str(path))
    assert not list(tmp_path.rglob("evil.so"))
    assert list((cache / "unpacked").iterdir()) == []


@needs_links
def test_devices_in_an_archive_are_refused(tmp_path: Path) -> None:
    """An archive cannot make a pipe or a device."""
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as made:
        info = tarfile.TarInfo("pipe")
        info.type = tarfile.FIFOTYPE
        made.addfile(info)
    with pytest.raises(UnavailableError, match="'pipe' is neither file, folder nor link"):
        locate(str(path))


@pytest.mark.parametrize("compress", ["gz", "bz2", "xz"])
def test_a_hard_link_is_a_copy(tmp_path: Path, compress: str) -> None:
    """A hard link has the bytes of the file that came before it, and each compression of a tar is read."""
    path = tmp_path / f"b.tar.{compress}"
    with tarfile.open(path, f"w:{compress}") as made:  # type: ignore[call-overload]  # a mode made of parts
        first = tarfile.TarInfo("lib/first.so")
        first.size = len(LIBRARY)
        made.addfile(first, io.BytesIO(LIBRARY))
        link = tarfile.TarInfo("lib/whole.so")
        link.type, link.linkname = tarfile.LNKTYPE, "lib/first.so"
        made.addfile(link)
    assert (locate(str(path)).parent / "whole.so").read_bytes() == LIBRARY


def test_an_archive_has_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What unpacks to more than the limit is refused, by the sizes that it states and by its count."""
    monkeypatch.setattr(archive, "MOST_BYTES", 100)
    with pytest.raises(UnavailableError, match="it holds more than"):
        locate(str(tar(tmp_path / "b.tgz", ("a.so", bytes(101)))))


def _short(folder: Path) -> Path:
    whole = tar(folder / "whole.tgz", ("libggml.so", os.urandom(100_000)))
    path = folder / "short.tgz"
    path.write_bytes(whole.read_bytes()[:50_000])
    return path


def _short_zip(folder: Path) -> Path:
    path = folder / "short.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("libggml.so", LIBRARY)
    path.write_bytes(path.read_bytes()[:-30])
    return path


def _written(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def _folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _tree(folder: Path) -> Path:
    for name in ("CMakeLists.txt", "ggml/CMakeLists.txt", "ggml/src/ggml.c"):
        (folder / "llama.cpp" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "llama.cpp" / name).touch()
    return folder


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda folder: folder / "absent", "no such file or folder, and no distribution"),
    "short tar": (_short, "it cannot be read to its end"),
    "short zip": (_short_zip, "it cannot be read to its end"),
    "no tar": (_written("text.tgz", b"no archive"), "it cannot be read to its end"),
    "no library": (lambda folder: tar(folder / "b.tgz", ("readme", b"text")), "no libggml, and no library with"),
    "empty folder": (_folder, "no libggml, and no library with"),
    "only source": (_tree, r"only source in .*`cmake -S \S+/llama\.cpp -B build "),
    "older ggml": (
        lambda folder: tar(folder / "b.tgz", ("lib/libctransformers.so", b"\0ggml_graph_compute\0")),
        r"lib/libctransformers\.so has the ggml API of before b3889 .*: it lacks ggml_backend_dev_count; ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_build_is_said(tmp_path: Path, name: str) -> None:
    """Wrong input is one error of ours that names it and says what was looked for."""
    make, words = WRONG[name]
    with pytest.raises(UnavailableError, match=words):
        locate(str(make(tmp_path)))


def test_a_misspelt_distribution_is_named() -> None:
    """The installed one with nearly that name is offered, and only then."""
    with pytest.raises(UnavailableError, match=r"did you mean pytest\?"):
        locate("pytset")
    with pytest.raises(UnavailableError, match="is installed; a folder or build tree"):
        locate("nothing-is-called-so")


@pytest.mark.parametrize("text", ["pypi:xllamacpp", "pypi:a==1;b", "pypi:../x==1", "npm:@a/b", "npm:@a/../b@1", "npm:"])
def test_a_package_has_an_exact_version(text: str) -> None:
    """A package without a version, or with more than a name and a version, reaches no registry."""
    with pytest.raises((UsageError, UnavailableError), match=r"exact version|npm is not installed"):
        locate(text)


def test_a_package_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry's client runs once for a package; what it says when it fails is the message."""
    made = tar(tmp_path / "pkg-1.0.tgz", ("lib/libggml.so", LIBRARY))
    copy = f"import shutil; shutil.copy({str(made)!r}, '.')"
    commands = {
        "pkg@1.0": [sys.executable, "-c", copy],
        "pkg@2.0": [sys.executable, "-c", "exit('ERR no such version')"],
    }
    calls: list[str] = []

    def client(name: str, _: object) -> Iterator[list[str]]:
        calls.append(name)
        yield commands[name]

    monkeypatch.setitem(source._REGISTRIES, "npm", client)
    first = locate("npm:pkg@1.0")
    monkeypatch.setattr(source, "call", lambda *_, **__: pytest.fail("a second download"))
    assert locate("npm:pkg@1.0") == locate("npm:pkg@v1.0") == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setitem(source._REGISTRIES, "npm", client)
    with pytest.raises(UnavailableError, match=r"npm:pkg@2\.0: .* cannot be downloaded: ERR no such version"):
        locate("npm:pkg@2.0")
    assert calls[0] == "pkg@1.0"


def test_a_package_of_source_alone_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command; a version that does not exist has the client's message."""
    said = {"stderr": "ERROR: no matching distribution", "stdout": "x (0.3.36) / Available versions: 0.3.36, 0.3.35"}
    monkeypatch.setattr(source, "_call", lambda _command, _folder, stream: said[stream])
    with pytest.raises(UnavailableError, match=r"only the source; build one with `pip wheel --no-deps x==0\.3\.35 "):
        locate("pypi:x==v0.3.35")
    with pytest.raises(UnavailableError, match=r"pypi:x==0\.3\.3: it cannot be downloaded: ERROR: no matching"):
        locate("pypi:x==0.3.3")


def test_a_fork_with_an_older_api_is_named_for_it() -> None:
    """A library of ggml without the device interface is old; without other functions it is incomplete."""
    library = Library.__new__(Library)
    library.title = "ggml of unknown version (/x)"
    with pytest.raises(UnavailableError, match=r"\(/x\) has the ggml API of before b3889 .*dev_count and 1 more; "):
        library._require(["ggml_log_set", "ggml_backend_dev_count"])
    with pytest.raises(UnavailableError, match="it exports no ggml_log_set; name the folder"):
        library._require(["ggml_log_set"])


def test_a_distribution_without_ggml_is_no_build() -> None:
    """An installed distribution counts only with a library that has ggml."""
    with pytest.raises(UnavailableError, match="the distribution of that name has no library with ggml"):
        locate("pytest")


@needs_wheel
def test_the_wheel_by_its_name() -> None:
    """The installed wheel is a complete build with llama.cpp and a CPU device.

    The zoo has all architectures of its llama.cpp.
    """
    build = probe(WHEEL)
    assert build.path.parent.name == WHEEL
    assert [d.type for d in build.devices] == ["CPU"]
    assert not build.devices[0].software
    assert build.features
    assert build.llama
    assert build.left_out == ()
    assert set(build.architectures) == {a.name for a in table().values() if not a.of}
    assert build.to_json()["path"] == str(build.path)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["libggml.so", "libggml-base.so", "libggml-cpu-haswell.so"], "."),
        (["libggml.so.0", "libggml-base.so.0.27.0", "ggml/backends0/libggml-cpu-x64.so"], "ggml/backends0"),
        (["libggml.so.0", "libggml-base.so.0", "ggml/notes.txt"], "."),
        (["libggml.so", "libggml-vulkan.so", "ggml/old/libggml-cpu.so"], "."),
        (["libggml.dylib", "libggml-base.dylib", "ggml/libggml-metal.so"], "ggml"),
    ],
)
def test_device_libraries_lie_beside_or_below(files: list[str], found: str, tmp_path: Path) -> None:
    """Distributions put what ggml loads by itself into a folder below `ggml`; what is linked has a version there."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(LIBRARY)
    assert plugins(tmp_path) == tmp_path / found


@pytest.mark.parametrize(
    ("library", "server"),
    [
        ("build/bin", "build/bin/rpc-server"),
        ("usr/lib", "usr/bin/ggml-rpc-server"),
        ("usr/lib/x86_64-linux-gnu", "usr/libexec/x86_64-linux-gnu/llama/bin/ggml-rpc-server"),
        ("usr/lib64", "usr/bin/rpc-server"),
    ],
)
def test_a_server_lies_where_its_installation_has_programs(library: str, server: str, tmp_path: Path) -> None:
    """A folder `bin` beside a build that is no installation is not taken for its own."""
    for name in (library, server):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / library).mkdir(exist_ok=True)
    assert program(tmp_path / library, RPC_SERVERS) is None
    (tmp_path / server).write_bytes(b"")
    assert program(tmp_path / library, RPC_SERVERS) == tmp_path / server
    (tmp_path / "other").mkdir()
    assert program(tmp_path / "other", RPC_SERVERS) is None


def test_a_library_says_why_it_has_no_device() -> None:
    """Its own words on what it refused are kept, each once; what it says of devices that it took is not."""
    refusals = [
        "ggml_opencl: unsupported GPU 'pthread-skylake-avx512-AMD EPYC'.",
        "ggml_opencl: drop unsupported device 'pthread-skylake-avx512-AMD EPYC'.",
        "ggml_opencl: device does not support FP16",
        "ggml_opencl: OpenCL 2.0 or above is required",
        "ggml_opencl: platform IDs not available.",
        "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected",
        "ggml_vulkan: No devices found.",
        "load_backend: failed to load /x/libggml-hip.so",
    ]
    others = [
        "ggml_vulkan: Found 1 Vulkan devices:",
        "ggml_vulkan: Warning: Device type is CPU. This is probably not the device you want.",
        "load_backend: loaded OpenCL backend from /x/libggml-opencl.so",
        "register_backend: registered backend OpenCL (0 devices)",
    ]
    log = Log()
    log.lines.extend(f"\n{text}" for text in [*refusals, *others, *refusals])
    assert log.refusals() == refusals


def test_other_bytes_of_a_library_are_another_build(tmp_path: Path) -> None:
    """Whatever else changes beside them."""
    (tmp_path / "ggml").mkdir()
    for name in ("libggml.so", "ggml/libggml-cpu.so"):
        (tmp_path / name).write_bytes(b"one")
    before = source.contents(tmp_path)
    (tmp_path / "notes.txt").write_text("two")
    assert source.contents(tmp_path) == before
    (tmp_path / "ggml" / "libggml-cpu.so").write_bytes(b"two")
    assert source.contents(tmp_path) != before
    assert source.contents(tmp_path / "libggml.so") != before


def test_a_library_that_is_no_ggml_is_refused(tmp_path: Path) -> None:
    """A file that is no library, and a library without ggml, are refused with what is wrong."""
    text = tmp_path / "libtext.so"
    text.write_bytes(b"no library")
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        probe(str(text))
    ctypes_of = importlib.util.find_spec("_ctypes")
    if ctypes_of and ctypes_of.origin and Path(ctypes_of.origin).is_file():
        with pytest.raises(UnavailableError, match="it exports no ggml_init"):
            probe(ctypes_of.origin)


def test_the_command_says_what_is_refused(tmp_path: Path) -> None:
    """`conform list builds` ends with 1 where no build fits; each has a line, and an entry in --json."""
    listed, named = tmp_path / "out.json", [str(tmp_path / "absent"), str(tmp_path)]
    command = [sys.executable, "-m", "conformance.cli", "list", "builds", *named, "--json", str(listed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    *lines, last = done.stdout.splitlines()
    assert (len(lines), last) == (2, "none of these builds can be tested")
    assert all(": refused: build " in line for line in lines)
    assert "Traceback" not in done.stderr
    assert issubclass(UnavailableError, ConformanceError)
    document = json.loads(listed.read_text(encoding="utf-8"))
    assert document.keys() == {"schema", "builds"}
    assert [b["name"] for b in document["builds"]] == named
    assert all(b["refused"] for b in document["builds"])
