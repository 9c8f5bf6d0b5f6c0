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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from conformance.process import Child, end_group, spawn_command

from .journal import appending, rows
from .ours import Seen
from .tree import Mutant, Tree

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CASE = re.compile(r"(?P<name>[A-Z0-9_]+\(.*\)): .*?(?P<verdict>OK|FAIL|not supported)")
_HANG = "hang"
PATIENCE = 120.0
"""Seconds per mutant and suite, after which a survivor's remaining cases are left out."""
Ends = Callable[[str, str, float], bool]
"""Case, verdict, processor seconds -> whether to read no further."""
_CLEAN = 3600.0
"""Limit of a run with no mutant, in seconds."""
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


@dataclass(frozen=True, slots=True)
class Told:
    """A case of a run of all ops with no active mutant, in its order."""

    name: str
    verdict: str
    seconds: float
    """Processor time of the run until its result."""


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
                verdicts, died = self._run([op], 0, _CLEAN, seen=seen.path)
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
            is_new = partial(_is_new, known=c.failing)
            verdicts, died = self._run([c.op], mutant.number, min(hangs, left), is_new)
            failed = [n for n, v in verdicts.items() if is_new(n, v)]
            if failed or (died and not c.died and not (died == _HANG and left < hangs)):
                return failed[0] if failed else f"{c.op}: {died}", ran + 1
        return "", len(ops)

    def timeline(self, path: Path, seconds: float) -> Sequence[Told]:
        """Run all ops in one process with no mutant for so much processor time; `path` keeps the run."""
        if not path.exists():
            told: list[Told] = []

            def ends(name: str, verdict: str, spent: float) -> bool:
                told.append(Told(name, verdict, max(round(spent, 3), told[-1].seconds if told else 0.0)))
                return spent > seconds

            self._run([], 0, _CLEAN, ends)
            with appending(path) as add:
                for each in told:
                    add(each)
        return [Told(**row) for row in rows(path)]

    def first(self, mutant: Mutant, ops: Collection[str], line: Sequence[Told]) -> float | None:
        """Return the processor seconds of a run of all ops until it notices a mutant; None if its `line` ends before.

        Only the ops that may reach the mutant run: `ops`, and those of several nodes, whose names are no op's. A run
        that dies notices the mutant in the case after the last result.
        """
        places = {told.name: k for k, told in enumerate(line)}
        known = {told.name for told in line if told.verdict == "FAIL"}
        several = {told.name.partition("(")[0] for told in line} - set(self._ops())
        mine = [told for told in line if told.name.partition("(")[0] in {*ops, *several}]
        if not mine:
            return None
        last = ""

        def ends(name: str, verdict: str, _: float) -> bool:
            nonlocal last
            if name not in places:
                return True
            last = name
            return _is_new(name, verdict, known=known)

        verdicts, died = self._run(sorted({*ops, *several}), mutant.number, PATIENCE, ends)
        if any(_is_new(n, v, known=known) for n, v in verdicts.items() if n in places):
            return line[places[last]].seconds
        after = [told for told in mine if not last or places[told.name] > places[last]]
        return after[0].seconds if died and died != _HANG and after else None

    def _ops(self) -> list[str]:
        done = subprocess.run([self._tree.test_backend_ops, "--list-ops"], capture_output=True, text=True, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]

    def _run(
        self, ops: Sequence[str], number: int, limit: float, ends: Ends | None = None, *, seen: Path | None = None
    ) -> tuple[dict[str, str], str]:
        """Return the verdicts by case, up to one that `ends` the run, and how it died, if it did; no `ops` are all."""
        env = {**os.environ, "GGML_BACKEND_PATH": os.fspath(self._tree.library), "MUTANT": str(number)}
        if self._tree.device:
            env["MUTANT_DEVICE"] = self._tree.device
        if seen is not None:
            env["MUTANT_SEEN"] = os.fspath(seen)
        words = [os.fspath(self._tree.test_backend_ops), "-b", "MUTANT", *(["-o", ",".join(ops)] if ops else [])]
        verdicts: dict[str, str] = {}
        child = spawn_command(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with child:
            try:
                late = _lines(child, limit, verdicts, ends)
            finally:
                end_group(child)
        if late == "late":
            return verdicts, _HANG
        if late == "ended":
            return verdicts, ""
        return verdicts, "" if child.returncode in {0, 1} else _how(child.returncode)


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _is_new(name: str, verdict: str, _: float = 0.0, *, known: Collection[str]) -> bool:
    return verdict == "FAIL" and name not in known


def _spent(child: Child) -> float:
    """Return processor seconds of the process below its supervisor so far; 0 once it has ended."""
    try:
        return sum(sum(p.cpu_times()[:2]) for p in psutil.Process(child.pid).children())
    except psutil.NoSuchProcess:
        return 0.0


def _lines(child: Child, limit: float, verdicts: dict[str, str], ends: Ends | None) -> str:
    """Read until the end, a case that `ends` the run (`ended`) or the limit (`late`)."""
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
                if ends is not None and ends(match["name"], match["verdict"], _spent(child)):
                    return "ended"
    return "late"
