"""Make `pytest conformance` run the suite, installed or not; see `conformance.plugin`."""

from __future__ import annotations

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the plugin, unless the entry point (`pytest_ggml_conformance`) has done so."""
    pluginmanager.import_plugin("conformance.plugin")
