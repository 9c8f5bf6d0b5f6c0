"""The family `memory`: what llama.cpp says it holds, what is resident, and weights that are held twice."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import conform_here
from hypothesis import given
from hypothesis import strategies as st

from conformance.backend.registry import define, defined
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.breakdown import Parts, exported, of_log
from conformance.ggml.lib.llama import Llama
from conformance.live import memory
from conformance.live.memory import Growth, Held, copies
from conformance.suite.zoo.family import prepare, read
from conformance.suite.zoo.load import load_model, new_context

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


@pytest.mark.parametrize("arch", ["llama", "gemma3", "jamba"])
def test_the_map_and_the_log_say_the_same(arch: str, tmp_path: Path) -> None:
    """What this release exports as a C++ map is what it logs, to a hundredth of a MiB, caches of several kinds too."""
    library = Llama()
    library.initialise(lambda _: None)
    library.log = deque()
    request = prepare(tmp_path / "model.gguf", *read(f"zoo/{arch}-real=1,ctx=512@1"))
    context = new_context(library, load_model(library, request, mapped=False), request)
    told, exact = of_log(library.log), exported(library, context)
    library.llama.free(context)
    assert exact is not None, "the pinned wheel exports it on Linux"
    assert exact.keys() == told.keys()
    assert "CPU_Mapped" not in exact
    for name, parts in exact.items():
        for field in ("model", "context", "compute"):
            assert getattr(told[name], field) == pytest.approx(getattr(parts, field), abs=0.02 * MIB)


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


STAND_IN = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from conformance.suite.zoo import load

real, kept = load.load_model, []


def load_model(library, request, *args, **options):
    model = real(library, request, *args, **options)
    with open(request.model, "rb") as file:
        data = file.read()
    if os.environ["FAULT"] == "twice":
        kept.append(data)
    return model


load.load_model = load_model
"""
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
        for name in COPIES
    )
    (tmp_path / "conformance.toml").write_text(toml, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = defined()
    yield
    define(before)


@pytest.mark.usefixtures("stand_ins")
def test_weights_held_more_than_once_are_noticed(tmp_path: Path) -> None:
    """The wheel's CPU holds them once, each stand-in as often as it does: exit code 1, and the figures in the file.

    What is held only while the model is loaded is told and passes.
    """
    out = tmp_path / "memory.json"
    words = [word for name in ("ggml", *COPIES) for word in ("--backend", name)]
    done = conform_here("run", "--family", "memory", "-v", *words, "--json", out)
    assert done.exit_code == 1, done.output
    found = {r["backend"]: r for r in json.loads(out.read_text(encoding="utf-8"))["results"]}
    for name, (held, peak) in {"ggml": (1, 1), **COPIES}.items():
        metrics = found[name]["metrics"]
        assert found[name]["verdict"] == ("PASS" if held == 1 else "FAIL"), name
        assert metrics["copies"] == pytest.approx(held, abs=0.15), name
        assert metrics["peak_copies"] == pytest.approx(peak, abs=0.3), name
    metrics = found["ggml"]["metrics"]
    parts = sum(v for k, v in metrics.items() if k.split(" in ")[0] in ("model", "context", "compute"))
    assert metrics["stated"] == parts
    assert metrics["resident"] == pytest.approx(parts, rel=0.25)
    assert "times the weights, limit 1.5" in done.output


def test_what_cannot_be_measured_is_said() -> None:
    """No such device is an error of the user."""
    done = conform_here("run", "--family", "memory", "--backend", "ggml?device=NPU9")
    assert (done.exit_code, "NPU9" in done.output) == (2, True), done.output
