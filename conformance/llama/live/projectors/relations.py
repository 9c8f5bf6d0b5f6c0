"""Runs of a projector: media, compared with the CPU, and relations of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import numpy as np

from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import RefusedError

from .encoder import F32, Encoder, Medium
from .table import Modality

_BOTH: tuple[Modality, ...] = get_args(Modality)
_VISION: tuple[Modality, ...] = ("vision",)


def _same(what: str, found: list[F32], expected: list[F32], *, exact: bool = False) -> Iterator[Comparison]:
    """Yield a comparison per chunk, or one that fails if the numbers of chunks differ."""
    if len(found) != len(expected):
        actual, wanted = (np.ones((len(context), 1), np.float32) for context in (found, expected))
        yield Comparison(f"{what}: the same number of chunks", actual, wanted)
        return
    for i, (rows, others) in enumerate(zip(found, expected, strict=True)):
        yield Comparison(f"{what}, chunk {i} of {len(found)}", rows, others, exact=exact)


def _differ(what: str, rows: F32, others: F32) -> Iterator[Comparison]:
    """Yield two results that must differ, if their shapes are equal."""
    if rows.shape == others.shape:
        yield Comparison(what, rows, others, differs=True)


def twice(e: Encoder) -> Iterator[Comparison]:
    """Encode a chunk again, after another one, and in a new context."""
    context = e.context()
    chunks, other = e.chunks(context, e.medium("odd")), e.chunks(context, e.medium("large"))
    first = [e.encode(context, c) for c in chunks]
    between = e.encode(context, other[0])
    yield from _same("again", [e.encode(context, c) for c in chunks], first, exact=True)
    yield from _same("in a new context", e.look(e.context(), e.medium("odd")), first, exact=True)
    yield from _differ("another medium", between, first[0])


def in_turn(e: Encoder) -> Iterator[Comparison]:
    """Encode media of all sizes in turn, as graphs grow and shrink; compare with each alone."""
    context = e.context()
    order: tuple[Medium, ...] = ("thin", "large", "whole", "odd", "large")
    for name in order:
        yield from _same(name, e.look(context, e.medium(name)), e.look(e.context(), e.medium(name)), exact=True)


def prompt(e: Encoder) -> Iterator[Comparison]:
    """Encode two media in one prompt, and compare with each alone."""
    media = e.medium("odd"), e.medium("whole")
    alone = [e.look(e.context(), medium) for medium in media]
    yield from _same("both", e.look(e.context(), *media), alone[0] + alone[1], exact=True)
    yield from _differ("the two", alone[0][0], alone[1][0])


def reversed_(e: Encoder) -> Iterator[Comparison]:
    """Encode the chunks of one medium in reverse order."""
    context = e.context()
    chunks = e.chunks(context, e.medium("large"))
    if len(chunks) < 2:
        raise RefusedError("a large image or sound is not divided")
    forth = [e.encode(context, c) for c in chunks]
    back = [e.encode(context, c) for c in reversed(chunks)][::-1]
    yield from _same("the last first", back, forth, exact=True)
    for before, after in pairwise(forth):
        yield from _differ("two chunks", before, after)


def batch(e: Encoder) -> Iterator[Comparison]:
    """Encode media of one size in a batch, and compare with each alone."""
    context = e.context()
    chunks = [e.chunks(context, e.medium("odd", version))[0] for version in "abc"]
    alone = [e.encode(context, c) for c in chunks]
    yield from _same("in a batch", e.batch(context, chunks), alone)
    yield from _differ("two of them", alone[0], alone[1])


def tiles(e: Encoder) -> Iterator[Comparison]:
    """Encode the tiles of a large image in a batch, and compare with each alone."""
    context = e.context()
    chunks = e.chunks(context, e.medium("large"))
    if len(chunks) < 3:
        raise RefusedError("a large image or sound is not divided")
    chunks = chunks[:-1] if e.encode(context, chunks[0]).shape != e.encode(context, chunks[-1]).shape else chunks
    alone = [e.encode(context, c) for c in chunks]
    yield from _same("in a batch", e.batch(context, chunks), alone)


def frames(e: Encoder) -> Iterator[Comparison]:
    """Check that two equal frames are merged into one image, and two different ones are not."""
    context = e.context()
    image, other = e.medium("odd"), e.medium("odd", "other")
    e.mergeable(image, other)
    merged = e.chunks(context, image, image, between="")
    if len(merged) > 1:
        raise RefusedError("this projector does not merge frames")
    alone = e.look(context, image)
    yield from _same("two equal frames", [e.encode(context, merged[0])], alone)
    film = e.chunks(context, image, other, between="")
    yield Comparison("another second frame", e.encode(context, film[0]), alone[0], differs=True)


def without_flash(e: Encoder) -> Iterator[Comparison]:
    """Compare with and without flash attention."""
    plain, fused = e.context(flash_attn=False), e.context()
    sizes: tuple[Medium, ...] = ("odd", "large")
    for name in sizes:
        yield from _same(name, e.look(fused, e.medium(name)), e.look(plain, e.medium(name)))


def threads(e: Encoder) -> Iterator[Comparison]:
    """Compare 3 threads with one."""
    many, one = e.context(n_threads=3), e.context()
    yield from _same("odd", e.look(many, e.medium("odd")), e.look(one, e.medium("odd")))


@dataclass(frozen=True, slots=True)
class Relation:
    """Two runs that must give the same embeddings."""

    name: str
    does: str
    """Description."""
    play: Callable[[Encoder], Iterator[Comparison]]
    modalities: tuple[Modality, ...] = _BOTH


MEDIA: dict[str, Medium] = {f"media-{name}": name for name in get_args(Medium)}
"""Run name -> encoded medium."""
RELATIONS = {
    r.name: r
    for r in (
        Relation("media-twice", "a chunk is encoded again after another one, and in a new context", twice),
        Relation("media-turn", "media of all sizes one after the other, and each alone", in_turn),
        Relation("media-prompt", "2 media in one prompt, and each alone", prompt),
        Relation("media-batch", "3 media in a batch, and each alone", batch, _VISION),
        Relation("tiles-batch", "the tiles of an image in a batch, and each alone", tiles, _VISION),
        Relation("tiles-back", "the tiles of an image, or the pieces of a sound, in reverse order", reversed_),
        Relation("frames", "2 equal frames become one image, if frames are merged", frames, _VISION),
        Relation("media-flash-attn", "without flash attention", without_flash),
        Relation("media-threads", "with 3 threads", threads),
    )
}
"""Name -> relation."""
