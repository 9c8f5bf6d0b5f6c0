"""One decoder, many ways to run it: `python tests/benchmarks/bench_decoder.py openvino-stateless openvino-stateful`.

Decoders written by hand (`handwritten.py`) and any backend by its spec, on the same sizes, take turns in one process:
each round every one of them decodes a few tokens, in the other order each time. Printed: the median of milliseconds per
token, and of those outside `infer()`. Then, per backend, a step at which `n_kv` grows from 512 to 768 against its
neighbours, the first such step (at 256) having been before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import click
import numpy as np
from handwritten import Sizes, Weights, concat, feeds, rows, slots, stateful
from numpy.typing import NDArray
from tabulate import tabulate

from backends.openvino import OpenVinoStateless  # first, because it keeps openvino's telemetry from the network
from conformance.backend.registry import Spec, create
from conformance.case.case import Case
from conformance.suite.decoder import make

import openvino as ov  # isort: skip

assert OpenVinoStateless is not None  # imported for what importing it does

ACCURACY = {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_NUM_THREADS": 2}
BLOCK = 256
"""llama.cpp reads this many cells more at a time."""
YARDSTICKS = ("stateful", "slots", "concat", "rows")
GOALS = {"openvino-stateful": ("stateful", 1.05), "openvino-stateless": ("rows", 1.10)}
"""Backend -> the yardstick, and how much of its time it may take."""
HOST_GOAL = 0.5
"""Milliseconds per step outside `infer()`."""
CROSSING_GOAL = 1.5
"""Of an ordinary step."""


class Clock:
    """Seconds inside `infer()` of any request in this process."""

    def __init__(self) -> None:
        self.inside = 0.0
        infer = ov.InferRequest.infer

        def timed(request: Any, *args: Any, **more: Any) -> Any:  # noqa: ANN401  # whatever openvino takes and gives
            start = time.perf_counter()
            try:
                return infer(request, *args, **more)
            finally:
                self.inside += time.perf_counter() - start

        ov.InferRequest.infer = timed


class Contestant(Protocol):
    """Something that decodes one token after another, from a past on."""

    name: str

    def step(self) -> None:
        """Decode one token."""


class Hand:
    """What the yardsticks share: a compiled model, its tensors set once, small inputs written in place."""

    def __init__(self, name: str, model: Any, s: Sizes, past: int, *, requests: int = 1) -> None:  # noqa: ANN401
        self.name, self.s, self.past = name, s, past
        compiled = ov.Core().compile_model(model, "CPU", ACCURACY)
        self.requests = [compiled.create_infer_request() for _ in range(requests)]
        self.place = {port.any_name: i for i, port in enumerate(compiled.inputs)}

    def feed(self, request: Any, width: int, **more: NDArray[Any]) -> None:  # noqa: ANN401  # an InferRequest
        """Set the inputs of one new token."""
        for name, x in (feeds(self.s, np.array([self.past % self.s.vocab], np.int32), self.past, width) | more).items():
            request.set_input_tensor(self.place[name], ov.Tensor(x))

    def caches(self) -> list[str]:
        """Names of the cache inputs."""
        return [f"{x}{i}" for i in range(self.s.layers) for x in "kv"]


class Stateful(Hand):
    """K and V live in the model."""

    def __init__(self, s: Sizes, w: Weights, past: int) -> None:
        super().__init__("stateful", stateful(s, w), s, past)
        rng = np.random.default_rng(1)
        for state in self.requests[0].query_state():
            state.state = ov.Tensor(rng.standard_normal((1, s.kv_heads, past, s.head), np.float32))

    def step(self) -> None:
        """Decode one token."""
        self.feed(self.requests[0], self.past + 1, beam=np.zeros(1, np.int32))
        self.requests[0].infer()
        self.past += 1


class Slots(Hand):
    """Caches are inputs and outputs over the same memory."""

    def __init__(self, s: Sizes, w: Weights, past: int) -> None:
        super().__init__("slots", slots(s, w), s, past)
        rng = np.random.default_rng(1)
        for i, name in enumerate(self.caches()):
            cache = ov.Tensor(rng.standard_normal((1, s.n_ctx, s.kv), np.float32))
            self.requests[0].set_input_tensor(self.place[name], cache)
            self.requests[0].set_output_tensor(1 + i, cache)

    def step(self) -> None:
        """Decode one token."""
        n_kv = -(-(self.past + 1) // BLOCK) * BLOCK
        self.feed(self.requests[0], n_kv, slots=np.array([self.past], np.int32), n_kv=np.array([n_kv]))
        self.requests[0].infer()
        self.past += 1


class Concat(Hand):
    """Two requests: the outputs of one are the caches of the other."""

    def __init__(self, s: Sizes, w: Weights, past: int) -> None:
        super().__init__("concat", concat(s, w), s, past, requests=2)
        rng = np.random.default_rng(1)
        shape = (1, s.kv_heads, past, s.head)
        self.kept = [ov.Tensor(rng.standard_normal(shape, np.float32)) for _ in self.caches()]

    def step(self) -> None:
        """Decode one token."""
        now, then = self.requests
        self.feed(now, self.past + 1)
        for name, x in zip(self.caches(), self.kept, strict=True):
            now.set_input_tensor(self.place[name], x)
        now.infer()
        self.kept = [now.get_output_tensor(1 + i) for i in range(len(self.kept))]
        self.requests = [then, now]
        self.past += 1


class Rows(Hand):
    """Caches are inputs, as wide as is read; the host stores what is new."""

    def __init__(self, s: Sizes, w: Weights, past: int) -> None:
        super().__init__("rows", rows(s, w), s, past)
        self.kept: list[NDArray[np.float32]] = []
        self._grow(-(-(past + 1) // BLOCK) * BLOCK)

    def _grow(self, n_kv: int) -> None:
        old = self.kept or [np.random.default_rng(1).standard_normal((1, self.s.kv_heads, 1, self.s.head), np.float32)]
        self.n_kv = n_kv
        wide = [np.zeros((1, self.s.kv_heads, n_kv, self.s.head), np.float32) for _ in self.caches()]
        for i, (name, x) in enumerate(zip(self.caches(), wide, strict=True)):
            x[:, :, : old[i % len(old)].shape[2]] = old[i % len(old)]
            self.requests[0].set_input_tensor(self.place[name], ov.Tensor(x, shared_memory=True))
        self.kept = wide

    def step(self) -> None:
        """Decode one token."""
        if self.past >= self.n_kv:
            self._grow(self.n_kv + BLOCK)
        self.feed(self.requests[0], self.n_kv, slots=np.array([self.past], np.int32))
        self.requests[0].infer()
        for i, x in enumerate(self.kept):
            x[:, :, self.past] = self.requests[0].get_output_tensor(1 + i).data[:, :, 0]
        self.past += 1


class Adapter:
    """A backend on the generated case of the same sizes."""

    def __init__(self, spec: str, case: Case) -> None:
        self.name = spec
        self.backend = create(Spec.parse(spec))
        self.session = self.backend.open(case)
        self.steps = iter(case.steps)

    def step(self) -> None:
        """Compute the trajectory's next graph."""
        step = next(self.steps)
        self.session.compute(step.graph, step.inputs, step.outputs)


