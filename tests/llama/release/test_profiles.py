"""A device that declares nothing is measured before it is judged, once, and whoever has no time goes on later."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from conformance.backend.profile import Profile, read
from conformance.backend.registry import Spec
from conformance.builds.build import Build, DeviceOf
from conformance.llama.release import profiles as module
from conformance.llama.release.profiles import Profiles
from conformance.llama.release.target import Target
from conformance.run import learn
from conformance.run.isolation.isolate import Isolation
from conformance.run.learn import plain

KEYS = {
    "ADD-f32+f32": ["ops/ADD-f32+f32-a=10x5x4x3,b=10x5x4x3@1"],
    "SQR-f32": ["ops/SQR-f32-ne=10x5@1"],
    "UNARY.SILU-f32": ["ops/UNARY.SILU-f32-ne=10x5@1"],
}
DEVICE = DeviceOf("CPU", "GPU", "stands in for a GPU", software=True, buffer_types=())
BUILD = Build("x", Path("/x"), "0.26.0", "", (DEVICE,), (), llama=False, left_out=())
GPU = Target("GPU", Spec("ggml", (("device", "CPU"),)), None)
PLAIN = Target("CPU", Spec("ggml"), None)


def _profiles(folder: Path, monkeypatch: pytest.MonkeyPatch, step: float) -> Profiles:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(learn, "plain", lambda *_: KEYS)
    ticks = count()
    return Profiles(folder, Isolation(), clock=lambda: step * next(ticks))


def test_only_a_device_that_declares_nothing_gets_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile has each key that the level uses; a CPU says itself how it rounds."""
    monkeypatch.setattr(module, "CPU", "the CPU")
    profiles = _profiles(tmp_path, monkeypatch, 0.0)
    plain, gpu = profiles.give([PLAIN, GPU], BUILD, None)
    assert (plain, plain.is_measured, gpu.is_measured) == (PLAIN, False, True)
    assert profiles.measure(gpu, BUILD, None, 60.0) == ""
    path = Path(dict(gpu.build.options)["profile"])
    assert set(read(path).entries) >= {"ADD-f32+f32", "SQR-f32"}
    assert path.parent == tmp_path


def test_a_profile_that_is_not_finished_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the time did not do to measure is judged by upstream's limits, which is said; the next run measures on."""
    monkeypatch.setattr(module, "CPU", "the CPU")
    profiles = _profiles(tmp_path, monkeypatch, 0.6)
    (target,) = profiles.give([GPU], BUILD, None)
    note = profiles.measure(target, BUILD, None, 1.0)
    (path,) = tmp_path.glob("*.toml")
    assert read(path).others
    assert note.endswith(f" of {len(KEYS)} keys not measured: upstream's limits hold there")
    begun = set(read(path).entries)
    assert 0 < len(begun) < len(KEYS)
    learnt: list[str] = []
    real = learn.learn

    def heard(profile: Profile, backend: Any, oracle: Any, key: str, ids: Any) -> Profile:  # noqa: ANN401  # passed on
        learnt.append(key)
        return real(profile, backend, oracle, key, ids)

    monkeypatch.setattr(learn, "learn", heard)
    assert _profiles(tmp_path, monkeypatch, 0.0).measure(target, BUILD, None, 60.0) == ""
    assert begun.isdisjoint(learnt)
    assert dict(target.build.options)["profile"] == str(path)


def test_choosing_what_to_measure_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds of a processor, minutes of a busy one; the profile without a key is there and judges."""
    monkeypatch.setattr(module, "CPU", "the CPU")
    profiles = _profiles(tmp_path, monkeypatch, 0.6)
    monkeypatch.setattr(learn, "plain", plain)
    (target,) = profiles.give([GPU], BUILD, None)
    assert profiles.measure(target, BUILD, None, 10.0) == "rounding not measured: upstream's limits hold there"
    assert profiles.clock() < 20
    (path,) = tmp_path.glob("*.toml")
    assert (read(path).entries, read(path).others) == ({}, True)


def test_a_profile_of_other_libraries_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build tree that was compiled again has the version of before and other kernels."""
    monkeypatch.setattr(module, "CPU", "the CPU")
    library = tmp_path / "libggml.so"
    library.write_bytes(b"one")
    build = replace(BUILD, path=library)
    profiles = _profiles(tmp_path / "profiles", monkeypatch, 0.0)
    (gpu,) = profiles.give([GPU], build, None)
    profiles.measure(gpu, build, None, 60.0)
    path = Path(dict(gpu.build.options)["profile"])
    before = read(path)
    library.write_bytes(b"two")
    profiles.measure(gpu, build, None, 60.0)
    after = read(path)
    assert before.build != after.build
    assert before.entries == after.entries
