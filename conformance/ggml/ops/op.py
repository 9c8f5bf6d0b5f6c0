"""Declarations: an op of ggml is declared once, and everything else about it is derived.

A declaration (`Op`) has an op's sources and parameters, what ggml's constructor makes and asserts, and its typed
constructors. Other modules derive from it how to read and pack `op_params` by name, checks of nodes from files, the
`Builder`, texts of reports, calls in snippets, the changes of an audit and the row of the tolerance table.

Rules and assertions also run on symbolic sizes: they only compare and calculate with them.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import (
    FIELDS,
    FLAG_PARAM,
    MAX_NAME,
    ZERO_PARAMS,
    Dims,
    Tensor,
    can_repeat,
    computes,
    contiguous_nb,
    is_contiguous,
    is_contiguous_rows,
    is_transposed,
    nbytes,
    nelements,
    row_size,
    same_shape,
)
from conformance.ggml.types import F32, OPS, TYPES, GGMLType

from .fields import Field

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

Layout = tuple[GGMLType, Dims, Dims, Tensor | None, int]
"""Layout of a result by its constructor: type, ne, nb, view_src, view_offs."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


# --- declarations


def row_length(t: Tensor) -> int:
    """Return `ne[0]` of the first source."""
    return operand(t).ne[0] if t.src else 1


@dataclass(frozen=True, slots=True)
class Rounding:
    """Row of the tolerance table: NMSE `(base + per_k * K) * u^2`, u float32's unit roundoff."""

    base: float
    per_k: float = 0.0
    why: str = ""
    terms: Callable[[Tensor], int] = row_length
    """Function that returns K, the number of terms summed for one element of the result."""
    products: float = 0.0
    """Allowed error of a device that rounds operands first, in their squared roundoffs.

    0 if no device rounds this op. A product has two operands, may nearly cancel, and may have 8-bit activations
    beside compressed weights."""
    by: str = ""
    """Field of `Arithmetic` for how a device computes this op."""


MOVES = Rounding(0, why="moves values; only a change of type rounds, and rounds as ggml's reference does")
ROUNDS = Rounding(4, why="one or two float32 roundings")
SUMS = Rounding(16, 1, "float32 sum of K")
DOTS = Rounding(64, 1, "float32 sum of K products")
NORMS = Rounding(64, 1, "float32 sum of K squares, a root, a product")
EXPS = Rounding(256, why="float32 exp, tanh or erf of a few ulp, and the products around it")


PASSES = 8
"""Operations of a reference kernel per element of operands and result."""
LOOP = 10_000
"""Operations that one iteration of a Python loop costs, whatever the array sizes."""
DOT = 10
"""Multiplications of a matrix product that take as long as one operation."""


