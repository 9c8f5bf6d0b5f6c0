"""The public interface: its names, what each accepts, and what it costs to import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import api

FROZEN = Path(__file__).with_name("api.txt")
COMMAND = "python tests/cli/test_api.py > tests/cli/api.txt"


def _lines() -> list[str]:
    """Each public name, with the names of what it takes or has."""
    return [f"{name}: {_shape(getattr(api, name))}" for name in api.__all__]


def _shape(value: object) -> str:
    if inspect.isfunction(value):
        return f"({', '.join(inspect.signature(value).parameters)})"
    if not inspect.isclass(value) or value.__module__ == "builtins":
        return type(value).__name__
    own = {n for c in value.__mro__ if c.__module__.startswith("conformance.") for n in vars(c)}
    fields = getattr(value, "__struct_fields__", ()) or getattr(value, "__dataclass_fields__", ())
    return " ".join(sorted(n for n in {*own, *fields} if not n.startswith("_")))


def test_no_public_name_changes_unseen() -> None:
    """A name that goes or takes something else breaks a stranger's package: it needs a major version."""
    assert FROZEN.read_text(encoding="utf-8").splitlines() == _lines(), f"if it is meant: {COMMAND}"


def test_each_name_is_documented() -> None:
    """Each class of the interface has a docstring."""
    bare = [n for n in api.__all__ if inspect.isclass(v := getattr(api, n)) and not inspect.getdoc(v)]
    assert bare == []


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    """The message lists the public ones."""
    with pytest.raises(AttributeError, match=r"has no attribute 'Runner'; its names: API_VERSION, .*Verdict"):
        api.Runner  # noqa: B018  # that it is looked up is the test


def test_type_checkers_see_what_python_loads() -> None:
    """The imports for type checkers and the table of the loader name the same modules and names."""
    tree = ast.parse(Path(api.__file__).read_text(encoding="utf-8"))
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    seen = {
        a.asname or a.name: (n.module, a.name) for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names
    }
    assert seen == api._FROM


def test_an_adapter_loads_what_it_uses() -> None:
    """An adapter's process imports neither the suite nor reports by importing the interface."""
    code = (
        "import sys; from conformance.api import DeviceInfo, F32, KernelBackend, Tensor\n"
        "print(sorted(m for m in sys.modules if m.startswith(('conformance.suite', 'conformance.report'))))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


if __name__ == "__main__":
    sys.stdout.write("\n".join(_lines()) + "\n")
