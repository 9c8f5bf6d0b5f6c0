"""Compile and run the proofs of bug reports: each must show its bug without this project.

    python tests/benchmarks/causes/bench_proofs.py FOLDER SOURCE LIBRARIES DEVICE

FOLDER is what `conform triage RUN.json -o FOLDER` wrote, SOURCE a checkout of llama.cpp or ggml of the
version that LIBRARIES, a folder, was built of. A program shows its fault by exit code 1 or a signal. A folder with
neither program nor `test_case` says why in its draft. Exit code 1 where a program does not show its fault.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from prove import headers_in, prove

from conformance.ggml.errors import UnavailableError

LINKED = ("libggml.so", "libggml-base.so")
SHOWN, RIGHT, NEITHER, TEST_CASE = "shows it", "DOES NOT SHOW IT", "says why there is none", "is for test-backend-ops"


def main(folder: Path, source: Path, libraries: Path, device: str) -> None:
    """Print each cause's proof, and how many show their fault."""
    ended: Counter[str] = Counter()
    for handed in sorted(p for p in folder.iterdir() if p.is_dir()):
        what, said = _tried(handed, headers_in(source), libraries, device)
        ended[what] += 1
        sys.stdout.write(f"{handed.name}: {what}; {said}\n")
        sys.stdout.flush()
    sys.stdout.write(", ".join(f"{count} {what}" for what, count in ended.items()) + "\n")
    sys.exit(int(ended[RIGHT] > 0))


def _tried(handed: Path, headers: Path, libraries: Path, device: str) -> tuple[str, str]:
    program = handed / "program.cpp"
    if (handed / "test_case.cpp").exists():
        return TEST_CASE, ""
    if not program.exists():
        lines = (handed / "issue.md").read_text(encoding="utf-8").splitlines()
        return NEITHER, next((line for line in lines if line.startswith("Neither ")), "NO REASON")
    linked = [libraries / name for name in LINKED]
    try:
        proof = prove(program, headers=headers, libraries=linked, args=(device, str(libraries)))
    except UnavailableError as e:
        return RIGHT, str(e)
    return (SHOWN if proof.code == 1 or proof.code < 0 else RIGHT), str(proof)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