def nothing(_: Tensor) -> int:
    """Return 0: nothing beyond the estimate for any op."""
    return 0


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of a node in the float64 reference, as upper bounds (`run/cost.py`)."""

    elements: Callable[[Tensor], int] = nothing
    """Values allocated besides the operands and three times the result."""
    operations: Callable[[Tensor], int] = nothing
    """Operations besides `PASSES` over operands and result."""
    held: Callable[[Tensor], int] | None = None
    """All values allocated, for a kernel that converts its operands in parts."""


PLAIN = Work()


@dataclass(frozen=True, slots=True)
class Form:
    """A constructor of `ggml.h`, enough to write the call that made a node."""

    name: str
    arguments: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that it sets itself."""
    recover: Mapping[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    """Argument that is no source or parameter -> function that computes it for a node."""


DECLARATIONS: dict[str, Op] = {}
"""Op -> its declaration; complete once `conformance.ggml.ops` is imported."""


class Op:
    """Declaration in `DECLARATIONS` of an op of ggml, or of several that differ in name only.

    Args:
        names: of `types.OPS`, the second the `_back` sibling of the first.
        src: ggml's names of the sources; optional ones end with a question mark.
        layout: from a tensor's op, `src` and `op_params` (and its proposed type, ne, nb and view_src, if the caller of
            the constructor chooses these) to the layout ggml would give it; raises what `asserts` cannot express.
        asserts: what ggml asserts when it constructs a node, in ggml's syntax, as `assertions` reads it.
        let: C variables that `asserts` and `runs` use: `n_head = x->ne[1]; …`.
        rounding: the row of the tolerance table.
        work: what a node costs beyond its operands and its result.
        params: in the order of `op_params`.
        runs: what ggml asserts or assumes only when it computes the node, in the same syntax, except strides, in which
            backends differ; `dst` is the node. A constructed node may still break it.
        limits: conditions to run that `runs` cannot express.
        suffix: what ggml appends to the name of `src[0]`.
        prepare: changes the parameters a constructor was given into those that it stores.
        after: setters of a made node: name, the source or parameter that the second argument sets, further arguments.
        not_by_weights: those of `names` that ggml's scheduler does not place on the device of their weights, which are
            too small.
        writes: names of the sources whose bytes the op also changes, such as AdamW's moments.
        outputs: name of the source with as many elements as the outputs; states follow these in the result.

    Raises:
        ValueError: a name is not in `types.OPS`.
    """

    def __init__(
        self,
        *names: str,
        src: str,
        layout: Callable[[Tensor], Layout],
        asserts: str = "",
        let: str = "",
        rounding: Rounding = MOVES,
        work: Work = PLAIN,
        params: Sequence[Field] = (),
        runs: str = "",
        limits: Callable[[Tensor], None] | None = None,
        suffix: str = "",
        prepare: Callable[[dict[str, Any]], None] | None = None,
        after: Sequence[tuple[Any, ...]] = (),
        not_by_weights: Collection[str] = (),
        writes: str = "",
        outputs: str = "",
    ) -> None:
        if unknown := [name for name in names if name not in OPS]:
            raise ValueError(f"op {unknown[0]}: add the name to OPS in conformance/ggml/types.py")
        self.names = names
        self.module: str = sys._getframe(1).f_globals["__name__"]  # noqa: SLF001  # as `namedtuple` finds its own
        """Name of the module that declares it."""
        self.src = tuple(s.rstrip("?") for s in src.split())
        self.n_src = sum(not s.endswith("?") for s in src.split())
        """Number of required sources, which come first."""
        places = accumulate((f.size for f in params), initial=0)
        self.fields = tuple(replace(f, at=at) for f, at in zip(params, places, strict=False))
        self._texts = asserts, runs, let
        self.rule, self.limits, self.prepare = layout, limits, prepare
        self.rounding, self.work, self.suffix = rounding, work, suffix
        self.outputs = self.src.index(outputs) if outputs else None
        self.after = tuple((setter, of, tuple(rest)) for setter, of, *rest in after)
        self.not_by_weights = frozenset(not_by_weights)
        self.writes = tuple(map(self.src.index, writes.split()))
        self.forms: list[Form] = []
        readers: dict[str, Callable[[tuple[int, ...]], Any]] = {}
        for f in self.fields:
            readers |= {f.name: f.of} if f.name else {}
            readers |= {name: itemgetter(f.at + i) for i, name in enumerate(f.each)}
        for name in names:
            DECLARATIONS[name] = self
            FIELDS[name] = readers

    @cached_property
    def asserts(self) -> tuple[Assertion, ...]:
        """Assertions of ggml when it constructs a node, parsed on first use."""
        asserts, _, let = self._texts
        return assertions(asserts, let, self.src, self.n_src, self.fields)

    @cached_property
    def runs(self) -> tuple[Assertion, ...]:
        """Assertions and assumptions of ggml only when it computes a node."""
        _, runs, let = self._texts
        return assertions(runs, let, self.src, self.n_src, self.fields)

    def layout(self, t: Tensor) -> Layout:
        """Return the layout that ggml gives `t`; GraphError with the assertion it breaks."""
        self._check(t, self.asserts)
        return self.rule(t)

    def check_run(self, t: Tensor) -> None:
        """Raise GraphError if ggml could not compute `t`, although its constructor made it."""
        self._check(t, self.runs)
        if self.limits is not None:
            self.limits(t)

    def _check(self, t: Tensor, assertions: tuple[Assertion, ...]) -> None:
        for text, holds in assertions:
            if not holds(t):
                words = re.findall(r"\w+", text)
                raise violated(t, text, **{f.name: f.of(t.op_params) for f in self.fields if f.name in words})

    def field(self, name: str) -> Field | None:
        """Return the parameter of this name."""
        return next((f for f in self.fields if f.name == name), None)

    def pack(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Pack `values` into all 16 `op_params`; parameters without one are 0."""
        if not self.fields:
            return ZERO_PARAMS
        words = list(ZERO_PARAMS)
        for f in self.fields:
            if f.each and f.name not in values:
                words[f.at : f.at + f.size] = [int(values.get(e, 0)) for e in f.each]
            elif f.name in values:
                words[f.at : f.at + f.size] = f.write(values[f.name])
        return tuple(words)

    def node(
        self,
        *src: Tensor | None,
        name: str = "",
        type_: GGMLType | None = None,
        ne: Dims | None = None,
        nb: Dims | None = None,
        inplace: bool = False,
        **params: Any,  # noqa: ANN401  # what the fields take
    ) -> Tensor:
        """Make a node over `src` (trailing None dropped) with the layout that the rule decides.

        `name` is one of `names`, the first if empty. Where the caller chooses them, `type_` (`cast`), `ne` (views,
        `cont_4d`, `repeat`, `top_k`) and `nb` (views) are proposed. `inplace`: into `src[0]`'s bytes, as an `*_inplace`
        constructor. GraphError with the assertion of ggml that the arguments break.
        """
        while src and src[-1] is None:
            src = src[:-1]
        if self.prepare is not None:
            self.prepare(params)
        if inplace and self.field("inplace"):
            params["inplace"] = True
        a = src[0] if src else Tensor(F32, (0, 1, 1, 1), (4, 0, 0, 0))
        if a is None:
            raise TypeError(f"{self.names[0]}: src[0] must be a Tensor")
        t = Tensor(
            type_ or a.type,
            ne or a.ne,
            nb or a.nb,
            name or self.names[0],
            self.pack(params),
            src,
            a if inplace else None,
        )
        lay_out(t)
        suffix = "(view)" if inplace else self.suffix
        if suffix:
            t.name = fit_name(f"{a.name} {suffix}")
        return t

    def constructor(self, f: Callable[Concatenate[Any, P], None]) -> Constructor[P]:
        """Declare a constructor with arguments named as sources, parameters or `node`'s proposals."""
        return self.variant()(f)

    def variant(
        self, **fixed: Any  # noqa: ANN401  # what the fields take
    ) -> Callable[[Callable[Concatenate[Any, P], None]], Constructor[P]]:  # fmt: skip
        """Declare a `constructor` that sets some parameters itself."""
        return lambda f: Constructor(self, _arguments(f), fixed, f.__doc__)

    def of_a(self, **fixed: Any) -> Constructor[[Tensor]]:  # noqa: ANN401  # what the fields take
        """Return the constructor that takes one tensor."""
        return Constructor(self, ("a",), fixed, self.rule.__doc__)

    def of_a_b(self, **fixed: Any) -> Constructor[[Tensor, Tensor]]:  # noqa: ANN401  # what the fields take
        """Return the constructor that takes two tensors."""
        return Constructor(self, ("a", "b"), fixed, self.rule.__doc__)

    def form(self, **recover: Callable[[Tensor], Any]) -> Callable[[F], F]:
        """Declare a constructor with a body of its own; `recover` as in `Form`."""

        def register(f: F) -> F:
            self.forms.append(Form(f.__name__, _arguments(f), recover=recover))
            return f

        return register


def written(node: Tensor) -> tuple[Tensor, ...]:
    """Return the roots that running `node` changes: its own, and sources that its op writes."""
    if not computes(node):
        return ()
    declared = DECLARATIONS.get(node.op)
    others = () if declared is None else (node.src[i] for i in declared.writes)
    return (node.root, *(s.root for s in others if s is not None))


def _arguments(f: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(f).parameters)[1:]


class Longs(tuple[int, ...]):
    """An argument that C takes as a pointer to int64_t; any other tuple is a pointer to int."""

    __slots__ = ()


class Constructor(Generic[P]):
    """A constructor that a declaration implements; called like a method of `Builder`."""

    def __init__(
        self,
        op: Op,
        arguments: tuple[str, ...],
        fixed: Mapping[str, Any],
        doc: str | None,
        *,
        name: str = "",
        inplace: bool = False,
    ) -> None:
        self.op = op
        self.arguments = arguments
        self.fixed = fixed
        self.__doc__ = doc
        self._name = name or op.names[0]
        self._inplace = inplace
        self._keys = [a.rstrip("_") for a in arguments]
        params = {n for f in op.fields for n in (f.name, *f.each)}
        self._params = [k for k in self._keys if k in params]
        self._type = next((k for k in ("type", "dst_type") if k in self._keys and k not in params), "")
        self._ne = "ne0" in self._keys
        self._nb = "nb1" in self._keys and "nb1" not in params

    def __set_name__(self, _: object, name: str) -> None:
        self.op.forms.append(Form(name, self.arguments, self.fixed))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """Make a node; GraphError with the assertion of ggml that the arguments break."""
        given = dict(zip(self._keys, args, strict=False), **{k.rstrip("_"): v for k, v in kwargs.items()})
        if len(given) != len(self.arguments) or len(args) + len(kwargs) != len(self.arguments):
            raise TypeError(f"arguments {', '.join(self.arguments)} expected, {len(args) + len(kwargs)} found")
        get: Callable[..., Any] = given.get
        return self.op.node(
            *[get(s) for s in self.op.src],
            name=self._name,
            type_=get(self._type),
            ne=(get("ne0"), get("ne1", 1), get("ne2", 1), get("ne3", 1)) if self._ne else None,
            nb=(0, get("nb1"), get("nb2"), get("nb3")) if self._nb else None,
            inplace=self._inplace or bool(get("inplace")),
            **self.fixed,
            **{k: given[k] for k in self._params},
        )

    @property
    def inplace(self) -> Constructor[P]:
        """The variant that stores into `src[0]`'s bytes."""
        doc = f"{self.__doc__} Into `a`'s bytes."
        return Constructor(self.op, self.arguments, self.fixed, doc, name=self._name, inplace=True)

    @property
    def pair(self) -> tuple[Constructor[P], Constructor[P]]:
        """This constructor and its in-place variant."""
        return self, self.inplace

    @property
    def back(self) -> Constructor[P]:
        """The constructor of the op's gradient, such as `ggml_rope_ext_back` for ROPE_BACK."""
        return Constructor(self.op, self.arguments, self.fixed, f"{self.__doc__} Backward.", name=self.op.names[1])


# --- assertions

Term = Callable[[Tensor], Any]
Assertion = tuple[str, Term]
"""Text of an assertion of ggml, and a predicate that is True if a node meets it."""


def assertions(text: str, let: str, src: Sequence[str], n_src: int, fields: Sequence[Field]) -> tuple[Assertion, ...]:
    """Parse assertions in ggml's C, as `a->ne[0] == b->ne[0]; ggml_is_contiguous(a)`.

    Each is both the condition and the text of the error. An assertion that names an absent source is not checked. An
    assertion with a remainder by 0, where ggml would crash, fails. ValueError if one cannot be parsed.
    """
    names: dict[str, Term] = {s: lambda t, i=i: operand(t, i) for i, s in enumerate(src)}  # type: ignore[misc]  # i is an int
    names |= {f.name: (lambda t, f=f: f.of(t.op_params)) for f in fields}  # type: ignore[misc]  # f is a Field
    names["dst"] = lambda t: t
    for name, _, value in (part.partition(" = ") for part in filter(None, let.split("; "))):
        names[name] = _term(_parsed(value), names)
    places = {s: i for i, s in enumerate(src) if i >= n_src}
    return tuple((a, _assertion(a, names, places)) for a in " ".join(text.split()).split("; ") if a)


def _assertion(text: str, names: Mapping[str, Term], places: Mapping[str, int]) -> Term:
    term = _term(_parsed(text), names)
    read = [places[n] for n in re.findall(r"\w+", text) if n in places]

    def holds(t: Tensor) -> bool:
        try:
            return bool(term(t)) if not read else any(optional(t, i) is None for i in read) or bool(term(t))
        except ZeroDivisionError:
            return False

    return holds


_PYTHON = {r"->": ".", r"&&": " and ", r"\|\|": " or ", r"!(?!=)": " not ", r"\bas\b": "as_", r"\b0f\b": "0"}


def _parsed(text: str) -> ast.expr:
    for c, python in _PYTHON.items():
        text = re.sub(c, python, text)
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"cannot parse {text.strip()!r} (an assertion, or a value in `let`)") from None


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
}


