"""Random programs of the constructors of recurrent, sparse and windowed ops, mostly legal, some a little off."""

from __future__ import annotations

from collections.abc import Callable

from build_program import Program

Draw = Callable[[Program, str], None]


def _off(p: Program, *ne: int, layouts: str = "cccccg", type_: str = "f32") -> int:
    """A tensor of about this shape: one in eight has one dimension that is off, wherever it stands."""
    full = [*ne, *(1,) * (4 - len(ne))]
    if not p.often(0.88):
        full[p.rng.randrange(4)] += p.rng.choice((1, 1, 2))
    return p.tensor(p.type(type_) if p.often() else p.rng.choice(("f16", "i32")), *full, layouts=layouts)


def _ssm_scan(p: Program, f: str) -> None:
    """Half of the programs are right; in the others one dimension of one tensor (of B and C at once) is off."""
    n, dim, heads, t, s = (p.rng.randint(1, 4) for _ in range(5))
    group = p.rng.choice([g for g in (1, 2, 3, 4) if heads % g == 0])
    ne = {
        "s": [n, dim, heads, s + 1],
        "x": [dim, heads, t, s],
        "dt": [heads, t, s, 1],
        "A": [p.rng.choice((1, n)), heads, 1, 1],
        "BC": [n, group, t, s],
        "ids": [s, 1, 1, 1],
    }
    if p.often(0.5):
        ne[p.rng.choice(tuple(ne))][p.rng.randrange(4)] += 1
    layouts = "c" if p.often(0.5) else "cccgp"
    state, x, dt, a = (p.tensor(p.type("f32"), *ne[name], layouts=layouts) for name in ("s", "x", "dt", "A"))
    b = p.tensor("f32", *ne["BC"], layouts=layouts)
    c = p.tensor("f32", *ne["BC"] if p.often(0.95) else ne["x"], layouts=layouts)
    ids = p.tensor(p.type("i32"), *ne["ids"], layouts="c")
    p(f, state, x, dt, a, b, c, ids, p.rng.choice((1, 1, 2, 3) if p.often() else (0, -1)))


def _heads(p: Program) -> tuple[int, int, int, int]:
    return p.rng.choice((2, 4)), p.dim(), p.rng.choice((2, 4)), p.rng.choice((1, 2))


def _wkv(p: Program, f: str) -> None:
    size, heads, tokens, seqs = _heads(p)
    n = {"rwkv_wkv6": 5, "rwkv_wkv7": 6, "gated_linear_attn": 4}[f]
    xs = [_off(p, size, heads, tokens) for _ in range(n)]
    if f == "rwkv_wkv6":
        xs[3] = _off(p, size, heads)
    state = _off(p, size * size * heads, seqs)
    p(f, *xs, state, *([0.125] if f == "gated_linear_attn" else []))


def _gated_delta_net(p: Program, f: str) -> None:
    size, heads, tokens, seqs = _heads(p)
    q, k, v = (_off(p, size, heads, tokens, seqs, layouts="ccgt") for _ in range(3))
    g = _off(p, p.rng.choice((1, size)), heads, tokens, seqs)
    beta = _off(p, p.rng.choice((1,) * 9 + (2,)), heads, tokens, seqs)
    p(f, q, k, v, g, beta, _off(p, size, size, heads, seqs), p.rng.choice((1, 1, 3) if p.often() else (0, -2)))


def _part(p: Program, f: str) -> None:
    type_ = p.rng.choice(("f32", "f32", "i32")) if f.startswith("set") else "f32"
    a = _off(p, 6, 5, 4, 2, type_=type_, layouts="ccccgp")
    b = _off(p, *(p.rng.choice((1, 3, n)) for n in p.shape(a)), type_=type_, layouts="ccgp")
    nb = p.made[a].nb
    rest = {"1": (), "2": nb[1:2]}.get(f[4:5], nb[1:]) if f.startswith("set_") and f[4] in "12" else nb[1:]
    offset = p.rng.choice((0, 4, 24, 2**30 - 1) if p.often() else (2**30, 2**31, 2**33))
    p(f, a, b, *rest, offset)


def _out_prod(p: Program, f: str) -> None:
    m, k, s2, s3 = p.dim(), p.dim(), p.dim(), p.dim()
    a = _off(p, m, k, s2, s3, layouts="cccgpt")
    p(f, a, _off(p, p.dim(), k, s2 * p.rng.randint(1, 2), s3 * p.rng.randint(1, 2), layouts="cgpt"))


def _tri(p: Program, f: str) -> None:
    n = p.dim()
    p(f, _off(p, n, n, p.dim(), p.dim(), layouts="cccgp"), p.rng.randint(0, 3))


def _diag(p: Program, f: str) -> None:
    p(f, _off(p, p.dim(), p.rng.choice((1, 1, 1, 2)), p.dim(), p.dim(), layouts="ccgp"))


def _solve_tri(p: Program, f: str) -> None:
    n, s2, s3 = p.dim(), p.dim(), p.dim()
    flags = (True, True, False) if p.often() else (p.often(0.5), p.often(0.5), p.often(0.5))
    p(f, _off(p, n, n, s2, s3), _off(p, p.dim(), n, s2, s3), *flags)


