"""Precision profiles: the checks of their files, and their use by the reference and the judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from marks import needs_wheel

from conformance.backend.interface import DeviceInfo, describe
from conformance.backend.profile import Entry, Profile, parse, read
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.arithmetic import EXACT, ROUNDINGS, key_of, limit_of
from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Tensor, new_tensor
from conformance.ggml.types import F16, F32, Q4_0
from conformance.judge.budget import budget_of
from conformance.run.isolation import replies
from conformance.run.isolation.isolate import open_backend

g = Builder()
PROFILE = Profile(
    "0.1.0",
    'Vul"kan0',
    "a device",
    {"ggml": "0.25.1", "backend API": "2"},
    {
        "MUL_MAT-q4_0+f32@9": Entry("operands f16, sums f16x2", 1e-9, 8e-9, 512, "", "", ("ops/X@1", "ops/Y@2")),
        "ROPE-f32+i32": Entry("exact", 1e-9, 8e-9),
        "SUM-f32": Entry("exact", 0.5, 0.0, 1, "", "half of it is missing"),
    },
)


def _product(tokens: int, k: int = 64) -> Tensor:
    return g.mul_mat(new_tensor(Q4_0, k, 3), new_tensor(F32, k, tokens))


def test_a_profile_is_its_file() -> None:
    """Written and read, it is the same."""
    assert parse(PROFILE.to_toml(), "profile.toml") == PROFILE
    begun = replace(PROFILE, entries={}, others=True)
    assert parse(begun.to_toml(), "profile.toml") == begun


def test_what_is_not_measured_is_exact_or_has_upstreams_limit() -> None:
    """The profile decides about unmeasured keys; a measured key is judged by its entry."""
    known, unknown = _product(9), _product(1)
    strict, loose = (replace(PROFILE, others=o).arithmetic("profile") for o in (False, True))
    assert (strict.bound(unknown), loose.bound(unknown)) == (0.0, limit_of("MUL_MAT"))
    assert strict.bound(known) == loose.bound(known) == PROFILE.entries["MUL_MAT-q4_0+f32@9"].bound
    assert loose.at(known) == strict.at(known) != loose.at(unknown) == EXACT
    assert replace(PROFILE, entries={}, others=True).arithmetic("profile").bound(known) == limit_of("MUL_MAT")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("residual = 1e-09", "residual = -1.0", ["profile.toml", "MUL_MAT-q4_0+f32@9", "residual", "-1.0"]),
        ("residual = 1e-09", "residual = nan", ["residual", "nan"]),
        ("residual = 1e-09", "residual = true", ["residual", "True"]),
        ('"operands f16, sums f16x2"', '"none"', ["rounding", "operands bf16", "'none'"]),
        ("others = false", "others = 1", ["profile.toml: others", "true or false"]),
        ("terms = 512", "terms = 0", ["terms", "a whole number from 1"]),
        ("bound = 0.0", "bound = 1.0", ["bound", "0 with a finding"]),
        ("blind = ", "blinded = ", ["blinded", "is unknown"]),
        ('"ops/X@1"', "1", ["cases", "a list of texts"]),
        ("suite = ", "suites = ", ["suites", "is unknown"]),
        ("versions = {", "versions = { x = 1,", ["versions", "a table of texts"]),
        ("suite = ", "suite = = ", ["profile.toml"]),
    ],
)
def test_a_broken_profile_is_one_line(old: str, new: str, words: list[str]) -> None:
    """What is wrong is named with file, table and key."""
    text = PROFILE.to_toml()
    assert old in text
    with pytest.raises(UsageError) as e:
        parse(text.replace(old, new, 1), "profile.toml")
    assert all(w in str(e.value) for w in words), str(e.value)
    assert "\n" not in str(e.value)


def test_an_empty_or_absent_profile(tmp_path: Path) -> None:
    """Nothing is learnt from no file, nor from one without a table."""
    with pytest.raises(UsageError, match=r"absent\.toml"):
        read(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match=r"tables .* expected"):
        parse('suite = "1"\ndevice = "a"\ndescription = "b"\n', "profile.toml")


def test_a_profile_is_of_one_device() -> None:
    """A later version of the library may be held against it, another device not."""
    PROFILE.check(DeviceInfo("ggml", PROFILE.device, "a device", {"ggml": "99"}), "profile.toml")
    with pytest.raises(UsageError, match="conform precision"):
        PROFILE.check(DeviceInfo("ggml", PROFILE.device, "another device"), "profile.toml")


def test_keys_tell_the_kernels_of_products_apart() -> None:
    """Tokens, batches, permuted operands and a set precision may have another kernel; sizes have not."""
    w, x = new_tensor(F16, 64, 4, 2), new_tensor(F32, 64, 4, 2)
    assert key_of(_product(1)) == "MUL_MAT-q4_0+f32@1"
    assert key_of(_product(8)) == "MUL_MAT-q4_0+f32@2"
    assert key_of(_product(300, 4096)) == "MUL_MAT-q4_0+f32@9"
    assert key_of(g.mul_mat(g.permute(w, 0, 2, 1, 3), g.permute(x, 0, 2, 1, 3))) == "MUL_MAT-f16+f32@2,batch,view=ab"
    precise = g.mul_mat(w, x)
    g.mul_mat_set_prec(precise, 10)
    assert key_of(precise) == "MUL_MAT-f16+f32@2,batch,prec=F32"
    assert key_of(g.gelu(w)) == "UNARY.GELU-f16"
    assert key_of(g.cast(x, Q4_0)) == "CPY-f32+q4_0+q4_0"


def test_arithmetic_of_a_profile() -> None:
    """A node has the rounding and the bound of its key; one that was not measured is exact."""
    a = PROFILE.arithmetic("profile x.toml")
    short, long, other = _product(9), _product(9, 1024), _product(1)
    assert a.at(short) is ROUNDINGS["operands f16, sums f16x2"]
    assert a.at(other) is EXACT
    assert (a.bound(short, 64), a.bound(long, 1024), a.bound(other, 64)) == (8e-9, 1.6e-8, 0.0)
    assert budget_of(short, a).nmse > 8e-9 > budget_of(other, a).nmse
    assert budget_of(short, a).profile == "profile x.toml: MUL_MAT-q4_0+f32@9, operands f16, sums f16x2"
    assert budget_of(other, a).profile == ""


def test_arithmetic_of_a_profile_crosses_the_wire() -> None:
    """A backend in another process declares what it declares in this one."""
    a = PROFILE.arithmetic("profile x.toml")
    sent = json.loads(json.dumps(describe(a)))
    assert replies.record(type(a), sent, "arithmetic") == a


@needs_wheel
def test_the_adapter_takes_a_profile(tmp_path: Path) -> None:
    """`ggml?profile=FILE` declares its arithmetic; another device's profile and a second declaration are refused."""
    plain = open_backend(Spec("ggml"))
    info = plain.info()
    plain.close()
    path = tmp_path / "profile.toml"
    path.write_text(replace(PROFILE, device=info.device, description=info.description).to_toml(), encoding="utf-8")
    backend = open_backend(Spec("ggml", (("profile", str(path)),)))
    try:
        assert backend.arithmetic() == PROFILE.arithmetic(f"profile {path}")
        assert backend.arithmetic_in(Case("x", {}, [])) == backend.arithmetic()
    finally:
        backend.close()
    with pytest.raises(UsageError, match="cannot be combined with it"):
        open_backend(Spec("ggml", (("profile", str(path)), ("products", "f16"))))
    path.write_text(PROFILE.to_toml(), encoding="utf-8")
    with pytest.raises(UsageError, match="conform precision"):
        open_backend(Spec("ggml", (("profile", str(path)),)))


def test_a_profile_is_printed(tmp_path: Path) -> None:
    """What rounds, what is allowed, what is no rounding; a broken file is one line and exit code 2."""
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE.to_toml(), encoding="utf-8")
    done = CliRunner().invoke(main, ["precision", str(path)])
    assert done.exit_code == 0
    assert "q4_0+f32@9" in done.output
    assert "operands f16, sums f16x2" in done.output
    assert "not a rounding error: SUM-f32: half of it is missing" in done.output
    path.write_text("op = 1", encoding="utf-8")
    assert CliRunner().invoke(main, ["precision", str(path)]).exit_code == 2
