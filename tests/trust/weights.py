"""Learn from mutants of ggml which kinds of pairs of traits decide whether a case notices a fault.

Each mutant gives two sets of cases, those that notice it and those that do not; a case of the op that does not reach it
is one of the latter. A kind of pairs explains the share of the doubt (entropy) that is gone once the values of the pair
are known. Mutants that many cases notice teach nothing. Only half of the functions are learned from (`half`), so that
the mutants in the others measure what the choice is worth for faults that it has not seen.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement, product
from typing import get_args

import numpy as np

from .choose import WEIGHTS
from .kernels.journal import rows
from .kernels.ours import Reach, Sampled
from .kernels.tree import Mutant, Tree
from .traits import Kind, PairKind, traits

KINDS: tuple[PairKind, ...] = tuple(combinations_with_replacement(sorted(get_args(Kind)), 2))
MANY = 60
"""Cases, estimated, above which a mutant that so many notice teaches nothing."""
OTHERS = 600
"""Drawn cases of an op that do not reach a mutant; each stands for several."""
_VARIANT = re.compile(
    r"_(f32|f16|bf16|i32|i8|i16|f64|i?q\w*|tq\w*|mxfp4|nvfp4|x\d+|one_chunk|impl|inplace|non_quantized|same_type|generic|"
    r"ref|same_cont|any|flt|bytes|same|back|use_transposed)$"
)
"""Suffix of a function's name by which variants of one op differ."""
_VALUES = 0.72
"""Entropy in bits that chance explains, per distinct value and case: 1 / (2 ln 2)."""

Case = tuple[str, dict[tuple[Kind, str], tuple[str, ...]]]
"""Op, and what stands at each place of each kind."""


def subject(mutant: Mutant) -> str:
    """Return the function of a mutant without what tells variants of one op: their mutants are on one side."""
    name = mutant.edit.function.rpartition("::")[2].partition("<")[0].partition("(")[0]
    while (shorter := _VARIANT.sub("", name)) != name:
        name = shorter
    return name


def half(mutant: Mutant) -> int:
    """Return 1 if `weights` may learn from a mutant, 0 if it is to measure the choice."""
    return zlib.crc32(subject(mutant).encode()) % 2


def weights(tree: Tree, mutants: Iterable[Mutant]) -> dict[str, float]:
    """Return kind -> share of the doubt that it explains, the mean of those of `mutants` that teach something."""
    reached: dict[int, set[str]] = defaultdict(set)
    known: set[str] = set()
    for row in rows(tree.folder / "reach-ours.jsonl"):
        case = Reach(**row)
        if not case.way and case.case.startswith("ops/"):
            known.add(case.case)
            for number in case.seen:
                reached[number].add(case.case)
    of_op: dict[str, list[str]] = defaultdict(list)
    for i in sorted(known):
        of_op[_case(i)[0]].append(i)
    sampled = {s.number: s for s in (Sampled(**row) for row in rows(tree.folder / "sampled.jsonl"))}
    total, n = Counter[PairKind](), 0
    for mutant in mutants:
        sample = sampled.get(mutant.number)
        if sample is None or not sample.noticing:
            continue
        few = len(sample.noticing) * len(reached[mutant.number]) <= MANY * (len(sample.noticing) + len(sample.others))
        if few and (explained := _explained(sample, reached[mutant.number], of_op)):
            total.update(explained)
            n += 1
    return {" ".join(kind): round(total[kind] / n, 3) for kind in KINDS if total[kind] > 0}


def write(tree: Tree, mutants: Iterable[Mutant]) -> Mapping[str, float]:
    """Write the file of the weights and return them."""
    found = weights(tree, mutants)
    WEIGHTS.write_text(json.dumps(found, indent=0) + "\n", encoding="ascii", newline="\n")
    return found


@cache
def _case(case_id: str) -> Case:
    op, found = traits(case_id)
    places: dict[tuple[Kind, str], tuple[str, ...]] = {}
    for trait in found:
        place = trait.kind, trait.where
        places[place] = (*places.get(place, ()), trait.value)
    return op, places


def _explained(sample: Sampled, reached: set[str], of_op: Mapping[str, Sequence[str]]) -> dict[PairKind, float]:
    """Return kind -> share of the doubt about one mutant; empty if every case of its ops notices it."""
    ops = {_case(i)[0] for i in sample.noticing}
    outside = [i for op in sorted(ops) for i in of_op[op] if i not in reached]
    drawn = np.random.Generator(np.random.PCG64(sample.number)).permutation(len(outside))[:OTHERS]
    each = len(reached) / (len(sample.noticing) + len(sample.others))
    counted = [(i, True, each) for i in sample.noticing]
    counted += [(i, False, each) for i in sample.others if _case(i)[0] in ops]
    counted += [(outside[k], False, len(outside) / len(drawn)) for k in drawn]
    whole = _doubt(counted)
    places: dict[Kind, set[tuple[Kind, str]]] = defaultdict(set)
    for i in sample.noticing:
        for place in _case(i)[1]:
            places[place[0]].add(place)
    found: dict[PairKind, float] = {}
    for kind in KINDS if whole else ():
        for a, b in product(sorted(places[kind[0]]), sorted(places[kind[1]])):
            if a < b or kind[0] != kind[1]:
                share = 1 - _left(counted, a, b) / whole
                found[kind] = max(found.get(kind, 0.0), share)
    return found


def _left(counted: Sequence[tuple[str, bool, float]], a: tuple[Kind, str], b: tuple[Kind, str]) -> float:
    """Return the doubt that is left once the values at two places are known, with what chance explains."""
    cells: dict[object, list[tuple[str, bool, float]]] = defaultdict(list)
    for row in counted:
        own = _case(row[0])[1]
        cells[own.get(a), own.get(b)].append(row)
    weight = sum(w for *_, w in counted)
    noticing = sum(w for _, is_noticing, w in counted if is_noticing)
    chance = _VALUES * (len(cells) - 1) / len(counted) * min(1.0, 4 * noticing / weight)
    return sum(_doubt(cell) * sum(w for *_, w in cell) for cell in cells.values()) / weight + chance


def _doubt(counted: Iterable[tuple[str, bool, float]]) -> float:
    """Return the entropy in bits of whether a case notices."""
    weight: dict[bool, float] = defaultdict(float)
    for _, is_noticing, w in counted:
        weight[is_noticing] += w
    total = sum(weight.values())
    return -sum(w / total * math.log2(w / total) for w in weight.values() if w)
