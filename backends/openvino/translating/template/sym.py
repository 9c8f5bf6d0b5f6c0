"""Symbolic integers: a value in one graph, and its expression for the template's others.

Expressions are integer polynomials of symbols, and of floor quotients and remainders that do not divide evenly. They
are canonical: two polynomials are equal exactly if their expressions are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from conformance.ggml.errors import BackendError

Operator: TypeAlias = Literal["+", "-", "*", "//", "%"]


@dataclass(frozen=True, slots=True)
class Symbol:
    """The `index`-th symbol of a template."""

    index: int

    def __str__(self) -> str:
        return f"s{self.index}"


@dataclass(frozen=True, slots=True)
class Const:
    """A constant."""

    n: int

    def __str__(self) -> str:
        return str(self.n)


@dataclass(frozen=True, slots=True)
class Op:
    """`left op right`, with Python's floor division and remainder."""

    op: Operator
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"({self.left} {self.op} {self.right})"


Expr: TypeAlias = Symbol | Const | Op
Poly: TypeAlias = Mapping[tuple[Expr, ...], int]
"""Atoms in order -> nonzero coefficient: a sum of products.

An atom is a symbol, `//` or `%`."""


def evaluate(expr: Expr, bindings: Sequence[int]) -> int:
    """Evaluate `expr` for the symbols' values `bindings`; ZeroDivisionError if a divisor is 0."""
    if isinstance(expr, Symbol):
        return bindings[expr.index]
    if isinstance(expr, Const):
        return expr.n
    return _OPERATORS[expr.op](evaluate(expr.left, bindings), evaluate(expr.right, bindings))


