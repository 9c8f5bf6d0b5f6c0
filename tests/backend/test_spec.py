"""How a backend is named, and read again from what is printed."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.backend import registry
from conformance.backend.interface import Backend
from conformance.backend.registry import Named, Spec, define, defined, environment, resolve
from conformance.ggml.errors import UsageError
from conformance.installed import Installed
from conformance.run.isolation.isolate import open_backend
from conformance.run.session.select import parse_specs
from conformance.suite import FAMILIES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.lists(st.tuples(TEXT, TEXT), max_size=3))
def test_a_spec_is_read_as_it_was_printed(options: list[tuple[str, str]]) -> None:
    """Whatever stands in a path: signs that part options, percent signs, blanks, plus signs."""
    spec = Spec("ggml", tuple(options))
    assert Spec.parse(str(spec)) == spec


def test_what_a_person_writes_stands_as_it_is() -> None:
    """A plus is a plus and a question mark a character; only `%` and `&` need an escape."""
    spec = Spec.parse("ggml?lib=/opt/c++/a b=c?d%26e%25&device=CPU")
    assert spec == Spec("ggml", (("lib", "/opt/c++/a b=c?d&e%"), ("device", "CPU")))
    assert str(spec) == "ggml?lib=/opt/c++/a b=c?d%26e%25&device=CPU"


@pytest.mark.parametrize("text", ["", "?", "?a=1", "ggml?a", "ggml?a=1&", "ggml?a=1&&b=2", "ggml?&"])
def test_another_form_is_refused(text: str) -> None:
    """With what was expected."""
    with pytest.raises(UsageError, match=r"expected|must read"):
        Spec.parse(text)


def test_what_others_install_runs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every installed adapter but those that run on request only."""
    found = [Installed(name, "package", "Class", False) for name in ("cpu", "their-npu", "xdna2")]
    monkeypatch.setattr(registry, "installed", lambda: found)
    assert parse_specs([]) == [Spec("cpu"), Spec("their-npu")]
    assert parse_specs(["xdna2"]) == [Spec("xdna2")]


@pytest.mark.parametrize("name", registry.defaults())
@pytest.mark.parametrize("family", ["kv_growth", "gqa", "multi_sequence", "weight_placement"])
def test_a_default_backend_takes_a_case_of_each_kind(name: str, family: str) -> None:
    """KV growth, GQA, several sequences and placement at smoke: at least one is not UNSUPPORTED."""
    backend = _opened(name)
    cases = map(FAMILIES[family].build, FAMILIES[family].ids("smoke"))
    assert any(all(map(bool, backend.supports(s.graph))) and backend.supports_case(c) for c in cases for s in c.steps)


@cache
def _opened(name: str) -> Backend:
    return open_backend(Spec(name))


def test_a_spec_may_set_variables_of_its_process() -> None:
    """Beside those of its name, over which they go; no adapter sees them as options."""
    before = defined()
    try:
        define({"x": Named("ggml", (("device", "OPENVINO0"),), (("A", "1"), ("S", None)))})
        spec = Spec.parse("x?threads=2&env.S=a=b&env.EMPTY=")
        assert resolve(spec) == Spec("ggml", (("device", "OPENVINO0"), ("threads", "2")))
        assert environment(spec) == {"A": "1", "S": "a=b", "EMPTY": ""}
        assert environment(Spec("x")) == {"A": "1", "S": None}
    finally:
        define(before)
    for text in ("ggml?env.=1", "ggml?env.S-T=1", "ggml?env.A%3DB=1"):
        with pytest.raises(UsageError, match=r"env\.NAME=VALUE expected"):
            environment(Spec.parse(text))
    with pytest.raises(UsageError, match="set the variables and isa of its devices"):
        open_backend(Spec.parse("sched?devices=cpu&env.A=1"))
