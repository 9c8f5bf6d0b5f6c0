"""Nobody grants himself an error: what adapters, profiles and arithmetics declare stays within upstream's limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import conform
from planted_adapter import planted_adapter

from conformance.backend.profile import parse
from conformance.backend.registry import Spec, create
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, LIMIT, ROUNDINGS, Arithmetic, Mixed, excess, key_of, limit_at, limit_of
from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import new_tensor, packed_nbytes
from conformance.ggml.types import BF16, F16, F32, I64, Q4_0, Q8_0, GGMLType
from conformance.judge.budget import ABOVE_UPSTREAM, ROUNDED, budget_of
from conformance.judge.compare import compare
from conformance.judge.judge import Chain
from conformance.run.execute import execute
from conformance.run.session.select import build
from conformance.suite import FAMILIES

g = Builder()

ZEROS = """
from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import KernelBackend
from conformance.ggml.arithmetic import Arithmetic

class Zeros(KernelBackend):
    name = "zeros"

    def info(self):
        return DeviceInfo("zeros", "zeros", "returns zeros for whatever it is asked")

    def kernels(self):
        return {"ADD": lambda node, dst, src: None, "SUM": lambda node, dst, src: None}

    def arithmetic(self):
        return Arithmetic("mine", bounds={"ADD-f32+f32": 1e30, "ADD-f16+f16": 1e30, "ADD-f16+f32": 1e30,
                                          "ADD-bf16+f32": 1e30, "ADD-bf16+bf16": 1e30})

class Later(Zeros):
    def arithmetic(self):
        mine = Arithmetic("mine")
        object.__setattr__(mine, "bounds", {"ADD-f32+f32": 1e30})
        return mine

class Sly(Arithmetic):
    def bound(self, node, terms=1):
        return 1e30

class Subclass(Zeros):
    def arithmetic(self):
        return Sly("mine")

class OfACase(Zeros):
    def arithmetic(self):
        return Arithmetic()

    def arithmetic_in(self, case):
        return Zeros.arithmetic(self)
"""


@pytest.mark.parametrize("cls", ["Zeros", "OfACase", "Later", "Subclass"])
def test_zeros_never_pass_by_a_bound_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: str) -> None:
    """An adapter that returns zeros and allows itself an NMSE of 1e30 in ADD passes no case."""
    with planted_adapter(tmp_path, monkeypatch, "zeros", ZEROS, cls):
        cases = ("--case", "ops/ADD-f32+f32-a=16*", "--case", "ops/ADD-f16*")
        done = conform("run", "--backend", "zeros", *cases, cwd=tmp_path)
    assert done.returncode in {1, 2}, done.stdout + done.stderr
    assert " PASS" not in done.stdout
    if cls in {"Zeros", "OfACase"}:
        said = " ".join((done.stdout + done.stderr).split())
        assert "ADD-f32+f32" in said
        assert "1e+30" in said
        assert "1e-07, upstream's limit for ADD" in said


def test_a_profile_grants_no_more_than_upstream(tmp_path: Path) -> None:
    """A profile with a bound above `max_nmse_err` is refused, by file, key, bound and limit."""
    text = """suite = "0.1.0"
device = "CPU"
description = "any"

[op."SUM-f32"]
rounding = "exact"
residual = 0.0
bound = 1e30
"""
    (tmp_path / "mine.toml").write_text(text)
    done = conform("run", "--backend", "ggml?profile=mine.toml", "--case", "ops/SUM-*", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    for word in ("mine.toml", '[op."SUM-f32"] bound', "upstream's limit for SUM", "1e-07", "1e+30"):
        assert word in said
    assert parse(text.replace("1e30", "1e-7"), "mine.toml").entries["SUM-f32"].bound == 1e-7
    with pytest.raises(UsageError, match="limit for SUM"):
        parse(text.replace("1e30", "1.1e-7"), "mine.toml")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bounds": {"ADD-f32+f32": 1.01e-7}}, "upstream's limit for ADD"),
        ({"bounds": {"GLU.SWIGLU-f32": 1e-3}}, "upstream's limit for GLU"),
        ({"bounds": {"MUL_MAT-q4_0+f32@9": 6e-4}}, "upstream's limit for MUL_MAT"),
        ({"bounds": {"ADD-f32+f32": math.nan}}, "nan found"),
        ({"bounds": {"ADD-f32+f32": -1.0}}, "-1 found"),
        ({"lengths": {"SUM-f32": 0}}, "1 or more expected"),
        ({"mul_mat": {"f32": "i8"}}, "mul_mat['f32']: one of"),
        ({"mul_mat": {"f32": "q4_0"}}, "'q4_0' found"),
        ({"flash_attn": {"f16": "tq1_0"}}, "flash_attn['f16']"),
        ({"flash_attn_sum": {"f16": "bf16"}}, "flash_attn_sum['f16']"),
        ({"flash_attn_weights": "bf16"}, "flash_attn_weights"),
        ({"mul_mat_sum": {"f16": "bf16"}}, "mul_mat_sum['f16']"),
        ({"tables": {"GELU": "i8"}}, "tables['GELU']"),
        ({"tables": {"EXP": "f16"}}, "a table of GELU"),
        ({"weights": {"f32": "q4_0x128"}}, "weights['f32']"),
        ({"weights": {"q4_0": "nothing"}}, "'nothing' found"),
        ({"rows": {"bf16": "q4_0x128"}}, "rows['bf16']"),
        ({"products": "i8"}, "products"),
        ({"operands": "q8_0"}, "operands"),
        ({"sums": "f8"}, "sums"),
        ({"quantize": "none"}, "quantize"),
        ({"rope": "f16"}, "rope"),
        ({"roundings": {"ADD-f32+f32": "zeros"}}, "roundings"),
    ],
)
def test_an_arithmetic_is_one_that_devices_have(fields: dict[str, Any], words: str) -> None:
    """Each field that may grant an error takes what devices are known to do, and bounds within upstream's limit."""
    with pytest.raises(UsageError) as e:
        Arithmetic("mine", **fields)
    assert words in str(e.value)
    with pytest.raises(UsageError):
        Mixed("mine", **fields)