_OPERATORS: dict[Operator, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


@dataclass(frozen=True, slots=True)
class Assumption:
    """A comparison of a number that varies between graphs: `expr op 0` had the result `held`."""

    op: Literal["<", "=="]
    expr: Expr
    held: bool

    def holds(self, bindings: Sequence[int]) -> bool:
        """Return True if the comparison has the same outcome for `bindings`."""
        n = evaluate(self.expr, bindings)
        return (n < 0 if self.op == "<" else n == 0) is self.held

    def __str__(self) -> str:
        return f"{self.expr} {self.op} 0 is {self.held}"


_record: ContextVar[dict[Assumption, None] | None] = ContextVar("_record", default=None)


@contextmanager
def assumptions() -> Iterator[dict[Assumption, None]]:
    """Record each comparison of a `Sym` in the block whose outcome varies between graphs.

    A translation that compares numbers of a traced graph (order of strides, whole or part, contiguous or not) depends
    on these outcomes; `Template.guarded` then requires them of later graphs.
    """
    record: dict[Assumption, None] = {}
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def _comparison(name: str, op: Literal["<", "=="], sign: int) -> Callable[[Sym, object], bool]:
    """Return `Sym.name`, recorded as `(self - other) * sign op 0`."""
    compare = getattr(operator, name)

    def method(self: Sym, other: object) -> bool:
        if not isinstance(other, int):
            return NotImplemented  # type: ignore[no-any-return]  # Python asks the other operand then
        record = _record.get()
        if record is not None:
            diff = _product({(): sign}, _difference(self.poly, poly_of(other)))
            if any(diff):
                n = (int(self) - int(other)) * sign
                record[Assumption(op, _expr(diff), n < 0 if op == "<" else n == 0)] = None
        return bool(compare(int(self), int(other)))

    return method


def _arithmetic(op: Operator, *, swap: bool = False) -> Callable[[Sym, int], int]:
    """Return a method of `Sym`: `self op other`, or `other op self` if `swap`."""

    def method(self: Sym, other: int) -> int:
        left, right = (other, self) if swap else (self, other)
        value = _OPERATORS[op](int(left), int(right))
        return _number(value, _POLYNOMIALS[op](poly_of(left), poly_of(right)))

    return method


class Sym(int):
    """An int with an expression, which `+ - * // %` preserve unless the symbols cancel.

    Comparing, hashing and indexing use the number; `int()` drops the expression. Operations that would silently freeze
    one graph's number into a program (`/`, `float()`, `**`, bit operations) raise `BackendError`.
    """

    expr: Expr
    poly: Poly

    __eq__ = _comparison("__eq__", "==", 1)
    __ne__ = _comparison("__ne__", "==", 1)
    __lt__ = _comparison("__lt__", "<", 1)
    __ge__ = _comparison("__ge__", "<", 1)
    __gt__ = _comparison("__gt__", "<", -1)
    __le__ = _comparison("__le__", "<", -1)
    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return self != 0

    __add__ = __radd__ = _arithmetic("+")
    __mul__ = __rmul__ = _arithmetic("*")
    __sub__, __rsub__ = _arithmetic("-"), _arithmetic("-", swap=True)
    __floordiv__, __rfloordiv__ = _arithmetic("//"), _arithmetic("//", swap=True)
    __mod__, __rmod__ = _arithmetic("%"), _arithmetic("%", swap=True)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return other // self, other % self

    def __neg__(self) -> int:
        return self * -1

    def __pos__(self) -> int:
        return self

    def _frozen(self, *_: object) -> NoReturn:
        raise BackendError(
            f"{self.expr}: + - * // % expected of a number that changes from graph to graph; "
            f"another operation would freeze {int(self)}. int() does that on purpose"
        )

    __truediv__ = __rtruediv__ = __float__ = __pow__ = __rpow__ = _frozen
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _frozen
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _frozen


def symbol(index: int, value: int) -> Sym:
    """Return the `index`-th symbol, which is `value` in this graph."""
    return _sym(value, {(Symbol(index),): 1})


def derived(expr: Expr, bindings: Sequence[int]) -> int:
    """Evaluate `expr` for `bindings`: a `Sym`, or an int if it is constant."""
    return _number(evaluate(expr, bindings), _expanded(expr))


def expr_of(n: int) -> Expr:
    """Return the expression of a `Sym`, a constant for any other int."""
    return n.expr if isinstance(n, Sym) else Const(n)


def same(a: int, b: int) -> bool:
    """Return True if `a` and `b` are equal in every graph of the template."""
    return poly_of(a) == poly_of(b)


def poly_of(n: int) -> Poly:
    """Return the polynomial of a `Sym`, a constant one for any other int."""
    if isinstance(n, Sym):
        return n.poly
    return {(): int(n)} if n else {}


def _number(value: int, poly: Poly) -> int:
    """Return `value` as a `Sym` of `poly`, or as an int if `poly` is constant."""
    return _sym(value, poly) if any(poly) else value


def _sym(value: int, poly: Poly) -> Sym:
    s = Sym(value)
    s.poly = poly
    s.expr = _expr(poly)
    return s


def _order(atoms: tuple[Expr, ...]) -> tuple[int, list[str]]:
    """Sort by degree, then names: invariant under multiplication, so division terminates."""
    return len(atoms), [str(a) for a in atoms]


def _expr(poly: Poly) -> Expr:
    out: Expr | None = None
    for atoms in sorted(poly, key=_order, reverse=True):
        n = poly[atoms]
        term: Expr | None = None
        for atom in atoms:
            term = atom if term is None else Op("*", term, atom)
        size = n if out is None else abs(n)
        if term is None:
            term = Const(size)
        elif size != 1:
            term = Op("*", term, Const(size))
        out = term if out is None else Op("+" if n > 0 else "-", out, term)
    return Const(0) if out is None else out


def _expanded(expr: Expr) -> Poly:
    if isinstance(expr, Symbol):
        return {(expr,): 1}
    if isinstance(expr, Const):
        return {(): expr.n} if expr.n else {}
    return _POLYNOMIALS[expr.op](_expanded(expr.left), _expanded(expr.right))


def _nonzero(terms: Iterable[tuple[tuple[Expr, ...], int]]) -> Poly:
    out: dict[tuple[Expr, ...], int] = {}
    for atoms, n in terms:
        out[atoms] = out.get(atoms, 0) + n
    return {atoms: n for atoms, n in out.items() if n}


def _sum(a: Poly, b: Poly) -> Poly:
    return _nonzero([*a.items(), *b.items()])


def _difference(a: Poly, b: Poly) -> Poly:
    return _nonzero([*a.items(), *((atoms, -n) for atoms, n in b.items())])


def _product(a: Poly, b: Poly) -> Poly:
    return _nonzero(((*sorted(x + y, key=str),), n * m) for x, n in a.items() for y, m in b.items())


def _without(atoms: tuple[Expr, ...], divisor: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
    """Return `atoms` / `divisor` as a product; None if it does not divide."""
    rest = list(atoms)
    for atom in divisor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _divided(a: Poly, b: Poly) -> tuple[Poly, Poly]:
    """Return `q`, `r` with `a == q * b + r`; no term of `r` is divisible by `b`'s leading one."""
    lead = max(b, key=_order)
    q: dict[tuple[Expr, ...], int] = {}
    r: dict[tuple[Expr, ...], int] = {}
    left = a
    while left:
        top = max(left, key=_order)
        rest = _without(top, lead)
        if rest is None or left[top] % b[lead]:
            r[top] = left[top]
            left = {atoms: n for atoms, n in left.items() if atoms != top}
        else:
            q[rest] = left[top] // b[lead]
            left = _difference(left, _product({rest: q[rest]}, b))
    return q, r


def _quotient(a: Poly, b: Poly) -> Poly:
    q, r = _divided(a, b)
    return _sum(q, _uneven("//", r, b)) if r else q


def _remainder(a: Poly, b: Poly) -> Poly:
    r = _divided(a, b)[1]
    return _uneven("%", r, b) if r else r


def _uneven(op: Literal["//", "%"], r: Poly, b: Poly) -> Poly:
    expr = Op(op, _expr(r), _expr(b))
    if isinstance(expr.left, Const) and isinstance(expr.right, Const):
        n = evaluate(expr, ())
        return {(): n} if n else {}
    return {(expr,): 1}


_POLYNOMIALS: dict[Operator, Callable[[Poly, Poly], Poly]] = {
    "+": _sum,
    "-": _difference,
    "*": _product,
    "//": _quotient,
    "%": _remainder,
}
