"""Weights that an adapter holds more than once are measured on its process, whatever its witness says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import conform, conform_here

from conformance.backend.registry import Spec
from conformance.perf import held
from conformance.perf.gates import SHIPPED, loads

ROOT = Path(held.__file__).parents[2]
HOARD = """
import os
if os.environ.get("HOARD"):
    import numpy as np
    from backends.openvino import weights
    own, kept = weights.WeightStore.get, []

    def get(self, node, t, read):
        known = len(self._stored)
        found = own(self, node, t, read)
        if found is not None and len(self._stored) > known:
            data = np.ones(int(found.nbytes * float(os.environ["HOARD"])), np.uint8)
            kept.append(data)
        return found

    weights.WeightStore.get = get
if os.environ.get("WIDE"):
    from backends.openvino import weights
    weights._CHUNK = 1 << 22
"""
"""More of each weight in `WeightStore.get`, of which the witness knows nothing; or many numbers converted at a time."""
PLANTS = {
    "half-more": ("HOARD", "0.45"),
    "once-more": ("HOARD", "1"),
    "thrice-more": ("HOARD", "3"),
    "wide-chunks": ("WIDE", "1"),
}
"""Backend -> its variable and value. A constant has 1.11 of the bytes of Q4_0: 0.45 of it is half a copy."""


@pytest.fixture
def plants(tmp_path: Path) -> Path:
    """A folder with an `openvino-stateless` for each of `PLANTS`."""
    (tmp_path / "sitecustomize.py").write_text(HOARD, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    toml = "".join(
        f'[backend.{name}]\nadapter = "openvino-stateless"\n'
        f"environment = {{ PYTHONPATH = {json.dumps(path)}, {key} = {json.dumps(value)} }}\n"
        for name, (key, value) in PLANTS.items()
    )
    (tmp_path / "conformance.toml").write_text(toml, encoding="utf-8")
    return tmp_path


def test_half_a_copy_of_the_weights_is_noticed(plants: Path) -> None:
    """The adapter as it is passes; half a copy more does not, and the verdict lists the parts of the limit."""
    names = ("openvino-stateless", "half-more", "once-more", "wide-chunks")
    words = [word for name in names for word in ("--backend", name)]
    done = conform("run", "-v", "--family", "memory", *words, "--json", "memory.json", cwd=plants)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads((plants / "memory.json").read_text(encoding="utf-8"))["results"]
    found = {r["backend"]: r["metrics"] for r in rows}
    assert [r["verdict"] for r in rows] == ["PASS", "FAIL", "FAIL", "FAIL"]
    base = found["openvino-stateless"]
    assert base["limit"] == pytest.approx(3 * 5 / 4.5 + held.HELD_MARGIN)
    assert found["half-more"]["copies"] - base["copies"] == pytest.approx(0.5, abs=0.1)
    said = " ".join(done.stdout.split())
    assert "times the weights, limit 3.43" in said
    assert "1.11 constants of all programs" in said
    assert "2.22 packed by the kernels of two programs" in said


def test_what_is_held_only_while_weights_are_converted_is_noticed(plants: Path) -> None:
    """Float32 chunks of 16 MiB, not of 1 MiB: at the end nothing is left of them, and the peak is over its limit."""
    done = conform("run", "--family", "memory", "--backend", "wide-chunks", "--json", "memory.json", cwd=plants)
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = json.loads((plants / "memory.json").read_text(encoding="utf-8"))["results"]
    assert row["metrics"]["copies"] < row["metrics"]["limit"]
    assert row["metrics"]["peak_copies"] > row["metrics"]["peak_limit"] + 0.5
    assert "peak over the limit" in json.dumps(row)


@pytest.mark.parametrize("weight_type", held.TYPES)
def test_our_adapters_hold_weights_as_often_as_their_layouts_need(weight_type: str, tmp_path: Path) -> None:
    """In the end and at the worst moment, and so near to the derived number that half a copy more is beyond it."""
    names = ("cpu", "npu", "openvino-stateful", "xdna2")
    words = [word for name in names for word in ("--backend", name)]
    case = f"memory/w={weight_type}@1"
    done = conform("run", "--case", case, *words, "--json", "memory.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))["results"]
    found = {r["backend"]: r["metrics"] for r in rows}
    for name in names:
        metrics = found[name]
        assert metrics["copies"] == pytest.approx(metrics["limit"] - held.HELD_MARGIN, abs=0.05), name
        assert metrics["copies"] + 0.46 > metrics["limit"], name
        assert metrics["peak_copies"] + 0.46 > metrics["peak_limit"], name


def test_limits_are_derived_from_layouts() -> None:
    """A limit is computed from bits per weight, not from a measurement; its reason names each part."""
    allowed = held.Allowed.of(Spec("xdna2"), "q4_0", 1.0)
    assert allowed is not None
    assert allowed.held == pytest.approx(1 + 8 / 4.5 + held.HELD_MARGIN)
    assert allowed.why.startswith("1.00 the bytes as written, which `read` returns; 1.78 int8")
    reference = held.Allowed.of(Spec("cpu"), "q8_0", 0.5)
    assert reference is not None
    assert reference.peak == pytest.approx(1 + 0.5 * 96 / 8.5 + held.PEAK_MARGIN)
    assert held.Allowed.of(Spec("openvino-stateless"), "iq2_xs", 1.0) is None


def test_the_gate_measures_weights(plants: Path) -> None:
    """The shipped demand: right for the adapter as it is, wrong with three more copies that no witness tells of."""
    gates = loads(SHIPPED.read_text(encoding="utf-8"), str(SHIPPED)).gates
    (own,) = (g for g in gates if g.name == "weights are held as they are quantised")
    assert (own.counter, own.relation) == ("memory.held", "<=")
    text = 'level = "smoke"\n' + "".join(
        f'[[gate]]\nname = "{name}"\nkind = "counter"\nunit = "memory"\nbackend = "{name}"\n'
        f'expect = "memory.held <= {own.limit:.0f}"\n'
        for name in ("openvino-stateless", "thrice-more")
    )
    (plants / "gates.toml").write_text(text, encoding="utf-8")
    done = conform("gate", "gates.toml", "--json", "perf.json", cwd=plants)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads((plants / "perf.json").read_text(encoding="utf-8"))["results"]
    answers = {r["case"]: r for r in rows}
    assert answers["gate/openvino-stateless"]["verdict"] == "PASS"
    assert answers["gate/thrice-more"]["verdict"] == "FAIL"
    assert answers["gate/thrice-more"]["metrics"]["estimate"] > own.limit + 200


def test_what_cannot_be_measured_of_an_adapter_is_said(tmp_path: Path) -> None:
    """A type without allowance, a scheduler, a model for llama.cpp: the reason, and exit code 3."""
    (tmp_path / "m.gguf").touch()
    model = f"model={tmp_path}/m.gguf"
    for spec, keys, said in (
        ("cpu", "w=iq2_xs", "set copies=N in the id"),
        ("sched?devices=cpu,xdna2", "w=q4_0", "process of its own expected"),
        ("cpu", model, "m.gguf is for llama.cpp"),
    ):
        done = conform_here("run", "-v", "--backend", spec, "--case", f"memory/{keys}@1")
        assert (done.exit_code, said in " ".join(done.output.split())) == (3, True), done.output
