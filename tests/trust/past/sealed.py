"""Match causes with what the fix of a known bug names.

    op = ["SCALE"]                  # ggml ops, or components such as "state"; "any": any op
    condition = ["b != 0"]          # each must be met; properties as in the rules of causes
    kind = ["wrong numbers"]        # how it fails
    note = "…"                      # what no condition can express; not compared

A condition is `KEY` (it is so), `KEY = A|B`, `KEY != A` or `KEY > N`; ` or ` separates alternatives. KEY is a property
of the failing node (`conformance.causes.features`), one of its parameters, or an option of the backend, such as
`threads`. `quantised` stands for every block type.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.case.strict import expect
from conformance.causes import features as of
from conformance.causes.features import Features, features, nodes_of
from conformance.causes.rule import ANY, ANY_SOURCE, GIVEN, MATRICES, Rule, meets
from conformance.ggml.errors import ConformanceError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.types import TYPES
from conformance.judge.cause import ANY_OF, Condition
from conformance.judge.verdict import Verdict
from conformance.llama.release.causes import SharedCause
from conformance.run.live import is_live
from conformance.run.session.select import build

KEYS = ("op", "condition", "kind", "note")
EVERY_OP = "any"
QUANTISED = "quantised"


class Kind(str, enum.Enum):
    """How a bug shows."""

    WRONG = "wrong numbers"
    CRASH = "crash"
    HANG = "hang"
    OVERCLAIM = "overclaim"
    """`supports_op` accepts what cannot run: it aborts, or computes something else."""
    MEMORY = "memory"
    """Memory out of bounds, never written or freed: wrong numbers or a crash, at random."""

    def __str__(self) -> str:
        return self.value


_DIED = frozenset({Verdict.CRASH, Verdict.OVERCLAIM})
VERDICTS: Mapping[Kind, frozenset[Verdict]] = {
    Kind.WRONG: frozenset({Verdict.FAIL}),
    Kind.CRASH: _DIED,
    Kind.HANG: frozenset({Verdict.TIMEOUT}),
    Kind.OVERCLAIM: _DIED | {Verdict.FAIL},
    Kind.MEMORY: _DIED | {Verdict.FAIL},
}
"""Kind of failure -> verdicts by which it shows."""


@dataclass(frozen=True, slots=True)
class Component:
    """A part of ggml or llama.cpp without an op of its own; by default no case runs it."""

    cases: tuple[str, ...] = ()
    """Globs of the ids of cases that test it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of a backend that runs through it, as globs; none if every backend may."""

    def tested_by(self, case_id: str) -> bool:
        """Return True if the case tests it."""
        return any(fnmatchcase(case_id, glob) for glob in self.cases)

    def is_behind(self, backend: Mapping[str, str]) -> bool:
        """Return True if the backend runs through it."""
        return bool(self.options) and all(fnmatchcase(backend.get(k, ""), v) for k, v in self.options.items())


def _scenarios(*names: str) -> tuple[str, ...]:
    return tuple(f"scenario/*do={name}@*" for name in names)


COMPONENTS: Mapping[str, Component] = {
    "state": Component((*_scenarios("state-*", "split-state*", "mtp-saved"), "relations/restored-*")),
    "sequences": Component(_scenarios("seq-*", "split-rm", "split-cp*", "slots-*", "coupled", "batch-*")),
    "graph reuse": Component((*_scenarios("sets*", "lora-*", "cvec-*", "sizes", "batch-*"), "relations/reused-*")),
    "adapters": Component(_scenarios("lora-*", "cvec-*")),
    "allocator": Component(
        (
            "alias/*",
            "memory/*",
            *(f"order/*,{key}=*" for key in ("largest", "extra", "deep")),
            *_scenarios("sizes", "larger", "ubatch*", "chunks"),
        )
    ),
    "scheduler": Component(("order/*", *_scenarios("op-offload", "offload-kqv", "split-*")), {"mode": "sched"}),
    "tensor parallel": Component(_scenarios("split-*"), {"device": "*+*"}),
    "rpc": Component((), {"device": "RPC*"}),
    "quantisation": Component(("functions/quantize-*",)),
    "files": Component(("functions/gguf-*", *_scenarios("written"))),
    "training": Component(("functions/train*",)),
    "threads": Component(
        ("relations/threads-*", *_scenarios("threads", "contexts-2", "contexts-threads")), {"threads": "?*"}
    ),
}
_CONSTRUCTOR = re.compile(r"functions/new-([\w.]+)@\d+")
"""A case that calls an op's constructor, and compares the node."""
_OPERAND = re.compile(r"(src\[\d\]|any source|any operand|result)\.(.+)")
_PROPERTIES = frozenset({*of.OPERANDS, MATRICES, *(f"ne[{d}]" for d in range(4))})
_VALUES: Mapping[str, frozenset[str]] = {
    of.TYPE: frozenset({*TYPES, QUANTISED}),
    of.LAYOUT: frozenset({"contiguous", "reshaped", "transposed", "permuted", of.STRIDED, "gaps in rows"}),
}
"""Property -> its values, if only some are possible."""
_OTHERS = frozenset({of.IN_PLACE, of.OUTPUT, of.STEP, of.OTHER_NODE, "threads", "buffer", "device", "variant", "mode"})
_CONDITION = re.compile(r"(.*?)(?: (=|!=|>) (\S.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The columns of a known bug that are compared with its findings."""

    ops: tuple[str, ...]
    conditions: tuple[tuple[Condition, ...], ...]
    """Each has alternatives."""
    kinds: tuple[Kind, ...]
    note: str = ""

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str) -> Sealed:
        """Return the columns of a TOML table; UsageError names the key."""
        lists = {key: _words(table.get(key, [] if key == "condition" else None), f"{where} {key}") for key in KEYS[:3]}
        known = (*COMPONENTS, EVERY_OP)
        for op in lists["op"]:
            named = op in known or op.partition(".")[0] in DECLARATIONS
            expect(named, f"{where} op", f"an op of ggml, or one of {', '.join(known)}", op)
        kinds = tuple(map(str, Kind))
        for kind in lists["kind"]:
            expect(kind in kinds, f"{where} kind", f"one of {', '.join(kinds)}", kind)
        note = table.get("note", "")
        expect(isinstance(note, str), f"{where} note", "a text", note)
        conditions = [_alternatives(text, f"{where} condition") for text in lists["condition"]]
        narrow = bool(conditions) or EVERY_OP not in lists["op"]
        expect(narrow, f"{where} condition", f"a condition beside op {EVERY_OP!r}", conditions)
        return cls(tuple(lists["op"]), tuple(conditions), tuple(map(Kind, lists["kind"])), note)

    def shows(self, found: SharedCause, case: Callable[[str], Case] = build) -> bool:
        """Return True if a cause has the kind, the op and each condition.

        The kind is the verdict of its smallest case. In each of its cases, a node that meets its rule and has one of
        the ops must meet the conditions. Without a failing node, these are the nodes of the smallest case with the
        cause's op; if it has none either, the case must compute none but these ops.
        """
        cause, rule = found.cause, Rule(found.cause.conditions)
        if not any(cause.verdict in VERDICTS[kind] for kind in self.kinds):
            return False
        own: Mapping[str, Sequence[str]] = found.cases or {cause.backend: cause.cases}
        pairs = [(_options(backend), i) for backend, ids in own.items() for i in ids]
        if any(self._is_of(COMPONENTS[op], pairs, located=bool(rule.ops)) for op in self.ops if op in COMPONENTS):
            return True
        if not rule.ops:
            pairs = [p for p in pairs if p[1] == cause.smallest]
        first = "" if rule.ops or cause.message else cause.op  # grouped by message, it has the op of its case's id
        met = [m for backend, i in pairs if (m := self._met(rule, first, backend, i, case)) is not None]
        return bool(met) and all(met)

    def _is_of(self, component: Component, pairs: Sequence[tuple[Features, str]], *, located: bool) -> bool:
        """Return True if each failure is behind a component, or a case tests it.

        A failure that is `located` at a node is not a component's because a case tests it.
        """
        behind = all(component.is_behind(backend) for backend, _ in pairs)
        among = pairs if behind else [p for p in pairs if not located and component.tested_by(p[1])]
        return any(self._holds(backend) for backend, _ in among)

    def _met(self, rule: Rule, first: str, backend: Features, case_id: str, case: Callable[[str], Case]) -> bool | None:
        """Return True if nodes of a case meet the conditions; None if it has none of the ops.

        `first`: op of the first wrong node of a cause without failing node.
        """
        called = _CONSTRUCTOR.fullmatch(case_id)
        if is_live(case_id) and not called:
            return None
        of_case = [{of.OP: called[1]}] if called else _nodes(case_id, case)
        nodes = [{**backend, **f} for f in of_case if not rule.ops or rule.holds(f)]
        nodes = [f for f in nodes if not first or first in (f[of.OP], f[of.OP].partition(".")[0])]
        own = [f for f in nodes if self._names(f[of.OP])]
        if not own or (not rule.ops and len(own) < len(nodes)):
            return None
        return any(map(self._holds, own))

    def _names(self, op: str) -> bool:
        return any(name in (op, op.partition(".")[0], EVERY_OP) for name in self.ops)

    def _holds(self, found: Features) -> bool:
        return all(any(meets(c, found) for c in alternatives) for alternatives in self.conditions)


