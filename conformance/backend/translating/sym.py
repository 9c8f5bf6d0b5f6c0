"""Integers that remember how they came to be: a value of one graph, and the expression that gives it in any other.

The expressions are integer polynomials over symbols, and over floor quotients and remainders that do not come out even.
Their form is canonical: two polynomials are equal exactly when their expressions are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from conformance.ggml.errors import BackendError


@dataclass(frozen=True, slots=True)
class Symbol:
    """The `index`-th symbol of a template."""

    index: int

    def __str__(self) -> str:
        return f"s{self.index}"


@dataclass(frozen=True, slots=True)
class Const:
    """A number."""

    n: int

    def __str__(self) -> str:
        return str(self.n)


@dataclass(frozen=True, slots=True)
class Op:
    """`left op right`, with Python's floor division and remainder."""

    op: Literal["+", "-", "*", "//", "%"]
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"({self.left} {self.op} {self.right})"


Expr: TypeAlias = Symbol | Const | Op
Poly: TypeAlias = Mapping[tuple[Expr, ...], int]
"""Atoms in order -> coefficient, none of them 0: their products summed up. An atom is a symbol, `//` or `%`."""


def evaluate(expr: Expr, bindings: Sequence[int]) -> int:
    """The number that `expr` is where the symbols are `bindings`.

    Raises:
        ZeroDivisionError: a divisor is 0 under these bindings.
    """
    if isinstance(expr, Symbol):
        return bindings[expr.index]
    if isinstance(expr, Const):
        return expr.n
    left, right = evaluate(expr.left, bindings), evaluate(expr.right, bindings)
    match expr.op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "//":
            return left // right
        case "%":
            return left % right


@dataclass(frozen=True, slots=True)
class Assumption:
    """One comparison of a number that changes from graph to graph, and how it came out: `expr op 0` is `held`."""

    op: Literal["<", "=="]
    expr: Expr
    held: bool

    def holds(self, bindings: Sequence[int]) -> bool:
        """Whether it comes out the same under `bindings`."""
        n = evaluate(self.expr, bindings)
        return (n < 0 if self.op == "<" else n == 0) is self.held

    def __str__(self) -> str:
        return f"{self.expr} {self.op} 0 is {self.held}"


_noted: ContextVar[dict[Assumption, None] | None] = ContextVar("_noted", default=None)


@contextmanager
def assumptions() -> Iterator[dict[Assumption, None]]:
    """Note each comparison of a `Sym` inside the block whose outcome the expressions alone do not decide.

    Who walks a traced graph and decides by comparing (order of strides, whole or part, contiguous or not) knows
    afterwards what its result depends on; `Template.guarded` then holds later graphs to it.
    """
    found: dict[Assumption, None] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def _comparison(name: str, op: Literal["<", "=="], sign: int) -> Callable[[Sym, object], bool]:
    """`Sym.name`, noted as `(self - other) * sign op 0`."""
    compare = getattr(operator, name)

    def method(self: Sym, other: object) -> bool:
        if not isinstance(other, int):
            return NotImplemented  # type: ignore[no-any-return]  # Python asks the other operand then
        noted = _noted.get()
        if noted is not None:
            diff = _product({(): sign}, _sum(self.poly, poly_of(other), -1))
            if any(diff):
                n = (int(self) - int(other)) * sign
                noted[Assumption(op, _expr(diff), n < 0 if op == "<" else n == 0)] = None
        return bool(compare(int(self), int(other)))

    return method


