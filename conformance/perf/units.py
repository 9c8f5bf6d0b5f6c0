"""Work units per level: a case that any backend can run, and its timed part.

| unit | a measurement is |
|---|---|
| `op/OP@n=N` | one op of a decoder for `n` tokens, `repeat` times |
| `prefill@n=N` | a prompt of N tokens on an empty cache, in batches of at most 512: llama-bench's pp |
| `decode@past=N` | tokens one by one, each in a graph of its own, while the cache already holds N: llama-bench's tg |
| `cross@256` | the first step that reads a second block of 256 cells, on a new backend |
| `cross@512` | the step that reads a third block, on a backend that ran such a step before |
| `load` | opening a session: weights and caches allocated and filled |
| `first-token@n=N` | opening a session on a new backend, and a prompt of N tokens |
| `compile` | a prompt and a token on a new backend, without opening: includes translating and compiling |
| `memory` | no time: bytes of weights, and the peak rise of resident memory |

A warm backend is measured in one session, whose caches are restored before each measurement. Units that are `fresh`
start a new backend each time, since one that ran before has compiled already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from conformance.ggml.errors import UsageError
from conformance.suite import ops
from conformance.suite.family import LEVELS, Level
from conformance.suite.ops import Timed

FAMILY = "perf"
"""Family in the ids of work units."""
Counted = Literal["tokens", "cases", "steps"]
BLOCK = 256
"""Number of cells of which the size and the read part of a KV cache are multiples."""
TOKENS = 8
"""Number of tokens decoded in one measurement; it divides `BLOCK`."""
SMALL = "llama-l=2,embd=256,heads=4,kv=2,head=64,ff=512,vocab=256,w=q8_0"
MEDIUM = "llama-l=2,embd=1024,heads=16,kv=4,head=64,ff=2816,vocab=2048,w=q4_0"
"""Two layers as in a model of half a billion parameters."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A case and its timed part."""

    name: str
    model: str
    """The decoder without its plan, or the op, as in the case's id."""
    case_id: str
    """The case that must PASS before the unit is timed."""
    work: int
    """Work of one measurement, in units of `of`."""
    of: Counted
    repeat: int = 1
    """Repetitions of the timed steps in one measurement, for the clock's resolution."""
    first: int = 0
    """The first timed step; earlier ones run untimed."""
    fresh: bool = False
    """True if each measurement starts a new backend."""
    opens: bool = False
    """True if opening the session is timed."""
    steps: bool = True
    """True if the steps are timed; if only opening is, they do not run."""

    @property
    def timed(self) -> bool:
        """True if it measures time, and not memory."""
        return self.opens or self.steps

    @property
    def id(self) -> str:
        """Id of its result: `perf/NAME/MODEL@1`."""
        return f"{FAMILY}/{self.name}/{self.model}@1"


def prefill(model: str, n: int) -> Unit:
    """Time a prompt of `n` tokens, as in the live family `phases`."""
    return Unit(f"prefill@n={n}", model, _case(model, n, f"p{n}"), n, "tokens")


def decode(model: str, past: int) -> Unit:
    """Time `TOKENS` tokens one by one after `past` others."""
    plan = f"at{past}.d{TOKENS}" if past else f"d{TOKENS}"
    return Unit(f"decode@past={past}", model, _case(model, past + TOKENS, plan), TOKENS, "tokens")


def cross(model: str) -> Unit:
    """Time the token in cell 256; the one before it is decoded untimed."""
    case_id = _case(model, BLOCK + 1, f"at{BLOCK - 1}.d2")
    return Unit(f"cross@{BLOCK}", model, case_id, 1, "steps", first=1, fresh=True)


def cross_again(model: str) -> Unit:
    """Time the token in cell 512, after untimed ones in cells 255, 256 and on, and 511."""
    at = 2 * BLOCK
    case_id = _case(model, at + 1, f"at{BLOCK - 1}.d1.p{BLOCK - 1}.d2")
    return Unit(f"cross@{at}", model, case_id, 1, "steps", first=3)


