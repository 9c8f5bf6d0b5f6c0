"""`check_adapter`: what an adapter still lacks, told to its author in order, each line a full sentence.

    def test_adapter():
        assert check_adapter(MyBackend) == []

It tries the adapter on tiny graphs over inputs that nobody may write to. Whether its numbers are good is the suite's
question; here only the interface is (`interface.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conformance.ggml.tensor import Tensor

from . import contract_sessions as sessions
from .contract_base import Fault, Subject
from .faults import class_faults
from .interface import Backend, DeviceInfo, Support
from .samples import SAMPLES, TOMORROW, Shape, nodes_of_many_ops, tried
from .strict import kind, said

__all__ = ["SHAPE", "Shape", "check_adapter"]

SHAPE = Shape()
"""What nearly every backend takes."""


def check_adapter(adapter: type[Backend], shape: Shape = SHAPE) -> list[str]:
    """What `adapter` does not hold of the interface, in the order in which to mend it; empty where it holds all.

    Args:
        adapter: the class, whose constructor takes no argument that has no default. It is opened in this process.
        shape: of the matrices to try it on, for a device that takes few shapes only.
    """
    name = getattr(adapter, "__name__", repr(adapter))
    found = list(class_faults(adapter, name))
    if found:
        return found
    try:
        subject = Subject(name, adapter(), shape)
    except Exception as e:  # noqa: BLE001  # whatever it raises is the author's to read
        sentence = (
            f"{name}() raised {said(e)}; the constructor must do without arguments, and raise UnavailableError where "
            "the machine lacks what it needs: then check it where it has that."
        )
        return [sentence]
    for check in CHECKS:
        before = len(found)
        try:
            found += check(subject)
        except Fault as fault:
            found.append(str(fault))
        except Exception as e:  # noqa: BLE001  # as above
            found.append(f"{name} raised {said(e)}; {' '.join((check.__doc__ or '').split())}")
        if len(found) > before and check in _FOUNDATIONS:
            return found
    return found


def _info(s: Subject) -> Iterator[str]:
    """`info` must say what executes."""
    info = s.backend.info()
    if not isinstance(info, DeviceInfo):
        raise Fault(f"{s.name}.info returned {kind(info)}; it must return a DeviceInfo.")
    for field in ("backend", "device", "description"):
        value = getattr(info, field)
        if not (isinstance(value, str) and value):
            yield f"{s.name}.info has {value!r} as `{field}`; it must be a text that says what really executes."
    if not all(isinstance(x, str) for pair in info.versions.items() for x in pair):
        yield f"{s.name}.info has {dict(info.versions)!r} as `versions`; it must map names of libraries to texts."


def _supports_op(s: Subject) -> Iterator[str]:
    """`supports_op` must answer for every op."""
    for node in nodes_of_many_ops(s.shape):
        sentence = _answer_fault(s, node)
        if sentence:
            yield f"{s.name}.supports_op {sentence}"
            return


def _answer_fault(s: Subject, node: Tensor) -> str:
    try:
        answer: object = s.backend.supports_op(node)
        again = s.backend.supports_op(node)
    except Exception as e:  # noqa: BLE001  # an adapter's own fault
        return f"raised {said(e)} for {node}; it must say no, with the reason, and never raise."
    if not isinstance(answer, Support):
        return f"returned {kind(answer)} for {node}; it must return YES or no('the reason')."
    if not answer and not answer.reason:
        return f"refuses {node} without a reason; say no('…') with what it would take."
    if answer.ok is not again.ok:
        return f"answered {node} differently when it was asked again; it must judge by the node alone."
    if answer and node.op == TOMORROW:
        return f"accepts {node}, an op that does not exist; accept by name what it has kernels for."
    return ""


def _something(s: Subject) -> Iterator[str]:
    """`supports` must answer for a graph, and `supports_case` for a case."""
    if s.first() is None:
        reasons = dict.fromkeys(a.reason for x in SAMPLES for a in s.backend.supports(tried(x, s.shape).graph) if not a)
        ops = ", ".join(dict.fromkeys(x.op for x in SAMPLES))
        yield (
            f"{s.name} supports none of {ops} on small F32 matrices, so nothing can be computed; it says: "
            f"{'; '.join(reasons) or 'no to the whole case'}."
        )


Check = Callable[[Subject], Iterator[str]]

CHECKS: tuple[Check, ...] = (_info, _supports_op, _something, *sessions.CHECKS)
"""In the order in which an author meets them; the docstring of each is what it asks for."""
_FOUNDATIONS = frozenset({_info, _supports_op, _something, sessions.opens, sessions.computes})
"""Where one of these finds a fault, what comes after it would only repeat it."""