def _roll(p: Program, f: str) -> None:
    p(f, p.any(layouts="ccgp"), *(p.rng.choice((0, 0, 0, 1, -1)) for _ in range(4)))


def _pool_2d(p: Program, f: str) -> None:
    sizes = (p.rng.choice((1, 2, 3, 9)) for _ in range(2))
    p(f, _off(p, 6, 5, 2, 2), p.rng.randint(0, 1), *sizes, 1, 2, float(p.rng.randint(0, 1)), 0.0)


def _im2col(p: Program, f: str) -> None:
    is_2d, channels = p.often(0.5), p.rng.randint(1, 3)
    kernel = (p.rng.choice((1, 3, 9)), p.rng.choice((2, 9))) if is_2d else (p.rng.choice((3, 9)),)
    a = _off(p, *kernel, channels, 2, type_="f16")
    b = _off(p, 7, 6, channels, 2) if is_2d else _off(p, 7, channels, 2)
    p(f, a, b, 1, 2, 1, 0, p.rng.randint(1, 2), 1, is_2d, p.rng.choice(("f16", "f32")))


def _conv_2d_dw(p: Program, f: str) -> None:
    channels = p.rng.randint(1, 3)
    a = _off(p, p.rng.choice((1, 3)), p.rng.choice((1, 2)), 1 if p.often() else 2, channels)
    b = _off(p, 7, 6, channels, 2)
    p(f, a, b, 1, 2, p.rng.randint(0, 1), 1, p.rng.randint(1, 2), 1)


def _conv_1d(p: Program, f: str) -> None:
    channels = p.rng.randint(1, 3)
    a = p.tensor(p.rng.choice(("f16", "bf16", "f32")), 3, 1 if "dw" in f else channels, 4, layouts="c")
    b = p.tensor("f32", 7, channels, layouts="c") if "dw" in f else p.tensor("f32", 7, channels, 2, layouts="c")
    p(f, a, b, 1, 1, *([] if f.endswith("ph") else [1]))


def _lightning_indexer(p: Program, f: str) -> None:
    n, heads, tokens, streams, n_kv = 4, p.dim(), p.dim(), p.rng.choice((2, 4)), p.dim()
    q = _off(p, n, heads, tokens, streams)
    k = _off(p, n, 1, n_kv, streams, type_="f16", layouts="ccg")
    weights = _off(p, heads, tokens, 1, streams)
    p(f, q, k, weights, _off(p, n_kv, tokens, 1, p.rng.choice((1, 2, streams)), type_="f16"))


def _hc_comb(p: Program, f: str) -> None:
    mixes = _off(p, p.rng.choice((24, 24, 24, 24, 8, 3)), p.dim(), layouts="ccgp")
    base = _off(p, p.shape(mixes)[0])
    scale = _off(p, 3) if p.often() else p.tensor("f32", p.rng.choice((1, 2)))
    p(f, mixes, scale, base, 1e-6, p.rng.choice((1, 20)) if p.often() else 0)


def _hc_pre(p: Program, f: str) -> None:
    n, hc, tokens = p.dim(), p.rng.randint(1, 4) if p.often() else 0, p.dim()
    x = _off(p, n, hc, tokens, layouts="ccgp")
    if f.endswith("gated"):
        p(f, x, _off(p, n, hc, tokens, layouts="ccgp"), 0.5)
    else:
        p(f, x, _off(p, hc, tokens, layouts="ccgp"))


def _hc_post(p: Program, f: str) -> None:
    n, hc, tokens = p.dim(), p.rng.randint(1, 4) if p.often() else 0, p.dim()
    comb = _off(p, hc, hc, tokens, layouts="ccgp") if p.often(0.7) else None
    p(f, _off(p, n, tokens), _off(p, n, hc, tokens, layouts="ccgp"), _off(p, hc, tokens), comb)


EXACT: dict[str, Draw] = {"set": _part, "diag": _diag, "tri": _tri}
"""Constructors whose names begin others too."""

GENERATORS: tuple[tuple[str, Draw], ...] = (
    ("ssm_scan", _ssm_scan), ("rwkv", _wkv), ("gated_linear", _wkv), ("gated_delta", _gated_delta_net),
    ("set_1d", _part), ("set_2d", _part), ("set_inplace", _part), ("acc", _part), ("out_prod", _out_prod),
    ("solve_tri", _solve_tri), ("roll", _roll),
    ("pool_2d", _pool_2d), ("im2col", _im2col), ("conv_1d", _conv_1d), ("conv_2d_dw", _conv_2d_dw),
    ("lightning", _lightning_indexer),
    ("dsv4_hc_comb", _hc_comb), ("dsv4_hc_pre", _hc_pre), ("dsv4_hc_post", _hc_post),
)  # fmt: skip
"""Beginning of a constructor's name -> what draws a program that ends with it."""

MORE = {
    "ssm_scan": 20,
    "rwkv_wkv6": 8,
    "rwkv_wkv7": 8,
    "gated_linear_attn": 6,
    "gated_delta_net": 16,
    "solve_tri": 6,
    "lightning_indexer": 14,
    "dsv4_hc_comb": 14,
    "dsv4_hc_pre": 6,
    "dsv4_hc_pre_gated": 6,
    "dsv4_hc_post": 16,
    "im2col": 4,
    "acc": 4,
}
"""Constructors with many assertions get so many times more."""
