"""API scenarios for memory: sequences removed, copied or moved."""

from __future__ import annotations

from collections.abc import Iterator

from gguf import GGUFReader

from conformance.ggml.errors import UsageError
from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import RefusedError

from .harness import PROMPT, Context, Harness, joined

NO_ROPE = -1
"""`LLAMA_ROPE_TYPE_NONE`."""
_COUPLED = "coupled sequences"
"""llama.cpp's message if a purely recurrent memory takes no token for two sequences."""


def _alone(harness: Harness, name: str = "prompt", n: int = PROMPT) -> Context:
    context = harness.context()
    context.feed((0, harness.tokens(n, name)))
    return context


def need_rotations(harness: Harness) -> None:
    """Raise RefusedError if a model depends on absolute positions, which shifts do not change.

    starcoder has a RoPE type and learnt positions, which are added to the embeddings.
    """
    learnt = any(t.name == "position_embd.weight" for t in GGUFReader(harness.request.model).tensors)
    if learnt or harness.call("model_rope_type")(harness.model) == NO_ROPE:
        raise RefusedError("its positions are not rotations: they do not move with the cells")


def cp(harness: Harness, *, unified: bool) -> Iterator[Comparison]:
    """Copy sequence 0 over sequence 1; each continues independently."""
    context, control = harness.context(2, unified=unified), _alone(harness)
    context.feed((0, harness.tokens(PROMPT)), (1, harness.tokens(5, "other")))
    context.rm(1)
    context.cp(0, 1)
    expected = control.steps()
    yield Comparison("the copy", context.steps(1), expected)
    yield Comparison("the original", context.steps(0), expected)


def rm_tail(harness: Harness, n: int, gone: int) -> Iterator[Comparison]:
    """Remove the last tokens, like rejected drafts."""
    text = harness.tokens(n)
    context, control = harness.context(), harness.context()
    context.feed((0, text))
    context.feed((0, harness.tokens(3, "drafts")))
    context.rm(0, n - gone, may_refuse=context.kind in ("recurrent", "hybrid"))
    control.feed((0, text[: n - gone]))
    yield Comparison("after the removal", context.steps(), control.steps())


def drafts(harness: Harness) -> Iterator[Comparison]:
    """Decode four drafts in a batch and accept two, three times, compared with single tokens."""
    context, control = _alone(harness), _alone(harness)
    for i in range(3):
        text = harness.tokens(4, f"drafts {i}")
        fed = context.feed((0, text), every=True)
        single = joined(*(control.feed((0, text[k : k + 1])) for k in range(2)))
        yield Comparison(f"accepted in round {i}", fed[:2], single)
        context.rm(0, control.next[0], may_refuse=context.kind in ("recurrent", "hybrid"))
    yield Comparison("after the rounds", context.steps(), control.steps())


def snapshots(harness: Harness) -> Iterator[Comparison]:
    """Reject drafts in a context with snapshots of its recurrent states (`n_rs_seq`)."""
    more: dict[str, object] = {"n_rs_seq": 4}
    context, control = harness.context(more=more), harness.context(more=more)
    text, new = harness.tokens(PROMPT), harness.tokens(4, "drafts")
    context.feed((0, text))
    control.feed((0, text))
    context.feed((0, new), every=True)
    context.rm(0, PROMPT + 1, may_refuse=True)
    control.feed((0, new[:1]))
    yield Comparison("after rejected drafts", context.steps(), control.steps())


def rm_all(harness: Harness, *, unified: bool | None = None) -> Iterator[Comparison]:
    """Remove all sequences with the id -1, then decode others."""
    context = harness.context(2, unified=unified)
    context.feed((0, harness.tokens(PROMPT, "other")), (1, harness.tokens(5, "other")))
    context.rm(-1)
    context.feed((0, harness.tokens(PROMPT)), (1, harness.tokens(6)))
    yield Comparison("sequence 0", context.steps(0), _alone(harness).steps())
    yield Comparison("sequence 1", context.steps(1), _alone(harness, n=6).steps())


