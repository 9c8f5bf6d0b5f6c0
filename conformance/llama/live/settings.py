"""The family `settings`: two settings of llama.cpp's context must give equal results.

An id is `settings/ARCH-key=value@seed`, with those of `OWN` and the keys of the family `zoo` but for `run` and `nodes`.
Keys of `VARIED` hold for one of the two contexts; the other has the defaults, or the values of `base`:
`settings/llama-real=1,seqs=3,cache=q8_0,ubatch=9,base=cache:q8_0@1`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.model import Architecture, architecture, lacks, runnable
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, is_glob, split_glob, without_steps
from conformance.suite.family import Key, Level, keys, read_keys, split_id, without
from conformance.suite.grid import grid

from .arch import FEW, fitting, spell
from .comparison import CLOSE, SILENT, SPREADS, TOLERANCE, Comparison, judge_all, judge_by_spread, saved
from .llama import Models, device, read_id
from .scenario import BLOCKS, WINDOW
from .scenarios.harness import by_rounding, rounding
from .scenarios.settings import Setting

NAME = "settings"
OWN: Mapping[str, Key] = keys("batch=0 threads=1 op_offload=1|0 offload_kqv=1|0 reuse=1|0 base=")
"""Keys that the family `zoo` lacks."""
_OF_REQUEST = {"fa": "flash_attn", "ubatch": "n_ubatch", "unified": "unified", "swa": "swa_full", "ctx": "n_ctx",
               "cache": "type_k", "cache_v": "type_v"}  # fmt: skip
"""Keys of the family `zoo` that change no result -> fields of a request."""
VARIED = frozenset({*_OF_REQUEST, *OWN} - {"base"})
"""Keys in which two settings may differ."""
FIXED = frozenset({"run", "nodes"})
"""Keys of the family `zoo` that have no meaning here."""
AXES = {
    "fa": "- 0",
    "ubatch": "- 7 1",
    "batch": "- 33 5",
    "unified": "- 1",
    "swa": "- window",
    "ctx": "- 1024",
    "cache": "- f32 bf16",
    "threads": "- 3 8",
    "op_offload": "- 0",
    "offload_kqv": "- 0",
    "reuse": "- 0",
}
"""Key -> its values, `-` for the default: each two values of two keys meet in a case."""
_OF_ENCODERS = ("fa", "threads", "op_offload", "offload_kqv")
_BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Types of caches whose roundings are measured."""
SEQS = 3
MORE = ("gemma3", "gpt-oss", "deepseek2", "qwen35", "lfm2")
"""Further architectures: windows, sinks, latent attention, states beside caches."""


def _axes(arch: Architecture, *, windowed: bool) -> dict[str, str]:
    """Return the keys that change something in an architecture, and their values."""
    lacking = {"fa"} if not arch.flash_attn else set[str]()
    lacking |= {"unified"} if arch.unified else set()
    lacking |= set() if windowed else {"swa"}
    lacking |= AXES.keys() - set(_OF_ENCODERS) if arch.encodes else set()
    return {key: values for key, values in AXES.items() if key not in lacking}


@cache
def _rows(arch: str, *left_out: str, windowed: bool = False) -> list[dict[str, str]]:
    axes = {k: v for k, v in _axes(architecture(arch), windowed=windowed).items() if k not in left_out}
    return [_keys_of(text) for text in grid(**axes).pairs(NAME) if text]


def _keys_of(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split(",") if item)


def ids_of(arch: str, *left_out: str, **fixed: object) -> list[str]:
    """Return the ids of a covering array of the settings, but for the keys `left_out`."""
    windowed = "sliding_window" in str(fixed.get("set", "")) or any(
        key.endswith("attention.sliding_window") for key in architecture(arch).keys
    )
    own = {"real": 1, "seqs": SEQS, **{k: v for k, v in fixed.items() if k != "base"}}
    end = {"base": fixed["base"]} if "base" in fixed else {}
    return [spell(NAME, arch, {**own, **row, **end}) for row in _rows(arch, *left_out, windowed=windowed)]


def _ids(level: Level) -> list[str]:
    llama = FEW[0]
    if level == "smoke":
        return ids_of(llama)
    archs = runnable(with_variants=True) if level == "full" else [*FEW, *MORE]
    ids = [i for arch in archs for i in ids_of(arch)]
    ids += ids_of("gemma3", set=WINDOW)
    ids += [i for arch, more in BLOCKS for i in ids_of(arch, **more)]
    ids += [spell(NAME, llama, {"real": 1, "seqs": SEQS, "cache": k, "cache_v": v})
            for k in _BLOCKS for v in ("f16", "")]  # fmt: skip
    ids += ids_of(llama, "cache", cache="q8_0", cache_v="f16", base="cache:q8_0+cache_v:f16")
    return list(dict.fromkeys(ids))


