"""The real ggml-openvino against ours: `python tests/benchmarks/bench_ggml_openvino.py FOLDER`, FOLDER with libggml.

The decoder of `bench_decoder.py`, as a generated case, on the library's device OPENVINO0 as llama.cpp runs it (through
`ggml_backend_sched`), stateless and stateful, on the library's own CPU, and on `openvino-stateless` and
`openvino-stateful`. Each backend has a process of its own, because the library reads its environment once; they take
turns in one run, each round in the other order, so that what else the machine does falls on all alike. Printed:
medians of milliseconds per token, and what part of the real ggml-openvino's time ours take.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from bench_decoder import case_id
from handwritten import Sizes
from tabulate import tabulate

from conformance.backend.registry import Named, Spec, define
from conformance.run.isolation.isolate import Isolation, Workers, open_backend
from conformance.suite.decoder import make

GOAL = 0.5
"""Of the real one's time per token, at most."""
STATEFUL = "GGML_OPENVINO_STATEFUL_EXECUTION"
PAIRS = {"openvino-stateless": "ggml-openvino", "openvino-stateful": "ggml-openvino-stateful"}
"""Ours -> the real one that does the same."""


def backends(folder: Path, threads: int) -> dict[str, Named]:
    """The library's two modes and its CPU, as `conformance.toml` would name them."""
    lib = ("lib", str(folder))
    device = (lib, ("device", "OPENVINO0"), ("mode", "sched"), ("uncomputed", "drop"), ("threads", str(threads)))
    return {
        "ggml-openvino": Named("ggml", device, ((STATEFUL, None),)),
        "ggml-openvino-stateful": Named("ggml", (*device, ("caches", "opaque")), ((STATEFUL, "1"),)),
        "ggml-cpu": Named("ggml", (lib, ("threads", str(threads))), ((STATEFUL, None),)),
    }


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--weights", default="q4_0")
@click.option("--past", default=500, help="Cells in use when about half of the tokens are measured.")
@click.option("--rounds", default=8)
@click.option("--steps", default=3, help="Measured tokens of each backend per round.")
@click.option("--layers", default=16)
@click.option("--threads", default=2, help="Of CPU backends.")
def main(folder: Path, weights: str, past: int, rounds: int, steps: int, layers: int, threads: int) -> None:
    """Print the table."""
    define(backends(folder, threads))
    s = replace(Sizes(), layers=layers)
    warm = 4
    count = warm + rounds * (steps + 1)
    case = make(case_id(s, weights, "", f"p{past - count // 2}.d{count}"))
    names = [*PAIRS.values(), "ggml-cpu", *PAIRS]
    opened = {name: open_backend(Spec.parse(name), Workers(Isolation(time_limit=600))) for name in names}
    sessions = {name: backend.open(case) for name, backend in opened.items()}
    place = dict.fromkeys(names, 0)
    prompt: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in names}

    def step(name: str) -> float:
        todo = case.steps[place[name]]
        place[name] += 1
        start = time.perf_counter()
        sessions[name].compute(todo.graph, todo.inputs, todo.outputs)
        return 1e3 * (time.perf_counter() - start)

    for name in names:
        prompt[name] = step(name)
        for _ in range(warm):
            step(name)
    for i in range(rounds):
        for name in names[:: -1 if i % 2 else 1]:
            step(name)  # what another left in the processor's caches is not this one's cost
            times[name] += [step(name) for _ in range(steps)]
    medians = {name: float(np.median(t)) for name, t in times.items()}
    rows = []
    for name in names:
        real = PAIRS.get(name)
        part = medians[name] / medians[real] if real else None
        met = "" if part is None else f"<= {GOAL}: {'met' if part <= GOAL else 'not met'}"
        rows.append([name, medians[name], min(times[name]), prompt[name] / 1e3, part, met])
    head = [f"{weights}, {past} past", "ms/token", "least", "first prompt, s", "of the real one", "goal"]
    click.echo(tabulate(rows, head, floatfmt=".2f"))
    for name in names:
        sessions[name].close()
        opened[name].close()


if __name__ == "__main__":
    main()
