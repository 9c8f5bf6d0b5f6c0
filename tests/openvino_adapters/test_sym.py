"""Integers that remember how they came to be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.openvino.translating.template.sym import Const, Sym, assumptions, derived, evaluate, expr_of, same, symbol
from conformance.ggml.errors import BackendError

_CHAIN: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip


Recipe = list[tuple[str, int, bool]]
"""An operation, its other operand (a symbol's index below 0), whether the operands change sides."""
_recipes: st.SearchStrategy[Recipe] = st.lists(
    st.tuples(st.sampled_from(sorted(_CHAIN)), st.integers(-3, 40), st.booleans()), max_size=7
)
_bindings = st.tuples(*[st.integers(1, 30)] * 3)


def _followed(recipe: Recipe, symbols: Sequence[int]) -> int:
    n = symbols[0]
    for op, other, swapped in recipe:
        pair = (n, other if other >= 0 else symbols[other])
        n = _CHAIN[op](*(pair[::-1] if swapped else pair))
    return n


@given(_recipes, _bindings, _bindings)
def test_an_expression_is_the_same_chain_under_any_bindings(
    recipe: Recipe, bindings: tuple[int, ...], others: tuple[int, ...]
) -> None:
    """What symbols were put through gives, evaluated for other values, what these values put through it give."""
    try:
        n = _followed(recipe, [symbol(k, v) for k, v in enumerate(bindings)])
        assert int(n) == _followed(recipe, bindings)
        plain = _followed(recipe, others)
    except ZeroDivisionError:
        return
    assert evaluate(expr_of(n), bindings) == int(n)
    assert evaluate(expr_of(n), others) == plain
    assert isinstance(n, Sym) != isinstance(expr_of(n), Const)
    assert same(n, derived(expr_of(n), bindings))


def test_python_s_own_functions_keep_symbols() -> None:
    """`math.prod`, `sum`, `min`, `max`, `divmod` and tuple unpacking give Syms where their results depend on one."""
    a, b = symbol(0, 6), symbol(1, 4)
    assert str(expr_of(math.prod((a, b, 2)))) == "((s0 * s1) * 2)"
    assert str(expr_of(sum((a, b, 1)))) == "((s1 + s0) + 1)"
    assert min(a, b) is b
    assert max(a, b) is a
    assert [str(expr_of(x)) for x in divmod(a * b + 3, a)] == ["(s1 + (3 // s0))", "(3 % s0)"]


def test_quotients_come_out_even_where_they_do() -> None:
    """Bytes back to elements, products back to their factors."""
    n, m = symbol(0, 6), symbol(1, 4)
    assert same((n * 64 * 4) // 4, n * 64)
    assert same((n + 1) * m * 8 // (n + 1), m * 8)
    assert same((n * m * 2 + n * 4) // (n * 2), m + 2)
    assert type(n - n) is int
    assert type((n * 32 + 5) % 32) is int


@pytest.mark.parametrize("freeze", [lambda s: s / 2, float, lambda s: s**2, lambda s: 1 << s, lambda s: s & 1])
def test_what_would_freeze_a_number_is_refused(freeze: Callable[[Sym], object]) -> None:
    """Operations that an expression cannot hold raise instead of forgetting the symbol."""
    with pytest.raises(BackendError, match="freeze"):
        freeze(symbol(0, 8))


def test_comparisons_are_noted_and_hold_where_they_come_out_the_same() -> None:
    """Each comparison that the expressions do not decide becomes an assumption, and no other."""
    n, m = symbol(0, 256), symbol(1, 8)
    with assumptions() as found:
        assert n != m
        assert n == 256
        assert m < n
        assert n + m == m + n
        assert not n - 256
    assert [str(a) for a in found] == [
        "((s1 * -1) + s0) == 0 is False",
        "(s0 - 256) == 0 is True",
        "(s1 - s0) < 0 is True",
    ]
    assert all(a.holds((256, 8)) for a in found)
    assert not any(a.holds((8, 8)) for a in found)
