"""llama.cpp's test-backend-ops against the mutants.

Its device `MUTANT` is the mutated library, its reference the clean CPU that it is linked with.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.process import Child, end_group, spawn_command

from .journal import appending, rows
from .ours import Seen
from .tree import Mutant, Tree

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CASE = re.compile(r"(?P<name>[A-Z0-9_]+\(.*\)): .*?(?P<verdict>OK|FAIL|not supported)")
_HANG = "hang"
_SLACK = 60.0
"""Seconds beyond five times the clean run, after which an op hangs."""


@dataclass(frozen=True, slots=True)
class Clean:
    """An op of test-backend-ops with no active mutant."""

    op: str
    seconds: float
    ran: int
    """Cases that the device supports."""
    failing: Sequence[str]
    """They are left out."""
    died: bool
    """It does not end by itself: its deaths are not counted."""
    seen: Sequence[int]


class Theirs:
    """test-backend-ops, one process per op, so that an abort hides no other op."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def reach(self, path: Path) -> Mapping[str, Clean]:
        """Run each op with no mutant; what `path` holds of an earlier call is not run again."""
        done = {row["op"]: Clean(**row) for row in rows(path)}
        seen = Seen(path.with_suffix(".seen"), self._tree.mutants)
        with appending(path) as add:
            for op in self._ops():
                if op in done:
                    continue
                seen.take()
                start = time.monotonic()
                verdicts, died = self._run(op, 0, 1800.0, seen=seen.path)
                failing = sorted(n for n, v in verdicts.items() if v == "FAIL")
                ran = sum(v == "OK" for v in verdicts.values())
                row = Clean(op, round(time.monotonic() - start, 2), ran, failing, bool(died), seen.take())
                done[op] = row
                add(row)
        return done

    def hunt(self, mutant: Mutant, clean: Mapping[str, Clean], seconds: float) -> tuple[str, int]:
        """Run the ops that reach a mutant, the cheapest first; return what noticed it, or "", and how many ops ran."""
        ops = sorted((c for c in clean.values() if mutant.number in c.seen), key=lambda c: (c.seconds, c.op))
        end = time.monotonic() + seconds
        for ran, c in enumerate(ops):
            hangs, left = 5 * c.seconds + _SLACK, end - time.monotonic()
            if left <= 0:
                return "", ran
            verdicts, died = self._run(c.op, mutant.number, min(hangs, left), known=c.failing)
            failed = [n for n, v in verdicts.items() if v == "FAIL" and n not in c.failing]
            if failed or (died and not c.died and not (died == _HANG and left < hangs)):
                return failed[0] if failed else f"{c.op}: {died}", ran + 1
        return "", len(ops)

    def _ops(self) -> list[str]:
        done = subprocess.run([self._tree.test_backend_ops, "--list-ops"], capture_output=True, text=True, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]

    def _run(
        self, op: str, number: int, limit: float, *, seen: Path | None = None, known: Sequence[str] | None = None
    ) -> tuple[dict[str, str], str]:
        """Return the verdicts by case, up to the first new failure if `known` are given, and how it died, if it did."""
        env = {**os.environ, "GGML_BACKEND_PATH": os.fspath(self._tree.library), "MUTANT": str(number)}
        if self._tree.device:
            env["MUTANT_DEVICE"] = self._tree.device
        if seen is not None:
            env["MUTANT_SEEN"] = os.fspath(seen)
        words = [os.fspath(self._tree.test_backend_ops), "-b", "MUTANT", "-o", op]
        verdicts: dict[str, str] = {}
        child = spawn_command(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with child:
            try:
                late = _lines(child, limit, verdicts, known)
            finally:
                end_group(child)
        if late == "late":
            return verdicts, _HANG
        if late == "failed":
            return verdicts, ""
        return verdicts, "" if child.returncode in {0, 1} else _how(child.returncode)


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _lines(child: Child, limit: float, verdicts: dict[str, str], known: Sequence[str] | None) -> str:
    """Read until the end, the first new failure (`failed`) or the limit (`late`)."""
    assert child.stdout is not None
    end = time.monotonic() + limit
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                child.wait()
                return ""
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                match = _CASE.search(_COLOUR.sub("", line.decode("utf-8", "replace")))
                if match is None:
                    continue
                verdicts[match["name"]] = match["verdict"]
                if known is not None and match["verdict"] == "FAIL" and match["name"] not in known:
                    return "failed"
    return "late"
