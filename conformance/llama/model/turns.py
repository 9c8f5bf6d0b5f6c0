"""Conversations: their file, their settings, and the same tokens in a fresh context."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import msgspec

from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Verdict
from conformance.llama.zoo import family as zoo
from conformance.suite.family import keys, read_keys

from .check import ModelCheck
from .llama_process import LlamaProcess, LogitsRow, Setting, Talk, Turn, alone
from .modelrun import ModelRun
from .recording import UNNAMED, ModelRecording, row_words

KEYS = {**{k: zoo.KEYS[k] for k in ("cache", "cache_v", "fa", "ubatch")}, **keys("batch=0 slots=1 shift=0")}
"""The keys of a setting."""
SETTINGS = ("", "fa=0", "cache=q8_0", "ubatch=16", "batch=7", "slots=2", "shift=4")
"""The settings that play a conversation by default, one change each."""
MOST = {"ubatch": (1, 1 << 16), "batch": (0, 1 << 16), "slots": (1, 64), "shift": (0, 1 << 16)}
"""Smallest and largest value of a key."""
STAND_IN = "ANSWER"
"""Text in place of a generated answer, to find what the chat template writes after it."""
FORM = 'conversations expected, each {"messages": [{"role": "user", "content": "…"}, …]}, or "tokens": [1, 2]'

Checking = Callable[[ModelRecording], ModelCheck]
"""Makes the check of what llama.cpp played and recorded."""


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message, as texts or tokens."""

    role: Literal["system", "user", "assistant"] = "user"
    content: str = ""
    tokens: list[int] = []  # msgspec copies it


class Conversation(msgspec.Struct, forbid_unknown_fields=True):
    """The messages of one slot; an assistant's message is the answer to decode."""

    messages: list[Message]


def setting(text: str, *, flash_attn: bool) -> Setting:
    """Parse `key=value,key=value`; `flash_attn` is the model's default. UsageError if invalid."""
    values, _ = read_keys(text, text, KEYS, what="setting")
    for key, (least, most) in MOST.items():
        if not least <= values[key] <= most:
            raise UsageError(f"setting {text!r}: {key}: {least} to {most} expected, {values[key]} found")
    changes = {
        "flash_attn": values["fa"] == "1" if values["fa"] else flash_attn,
        "type_k": values["cache"],
        "type_v": values["cache_v"] or values["cache"],
        "n_ubatch": values["ubatch"],
    }
    return Setting(text, changes, values["batch"], values["slots"], values["shift"])


def read(file: Path) -> list[Conversation]:
    """Read a file of JSON objects, one per slot; UsageError if it has another form."""
    text = file.read_text("utf-8", "replace").strip()
    decoder, found, at = json.JSONDecoder(), [], 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            found.append(msgspec.convert(value, Conversation))
            at += len(text[at:]) - len(text[at:].lstrip())
    except (ValueError, msgspec.ValidationError) as e:
        raise UsageError(f"{file}: {FORM}; {e}") from None
    if not found:
        raise UsageError(f"{file}: {FORM}; the file is empty")
    return found


def talk(llama: LlamaProcess, file: Path, decode: int) -> Talk:
    """Return the turns of a file; an answer that it lacks has at most `decode` tokens.

    UsageError if messages are in a wrong order or empty, or if the model's chat template is unknown.
    """
    return [list(_turns(llama, c.messages, decode, str(file))) for c in read(file)]


def _turns(llama: LlamaProcess, messages: Sequence[Message], decode: int, file: str) -> Iterator[Turn]:
    said: list[tuple[str, str]] = []
    before = ""
    asked = [i for i, m in enumerate(messages) if m.role == "user"]
    wrong = [i for i, m in enumerate(messages) if not m.content and not m.tokens]
    wrong += [i for i, m in enumerate(messages) if m.role == "assistant" and i - 1 not in asked]
    if wrong or not asked:
        at = f"message {wrong[0] + 1}" if wrong else "no message of a user"
        raise UsageError(f"{file}: {at}: a text or tokens expected, and a user's message before each answer")
    for i, m in enumerate(messages):
        if m.role == "system":
            said.append((m.role, m.content))
        if m.role != "user":
            continue
        said.append(("user", m.content))
        prompt = m.tokens
        if not prompt:
            text = llama.chat(said)
            if not text.startswith(before):
                raise UsageError(f"{file}: the chat template rewrites earlier messages; give tokens in place of texts")
            prompt, before = llama.tokens(text[len(before) :], first=i == asked[0]), text + STAND_IN
        said.append(("assistant", STAND_IN))
        after = messages[i + 1] if i + 1 < len(messages) and messages[i + 1].role == "assistant" else None
        answer = None if after is None else after.tokens or llama.tokens(after.content, first=False)
        yield Turn(prompt, decode, answer)


def spread(talk: Talk, n: int) -> Talk:
    """Return at least `n` slots, by repeating conversations."""
    return list(islice(cycle(talk), max(n, len(talk))))


def so_far(talk: Talk, row: LogitsRow) -> list[int]:
    """Return a slot's tokens up to a row; the answers of `talk` are known."""
    tokens: list[int] = []
    for turn in talk[row.slot][: row.turn + 1]:
        tokens += [*turn.prompt, *(turn.forced or ())]
    last = talk[row.slot][row.turn]
    return tokens[: len(tokens) - len(last.forced or ()) + row.token]


def runs(
    llama: LlamaProcess,
    talk: Talk,
    settings: Sequence[Setting],
    specs: Sequence[Spec],
    check: Checking,
    begin: Callable[[ModelRecording], None],
    skipped: Callable[[Setting, str], None] | None = None,
    case_id: Callable[[Setting], str] = lambda _: UNNAMED,
) -> Iterator[ModelRun]:
    """Check backends with one setting after the other, each until it is wrong.

    The first setting decides the answers of the conversations, which `begin` may print. With several turns, and unless
    positions shift, a fresh context also gets the same tokens as one prompt. `case_id` names a setting's case.

    Raises:
        UsageError: llama.cpp cannot play the first setting, or any if `skipped` is None.
    """
    left = list(specs)
    for setting in settings if left else ():
        try:
            recording = ModelRecording.of(llama, spread(talk, setting.slots), setting, case_id(setting))
        except UsageError as e:
            if skipped is None or setting is settings[0]:
                raise
            skipped(setting, str(e))
            continue
        with closing(check(recording)) as session:
            if setting is settings[0]:
                begin(recording)
                talk = recording.replayed
            for spec in left.copy():
                run = session.of(spec)
                if max(map(len, talk)) > 1 and not setting.shift and run.verdict is not Verdict.UNSUPPORTED:
                    _add_fresh(llama, recording, spec, run, check)
                if run.is_wrong:
                    left.remove(spec)
                yield run


def _add_fresh(llama: LlamaProcess, recording: ModelRecording, spec: Spec, run: ModelRun, check: Checking) -> None:
    """Add the word for the same tokens, up to the first wrong row, as one prompt."""
    row = run.row or recording.last
    tokens = so_far(recording.replayed, row)
    with closing(check(ModelRecording.of(llama, alone(tokens), replace(recording.setting, slots=1)))) as other:
        fresh = other.of(spec)
    run.fresh = fresh.word
    text = f"a fresh run of the {len(tokens)} tokens so far"
    if run.is_wrong:
        run.notes.append(f"{text} is right" if fresh.verdict is Verdict.PASS else f"{text}: {fresh.sentence()}")
    elif fresh.is_wrong:
        run.take(fresh, row, f"in {text}, {row_words(row, len(recording.talk))}")
