"""Random programs of constructor calls, mostly legal, some a little off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache

import build_programs_media as media
import build_programs_recurrent as recurrent
from build_program import FLOATS, USED, Program, RefusedError
from ggml_ctypes import Json, run_programs

from conformance.ggml.lib.constructors import CONSTRUCTORS
from conformance.ggml.ops.matmul import PREC
from conformance.ggml.ops.rope import ROPE_TYPE


def _map(p: Program, f: str) -> None:
    p(f, p.any(layouts="ccgptgg"), *p.params(CONSTRUCTORS[f][1:]))


def _leaf(p: Program, f: str) -> None:
    type_ = p.type(*USED)
    ne = p.ne(type_)[: int(f[-2])]
    if p.often(0.95):
        p(f, type_, *ne)
    else:
        p(f, type_, *(p.rng.choice((1, 2**31, 2**40, 2**50, -1)) * n for n in ne))


def _divisor(p: Program, n: int) -> int:
    return p.near(p.rng.choice([d for d in range(1, n + 1) if n % d == 0] or [0]))


def _binary(p: Program, f: str) -> None:
    a = p.any()
    ne = p.shape(a)
    if f.startswith("add1") or p.often(0.1):
        ne = (1, 1, 1, 1)
    type_ = p.rng.choice(("f32", "f16", "bf16", "i32"))
    p(f, a, p.tensor(type_, *(_divisor(p, n) for n in ne)), *p.params(CONSTRUCTORS[f][2:]))


def _add_id(p: Program, f: str) -> None:
    a = p.tensor("f32", p.dim(), p.dim(), p.dim())
    n, r, t, _ = p.shape(a)
    p(f, a, p.tensor("f32", p.near(n), p.dim()), p.tensor(p.type("i32"), p.near(r), p.near(t)))


def _split(p: Program, f: str) -> None:
    type_ = p.rng.choice(("f32", "f16"))
    ne = p.ne(type_)
    a = p.tensor(type_, *ne, layouts="cccgp")
    b = p.tensor(p.type(type_), *(p.near(n) for n in ne), layouts="cccgp")
    p(
        f,
        a,
        None if f.startswith("swiglu_") and p.often(0.2) and f != "swiglu_split" else b,
        *p.params(CONSTRUCTORS[f][2:]),
    )


def _arange(p: Program, f: str) -> None:
    start = p.rng.choice((0.0, 1.5, -3.0))
    p(f, start, start + p.rng.choice((1.0, 7.3, 0.1, -1.0)), p.rng.choice((1.0, 0.1, 0.3, 3.0)))


def _repeat(p: Program, f: str) -> None:
    a = p.any()
    ne = tuple(p.near(n * p.rng.randint(1, 3)) for n in p.shape(a))
    if f == "repeat":
        p(f, a, p.tensor("f32", *ne))
    else:
        p(f, a, *ne)


def _concat(p: Program, f: str) -> None:
    type_ = p.type(*USED)
    ne = p.ne(type_)
    dim = p.rng.choice((0, 1, 2, 3, 3, 0, 4, -1) if p.often(0.2) else (0, 1, 2, 3))
    other = [n if d == dim else p.near(n) for d, n in enumerate(ne)]
    if 0 < dim < 4:
        other[dim] = p.dim()
    p(f, p.tensor(type_, *ne), p.tensor(type_ if p.often(0.97) else "i8", *other), dim)


def _pad(p: Program, f: str) -> None:
    p(f, p.any(), *p.params(CONSTRUCTORS[f][1:]))


def _reshuffled(p: Program, i: int, n_dims: int) -> list[int]:
    """`n_dims` sizes of as many elements as tensor `i` has."""
    total, blck = 1, p.made[i].type.blck_size
    for n in p.shape(i):
        total *= n
    left, ne = total // blck, []
    for _ in range(n_dims - 1):
        d = p.rng.choice([d for d in range(1, max(left, 1) + 1) if left % d == 0][:8])
        ne.append(d)
        left //= d
    ne = [left * blck, *ne]
    return [*(p.near(n) for n in ne)]


def _reshape(p: Program, f: str) -> None:
    a = p.any(layouts="cccccgp")
    if f == "reshape":
        p(f, a, p.tensor("f32", *_reshuffled(p, a, 4)))
    else:
        p(f, a, *_reshuffled(p, a, int(f[-2])))


def _view(p: Program, f: str) -> None:
    a = p.any()
    t, n = p.made[a], int(f[-2])
    ne = [p.near(max(x - p.rng.randint(0, 1) * (t.type.blck_size if i == 0 else 1), 0)) for i, x in enumerate(t.ne[:n])]
    if p.often(0.1):
        ne[-1] += 3
    nb = [x * p.rng.choice((1, 1, 1, 2)) for x in t.nb[1:n]]
    p(f, a, *ne, *nb, t.type.type_size * p.rng.choice((0, 0, 1, 2, 40)))


def _permute(p: Program, f: str) -> None:
    axes = list(range(4))
    p.rng.shuffle(axes)
    p(f, p.any(), *(x if p.often(0.93) else p.rng.choice((-1, 0, 1, 2, 3, 4)) for x in axes))


def _cpy(p: Program, f: str) -> None:
    a = p.any()
    ne = _reshuffled(p, a, 4)
    p(f, a, p.tensor(p.made[a].type.name if p.often(0.4) else "f32", *ne))


def _get_rows(p: Program, f: str) -> None:
    a = p.any()
    _, _, s2, s3 = p.shape(a)
    p(f, a, p.tensor(p.type("i32"), p.dim(), p.near(s2), p.near(s3), p.near(1)))


def _set_rows(p: Program, f: str) -> None:
    a = p.any(layouts="cccgpt")
    m, _, s2, s3 = p.shape(a)
    b = p.tensor(p.type("f32", "f16"), p.near(m), p.dim(), p.near(s2), p.near(s3), layouts="ccgpt")
    ne = (p.near(p.shape(b)[1]), _divisor(p, p.shape(b)[2]), _divisor(p, p.shape(b)[3]), p.near(1))
    p(f, a, b, p.tensor(p.type("i64", "i32"), *ne))


def _mul_mat(p: Program, f: str) -> None:
    a = p.any(layouts="ccgpt")
    k, _, s2, s3 = p.shape(a)
    b = p.tensor("f32", p.near(k), p.dim(), p.near(s2 * p.rng.randint(1, 2)), p.near(s3 * p.rng.randint(1, 2)))
    p(f, a, b)


def _mul_mat_id(p: Program, f: str) -> None:
    a = p.any(n_dims=3 if p.often() else 4, layouts="cccgpt")
    tokens, used = p.dim(), p.dim()
    b = p.tensor("f32", p.near(p.shape(a)[0]), p.near(_divisor(p, used)), tokens, p.near(1))
    p(f, a, b, p.tensor(p.type("i32"), used, p.near(tokens), p.near(1), p.near(1)))


def _soft_max_ext(p: Program, f: str) -> None:
    a = p.any(layouts="ccccgp")
    ne0, ne1, ne2, ne3 = p.shape(a)
    mask = None
    if p.often(0.7):
        ne = (p.near(ne0), p.near(ne1 + p.rng.randint(0, 2)), _divisor(p, ne2), _divisor(p, ne3))
        mask = p.tensor(p.type("f16", "f32"), *ne, layouts="ccccg")
    s = p(f, a, mask, 0.125, p.rng.choice((0.0, 0.0, 8.0, -1.0, float("nan"))))
    _sinks(p, "soft_max_add_sinks", s, ne2)


def _sinks(p: Program, f: str, node: int, heads: int) -> None:
    for _ in range(p.rng.choice((0, 1, 1, 2))):
        sinks = p.tensor(p.type("f32"), p.near(heads), layouts="c")
        p(f, node if p.often(0.95) else sinks, sinks if p.often(0.8) else None)


def _rope(p: Program, f: str) -> None:
    a = p.any(layouts="ccgp")
    ne0, _, ne2, _ = p.shape(a)
    mode = p.rng.choice(tuple(map(int, ROPE_TYPE)) if p.often() else (1, 3, 4, -1, -2))
    n_dims = p.near(ne0 // 2 * 2)
    b = p.tensor(p.type("i32"), p.near(ne2 * (4 if mode & 8 else 1)), p.near(1))
    if f in {"rope", "rope_inplace"}:
        r = p(f, a, b, n_dims, mode)
    else:
        c = None if p.often(0.5) else p.tensor(p.type("f32"), p.near(n_dims // 2))
        sections = [[p.rng.randint(0, 5) for _ in range(4)]] if "multi" in f else []
        r = p(f, a, b, c, n_dims, *sections, mode, 4096, *(p.rng.choice(FLOATS) for _ in range(6)))
    if p.often(0.3):
        p("rope_set_offset", r if p.often(0.95) else a, p.rng.choice((0, 2, 3, -1)))


def _flash_attn_ext(p: Program, f: str) -> None:
    type_ = p.type("f16", "f32", "q8_0", "q4_0")
    k = p.tensor(type_, *p.ne(type_), layouts="ccgp")
    dk, n_kv, kv_heads, s = p.shape(k)
    q = p.tensor("f32", p.near(dk), p.dim(), p.near(kv_heads * p.rng.randint(1, 3)), p.near(s))
    v = p.tensor(type_, p.ne(type_)[0], n_kv, kv_heads, p.near(s), layouts="ccgp")
    heads = p.shape(q)[2]
    mask = None
    if p.often(0.7):
        ne = (n_kv, p.shape(q)[1], _divisor(p, heads), _divisor(p, p.shape(q)[3]))
        mask = p.tensor(p.type("f16"), *ne, layouts="ccccg")
    t = p(f, q, k, v, mask, 0.125, p.rng.choice((0.0, 0.0, 8.0)), p.rng.choice((0.0, 30.0)))
    _sinks(p, "flash_attn_ext_add_sinks", t, heads)
    _options(p, t, ("flash_attn_ext_set_prec", "flash_attn_ext_set_n_kv_max", "prec_set_acc", "prec_set_src"))


def _options(p: Program, t: int, setters: tuple[str, ...]) -> None:
    for f in setters:
        if p.often(0.3):
            target = t if p.often() else p.tensor("f32", 3)
            if f == "prec_set_src":
                p(f, target, p.rng.choice(tuple(map(int, PREC))), p.rng.choice((0, 1, 1, 9, 10, -1)))
            else:
                p(f, target, p.rng.choice((*map(int, PREC), 1, -1)))


def _matrix(p: Program, f: str) -> None:
    (_mul_mat if f == "mul_mat" else _mul_mat_id)(p, f)
    if f == "mul_mat":
        _options(p, len(p.made) - 1, ("mul_mat_set_prec", "mul_mat_set_hint", "prec_set_acc", "prec_set_src"))
    else:
        _options(p, len(p.made) - 1, ("prec_set_acc", "prec_set_src", "mul_mat_set_prec"))


def _top_k(p: Program, f: str) -> None:
    a = p.any()
    if p.often(0.1):
        a = p.tensor("f32", 2**31 + p.rng.randint(-1, 1), layouts="c")
    p(f, a, p.near(p.rng.choice((1, p.shape(a)[0]))) & 0xFFFF)


def _order(p: Program, f: str) -> None:
    p(f, p.any() if p.often() else p.tensor("f32", 2**31 + p.rng.randint(-1, 1), layouts="c"), p.rng.randint(0, 1))


def _argmax(p: Program, f: str) -> None:
    p(
        f,
        p.any(n_dims=2)
        if p.often(0.8)
        else p.tensor("f32", 2**31 + p.rng.randint(-1, 1), p.near(1), p.near(1), layouts="c"),
    )


def _ssm_conv(p: Program, f: str) -> None:
    d_conv, d_inner = p.rng.randint(1, 4), p.dim()
    sx = p.tensor("f32", max(d_conv - 1 + p.rng.choice((0, 1, 3, 3, -2)), 0), d_inner, p.dim(), p.near(1))
    p(f, sx, p.tensor("f32", p.near(d_conv), p.near(d_inner), p.near(1)))


def _floats(p: Program, f: str) -> None:
    p(f, p.any(layouts="ccgpt"), *p.params(CONSTRUCTORS[f][1:]))


def _cumsum(p: Program, f: str) -> None:
    type_ = p.type("f32")
    p(f, p.tensor(type_, *p.ne(type_)))


def _add_cast(p: Program, f: str) -> None:
    type_ = p.type("f16", "bf16", "q8_0", "q4_0")
    a = p.tensor(type_, *p.ne(type_))
    ne0, *ne = p.shape(a)
    p(f, a, p.tensor("f32", p.near(ne0), *(_divisor(p, n) for n in ne)), p.type("f32", "f16", type_))


def _fill(p: Program, f: str) -> None:
    type_ = p.type("f32", "f16")
    p(f, p.tensor(type_, *p.ne(type_), layouts="cccgp"), p.rng.choice(FLOATS))


def _generator(f: str) -> Callable[[Program, str], None]:
    by_prefix: tuple[tuple[str, Callable[[Program, str], None]], ...] = (
        ("new_tensor", _leaf), ("add_id", _add_id), ("arange", _arange), ("repeat", _repeat), ("concat", _concat),
        ("pad", _pad), ("reshape", _reshape), ("view_tensor", _map), ("view", _view), ("permute", _permute),
        ("cpy", _cpy), ("get_rows", _get_rows), ("set_rows", _set_rows), ("mul_mat", _matrix),
        ("soft_max_ext", _soft_max_ext), ("rope", _rope), ("flash", _flash_attn_ext), ("argsort_top_k", _top_k),
        ("argsort", _order), ("top_k", _top_k), ("argmax", _argmax), ("ssm_conv", _ssm_conv), ("fill", _fill),
        ("cumsum", _cumsum), ("add_cast", _add_cast), ("swiglu_oai", _split), ("swiglu_clamp", _split),
    )  # fmt: skip
    if f in recurrent.EXACT:
        return recurrent.EXACT[f]
    for prefix, g in (*media.GENERATORS, *by_prefix, *recurrent.GENERATORS):
        if f.startswith(prefix):
            return g
    if f.startswith("cont_"):
        return _reshape
    if f.endswith("_split"):
        return _split
    return _binary if CONSTRUCTORS[f].startswith("tt") else _map


N_PER_CONSTRUCTOR = 32
"""Programs of each; with 170 constructors over 5,000."""
MORE = {
    "mul_mat_id": 8,
    "set_rows": 8,
    "flash_attn_ext": 6,
    "soft_max_ext": 6,
    "rope_ext": 4,
    "permute": 6,
    "mul_mat": 4,
    **recurrent.MORE,
    **media.MORE,
}
"""Constructors with many assertions get so many times more."""


AIMED: tuple[tuple[tuple[Json, ...], ...], ...] = (
    (("new_tensor_2d", "f32", 2**40, 2**40),),
    (("new_tensor_1d", "f16", 4), ("cumsum", 0)),
    (("new_tensor_1d", "f32", 4), ("silu", 0), ("set_input", 1)),
    (("new_tensor_3d", "f32", 4, 3, 2), ("new_tensor_3d", "f32", 2, 3, 2), ("ssm_conv", 0, 1)),
    (("new_tensor_1d", "f32", 0), ("new_tensor_1d", "f32", 4), ("repeat", 0, 1)),
    (("new_tensor_1d", "f32", 0), ("repeat_4d", 0, 4, 3, 2, 1)),
    (("new_tensor_4d", "f32", 4, 1, 0, 1), ("new_tensor_1d", "f32", 4), ("mul_mat", 0, 1)),
)
"""Programs for what the random ones meet too seldom: rare assertions, empty tensors, a division by zero in ggml."""


@cache
def programs() -> tuple[tuple[str, Program], ...]:
    """The constructor under test and a program that ends with it, or with an earlier refusal."""
    made = []
    for f in CONSTRUCTORS:
        for k in range(N_PER_CONSTRUCTOR * MORE.get(f, 1)):
            p = Program(f"{f}/{k}")
            with suppress(RefusedError):
                _generator(f)(p, f)
            made.append((f, p))
    for calls in AIMED:
        p = Program("")
        with suppress(RefusedError):
            for call in calls:
                p(*call)
        made.append((calls[-1][0], p))
    return tuple(made)


@cache
def answers() -> tuple[Json, ...]:
    """What the real ggml says to each of `programs()`."""
    return tuple(run_programs(p.calls for _, p in programs()))


def random_graph(p: Program) -> None:  # noqa: C901  # one branch per kind of node
    """A DAG of small F32 nodes with views, results in place, casts to themselves and shared leaves."""
    pool = [p("new_tensor_2d", "f32", 4, 3) for _ in range(3)]
    if p.often(0.5):
        p("set_input", p.named(pool[0]))
    for _ in range(p.rng.randint(1, 14)):
        a, b = p.rng.choice(pool), p.rng.choice(pool)
        f = p.rng.choice(
            ("add", "mul", "add_inplace", "silu", "reshape_2d", "view_1d", "cast", "set_rows", "swiglu_split")
        )
        if f in {"add", "mul", "add_inplace", "swiglu_split"}:
            t = p(f, a, b)
        elif f == "reshape_2d":
            t = p(f, a, 4, 3)
        elif f == "view_1d":
            t = p("reshape_2d", p(f, a, 12, 0), 4, 3)
        elif f == "cast":
            t = p(f, a, "f32")
        elif f == "set_rows":
            t = p(f, a, b, p("new_tensor_1d", "i64", 3))
        else:
            t = p(f, a)
        pool.append(p.named(t) if p.often(0.2) else t)
        if p.often(0.1):
            p("set_output", t)
    outputs = [p.rng.choice(pool) for _ in range(p.rng.randint(1, 4))]
    if p.often(0.6):
        p("build_forward_expand", *outputs)
    else:
        p("build_forward_select", *outputs, p.rng.randrange(len(outputs)))
        if p.often(0.5):
            p("build_forward_expand", *outputs[::-1])
