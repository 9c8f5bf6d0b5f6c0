"""Build ggml twice from a source package: clean, with test-backend-ops, and with every drawn mutant behind a switch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from conformance.ggml.errors import UsageError

from .places import KINDS, Edit, Kind, edits

HERE = Path(__file__).with_name("tree")
SOURCES = "ggml/src"
AREAS: Mapping[str, tuple[str, ...]] = {
    "ops": ("ggml-cpu/ops.cpp",),
    "unary, binary": ("ggml-cpu/unary-ops.cpp", "ggml-cpu/binary-ops.cpp"),
    "vec": ("ggml-cpu/vec.cpp", "ggml-cpu/vec.h"),
    "mul_mat": ("ggml-cpu/ggml-cpu.c",),
    "quants": ("ggml-cpu/quants.c", "ggml-cpu/arch/x86/quants.c"),
    "repack": ("ggml-cpu/repack.cpp", "ggml-cpu/arch/x86/repack.cpp"),
    "llamafile": ("ggml-cpu/llamafile/sgemm.cpp",),
    "base: quantisation": ("ggml-quants.c",),
    "base: allocator": ("ggml-alloc.c",),
    "base: scheduler, buffers": ("ggml-backend.cpp",),
    "base: graph": ("ggml.c",),
    "openvino": ("ggml-openvino/*.cpp", "ggml-openvino/openvino/*.cpp", "ggml-openvino/openvino/*/*.cpp"),
}
"""Parts of ggml, by files below `ggml/src`."""
WEIGHTS: Mapping[Kind, int] = {
    "another dimension": 14, "offset": 7, "loop bound": 10, "off by one": 8, "relational": 6, "negated condition": 10,
    "logical": 4, "arithmetic": 8, "constant": 8, "swapped operand": 7, "dropped statement": 13,
}  # fmt: skip
"""How often a kind is drawn: the classes of a year's fixes in ggml, in percent (docs/measurements/kernels.md)."""
_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DGGML_CCACHE=OFF")
"""Not for the machine that builds, whose instructions a compiler may know badly, and no OpenMP runtime to share."""
_ERROR = re.compile(r"^(?P<file>[^\s:]+):(?P<line>[0-9]+):[0-9]+: (?:fatal )?error:", re.MULTILINE)
_NOTE = re.compile(r"^(?P<file>[^\s:]+):(?P<line>[0-9]+):[0-9]+: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file, active if `MUTANT` is its number."""

    number: int
    area: str
    file: str
    """Below `ggml/src`."""
    edit: Edit

    @property
    def place(self) -> str:
        """Return `FILE:LINE`, the line of the unchanged source."""
        return f"{self.file}:{self.edit.line}"


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder with both builds."""

    folder: Path
    mutants: Sequence[Mutant]
    dropped: int
    """Drawn, but they do not compile."""
    seed: int

    @property
    def library(self) -> Path:
        """Return the library with all mutants."""
        return self.folder / "mutated" / "libmutant.so"

    @property
    def device(self) -> str:
        """Return the device that has the mutants; empty for the CPU."""
        return "OPENVINO0" if any(m.area == "openvino" for m in self.mutants) else ""

    @property
    def test_backend_ops(self) -> Path:
        """Return the clean test-backend-ops."""
        return self.folder / "clean" / "test-backend-ops"

    def write(self) -> None:
        """Store what was drawn beside the builds."""
        rows = [{**asdict(m), "edit": asdict(m.edit)} for m in self.mutants]
        document = {"seed": self.seed, "dropped": self.dropped, "mutants": rows}
        (self.folder / "mutants.json").write_text(json.dumps(document, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Tree:
        """Read a folder that `build` has made; UsageError if it is none."""
        try:
            document = json.loads((folder / "mutants.json").read_text(encoding="utf-8"))
        except OSError as e:
            raise UsageError(f"{folder}: a folder of `kernels build` expected: {e.strerror}") from None
        mutants = [Mutant(**{**row, "edit": Edit(**row["edit"])}) for row in document["mutants"]]
        return cls(folder, mutants, document["dropped"], document["seed"])


def build(package: Path, folder: Path, sample: int, seed: int, areas: Sequence[str], jobs: int) -> Tree:
    """Unpack a source package of llama-cpp-python into `folder` and build it twice.

    UsageError if it is none, or a build without mutants fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    llama = _unpack(package, folder / "source")
    flags = [*_FLAGS, *(_openvino() if "openvino" in areas else [])]
    clean = folder / "clean"
    _configure(llama, clean, [*flags, "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"])
    if errors := _compile(clean, jobs):
        raise UsageError(f"{package}: it does not compile: {errors[-2000:]}")
    mutants = draw(llama, _lines(clean), sample, seed, areas)
    changed = folder / "changed"
    if not changed.exists():
        shutil.copytree(llama / "ggml", changed / "ggml")
    mutated = folder / "mutated"
    _configure(changed, mutated, [*flags, "-DBUILD_SHARED_LIBS=OFF", "-DMUTANT=ON"])
    kept = list(mutants)
    while True:
        _write(llama, changed, kept)
        output = _compile(mutated, jobs)
        if not output:
            break
        bad = _refused(output, changed, kept)
        if not bad:
            raise UsageError(f"the mutated sources do not compile: {output[-2000:]}")
        kept = [m for m in kept if m not in bad]
    tree = Tree(folder, kept, len(mutants) - len(kept), seed)
    tree.write()
    return tree


def sanitized(package: Path, folder: Path, sanitizer: str, jobs: int) -> Path:
    """Build the unchanged ggml with a sanitizer of GCC and return the library; UsageError as of `build`."""
    llama = _unpack(package, folder / "source")
    target = folder / f"sanitized-{sanitizer}"
    flags = ["-DBUILD_SHARED_LIBS=OFF", "-DMUTANT=ON", f"-DSANITIZE={sanitizer}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    _configure(llama, target, [*_FLAGS, *flags])
    if errors := _compile(target, jobs):
        raise UsageError(f"{package}: it does not compile with -fsanitize={sanitizer}: {errors[-2000:]}")
    return target / "libmutant.so"


def draw(
    llama: Path, compiled: Mapping[str, frozenset[int]], sample: int, seed: int, areas: Sequence[str]
) -> list[Mutant]:
    """Draw `sample` mutants, as many of each area as can be: a kind by its weight, then one of its places.

    No two of them overlap, as both stand in one source. `compiled` has the lines of each file that reach the compiler.
    """
    shares = [sample // len(areas) + (i < sample % len(areas)) for i in range(len(areas))]
    drawn: list[tuple[str, str, Edit]] = []
    for area, share in zip(areas, shares, strict=True):
        rng = np.random.Generator(np.random.PCG64([seed, *area.encode()]))
        places: dict[Kind, list[tuple[str, Edit]]] = {k: [] for k in KINDS}
        for file in _files(llama, area):
            lines = compiled.get(file, frozenset())
            for edit in edits((llama / SOURCES / file).read_bytes(), lines.__contains__):
                places[edit.kind].append((file, edit))
        taken: dict[str, list[Edit]] = {}
        chosen = 0
        while chosen < share and (kinds := [k for k in KINDS if places[k]]):
            weights = np.array([WEIGHTS[k] for k in kinds], float)
            kind = kinds[rng.choice(len(kinds), p=weights / weights.sum())]
            file, edit = places[kind].pop(int(rng.integers(len(places[kind]))))
            if all(edit.end <= e.start or e.end <= edit.start for e in taken.setdefault(file, [])):
                taken[file].append(edit)
                drawn.append((area, file, edit))
                chosen += 1
    drawn.sort(key=lambda d: (list(areas).index(d[0]), d[1], d[2].start))
    return [Mutant(i, area, file, edit) for i, (area, file, edit) in enumerate(drawn, 1)]


def _files(llama: Path, area: str) -> list[str]:
    root = llama / SOURCES
    return sorted({p.relative_to(root).as_posix() for pattern in AREAS[area] for p in root.glob(pattern)})


def _write(llama: Path, changed: Path, mutants: Iterable[Mutant]) -> None:
    """Write the sources with the mutants; a file that has not changed keeps its time, so it is not compiled again."""
    of: dict[str, list[Mutant]] = {}
    for m in mutants:
        of.setdefault(m.file, []).append(m)
    for file in {f for area in AREAS for f in _files(llama, area)}:
        source = (llama / SOURCES / file).read_bytes()
        for m in sorted(of.get(file, []), key=lambda m: -m.edit.start):
            source = source[: m.edit.start] + _switched(m).encode() + source[m.edit.end :]
        target = changed / SOURCES / file
        if target.read_bytes() != source:
            target.write_bytes(source)


def _switched(m: Mutant) -> str:
    """Return the text of both, on as many lines as before: a compiler's message names a line of the original."""
    if not m.edit.new:
        return f"if (!mutant({m.number})) {{ {m.edit.old} }}"
    new = " ".join(line.partition("//")[0] for line in m.edit.new.splitlines())
    return f"(mutant({m.number}) ? ({new}) : ({m.edit.old}))"


def _refused(output: str, changed: Path, mutants: Iterable[Mutant]) -> set[Mutant]:
    """Return the mutants on the lines that a compiler's errors name, or else on those of their notes."""
    root = os.fspath((changed / SOURCES).resolve())
    on: dict[tuple[str, int], set[Mutant]] = {}
    for m in mutants:
        for line in range(m.edit.line, m.edit.line + m.edit.old.count("\n") + 1):
            on.setdefault((m.file, line), set()).add(m)
    for pattern in (_ERROR, _NOTE):
        found: set[Mutant] = set()
        for match in pattern.finditer(output):
            path = os.path.realpath(match["file"])
            if path.startswith(root):
                found |= on.get((path[len(root) + 1 :], int(match["line"])), set())
        if found:
            return found
    return set()


def _unpack(package: Path, folder: Path) -> Path:
    if not folder.exists():
        try:
            with tarfile.open(package) as archive:
                wanted = [m for m in archive.getmembers() if "/vendor/llama.cpp/" in m.name and _is_needed(m.name)]
                archive.extractall(folder, wanted, filter="data")
        except (OSError, tarfile.TarError) as e:
            why = str(e).partition(":")[0]
            raise UsageError(f"{package}: a source package of llama-cpp-python expected: {why}") from None
    found = next(folder.glob("*/vendor/llama.cpp"), None)
    if found is None:
        raise UsageError(f"{package}: a source package of llama-cpp-python expected; it holds no vendor/llama.cpp")
    return found


def _is_needed(name: str) -> bool:
    inner = name.partition("/vendor/llama.cpp/")[2]
    return inner.startswith("ggml/") or inner == "tests/test-backend-ops.cpp"


def _openvino() -> list[str]:
    spec = importlib.util.find_spec("openvino")
    folder = Path(spec.origin or "").parent / "cmake" if spec else Path()
    return ["-DGGML_OPENVINO=ON", f"-DOpenVINO_DIR={folder}"]


def _configure(llama: Path, folder: Path, flags: Sequence[str]) -> None:
    words = ["cmake", "-S", os.fspath(HERE), "-B", os.fspath(folder), f"-DLLAMA={llama.resolve()}", *flags]
    if shutil.which("ninja"):
        words += ["-G", "Ninja"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"cmake failed: {(done.stdout + done.stderr)[-2000:]}")


def _compile(folder: Path, jobs: int) -> str:
    """Build all that can be built; return what the compiler printed if something could not."""
    words = ["cmake", "--build", os.fspath(folder), "-j", str(jobs), "--", "-k", *(["0"] if _is_ninja(folder) else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def _is_ninja(folder: Path) -> bool:
    return (folder / "build.ninja").is_file()


def _lines(clean: Path) -> dict[str, frozenset[int]]:
    """Return, per file below `ggml/src`, the lines of which the preprocessor leaves something in some source."""
    found: dict[str, set[int]] = {}
    for entry in json.loads((clean / "compile_commands.json").read_text(encoding="utf-8")):
        words = entry["command"].split()
        at = words.index("-o")
        words = [*words[:at], *words[at + 2 :], "-E"]
        done = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True, check=False)
        file, line = "", 0
        for text in done.stdout.splitlines():
            if match := re.match(r'# ([0-9]+) "([^"]*)"', text):
                line, file = int(match[1]) - 1, match[2].partition(f"/{SOURCES}/")[2]
                continue
            line += 1
            if file and text.strip():
                found.setdefault(file, set()).add(line)
    return {f: frozenset(lines) for f, lines in found.items()}
