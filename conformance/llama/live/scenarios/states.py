"""API scenarios for saved states: a loaded state decodes as the original would."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import UsageError
from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import RefusedError

from .harness import AFTER, PROMPT, Context, Harness

SNAPSHOTS: Mapping[str, object] = {"n_rs_seq": 4}
PARTIAL, ON_DEVICE = 1, 2
"""`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` and `_ON_DEVICE`."""


@dataclass(frozen=True, slots=True)
class State:
    """A saved state, of all sequences or of one."""

    data: NDArray[np.uint8]
    next: tuple[int, ...]
    """Sequence -> position of its next token."""


def save(context: Context) -> State:
    """Call `llama_state_get_data`."""
    return State(_got(context, "state_get", ()), tuple(context.next))


def load(context: Context, state: State) -> None:
    """Call `llama_state_set_data`; UsageError if it did not read all bytes."""
    _set(context, "state_set_data", state.data, ())
    context.next[: len(state.next)] = state.next


def save_seq(context: Context, seq: int, flags: int | None = None) -> State:
    """Call `llama_state_seq_get_data`, or `_ext` if there are flags."""
    return State(_got(context, "state_seq_get", (seq,) if flags is None else (seq, flags)), (context.next[seq],))


def load_seq(context: Context, seq: int, state: State, flags: int | None = None) -> None:
    """Call `llama_state_seq_set_data` or `_ext`; UsageError if it did not read all bytes."""
    if flags is None:
        _set(context, "state_seq_set_data", state.data, (seq,))
    else:
        _set(context, "state_seq_set_data_ext", state.data, (seq, flags))
    context.next[seq] = state.next[0]


def _got(context: Context, stem: str, rest: tuple[int, ...]) -> NDArray[np.uint8]:
    ext = "_ext" if len(rest) > 1 else ""
    call = context.harness.call
    data = np.zeros(call(f"{stem}_size{ext}")(context.pointer, *rest), np.uint8)
    n = call(f"{stem}_data{ext}")(context.pointer, data.ctypes.data, data.size, *rest)
    if n != data.size:
        raise UsageError(f"llama_{stem}_data{ext} wrote {n} bytes of {data.size}")
    return data


def _set(context: Context, name: str, data: NDArray[np.uint8], rest: tuple[int, ...]) -> None:
    n = context.harness.call(name)(context.pointer, data.ctypes.data, data.size, *rest)
    if n != data.size:
        raise UsageError(f"llama_{name} read {n} bytes of {data.size}: {context.harness.library.reason()}")


def _begun(harness: Harness, n_seq_max: int = 1, *, unified: bool | None = None) -> Context:
    """Make a context with a different prompt in each sequence."""
    context = harness.context(n_seq_max, unified=unified)
    context.feed(*((seq, harness.tokens(PROMPT + seq, f"prompt {seq}")) for seq in range(n_seq_max)))
    return context


def _into(context: Context, into: Context, what: str) -> Iterator[Comparison]:
    """Load the state of `context` into `into` and compare the steps after it."""
    state = save(context)
    load(into, state)
    expected = context.steps()
    yield Comparison(what, into.steps(), expected, exact=context.harness.keeps_order)
    empty = context.harness.context()
    yield Comparison("an empty context", empty.steps(), expected, differs=True)


def same(harness: Harness) -> Iterator[Comparison]:
    """Load a state into its own context, which has decoded other tokens since."""
    context = _begun(harness)
    state = save(context)
    expected = context.steps()
    context.clear(data=True)
    context.feed((0, harness.tokens(PROMPT - 4, "other")))
    load(context, state)
    yield Comparison("after loading", context.steps(), expected, exact=harness.keeps_order)


def fresh(harness: Harness) -> Iterator[Comparison]:
    """Load a state into a new context."""
    yield from _into(_begun(harness), harness.context(), "in a new context")


def larger(harness: Harness) -> Iterator[Comparison]:
    """Load a state into a context of more cells."""
    yield from _into(_begun(harness), harness.larger(2), "in a larger context")


def several(harness: Harness) -> Iterator[Comparison]:
    """Load the state of three sequences into a new context."""
    context, into = _begun(harness, 3), harness.context(3)
    load(into, save(context))
    for seq in range(3):
        yield Comparison(f"sequence {seq}", into.steps(seq), context.steps(seq), exact=harness.keeps_order)


def process(harness: Harness) -> Iterator[Comparison]:
    """Load a state in a new process: the first part writes a file, the second reads it."""
    file = harness.folder / "left.npz"
    if harness.part == 0:
        context = _begun(harness)
        state = save(context)
        np.savez(file, data=state.data, next=np.array(state.next), expected=context.steps())
        return
    with np.load(file) as kept:
        context = harness.context()
        load(context, State(kept["data"], tuple(kept["next"].tolist())))
        yield Comparison("in a new process", context.steps(), kept["expected"], exact=harness.keeps_order)


def seq(harness: Harness) -> Iterator[Comparison]:
    """Save, remove and reload one of two sequences; the other must not change."""
    context, control = _begun(harness, 2), _begun(harness, 2)
    state = save_seq(context, 0)
    context.rm(0)
    load_seq(context, 0, state)
    yield Comparison("the reloaded sequence", context.steps(0), control.steps(0))
    yield Comparison("the other sequence", context.steps(1), control.steps(1))


def seq_other(harness: Harness) -> Iterator[Comparison]:
    """Load a sequence under another id, over that id's tokens."""
    context = _begun(harness, 2)
    load_seq(context, 1, save_seq(context, 0))
    expected = context.steps(0)
    yield Comparison("the other id", context.steps(1), expected)