def _nodes(case_id: str, case: Callable[[str], Case]) -> Iterator[Features]:
    """Yield the properties of the nodes of a case; none if it cannot be built."""
    with suppress(ConformanceError):
        built = case(case_id)
        yield from (features(built, k, n) for k, _, n in nodes_of(built))


def _options(backend: str) -> Features:
    return dict(Spec.parse(backend).options)


def _words(value: object, where: str) -> list[str]:
    words = [v for v in value if isinstance(v, str) and v.strip()] if isinstance(value, list) else []
    whole = isinstance(value, list) and len(words) == len(value) and (bool(words) or where.endswith("condition"))
    expect(whole, where, "a list of texts", value)
    return words


def _alternatives(text: str, where: str) -> tuple[Condition, ...]:
    return tuple(_condition(part, where) for part in text.split(" or "))


def _condition(text: str, where: str) -> Condition:
    key, sign, value = _CONDITION.fullmatch(text).groups("")  # type: ignore[union-attr]  # any text matches
    expect(_is_known(key), where, "a property of a node, a parameter of an op or an option of a backend", key)
    comparable = sign in ("", "=") or not key.startswith((ANY, ANY_SOURCE))
    expect(comparable and (sign != ">" or value.isdigit()), where, "KEY, KEY = A|B, KEY != A or KEY > N", text)
    if not sign:
        return Condition(key, GIVEN if key.startswith("src[") and "." not in key else of.YES)
    values = value.split(ANY_OF)
    for v, known in ((v, _VALUES.get(key.rpartition(".")[2])) for v in values):
        expect(known is None or v in known, where, f"one of {', '.join(sorted(known or ()))}", v)
    if sign != "=":
        return Condition(key, f"{sign} {value}")
    return Condition(key, ANY_OF.join(_quantised() if v == QUANTISED else v for v in values))


def _quantised() -> str:
    return ANY_OF.join(t.name for t in TYPES.values() if t.blck_size > 1)


@cache
def _parameters() -> frozenset[str]:
    return frozenset(f.name for declared in DECLARATIONS.values() for f in declared.fields)


def _is_known(key: str) -> bool:
    operand = _OPERAND.fullmatch(key)
    if operand is not None:
        return operand[2] in _PROPERTIES
    return key in _OTHERS or key in _parameters() or bool(re.fullmatch(r"src\[\d\]", key))
