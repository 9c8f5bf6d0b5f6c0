"""What computes stands in the witness, and a third party's adapter that delegates without a word has proven nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import conform
from planted_adapter import planted_adapter

from conformance.backend.contract import check_adapter
from conformance.backend.kernel import KernelBackend
from conformance.ggml.lib.files import find
from conformance.run.isolation.independence import is_ggml, libraries

CASES = "ops/ADD-f32+f32-*"

DERIVED = """
from backends.ggml import GgmlBackend
class Mine(GgmlBackend):
    pass
"""
LATE = """
from conformance.backend.interface import Backend
class Mine(Backend):
    def _inner(self):
        import backends.ggml
        self.inner = getattr(self, "inner", None) or backends.ggml.GgmlBackend()
        return self.inner
    def info(self):
        from conformance.backend.interface import DeviceInfo
        return DeviceInfo("mine", "NPU", "kernels of my own")
    def supports_op(self, node):
        from conformance.backend.interface import YES
        return YES
    def open(self, case):
        return self._inner().open(case)
"""
LIBRARY = """
import ctypes
import numpy as np
from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import KernelBackend
class Mine(KernelBackend):
    name = "mine"
    def info(self):
        return DeviceInfo("mine", "NPU", "kernels of my own")
    def kernels(self):
        return {{"ADD": lambda node, dst, src: np.copyto(dst, src[0] + np.tile(
            src[1], [n // m for n, m in zip(src[0].shape, src[1].shape)]))}}
    def open(self, case):
        {load}
        return super().open(case)
"""
PYTHONS = "self.lib = ctypes.CDLL({path!r})"
GONE = "import _ctypes; self.lib = ctypes.CDLL({path!r}); _ctypes.dlclose(self.lib._handle)"
LOADERS = "f = ctypes.CDLL(None).dlopen; f.restype = ctypes.c_void_p; assert f({path!r}.encode(), 1)"
MODULE = "import xllamacpp"


def loads(how: str) -> str:
    """An adapter with a kernel of its own that loads a library of ggml."""
    return LIBRARY.format(load=how.format(path=str(find(""))))


def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, *options: str) -> list[dict[str, Any]]:
    """The results of `conform run` on that adapter, of what it takes."""
    with planted_adapter(tmp_path, monkeypatch, "mine", source, "Mine"):
        words = ("run", "--backend", "mine", "--case", CASES, "--json", "run.json", *options)
        done = conform(*words, cwd=tmp_path)
    assert (tmp_path / "run.json").exists(), done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads((tmp_path / "run.json").read_text())["results"]
    executed = [r for r in results if r["verdict"] != "UNSUPPORTED"]
    assert executed, done.stdout + done.stderr
    return executed


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (DERIVED, "the adapter backends.ggml"),
        (LATE, "the adapter backends.ggml"),
        (loads(PYTHONS), "a library of ggml"),
        (loads(GONE), "a library of ggml"),
        (loads(LOADERS), "a library of ggml"),
        (loads(MODULE), "a library of ggml"),
        (DERIVED.replace("pass", "delegates = ('xdna2',)"), "the adapter backends.ggml"),
    ],
    ids=["derived", "late", "ctypes", "closed again", "by the loader itself", "a module", "another is declared"],
)
def test_who_delegates_without_a_word_is_vacuous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    """Another adapter or a ggml library, however it is loaded, that `delegates` does not name: VACUOUS, and why."""
    for result in ran(tmp_path, monkeypatch, source):
        assert result["verdict"] == "VACUOUS"
        assert says in result["detail"]
        assert "delegates = ('ggml',)" in result["detail"]


@pytest.mark.parametrize("source", [DERIVED, loads(PYTHONS)], ids=["derived", "library"])
def test_a_declared_delegate_stands_in_the_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The same with `delegates`: it passes, and its witness names the library that computed."""
    declared = source.replace("    pass", "    delegates = ('ggml',)").replace(
        "name = ", "delegates = ('ggml',)\n    name = "
    )
    for result in ran(tmp_path, monkeypatch, declared):
        assert result["verdict"] == "PASS", result["detail"]
        assert str(find("")) in " ".join(result["witness"]["libraries"])
        assert ("backends.ggml (delegate)" in result["witness"]["libraries"]) is (source is DERIVED)


def test_a_witness_names_the_library(tmp_path: Path) -> None:
    """Of our own adapters, alone and under a scheduler: with its version, of ggml with its path."""
    backends = ("cpu", "ggml", "xdna2", "openvino-stateless", "sched?devices=xdna2,ggml")
    named = [x for b in backends for x in ("--backend", b)]
    sizes = ("2048x4,b=2048x1@116", "2048x2048,b=2048x16@145")
    cases = [x for size in sizes for x in ("--case", f"ops/MUL_MAT-f32+f32-a={size}")]
    conform("run", *named, *cases, "--json", "run.json", cwd=tmp_path)
    found: dict[str, str] = {}
    for r in json.loads((tmp_path / "run.json").read_text())["results"]:
        if r["verdict"] == "PASS":
            found[r["backend"]] = found.get(r["backend"], "") + " ".join(r["witness"]["libraries"])
    assert set(found) == {*backends}
    assert "numpy " in found["cpu"]
    assert f"({find('')})" in found["ggml"]
    assert "OpenVINO" in found["openvino-stateless"] or "openvino" in found["openvino-stateless"]
    assert "xdna2: numpy" in found["sched?devices=xdna2,ggml"]


def test_a_library_of_ggml_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    """Whatever it is called: ours is one, what this Python has mapped is none."""
    disguised = tmp_path / "libfast.so"
    disguised.symlink_to(find(""))
    assert is_ggml(str(disguised))
    assert not any(map(is_ggml, [p for p in libraries() if "xllamacpp" not in p and "ggml" not in p]))


class Wrong(KernelBackend):
    """A class with a text for a tuple."""

    delegates = "ggml"

    def kernels(self) -> dict[str, Any]:
        """None."""
        return {}

    def info(self) -> Any:  # noqa: ANN401  # nobody asks
        """Nothing."""


def test_check_adapter_knows_delegates() -> None:
    """It says what `delegates` must be."""
    assert any("`delegates`; it must be a tuple of names" in f for f in check_adapter(Wrong))
