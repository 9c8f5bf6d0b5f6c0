"""The family `memory`: what llama.cpp says it holds, what is resident, and weights that are held twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from commands import conform_here
from hypothesis import given
from hypothesis import strategies as st

from conformance.backend.registry import define, defined
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.breakdown import Parts, of_log
from conformance.judge.verdict import Result, Verdict
from conformance.llama.live import memory
from conformance.llama.live.held import ROUNDS, growth
from conformance.llama.live.memory import LEAK, RELEVANT, REPEATS, Growth, Held, copies, differing

ROOT = Path(memory.__file__).parents[2]
MIB = 1 << 20
LOG = """
load_tensors:   CPU_Mapped model buffer size =    32.80 MiB
load_tensors:        CUDA0 model buffer size =   504.00 MiB
llama_kv_cache:        CPU KV buffer size =     1.00 MiB
llama_kv_cache:        CPU KV buffer size =     0.25 MiB
llama_memory_recurrent:      CUDA0 RS buffer size =     3.50 MiB
sched_reserve:        CPU compute buffer size =    17.13 MiB
sched_reserve:        CPU compute buffer size =    12.00 MiB
llama_context:        CPU  output buffer size =     0.12 MiB
"""


def test_every_buffer_that_llama_cpp_logs_counts_once() -> None:
    """Caches of one type add up, a compute buffer is as it was reserved last; outputs are not in the breakdown."""
    found = of_log(LOG.splitlines())
    sizes = {n: tuple(round(x / MIB, 2) for x in (p.model, p.context, p.compute, p.self)) for n, p in found.items()}
    assert sizes == {
        "CPU_Mapped": (32.8, 0, 0, 32.8),
        "CUDA0": (504, 3.5, 0, 507.5),
        "CPU": (0, 1.25, 12, 13.25),
    }


def _held(weights: int, held: int, device: int | None = None) -> Held:
    return Held({"CPU": Parts(weights, 5, 7)}, held, held + 3, device)


CPU = Growth(_held(4 * MIB, 7 * MIB), _held(104 * MIB, 108 * MIB))


@given(st.integers(0, 3 * 100 * MIB), st.integers(0, 500 * MIB), st.sampled_from(["host", "device", "both"]))
def test_what_is_held_beside_is_counted_in_units_of_weights(beside: int, runtime: int, where: str) -> None:
    """In either memory; a runtime that takes as much for any model does not count."""
    on_host = {"host": beside, "device": 0, "both": beside // 2}[where]
    device = None if where == "host" else beside - on_host
    growth = Growth(
        _held(4 * MIB, 7 * MIB + runtime, None if device is None else 0),
        _held(104 * MIB, 108 * MIB + runtime + on_host, device),
    )
    assert copies(growth, CPU).held == pytest.approx(1 + beside / (100 * MIB))


@pytest.mark.parametrize("large", [_held(104 * MIB, 40 * MIB), _held(104 * MIB, 180 * MIB), _held(4 * MIB, 108 * MIB)])
def test_a_machine_whose_own_figures_make_no_sense_is_not_judged(large: Held) -> None:
    """Where llama.cpp's own CPU does not hold its weights once, or both models are alike, there is no answer."""
    with pytest.raises(UsageError, match=r"measurements on this machine are invalid|a model of more weights"):
        copies(CPU, replace(CPU, large=large))


@given(st.integers(0, 1 << 20), st.lists(st.integers(0, 1 << 20), min_size=ROUNDS + 1, max_size=ROUNDS + 1))
def test_what_is_allocated_once_is_no_leak(leak: int, once: list[int]) -> None:
    """A leak in each of the repeated calls is measured; allocations that one round lacks do not count."""
    once[-1] = 0
    sizes = [0]

    def repeat() -> None:
        sizes.append(sizes[-1] + leak + once[len(sizes) - 1])

    assert growth(lambda: sizes[-1], repeat, ROUNDS) == leak


