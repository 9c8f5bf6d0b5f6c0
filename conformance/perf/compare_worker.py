"""The service that measures one of two installed builds: a script, run by the Python of either build's environment.

It is the same for both sides, so it finds `process/service.py` beside itself and not in the build. Of the build it
needs what `conformance.perf` has in public, `units`, `Bench` and `Measured`, and a `Runner`.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any


class Side:
    """One build, and the unit that it measures at present."""

    def __init__(self) -> None:
        # by name: a script has no package, and what this build lacks is answered in words
        bench = import_module("conformance.perf.bench")
        isolation = import_module("conformance.run.isolation.isolate").Isolation
        self._runner = import_module("conformance.run.runner").Runner()
        # memory placement differs most between processes; `isolate` is an earlier build's word for that
        own = {"isolate": True} if "isolate" in signature(isolation).parameters else {}
        self._bench = bench.Bench(self._runner, isolation(**own))
        self._measured: Any = None

    def open(self, level: str, unit: str, backend: str) -> dict[str, Any]:
        """Prepare a unit; return its case and result. Only after PASS can it be measured."""
        self.close()
        units = import_module("conformance.perf.units").units(level)
        match = [u for u in units if u.name == unit]
        if not match:
            return {"missing": f"no unit {unit} at level {level}"}
        (spec,) = import_module("conformance.run.session.select").parse_specs([backend])
        result = self._bench.result(match[0], spec)
        answer = {"case": match[0].case_id, "verdict": result.verdict.value, "detail": result.detail}
        if answer["verdict"] == "PASS":
            self._measured = self._bench.measured(match[0], spec)
        return answer

    def run(self) -> dict[str, Any]:
        """One measurement."""
        return {"seconds": self._measured.run()}

    def renew(self) -> dict[str, Any]:
        """Restart the unit."""
        if self._measured.subject.renew is not None:
            self._measured.subject.renew()
        return {}

    def close(self) -> dict[str, Any]:
        """Close what `open` opened."""
        measured, self._measured = self._measured, None
        if measured is not None:
            measured.close()
        return {}

    def end(self) -> None:
        """Close everything."""
        self.close()
        self._runner.close()


def main() -> None:
    """Answer requests until there are no more."""
    service = runpy.run_path(str(Path(__file__).parents[1] / "process" / "service.py"))["Service"]()
    try:
        side = Side()
    except Exception as e:  # noqa: BLE001  # the other side says it in words
        service.send(_failed(e))
        return
    service.send({"version": version("ggml-conformance"), "python": sys.version.split()[0]})

    def answer(request: dict[str, Any], _: object) -> tuple[dict[str, Any], tuple[()]]:
        try:
            return getattr(side, request.pop("do"))(**request), ()
        except Exception as e:  # noqa: BLE001  # as above
            return _failed(e), ()

    service.serve(answer)
    side.end()


def _failed(error: Exception) -> dict[str, Any]:
    return {"error": "BackendError", "message": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