def _unlisted(glob: str) -> list[str]:
    archs, rest = split_glob(glob)
    return [] if is_glob(rest) else [f"{NAME}/{a}-{rest}" for a in fitting(archs)]


@dataclass(frozen=True, slots=True)
class Two:
    """The settings that a case compares, as texts of keys."""

    fixed: str
    """The id without keys of `VARIED`."""
    varied: Mapping[str, str]
    base: Mapping[str, str]

    @property
    def differing(self) -> list[str]:
        """Keys whose values differ."""
        return [k for k in {**self.varied, **self.base} if self.varied.get(k) != self.base.get(k)]

    def words(self, key: str) -> str:
        """Format the values of a key."""
        other = f" against {self.base[key]}" if key in self.base else ""
        return f"{key}={self.varied.get(key, 'default')}{other}"


def read(case_id: str) -> Two:
    """Parse an id; UsageError if it is malformed."""
    body, seed = split_id(case_id, NAME, "ARCH-key=value,key=value")
    rest, varied = without(body, VARIED | {"base"})
    given = _keys_of(varied)
    base = dict(_item(case_id, item) for item in given.pop("base", "").split("+") if item)
    two = Two(f"{NAME}/{rest}@{seed}", given, base)
    request = read_id(two.fixed)[0]
    if found := FIXED & request.params.keys():
        raise UsageError(f"case {case_id!r}: {min(found)}: the family {NAME} has a plan of its own")
    for settings in (given, base):
        setting_of(two.fixed, settings)
    if not two.differing:
        raise UsageError(f"case {case_id!r}: a key in which two settings differ expected: {', '.join(sorted(VARIED))}")
    return two


def _item(case_id: str, item: str) -> tuple[str, str]:
    key, colon, value = item.partition(":")
    if not colon or key not in VARIED:
        raise UsageError(f"case {case_id!r}: base: KEY:VALUE expected, of {', '.join(sorted(VARIED))}; {item!r} found")
    return key, value


def setting_of(fixed: str, given: Mapping[str, str]) -> Setting:
    """Return the setting of keys; UsageError if a value is invalid."""
    own, _ = read_keys(fixed, ",".join(f"{k}={v}" for k, v in given.items() if k in OWN), OWN)
    head, _, seed = fixed.rpartition("@")
    zoo = {k: v for k, v in given.items() if k in _OF_REQUEST}
    joint = "," if without(head, {""})[0] != head or "=" in head else "-"
    text = ",".join(f"{k}={v}" for k, v in zoo.items())
    request, default = (read_id(i)[0] for i in (f"{head}{joint}{text}@{seed}" if text else fixed, fixed))
    changed = {f: getattr(request, f) for f in _OF_REQUEST.values() if getattr(request, f) != getattr(default, f)}
    params = {"n_threads": own["threads"], "n_threads_batch": own["threads"]}
    params |= {name: int(own[name]) for name in ("op_offload", "offload_kqv")}
    return Setting(changed, {k: v for k, v in params.items() if v != 1}, own["batch"], own["reuse"] == "1")


def _build(case_id: str) -> Case:
    read(case_id)
    return without_steps(case_id)