def load(model: str) -> Unit:
    """Time the opening of a session."""
    return Unit("load", model, _case(model, 33, "p32.d1"), 1, "cases", opens=True, steps=False)


def first_token(model: str, n: int) -> Unit:
    """Time the opening of a session and a prompt of `n` tokens."""
    return Unit(f"first-token@n={n}", model, _case(model, n, f"p{n}"), 1, "cases", fresh=True, opens=True)


def compiling(model: str) -> Unit:
    """Time the first prompt and the first token."""
    return Unit("compile", model, _case(model, 33, "p32.d1"), 2, "steps", fresh=True)


def memory(model: str) -> Unit:
    """Measure bytes while a prompt and a token are computed."""
    return Unit("memory", model, _case(model, 33, "p32.d1"), 1, "cases", fresh=True, steps=False)


def op(timed: Timed) -> Unit:
    """Time one op, repeated; the name has the first operand's type if there are several."""
    name, types, _ = timed.body.split("-", 2)
    first, several, _ = types.partition("+")
    kind = f"{name}.{first}" if several else name
    case_id = f"ops/{timed.body}@1"
    return Unit(f"op/{kind}@n={timed.tokens}", timed.body, case_id, timed.repeat, "steps", repeat=timed.repeat)


def whole(case_id: str, steps: int) -> tuple[Unit, Unit]:
    """Return units for all steps of any case: their warm time, and their memory."""
    model = case_id.rpartition("@")[0] or case_id
    memory_ = Unit("case-memory", model, case_id, steps, "steps", fresh=True, steps=False)
    return Unit("case", model, case_id, steps, "steps"), memory_


def of_model(case_id: str, name: str, prompt: int, decode: int) -> Unit:
    """Time a model on an empty cache: llama-bench's pp for a prompt, its tg for single tokens."""
    unit = f"pp{prompt}" if prompt else f"tg{decode}"
    return Unit(unit, name, case_id, prompt or decode, "tokens")


def _case(model: str, tokens: int, plan: str) -> str:
    return f"kv_growth/{model},ctx={-(-tokens // BLOCK) * BLOCK},run={plan}@1"


def _ops(level: Level) -> tuple[Unit, ...]:
    return tuple(op(timed) for below in LEVELS[: LEVELS.index(level) + 1] for timed in ops.timed(below))


def _model(m: str, prompts: Sequence[int], pasts: Sequence[int]) -> tuple[Unit, ...]:
    return (
        *(prefill(m, n) for n in prompts),
        *(decode(m, n) for n in pasts),
        cross(m),
        cross_again(m),
        load(m),
        first_token(m, 32),
        compiling(m),
        memory(m),
    )


UNITS: dict[Level, tuple[Unit, ...]] = {
    "smoke": (*_ops("smoke"), *_model(SMALL, (32,), (0, 512))),
    "standard": (*_ops("standard"), *_model(MEDIUM, (32, 128, 512), (0, 512, 1024))),
    "full": (*_ops("full"), *_model(MEDIUM, (32, 64, 128, 256, 512, 1024, 2048), (0, 512, 1024, 4096))),
}
"""Level -> units with different names; `smoke` uses the smaller decoder."""

BY_ID = {u.id: u for every in UNITS.values() for u in every}
"""Units of all levels by the ids of their results."""

MODEL_ROUNDS = 6
"""Default rounds of a model: the fewest that have an interval."""
ROUNDS: dict[Level, int] = {"smoke": 5, "standard": 10, "full": 10}
"""Level -> default rounds, without warm-up."""


def units(level: Level, globs: Sequence[str] = ()) -> list[Unit]:
    """Return units of `level` that match `globs` (or all); UsageError for an unmatched glob."""
    every = UNITS[level]
    for g in globs:
        if not any(fnmatchcase(u.name, g) for u in every):
            names = ", ".join(u.name for u in every)
            raise UsageError(f"no unit of level {level} matches {g!r}; known: {names}")
    return [u for u in every if not globs or any(fnmatchcase(u.name, g) for g in globs)]
