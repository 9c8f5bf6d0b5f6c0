"""How tests start a session of pytest."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from conformance.backend.registry import define, defined

ROOT = Path(__file__).resolve().parents[3]
LEFT_OUT = [word for name in ("cacheprovider", "benchmark", "hypothesispytest") for word in ("-p", f"no:{name}")]
"""The plugins that the suite does not use: to import them takes as long as all of pytest."""
PYTEST = [sys.executable, "-m", "pytest", *LEFT_OUT]
"""A session in a process of its own."""


def session(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest from the root of the tree, in this process, which has loaded all that it needs.

    It is `pytest conformance WORDS`, unless the words name the suite. What a test patches holds there.
    """
    names, out, err = defined(), io.StringIO(), io.StringIO()
    known = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # what this process has imported already
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(ROOT)
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the session is not itself a worker of xdist
        suite = () if "conformance" in words else ("conformance",)
        code = pytest.main([*LEFT_OUT, *known, "--capture=no", *suite, *words])
    define(names)
    return subprocess.CompletedProcess(words, int(code), out.getvalue(), err.getvalue())