def case_id(s: Sizes, weights: str, options: str, run: str) -> str:
    """The id of the same decoder as a generated case."""
    sizes = f"l={s.layers},embd={s.hidden},heads={s.heads},kv={s.kv_heads},head={s.head},ff={s.ffn},vocab={s.vocab}"
    more = f",{options}" if options else ""
    return f"kv_growth/llama-{sizes},ctx={s.n_ctx},rope={s.rope},w={weights}{more},run={run}@1"


@dataclass
class Times:
    """Milliseconds of each measured token."""

    total: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def timed(clock: Clock, step: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of one step, and of those outside `infer()`."""
    before, start = clock.inside, time.perf_counter()
    step()
    total = time.perf_counter() - start
    return total * 1e3, (total - (clock.inside - before)) * 1e3


def contest(contestants: Sequence[Contestant], rounds: int, steps: int, warm: int, clock: Clock) -> dict[str, Times]:
    """Let all take turns, in the other order each round."""
    found = {c.name: Times() for c in contestants}
    for c in contestants:
        for _ in range(warm):
            c.step()
    for i in range(rounds):
        for c in contestants[:: -1 if i % 2 else 1]:
            c.step()  # what another contestant left in the processor's caches is not this one's cost
            for _ in range(steps):
                total, host = timed(clock, c.step)
                found[c.name].total.append(total)
                found[c.name].host.append(host)
    return found


def crossing(spec: str, case: Case, clock: Clock) -> tuple[float, float]:
    """Milliseconds of an ordinary step, and of the one that first reads 768 cells, after the lift at 256."""
    adapter = Adapter(spec, case)
    for _ in range(5):
        adapter.step()
    times = [timed(clock, adapter.step)[0] for _ in range(16)]
    return float(np.median(times[1:7] + times[8:])), times[7]


def table(found: dict[str, Times]) -> Iterable[list[Any]]:
    """Median milliseconds, their ratio to the yardsticks, the goal."""
    medians = {name: float(np.median(t.total)) for name, t in found.items()}
    for name, t in found.items():
        yardstick, goal = GOALS.get(name.split("?", maxsplit=1)[0], ("", 0.0))
        ratios = [medians[name] / medians[y] for y in YARDSTICKS if y in medians]
        met = "" if yardstick not in medians else f"<= {goal:.2f} x {yardstick}"
        yield [name, medians[name], min(t.total), float(np.median(t.host)), *ratios, met]


@click.command()
@click.argument("specs", nargs=-1)
@click.option("--weights", default="q4_0,f32", help="types to measure, joined by commas")
@click.option("--past", default=500, help="cells in use when about half of the tokens are measured")
@click.option("--rounds", default=12)
@click.option("--steps", default=3, help="measured tokens of each contestant per round")
@click.option("--layers", default=16)
@click.option("--rope", type=click.Choice(["normal", "neox"]), default="normal")
@click.option("--options", default="", help="more keys of the generated case, such as fa=0,cache=f32")
def main(
    specs: tuple[str, ...], weights: str, past: int, rounds: int, steps: int, layers: int, rope: str, options: str
) -> None:
    """Print the table for the yardsticks and the backends SPECS."""
    clock = Clock()
    s = replace(Sizes(), layers=layers, rope=rope)  # type: ignore[arg-type]  # one of its two words
    warm = 6
    count = warm + rounds * (steps + 1)
    first = past - (warm + count) // 2
    for w in weights.split(","):
        hand = Weights.random(s, q4_0=w == "q4_0")
        case = make(case_id(s, w, options, f"at{first}.d{count}"))
        contestants: list[Contestant] = [form(s, hand, first) for form in (Stateful, Slots, Concat, Rows)]
        contestants += [Adapter(spec, case) for spec in specs]
        found = contest(contestants, rounds, steps, warm, clock)
        del hand, case, contestants  # with F32 weights they are most of the machine's memory
        gc.collect()
        head = [f"{w}, {past} past", "ms", "least", f"host (<= {HOST_GOAL})", *(f"/ {y}" for y in YARDSTICKS), "goal"]
        click.echo(tabulate(table(found), head, floatfmt=".2f"))
        case = make(case_id(s, w, options, "at254.d4.p247.d16"))
        for spec in specs:
            ordinary, step = crossing(spec, case, clock)
            gc.collect()
            click.echo(f"{spec}: {step:.2f} ms where n_kv grows, {ordinary:.2f} before and after: "
                       f"{step / ordinary:.2f} x (goal {CROSSING_GOAL})")  # fmt: skip


if __name__ == "__main__":
    main()