def seq_unified(harness: Harness) -> Iterator[Comparison]:
    """Load a sequence under another id, where both share one stream of cells."""
    context = _begun(harness, 2, unified=True)
    load_seq(context, 1, save_seq(context, 0))
    expected = context.steps(0)
    yield Comparison("the other id", context.steps(1), expected)


def seq_device(harness: Harness) -> Iterator[Comparison]:
    """Save a sequence's state on the device and reload it after another text took its cells."""
    context, control = _begun(harness, 2), _begun(harness, 2)
    state = save_seq(context, 0, ON_DEVICE)
    context.rm(0)
    context.feed((0, harness.tokens(PROMPT + AFTER, "other")))
    load_seq(context, 0, state, ON_DEVICE)
    yield Comparison("the reloaded sequence", context.steps(0), control.steps(0))
    yield Comparison("the other sequence", context.steps(1), control.steps(1))


def checkpoint(harness: Harness) -> Iterator[Comparison]:
    """Load a partial state, as servers save it, and remove rejected drafts after it."""
    context, control = _begun(harness), _begun(harness)
    state = save_seq(context, 0, PARTIAL)
    context.feed((0, harness.tokens(4, "drafts")))
    load_seq(context, 0, state, PARTIAL)
    context.rm(0, PROMPT)
    yield Comparison("after rejected drafts", context.steps(), control.steps())


def file(harness: Harness) -> Iterator[Comparison]:
    """Write and load a prompt-cache file with its tokens."""
    context, into = _begun(harness), harness.context()
    path, tokens = bytes(harness.folder / "session.bin"), harness.tokens(PROMPT, "prompt 0").astype(np.int32)
    if not harness.call("state_save_file")(context.pointer, path, tokens.ctypes.data, tokens.size):
        raise UsageError(f"llama_state_save_file returned false: {harness.library.reason()}")
    found, count = np.zeros(2 * PROMPT, np.int32), ctypes.c_size_t()
    arguments = (found.ctypes.data, found.size, ctypes.byref(count))
    if not harness.call("state_load_file")(into.pointer, path, *arguments):
        raise UsageError(f"llama_state_load_file returned false: {harness.library.reason()}")
    into.next = list(context.next)
    yield _same_tokens(found[: count.value], tokens)
    yield Comparison("from the file", into.steps(), context.steps(), exact=harness.keeps_order)


def seq_file(harness: Harness) -> Iterator[Comparison]:
    """Load a file of one sequence as another."""
    context, into = _begun(harness, 2), harness.context(2)
    path, tokens = bytes(harness.folder / "sequence.bin"), harness.tokens(PROMPT + 1, "prompt 1").astype(np.int32)
    if not harness.call("state_seq_save_file")(context.pointer, path, 1, tokens.ctypes.data, tokens.size):
        raise UsageError(f"llama_state_seq_save_file returned 0: {harness.library.reason()}")
    found, count = np.zeros(2 * PROMPT, np.int32), ctypes.c_size_t()
    arguments = (found.ctypes.data, found.size, ctypes.byref(count))
    if not harness.call("state_seq_load_file")(into.pointer, path, 0, *arguments):
        raise UsageError(f"llama_state_seq_load_file returned 0: {harness.library.reason()}")
    into.next[0] = context.next[1]
    yield _same_tokens(found[: count.value], tokens)
    yield Comparison("from the file", into.steps(0), context.steps(1))


def _same_tokens(found: NDArray[np.int32], tokens: NDArray[np.int32]) -> Comparison:
    return Comparison(
        "the tokens of the file", found[None].astype(np.float32), tokens[None].astype(np.float32), exact=True
    )