def _term(e: ast.AST, names: Mapping[str, Term]) -> Term:
    """Return a function from a node to the value of an expression."""
    match e:
        case ast.Constant(value):
            return lambda _: value
        case ast.Name(name):
            return names.get(name.rstrip("_")) or _constant(name)
        case ast.Attribute(of, name):
            thing, get = _term(of, names), operator.attrgetter(name)
            return lambda t: get(thing(t))
        case ast.Subscript(of, ast.Constant(i)):
            values = _term(of, names)
            return lambda t: values(t)[i]
    return _operation(e, [_term(p, names) for p in ast.iter_child_nodes(e) if isinstance(p, ast.expr)])


def _operation(e: ast.AST, parts: list[Term]) -> Term:
    match e:
        case ast.BoolOp(ast.And()):
            return lambda t: all(p(t) for p in parts)
        case ast.BoolOp(ast.Or()):
            return lambda t: any(p(t) for p in parts)
        case ast.UnaryOp(ast.Not()):
            return lambda t: not parts[0](t)
        case ast.BinOp(_, sign, _) | ast.Compare(_, [sign], _):
            f, (a, b) = _OPERATORS[type(sign)], parts
            return lambda t: f(a(t), b(t))
        case ast.Call():
            return lambda t: parts[0](t)(*[p(t) for p in parts[1:]])
    raise ValueError(f"no assertion of ggml: {ast.dump(e)}")


