"""Random programs of the constructors of vision, audio and diffusion ops, mostly legal, some a little off."""

from __future__ import annotations

from build_program import Program
from build_programs_recurrent import Draw, _off


def _slides(p: Program, axes: int) -> list[int]:
    """Strides, paddings and dilations."""
    return [
        *(p.rng.randint(1, 3) for _ in range(axes)),
        *(p.rng.randint(0, 2) for _ in range(axes)),
        *(p.rng.randint(1, 2) for _ in range(axes)),
    ]


def _conv_2d(p: Program, f: str) -> None:
    channels = p.rng.randint(1, 3)
    a = _off(p, p.rng.choice((1, 3)), p.rng.choice((1, 2)), channels, 3, type_=p.rng.choice(("f16", "f32")))
    p(f, a, _off(p, 7, 6, channels, 2, layouts="cccgp"), *_slides(p, 2))


def _conv_3d(p: Program, f: str) -> None:
    c, n, oc = (p.rng.randint(1, 3) for _ in range(3))
    a = _off(p, p.rng.choice((1, 3)), p.rng.choice((1, 2)), 2, c * oc, type_=p.rng.choice(("f16", "f32")))
    p(f, a, _off(p, 7, 6, 5, c * n, layouts="cccgp"), *_slides(p, 3), c, n, oc)


def _im2col_3d(p: Program, f: str) -> None:
    c = p.rng.randint(1, 3)
    a = _off(p, p.rng.choice((1, 3)), p.rng.choice((1, 2)), p.rng.choice((1, 2, 9)), c * 2)
    p(f, a, _off(p, 7, 6, 5, c * 2, layouts="cccgp"), c, *_slides(p, 3), p.rng.choice(("f16", "f32")))


def _conv_transpose_1d(p: Program, f: str) -> None:
    channels = p.rng.randint(1, 3)
    a = _off(p, p.rng.choice((1, 3)), p.dim(), channels, type_=p.rng.choice(("f16", "f32")))
    p(f, a, _off(p, p.dim(), channels), p.rng.randint(1, 3), *((0, 1) if p.often(0.9) else (1, 2)))


def _conv_transpose_2d(p: Program, f: str) -> None:
    channels = p.rng.randint(1, 3)
    a = _off(p, p.rng.choice((1, 3)), p.rng.choice((1, 2)), p.dim(), channels, type_=p.rng.choice(("f16", "f32")))
    p(f, a, _off(p, p.dim(), p.dim(), channels, 2), p.rng.randint(1, 3))


def _col2im_1d(p: Program, f: str) -> None:
    oc = p.rng.randint(1, 3)
    type_ = p.rng.choice(("f16", "f32", "bf16"))
    a = _off(p, oc * p.dim(), p.dim(), layouts="cccccg", type_=type_)
    p(f, a, p.rng.randint(1, 3) if p.often() else 0, oc if p.often() else 0, p.rng.choice((0, 0, 1, 3)))


def _interpolate(p: Program, f: str) -> None:
    a = _off(p, 6, 5, 2, 2, layouts="ccgp")
    mode = p.rng.choice((0, 1, 2, 256, 257, 258, 513)) if p.often() else p.rng.choice((3, 512, 514))
    if f == "upscale":
        p(f, a, p.rng.randint(1, 3), mode)
    else:
        p(f, a, *(p.rng.randint(1, 9) for _ in range(4)), mode)


def _win_part(p: Program, f: str) -> None:
    a = _off(p, p.dim(), 7, 5, type_="f32")
    p(f, a, p.rng.randint(1, 8))


def _win_unpart(p: Program, f: str) -> None:
    w = p.rng.randint(1, 3)
    p(f, _off(p, p.dim(), w, w, -(-7 // w) * -(-5 // w)), 7, 5, w)


def _get_rel_pos(p: Program, f: str) -> None:
    n = p.dim()
    p(f, _off(p, p.dim(), 2 * n - 1, type_="f16"), n, n if p.often() else n + 1)


def _add_rel_pos(p: Program, f: str) -> None:
    n, w, h, heads = (p.dim() for _ in range(4))
    p(f, _off(p, n * n, w * h, heads, layouts="cccg"), *(_off(p, n, w, h, heads, layouts="cccg") for _ in range(2)))


def _pool_1d(p: Program, f: str) -> None:
    sizes = p.rng.choice((1, 2, 3, 9)), p.rng.randint(1, 3), p.rng.randint(0, 2)
    p(f, _off(p, 6, 5, 2, 2, layouts="ccgp"), p.rng.randint(0, 1), *sizes)


def _pad_reflect_1d(p: Program, f: str) -> None:
    p(f, _off(p, 6, 5, 2), *(p.rng.randint(0, 5) if p.often() else p.rng.choice((-1, 6)) for _ in range(2)))


def _timestep_embedding(p: Program, f: str) -> None:
    p(f, _off(p, p.dim()), p.rng.randint(2, 9), p.rng.choice((100, 10000)))


GENERATORS: tuple[tuple[str, Draw], ...] = (
    ("conv_2d_direct", _conv_2d), ("conv_3d", _conv_3d), ("im2col_3d", _im2col_3d),
    ("conv_transpose_1d", _conv_transpose_1d), ("conv_transpose_2d", _conv_transpose_2d), ("col2im_1d", _col2im_1d),
    ("interpolate", _interpolate), ("upscale", _interpolate), ("win_part", _win_part), ("win_unpart", _win_unpart),
    ("get_rel_pos", _get_rel_pos), ("add_rel_pos", _add_rel_pos), ("pool_1d", _pool_1d),
    ("pad_reflect_1d", _pad_reflect_1d), ("timestep_embedding", _timestep_embedding),
)  # fmt: skip
"""Beginning of a constructor's name -> what draws a program that ends with it."""

MORE = {"conv_3d_direct": 3, "conv_2d_direct": 3, "add_rel_pos": 4, "col2im_1d": 3, "conv_transpose_1d": 3}
"""Constructors with many assertions get so many times more."""
