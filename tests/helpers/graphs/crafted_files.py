"""Case files that are well-formed and nasty, and what becomes of each: read, shown, run on backends, run again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from click.testing import CliRunner

from conformance.backend.registry import Spec
from conformance.case import casefile, codec
from conformance.case.case import JSON, Case, Step
from conformance.cli import main
from conformance.ggml.errors import CaseFileError, ConformanceError, GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor, nbytes, new_tensor
from conformance.ggml.types import F32
from conformance.judge.verdict import Verdict
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session import failures
from conformance.run.session.select import build

LIMITS = Isolation(time_limit=5.0, memory_limit=1 << 30)
NOTED = frozenset({Verdict.FAIL, Verdict.CRASH, Verdict.TIMEOUT, Verdict.OVERCLAIM})
"""No harm done, but worth a look."""
SLOW = 60.0
"""Seconds that no file may take, on the slowest machine."""
SEEDS = (
    "ops/ADD-f32+f32-a=4x3,b=4x3@0",
    "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p2.d1@1",
)
NAMES = (
    '"""\nimport os\n"""', "../../x", "a\nPASS b on c", "\x1b[2J", "\0", "=1+1", "-rf", "$(touch x)", "\u202ex",
    "x" * 500, "",
)  # fmt: skip
BACKENDS: tuple[JSON, ...] = (
    "cpu", "ggml?lib=./evil", "openvino-stateless?cache_dir=evil", "sched?devices=ggml:lib=evil,cpu", "xdna2?k=9999999",
    "x\x1b", "", 5, None, ["cpu"], {"a": 1}, "?", "cpu?a=b", "cpu&b",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 7, 31, 32, 255, 4096, 2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, 2**64)


def craft(rng: random.Random, path: Path) -> bool:
    """Write one crafted file; False where the writer itself refuses."""
    try:
        case = _grown(rng) if rng.random() < 0.6 else build(_seed(rng))
        case.provenance = {rng.choice(NAMES): [], "seen": _seen(rng)}
        if rng.random() < 0.5:
            case.id = f"{rng.choice(NAMES)}{rng.random()}"
        for t in {t for s in case.steps for t in s.graph.tensors()}:
            if rng.random() < 0.2:
                t.name = rng.choice(NAMES)[:20]
        document, blobs = codec.dump(case)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            _mutate(rng, document)
        case.id = str(document.get("id", ""))
        with mock.patch.object(casefile, "dump", return_value=(document, blobs)):
            casefile.write(path, case)
    except (ConformanceError, TypeError, ValueError, OverflowError, AttributeError, LookupError, RecursionError):
        return False
    return True


def _seed(rng: random.Random) -> str:
    from conformance.suite import FAMILIES  # noqa: PLC0415  # a list of thousands, made once

    return rng.choice((SEEDS[1], *FAMILIES["ops"].ids("smoke")))


def _seen(rng: random.Random) -> JSON:
    record: dict[str, JSON] = {"backend": rng.choice(BACKENDS), "verdict": rng.choice(("FAIL", 5, None, ["x"]))}
    record |= {"nmse": rng.choice((0.1, "x", [])), "first_divergence": rng.choice((None, 3, {"step": []}, {"op": {}}))}
    return rng.choice((record, record, record, 5, [record], None, "x"))


def _grown(rng: random.Random) -> Case:
    """Nodes over each other, each legal to ggml, of any size."""
    b, nodes = Builder(), []
    x = new_tensor(F32, *(rng.choice((1, 2, 8, 24, 64)) for _ in range(rng.randint(1, 4))), name="x")
    last: list[Tensor] = [x]
    steps: list[Callable[[Tensor], Tensor]] = [
        lambda t: b.repeat_4d(t, *(n * rng.choice((1, 1, 2, 3, 1000, 2**20, 2**31)) for n in t.ne)),
        lambda t: b.pad_ext(t, *(rng.choice((0, 0, 1, 5, 4096, 2**30)) for _ in range(8))),
        lambda t: b.pool_2d(t, 1, *rng.choices((1, 2, 3, 1000, 2**30), k=4), *rng.choices((0, 1, 10**5), k=2)),
        lambda _: b.arange(0.0, float(rng.choice((1, 10, 2**24, 2**40))), rng.choice((1.0, 0.5, 1e-3))),
        lambda t: b.mul_mat(t, t), b.sum, b.sum_rows, b.cumsum, b.transpose, b.cont, b.sqr, lambda t: b.argsort(t, 0),
        lambda t: b.add(t, t), lambda t: b.out_prod(t, t),
        lambda _: b.dsv4_hc_comb(new_leaf(24, 2), new_leaf(3), new_leaf(24), 1e-5, rng.choice((1, 20, 2**31 - 1))),
    ]  # fmt: skip
    leaves = [x]

    def new_leaf(*ne: int) -> Tensor:
        leaves.append(new_tensor(F32, *ne))
        return leaves[-1]

    for _ in range(rng.choice((1, 2, 3, 6, 40))):
        try:
            made = rng.choice(steps)(rng.choice(last))
        except (GraphError, OverflowError, ValueError):
            continue
        if made.op != "NONE":
            made.flags |= FLAG_COMPUTE
            nodes.append(made)
            last.append(made)
    if not nodes:
        nodes = [b.sqr(x)]
        nodes[0].flags |= FLAG_COMPUTE
    used = {s for n in nodes for s in n.src if s is not None}
    inputs = {t: np.zeros(nbytes(t), np.uint8) for t in leaves if t in used}
    count = rng.choice((1, 1, 1, 2, 20))
    return Case("ops/crafted@0", {}, [Step(Graph(nodes), dict(inputs), (nodes[-1],)) for _ in range(count)])


def _mutate(rng: random.Random, document: dict[str, Any]) -> None:
    at: Any = document
    for _ in range(rng.randint(1, 6)):
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = rng.choice(keys)
        value = at[key]
        if isinstance(value, (dict, list)) and rng.random() < 0.85:
            at = value
            continue
        if isinstance(value, int):
            at[key] = rng.choice(NUMBERS)
        elif isinstance(value, str):
            at[key] = rng.choice((*NAMES, "REPEAT", "CPY", "f16", "q4_0", "SUM"))
        else:
            at[key] = rng.choice((None, [], {}, 5, "x"))
        return


class Harness:
    """Runs crafted files; `found` counts what became of them and `wrong` says what should not have."""

    def __init__(self, folder: Path, *, isolated: str | None = "ggml") -> None:
        self.folder, self.isolated = folder, isolated
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.noted: list[str] = []
        self._runner = Runner(isolation=LIMITS)

    def close(self) -> None:
        """End the backends."""
        self._runner.close()

    def run(self, seed: int) -> None:
        """Craft the file of `seed` and put it through everything."""
        rng = random.Random(seed)  # noqa: S311  # no secret
        path = self.folder / f"{seed}.gguf"
        if not craft(rng, path):
            self.found["not written"] += 1
            return
        before, start = set(self.folder.iterdir()), time.monotonic()
        try:
            self._all(seed, path)
        except Exception as e:  # noqa: BLE001  # that is what is looked for
            self.wrong.append(f"{seed}: {type(e).__name__}: {e}")
        if time.monotonic() - start > SLOW:
            self.wrong.append(f"{seed}: took {time.monotonic() - start:.0f} s")
        if more := set(self.folder.iterdir()) - before:
            self.wrong.append(f"{seed}: left {more}")
        path.unlink()

    def _all(self, seed: int, path: Path) -> None:
        self._command(seed, ["show", str(path)])
        try:
            cases = casefile.read(path)
        except CaseFileError:
            self.found["refused by the reader"] += 1
            return
        backends = ["cpu", *([self.isolated] if self.isolated and seed % 4 == 0 else [])]
        for name in backends:
            for result in self._runner.run(Spec(name), cases):
                self.found[f"{name} {result.verdict}"] += 1
                if result.verdict in NOTED:
                    self.noted.append(f"{seed}: {result.sentence()}")
                if "\n" in result.sentence() or "\x1b" in result.sentence():
                    self.wrong.append(f"{seed}: a sentence of more than a line")
        if seed % 8 == 0:
            named = [] if all(map(failures.record_of, cases)) else ["--backend", "cpu"]
            self._command(seed, ["repro", str(path), *named, "--time-limit", "5", "--memory-limit", "1G"])

    def _command(self, seed: int, words: list[str]) -> None:
        done = CliRunner().invoke(main, words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            self.wrong.append(f"{seed}: {words[0]}: {type(done.exception).__name__}: {done.exception}")
        if "\x1b" in done.output:
            self.wrong.append(f"{seed}: {words[0]}: an escape sequence on the terminal")
        self.found[f"{words[0]} {done.exit_code}"] += 1
