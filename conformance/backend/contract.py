"""`check_adapter` lists what an adapter lacks, in the order in which to fix it.

    def test_adapter():
        assert check_adapter(MyBackend) == []

It tries the adapter on tiny cases with read-only inputs. It checks only the interface (`interface.py`), not the
precision of results: the suite does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder, build_forward_expand
from conformance.ggml.tensor import FLAG_COMPUTE, Bytes, Tensor, new_tensor, packed_nbytes
from conformance.ggml.text import error_text
from conformance.ggml.types import F16, F32, Q8_0, GGMLType

from .interface import Backend, DeviceInfo, Session, Support, Witness, class_faults
from .registry import names
from .strict import kind

__all__ = ["CHECKS", "SHAPE", "Shape", "check_adapter"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes: weight [k, m], activations [k, n]; `k` is a multiple of 32, `m` at least 4."""

    k: int = 64
    m: int = 32
    n: int = 16


SHAPE = Shape()
"""Sizes that nearly every backend supports."""


def check_adapter(adapter: type[Backend], shape: Shape = SHAPE) -> list[str]:
    """Return violations of the interface, in the order in which to fix them.

    Args:
        adapter: the class; its constructor must work without arguments. The adapter is opened in this process.
        shape: of the matrices to try it on, for a device that supports few shapes only.
    """
    name = getattr(adapter, "__name__", repr(adapter))
    faults = list(class_faults(adapter, name))
    if faults:
        return faults
    try:
        subject = Subject(name, adapter(), shape)
    except Exception as e:  # noqa: BLE001  # whatever it raises is reported to its author
        must = "the constructor must work without arguments, and raise UnavailableError if the machine lacks"
        return [f"{name}() raised {error_text(e)}; {must} what it needs; check it on a machine that has it."]
    for check in CHECKS:
        before = len(faults)
        try:
            faults += check(subject)
        except Fault as fault:
            faults.append(str(fault))
        except Exception as e:  # noqa: BLE001  # as above
            faults.append(f"{name} raised {error_text(e)}; {' '.join((check.__doc__ or '').split())}")
        if len(faults) > before and check in _FOUNDATIONS:
            break
    return faults


# -- tiny cases --------------------------------------------------------------------------------------------------------

Values = NDArray[np.float32]
BUILD = Builder()


TOMORROW = "OP_OF_TOMORROW"
"""An op that ggml does not have."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An op over a weight `w` [k, m] and activations `x` [k, n]."""

    op: str
    make: Callable[[Tensor, Tensor], Tensor]
    """(w, x) -> the node."""
    value: Callable[[Values, Values], NDArray[Any]]
    """(w, x) as (m, k) and (n, k) -> the node's value."""
    weight: GGMLType = F32


SAMPLES: tuple[Sample, ...] = (
    Sample("ADD", lambda _, x: BUILD.add(x, x), lambda _, x: x + x),
    Sample("MUL", lambda _, x: BUILD.mul(x, x), lambda _, x: x * x),
    Sample("SCALE", lambda _, x: BUILD.scale(x, 2.0), lambda _, x: 2 * x),
    Sample("MUL_MAT", BUILD.mul_mat, lambda w, x: x @ w.T),
    Sample("MUL_MAT", BUILD.mul_mat, lambda w, x: x @ w.T, F16),
    Sample("MUL_MAT", BUILD.mul_mat, lambda w, x: x @ w.T, Q8_0),
    Sample("CONT", lambda _, x: BUILD.cont(x), lambda _, x: x),
    Sample("UNARY", lambda _, x: BUILD.neg(x), lambda _, x: -x),
    Sample(
        "RMS_NORM",
        lambda _, x: BUILD.rms_norm(x, 1e-6),
        lambda _, x: x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=np.float32) + np.float32(1e-6)),
    ),
)
"""Sample cases; most backends support at least one of them."""
TOLERANCE = 2e-2
"""Largest error relative to the largest value: a backend may round to F16 or 8 bits.

Layout bugs cause larger errors."""


