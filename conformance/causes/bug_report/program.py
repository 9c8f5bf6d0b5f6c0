"""Generate a one-file C++ program that checks a case on a device through ggml's public API.

`frame.cpp` allocates, computes and compares as the adapter `ggml` does. This module generates the case: tensors,
graphs, bytes, expected values and error limits.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conformance.backend.interface import Witness
from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, FLAG_OUTPUT, Bytes, Tensor
from conformance.judge.budget import Budget
from conformance.report.snippet import cpp_bytes, cpp_leaf, cpp_node, named_views, plain
from conformance.run.execute import Execution
from conformance.run.oracle import Expectation

FRAME = Path(__file__).with_name("frame.cpp")
MOST_DATA = 1 << 20
"""Maximum bytes of leaves and expected values in a program."""
SPELLED_OUT = 256
"""Maximum bytes written as numbers; hexadecimal text beyond that compiles 100 times faster."""
PLACE = "//CASE//\n"
"""The line of the frame that is replaced by the case."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A value that the program checks."""

    step: int
    tensor: Tensor
    expected: Bytes
    """Packed."""
    budget: Budget


def wanted_of(case: Case, expectation: Expectation) -> list[Wanted]:
    """Return the judged values, except outputs that a later node of their step overwrites."""
    values = expectation.values
    judged, _ = expectation.judge(case, Execution(values, Witness("", ""), 0.0))
    return [
        Wanted(j.step, j.tensor, values[j.step].all[j.tensor], j.budget)
        for j in judged
        if not _is_overwritten(case.steps[j.step], j.tensor)
    ]


def _is_overwritten(step: Step, t: Tensor) -> bool:
    nodes = list(step.graph)
    later = nodes[nodes.index(t) + 1 :] if t in nodes else []
    return any(writes_in_place(n) and n.flags & FLAG_COMPUTE and n.root is t.root for n in later)


def program(case: Case, wanted: Sequence[Wanted], spec: Spec) -> str:
    """Return the source; `spec` gives device, scheduler, memory mode and buffer type."""
    before, place, after = _frame().partition(PLACE)
    assert place
    head = (
        f"// {plain(case.id)}, which failed on {plain(spec.name)}",
        "//",
        "// program [DEVICE [FOLDER]] exits with 0 if the device computes the case correctly, 1 if it does not,",
        "// 2 if it could not run. FOLDER holds libraries of backends to load.",
        "",
        "",
    )
    return "\n".join(head) + before + "\n".join(_case(case, wanted, spec)) + "\n" + after


@cache
def _frame() -> str:
    return FRAME.read_text(encoding="utf-8")


PRINTED = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.()")
"""Bytes that need no escape in a string literal."""


def literal(text: str) -> str:
    """Return a C++ string literal for the UTF-8 bytes of `text`."""
    data = text.encode("utf-8", "surrogatepass")
    return '"' + "".join(chr(c) if c in PRINTED else f"\\{c:03o}" for c in data) + '"'


def _case(case: Case, wanted: Sequence[Wanted], spec: Spec) -> Iterator[str]:
    yield from _options(case, spec)
    names = {t: f"p{i}" for i, t in enumerate(case.persistent)}
    for t, data in case.persistent.items():
        yield f"static ggml_tensor * {names[t]};"
        yield from _static(f"{names[t]}_data", data)
    yield ""
    yield "static void keep(ggml_context * ctx) {"
    for t, name in names.items():
        yield f"    {name} = {cpp_leaf(t)};"
        yield from (f"    {line}" for line in _marks(t, name, 0))
    yield from () if names else ("    (void) ctx;",)
    yield "}"
    yield ""
    for k, step in enumerate(case.steps):
        yield from _step(k, step, dict(names), [w for w in wanted if w.step == k])
        yield ""
    steps = ", ".join(f"step{k}" for k in range(len(case.steps)))
    yield f"static const std::vector<Step (*)(ggml_context *, ggml_context *)> STEPS = {{ {steps} }};"
    yield "static const std::vector<Persistent> PERSISTENT = {"
    yield from (f"    {{ {_persistent(case, t, name)} }}," for t, name in names.items())
    yield "};"


def _options(case: Case, spec: Spec) -> Iterator[str]:
    spec = resolve(spec)
    options = dict(spec.options) if spec.name == "ggml" else {}
    threads = options.get("threads", "1")
    most = max(len(s.graph.tensors()) for s in case.steps) + len(case.persistent)
    yield f"static const char * DEVICE = {literal(options.get('device') or 'CPU')};"
    yield f"static const char * WEIGHTS = {literal(options.get('buffer', ''))};  // buffer type, the default if empty"
    yield f"static const int THREADS = {int(threads) if threads.isdecimal() else 1};"
    yield f"static const bool SCHED = {_bool(is_scheduled(spec))};  // over the device and the CPU"
    yield f"static const bool FRESH = {_bool(options.get('memory') == 'fresh')};  // each graph at addresses of its own"
    yield f"static const size_t TENSORS = {2 * most + 16};"
    yield ""