def _constant(name: str) -> Term:
    kind = name.removeprefix("GGML_TYPE_")
    value = {t.name.upper(): t for t in TYPES.values()}[kind] if kind != name else _CONSTANTS[name]
    return lambda _: value


# --- nodes


def lay_out(t: Tensor) -> None:
    """Set the type, shape, strides and view of `t` by its op's rule; GraphError as `Op.layout`."""
    try:
        t.type, t.ne, t.nb, t.view_src, t.view_offs = DECLARATIONS[t.op].layout(t)
    except GraphError as e:
        raise GraphError(f"{t.op}: {e}") from None


def set_param(t: Tensor, name: str, value: object) -> None:
    """Store another value of a parameter."""
    f = DECLARATIONS[t.op].field(name)
    if f is None:
        raise AttributeError(f"{t.op} has no parameter {name!r}")
    t.op_params = (*t.op_params[: f.at], *f.write(value), *t.op_params[f.at + f.size :])


def fit_name(name: str) -> str:
    """Cut `name` to fit `ggml_tensor.name`: 63 bytes, never half a character."""
    if len(name) * 4 < MAX_NAME:
        return name
    raw = name.encode()
    return name if len(raw) < MAX_NAME else raw[: MAX_NAME - 1].decode(errors="ignore")


def params_text(t: Tensor) -> str:
    """Format `t`'s parameters as `name=value`, without insignificant zeros."""
    declared = DECLARATIONS.get(t.op)
    if declared is None:
        return " ".join(f"[{i}]={p}" for i, p in enumerate(t.op_params) if p)
    words = t.op_params
    shown = [f for f in declared.fields if f.name and (f.always or any(words[f.at : f.at + f.size]))]
    return " ".join(
        f.text(words) if isinstance(f.members, tuple) else f"{f.name}={f.text(words)}"
        for f in shown
        if t.op != "VIEW"  # its offset is in view_offs
    )


