"""Places of C and C++ sources where a mutant can be, from their syntax trees.

A mutant replaces an expression by `(mutant(N) ? (new) : (old))`, or guards a statement by `if (!mutant(N))`. So each
place must be evaluated at run time, as a value: no constant expression, template argument, `case` label, assertion or
operand of an intrinsic, and nothing that is assigned to or whose address is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import tree_sitter_cpp
from tree_sitter import Language, Parser

if TYPE_CHECKING:
    from tree_sitter import Node

Kind = Literal[
    "another dimension", "offset", "loop bound", "off by one", "relational", "negated condition", "logical",
    "arithmetic", "constant", "swapped operand", "dropped statement",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|"}
_RELATIONAL = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_LOGICAL = {"&&": "||", "||": "&&"}
_EXTREME = {
    "MAX": "MIN",
    "MIN": "MAX",
    "std::max": "std::min",
    "std::min": "std::max",
    "fmaxf": "fminf",
    "fminf": "fmaxf",
}
_DIMENSION = re.compile(r"((?:ne|nb|i|s)[0-9]?)([0-3])")
"""An extent, a stride or an index of ggml's loops: the last digit is the dimension."""
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|[0-9]+)([uUlL]*)")
_FIXED = frozenset({
    "template_argument_list", "template_parameter_list", "static_assert_declaration", "enumerator", "enumerator_list",
    "array_declarator", "attribute", "attribute_declaration", "sizeof_expression", "alignof_expression",
    "lambda_capture_specifier", "optional_parameter_declaration", "preproc_def", "preproc_function_def",
    "preproc_call", "preproc_include", "string_literal", "concatenated_string", "decltype", "gnu_asm_expression",
    "bitfield_clause", "noexcept", "requires_clause",
})  # fmt: skip
"""Nodes in which nothing is evaluated at run time."""
_UNTOUCHED = re.compile(
    r"_mm|__builtin|_tile|__riscv|v(ld|st|dup|add|mul|get|set)|GGML_(ASSERT|ABORT|LOG|UNUSED|PRINT|TENSOR)|UNUSED|"
    r"assert|(AT_)?PRINTF|f?printf|static_cast|reinterpret_cast|NULL|va_|std::(move|forward|get|make_)|omp_|alignof|offsetof|perror"
)
"""Calls whose arguments stay: intrinsics with immediate operands, assertions, and messages."""
_CONSTANT = ("constexpr", "static const ", "consteval")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one place; offsets are bytes of the source."""

    kind: Kind
    start: int
    end: int
    line: int
    """From 1."""
    function: str
    old: str
    new: str
    """Replaces `old`; empty if the statement is dropped."""


def parse(source: bytes) -> Node:
    """Return the root of the syntax tree; C is read by C++'s grammar."""
    return Parser(Language(tree_sitter_cpp.language())).parse(source).root_node


def edits(source: bytes, is_compiled: Callable[[int], bool]) -> Iterator[Edit]:
    """Yield every possible edit, in file order.

    `is_compiled` returns True if the compiler sees a line, counted from 1.
    """
    yield from _below(parse(source), "", is_compiled)


def _below(node: Node, function: str, is_compiled: Callable[[int], bool]) -> Iterator[Edit]:
    if node.type in _FIXED or _is_constant(node) or (function and node.type == "ERROR"):
        return
    if node.type == "function_definition":
        function = _name(node)
    if function and node.is_named and is_compiled(node.start_point[0] + 1):
        for kind, place, new in _changes(node):
            yield Edit(kind, place.start_byte, place.end_byte, place.start_point[0] + 1, function, _text(place), new)
    for i, child in enumerate(node.children):
        if not _is_skipped(node, node.field_name_for_child(i)):
            yield from _below(child, function, is_compiled)


def _is_constant(node: Node) -> bool:
    if node.type in {"declaration", "function_definition", "field_declaration"}:
        return _text(node)[:200].split("(")[0].startswith(_CONSTANT) or " constexpr " in _text(node)[:80]
    if node.type == "if_statement":
        return _text(node).startswith("if constexpr")
    return node.type == "call_expression" and _UNTOUCHED.match(_text(node)) is not None


def _is_skipped(parent: Node, name: str | None) -> bool:
    if parent.type == "case_statement":
        return name == "value"
    return parent.type.startswith("preproc_") and name in {"condition", "name"}


