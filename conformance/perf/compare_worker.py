"""The process that measures one of two installed builds: run by path, by the Python of either build's environment.

It is a script, the same for both sides, and needs of the build only what `conformance.perf` has in public: `units`,
`Bench`, `Measured`. Requests and answers are lines of JSON on what was stdin and stdout; what libraries print goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any


class Side:
    """One build, and the unit that it measures at present."""

    def __init__(self, *, isolate: bool) -> None:
        from conformance.run.isolation.isolate import Isolation  # noqa: PLC0415  # as above
        from conformance.run.runner import Runner  # noqa: PLC0415  # as above

        from .bench import Bench  # noqa: PLC0415  # the build's own; what it lacks is answered in words

        self._runner = Runner()
        # where memory lies differs between processes most
        self._bench = Bench(self._runner, Isolation(isolate=isolate or None))
        self._measured: Any = None

    def open(self, level: str, unit: str, backend: str) -> dict[str, Any]:
        """Make a unit ready; gives its case and what became of it, and measures only after PASS."""
        from conformance.run.session.select import parse_specs  # noqa: PLC0415  # as above

        from .units import units  # noqa: PLC0415  # as above

        self.close()
        found = [u for u in units(level) if u.name == unit]  # type: ignore[arg-type]  # checked by the other side
        if not found:
            return {"missing": f"no unit {unit} at level {level}"}
        (spec,) = parse_specs([backend])
        result = self._bench.result(found[0], spec)
        answer = {"case": found[0].case_id, "verdict": result.verdict.value, "detail": result.detail}
        if answer["verdict"] == "PASS":
            self._measured = self._bench.measured(found[0], spec)
        return answer

    def run(self) -> dict[str, Any]:
        """One measurement."""
        return {"seconds": self._measured.run()}

    def renew(self) -> dict[str, Any]:
        """Start the unit over."""
        if self._measured.subject.renew is not None:
            self._measured.subject.renew()
        return {}

    def close(self) -> dict[str, Any]:
        """Give back what `open` took."""
        measured, self._measured = self._measured, None
        if measured is not None:
            measured.close()
        return {}

    def end(self) -> None:
        """Give back everything."""
        self.close()
        self._runner.close()


def main() -> None:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        side = Side(isolate="--isolate" in sys.argv)
        reply({"version": version("ggml-conformance"), "python": sys.version.split()[0]})
    except Exception as e:  # noqa: BLE001  # the other side says it in words
        reply({"error": f"{type(e).__name__}: {e}"})
        return
    for line in requests:
        request = json.loads(line)
        do = request.pop("do")
        try:
            reply(getattr(side, do)(**request))
        except Exception as e:  # noqa: BLE001  # as above
            reply({"error": f"{type(e).__name__}: {e}"})
    side.end()


if __name__ == "__main__":
    main()
