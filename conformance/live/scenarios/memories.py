"""Verbs of memories: what was removed, copied or moved, against contexts that never had it otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from gguf import GGUFReader

from conformance.ggml.errors import UsageError
from conformance.live.pairs import Pair

from .desk import PROMPT, Desk, RefusedError, Way, joined

NO_ROPE = -1
"""`LLAMA_ROPE_TYPE_NONE`."""
_COUPLED = "coupled sequences"
"""llama.cpp's words where a recurrent memory, by itself, takes no token for two sequences."""


def _alone(desk: Desk, name: str = "prompt", n: int = PROMPT) -> Way:
    way = desk.way()
    way.feed((0, desk.tokens(n, name)))
    return way


def _need_rotations(desk: Desk) -> None:
    """RefusedError where a text is another one at other positions, whatever llama.cpp does with the cells.

    starcoder has a type of RoPE and learnt positions, which are added to the embeddings.
    """
    learnt = any(t.name == "position_embd.weight" for t in GGUFReader(desk.request.model).tensors)
    if learnt or desk.call("model_rope_type")(desk.model) == NO_ROPE:
        raise RefusedError("its positions are not rotations: they do not move with the cells")


def cp(desk: Desk, *, unified: bool) -> Iterator[Pair]:
    """Sequence 1 gets what sequence 0 has, in place of its own; each goes on by itself."""
    way, calm = desk.way(2, unified=unified), _alone(desk)
    way.feed((0, desk.tokens(PROMPT)), (1, desk.tokens(5, "other")))
    way.rm(1)
    way.cp(0, 1)
    expected = calm.steps()
    yield Pair("the copy", way.steps(1), expected)
    yield Pair("the original", way.steps(0), expected)


def rm_tail(desk: Desk, n: int, gone: int) -> Iterator[Pair]:
    """The last tokens are removed, as drafts that were rejected."""
    text = desk.tokens(n)
    way, calm = desk.way(), desk.way()
    way.feed((0, text))
    way.feed((0, desk.tokens(3, "drafts")))
    way.rm(0, n - gone, may_refuse=way.kind in ("recurrent", "hybrid"))
    calm.feed((0, text[: n - gone]))
    yield Pair("after the removal", way.steps(), calm.steps())


def drafts(desk: Desk) -> Iterator[Pair]:
    """Three times four drafts in a batch, of which two are accepted, against tokens one by one."""
    way, calm = _alone(desk), _alone(desk)
    for i in range(3):
        text = desk.tokens(4, f"drafts {i}")
        fed = way.feed((0, text), every=True)
        single = joined(*(calm.feed((0, text[k : k + 1])) for k in range(2)))
        yield Pair(f"accepted in round {i}", fed[:2], single)
        way.rm(0, calm.next[0], may_refuse=way.kind in ("recurrent", "hybrid"))
    yield Pair("after the rounds", way.steps(), calm.steps())


def snapshots(desk: Desk) -> Iterator[Pair]:
    """Drafts are rejected where a context keeps snapshots of its recurrent states (`n_rs_seq`)."""
    more: dict[str, object] = {"n_rs_seq": 4}
    way, calm = desk.way(more=more), desk.way(more=more)
    text, new = desk.tokens(PROMPT), desk.tokens(4, "drafts")
    way.feed((0, text))
    calm.feed((0, text))
    way.feed((0, new), every=True)
    way.rm(0, PROMPT + 1, may_refuse=True)
    calm.feed((0, new[:1]))
    yield Pair("after rejected drafts", way.steps(), calm.steps())


def rm_all(desk: Desk, *, unified: bool | None = None) -> Iterator[Pair]:
    """All sequences are removed at once by the id -1; then others begin."""
    way = desk.way(2, unified=unified)
    way.feed((0, desk.tokens(PROMPT, "other")), (1, desk.tokens(5, "other")))
    way.rm(-1)
    way.feed((0, desk.tokens(PROMPT)), (1, desk.tokens(6)))
    yield Pair("sequence 0", way.steps(0), _alone(desk).steps())
    yield Pair("sequence 1", way.steps(1), _alone(desk, n=6).steps())


