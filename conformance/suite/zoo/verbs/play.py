"""Play verbs on devices and judge what came of their two ways."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from conformance.ggml.errors import ConformanceError
from conformance.suite.zoo.family import Request, prepare, read
from conformance.suite.zoo.play import TOLERANCE, Device, Played, conduct, nmse

from .desk import Pair
from .table import VERBS

ENVIRONMENT = {"LLAMA_SET_ROWS": "1"}
"""Builds of summer 2025 use a graph again only so; later ones always do."""
SILENT = "every result is 0"
CLOSE = 1e-5
"""NMSE of two ways on a CPU, whose kernels are the same: sums in another order. A pair whose keys were rounded once
more is `worth` something beside."""
MASKED = -1e30
"""Logits at or below this are those of tokens that a model never gives; their energy would hide all others."""
ON_CPU = ("", "CPU")
"""Devices on which equal kernels on equal values give equal bits."""


def play_verbs(
    case_id: str, devices: Sequence[Device], names: Sequence[str], time_limit: float = 60.0
) -> dict[tuple[str, str], Played]:
    """Play verbs of `VERBS` with a model on devices. Both ways of a verb run on the device, so nothing else judges it.

    `time_limit`: seconds that one verb may take.

    Returns:
        (device's name, verb's name) -> what came of it; UNSUPPORTED says in its detail what the model or library lacks,
        or that llama.cpp refused.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as name:
        folder = Path(name)
        try:
            request = prepare(folder / "model.gguf", *read(case_id))
        except ConformanceError as e:
            return {(d.name, verb): Played("NO REFERENCE", f"no model: {e}") for d in devices for verb in names}
        out = {}
        for d in devices:
            mine = replace(request, lib=d.lib)
            played = dict(_on(mine, d, names, folder, time_limit))
            if any(p.detail.endswith(SILENT) for p in played.values()):  # it gives embeddings in place of logits
                played = dict(_on(replace(mine, embeddings=True), d, names, folder, time_limit))
            out.update({(d.name, n): p for n, p in played.items()})
        return out


def _on(
    request: Request, d: Device, names: Sequence[str], folder: Path, time_limit: float
) -> Iterator[tuple[str, Played]]:
    """Verbs on one device, each part of a verb in a process of its own: what a part left is in files."""
    device = replace(d, environment={**ENVIRONMENT, **d.environment})
    ended = {}
    for part in range(max((VERBS[n].parts for n in names), default=0)):
        asks = {n: {"verb": n, "part": part, "folder": str(folder)} for n in names if VERBS[n].parts > part}
        asks = {n: ask for n, ask in asks.items() if n not in ended}
        played = _alive(request, device, asks, lambda n, reply: judge(reply, folder, n, device), time_limit)
        ended.update({n: p for n, p in played.items() if p.verdict != "PASS" or VERBS[n].parts == part + 1})
    yield from ended.items()


def _alive(
    request: Request,
    device: Device,
    asks: Mapping[str, Mapping[str, Any]],
    read: Callable[[str, Mapping[str, Any]], Played],
    time_limit: float,
) -> dict[str, Played]:
    """As `conduct`; of a model that dies with each of three verbs, far from each other in the table, no more are asked:
    they have NO REFERENCE.
    """
    names = list(asks)
    first = {names[i]: asks[names[i]] for i in (0, len(names) // 2, -1)} if names else {}
    played = conduct(request, device, first, read, time_limit)
    rest = {n: ask for n, ask in asks.items() if n not in first}
    if played and rest and all(p.verdict in ("CRASH", "TIMEOUT") for p in played.values()):
        why = f"it dies with {', '.join(first)}, so no more were tried"
        return {**played, **{n: Played("NO REFERENCE", why) for n in rest}}
    return {**played, **(conduct(request, device, rest, read, time_limit) if rest else {})}


def judge(reply: Mapping[str, Any], folder: Path, verb: str, device: Device) -> Played:
    """What came of a verb, by the worker's reply and the arrays that it left in `folder`."""
    if "unsupported" in reply:
        return Played("UNSUPPORTED", reply["unsupported"])
    if "failed" in reply:
        more = " / ".join(c for c in reply["complaints"] if c not in reply["failed"])
        return Played("ERROR", f"{reply['failed']}: {more}" if more else reply["failed"])
    if reply["more"]:
        return Played("PASS")
    with np.load(folder / f"{verb}.npz") as file:
        pairs = [Pair(**p, actual=file[f"actual{i}"], expected=file[f"expected{i}"])
                 for i, p in enumerate(reply["pairs"])]  # fmt: skip
    return judge_pairs(pairs, on_cpu=device.device in ON_CPU)


def judge_pairs(pairs: Sequence[Pair], *, on_cpu: bool) -> Played:
    """PASS where all pairs agree; FAIL names the first that does not; VACUOUS if nothing was compared or changed.

    `on_cpu`: two ways must agree within `CLOSE` there, and to the bit where the pair says so; else within the zoo's
    `TOLERANCE`. Either is wider by what the pair is `worth`.
    """
    if all(pair.apart for pair in pairs):
        return Played("VACUOUS", "nothing was compared")
    played = Played("PASS", nmse=0.0)
    for i, pair in enumerate(pairs):
        error = _error(pair)
        if pair.apart:
            if error <= TOLERANCE:
                return Played("VACUOUS", f"{pair.what}: the two ways must differ, NMSE {error:.2g} found")
            continue
        if not pair.expected.any():
            return Played("VACUOUS", f"{pair.what}: {SILENT}")
        played.nmse = max(played.nmse or 0.0, error)
        exact = on_cpu and pair.exact
        tolerance = (CLOSE if on_cpu else TOLERANCE) + pair.worth
        must = "equality to the bit" if exact else f"at most {tolerance:.2g}"
        if error > (0.0 if exact else tolerance):
            what = f"NMSE {error:.2g}, {must} expected" if error < inf else _why_infinite(pair)
            return Played("FAIL", f"{pair.what}: {what}", nmse=error, step=i)
    return played


def _error(pair: Pair) -> float:
    """NMSE of what is not masked; inf where not the same is."""
    masked = pair.expected <= MASKED
    if pair.actual.shape != masked.shape or not np.array_equal(pair.actual <= MASKED, masked):
        return inf
    return nmse(pair.actual[~masked], pair.expected[~masked])


def _why_infinite(pair: Pair) -> str:
    if pair.actual.shape != pair.expected.shape:
        return f"results of shape {list(pair.expected.shape)} expected, {list(pair.actual.shape)} found"
    if not np.isfinite(pair.expected).all():
        return "NaN or infinity in what it is compared with"
    return "NaN or infinity" if not np.isfinite(pair.actual).all() else "other tokens are masked"