class Sym(int):
    """An int with an expression. `+ - * // %` keep it, and give a plain int where the symbols cancel out.

    Comparing, hashing and indexing use the number, `int()` is the number alone. What would silently freeze one graph's
    number into a program (`/`, `float()`, `**`, bit operations) raises `BackendError`.
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

    def __add__(self, other: int) -> int:
        return made(int(self) + int(other), _sum(self.poly, poly_of(other), 1))

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return made(int(self) - int(other), _sum(self.poly, poly_of(other), -1))

    def __rsub__(self, other: int) -> int:
        return made(int(other) - int(self), _sum(poly_of(other), self.poly, -1))

    def __mul__(self, other: int) -> int:
        return made(int(self) * int(other), _product(self.poly, poly_of(other)))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        return made(int(self) // int(other), _quotient(self.poly, poly_of(other)))

    def __rfloordiv__(self, other: int) -> int:
        return made(int(other) // int(self), _quotient(poly_of(other), self.poly))

    def __mod__(self, other: int) -> int:
        return made(int(self) % int(other), _remainder(self.poly, poly_of(other)))

    def __rmod__(self, other: int) -> int:
        return made(int(other) % int(self), _remainder(poly_of(other), self.poly))

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
    """The `index`-th symbol, which is `value` in this graph."""
    return _sym(value, {(Symbol(index),): 1})


def derived(expr: Expr, bindings: Sequence[int]) -> int:
    """`expr` under `bindings`: a `Sym`, or the number where it is constant."""
    return made(evaluate(expr, bindings), _expanded(expr))


def expr_of(n: int) -> Expr:
    """The expression of a `Sym`, a constant for any other int."""
    return n.expr if isinstance(n, Sym) else Const(n)


def same(a: int, b: int) -> bool:
    """Whether `a` and `b` are equal in every graph of the template, not just in this one."""
    return poly_of(a) == poly_of(b)


def poly_of(n: int) -> Poly:
    """The polynomial of a `Sym`, a constant one for any other int."""
    if isinstance(n, Sym):
        return n.poly
    return {(): int(n)} if n else {}


def made(value: int, poly: Poly) -> int:
    """`value` with the expression that `poly` is; `value` alone where `poly` is constant."""
    return _sym(value, poly) if any(poly) else value


def _sym(value: int, poly: Poly) -> Sym:
    s = Sym(value)
    s.poly = poly
    s.expr = _expr(poly)
    return s


def _order(atoms: tuple[Expr, ...]) -> tuple[int, list[str]]:
    """Degree, then names: an order that multiplying by the same atoms keeps, so that division ends."""
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
    left, right = _expanded(expr.left), _expanded(expr.right)
    match expr.op:
        case "+":
            return _sum(left, right, 1)
        case "-":
            return _sum(left, right, -1)
        case "*":
            return _product(left, right)
        case "//":
            return _quotient(left, right)
        case "%":
            return _remainder(left, right)


def _nonzero(terms: Iterable[tuple[tuple[Expr, ...], int]]) -> Poly:
    out: dict[tuple[Expr, ...], int] = {}
    for atoms, n in terms:
        out[atoms] = out.get(atoms, 0) + n
    return {atoms: n for atoms, n in out.items() if n}


def _sum(a: Poly, b: Poly, sign: int) -> Poly:
    return _nonzero([*a.items(), *((atoms, sign * n) for atoms, n in b.items())])


def _product(a: Poly, b: Poly) -> Poly:
    return _nonzero(((*sorted(x + y, key=str),), n * m) for x, n in a.items() for y, m in b.items())


def _without(atoms: tuple[Expr, ...], divisor: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
    """`atoms` / `divisor` as products, None where that is none."""
    rest = list(atoms)
    for atom in divisor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _divided(a: Poly, b: Poly) -> tuple[Poly, Poly]:
    """`q`, `r` with `a == q * b + r`; `r` holds what no multiple of `b` takes away. Then `a // b == q + r // b`."""
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
            left = _sum(left, _product({rest: q[rest]}, b), -1)
    return q, r


def _quotient(a: Poly, b: Poly) -> Poly:
    q, r = _divided(a, b)
    return _sum(q, _uneven("//", r, b), 1) if r else q


def _remainder(a: Poly, b: Poly) -> Poly:
    r = _divided(a, b)[1]
    return _uneven("%", r, b) if r else r


def _uneven(op: Literal["//", "%"], r: Poly, b: Poly) -> Poly:
    expr = Op(op, _expr(r), _expr(b))
    if isinstance(expr.left, Const) and isinstance(expr.right, Const):
        n = evaluate(expr, ())
        return {(): n} if n else {}
    return {(expr,): 1}
