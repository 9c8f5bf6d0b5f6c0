"""The tables of types and ops against the real ggml and against the gguf package."""

from __future__ import annotations

import ctypes
from functools import cache

import gguf
import pytest
from ggml_ctypes import load, names

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.types import GLU_OPS, OPS, TYPES, UNARY_OPS, GGMLType, type_named

GGUF_DIFFERS = {"Q8_1": (32, 40)}
"""The gguf package still has the block of two float32 that ggml made two float16; no file holds this type."""


@cache
def lib() -> ctypes.CDLL:
    """The real ggml, loaded once."""
    return load()


@pytest.mark.parametrize("t", TYPES.values(), ids=str)
def test_type_is_ggmls(t: GGMLType) -> None:
    """Name, block size, bytes per block and being quantised are what the library says of the id."""
    assert lib().ggml_type_name(t.id).decode() == t.name
    assert lib().ggml_blck_size(t.id) == t.blck_size
    assert lib().ggml_type_size(t.id) == t.type_size
    assert lib().ggml_is_quantized(t.id) == t.is_quantized


def test_no_type_is_missing() -> None:
    """Every id up to the last has a type, or is one that ggml dropped (size 0)."""
    ids = {t.id for t in TYPES.values()}
    assert {i for i in range(max(ids) + 1) if lib().ggml_type_size(i)} == ids
    assert [t.id for t in TYPES.values()] == sorted(ids)


@pytest.mark.parametrize("q", gguf.GGMLQuantizationType, ids=lambda q: q.name)
def test_type_is_gguf_packages(q: gguf.GGMLQuantizationType) -> None:
    """The gguf package, which reads and writes the files, has the same ids and sizes."""
    t = next(t for t in TYPES.values() if t.id == q.value)
    assert q.name == t.name.upper()
    assert gguf.GGML_QUANT_SIZES[q] == GGUF_DIFFERS.get(q.name, (t.blck_size, t.type_size))


def test_scalar_dtypes_have_the_types_size() -> None:
    """Where NumPy has the type, one element takes as many bytes as in ggml; block types have none."""
    for t in TYPES.values():
        assert t.dtype is None or t.dtype.itemsize == t.type_size
        assert not (t.is_quantized and t.dtype is not None)


def test_type_named_finds_each_and_refuses_others() -> None:
    """A name gives the one object of that type; an unknown one lists those there are."""
    for name, t in TYPES.items():
        assert type_named(name) is t
    with pytest.raises(GraphError, match=r"one of f32, f16.*'q9_9' found"):
        type_named("q9_9")


def test_op_names_are_ggmls_in_order() -> None:
    """Ops, unary ops and glu ops: the library's names by id."""
    assert names(lib(), "op", OPS[-1]) == list(OPS)
    assert names(lib(), "unary_op", UNARY_OPS[-1]) == list(UNARY_OPS)
    assert names(lib(), "glu_op", GLU_OPS[-1]) == list(GLU_OPS)


def test_rules_are_of_ops_that_exist() -> None:
    """The rule table has no op that ggml lacks."""
    assert DECLARATIONS.keys() <= set(OPS)
