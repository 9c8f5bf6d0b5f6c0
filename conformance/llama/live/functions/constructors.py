"""Ways `new-OP`: a library's own constructors make the nodes that the builder makes.

Cases of the family `ops` are built once more by a builder that records its calls. The library gets the same calls, and
its nodes must be equal. An adapter fills nodes field by field, so it never calls a constructor.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from conformance.ggml.errors import BackendError, UnavailableError
from conformance.ggml.lib.constructors import CONSTRUCTORS, KINDS, SETTERS
from conformance.ggml.lib.context import Context, refusal, sub_op
from conformance.ggml.lib.library import Library
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor
from conformance.ggml.types import GGMLType
from conformance.llama.live.ways import Mismatch, bound
from conformance.run.session.spread import spread
from conformance.suite import ops
from conformance.suite.ops.bench import Bench, parse

NEW = "new-"
WAYS = tuple(NEW + op for op in ops.KNOWN)
MOST = 24
"""Cases of an op."""
SMALL = 1 << 14
"""Maximum elements of a case's shapes."""
ROOM = 256
"""Tensors of a case."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a constructor, or of a function that changes a node."""

    name: str
    arguments: tuple[Any, ...]
    result: Tensor | None


Further = Callable[[tuple[Any, ...], Any], Sequence[tuple[str, tuple[Any, ...]]]]
"""Takes the arguments of a call and its result; returns names and arguments of other calls."""


def _glu(args: tuple[Any, ...], _: Any) -> Sequence[tuple[str, tuple[Any, ...]]]:  # noqa: ANN401  # a result
    a, op, swapped = args
    return [(f"{op.lower()}_swapped" if swapped else op.lower(), (a,))]


SHORTER: dict[str, Further] = {
    "unary": lambda args, _: [(args[1].lower(), args[:1])],
    "unary_inplace": lambda args, _: [(f"{args[1].lower()}_inplace", args[:1])],
    "glu": _glu,
    "glu_split": lambda args, _: [(f"{args[2].lower()}_split", args[:2])],
    "soft_max_ext": lambda args, _: [("soft_max", args[:1]), ("soft_max_inplace", args[:1])],
    "rope_ext": lambda args, _: [(name, (*args[:2], *args[3:5])) for name in ("rope", "rope_inplace")],
    "pad_ext": lambda args, _: [("pad", (args[0], *args[2::2]))],
    "interpolate": lambda args, _: [("upscale", (args[0], 2, args[5] & 0xFF))],
    **{f"reshape_{n}d": lambda args, result: [("reshape", (args[0], result))] for n in (1, 2, 3, 4)},
    "repeat_4d": lambda args, result: [("repeat", (args[0], result))],
}
"""Constructor -> calls of others, which make nodes of the same op from fewer arguments."""


_PLAIN = Builder()