def activations(shape: Shape, seed: int = 0) -> Values:
    """Return values (n, k) that F16 and Q8_0 represent closely; all rows and columns differ."""
    i = np.arange(shape.n * shape.k, dtype=np.int64).reshape(shape.n, shape.k)
    return (((i * 37 + seed * 11 + i // shape.k * 5) % 61 - 30) / 32).astype(np.float32)


def weights(shape: Shape) -> Values:
    """Return whole numbers (m, k) that Q8_0 represents exactly: 127 is in each block."""
    i = np.arange(shape.m * shape.k, dtype=np.int64).reshape(shape.m, shape.k)
    w = ((i * 29 + i // shape.k * 3) % 255 - 127).astype(np.float32)
    w[:, ::32] = 127
    return w


def encode(values: Values, type_: GGMLType) -> Bytes:
    """Encode `values` as read-only bytes of a leaf."""
    if type_ is Q8_0:
        blocks = np.zeros((*values.shape[:-1], values.shape[-1] // 32), [("d", "<f2"), ("qs", "i1", 32)])
        blocks["d"], blocks["qs"] = 1, values.reshape(*values.shape[:-1], -1, 32)
        return read_only(blocks)
    return read_only(values.astype(type_.dtype))


def read_only(values: NDArray[Any]) -> Bytes:
    """Return the bytes of `values`, read-only."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy()
    data.flags.writeable = False
    return data


@dataclass(frozen=True, slots=True)
class Trial:
    """A sample as a case."""

    sample: Sample
    shape: Shape
    case: Case
    weight: Tensor
    input: Tensor
    node: Tensor

    @property
    def step(self) -> Step:
        """The only step."""
        return self.case.steps[0]

    def expected(self, seed: int = 0) -> NDArray[Any]:
        """Return the node's value for `activations(seed)`."""
        return self.sample.value(weights(self.shape), activations(self.shape, seed))


def trial(sample: Sample, shape: Shape, wrap: Callable[[Tensor], Tensor] | None = None) -> Trial:
    """Make the case of a sample; `wrap` appends a node, which becomes the output."""
    w = new_tensor(sample.weight, shape.k, shape.m, name="w")
    x = new_tensor(F32, shape.k, shape.n, name="x")
    node = sample.make(w, x)
    out = wrap(node) if wrap else node
    step = Step(build_forward_expand(out), {x: encode(activations(shape), F32)}, (out,))
    # also a weight that the node does not read: `read` and `write` are checked on it
    persistent = {w: encode(weights(shape), sample.weight)}
    case = Case(f"contract/{sample.op}@1", persistent, [step], family="contract")
    return Trial(sample, shape, case, w, x, out)


def nodes_of_many_ops(shape: Shape) -> Sequence[Tensor]:
    """Return nodes of many ops, and one of an op that ggml does not have."""
    w, x = new_tensor(F32, shape.k, shape.m, name="w"), new_tensor(F32, shape.k, shape.n, name="x")
    nodes = [s.make(w, x) for s in SAMPLES if s.weight is F32]
    nodes += [f(x) for f in (BUILD.sqr, BUILD.silu, BUILD.swiglu, BUILD.sum_rows, BUILD.soft_max, BUILD.argmax)]
    nodes += [BUILD.transpose(x), BUILD.reshape_1d(x, shape.k * shape.n), BUILD.view_1d(w, shape.k, 0)]
    tomorrow = BUILD.cont(x)
    tomorrow.op = TOMORROW
    nodes.append(tomorrow)
    for node in nodes:
        node.name = f"a {node.op}"
    return nodes


# -- checks ------------------------------------------------------------------------------------------------------------


class Fault(Exception):  # noqa: N818  # a sentence for `check_adapter`
    """A fault after which a check cannot continue."""


@dataclass(slots=True)
class Subject:
    """An open adapter under check."""

    name: str
    backend: Backend
    shape: Shape

    def takes(self, case: Case) -> bool:
        """Return True if it supports every node of the only step, and the case."""
        return all(self.backend.supports(case.steps[0].graph)) and bool(self.backend.supports_case(case))

    def trials(self, wrap: Callable[[Tensor], Tensor] | None = None) -> Iterator[Trial]:
        """Yield the samples that it supports."""
        for sample in SAMPLES:
            one = trial(sample, self.shape, wrap)
            if self.takes(one.case):
                yield one

    def first(self, wrap: Callable[[Tensor], Tensor] | None = None) -> Iterator[Trial]:
        """Yield the first sample that it supports, if any."""
        return islice(self.trials(wrap), 1)

    def open(self, case: Case) -> Session:
        """Open a session; Fault if the adapter returns something else."""
        session = self.backend.open(case)
        if not isinstance(session, Session):
            raise Fault(f"{self.name}.open returned {kind(session)}; it must return a Session, with the case in it.")
        return session

    def run(self, session: Session, step: Step) -> list[Bytes]:
        """Return the packed bytes of the step's outputs; Fault if they have another format."""
        values: object = session.compute(step.graph, step.inputs, step.outputs)
        for out in step.outputs:
            if not isinstance(values, Mapping) or out not in values:
                raise Fault(
                    f"{self.name}: compute did not give the output {out}; it must return a mapping with the bytes of "
                    "every tensor of `outputs`."
                )
            data, size = values[out], packed_nbytes(out)
            if not is_bytes(data) or data.size != size:
                raise Fault(
                    f"{self.name}: compute gave {kind(data)} for {out}; outputs must be packed: a one-dimensional "
                    f"uint8 array of {size} bytes."
                )
        return [values[out] for out in step.outputs]  # type: ignore[index]  # a mapping


def wrong(s: Subject, data: Bytes, node: Tensor, want: NDArray[Any]) -> Iterator[str]:
    """Yield a sentence if `data` is not the packed float32 of `want`."""
    expected: Values = np.ascontiguousarray(want, np.float32).reshape(-1)
    values = data.view(np.float32)
    right = np.abs(values - expected) <= TOLERANCE * np.abs(expected).max()  # False for NaN
    if not right.all():
        at = int(np.argmin(right))
        yield f"{s.name}: compute of {node} gave {values[at]:.4g} as element {at}; it must be {expected[at]:.4g}."


def is_bytes(data: object) -> TypeGuard[Bytes]:
    """Return True if it is a one-dimensional uint8 array."""
    return isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1


def info(s: Subject) -> Iterator[str]:
    """`info` must report what executes."""
    info = s.backend.info()
    if not isinstance(info, DeviceInfo):
        raise Fault(f"{s.name}.info returned {kind(info)}; it must return a DeviceInfo.")
    for field in ("backend", "device", "description"):
        value = getattr(info, field)
        if not (isinstance(value, str) and value):
            yield f"{s.name}.info has {value!r} as `{field}`; it must be a text that says what really executes."
    if not all(isinstance(x, str) for pair in info.versions.items() for x in pair):
        yield f"{s.name}.info has {dict(info.versions)!r} as `versions`; it must map names of libraries to texts."


def delegates(s: Subject) -> Iterator[str]:
    """Each of `delegates` must name an adapter."""
    for name in s.backend.delegates:
        if name not in names():
            yield f"{s.name} has {name!r} in `delegates`; it must name adapters: {', '.join(names())}."


def supports_op(s: Subject) -> Iterator[str]:
    """`supports_op` must answer for every op."""
    sentences = filter(None, (_answer_fault(s, node) for node in nodes_of_many_ops(s.shape)))
    yield from (f"{s.name}.supports_op {sentence}" for sentence in islice(sentences, 1))


def supports_each(s: Subject) -> Iterator[str]:
    """`supports` must answer for each node as `supports_op` does, independent of other nodes."""
    nodes = nodes_of_many_ops(s.shape)
    alone = map(s.backend.supports_op, nodes)
    other = (n for n, a, b in zip(nodes, s.backend.supports(Graph(nodes)), alone, strict=True) if a.ok is not b.ok)
    yield from (
        f"{s.name}.supports and supports_op differ on {n} among other nodes; it must judge by the node "
        "alone, and `supports_case` by the case."
        for n in islice(other, 1)
    )


def _answer_fault(s: Subject, node: Tensor) -> str:
    try:
        answer: object = s.backend.supports_op(node)
        again = s.backend.supports_op(node)
    except Exception as e:  # noqa: BLE001  # the adapter's own bug
        return f"raised {error_text(e)} for {node}; it must say no, with the reason, and never raise."
    if not isinstance(answer, Support):
        return f"returned {kind(answer)} for {node}; it must return YES or no('the reason')."
    if not answer and not answer.reason:
        return f"refuses {node} without a reason; return no('the reason')."
    if answer.ok is not again.ok:
        return f"answered {node} differently when it was asked again; it must judge by the node alone."
    if answer and node.op == TOMORROW:
        return f"accepts {node}, an op that does not exist; accept by name only ops for which it has kernels."
    return ""


def supports_something(s: Subject) -> Iterator[str]:
    """`supports` must answer for a graph, and `supports_case` for a case."""
    if not list(s.first()):
        answers = (a for x in SAMPLES for a in s.backend.supports(trial(x, s.shape).step.graph))
        reasons = dict.fromkeys(a.reason for a in answers if not a)
        ops = ", ".join(dict.fromkeys(x.op for x in SAMPLES))
        yield (
            f"{s.name} supports none of {ops} on small F32 matrices, so nothing can be computed; it says: "
            f"{'; '.join(reasons) or 'no to the whole case'}."
        )


PATHS = ("eager", "translated", "cached", "interpreted")
"""Values of `Witness.path`."""


def opens(s: Subject) -> Iterator[str]:
    """`open` must return a session that reads the persistent tensors, and not change the case."""
    for one in s.trials():
        with s.open(one.case) as session:
            opaque = session.opaque()
            if one.weight in opaque:
                continue
            if fault := _held(s, session, one.weight, one.case.persistent[one.weight], "after open"):
                yield fault
                return


def writes_and_reads(s: Subject) -> Iterator[str]:
    """`write` and `read` must set and give the bytes of a persistent tensor."""
    for one in s.first():
        with s.open(one.case) as session:
            if one.weight in session.opaque():
                return
            new = encode(weights(s.shape)[::-1], one.sample.weight)
            given = new.copy()
            session.write(one.weight, given)
            fault = _held(s, session, one.weight, new, "after write")
            given[:] = 0
            again = "after the caller reused the array it passed to write"
            fault = fault or _held(s, session, one.weight, new, again)
            if fault:
                yield fault
                return
            taken = session.read(one.weight)
            if taken.flags.writeable:
                taken[:] = 0
            if not np.array_equal(session.read(one.weight), new):
                what = "writing into the array that `read` returned changed the session"
                yield f"{s.name}: {what}; it must return a copy."


def _held(s: Subject, session: Session, tensor: Tensor, want: Bytes, when: str) -> str:
    data = session.read(tensor)
    if not is_bytes(data) or data.size != want.size:
        return (
            f"{s.name}: read of {tensor} gave {kind(data)}; it must give a one-dimensional uint8 array of "
            f"{want.size} bytes."
        )
    if not np.array_equal(data, want):
        at = int(np.argmax(data != want))
        return f"{s.name}: read of {tensor} {when} differs from what was written at byte {at}; it must be exact."
    return ""


def computes(s: Subject) -> Iterator[str]:
    """`compute` must run one node; the arrays of `inputs` and of the case are read-only."""
    for one in s.trials():
        with s.open(one.case) as session:
            yield from wrong(s, s.run(session, one.step)[0], one.node, one.expected())


def computes_again(s: Subject) -> Iterator[str]:
    """`compute` must run again in the same session with other inputs."""
    for one in s.first():
        with s.open(one.case) as session:
            (first,) = s.run(session, one.step)
            before = first.copy()
            inputs = {one.input: encode(activations(s.shape, 7), F32)}
            (second,) = s.run(session, replace(one.step, inputs=inputs))
            if not np.array_equal(first, before):
                yield f"{s.name}: a second compute changed the output of the first; each output must be a new array."
            for sentence in wrong(s, second, one.node, one.expected(7)):
                yield f"In the second compute of a session: {sentence}"


def packs(s: Subject) -> Iterator[str]:
    """`compute` must return a transposed output that it supports."""
    for one in s.first(BUILD.transpose):
        with s.open(one.case) as session:
            for sentence in wrong(s, s.run(session, one.step)[0], one.node, one.expected().T):
                yield f"{sentence[:-1]}, packed from its strides."


def _cache_case(shape: Shape, *, compute: bool = True) -> tuple[Case, Tensor, Tensor]:
    """Return a case that writes row 2 of a cache of 4 rows from an input; the cache; the node."""
    cache, x = new_tensor(F32, shape.k, 4, name="cache"), new_tensor(F32, shape.k, name="x")
    node = BUILD.cpy(x, BUILD.view_1d(cache, shape.k, 2 * cache.nb[1]))
    graph = build_forward_expand(node)
    if not compute:
        node.flags &= ~FLAG_COMPUTE
    row = encode(activations(shape)[:1], F32)
    case = Case("contract/cache@1", {cache: read_only(weights(shape)[:4])}, [Step(graph, {x: row}, (node,))])
    return case, cache, node


def writes_caches(s: Subject) -> Iterator[str]:
    """`compute` must write into a cache through a view if it supports that."""
    for compute in (True, False):
        case, cache, node = _cache_case(s.shape, compute=compute)
        step = case.steps[0]
        if not s.takes(case):
            continue
        before = weights(s.shape)[:4]
        want = before.copy()
        if compute:
            want[2] = activations(s.shape)[0]
        with s.open(case) as session:
            session.compute(step.graph, step.inputs, (node,) if compute else ())
            if cache in session.opaque():
                continue
            after = session.read(cache).view(np.float32).reshape(want.shape)
        if np.array_equal(after, want):
            continue
        if not compute:
            what = "a CPY without FLAG_COMPUTE wrote into its cache; nodes without that flag must not be computed"
        elif np.array_equal(after, before):
            what = "CPY into a view of a cache left it as it was; it must write into the bytes of the view's root"
        else:
            what = "CPY into row 2 of a cache wrote other bytes or other values; it must write that row only"
        yield f"{s.name}: {what}."


def holds_outputs(s: Subject) -> Iterator[str]:
    """`compute` must run a node in place if it supports that."""
    x = new_tensor(F32, s.shape.k, s.shape.n, name="x")
    before = BUILD.add(x, x)
    after = BUILD.mul_inplace(before, x)
    step = Step(build_forward_expand(after), {x: encode(activations(s.shape), F32)}, (before, after))
    case = Case("contract/in_time@1", {}, [step])
    if not s.takes(case):
        return
    with s.open(case) as session:
        value = activations(s.shape)
        wants = (value + value, (value + value) * value)
        for data, node, want in zip(s.run(session, step), step.outputs, wants, strict=True):
            for sentence in wrong(s, data, node, want):
                yield f"{sentence[:-1]}, as it was right after its node ran: a later node overwrites it."


def keeps_sessions_separate(s: Subject) -> Iterator[str]:
    """Two sessions must be open at the same time."""
    for one in s.first():
        first, second = s.open(one.case), s.open(one.case)
        with first, second:
            if one.weight in first.opaque():
                return
            first.write(one.weight, np.zeros_like(one.case.persistent[one.weight]))
            if not np.array_equal(second.read(one.weight), one.case.persistent[one.weight]):
                yield f"{s.name}: a write in one session changed another; each session must hold memory of its own."


def witnesses(s: Subject) -> Iterator[str]:
    """`witness` must report what ran."""
    for one in s.first():
        with s.open(one.case) as session:
            s.run(session, one.step)
            witness = session.witness()
            if not isinstance(witness, Witness):
                raise Fault(f"{s.name}: witness returned {kind(witness)}; it must return a Witness.")
            if not witness.device:
                yield f"{s.name}: the witness names no device; it must say what executed."
            if witness.path not in PATHS:
                yield f"{s.name}: the witness has {witness.path!r} as `path`; it must be one of {', '.join(PATHS)}."
            if witness.nodes != 1:
                what = f"the witness counts {witness.nodes} nodes after one was computed"
                yield f"{s.name}: {what}; it must count each once."


def closes(s: Subject) -> Iterator[str]:
    """Sessions and the backend must close."""
    for one in s.first():
        s.open(one.case).close()
        with s.open(one.case) as session:
            for sentence in wrong(s, s.run(session, one.step)[0], one.node, one.expected()):
                yield f"After a session was closed and another opened: {sentence}"
    s.backend.close()


Check = Callable[[Subject], Iterator[str]]

CHECKS: tuple[Check, ...] = (
    info,
    delegates,
    supports_op,
    supports_each,
    supports_something,
    opens,
    writes_and_reads,
    computes,
    computes_again,
    packs,
    writes_caches,
    holds_outputs,
    keeps_sessions_separate,
    witnesses,
    closes,
)
"""Checks in the order in which an author meets them; each docstring is the requirement."""
_FOUNDATIONS = frozenset({info, supports_op, supports_something, opens, computes})
"""Checks whose faults make later checks redundant."""
