"""Save failing cases as files, with their results for `conform repro` to compare."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from conformance.case import casefile
from conformance.case.case import JSON, Case
from conformance.ggml.tensor import Tensor, layout
from conformance.ggml.text import printable
from conformance.judge.evidence import Fault
from conformance.judge.verdict import FAILURES, Result

from .environment import environment

RECORD = "seen"
"""Key of the result in a case's provenance."""
_STEM = 94
"""Maximum characters of a file name without suffix."""
NUMBERS = ("budget_used", "nmse")
CLOSE = 1e-6
"""Maximum relative difference of numbers that count as equal."""

LONGEST = 300
"""Maximum characters of a file's text in a line."""
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
"""Names that Windows reserves for devices, with any text after the first dot."""


def save(folder: Path, case: Case, result: Result) -> str:
    """Write a failing case with its result; return the path; CaseFileError if not writable."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(f"{case.id}_{result.backend}")
    casefile.write(path, [with_result(case, result)])
    return str(path)


def file_name(stem: str) -> str:
    """Return a safe file name of at most 99 characters, with a digest if `stem` was changed."""
    name = re.sub(r"[^A-Za-z0-9_.=@-]+", "_", stem)
    if _DEVICE.fullmatch(name):
        name = f"_{name}"
    if len(name) > _STEM or not re.fullmatch(r"[A-Za-z0-9_.=@/+,?&-]*", stem):
        digest = sha256(stem.encode(errors="surrogatepass")).hexdigest()[:8]
        half = (_STEM - 10) // 2
        name = f"{name}-{digest}" if len(name) <= _STEM - 9 else f"{name[:half]}-{digest}-{name[-half:]}"
    return f"{name}.gguf"


def with_result(case: Case, result: Result) -> Case:
    """Return `case` with `result` and the environment in its provenance."""
    whole = result.to_json()
    fields = ("backend", "verdict", *NUMBERS, "where", "error", "notes", "detail")
    record = {k: whole[k] for k in fields} | {"environment": environment()}
    return replace(case, provenance={**case.provenance, RECORD: record})


def record_of(case: Case) -> dict[str, JSON] | None:
    """Return the result in a saved case; None if it has none."""
    record = case.provenance.get(RECORD)
    return record if isinstance(record, dict) and isinstance(record.get("backend"), str) else None


def differences(record: dict[str, JSON], result: Result) -> list[str]:
    """Describe differences from the saved result: verdict, numbers, first divergence."""
    now = result.to_json()
    found = [_differs("verdict", record.get("verdict"), now["verdict"])]
    found += [_differs(k, record.get(k), now[k]) for k in NUMBERS if not _close(record.get(k), now[k])]
    was, here = _place(record), _place(now)
    found.append(_differs("first divergence", was, here))
    return [f for f in found if f]


def _differs(what: str, was: JSON, here: JSON) -> str:
    return "" if was == here else f"{what} was {printable(str(was), LONGEST)}, is {printable(str(here), LONGEST)}"


def _close(was: JSON, here: JSON) -> bool:
    if isinstance(was, float) and isinstance(here, float):
        return abs(was - here) <= CLOSE * max(abs(was), abs(here))
    return bool(was == here)


def _place(record: dict[str, JSON]) -> str:
    """Describe where numbers first diverge, also in old or malformed records."""
    where = record.get("where", record.get("first_divergence"))
    if not isinstance(where, dict) or record.get("error") or where.get("fault") in (Fault.STATE, Fault.UNLOCATED):
        return "nowhere"
    numbers = where.get("numbers", where)
    index = numbers.get("index") if isinstance(numbers, dict) else None
    return f"step {where.get('step')}, node {where.get('node')} {where.get('op')}, element {index}"


def source_lines(case: Case, result: Result) -> list[str]:
    """Return a line per source of the failing node: type, `ne`, `nb` and layout."""
    where = result.where
    if result.verdict not in FAILURES or where is None or where.step is None or where.node is None:
        return []
    nodes = case.steps[where.step].graph.nodes if where.step < len(case.steps) else []
    node = nodes[where.node] if where.node < len(nodes) else None
    if node is None or (node.op, node.name) != (where.op, where.name):  # of another run of a relation
        return []
    return [printable(f"  src{i} {_described(s)}") for i, s in enumerate(node.src) if s is not None]


def _described(t: Tensor) -> str:
    view = "" if t.view_src is None else f", view of {t.view_src.name or 'a tensor'} at byte {t.view_offs}"
    return f"{t.name or '(unnamed)'}: {t.type} ne={list(t.ne)} nb={list(t.nb)}, {layout(t)}{view}"
