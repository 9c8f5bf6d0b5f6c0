"""Verbs of states: what was saved and loaded decodes as if nothing had happened."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import UsageError
from conformance.live.pairs import Pair

from .desk import PROMPT, Desk, Way

PARTIAL, ON_DEVICE = 1, 2
"""`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` and `_ON_DEVICE`."""


@dataclass(frozen=True, slots=True)
class State:
    """What llama.cpp saved, of all sequences or of one."""

    data: NDArray[np.uint8]
    next: tuple[int, ...]
    """Sequence -> the position of its next token."""


def save(way: Way) -> State:
    """`llama_state_get_data`."""
    return State(_got(way, "state_get", ()), tuple(way.next))


def load(way: Way, state: State) -> None:
    """`llama_state_set_data`; UsageError if it did not take all."""
    _set(way, "state_set_data", state.data, ())
    way.next[: len(state.next)] = state.next


def save_seq(way: Way, seq: int, flags: int | None = None) -> State:
    """`llama_state_seq_get_data`, with flags `_ext`."""
    return State(_got(way, "state_seq_get", (seq,) if flags is None else (seq, flags)), (way.next[seq],))


def load_seq(way: Way, seq: int, state: State, flags: int | None = None) -> None:
    """`llama_state_seq_set_data`, with flags `_ext`; UsageError if it did not take all."""
    if flags is None:
        _set(way, "state_seq_set_data", state.data, (seq,))
    else:
        _set(way, "state_seq_set_data_ext", state.data, (seq, flags))
    way.next[seq] = state.next[0]


def _got(way: Way, stem: str, rest: tuple[int, ...]) -> NDArray[np.uint8]:
    ext = "_ext" if len(rest) > 1 else ""
    call = way.desk.call
    data = np.zeros(call(f"{stem}_size{ext}")(way.context, *rest), np.uint8)
    n = call(f"{stem}_data{ext}")(way.context, data.ctypes.data, data.size, *rest)
    if n != data.size:
        raise UsageError(f"llama_{stem}_data{ext} wrote {n} bytes of {data.size}")
    return data


def _set(way: Way, name: str, data: NDArray[np.uint8], rest: tuple[int, ...]) -> None:
    n = way.desk.call(name)(way.context, data.ctypes.data, data.size, *rest)
    if n != data.size:
        raise UsageError(f"llama_{name} read {n} bytes of {data.size}: {way.desk.library.reason()}")


def _begun(desk: Desk, n_seq_max: int = 1, *, unified: bool | None = None) -> Way:
    """A context that has read a prompt: of each sequence its own."""
    way = desk.way(n_seq_max, unified=unified)
    way.feed(*((seq, desk.tokens(PROMPT + seq, f"prompt {seq}")) for seq in range(n_seq_max)))
    return way


def _into(way: Way, into: Way, what: str) -> Iterator[Pair]:
    """The state of `way` in `into`, and where it must go on."""
    state = save(way)
    load(into, state)
    expected = way.steps()
    yield Pair(what, into.steps(), expected, exact=True)
    empty = way.desk.way()
    yield Pair("an empty context", empty.steps(), expected, apart=True)


def same(desk: Desk) -> Iterator[Pair]:
    """Into the context that it came from, which has read other tokens since."""
    way = _begun(desk)
    state = save(way)
    expected = way.steps()
    way.clear(data=True)
    way.feed((0, desk.tokens(PROMPT - 4, "other")))
    load(way, state)
    yield Pair("after loading", way.steps(), expected, exact=True)


def fresh(desk: Desk) -> Iterator[Pair]:
    """Into a new context."""
    yield from _into(_begun(desk), desk.way(), "in a new context")


def larger(desk: Desk) -> Iterator[Pair]:
    """Into a context of more cells."""
    yield from _into(_begun(desk), desk.larger(2), "in a larger context")


def several(desk: Desk) -> Iterator[Pair]:
    """Of three sequences, into a new context."""
    way, into = _begun(desk, 3), desk.way(3)
    load(into, save(way))
    for seq in range(3):
        yield Pair(f"sequence {seq}", into.steps(seq), way.steps(seq), exact=True)


def process(desk: Desk) -> Iterator[Pair]:
    """Into a new process: the first part leaves a file, the second one reads it."""
    file = desk.folder / "left.npz"
    if desk.part == 0:
        way = _begun(desk)
        state = save(way)
        np.savez(file, data=state.data, next=np.array(state.next), expected=way.steps())
        return
    with np.load(file) as kept:
        way = desk.way()
        load(way, State(kept["data"], tuple(kept["next"].tolist())))
        yield Pair("in a new process", way.steps(), kept["expected"], exact=True)


def seq(desk: Desk) -> Iterator[Pair]:
    """One of two sequences is removed and comes back; the other notices nothing."""
    way, calm = _begun(desk, 2), _begun(desk, 2)
    state = save_seq(way, 0)
    way.rm(0)
    load_seq(way, 0, state)
    yield Pair("the sequence that came back", way.steps(0), calm.steps(0))
    yield Pair("the other sequence", way.steps(1), calm.steps(1))


def seq_other(desk: Desk) -> Iterator[Pair]:
    """A sequence comes back under another id, in place of what that one had."""
    way = _begun(desk, 2)
    load_seq(way, 1, save_seq(way, 0))
    expected = way.steps(0)
    yield Pair("the other id", way.steps(1), expected)


def seq_unified(desk: Desk) -> Iterator[Pair]:
    """As `seq_other`, where both sequences share one stream of cells."""
    way = _begun(desk, 2, unified=True)
    load_seq(way, 1, save_seq(way, 0))
    expected = way.steps(0)
    yield Pair("the other id", way.steps(1), expected)


def seq_device(desk: Desk) -> Iterator[Pair]:
    """A sequence's state stays on the device meanwhile."""
    way, calm = _begun(desk, 2), _begun(desk, 2)
    state = save_seq(way, 0, ON_DEVICE)
    way.steps(0, name="other")
    load_seq(way, 0, state, ON_DEVICE)
    yield Pair("the sequence that came back", way.steps(0), calm.steps(0))
    yield Pair("the other sequence", way.steps(1), calm.steps(1))


