"""Cases of the suite on ggml built with a sanitizer, and what it reports."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.judge.verdict import Verdict
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner

SANITIZERS = {"address": "ASAN", "undefined": "UBSAN", "thread": "TSAN"}
"""Name of `-fsanitize` -> prefix of its variable and, in lower case, of its library."""
_OPTIONS = {"ASAN": ":detect_leaks=0:halt_on_error=0", "UBSAN": ":print_stacktrace=1", "TSAN": ""}
"""The interpreter around the library leaks by design."""
_SUMMARY = re.compile(r"^SUMMARY: .*|^\S+: runtime error: .*", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]+|\bT[0-9]+\b")
_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a sanitizer, and the first case that brings it about."""

    case: str
    summary: str
    text: str


def reports(library: Path, sanitizer: str, cases: Sequence[str], options: str = "") -> Iterator[Report]:
    """Run cases one by one and yield each report whose summary is new; `options` are those of the adapter `ggml`."""
    name = SANITIZERS[sanitizer]
    logs = library.parent / "logs"
    logs.mkdir(exist_ok=True)
    for old in logs.iterdir():
        old.unlink()
    runtime = _runtime(f"lib{name.lower()}.so")
    variables = {"LD_PRELOAD": runtime, f"{name}_OPTIONS": f"log_path={logs}/log{_OPTIONS[name]}"}
    words = [f"lib={library}", *([options] if options else []), *(f"env.{k}={v}" for k, v in variables.items())]
    spec = Spec.parse(f"ggml?{'&'.join(words)}")
    runner = Runner(isolation=Isolation(time_limit=_SECONDS))
    runner.locates = runner.checks_stale_state = False
    known: set[str] = set()
    try:
        runner.backend(spec)
        list(_taken(logs))  # of opening the backend
        for case_id in cases:
            (result,) = runner.run(spec, [runner.case(case_id)])
            for text in _taken(logs):
                for summary in _SUMMARY.findall(text):
                    if (plain := _ADDRESS.sub("_", summary)) not in known:
                        known.add(plain)
                        yield Report(case_id, summary, text)
            if result.verdict not in {Verdict.PASS, Verdict.UNSUPPORTED}:
                yield Report(case_id, f"{result.verdict.name}: {result.detail}", "")
                runner.restart()
                runner.backend(spec)
                list(_taken(logs))
    finally:
        runner.close()


def _runtime(name: str) -> str:
    """Return the path of a sanitizer's library, which must be loaded before any other."""
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()).resolve())


def _taken(logs: Path) -> Iterator[str]:
    for path in sorted(logs.iterdir()):
        yield path.read_text(encoding="utf-8", errors="replace")
        path.write_bytes(b"")