class Player:
    """Compares settings on one device."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Find the device. UnavailableError if the backend is not a ggml library."""
        self._spec, self._device = spec, device(spec)
        self._models = Models(isolation)

    def play(self, case_id: str) -> Result:
        """Compare two settings. Raises as `Process.ask`; UnavailableError if llama.cpp refuses one."""
        two = read(case_id)
        request = self._models.use(two.fixed, frozenset())
        begun = time.perf_counter()
        result = self._once(case_id, two, request)
        if result.verdict is Verdict.VACUOUS and result.detail.endswith(SILENT) and not self._models.embeddings:
            self._models.embeddings = True  # it gives embeddings in place of logits
            result = self._once(case_id, two, request)
        return replace(result, seconds=time.perf_counter() - begun)

    def _once(self, case_id: str, two: Two, request: Request) -> Result:
        found = self._compared(two, request)
        result = self._judged(case_id, found)
        if result.wrong is None:
            return result
        spread = 0.0
        try:
            if result.wrong.kind == "numbers":
                result = self._judge_by_spread(two, request, found, result)
                spread = result.metrics.get("spread", 0.0)
            if result.verdict is Verdict.FAIL and result.wrong and result.wrong.kind == "numbers":
                result = self._with_choices(two, request, result, spread)
            return self._explained(two, request, result, spread) if result.verdict is Verdict.FAIL else result
        except (BackendError, UnavailableError) as e:
            return result.noted(f"the cause was not found: {e}")

    def _judged(self, case_id: str, found: Sequence[Comparison], spread: float = 0.0) -> Result:
        pair = Pair(case_id, str(self._spec))
        return judge_all(pair, NAME, [replace(c, spread=spread or c.spread) for c in found],
                         on_cpu=self._device.on_cpu)  # fmt: skip

    def _judge_by_spread(self, two: Two, request: Request, found: Sequence[Comparison], result: Result) -> Result:
        """Judge again with the spread of models whose norm weights differ by a rounding.

        That is a rounding of float32, and the noise that the types of the caches add. Raises as `Process.ask`.
        """
        noise = _noise(two, request)
        return judge_by_spread(
            result,
            found,
            lambda draw: self._compared(two, request, nudge={"draw": draw, "noise": noise}),
            lambda moved: self._judged(result.case, moved),
            by_rounding(noise),
        )

    def _with_choices(self, two: Two, request: Request, result: Result, spread: float) -> Result:
        """Judge again with equal experts if only near-ties differ. Raises as `Process.ask`."""
        reply = self._ask(two, request, choices=True)
        if reply["wrong"] or not reply["notes"]:
            return result.noted(reply["wrong"]) if reply["wrong"] else result
        found = saved(reply["comparisons"], self._models.folder / f"{NAME}.npz")
        same = self._judged(result.case, found, spread)
        more = f" and {len(reply['notes']) - 1} more" if len(reply["notes"]) > 1 else ""
        text = f"{reply['notes'][0]}{more}; with the same experts NMSE {same.nmse:.2g}"
        return same.noted(text) if same.verdict is Verdict.PASS else result.noted(text)

    def _explained(self, two: Two, request: Request, result: Result, spread: float) -> Result:
        """Name the keys that the difference needs, and the first node that differs.

        Raises as `Process.ask`.
        """
        needed = dict(two.varied)
        for key in two.differing:
            fewer = replace(two, varied={k: v for k, v in needed.items() if k != key} | _of(two.base, key))
            if fewer.differing and self._fails(result.case, fewer, request, spread):
                needed = dict(fewer.varied)
        least = replace(two, varied=needed)
        words = "+".join(map(least.words, least.differing))
        limit = max(CLOSE if self._device.on_cpu else TOLERANCE, SPREADS * spread)
        first = self._ask(least, request, limit=limit)["first"]
        if first is None:
            return result.noted(f"needed: {words}; both agree if each node is computed by itself")
        assert result.where is not None
        where = replace(result.where, step=first["part"], op=first["op"], name=first["name"])
        text = f"{first['op']} {first['name']} is the first node that differs, NMSE {first['error']:.2g}"
        return replace(result, where=where).noted(f"needed: {words}; {text}")

    def _fails(self, case_id: str, two: Two, request: Request, spread: float) -> bool:
        try:
            return self._judged(case_id, self._compared(two, request), spread).verdict is Verdict.FAIL
        except (BackendError, UnavailableError):
            return False

    def _compared(self, two: Two, request: Request, **more: object) -> list[Comparison]:
        return saved(self._ask(two, request, **more)["comparisons"], self._models.folder / f"{NAME}.npz")

    def _ask(self, two: Two, request: Request, **more: object) -> dict[str, Any]:
        settings = [asdict(setting_of(two.fixed, given)) for given in (two.varied, two.base)]
        changes, folder = self._models.changes(request), str(self._models.folder)
        return self._models.on(self._device).ask(settings=settings, folder=folder, changes=changes, **more)

    def close(self) -> None:
        """End all processes."""
        self._models.close()


def _of(given: Mapping[str, str], key: str) -> dict[str, str]:
    return {key: given[key]} if key in given else {}


def _noise(two: Two, request: Request) -> float:
    """Return the NMSE that the types of two caches add to keys and values; 0 if equal."""
    both = [setting_of(two.fixed, given).request for given in (two.varied, two.base)]
    types = [{f: str(s.get(f, getattr(request, f))) for f in ("type_k", "type_v")} for s in both]
    return max(sum(rounding(t[f]) for t in types) if types[0][f] != types[1][f] else 0.0 for f in types[0])


FAMILY = LiveFamily(
    NAME,
    "two settings of llama.cpp's context give equal results: flash attention, batches, streams, threads, caches",
    _ids,
    _build,
    lacks=lacks,
    player=Player,
    unlisted=_unlisted,
)
