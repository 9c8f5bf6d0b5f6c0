"""What a session must do: the checks of `contract.py` that open one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.case.case import Case, Step
from conformance.ggml.ops.build import build_forward_expand
from conformance.ggml.tensor import FLAG_COMPUTE, Bytes, Tensor, new_tensor
from conformance.ggml.types import F32

from .contract_base import Fault, Subject, is_bytes, wrong
from .interface import Session, Witness
from .samples import BUILD, Shape, activations, encoded, read_only, weights
from .strict import kind

PATHS = ("eager", "translated", "cached", "interpreted")
"""What `Witness.path` may be."""


def opens(s: Subject) -> Iterator[str]:
    """`open` must give a session whose `read` shows the case's persistent tensors, and leave the case as it is."""
    for one in s.samples():
        with s.open(one.case) as session:
            opaque = session.opaque()
            if one.weight in opaque:
                continue
            if (fault := _held(s, session, one.weight, one.case.persistent[one.weight], "after open")) is not None:
                yield fault
                return


def writes_and_reads(s: Subject) -> Iterator[str]:
    """`write` and `read` must set and give the bytes of a persistent tensor."""
    one = s.first()
    if one is None:
        return
    with s.open(one.case) as session:
        if one.weight in session.opaque():
            return
        new = encoded(weights(s.shape)[::-1], one.sample.weight)
        given = new.copy()
        session.write(one.weight, given)
        fault = _held(s, session, one.weight, new, "after write")
        if fault is None:
            given[:] = 0
            fault = _held(s, session, one.weight, new, "after the caller used again the array that it gave to write")
        if fault is not None:
            yield fault
            return
        taken = session.read(one.weight)
        if taken.flags.writeable:
            taken[:] = 0
        if not np.array_equal(session.read(one.weight), new):
            yield f"{s.name}: writing into the array that `read` returned changed the session; it must return a copy."


def _held(s: Subject, session: Session, tensor: Tensor, want: Bytes, when: str) -> str | None:
    data = session.read(tensor)
    if not is_bytes(data) or data.size != want.size:
        return (
            f"{s.name}: read of {tensor} gave {kind(data)}; it must give a one-dimensional uint8 array of "
            f"{want.size} bytes."
        )
    if not np.array_equal(data, want):
        at = int(np.argmax(data != want))
        return f"{s.name}: read of {tensor} {when} differs from what was written at byte {at}; it must be exact."
    return None


def computes(s: Subject) -> Iterator[str]:
    """`compute` must run a graph of one node; the arrays of `inputs` and of the case are read-only."""
    for one in s.samples():
        with s.open(one.case) as session:
            inputs = one.case.steps[0].inputs
            yield from wrong(s, s.compute(session, one.graph, inputs, one.node), one.node, one.expected())


def computes_again(s: Subject) -> Iterator[str]:
    """`compute` must run again in the same session, on other inputs."""
    one = s.first()
    if one is None:
        return
    with s.open(one.case) as session:
        first = s.compute(session, one.graph, one.case.steps[0].inputs, one.node)
        kept = first.copy()
        inputs = {one.input: encoded(activations(s.shape, 7), F32)}
        second = s.compute(session, one.graph, inputs, one.node)
        if not np.array_equal(first, kept):
            yield f"{s.name}: a second compute changed the output of the first; an output is the caller's own."
        for sentence in wrong(s, second, one.node, one.expected(7)):
            yield f"In the second compute of a session: {sentence}"


def packs(s: Subject) -> Iterator[str]:
    """`compute` must give a transposed output that it supports."""
    one = s.first(BUILD.transpose)
    if one is None:
        return
    with s.open(one.case) as session:
        data = s.compute(session, one.graph, one.case.steps[0].inputs, one.node)
        for sentence in wrong(s, data, one.node, one.expected().T):
            yield f"{sentence[:-1]}, packed from its strides."


def _cache_case(shape: Shape, *, compute: bool = True) -> tuple[Case, Tensor, Tensor]:
    """A cache of 4 rows, the third of which is written from an input; the cache and the node that writes."""
    cache, x = new_tensor(F32, shape.k, 4, name="cache"), new_tensor(F32, shape.k, name="x")
    node = BUILD.cpy(x, BUILD.view_1d(cache, shape.k, 2 * cache.nb[1]))
    graph = build_forward_expand(node)
    if not compute:
        node.flags &= ~FLAG_COMPUTE
    row = encoded(activations(shape)[:1], F32)
    return (
        Case("contract/cache@1", {cache: read_only(weights(shape)[:4])}, [Step(graph, {x: row}, (node,))]),
        cache,
        node,
    )