class Recorder(Builder):
    """A builder that records the calls made from outside."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._inside = False

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401  # as many types as there are methods
        found = super().__getattribute__(name)
        return partial(self._record, name, found) if name in CONSTRUCTORS or name in SETTERS else found

    def _record(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401
        if self._inside:
            return function(*args, **named)
        self._inside = True
        try:
            result = function(*args, **named)
        finally:
            self._inside = False
        given = inspect.signature(function).bind(*args, **named)
        given.apply_defaults()
        self._keep(name, given.args, result)
        further = SHORTER.get(name)
        for other, arguments in further(given.args, result) if further else ():
            if other in CONSTRUCTORS:
                self._keep(other, arguments, getattr(_PLAIN, other)(*arguments))
        return result

    def _keep(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401  # as above
        node = result if isinstance(result, Tensor) else None
        if node is not None:
            node.flags |= FLAG_COMPUTE  # as in a graph
        self.calls.append(Call(name, arguments, node))


def calls(case_id: str) -> list[Call]:
    """Return the calls that build a case."""
    op_id = parse(case_id, ops.KNOWN)
    bench, recorder = Bench(op_id), Recorder()
    bench.b = recorder
    bench.outputs_of(ops.KNOWN[op_id.op].make)
    return recorder.calls


def case_ids(op: str) -> list[str]:
    """Return the cases whose calls are compared for an op, those with something new first."""
    own = [i for i in ops.ids("standard") if i.partition("/")[2].partition("-")[0] == op]
    plain = [i for i in own if ops.size(i) <= SMALL and ",src" not in i and ",dst=" not in i]
    return spread(plain)[:MOST]


class Nodes:
    """Tensors of a case in a library: made by its constructors, or field by field."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._context = Context(library, ROOM)
        self._at: dict[Tensor, int] = {}
        self._made: list[Call] = []

    def call(self, call: Call) -> None:
        """Call the library as the builder was called; UnavailableError if it cannot."""
        kinds = (CONSTRUCTORS | SETTERS)[call.name]
        types = [KINDS[k] for k in kinds]
        name = f"ggml_{call.name}"
        if call.name in SETTERS:
            function = bound(self._library, name, None, *types)
        else:
            function = bound(self._library, name, ctypes.c_void_p, ctypes.c_void_p, *types)
        if call.result is not None and (reason := refusal(self._library, call.result)):
            raise UnavailableError(reason)
        if call.result is not None and (reason := self._library.too_old(call.result)):
            raise UnavailableError(reason)
        values = [self._argument(k, v) for k, v in zip(kinds, call.arguments, strict=True)]
        if call.name in SETTERS:
            function(*values)
            return
        assert call.result is not None
        self._at[call.result] = function(self._context.pointer, *values)
        self._made.append(call)

    def check(self) -> int:
        """Compare every node, and return their number; Mismatch names the first difference."""
        for call in self._made:
            assert call.result is not None
            if text := self._difference(call.result, self._at[call.result]):
                raise Mismatch(f"ggml_{call.name}: {text}")
        return len(self._made)

    def free(self) -> None:
        """Free the tensors."""
        self._context.free()

    def _argument(self, kind: str, value: Any) -> Any:  # noqa: ANN401  # as many types as there are kinds
        if kind == "t":
            return None if value is None else self._pointer(value)
        if isinstance(value, GGMLType):
            return self._library.types[value.name]
        if kind in {"u", "g"}:
            return self._library.sub_ops["UNARY" if kind == "u" else "GLU"][1][value]
        if kind in {"S", "n"}:
            return (KINDS[kind]._type_ * len(value))(*value)
        return value.encode() if kind == "s" else value

    def _pointer(self, t: Tensor) -> int:
        """Return the address of a tensor, made field by field if no constructor has made it."""
        if t not in self._at:
            for other in (*t.src, t.view_src):
                if other is not None and other is not t:
                    self._pointer(other)
            self._at[t] = self._context.add(t, self._at)
        return self._at[t]

    def _difference(self, t: Tensor, pointer: int) -> str:
        """Return the first field in which a node differs from the builder's; "" if none does."""
        c = self._library.struct(pointer)
        params = t.op_params
        if t.op in self._library.sub_ops:
            params = (sub_op(self._library, t), *params[1:])
        fields: Mapping[str, tuple[object, object]] = {
            "op": (t.op, self._library.op(pointer)),
            "type": (t.type.name, self._library.leaf(pointer).type.name),
            "ne": (list(t.ne), list(c.ne)),
            "nb": (list(t.nb), list(c.nb)),
            "op_params": (list(params), list(c.op_params)),
            "view_offs": (t.view_offs, c.view_offs),
        }
        for name, (expected, found) in fields.items():
            if expected != found:
                return f"{name} {expected} expected, {found} found"
        sources = [*t.src, *(None,) * (len(c.src) - len(t.src))]
        pairs = [*((f"src[{i}]", s, p) for i, (s, p) in enumerate(zip(sources, c.src, strict=True)))]
        for name, other, at in (*pairs, ("view_src", t.view_src, c.view_src)):
            if text := self._differs(other, at or 0, t, pointer):
                return f"{name}: {text}"
        return ""

    def _differs(self, t: Tensor | None, pointer: int, node: Tensor, at: int) -> str:
        """Compare a source of `node`, which lies `at` an address, with the tensor at another."""
        if t is None or not pointer:
            return (
                ""
                if (t is None) == (not pointer)
                else f"{_named(t)} expected, {'a tensor' if pointer else 'none'} found"
            )
        if t is node or t in self._at:
            same = pointer == (at if t is node else self._at[t])
            return "" if same else f"{_named(t)} expected, another tensor found"
        return self._difference(t, pointer)


def _named(t: Tensor | None) -> str:
    return "none" if t is None else f"{t.op} {t.type}{list(t.ne)}"


def play(library: Library, way: str) -> None:
    """Compare the nodes of an op's cases.

    UnavailableError if the library can make none of them.
    """
    compared, lacking = 0, ""
    for case_id in case_ids(way.removeprefix(NEW)):
        nodes = Nodes(library)
        try:
            for call in calls(case_id):
                nodes.call(call)
            compared += nodes.check()
        except Mismatch as e:
            raise Mismatch(f"{e} ({case_id})") from None
        except (UnavailableError, BackendError) as e:
            lacking = lacking or str(e)
        finally:
            nodes.free()
    if not compared:
        raise UnavailableError(lacking or "no case calls a constructor")
