"""Coverage of ggml's interface: every part has evidence or a reason, and the published page is true."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import pytest
from marks import needs_wheel

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "ci"))

import interface  # noqa: E402  # a script


@pytest.fixture(scope="module")
def items() -> list[interface.Item]:
    """Every part of the interface."""
    return interface.items()


def test_nothing_is_unknown_and_most_is_covered(items: list[interface.Item]) -> None:
    """A function, a member of an enumeration or a symbol without evidence needs a reason in `ci/interface.toml`."""
    assert [f"{i.group}.{i.name}" for i in items if i.status == "unknown"] == []
    assert interface.share(items) >= 0.95


def test_the_page_is_the_generated_one() -> None:
    """`python ci/interface.py` writes it."""
    assert interface.PAGE.read_text("utf-8") == interface.page()


def test_every_rule_fits_something(items: list[interface.Item]) -> None:
    """A rule whose parts are covered by now, or gone, is taken out."""
    rules = interface.rules()
    used = {i.rule for i in items}
    assert [glob for rule in rules.values() for glob in rule if glob not in used] == []


@needs_wheel
def test_the_symbols_are_those_of_the_installed_library() -> None:
    """A new library brings new functions: `python ci/interface.py headers SOURCE` reads them."""
    assert json.loads(interface.INVENTORY.read_text("ascii"))["exported"] == interface.exported()


def test_what_no_case_has_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without case ids and recorded calls nothing is covered."""
    inventory = json.loads(interface.INVENTORY.read_text("ascii")) | {"calls": {}}
    monkeypatch.setattr(interface, "evidence", set)
    monkeypatch.setattr(interface, "inventory", lambda: inventory)
    assert not [i for i in interface.items() if i.status == "covered"]


def test_headers_are_read(tmp_path: Path) -> None:
    """Function tables, members with and without values, builders by way of others, and comments."""
    ggml = tmp_path / "ggml-0.99" / "ggml"
    for folder in ("include", "src"):
        (ggml / folder).mkdir(parents=True)
    (ggml / "CMakeLists.txt").write_text(
        "set(GGML_VERSION_MAJOR 0)\nset(GGML_VERSION_MINOR 99)\nset(GGML_VERSION_PATCH 1)\n"
    )
    (ggml / "include" / "ggml.h").write_text(
        "enum ggml_x { X_A = 3, X_B, // X_C\n X_D = X_A, X_E = (1 << 8) };\n"
        "GGML_API struct ggml_tensor * ggml_one(int a);\n"
    )
    tables = "".join(
        f"struct {t} {{ void (*first)(int a); /* (*no)(x) */ int (*second) (int b); }};\n" for t in interface.TABLES
    )
    (ggml / "src" / "ggml-backend-impl.h").write_text(tables)
    (ggml / "src" / "ggml.c").write_text(
        "\nstatic struct ggml_tensor * ggml_one_impl(int a) {\n    r->op = GGML_OP_ONE;\n}\n"
        "\nstruct ggml_tensor * ggml_one(int a) {\n    return ggml_one_impl(a);\n}\n"
    )
    (ggml / "src" / "ggml-alloc.c").write_text("")
    (ggml / "src" / "ggml-backend.cpp").write_text(
        "\nvoid ggml_f(ggml_backend_buffer_t buffer) {\n    buffer->iface.clear(1);\n}\n"
        "\nint ggml_g(int a) {\n    ggml_h(a);\n    if (a) {\n        ggml_i(a);\n    }\n    return ggml_f(a);\n}\n"
    )
    found = interface.headers(ggml)
    assert (found["version"], found["source"]) == ("0.99.1", "ggml-0.99")
    assert found["tables"] == {table: ["first", "second"] for table in interface.TABLES}
    assert found["enums"] == {"ggml_x": {"X_A": 3, "X_B": 4, "X_D": 3, "X_E": 0}}
    assert found["functions"] == {"ggml_one": "ggml.h"}
    assert found["builds"] == {"ggml_one": "GGML_OP_ONE", "ggml_one_impl": "GGML_OP_ONE"}
    assert found["calls_table"] == {"ggml_f": "ggml_backend_buffer_i.clear"}
    assert found["calls_always"] == {"ggml_f": [], "ggml_g": ["ggml_f", "ggml_h"]}


def test_calls_of_a_table_are_noted_and_passed_on() -> None:
    """A function of a table, and of the table of what it returns."""
    tables = {
        **{t: [] for t in interface.TABLES},
        "ggml_backend_device_i": ["init_backend"],
        "ggml_backend_i": ["go"],
    }
    any_type = interface.Hooks.ANY
    go = any_type(lambda a, *_: (a or 0) + 1)
    backend = (ctypes.c_void_p * 2)(None, ctypes.cast(go, ctypes.c_void_p).value)
    start = any_type(lambda *_: ctypes.addressof(backend))
    device = (ctypes.c_void_p * 2)(ctypes.cast(start, ctypes.c_void_p).value, None)
    noted: list[str] = []
    interface.Hooks(tables, noted.append).device(ctypes.addressof(device))
    assert any_type(device[0] or 0)(*[0] * 8) == ctypes.addressof(backend)
    assert any_type(backend[1] or 0)(41, *[0] * 7) == 42
    assert noted == ["ggml_backend_device_i.init_backend", "ggml_backend_i.go"]
