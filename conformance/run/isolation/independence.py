"""Whether a third party's adapter answers by itself: the reference and the golden values are no answers of its own.

Looked at in the worker process, which has loaded neither. It finds who asks them openly, by import or by file; it is no
sandbox.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from conformance import shipped
from conformance.backend.registry import Spec, third_party
from conformance.ggml.errors import NotIndependentError

REFERENCE = "backends.cpu"
GOLDEN = ("golden",)
"""Folders of golden values, beside `conformance` in a checkout and within it in a wheel."""


class Independence:
    """From now on, what the adapter of `spec` reads that holds the answers.

    Args:
        spec: whose adapter is not imported yet; one of our own is not watched.
    """

    def __init__(self, spec: Spec) -> None:
        self._found = ""
        self._watched = third_party(spec)
        if self._watched:
            self._folders = _folders()
            sys.addaudithook(self._hear)

    def check(self) -> None:
        """Refuse an answer that came of the answers.

        Raises:
            NotIndependentError: says what the adapter loaded.
        """
        if not self._watched:
            return
        if REFERENCE in sys.modules:
            self._found = f"the adapter loaded the reference ({REFERENCE})"
        if self._found:
            raise NotIndependentError(f"{self._found}, so nothing independent was tested")

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event != "open" or self._found or not isinstance(args[0], (str, bytes)):
            return
        path = os.path.abspath(os.fsdecode(args[0]))  # noqa: PTH100  # called for every file that is opened
        for folder, what in self._folders:
            if path.startswith(folder):
                self._found = f"the adapter loaded {what}"


def _folders() -> list[tuple[str, str]]:
    package = shipped.path().resolve()
    found = [(base / name, "the golden values") for base in (package, package.parent) for name in GOLDEN]
    spec = importlib.util.find_spec(REFERENCE)
    places = (spec.submodule_search_locations if spec else None) or ()
    found += [(Path(place), f"the reference ({REFERENCE})") for place in places]
    return [(f"{folder}{os.sep}", what) for folder, what in found]
