"""Run the parts one by one: whatever happens to one, the next runs; each is written down at its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from conformance.case.case import JSON
from conformance.judge.outcome import Exit, Outcome, Why
from conformance.judge.verdict import MissingCause
from conformance.process import Tail, interrupt, spawn_command
from conformance.report.progress import Progress

from .parts import Options, Part, Paths, shown
from .state import Answer, Done, State

LOW = 64 << 20
"""Free bytes of a disk below which a broken part says that it is full."""
GRACE = 5.0
"""Seconds that a command has after SIGINT to write down what it has."""
_ANSWER_OF = {
    Exit.OK: Answer.FINE,
    Exit.FAILURES: Answer.FAILED,
    Exit.NOTHING: Answer.NOTHING,
    Exit.INCOMPLETE: Answer.INCOMPLETE,
}
_WHY = {
    Answer.FAILED: Why.FAILED,
    Answer.BROKEN: Why.BROKEN,
    Answer.LATE: Why.TIME_LIMIT,
    Answer.INCOMPLETE: Why.UNDECIDED,
    None: Why.INTERRUPTED,
}
"""Answer of a part -> what it is for the night; of several nights together one that is fine makes up for NOTHING."""


@dataclass(slots=True)
class Night:
    """One start of a nightly."""

    options: Options
    state: State
    parts: Sequence[Part]
    """Those that were asked for, in order."""
    table: Sequence[Part]
    """All there are."""
    lock: int
    others: Sequence[State]
    """Nights that this one only sums up."""
    tell: Callable[[str], None]

    def run(self) -> None:
        """Run what no earlier start brought to its end."""
        self.state.starts += 1
        self.state.exit_code = None
        for part in self.parts:
            self.state.parts.setdefault(part.name, Done())
        self.state.save()
        moved = False
        for part in self.parts:
            done = self.state.parts[part.name]
            if self._elsewhere(part):
                done.answer, done.says = Answer.ELSEWHERE, "done whole by another shard"
            elif not done.rounds and (why := part.idle(self.options)):
                done.answer, done.says = Answer.UNASKED, why
            elif done.ended and not (part.last and moved):
                self.tell(f"{part.name}: {done.answer}, by an earlier start")
            else:
                self.tell(f"{part.name}: {part.says}")
                self._part(part, done)
                self.tell(f"{part.name}: {done.answer}: {done.says}")
                moved = True
            self.state.save()

    def documents(self) -> list[Path]:
        """The documents of the parts so far, and of all nights that are merged, where they exist."""
        named = [s.folder / d for s in (*self.others, self.state) for p in s.parts.values() for d in p.documents]
        return [d for d in named if d.is_file()]

    def _elsewhere(self, part: Part) -> bool:
        """Whether another shard runs it: parts that cannot be shared go whole, one to each shard in turn."""
        if part.shared or part.last:
            return False
        whole = [p.name for p in self.table if not p.shared and not p.last]
        return whole.index(part.name) % self.options.shard.of != self.options.shard.index - 1

    def _part(self, part: Part, done: Done) -> None:
        done.answer, done.says = None, ""
        done.starts += 1
        if part.last and not self.documents():
            done.answer, done.says = Answer.BROKEN, "no other part wrote anything"
        elif part.repeats:
            self._rounds(part, done)
        else:
            self._once(part, done, part.name)

    def _rounds(self, part: Part, done: Done) -> None:
        answers: list[Answer] = []
        while (used := done.seconds) < self.options.budget:
            answers.append(self._once(part, done, f"{part.name}-{done.rounds + 1}"))
            if answers[-1] not in {Answer.FINE, Answer.NOTHING}:
                done.seconds = used  # the next start does this round again
                return
            done.rounds += 1
            done.answer = None
            self.state.save()
        done.answer = Answer.FINE if Answer.FINE in answers or done.rounds > len(answers) else Answer.NOTHING

    def _once(self, part: Part, done: Done, stem: str) -> Answer:
        """Run the command of a part once; `stem` is what its files are called."""
        folder, shard = self.options.folder, self.options.shard
        stem = stem if shard.of == 1 else f"{stem}-shard{shard.index}"
        paths = Paths(folder / f"{stem}.json", folder / f"{stem}.journal", tuple(self.documents()), done.rounds)
        command = part.words(self.options, paths)
        done.command = shown(command)
        proof = folder / part.leaves if part.leaves else paths.document
        proof.unlink(missing_ok=True)  # of a start that was killed; no one may take it for this one's
        if part.kind and paths.document.name not in done.documents:
            done.documents.append(paths.document.name)
        self.state.save()
        try:
            with Progress().of(_counts(stem, paths.journal)):
                ended = run(command, folder / f"{part.name}.log", part.limit, self.lock)
        except OSError as e:
            done.answer, done.says = Answer.BROKEN, f"no process could be started: {e.strerror}"
            return done.answer
        done.seconds += ended.seconds
        done.answer, done.says = _judge(part, proof, ended)
        if done.answer is Answer.BROKEN and (free := shutil.disk_usage(folder).free) < LOW:
            done.says += f"; the disk of {folder} is full: {free >> 20} MiB are free"
        return done.answer


def _judge(part: Part, document: Path, ended: Ended) -> tuple[Answer, str]:
    """The answer of a part. A traceback ends Python with 1 as failures do: only a document proves that it ran. Of one
    that sums up others, any that it leaves is fine: they have answered themselves.
    """
    if ended.timed_out:
        record = "; what it had by then is recorded" if document.is_file() else ""
        return Answer.LATE, f"ended after {ended.seconds:.0f} s{record}"
    answer = _ANSWER_OF.get(cast("Exit", ended.code))
    if answer is None:
        how = f"signal {ended.code - 128}" if ended.code > 128 else f"exit code {ended.code}"
        return Answer.BROKEN, f"{how}: {ended.last_line}"
    if part.kind:
        fault = _fault(part.kind, document)
        if fault:
            return Answer.BROKEN, f"exit code {ended.code}, {fault}: {ended.last_line}"
    elif part.leaves and document.is_file():
        return Answer.FINE, ended.last_line
    elif answer is Answer.FAILED:
        return Answer.BROKEN, f"exit code {ended.code}: {ended.last_line}"
    return answer, ended.last_line


def _fault(kind: str, document: Path) -> str:
    """What is wrong with the document that a part left; empty where nothing is."""
    try:
        read: JSON = json.loads(document.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it wrote no document"
    except (OSError, ValueError) as e:
        return f"its document cannot be read ({e})"
    other = read.get("kind") if isinstance(read, dict) else None
    if other != kind:
        return f"its document is of kind {other}, {kind} expected"
    missing = read.get("missing")
    lost = [m for m in missing if _is_lost(m)] if isinstance(missing, list) else []
    return f"{len(lost):,} cases asked have no result" if lost else ""


def _is_lost(row: JSON) -> bool:
    return not isinstance(row, dict) or row.get("cause") in {None, MissingCause.LOST.value}


def _counts(stem: str, journal: Path) -> Callable[[], str]:
    """The progress of a part, for a terminal: its results so far, where it has a journal."""
    began = time.monotonic()

    def says() -> str:
        try:
            lines = journal.read_bytes().count(b"\n")
        except OSError:
            lines = 0
        return f"{stem}: {f'{lines - 1:,} results, ' if lines > 1 else ''}{time.monotonic() - began:.0f} s"

    return says


def outcome(
    states: Sequence[State], names: Sequence[str], missing: Sequence[str] = (), unproven: Sequence[str] = ()
) -> Outcome:
    """The outcome of a nightly, or of several merged: that of its parts.

    Args:
        states: of the nights.
        names: of all parts.
        missing: a sentence for each shard or night that is not here.
        unproven: a sentence for each backend on which nothing passed in all shards together.
    """
    found = Outcome.of(Why.SHARD, missing) + Outcome.of(Why.BROKEN, [s.unwritten for s in states if s.unwritten])
    for name in names:
        own = [s.parts[name] for s in states if name in s.parts]
        for p in own:
            if p.answer in _WHY:
                found += Outcome.of(_WHY[p.answer], [f"{name}: {p.answer or 'interrupted'}: {p.says}"])
        answers = {p.answer for p in own}
        if Answer.NOTHING in answers and Answer.FINE not in answers:
            found += Outcome.of(Why.UNEXECUTED, [f"{name}: {Answer.NOTHING}"])
    if not any(p.answer is Answer.FINE for s in states for n, p in s.parts.items() if n in names):
        found += Outcome.of(Why.UNEXECUTED, ["no part was fine"])
    return found + Outcome.of(Why.UNPROVEN, unproven)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; 128 + the signal that ended it."""
    seconds: float
    timed_out: bool
    tail: str
    """The end of what it printed."""

    @property
    def last_line(self) -> str:
        """The last line that is not blank."""
        return next((line.strip() for line in reversed(self.tail.splitlines()) if line.strip()), "")


def run(command: Sequence[str], log: Path, limit: float, lock: int) -> Ended:
    """Run `command` to its end, or for `limit` seconds; append its output to `log`.

    Any exception meanwhile, above all an interrupt, kills the command and everything it started.

    Args:
        command: a program and its arguments.
        log: for its output, standard error included; a full disk does not stop the command.
        limit: seconds.
        lock: a descriptor that the command and its keeper inherit, so the lock lasts as long as any of them.
    """
    began = time.monotonic()
    popen = spawn_command(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        pass_fds=(lock,),
    )
    stream = cast("BinaryIO", popen.stdout)
    tail = Tail(stream, partial(_append, log))
    timed_out = False
    try:
        popen.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        interrupt(popen, GRACE)  # first as a user would, so that it can write down what it has
        tail.join(GRACE)
        stream.close()
    code = popen.returncode
    return Ended(code if code >= 0 else 128 - code, time.monotonic() - began, timed_out, tail.text)


def _append(log: Path, data: bytes) -> None:
    with suppress(OSError), log.open("ab") as f:
        f.write(data)