def checkpoint(desk: Desk) -> Iterator[Pair]:
    """A partial state, as servers keep it of what cannot go back; rejected drafts are removed after it is loaded."""
    way, calm = _begun(desk), _begun(desk)
    state = save_seq(way, 0, PARTIAL)
    way.feed((0, desk.tokens(4, "drafts")))
    load_seq(way, 0, state, PARTIAL)
    way.rm(0, PROMPT)
    yield Pair("after rejected drafts", way.steps(), calm.steps())


def file(desk: Desk) -> Iterator[Pair]:
    """A prompt-cache file, with its tokens."""
    way, into = _begun(desk), desk.way()
    path, tokens = bytes(desk.folder / "session.bin"), desk.tokens(PROMPT, "prompt 0").astype(np.int32)
    if not desk.call("state_save_file")(way.context, path, tokens.ctypes.data, tokens.size):
        raise UsageError(f"llama_state_save_file returned false: {desk.library.reason()}")
    found, count = np.zeros(2 * PROMPT, np.int32), ctypes.c_size_t()
    arguments = (found.ctypes.data, found.size, ctypes.byref(count))
    if not desk.call("state_load_file")(into.context, path, *arguments):
        raise UsageError(f"llama_state_load_file returned false: {desk.library.reason()}")
    into.next = list(way.next)
    yield _same_tokens(found[: count.value], tokens)
    yield Pair("from the file", into.steps(), way.steps(), exact=True)


def seq_file(desk: Desk) -> Iterator[Pair]:
    """A file of one sequence, read as another."""
    way, into = _begun(desk, 2), desk.way(2)
    path, tokens = bytes(desk.folder / "sequence.bin"), desk.tokens(PROMPT + 1, "prompt 1").astype(np.int32)
    if not desk.call("state_seq_save_file")(way.context, path, 1, tokens.ctypes.data, tokens.size):
        raise UsageError(f"llama_state_seq_save_file returned 0: {desk.library.reason()}")
    found, count = np.zeros(2 * PROMPT, np.int32), ctypes.c_size_t()
    arguments = (found.ctypes.data, found.size, ctypes.byref(count))
    if not desk.call("state_seq_load_file")(into.context, path, 0, *arguments):
        raise UsageError(f"llama_state_seq_load_file returned 0: {desk.library.reason()}")
    into.next[0] = way.next[1]
    yield _same_tokens(found[: count.value], tokens)
    yield Pair("from the file", into.steps(0), way.steps(1))


def _same_tokens(found: NDArray[np.int32], tokens: NDArray[np.int32]) -> Pair:
    return Pair("the tokens of the file", found[None].astype(np.float32), tokens[None].astype(np.float32), exact=True)


def fragmented(desk: Desk) -> Iterator[Pair]:
    """A sequence comes back where too few free cells lie beside each other: between those of another."""
    way, n = desk.way(3, unified=True, n_ctx=256), 20
    way.feed((2, desk.tokens(205, "rest")))
    texts = [desk.tokens(n, f"long {seq}") for seq in (0, 1)]
    way.feed(*((seq, texts[seq][i : i + 1]) for i in range(n) for seq in (0, 1)))
    state = save_seq(way, 0)
    expected = way.steps(0)
    way.rm(0)
    load_seq(way, 0, state)
    calm = desk.way(n_ctx=256)
    calm.feed((0, texts[1]))
    yield Pair("between the cells of another", way.steps(0), expected)
    yield Pair("the other", way.steps(1), calm.steps())