def test_a_bound_grows_with_a_sum_to_upstreams_limit() -> None:
    """A bound measured on few terms is no licence for many."""
    node = g.sum(new_tensor(F32, 1 << 20))
    few = Arithmetic("profile", bounds={key_of(node): 5e-8}, lengths={key_of(node): 1})
    assert few.bound(node, 1) == 5e-8
    assert few.bound(node, 1 << 20) == limit_of("SUM") == LIMIT


def test_the_limit_of_a_store_is_one_step_of_one_value() -> None:
    """As `test_cpy` and `test_set_rows` of test-backend-ops: by type and number of values; a plain copy is exact."""

    def cpy(to: GGMLType, of: GGMLType = F32, n: int = 16384) -> float:
        return limit_at(g.cpy(new_tensor(of, n), new_tensor(to, n)))

    assert cpy(Q4_0) == pytest.approx(3.8147e-6, rel=1e-4)
    assert cpy(Q8_0) == pytest.approx(5.96046e-8, rel=1e-4)
    assert (cpy(F16), cpy(F32), cpy(F16, F16)) == (1e-6, 0.0, 0.0)
    rows = g.set_rows(new_tensor(F16, 64, 4), new_tensor(F32, 64, 2), new_tensor(I64, 2))
    assert limit_at(rows) == 1e-7
    assert all(limit_of(op) >= 1e-7 for op in DECLARATIONS)


def test_products_go_beyond_upstream_only_where_that_is_written_down() -> None:
    """What rounding the operands of an op may cost is below upstream's limit, or listed with its reason."""
    above = {op for op, d in DECLARATIONS.items() if d.rounding.products * 2.0**-18 > limit_of(op)}
    assert above == set(ABOVE_UPSTREAM)
    assert max(ROUNDED.values()) < limit_of("MUL_MAT")


GENEROUS = (
    Arithmetic("others", measured=False),
    Arithmetic("bf16", products="bf16"),
    *(a for a in ROUNDINGS.values() if a != EXACT),
)


CPU = create(Spec("cpu"))


def _zeros_pass(case: Case, arithmetics: Iterable[Arithmetic]) -> Iterator[str]:
    """The outputs of a one-step case for which zeros would be right in one of the arithmetics."""
    chains = [(arithmetic, Chain(arithmetic)) for arithmetic in arithmetics]
    for _, chain in chains:
        chain.enter(case.steps[0].graph)
    for t, want in execute(CPU, case).steps[0].outputs.items():
        zeros = np.zeros(packed_nbytes(t), np.uint8)
        floats = (t.type.dtype is not None and t.type.dtype.kind == "f") or t.type.is_quantized or t.type is BF16
        if not floats or np.array_equal(want, zeros):
            continue
        found = compare(t, want, zeros)
        if found.nmse < 1:  # nothing but zeros and what is as small
            continue
        for arithmetic, chain in chains:
            if max(budget_of(t, arithmetic).used(found), 0) <= 1 or chain.budget(t).used(found) <= 1:
                yield f"{case.id}: {t} in {arithmetic.name}"


def test_zeros_pass_in_no_legal_arithmetic() -> None:
    """Of every op of `smoke`: zeros as the result are beyond the budget in the most generous arithmetic there is."""
    passed: list[str] = []
    for case_id in FAMILIES["ops"].ids("smoke"):
        case = build(case_id)
        node = case.steps[0].graph.nodes[-1]
        full = Arithmetic("profile", bounds={key_of(node): limit_of(node.op)}, lengths={key_of(node): 1})
        passed += _zeros_pass(case, (full, *GENEROUS))
    assert not passed


def test_a_long_chain_grants_no_zeros() -> None:
    """A thousand products, each as far off as upstream allows: the budget of the last is still below that of zeros."""
    x = new_tensor(F32, 64, 9)
    w = new_tensor(F32, 64, 64)
    loose = Arithmetic("others", measured=False)
    for _ in range(1000):
        x = g.mul_mat(w, x)
    chain = Chain(loose)
    chain.enter(g.build_forward_expand(x))
    assert limit_of("MUL_MAT") < chain.budget(x).nmse < 1
    assert not excess("MUL_MAT-f32+f32@9", limit_of("MUL_MAT"))
    assert replace(loose, measured=True) == Arithmetic("others")
