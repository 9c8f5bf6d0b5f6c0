"""How tests start a pytest of their own."""

from __future__ import annotations

import sys

_LEFT_OUT = ("cacheprovider", "benchmark", "hypothesispytest")
PYTEST = [sys.executable, "-m", "pytest", *(word for name in _LEFT_OUT for word in ("-p", f"no:{name}"))]
"""Without the plugins that the suite does not use: to import them takes as long as all of pytest."""