def check_node(t: Tensor) -> None:
    """Check that a constructor of ggml could have made `t` and that ggml would run it.

    GraphError for an undeclared op; too few or too many sources; a broken assertion of ggml; or a type, shape, stride,
    view or parameter that differs from the constructor's.
    """
    declared = DECLARATIONS.get(t.op)
    if declared is None:
        raise GraphError(f"{t}: the framework does not support {t.op} yet; it knows {', '.join(DECLARATIONS)}")
    try:
        _check_counts(t, declared)
        layout = declared.layout(t)
        if layout != (t.type, t.ne, t.nb, t.view_src, t.view_offs):
            raise _differs(t, layout)
        _check_fields(t, declared)
        declared.check_run(t)
    except GraphError as e:
        raise GraphError(f"{t}: {e}") from None


def _check_counts(t: Tensor, declared: Op) -> None:
    src, n, least = t.src, len(declared.src), declared.n_src
    if len(src) > n and any(s is not None for s in src[n:]):
        raise GraphError(f"{t.op} takes at most {n} src, {len(src)} found")
    if len(src) < least or None in src[:least]:
        raise GraphError(f"{t.op} needs {least} src, {sum(s is not None for s in src)} found")
    if t in src and (t.op != "CPY" or t is src[0]):
        raise GraphError("only ggml_cast makes a node its own src, and only the second")
    n_params = sum(f.size for f in declared.fields)
    if any(t.op_params[n_params:]):
        raise GraphError(f"{t.op} has {n_params} op_params, so the rest must be 0: {list(t.op_params)}")


