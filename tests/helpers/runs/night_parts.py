"""Small parts for the nightly under test, as a TOML file, and the programs behind them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

CASES = 40
"""Results of the part `work`."""

BEGIN = """
import json, os, sys, time
from pathlib import Path
document, journal, folder = map(Path, sys.argv[1:4])
def write(verdict="PASS"):
    rows = [{"case": "f/w@1", "backend": "fake", "verdict": verdict, "detail": "a | b"}] if verdict else []
    document.write_text(json.dumps({"kind": "conformance", "results": rows}))
"""
WORK = f"""
from conformance.judge.verdict import Result, Verdict
from conformance.report.journal import Journal
from conformance.report.runfile import record, write_json
kept = Journal(journal, {{}})
results = []
for i in (f"f/{{n}}@1" for n in range({CASES})):
    r = kept.take("fake", i)
    if r is None:
        with (folder / "ran").open("a") as f:
            f.write(i + "\\n")
        time.sleep(0.01)
        r = Result(i, "fake", Verdict.PASS)
        kept.add([r])
    results.append(r)
write_json(document, {{**record(results), "run": kept.run}})
"""
SLEEPS = """
(folder / "pid").write_text(str(os.getpid()))
try:
    time.sleep(600)
except KeyboardInterrupt:
    write()
    sys.exit(5)
"""
CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "pid").write_text(str(child.pid))
write()
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
PROGRAMS = {
    "work": WORK,
    "fine": "write()",
    "failing": "write('FAIL'); sys.exit(1)",
    "nothing": "write(''); sys.exit(3)",
    "stopped": "write(); sys.exit(5)",
    "crash": "import signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
    "traceback": "raise RuntimeError('a fault of its own')",
    "silent": "pass",
    "torn": "document.write_text('{\"kind\"')",
    "late": SLEEPS,
    "sleeps": SLEEPS,
    "child": CHILD,
    "lacking": LACKS,
    "page": "(folder / 'page').write_text('x'); sys.exit(1)",
    "no-page": "sys.exit(1)",
    "history": IMPORTS,
}
MORE = {
    "work": "shared = true\n",
    "late": "hours = 0.001\n",
    "page": 'leaves = "page"\nlast = true\n',
    "no-page": 'leaves = "page"\nlast = true\n',
    "history": 'leaves = ""\nlast = true\n',
}


def write_parts(folder: Path) -> Path:
    """Write the parts into `folder`."""
    tables = [
        (name, [sys.executable, "-c", BEGIN + text, "{document}", "{journal}", "{folder}", "{documents}"])
        for name, text in PROGRAMS.items()
    ]
    tables.append(("absent", ["/no/such/program"]))
    texts = []
    for name, command in tables:
        more = MORE.get(name, "")
        hours = "" if "hours" in more else "hours = 0.02\n"
        texts.append(f'[[part]]\nname = "{name}"\nsays = "made up"\ncommand = {json.dumps(command)}\n{hours}{more}')
    path = folder / "parts.toml"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path
