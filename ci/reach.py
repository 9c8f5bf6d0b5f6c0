"""Writes `conformance/builds/reach.json.xz`: the functions that each case reaches.

Cases are those of `standard`.

Run `python ci/reach.py` for a new pinned wheel; it needs `cc`, x86-64 and a quarter of an hour. A breakpoint at the
entry of each function is removed when it is hit and set again before the next case, so cases run at full speed. The
signal handler is compiled C, because Python's would run only after the function.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from conformance.backend import registry
from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.builds.code import folded, is_own
from conformance.builds.elf import FUNCTION, Image, Symbol
from conformance.builds.reach import FILE, SETUPS
from conformance.ggml.errors import ConformanceError
from conformance.ggml.lib.library import Library
from conformance.run.session.select import build, case_ids
from conformance.suite.relations import relation

TRAP = r"""
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
static uint8_t **at, *saved, *hit; static int count;
static void trapped(int number, siginfo_t *info, void *context) {
    greg_t *pc = &((ucontext_t *) context)->uc_mcontext.gregs[REG_RIP];
    uint8_t *here = (uint8_t *) *pc - 1;
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (at[middle] < here) low = middle + 1; else high = middle;
    }
    if (count == 0 || at[low] != here) abort();
    *here = saved[low]; hit[low] = 1; *pc = (greg_t) (uintptr_t) here;
}
void prepare(uint8_t **addresses, uint8_t *seen, int n) {
    at = addresses; hit = seen; count = n; saved = malloc(n);
    for (int i = 0; i < n; i++) {
        void *page = (void *) ((uintptr_t) at[i] & ~4095ul);
        if (mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC)) { perror("mprotect"); abort(); }
        saved[i] = *at[i];
    }
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGTRAP, &action, NULL);
}
void arm(void) { for (int i = 0; i < count; i++) { hit[i] = 0; *at[i] = 0xCC; } }
void disarm(void) { for (int i = 0; i < count; i++) *at[i] = saved[i]; }
"""


class Trap:
    """Breakpoints at the entries of functions of the loaded library."""

    def __init__(self, functions: Sequence[Symbol], base: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "trap.c"), Path(folder, "trap.so")
            source.write_text(TRAP)
            compiler = shutil.which("cc") or "cc"
            command = [compiler, "-O1", "-shared", "-fPIC", "-o", os.fspath(library), os.fspath(source)]
            subprocess.run(command, check=True)  # noqa: S603  # ours
            self._trap = ctypes.CDLL(os.fspath(library))
        n = len(functions)
        self._addresses = (ctypes.c_void_p * n)(*(base + f.address for f in functions))
        self._hit = (ctypes.c_uint8 * n)()
        self._trap.prepare(self._addresses, self._hit, n)

    def arm(self) -> None:
        """Set all breakpoints."""
        self._trap.arm()

    def take(self) -> list[int]:
        """Remove all breakpoints; return the indices of those that were hit."""
        self._trap.disarm()
        return [i for i, h in enumerate(bytes(self._hit)) if h]


def functions_of(image: Image) -> list[Symbol]:
    """Return the functions of ggml by address, each once."""
    own = {s.address: s for s in image.symbols if s.type == FUNCTION and s.size and ".cold" not in s.name and is_own(s)}
    return [own[a] for a in sorted(own)]


def loaded_at(image: Image) -> int:
    """Return the address to which the loader moved address 0 of a library."""
    code = min(s.address for s in image.sections if s.is_code) & ~4095
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    starts = [int(x.partition("-")[0], 16) for x in lines if " r-xp " in x and x.endswith(f"/{image.path.name}")]
    return min(starts) - code


def reached(backend: Backend, trap: Trap, case_id: str) -> list[int] | None:
    """Run a case and return the functions that it reaches; None if the backend refuses it."""
    case = build(case_id)
    for each in relation.cases_of(case):
        if not all(all(backend.supports(s.graph)) for s in each.steps) or not backend.supports_case(each):
            return None
    trap.arm()
    try:
        for each in relation.cases_of(case):
            with backend.open(each) as session:
                for step in each.steps:
                    session.compute(step.graph, step.inputs, step.outputs)
    finally:
        found = trap.take()
    return found


def measure(options: str, ids: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield case and functions; a child runs the cases, and another one those after a crash."""
    at = 0
    while at < len(ids):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            with os.fdopen(write, "w") as out:
                path = Library("").path
                backend = registry.create(Spec.parse(f"ggml{options}"))
                image = Image(path)
                trap = Trap(functions_of(image), loaded_at(image))
                for i in range(at, len(ids)):
                    found = None
                    with suppress(ConformanceError):
                        found = reached(backend, trap, ids[i])
                    out.write(json.dumps([i, found]) + "\n")
                    out.flush()
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                i, found = json.loads(line)
                at = i + 1
                if found is not None:
                    yield ids[i], found
        os.waitpid(child, 0)
        if at < len(ids):
            print(f"{options}: no answer to {ids[at]}", file=sys.stderr)
            at += 1


def main() -> None:
    """Measure all cases of each setup, and write the file."""
    path = Library("").path
    named = [folded(s.name) for s in functions_of(Image(path))]
    names = sorted(set(named))
    setups = {}
    for options, pattern in SETUPS.items():
        ids = [i for i in case_ids((), (), "standard") if pattern.match(i)]
        sets: dict[tuple[str, ...], int] = {}
        cases: dict[str, int] = {}
        for case_id, hit in measure(options, ids):
            key = tuple(sorted({named[i] for i in hit}))
            cases[case_id] = sets.setdefault(key, len(sets))
            if len(cases) % 1000 == 0:
                print(f"{options}: {len(cases)} of {len(ids)}, {len(sets)} sets", file=sys.stderr)
        index = {name: k for k, name in enumerate(names)}
        setups[options] = {
            "sets": [[index[name] for name in key] for key in sets],
            "cases": "\n".join(cases),
            "of": list(cases.values()),
        }
    document = {"library": path.name, "functions": names, "setups": setups}
    text = json.dumps(document, separators=(",", ":")).encode()
    FILE.write_bytes(lzma.compress(text, preset=9))
    print(f"{FILE}: {len(text)} bytes, {FILE.stat().st_size} compressed")


if __name__ == "__main__":
    main()