CASE = memory.BUILDS[0]
SIZES = st.dictionaries(st.sampled_from(["resident", "loading", "model in CPU", "context in CPU"]),
                        st.integers(1, 1 << 30).map(float), min_size=4)  # fmt: skip


def _result(metrics: Mapping[str, float]) -> Result:
    return Result(CASE, "ggml", Verdict.PASS, metrics={"step": 0.0, "cycle": 0.0, **metrics})


def _differing(build: Result, base: Result, again: Sequence[Result]) -> dict[str, tuple[int, int]]:
    """Metric -> what is expected and the limit; `again` are the results of repeated runs."""
    runs = iter(again)
    ids = list(differing(build, base, lambda _: next(runs)))
    own = [memory._read_of_builds(i)[1] for i in ids]
    return {o["of"].replace(".", " in "): (o["expected"], o["limit"]) for o in own}


@given(SIZES, st.floats(-RELEVANT / 2, RELEVANT / 2))
def test_equal_builds_do_not_differ(sizes: dict[str, float], noise: float) -> None:
    """Builds whose sizes differ by less than what is relevant do not run again."""
    noisy = _result({k: v * (1 + noise) for k, v in sizes.items()} | {"step": LEAK / 2})
    assert (_differing(noisy, _result(sizes), ()), _differing(_result(sizes), noisy, ())) == ({}, {})


@given(SIZES, st.sampled_from(["resident", "loading", "context in CPU", "step", "cycle"]), st.booleans())
def test_a_metric_that_differs_is_a_case_of_its_own(sizes: dict[str, float], name: str, base_has_more: bool) -> None:
    """Its limit lies between the builds, whichever of them has more; both can run it."""
    less, more = _result(sizes), _result(sizes)
    more.metrics[name] += 64 + 0.1 * more.metrics[name]
    pair = (less, more) if base_has_more else (more, less)
    ((found, (expected, limit)),) = _differing(*pair, [less] * REPEATS).items()
    assert found == name
    assert less.metrics[name] <= expected <= limit < more.metrics[name]


@given(SIZES, st.floats(0.02, 1.0))
def test_a_limit_is_learned_from_the_noise(sizes: dict[str, float], noise: float) -> None:
    """If the side with less memory reaches the other's size in one of its runs, the builds do not differ."""
    more = _result({k: v * (1 + noise) for k, v in sizes.items()})
    less = _result(sizes)
    assert _differing(more, less, [less] * (REPEATS - 1) + [more]) == {}


def test_buffers_of_which_a_build_says_nothing_are_not_compared() -> None:
    """Also a type of buffers that both have, of which little changes, is judged by all buffers of its kind."""
    here, there = _result({"model in CPU": 1e9, "model in CPU_REPACK": 1e5}), _result({"model in CPU": 1e9})
    assert _differing(here, there, ()) == {}
    assert _differing(here, _result({}), ()) == {}