def _changes(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    """Yield the changes of one node: kind, the node that is replaced, and what replaces it."""
    change = _CHANGES.get(node.type)
    if change is not None:
        yield from change(node)


def _subscript(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    if node.named_child_count == 1:
        index = node.named_children[0]
        yield "off by one", index, f"{_text(index)} + 1"


def _identifier(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    match = _DIMENSION.fullmatch(_text(node))
    if match and _is_value(node):
        yield "another dimension", node, f"{match[1]}{(int(match[2]) + 1) % 4}"


def _conditional(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    test, yes, no = (node.child_by_field_name(n) for n in ("condition", "consequence", "alternative"))
    if test is not None and yes is not None and no is not None:
        yield "swapped operand", node, f"{_text(test)} ? {_text(no)} : {_text(yes)}"


def _call(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    called = node.child_by_field_name("function")
    if called is not None and (other := _EXTREME.get(_text(called))):
        yield "swapped operand", node, other + _text(node)[len(_text(called)) :]


def _statement(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    done = node.named_children[0] if node.named_child_count == 1 else None
    is_work = done is not None and done.type in {"assignment_expression", "call_expression"}
    if is_work and not _UNTOUCHED.match(_text(node)):
        yield "dropped statement", node, ""


def _branch(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    clause = node.child_by_field_name("condition")
    inner = clause.child_by_field_name("value") if clause is not None else None
    if inner is not None and inner.type not in {"declaration", "init_statement"}:
        yield "negated condition", inner, f"!({_text(inner)})"


def _binary(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    left, right, sign = (node.child_by_field_name(n) for n in ("left", "right", "operator"))
    if left is None or right is None or sign is None:
        return
    a, b, op = _text(left), _text(right), _text(sign)
    if op in _RELATIONAL:
        is_bound = node.parent is not None and node.parent.type == "for_statement"
        yield ("loop bound" if is_bound else "relational"), node, f"{a} {_RELATIONAL[op]} {b}"
    elif op in _LOGICAL:
        yield "logical", node, f"({a}) {_LOGICAL[op]} ({b})"
    elif op in _ARITHMETIC:
        yield "arithmetic", node, f"{a} {_ARITHMETIC[op]} ({b})"
        if op == "+" and b != "0":
            yield "offset", node, a
        if op in {"-", "/", "%", "<<", ">>"}:
            yield "swapped operand", node, f"({b}) {op} ({a})"


def _number(node: Node) -> Iterator[tuple[Kind, Node, str]]:
    text = _text(node)
    match = _INTEGER.fullmatch(text)
    if not _is_value(node) or (match and match[1].startswith("0") and match[1].isdigit() and len(match[1]) > 1):
        return  # octal
    if match:
        value = int(match[1], 0)
        yield "constant", node, f"{value + 1}{match[2]}"
        if value > 1:
            yield "off by one", node, f"{value - 1}{match[2]}"
    elif "x" not in text.lower():
        yield "constant", node, f"({text} * 1.25f + 0.75f)"  # a fixed point, -3, that no source has


def _is_value(node: Node) -> bool:
    """Return True if a node is read, and neither assigned to, declared, referenced nor the name of something."""
    parent = node.parent
    if parent is None:
        return False
    if parent.type == "binary_expression":
        return True
    if parent.type in {"argument_list", "parenthesized_expression", "return_statement", "subscript_argument_list"}:
        return node.type == "number_literal" or parent.type == "subscript_argument_list"
    if parent.type in {"assignment_expression", "init_declarator"}:
        name = "right" if parent.type == "assignment_expression" else "value"
        return parent.child_by_field_name(name) == node
    return False


def _name(function: Node) -> str:
    node = function.child_by_field_name("declarator")
    while node is not None and (inner := node.child_by_field_name("declarator")) is not None:
        node = inner
    return _text(node) if node is not None else "?"


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


_CHANGES: dict[str, Callable[[Node], Iterator[tuple[Kind, Node, str]]]] = {
    "binary_expression": _binary,
    "subscript_argument_list": _subscript,
    "number_literal": _number,
    "identifier": _identifier,
    "conditional_expression": _conditional,
    "call_expression": _call,
    "expression_statement": _statement,
    "if_statement": _branch,
    "while_statement": _branch,
}
