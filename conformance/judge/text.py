"""Text of a result for people; nothing parses it, as decisions use the typed evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .evidence import Endpoint, Error, Fault, Numbers, Place

STALE = {
    Fault.STALE: "right alone on a fresh backend, wrong after earlier steps: stale state (compiled graph, its key, "
    "cache, log), not a kernel",
    Fault.EARLIER: "right on a fresh backend: stale state of earlier cases, or nondeterminism",
}


def explain(where: Place | None, error: Error | None, notes: Sequence[str]) -> str:
    """Explain a result: the backend's failure or wrong numbers, the notes, and any stale state.

    Empty if there is nothing to explain.
    """
    return "; ".join(filter(None, _parts(where, error, notes)))


def _parts(where: Place | None, error: Error | None, notes: Sequence[str]) -> Iterator[str]:
    if error is not None:
        yield error.message
        if where is not None:
            yield _failed_at(where, error)
    elif where is not None and where.numbers is not None:
        yield diverges(where, where.numbers)
    yield from notes
    if error is None and where is not None:
        yield STALE.get(where.fault, "")
        if where.source is not None and where.target is not None:
            yield _handover(where, where.source, where.target)


def diverges(where: Place, numbers: Numbers) -> str:
    """Describe the error of a tensor, with its step if the case has several."""
    what = "cache" if where.op == "NONE" else where.op
    special = f", {numbers.special} NaN/Inf out of place" if numbers.special else ""
    found = f"{numbers.expected:.9g} expected, {numbers.found:.9g} found (NMSE {numbers.nmse:.2g}{special})"
    budget = f"budget {numbers.budget:.2g}" if numbers.budget else "bit-exact required"
    by = f" by {numbers.profile}" if numbers.profile else ""
    name = " ".join(filter(None, (what, where.name, where.tensor)))
    return f"{_at(where)}{name} diverges at {list(numbers.index)}: {found}, {budget}{by}"


def _at(where: Place) -> str:
    return f"step {where.step}: " if where.step is not None and (where.step or where.steps > 1) else ""


def _failed_at(where: Place, error: Error) -> str:
    if error.side:
        return ": ".join(filter(None, (f"it threw in {error.side}, step {where.step}", STALE.get(where.fault))))
    how = STALE.get(where.fault, "")
    if where.tensor:
        how = f"{where.tensor} fails {'by itself' if where.fault is Fault.NODE else 'behind the nodes before it'}"
    at = _at(where) if where.tensor or where.step else ""
    return f"where: {at}{how}".removesuffix(": ") if at or how else ""


def _handover(where: Place, source: Endpoint, target: Endpoint) -> str:
    return (
        f"{where.name or where.op} {where.tensor} left by {_end(source)} reaches {_end(target)} with other bytes: "
        "the copy between devices is wrong, not a kernel"
    )


def _end(end: Endpoint) -> str:
    return f"split {end.split} on {end.device} (step {end.step})" if end.device else "the host"