def _check_fields(t: Tensor, declared: Op) -> None:
    for f in declared.fields:
        if problem := f.problem(t.op_params):
            raise GraphError(problem)


def _differs(t: Tensor, layout: Layout) -> GraphError:
    names = ("type", "ne", "nb", "view_src", "view_offs")
    found = (t.type, t.ne, t.nb, t.view_src, t.view_offs)
    k = next(k for k, (a, b) in enumerate(zip(layout, found, strict=True)) if a != b)
    return GraphError(f"ggml gives this node {names[k]} {layout[k]}, {found[k]} found")


# --- helpers for rules


def violated(t: Tensor, assertion: str, **values: object) -> GraphError:
    """Return the error for an assertion of ggml that `t` breaks, with the values."""
    return failed(assertion, t.src, **values)


def failed(assertion: str, src: Sequence[Tensor | None], **values: object) -> GraphError:
    """Return the error for an assertion of ggml that these sources or values break."""
    came = [f"{k}={v}" for k, v in values.items()]
    came += [f"src[{i}]={s.type}{list(s.ne)} nb{list(s.nb)}" for i, s in enumerate(src) if s is not None]
    return GraphError(f"GGML_ASSERT({assertion}) failed: {', '.join(came)}")


def check(t: Tensor, *rows: tuple[bool, str], **values: object) -> None:
    """Raise GraphError with the assertion of the first row whose condition does not hold."""
    for holds, assertion in rows:
        if not holds:
            raise violated(t, assertion, **values)


def operand(t: Tensor, i: int = 0) -> Tensor:
    """Return `t.src[i]`, which the op requires; GraphError if it is absent."""
    s = t.src[i] if i < len(t.src) else None
    if s is None:
        raise GraphError(f"src[{i}] is absent, but {t.op} needs it")
    return s


def optional(t: Tensor, i: int) -> Tensor | None:
    """Return `t.src[i]`, or None if it is absent."""
    return t.src[i] if i < len(t.src) else None


def divides(d: int, n: int) -> bool:
    """Return True if `n % d == 0`; False for `d == 0`, where ggml would divide by zero."""
    return d != 0 and n % d == 0


def fresh(type_: GGMLType, ne: Dims) -> Layout:
    """Lay out a tensor that owns its bytes: `ggml_new_tensor`; GraphError as `check_size`."""
    check_size(type_, ne)
    return type_, ne, contiguous_nb(type_, ne), None, 0


def check_size(type_: GGMLType, ne: Dims) -> int:
    """Return the bytes that `ne` elements of `type_` take without gaps.

    GraphError for a negative dimension, a broken block, or more elements than an int64 counts. Negative dimensions and
    a byte count that overflows pass ggml's own constructor and give a meaningless tensor; here they are errors.
    """
    if min(ne) < 0:
        raise GraphError(f"ne must not be negative: {list(ne)}")
    if max(ne) > INT64_MAX:
        raise GraphError(f"ne must be int64: {list(ne)}")
    n = ne[0]
    for m in ne[1:]:
        if m > 1:
            if INT64_MAX // m <= n:
                raise failed("INT64_MAX / ne[i] > current_nelements", (), ne=list(ne))
            n *= m
    size = row_size(type_, ne[0]) * ne[1] * ne[2] * ne[3]
    if size > INT64_MAX:
        raise GraphError(f"{type_}{list(ne)} would take {size} bytes, more than a machine can address")
    return size


