"""Verdicts on captured models of 12 layers x 1,024: `python tests/benchmarks/captured_models.py [ROW …]`.

Each of three architectures in four types of weights is made, captured by reference and run: as it is on three backends,
which must pass, and with one block scale of one layer doubled in the backend's weights, which must fail and name that
MUL_MAT. A row is `ARCH` or `ARCH-TYPE`; all are run by default. Takes some minutes per row and at most 6 GB.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers" / "runs"))

from stand_in import StandIn, doubled

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.judge.verdict import Result, Verdict
from conformance.llama.zoo import family as zoo
from conformance.llama.zoo.family import Request
from conformance.run.runner import Runner

ARCHITECTURES = ("llama", "qwen3", "gemma3")
TYPES = ("q4_0", "q4_K", "q5_K", "q8_0")
BACKENDS = ("cpu", "ggml", "openvino-stateless")
WEIGHT = "blk.7.ffn_up.weight"
SIZES = {
    "block_count": 12,
    "embedding_length": 1024,
    "feed_forward_length": 2816,
    "attention.head_count": 16,
    "attention.head_count_kv": 4,
}
"""What is set of each model; head sizes follow from it or stay those of the table."""


def captured(arch: str, type_: str, folder: Path) -> Case:
    """A model's recording: a prompt of 16 and 3 more tokens."""
    keys = "+".join(f"{k}:{v}" for k, v in SIZES.items())
    request, name, values, _ = zoo.read(f"zoo/{arch}-w={type_},set={keys}@1", "")
    model = folder / f"{arch}-{type_}.gguf"
    zoo.make_model(model, request, name, values)
    name = f"{arch}-{type_}"
    return zoo.record_model(
        Request(id=f"model/{name}@0", stream=name, model=str(model), plan="p16.d3", by_reference=True, family="model")
    )


def names(result: Result, case: Case) -> str:
    """The weight that the first divergent node multiplies with."""
    where = result.where
    if where is None or where.step is None or where.node is None:
        return ""
    node = case.steps[where.step].graph.nodes[where.node]
    return node.src[0].name if node.op == "MUL_MAT" and node.src[0] is not None else f"{node.op} {node.name}"


def row(arch: str, type_: str) -> list[list[object]]:
    """What each backend makes of one model, right and planted."""
    found: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="conformance-models-") as folder:
        case = captured(arch, type_, Path(folder))
        runner = Runner()
        try:
            for name in BACKENDS:
                start = time.perf_counter()
                (right,) = runner.run(Spec.parse(name), [case])
                seconds = time.perf_counter() - start
                spec = Spec("planted", (("in", name),))
                runner._backends[spec] = StandIn(name, lambda c: doubled(c, WEIGHT))
                (wrong,) = runner.run(spec, [case])
                named = names(wrong, case)
                good = right.verdict is Verdict.PASS and wrong.verdict is Verdict.FAIL and named == WEIGHT
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                found.append(
                    [f"{arch} {type_}", name, str(right.verdict), right.nmse, right.nmse_exact, right.budget_used,
                     f"{wrong.verdict} {named}", f"{seconds:.0f} s", f"{memory} MB", "ok" if good else "WRONG"]
                )  # fmt: skip
                print(*found[-1], flush=True)  # noqa: T201  # a row takes minutes
                if right.verdict is not Verdict.PASS:
                    print(right.detail, flush=True)  # noqa: T201  # as above
        finally:
            runner.close()
    return found


def main() -> None:
    """Print the table; exit with 1 where a row is wrong."""
    asked = sys.argv[1:]
    rows = [
        r
        for arch in ARCHITECTURES
        for type_ in TYPES
        if not asked or arch in asked or f"{arch}-{type_}" in asked
        for r in row(arch, type_)
    ]
    head = ["model", "backend", "as it is", "NMSE", "from exact", "budget", "one scale doubled", "took", "memory", ""]
    print(tabulate(rows, head, floatfmt=".2g"))  # noqa: T201  # its output
    sys.exit(any(r[-1] != "ok" for r in rows))


if __name__ == "__main__":
    main()
