"""Random programs of the constructors of vision, audio, diffusion and training ops, mostly legal, some a little off."""

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
    p(
        f,
        a,
        _off(p, p.dim(), channels),
        p.rng.randint(1, 3),
        *p.rng.choice(((0, 1), (0, 1), (0, 1), (0, 1), (1, 1), (0, 2))),
    )


def _conv_transpose_2d(p: Program, f: str) -> None:
    channels = p.rng.randint(1, 3)
    a = _off(p, p.rng.choice((1, 3)), p.rng.choice((1, 2)), p.dim(), channels, type_=p.rng.choice(("f16", "f32")))
    p(f, a, _off(p, p.dim(), p.dim(), channels, 2), p.rng.randint(1, 3))


def _col2im_1d(p: Program, f: str) -> None:
    oc = p.rng.randint(1, 3)
    type_ = p.rng.choice(("f16", "f32", "bf16"))
    a = _off(p, oc * p.dim() + (not p.often(0.8)), p.dim(), layouts="cccccg", type_=type_)
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
    if not p.often(0.9):
        more = p.rng.randint(0, 1)
        a = p.tensor("f32", n * n + more, w * h, heads + 1 - more, layouts="c")
        p(f, a, *(p.tensor("f32", n, w, h, heads, layouts="c") for _ in range(2)))
    p(f, _off(p, n * n, w * h, heads, layouts="cccg"), *(_off(p, n, w, h, heads, layouts="cccg") for _ in range(2)))


def _pool_1d(p: Program, f: str) -> None:
    sizes = p.rng.choice((1, 2, 3, 9)), p.rng.randint(1, 3), p.rng.randint(0, 2)
    p(f, _off(p, 6, 5, 2, 2, layouts="ccgp"), p.rng.randint(0, 1), *sizes)


def _pad_reflect_1d(p: Program, f: str) -> None:
    p(f, _off(p, 6, 5, 2), *(p.rng.randint(0, 5) if p.often() else p.rng.choice((-1, 6)) for _ in range(2)))


def _timestep_embedding(p: Program, f: str) -> None:
    p(f, _off(p, p.dim()), p.rng.randint(2, 9), p.rng.choice((100, 10000)))


def _repeat_back(p: Program, f: str) -> None:
    n = [p.rng.randint(1, 3) for _ in range(4)]
    p(f, _off(p, *(k * p.rng.randint(1, 2) for k in n), layouts="ccgp"), _off(p, *n))


def _get_rows_back(p: Program, f: str) -> None:
    n, r = p.dim(), p.dim()
    p(f, _off(p, n, r, layouts="ccg"), _off(p, r, type_="i32"), _off(p, n, p.dim()))


def _alike(p: Program, f: str) -> None:
    """Two tensors of one shape, and what the op has beside them."""
    ne = [p.dim() for _ in range(4)]
    last = {"rms_norm_back": [0.5], "soft_max_ext_back": [0.5, 0.0], "pool_2d_back": [1, 1, 1, 1, 1, 0.0, 0.0]}
    a, b = (_off(p, *ne, layouts="cccg") for _ in range(2))
    p(f, a, b, *last.get(f.removesuffix("_inplace"), []))


def _im2col_back(p: Program, f: str) -> None:
    channels, is_2d = p.rng.randint(1, 3), p.often()
    b = _off(p, 3, 2 if is_2d else channels, *((channels,) if is_2d else ()), type_=p.rng.choice(("f16", "f32")))
    ne = [7, 6, channels, 2] if is_2d else [7, channels, 2, 1]
    p(f, _off(p, 3 * channels * (2 if is_2d else 1), 5, 5, 2), b, ne, *_slides(p, 2), is_2d)


def _loss_back(p: Program, f: str) -> None:
    ne = [p.dim() for _ in range(4)]
    p(f, _off(p, 1), *(_off(p, *ne) for _ in range(2)))


def _opt_step(p: Program, f: str) -> None:
    ne = [p.dim() for _ in range(4)]
    a = _off(p, *ne)
    if p.often(0.9):
        p("set_param", a)
    n = 3 if f.endswith("adamw") else 1
    p(f, a, *(_off(p, *ne) for _ in range(n)), _off(p, 7 if n > 1 else 2))


GENERATORS: tuple[tuple[str, Draw], ...] = (
    ("conv_2d_direct", _conv_2d), ("conv_3d", _conv_3d), ("im2col_3d", _im2col_3d),
    ("conv_transpose_1d", _conv_transpose_1d), ("conv_transpose_2d", _conv_transpose_2d), ("col2im_1d", _col2im_1d),
    ("interpolate", _interpolate), ("upscale", _interpolate), ("win_part", _win_part), ("win_unpart", _win_unpart),
    ("get_rel_pos", _get_rel_pos), ("add_rel_pos", _add_rel_pos), ("pool_1d", _pool_1d),
    ("pad_reflect_1d", _pad_reflect_1d), ("timestep_embedding", _timestep_embedding),
    ("im2col_back", _im2col_back), ("repeat_back", _repeat_back), ("get_rows_back", _get_rows_back),
    ("silu_back", _alike), ("rms_norm_back", _alike),
    ("soft_max_ext_back", _alike), ("pool_2d_back", _alike), ("count_equal", _alike),
    ("cross_entropy_loss_back", _loss_back), ("cross_entropy_loss", _alike), ("opt_step", _opt_step),
)  # fmt: skip
"""Beginning of a constructor's name -> what draws a program that ends with it."""

MORE = {
    "conv_3d_direct": 3,
    "conv_2d_direct": 3,
    "add_rel_pos": 4,
    "col2im_1d": 3,
    "conv_transpose_1d": 3,
    "opt_step_adamw": 6,
    "opt_step_sgd": 2,
    "pad_reflect_1d": 4,
    "get_rel_pos": 8,
    "pool_1d": 2,
}
"""Constructors with many assertions get so many times more."""