def view(t: Tensor, a: Tensor, ne: Dims, nb: Dims, offset: int = 0) -> Layout:
    """Lay out a tensor over `a`'s bytes from `offset` on: `ggml_new_tensor_impl`.

    GraphError if `ne` elements without gaps do not fit the bytes of the tensor that owns them. As in ggml, `nb` is not
    checked here; `graph.check_tensor` does that.
    """
    size = check_size(a.type, ne)
    root = a.root
    offs = a.view_offs + offset
    if size and size + offs > nbytes(root):
        raise violated(
            t,
            "view_src == NULL || data_size == 0 || data_size + view_offs <= ggml_nbytes(view_src)",
            data_size=size,
            view_offs=offs,
            nbytes=nbytes(root),
        )
    return a.type, ne, nb, root, offs


def view_tensor(t: Tensor, a: Tensor) -> Layout:
    """Lay out a view of all of `a`: `ggml_view_tensor`."""
    return view(t, a, a.ne, a.nb)


def dup_or_inplace(t: Tensor, a: Tensor) -> Layout:
    """Lay out `a`'s type and shape, in `a`'s bytes for an `*_inplace` constructor."""
    return fresh(a.type, a.ne) if t.view_src is None else view_tensor(t, a)


def same_layout(t: Tensor) -> Layout:
    """Return `a`'s type and shape; assert nothing."""
    return dup_or_inplace(t, operand(t))


def fresh_like(t: Tensor) -> Layout:
    """Return `a`'s type and shape in bytes of its own."""
    a = operand(t)
    return fresh(a.type, a.ne)


def is_padded_1d(t: Tensor) -> bool:
    """Return `ggml_is_padded_1d(t)`: gaps only between rows."""
    return t.nb[0] == t.type.type_size and t.nb[2] == t.nb[1] * t.ne[1] and t.nb[3] == t.nb[2] * t.ne[2]


def can_mul_mat(a: Tensor, b: Tensor) -> bool:
    """Return `ggml_can_mul_mat(a, b)`: equal row lengths; `b` has a multiple of `a`'s matrices."""
    return a.ne[0] == b.ne[0] and divides(a.ne[2], b.ne[2]) and divides(a.ne[3], b.ne[3])


def can_out_prod(a: Tensor, b: Tensor) -> bool:
    """Return `ggml_can_out_prod(a, b)`: equal columns; `b` has a multiple of `a`'s matrices."""
    return a.ne[1] == b.ne[1] and divides(a.ne[2], b.ne[2]) and divides(a.ne[3], b.ne[3])


_CONSTANTS: dict[str, Any] = {
    "INT32_MAX": INT32_MAX,
    "GGML_TENSOR_FLAG_PARAM": FLAG_PARAM,
    "ggml_is_contiguous": is_contiguous,
    "ggml_is_contiguous_1": lambda t: is_contiguous(t, 1),
    "ggml_is_contiguous_rows": is_contiguous_rows,
    "ggml_is_padded_1d": is_padded_1d,
    "ggml_is_transposed": is_transposed,
    "ggml_is_scalar": lambda t: t.ne == (1, 1, 1, 1),
    "ggml_is_vector": lambda t: t.ne[1] == 1 and t.ne[2] == 1 and t.ne[3] == 1,
    "ggml_is_matrix": lambda t: t.ne[2] == 1 and t.ne[3] == 1,
    "ggml_is_3d": lambda t: t.ne[3] == 1,
    "ggml_is_quantized": lambda type_: type_.is_quantized,
    "ggml_are_same_shape": same_shape,
    "ggml_can_repeat": can_repeat,
    "ggml_can_mul_mat": can_mul_mat,
    "ggml_can_out_prod": can_out_prod,
    "ggml_nelements": nelements,
    "ggml_type_size": lambda type_: type_.type_size,
}
"""Names that assertions may use."""