def rm_whole(desk: Desk, n: int) -> Iterator[Pair]:
    """A sequence is removed and its id begins anew; the other one goes on."""
    way = desk.way(2)
    way.feed((0, desk.tokens(n, "other")), (1, desk.tokens(PROMPT, "calm")))
    way.steps(0)
    way.rm(0)
    way.feed((0, desk.tokens(n // 2 + 1)))
    yield Pair("the sequence that began anew", way.steps(0), _alone(desk, n=n // 2 + 1).steps())
    yield Pair("the other sequence", way.steps(1), _alone(desk, "calm").steps())


def keep(desk: Desk, *, unified: bool) -> Iterator[Pair]:
    """Of three sequences one is kept; the id of another begins anew."""
    way = desk.way(3, unified=unified)
    way.feed((0, desk.tokens(9, "other")), (1, desk.tokens(PROMPT)), (2, desk.tokens(8, "other")))
    way.keep(1)
    left = [s for s in (0, 2) if desk.call("memory_seq_pos_max")(way.memory, s) >= 0]
    if left:
        raise UsageError(f"llama_memory_seq_keep(1) left tokens of sequence {left[0]}")
    way.feed((0, desk.tokens(6, "new")))
    yield Pair("the sequence that was kept", way.steps(1), _alone(desk).steps())
    yield Pair("the sequence that began anew", way.steps(0), _alone(desk, "new", 6).steps())


def add_back(desk: Desk) -> Iterator[Pair]:
    """Positions move up, another sequence decodes, and they move back."""
    way = desk.way(2, unified=True)
    way.feed((0, desk.tokens(PROMPT)), (1, desk.tokens(5, "other")))
    way.add(0, 7)
    way.steps(1)
    way.add(0, -7)
    yield Pair("after moving there and back", way.steps(0), _alone(desk).steps(), worth=desk.turned(2))


def add(desk: Desk) -> Iterator[Pair]:
    """A text whose positions are relative reads on the same after they moved."""
    _need_rotations(desk)
    way, calm = _alone(desk), _alone(desk)
    way.add(0, 7)
    yield Pair("after moving", way.steps(), calm.steps(), worth=desk.turned(1))


def shift(desk: Desk) -> Iterator[Pair]:
    """A context shift, the first tokens gone and the others moved to 0, against the same cells where they were."""
    _need_rotations(desk)
    way, calm = _alone(desk), _alone(desk)
    for each in (way, calm):
        each.rm(0, 0, 5, may_refuse=way.kind in ("recurrent", "hybrid"))
    way.add(0, -5, 5)
    yield Pair("after the shift", way.steps(), calm.steps(), worth=desk.turned(1))


def div(desk: Desk) -> Iterator[Pair]:
    """Positions divided by 2 are positions moved one by one."""
    way, calm = _alone(desk), _alone(desk)
    can_shift = desk.call("memory_can_shift")
    if not can_shift(way.memory):
        raise RefusedError("llama_memory_can_shift returned false")
    desk.call("memory_seq_div")(way.memory, 0, 0, -1, 2)
    for p in range(PROMPT):
        calm.add(0, p // 2 - p, p, p + 1)
    way.next[0] = calm.next[0] = (PROMPT - 1) // 2 + 1
    yield Pair("after the division", way.steps(), calm.steps())


def clear(desk: Desk, *, data: bool) -> Iterator[Pair]:
    """All is forgotten, and a text decodes as in a new context."""
    way = desk.way(2)
    way.feed((0, desk.tokens(PROMPT + 5, "other")), (1, desk.tokens(PROMPT, "other")))
    way.clear(data=data)
    way.feed((0, desk.tokens(PROMPT)), (1, desk.tokens(6)))
    yield Pair("sequence 0", way.steps(0), _alone(desk).steps())
    yield Pair("sequence 1", way.steps(1), _alone(desk, n=6).steps())


def coupled(desk: Desk) -> Iterator[Pair]:
    """Two sequences share the tokens of a prefix in the batch itself, then go their own ways."""
    way = desk.way(2, unified=True)
    try:
        way.feed(((0, 1), desk.tokens(PROMPT)))
    except UsageError:
        why = next((line for line in desk.library.log if _COUPLED in line), "")
        if way.kind == "recurrent" and why:
            raise RefusedError(why) from None
        raise
    fed = way.feed((0, desk.tokens(4, "a")), (1, desk.tokens(6, "b")))
    for seq, (name, n) in enumerate((("a", 4), ("b", 6))):
        calm = _alone(desk)
        yield Pair(f"sequence {seq}", fed[seq : seq + 1], calm.feed((0, desk.tokens(n, name))))
        yield Pair(f"sequence {seq}, later", way.steps(seq), calm.steps())