def is_scheduled(spec: Spec) -> bool:
    """Return True if a scheduler splits the graph over several devices."""
    spec = resolve(spec)
    return spec.name == "sched" or dict(spec.options).get("mode") == "sched"


def _bool(x: object) -> str:
    return "true" if x else "false"


def _static(name: str, data: Bytes) -> Iterator[str]:
    if data.nbytes > SPELLED_OUT and data.any():
        yield f"static const Bytes {name} = in_hex("
        yield from (f'    "{line}"' for line in textwrap.wrap(data.tobytes().hex(), 110))
        yield ");"
    else:
        first, *rest = cpp_bytes(name, data)
        yield f"static {first}"
        yield from rest


def _persistent(case: Case, t: Tensor, name: str) -> str:
    cache_ = t in case.caches()
    place = case.placement.get(t)
    usage = "weights" if place is None else place.usage
    reads = [n for s in case.steps for n in s.graph if any(s is t for s in n.src)]
    rows = bool(reads) and all(n.op == "GET_ROWS" and n.src[0] is t for n in reads)
    flags = (place is not None and place.must, usage == "weights" and not cache_, cache_, rows)
    return ", ".join((f"&{name}", f"{name}_data", str(-1 if place is None else place.buffer), *map(_bool, flags)))


def _step(k: int, step: Step, names: dict[Tensor, str], wanted: Sequence[Wanted]) -> Iterator[str]:
    inputs = {t: f"x{k}_{i}" for i, t in enumerate(step.inputs)}
    for t, data in step.inputs.items():
        yield from _static(f"{inputs[t]}_data", data)
    for i, w in enumerate(wanted):
        yield from _static(f"w{k}_{i}", w.expected)
    yield f"static Step step{k}(ggml_context * in, ggml_context * ctx) {{"
    yield from (f"    {line}" for line in _body(step, k, {**names, **inputs}, inputs, wanted))
    yield "}"


def _body(
    step: Step, k: int, names: dict[Tensor, str], inputs: dict[Tensor, str], wanted: Sequence[Wanted]
) -> Iterator[str]:
    for t, name in inputs.items():
        yield f"ggml_tensor * {name} = {cpp_leaf(t, 'in')};"
        yield from _marks(t, name, FLAG_INPUT)
    yield from () if inputs else ("(void) in;",)
    yield "ggml_cgraph * graph = ggml_new_graph_custom(ctx, TENSORS, false);"
    kept = {r for t in step.outputs for r in (t, t.root)}
    for i, t in enumerate(step.graph):
        for view, root in named_views(t, f"{k}_{i}", names):
            yield f"ggml_tensor * {names[view]} = ggml_view_tensor(ctx, {root});"
            yield from _marks(view, names[view], 0)
        yield from cpp_node(t, names)
        yield f"ggml_build_forward_expand(graph, {names[t]});"
        yield from _marks(t, names[t], FLAG_OUTPUT if t in kept else 0, FLAG_COMPUTE)
    yield "Step step = { graph, {}, {} };"
    yield from (f"step.inputs.push_back({{ {name}, {name}_data }});" for name in inputs.values())
    yield from (f"step.wanted.push_back({{ {_wanted(w, k, i, names)} }});" for i, w in enumerate(wanted))
    yield "return step;"


def _marks(t: Tensor, name: str, more: int, own: int = 0) -> Iterator[str]:
    """Yield the lines that set name and flags; `own` are the flags that ggml sets itself."""
    yield f"ggml_set_name({name}, {literal(t.name)});"
    flags = t.flags | more
    if flags & ~(FLAG_INPUT | FLAG_OUTPUT) != own:
        yield f"{name}->flags = {flags};"
        return
    if flags & FLAG_INPUT:
        yield f"ggml_set_input({name});"
    if flags & FLAG_OUTPUT:
        yield f"ggml_set_output({name});"


def _wanted(w: Wanted, k: int, i: int, names: dict[Tensor, str]) -> str:
    what = "cache" if w.tensor.op == "NONE" else w.tensor.op
    label = f'"{plain(f"{what} {w.tensor.name}".strip())}"'
    unordered = _bool(w.tensor.op == "TOP_K")
    limits = (_double(w.budget.nmse), _double(w.budget.element))
    return ", ".join((names[w.tensor], label, f"w{k}_{i}", *limits, unordered))


def _double(x: float) -> str:
    return repr(x) if math.isfinite(x) else "INFINITY"


def size_of(case: Case, wanted: Iterable[Wanted]) -> int:
    """Return the bytes of leaves and expected values in a program."""
    leaves = [*case.persistent.values(), *(data for s in case.steps for data in s.inputs.values())]
    return sum(data.nbytes for data in leaves) + sum(w.expected.nbytes for w in wanted)
