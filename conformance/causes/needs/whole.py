"""What a failure of no single node may depend on: what the smallest case still has of steps, streams and caches."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from conformance.case.case import Case
from conformance.causes.cause import Condition
from conformance.causes.features import OUTPUT, PART, features, nodes_of, root_of
from conformance.causes.form import TYPE, Form
from conformance.ggml.tensor import VIEW_OPS, Tensor, nelements
from conformance.judge.verdict import Verdict
from conformance.run.shrink.simplify import rank
from conformance.suite.relations import claim

NODES, STEPS, STREAMS, READS = "nodes", "steps", "streams", "a node reads"
AN_OUTPUT, VIEW_OF_LEAF = "an output", "a view of a leaf"
ATTENTION = frozenset({"FLASH_ATTN_EXT", "SOFT_MAX"})
"""Ops whose last dimension counts streams: sequences that keep K and V apart."""
FEW = 4
"""Nodes up to which what is left is named by its ops."""
LONG = 5
"""Words from which on one may differ."""
SURE = 100
"""Letters from which on what one error says more is what the other was cut off."""
_NAME = re.compile("'[^']*'")
_NODE = re.compile("node '[^']*' ")


def whole_form(case: Case) -> Form:
    """The form of a case that is as small as can be, and in which no single node fails."""
    return Form(tuple(_conditions(case)))


def of_relation(case: Case) -> Form:
    """The form of a relation each of whose runs is right by itself."""
    return Form((Condition(claim.KEY, relation_of(case)),))


def relation_of(case: Case) -> str:
    """The relation of a case; empty for none."""
    return claim.read(case).name if claim.applies(case) else ""


def may_be_of_relation(form: Form, case: Case) -> bool:
    """Whether `case` is of the relation that a form is about, if it is about one: each does something else."""
    return not only_of_relation(form) or (claim.applies(case) and form == of_relation(case))


def only_of_relation(form: Form) -> bool:
    """Whether it says no more than which relation failed."""
    return {c.key for c in form.conditions} == {claim.KEY}


def _conditions(case: Case) -> Iterator[Condition]:
    nodes = [n for _, _, n in nodes_of(case)]
    if len(nodes) <= FEW:
        yield Condition(NODES, ", ".join(n.op for n in nodes))
    if len(case.steps) > 1:
        yield Condition(STEPS, "> 1")
    if any(s is not None and s.ne[3] > 1 for n in nodes if n.op in ATTENTION for s in n.src):
        yield Condition(STREAMS, "> 1")
    views = [(k, n) for k, s in enumerate(case.steps) for n in s.graph if n.op in VIEW_OPS]
    if any(root_of(case, k, n) == "a cache" and nelements(n) < nelements(n.root) for k, n in views):
        yield Condition(READS, f"{PART}a cache")
    for value in sorted({v for k, s in enumerate(case.steps) for t in s.outputs for v in _outputs(case, k, t)}):
        yield Condition(AN_OUTPUT, value)
    for name in sorted({t.type.name for t in case.persistent if rank(t.type) > 1}):
        yield Condition(TYPE, name)


def _outputs(case: Case, k: int, t: Tensor) -> Iterator[str]:
    """What an output of step `k` is beside a result that nobody reads."""
    nodes = case.steps[k].graph.nodes
    if t.root not in nodes:
        if t.op in VIEW_OPS:
            yield VIEW_OF_LEAF
    elif (value := features(case, k, t.root).get(OUTPUT)) is not None:
        yield value


def shared_by(form: Form, cases: Sequence[Case]) -> Form:
    """What `form` says that is true of every case: another may fail alike without the rest."""
    return Form(tuple(c for c in form.conditions if all(_true(c, case) for case in cases)))


def _true(condition: Condition, case: Case) -> bool:
    if condition.key == claim.KEY:
        return claim.applies(case) and claim.read(case).name == condition.value
    if condition.key == NODES:
        return set(condition.value.split(", ")) <= {n.op for _, _, n in nodes_of(case)}
    return condition in set(_conditions(case))


def tells_apart(shared: Collection[Condition]) -> bool:
    """Whether what two smallest cases share is more than that several steps grow a cache, as most cases do."""
    return any(c.key in {NODES, STREAMS, TYPE, AN_OUTPUT} for c in shared)


def said_alike(a: tuple[str, str], b: tuple[str, str], *, named: bool = False) -> bool:
    """Whether two errors say the same of two ops: but for one word, or, where `named`, for names, as far as both go."""
    if a[0] != b[0] or a[0] == Verdict.FAIL:
        return False
    if named:
        said = sorted((" ".join(_NAME.sub("", kind[1]).split()) for kind in (a, b)), key=len)
        return said[0] == said[1] or (len(said[0]) >= SURE and said[1].startswith(said[0]))
    return _but_for_a_word(a[1].split(), b[1].split())


def of_one_place(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether two errors may be of one place of a translation: a node that is called as a tensor and one that is called
    as none are not.
    """
    return bool(_NODE.search(a[1])) == bool(_NODE.search(b[1]))


def differ_in_op(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether two errors say the same but for an op, and what its node is called: one check, at whatever op."""
    if a[0] != b[0] or a[0] == Verdict.FAIL:
        return False
    x, y = (_whole_words(_NODE.sub("node ", kind[1])) for kind in (a, b))
    return x != y and _but_for_a_word(x, y)


def _whole_words(said: str) -> list[str]:
    """The words of a message, but for the last of one that may have been cut off in it."""
    words = said.split()
    return words[:-1] if len(said) >= SURE else words


def _but_for_a_word(x: Sequence[str], y: Sequence[str]) -> bool:
    """Whether two errors say the same but for one word, and enough."""
    return len(x) == len(y) >= LONG and len({(v, w) for v, w in zip(x, y, strict=True) if v != w}) <= 1


def begin_alike(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether two errors begin with the same words, such as what a translation was at, and end otherwise."""
    x, y = a[1].split(), b[1].split()
    return a[0] == b[0] != Verdict.FAIL and len(x) > LONG and len(y) > LONG and x[:LONG] == y[:LONG]
