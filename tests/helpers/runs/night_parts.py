"""A table of small parts for the nightly under test and the programs behind them; as a script it is `ci/nightly`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from conformance.cli.nightly import main
from conformance.nightly.parts import Part

CASES = 40
"""Results of the part `work`."""

BEGIN = """
import json, os, sys, time
from pathlib import Path
document, journal, folder = map(Path, sys.argv[1:4])
def write(verdict="PASS", kind="conformance"):
    rows = [{"case": "f/w@1", "backend": "fake", "verdict": verdict, "detail": "a | b"}] if verdict else []
    document.write_text(json.dumps({"kind": kind, "results": rows}))
"""
WORK = f"""
from conformance.judge.verdict import Result, Verdict
from conformance.report.journal import Journal
from conformance.report.runfile import record, write_json
from conformance.run.session.shard import Shard
kept = Journal(journal, {{}})
ids = [f"f/{{n}}@1" for n in range({CASES})]
shard = Shard(int(document.stem[-1]), 2) if "shard" in document.stem else Shard()
results = []
for i in shard.share(ids):
    r = kept.take("fake", i)
    if r is None:
        with (folder / "ran").open("a") as f:
            f.write(i + "\\n")
        time.sleep(0.01)
        r = Result(i, "fake", Verdict.PASS)
        kept.add([r])
    results.append(r)
write_json(document, {{**record(results), "run": kept.run, "shard": shard.to_json(ids)}})
"""
SLEEPS = """
(folder / "pid").write_text(str(os.getpid()))
try:
    time.sleep(600)
except KeyboardInterrupt:
    write()
    sys.exit(130)
"""
CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "pid").write_text(str(child.pid))
"""
IMPORTS = """
with (folder / "imported").open("a") as f:
    f.write(" ".join(sorted(Path(p).name for p in sys.argv[4:])) + "\\n")
"""
LACKS = """
from conformance.judge.verdict import Request
from conformance.report.runfile import record, write_json
asked = Request({"fake": ["f/a@1", "f/b@1"]})
write_json(document, record([], asked=asked, missing=asked.missing([], "its worker died")))
sys.exit(1)
"""
FINE = "write()"


def _program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", BEGIN + text, "{document}", "{journal}", "{folder}", "{documents}")


def _part(
    name: str, text: str, *, limit: float = 60.0, kind: str = "conformance", leaves: str = "", last: bool = False
) -> Part:
    return Part(name, f"{name}, made up", _program(text), limit, kind, leaves, last=last)


PARTS = (
    Part("work", "shared and resumable", _program(WORK), 60, "conformance", shared=True),
    Part(
        "rounds",
        "repeats",
        _program(FINE),
        60,
        "conformance",
        shared=True,
        repeats=True,
        needs=("budget", "no time was given to it"),
    ),
    _part("fine", FINE),
    _part("failing", "write('FAIL')\nsys.exit(1)"),
    _part("nothing", "write('')\nsys.exit(3)"),
    _part("stopped", "write()\nsys.exit(5)"),
    _part("page", "(folder / 'page').write_text('x')\nsys.exit(1)", kind="", leaves="page"),
    _part("no-page", "sys.exit(1)", kind="", leaves="page"),
    _part("crash", "import signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"),
    _part("traceback", "raise RuntimeError('a fault of its own')"),
    _part("silent", "pass"),
    _part("other-kind", "write(kind='perf')"),
    _part("torn", "document.write_text('{\"kind\"')"),
    _part("late", SLEEPS, limit=3.0),
    _part("sleeps", SLEEPS),
    _part("child", CHILD + FINE),
    Part("absent", "a program that is not there", ["/no/such/program"], 60, "conformance"),
    _part("unknown", "sys.exit('Error: No such command')"),
    _part("lacking", LACKS),
    _part("history", IMPORTS, kind="", last=True),
    _part("report", "raise SystemExit(7)", kind="", last=True),
)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    if Path(sys.argv[0]).name == "night_parts.py":
        main(PARTS)