STAND_IN = f"""
import ctypes, mmap, os, sys
from dataclasses import replace
sys.path.insert(0, {str(ROOT)!r})
from conformance.ggml.lib import llama
from conformance.llama.zoo import load

load_model, new_context, start = load.load_model, load.new_context, llama.Llama.__init__
fault, kept = os.environ["FAULT"], []


def loads(library, request, *args, **options):
    model = load_model(library, request, *args, **options)
    with open(request.model, "rb") as file:
        if fault == "mapping":
            kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        if fault in ("meanwhile", "twice"):
            data = file.read()
    if fault == "twice":
        kept.append(data)
    return model


def makes(library, model, request, *args, **options):
    n = request.n_ctx * 9 // 8 if fault == "context" else request.n_ctx
    return new_context(library, model, replace(request, n_ctx=n), *args, **options)


def starts(self, *args):
    start(self, *args)
    decode, malloc = self.llama.decode, ctypes.CDLL(None).malloc
    self.llama.decode = lambda *given: (malloc(64), decode(*given))[1] if fault == "leak" else decode(*given)


load.load_model, load.new_context, llama.Llama.__init__ = loads, makes, starts
"""
FAULTS = {"leak": "step", "mapping": "cycle", "context": "context in CPU", "meanwhile": "loading"}
"""Fault of a stand-in -> the metric that shows it: 64 bytes per step, a file that stays mapped, an eighth more
cells, the file's bytes twice while it loads."""
COPIES = {"meanwhile": (1, 2), "twice": (2, 2)}
"""Fault of a stand-in -> how often its process holds the weights, in the end and at the worst moment: bytes of the file
while it loads only, or kept."""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend for each fault: the wheel's CPU, whose process keeps more than llama.cpp says; models are smaller."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setattr(memory, "_LARGE", 4096)
    toml = "".join(
        f'[backend.{name}]\nadapter = "ggml"\noptions = {{ device = "CPU" }}\n'
        f'environment = {{ PYTHONPATH = {json.dumps(path)}, FAULT = "{name}" }}\n'
        for name in {*COPIES, *FAULTS}
    )
    (tmp_path / "conformance.toml").write_text(toml, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = defined()
    yield
    define(before)


@pytest.mark.usefixtures("stand_ins")
def test_weights_held_more_than_once_are_noticed(tmp_path: Path) -> None:
    """The wheel's CPU holds them once, each stand-in as often as it does: exit code 1, and the figures in the file.

    What is held only while the model is loaded is a peak over the limit.
    """
    out = tmp_path / "memory.json"
    words = [word for name in ("ggml", *COPIES) for word in ("--backend", name)]
    done = conform_here("run", "--family", "memory", "-v", *words, "--json", out)
    assert done.exit_code == 1, done.output
    found = {r["backend"]: r for r in json.loads(out.read_text(encoding="utf-8"))["results"]}
    for name, (held, peak) in {"ggml": (1, 1), **COPIES}.items():
        metrics = found[name]["metrics"]
        assert found[name]["verdict"] == ("PASS" if peak == 1 else "FAIL"), name
        assert metrics["copies"] == pytest.approx(held, abs=0.15), name
        assert metrics["peak_copies"] == pytest.approx(peak, abs=0.3), name
    metrics = found["ggml"]["metrics"]
    parts = sum(v for k, v in metrics.items() if k.split(" in ")[0] in ("model", "context", "compute"))
    assert metrics["stated"] == parts
    assert metrics["resident"] == pytest.approx(parts, rel=0.25)
    assert "times the weights, limit 1.10" in done.output


@pytest.mark.usefixtures("stand_ins")
def test_faults_of_a_build_are_noticed(tmp_path: Path) -> None:
    """A leak fails by itself; what a build has more than another is found by the metric that shows it."""
    out, case = tmp_path / "memory.json", "memory/llama-real=1,ctx=2048@1"
    words = [word for name in ("ggml", *FAULTS) for word in ("--backend", name)]
    done = conform_here("run", "--case", case, *words, "--json", out)
    assert done.exit_code == 1, done.output
    found = {r["backend"]: Result.from_json(r) for r in json.loads(out.read_text(encoding="utf-8"))["results"]}
    base = found.pop("ggml")
    assert base.verdict is Verdict.PASS, base.detail
    for name, metric in FAULTS.items():
        assert found[name].verdict is (Verdict.FAIL if metric in ("step", "cycle") else Verdict.PASS), name
        ids = list(differing(found[name], base, lambda r: r))
        shown = [memory._read_of_builds(i)[1]["of"].replace(".", " in ") for i in ids]
        assert metric in shown, name
    assert found["leak"].metrics["step"] == pytest.approx(80, abs=8), "malloc adds 16 bytes"


def test_what_cannot_be_measured_is_said() -> None:
    """No such device is an error of the user."""
    done = conform_here("run", "--family", "memory", "--backend", "ggml?device=NPU9")
    assert (done.exit_code, "NPU9" in done.output) == (2, True), done.output
