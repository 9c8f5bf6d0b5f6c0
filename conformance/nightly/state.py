"""What a nightly has done so far, written after each part, so that the next start goes on from there."""

from __future__ import annotations

import enum
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conformance.case.case import JSON
from conformance.case.leftover import write_whole
from conformance.ggml.errors import UsageError
from conformance.report.journal import SAME, lock
from conformance.run.session.environment import header
from conformance.run.session.select import new_seed

FILE = "nightly.state"
"""JSON; by its name no report takes it for a document of results."""
LOCK = "nightly.lock"
PATIENCE = 15.0
"""Seconds to wait for the processes of an earlier start."""
KIND = "nightly"


class Answer(str, enum.Enum):
    """How a part ended."""

    FINE = "fine"
    FAILED = "failed"
    """It ran, and found failures or regressions."""
    NOTHING = "nothing was executed"
    INCOMPLETE = "incomplete"
    """It stopped early, by a limit of its own or an interrupt, or decided nothing."""
    BROKEN = "could not run"
    """It crashed, is not there, or left no document."""
    LATE = "timed out"
    ELSEWHERE = "in another shard"
    UNASKED = "not asked for"

    def __str__(self) -> str:
        return self.value


ENDED = frozenset({Answer.FINE, Answer.FAILED, Answer.NOTHING, Answer.ELSEWHERE})
"""A part with one of these is done; any other runs again at the next start."""


@dataclass(slots=True)
class Done:
    """One part, as far as it is."""

    answer: Answer | None = None
    """None until its end."""
    says: str = ""
    """One sentence: its figures, or why it could not run."""
    command: str = ""
    """What to type to run it by hand."""
    seconds: float = 0.0
    """Without starts that were killed."""
    rounds: int = 0
    """Complete rounds, of a part that repeats."""
    starts: int = 0
    documents: list[str] = field(default_factory=list)
    """Names of the documents it wrote, in the nightly's folder."""

    @property
    def ended(self) -> bool:
        """Whether no start has to run it again."""
        return self.answer in ENDED


@dataclass(slots=True)
class State:
    """The file in `folder`, and its content."""

    folder: Path
    head: dict[str, JSON]
    label: str
    """Which machine of several, for people."""
    asked: dict[str, JSON]
    seed: int | None = None
    """Its generated cases are drawn from it; None in a night older than seeds."""
    starts: int = 0
    parts: dict[str, Done] = field(default_factory=dict)
    exit_code: int | None = None
    """None before its end, and of one that was interrupted."""
    unwritten: str = ""
    """Why the last write failed; empty where it did not."""

    def save(self) -> None:
        """Write the file whole or not at all; on a full disk the night goes on."""
        document = {
            **self.head,
            "label": self.label,
            "asked": self.asked,
            "seed": self.seed,
            "starts": self.starts,
            "parts": {n: asdict(p) for n, p in self.parts.items()},
            "exit": self.exit_code,
        }
        try:
            write_whole(self.folder / FILE, json.dumps(document, indent=1) + "\n")
        except OSError as e:
            self.unwritten = f"{self.folder / FILE} cannot be written: {e.strerror}"
        else:
            self.unwritten = ""


def read(folder: Path) -> State:
    """The state in `folder`; UsageError if there is none, or none of ours."""
    path = folder / FILE
    try:
        d = json.loads(path.read_text(encoding="utf-8"))
        if d["kind"] != KIND:
            raise UsageError(f"{path}: no state of a nightly")
        head = {k: d[k] for k in ("schema", "kind", "run", "written", "environment")}
        parts = {
            n: Done(**{**p, "answer": None if p["answer"] is None else Answer(p["answer"])})
            for n, p in d["parts"].items()
        }
        return State(folder, head, d["label"], d["asked"], d.get("seed"), d["starts"], parts, d["exit"])
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UsageError(f"{path}: no state of a nightly: {type(e).__name__} {e}") from e


def unfinished(nights: Path, request: dict[str, JSON], seed: int | None) -> Path | None:
    """The folder of the newest night in `nights` that has the same request and machine, and is not at its end."""
    environment = header(KIND)["environment"]
    states: list[State] = []
    for path in nights.glob(f"*/{FILE}"):
        with suppress(UsageError):
            state = read(path.parent)
            same = all(state.head["environment"].get(k) == environment[k] for k in SAME)
            ended = state.exit_code is not None and state.exit_code < 128  # as older versions say of an interrupted one
            if same and not ended and state.asked == request and seed in {None, state.seed}:
                states.append(state)
    return max(states, key=lambda s: (str(s.head["written"]), s.folder.name)).folder if states else None


def begin(folder: Path, label: str, request: dict[str, JSON], seed: int | None = None) -> State:
    """The state in `folder`, new or to go on with; UsageError if that one has another request, seed or machine."""
    if not (folder / FILE).exists():
        return State(folder, header(KIND), label, request, new_seed() if seed is None else seed)
    state = read(folder)
    earlier, was, now = state.asked, state.head["environment"], header(KIND)["environment"]
    differences = [
        *([f"has seed {state.seed}, this one {seed}"] if seed not in {None, state.seed} else []),
        *(f"was asked for {k} {earlier.get(k)!r}, this one {v!r}" for k, v in request.items() if earlier.get(k) != v),
        *(f"had {k} {was.get(k)}, here it is {now[k]}" for k in SAME if was.get(k) != now[k]),
    ]
    if differences:
        raise UsageError(f"{folder}: the nightly there {differences[0]}; choose another folder with -o")
    return state


def hold(folder: Path) -> int:
    """Lock `folder` for this process and all that inherit the descriptor; UsageError if another night holds it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    if not lock(descriptor, PATIENCE):
        os.close(descriptor)
        raise UsageError(f"{folder}: another nightly is at work there")
    return descriptor