def rm_whole(harness: Harness, n: int) -> Iterator[Comparison]:
    """Remove a sequence and reuse its id; the other sequence continues."""
    context = harness.context(2)
    context.feed((0, harness.tokens(n, "other")), (1, harness.tokens(PROMPT, "calm")))
    context.steps(0)
    context.rm(0)
    context.feed((0, harness.tokens(n // 2 + 1)))
    yield Comparison("the restarted sequence", context.steps(0), _alone(harness, n=n // 2 + 1).steps())
    yield Comparison("the other sequence", context.steps(1), _alone(harness, "calm").steps())


def keep(harness: Harness, *, unified: bool) -> Iterator[Comparison]:
    """Keep one of three sequences, and reuse the id of another."""
    context = harness.context(3, unified=unified)
    context.feed((0, harness.tokens(9, "other")), (1, harness.tokens(PROMPT)), (2, harness.tokens(8, "other")))
    context.keep(1)
    left = [s for s in (0, 2) if harness.call("memory_seq_pos_max")(context.memory, s) >= 0]
    if left:
        raise UsageError(f"llama_memory_seq_keep(1) left tokens of sequence {left[0]}")
    context.feed((0, harness.tokens(6, "new")))
    yield Comparison("the sequence that was kept", context.steps(1), _alone(harness).steps())
    yield Comparison("the restarted sequence", context.steps(0), _alone(harness, "new", 6).steps())


def add_back(harness: Harness) -> Iterator[Comparison]:
    """Shift positions up, decode another sequence, and shift them back."""
    context = harness.context(2, unified=True)
    context.feed((0, harness.tokens(PROMPT)), (1, harness.tokens(5, "other")))
    context.add(0, 7)
    context.steps(1)
    context.add(0, -7)
    yield Comparison(
        "after moving there and back", context.steps(0), _alone(harness).steps(), allowance=harness.turned(2)
    )


def add(harness: Harness) -> Iterator[Comparison]:
    """Shift all positions of a text; with relative positions this must not change results."""
    need_rotations(harness)
    context, control = _alone(harness), _alone(harness)
    context.add(0, 7)
    yield Comparison("after moving", context.steps(), control.steps(), allowance=harness.turned(1))


def shift(harness: Harness) -> Iterator[Comparison]:
    """Remove the first tokens and shift the others to 0, compared with the same cells unshifted."""
    need_rotations(harness)
    context, control = _alone(harness), _alone(harness)
    for each in (context, control):
        each.rm(0, 0, 5, may_refuse=context.kind in ("recurrent", "hybrid"))
    context.add(0, -5, 5)
    yield Comparison("after the shift", context.steps(), control.steps(), allowance=harness.turned(1))


def div(harness: Harness) -> Iterator[Comparison]:
    """Compare positions divided by 2 with positions shifted one by one."""
    context, control = _alone(harness), _alone(harness)
    can_shift = harness.call("memory_can_shift")
    if not can_shift(context.memory):
        raise RefusedError("llama_memory_can_shift returned false")
    harness.call("memory_seq_div")(context.memory, 0, 0, -1, 2)
    for p in range(PROMPT):
        control.add(0, p // 2 - p, p, p + 1)
    context.next[0] = control.next[0] = (PROMPT - 1) // 2 + 1
    yield Comparison("after the division", context.steps(), control.steps())


def clear(harness: Harness, *, data: bool) -> Iterator[Comparison]:
    """Clear the memory and decode as in a new context."""
    context = harness.context(2)
    context.feed((0, harness.tokens(PROMPT + 5, "other")), (1, harness.tokens(PROMPT, "other")))
    context.clear(data=data)
    context.feed((0, harness.tokens(PROMPT)), (1, harness.tokens(6)))
    yield Comparison("sequence 0", context.steps(0), _alone(harness).steps())
    yield Comparison("sequence 1", context.steps(1), _alone(harness, n=6).steps())


def coupled(harness: Harness) -> Iterator[Comparison]:
    """Share a prefix between two sequences in the batch itself, then continue them separately."""
    context = harness.context(2, unified=True)
    try:
        context.feed(((0, 1), harness.tokens(PROMPT)))
    except UsageError:
        why = next((line for line in harness.library.log.lines if _COUPLED in line), "")
        if context.kind == "recurrent" and why:
            raise RefusedError(why) from None
        raise
    fed = context.feed((0, harness.tokens(4, "a")), (1, harness.tokens(6, "b")))
    for seq, (name, n) in enumerate((("a", 4), ("b", 6))):
        control = _alone(harness)
        yield Comparison(f"sequence {seq}", fed[seq : seq + 1], control.feed((0, harness.tokens(n, name))))
        yield Comparison(f"sequence {seq}, later", context.steps(seq), control.steps())