def writes_caches(s: Subject) -> Iterator[str]:
    """`compute` must write into a cache through a view, as it says it can."""
    for compute in (True, False):
        case, cache, node = _cache_case(s.shape, compute=compute)
        step = case.steps[0]
        if not s.takes(step.graph) or not s.backend.supports_case(case):
            continue
        before = weights(s.shape)[:4]
        want = before.copy()
        if compute:
            want[2] = activations(s.shape)[0]
        with s.open(case) as session:
            session.compute(step.graph, step.inputs, (node,) if compute else ())
            if cache in session.opaque():
                continue
            found = session.read(cache).view(np.float32).reshape(want.shape)
        if np.array_equal(found, want):
            continue
        if not compute:
            what = "a CPY without FLAG_COMPUTE wrote into its cache; nodes without that flag must not be computed"
        elif np.array_equal(found, before):
            what = "CPY into a view of a cache left it as it was; it must write into the bytes of the view's root"
        else:
            what = "CPY into row 2 of a cache wrote other bytes or other values; it must write that row, and it only"
        yield f"{s.name}: {what}."


def holds_outputs(s: Subject) -> Iterator[str]:
    """`compute` must run a node in place, as it says it can."""
    x = new_tensor(F32, s.shape.k, s.shape.n, name="x")
    before = BUILD.add(x, x)
    after = BUILD.mul_inplace(before, x)
    case = Case(
        "contract/in_time@1",
        {},
        [Step(build_forward_expand(after), {x: encoded(activations(s.shape), F32)}, (before, after))],
    )
    step = case.steps[0]
    if not s.takes(step.graph) or not s.backend.supports_case(case):
        return
    with s.open(case) as session:
        found = session.compute(step.graph, step.inputs, step.outputs)
        value = activations(s.shape)
        for node, want in ((before, value + value), (after, (value + value) * value)):
            for sentence in wrong(s, found[node], node, want):
                yield f"{sentence[:-1]}, which its node held right after it ran: a later one writes over it."


def keeps_apart(s: Subject) -> Iterator[str]:
    """Two sessions must be open at a time."""
    one = s.first()
    if one is None:
        return
    first, second = s.open(one.case), s.open(one.case)
    with first, second:
        if one.weight in first.opaque():
            return
        first.write(one.weight, np.zeros_like(one.case.persistent[one.weight]))
        if not np.array_equal(second.read(one.weight), one.case.persistent[one.weight]):
            yield f"{s.name}: a write in one session changed another; each session must hold memory of its own."


def witnesses(s: Subject) -> Iterator[str]:
    """`witness` must tell what ran."""
    one = s.first()
    if one is None:
        return
    with s.open(one.case) as session:
        s.compute(session, one.graph, one.case.steps[0].inputs, one.node)
        witness = session.witness()
        if not isinstance(witness, Witness):
            raise Fault(f"{s.name}: witness returned {kind(witness)}; it must return a Witness.")
        if not witness.device:
            yield f"{s.name}: the witness names no device; it must say what executed."
        if witness.path not in PATHS:
            yield f"{s.name}: the witness has {witness.path!r} as `path`; it must be one of {', '.join(PATHS)}."
        if witness.nodes != 1:
            yield f"{s.name}: the witness counts {witness.nodes} nodes after one was computed; it must count each once."


def closes(s: Subject) -> Iterator[str]:
    """Sessions and the backend must close."""
    one = s.first()
    if one is None:
        return
    s.open(one.case).close()
    with s.open(one.case) as session:
        inputs = one.case.steps[0].inputs
        for sentence in wrong(s, s.compute(session, one.graph, inputs, one.node), one.node, one.expected()):
            yield f"After a session was closed and another opened: {sentence}"
    s.backend.close()


CHECKS = (
    opens,
    writes_and_reads,
    computes,
    computes_again,
    packs,
    writes_caches,
    holds_outputs,
    keeps_apart,
    witnesses,
    closes,
)
"""In the order in which an author meets them; the docstring of each is what it asks for."""