def fragmented(harness: Harness) -> Iterator[Comparison]:
    """Reload a sequence into cells scattered between those of another."""
    context, n = harness.context(3, unified=True, n_ctx=256), 20
    context.feed((2, harness.tokens(205, "rest")))
    texts = [harness.tokens(n, f"long {seq}") for seq in (0, 1)]
    context.feed(*((seq, texts[seq][i : i + 1]) for i in range(n) for seq in (0, 1)))
    state = save_seq(context, 0)
    expected = context.steps(0)
    context.rm(0)
    load_seq(context, 0, state)
    control = harness.context(n_ctx=256)
    control.feed((0, texts[1]))
    yield Comparison("between the cells of another", context.steps(0), expected)
    yield Comparison("the other", context.steps(1), control.steps())


def snapshots(harness: Harness) -> Iterator[Comparison]:
    """Load the state of a context with snapshots (`n_rs_seq`) into another."""
    yield from _into(_with_drafts(harness), harness.context(more=SNAPSHOTS), "in a new context")


def loaded_drafts(harness: Harness) -> Iterator[Comparison]:
    """Reject drafts after loading a state, which must restore its snapshots or be refused."""
    control, into = _with_drafts(harness), harness.context(more=SNAPSHOTS)
    load(into, save(control))
    for each in (control, into):
        each.rm(0, PROMPT + 1, may_refuse=True)
    yield Comparison("after rejected drafts", into.steps(), control.steps())


def _with_drafts(harness: Harness) -> Context:
    context = harness.context(more=SNAPSHOTS)
    context.feed((0, harness.tokens(PROMPT)))
    context.feed((0, harness.tokens(4, "drafts")), every=True)
    return context


Data = NDArray[np.uint8]


def cut(data: Data, *, parts: int) -> Data:
    """Return the first of `parts` parts of a state; all but the last if `parts` is negative."""
    return data[: data.size // parts] if parts > 0 else data[: data.size + data.size // parts]


def renamed(data: Data, arch: str) -> Data:
    """Return a state with another architecture's name."""
    at = bytes(data[:256]).find(arch.encode())
    if at < 0:
        raise RefusedError("its states do not name the architecture")
    other = data.copy()
    other[at] ^= 1
    return other


def refused_seq(harness: Harness, spoil: Callable[[Data], Data]) -> Iterator[Comparison]:
    """Load a corrupted state over sequence 1 of two, which must be refused."""
    context = _begun(harness, 2)
    _refused(context, "state_seq_set_data", spoil(save_seq(context, 0).data), (1,))
    yield from _as_before(context, _begun(harness, 2), other=0)


def refused(harness: Harness, spoil: Callable[[Data], Data]) -> Iterator[Comparison]:
    """Load a corrupted state of a whole context, which must be refused."""
    context = _begun(harness, 2)
    _refused(context, "state_set_data", spoil(save(context).data), ())
    yield from _as_before(context, _begun(harness, 2))


def other_model(harness: Harness) -> Iterator[Comparison]:
    """Load a state whose architecture has another name, which must be refused."""
    arch = str(harness.request.params.get("arch"))
    yield from refused(harness, lambda data: renamed(data, arch))


def other_types(harness: Harness) -> Iterator[Comparison]:
    """Load a sequence whose keys have another type, which must be refused."""
    other = "f32" if harness.request.type_k != "f32" else "f16"
    source = harness.context(2, type_k=other, type_v=other)  # as many streams: the types alone differ
    source.feed((0, harness.tokens(PROMPT)))
    context = _begun(harness, 2)
    _refused(context, "state_seq_set_data", save_seq(source, 0).data, (1,))
    yield from _as_before(context, _begun(harness, 2), other=0)


def _refused(context: Context, name: str, data: Data, rest: tuple[int, ...]) -> None:
    """Load a state; UsageError unless llama.cpp returns 0."""
    data = np.ascontiguousarray(data)
    n = context.harness.call(name)(context.pointer, data.ctypes.data, data.size, *rest)
    if n:
        raise UsageError(f"llama_{name} took {n} bytes of a state that it must refuse")


def _left(context: Context, seq: int) -> int:
    """Return the last position of a sequence, -1 if it is empty."""
    return int(context.harness.call("memory_seq_pos_max")(context.memory, seq))


def _as_before(context: Context, control: Context, other: int = -1) -> Iterator[Comparison]:
    """Compare each sequence after a refused state: it must be unchanged or empty.

    `other`: a sequence that must be unchanged.
    """
    for seq in range(2):
        left = _left(context, seq)
        if left < 0 and seq != other:
            context.next[seq] = 0
            control.rm(seq)
        elif left != context.next[seq] - 1:
            raise UsageError(f"a refused state left tokens up to position {left} in sequence {seq}")
        yield Comparison(f"sequence {seq}", context.steps(seq), control.steps(seq))
