"""`conform memory`: weights that are held twice, by llama.cpp on its devices or by an adapter."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.cli import options
from conformance.cli.options import ExistingFile, chosen
from conformance.cli.output import leave
from conformance.cli.run import run_live
from conformance.ggml.errors import UsageError
from conformance.ggml.types import TYPES
from conformance.live.memory import COPIES, id_of
from conformance.testrun import Chosen


@click.command()
@click.argument("model", required=False, type=ExistingFile, metavar="[MODEL.gguf]")
@chosen(options.BACKEND, options.CONFIG, options.WAIVERS, options.JSON)
@click.option("--weight-type", type=click.Choice(list(TYPES)), default="q4_0", show_default=True,
              help="Of the made-up matrices.")  # fmt: skip
@click.option("--copies", "limit", type=click.FloatRange(min=0, min_open=True), metavar="N",
              help=f"Times the weights that may be held. [default: {COPIES}; of an adapter as stated]")  # fmt: skip
def memory(model: Path | None, chosen: Chosen, weight_type: str, limit: float | None) -> None:
    """Measure how often backends hold a model's weights, on their processes: the live family `memory`.

    On a ggml device llama.cpp loads MODEL.gguf or a made-up model, says what it holds, and is compared with its own
    CPU. Any other adapter runs a made-up decoder. A small model is measured beside it, and what both take cancels.

    Exit codes: 0 every backend holds the weights once, an adapter as often as stated; 1 one holds more; 3 one could not
    be measured: see docs/exit-codes.md.
    """
    if not chosen.backends:
        raise UsageError("memory: --backend NAME expected: an adapter, or a ggml device as ggml?lib=DIR&device=NAME")
    _, outcome = run_live(chosen, [id_of(weight_type, limit, model)], verbose=True)
    leave(outcome)
