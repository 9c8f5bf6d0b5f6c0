"""Every bug on every scenario that reaches it.

    PYTHONPATH=tests/helpers/scenarios python tests/benchmarks/scenarios/bench_scenario_bugs.py [BUG...]

A bug of a function reaches the scenarios that call it, one of a device all of its model's. Each bug has a process of
its own; a scenario in which it dies has noticed. Prints each bug with the scenarios that notice it, and each scenario
with how many bugs it notices. Exit code 1 where a named scenario does not notice, or one notices fewer than three bugs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers" / "scenarios"))
from scenario_bugs import BUGS, NOTICED, Bug, model, noticed, played

from conformance.llama.live.scenarios.harness import Harness
from conformance.llama.live.scenarios.table import SCENARIOS

KINDS = {"mamba": "recurrent", "bert": "encoder", "t5": "encoder-decoder", "lfm2": "hybrid"}
"""Architecture -> what it remembers, if not a KV cache alone."""
DIES = {"lfm2": ("seq-add", "seq-add-back", "shift", "seq-div", "embeddings-out")}
"""Architecture -> scenarios in which llama.cpp itself dies."""
DIES_ALWAYS = ("split-cp", "split-shift")
LEAST = 3


def scenarios_of(arch: str) -> list[str]:
    """Scenarios that make sense for a model and do not kill it."""
    kind, dies = KINDS.get(arch, "attention"), (*DIES.get(arch, ()), *DIES_ALWAYS)
    return [v.name for v in SCENARIOS.values() if kind in v.kinds and v.name not in dies]


def worker(arch: str) -> None:
    """Answer lines `[what, [scenario...]]` with the scenarios that notice a bug.

    `[scenario]` comes before each and `[scenario, verdict]` after it, `[]` at the end; the first answer is the
    scenarios that pass without a bug, with the functions that they call.
    """
    model(arch)
    passing = {}
    true = Harness.call
    for scenario in scenarios_of(arch):
        called: set[str] = {"init_from_model"}
        with_names = lambda self, name, called=called: (called.add(name), true(self, name))[1]  # noqa: E731
        Harness.call = with_names  # type: ignore[method-assign]
        if played(scenario, arch).verdict == "PASS":
            passing[scenario] = sorted(called)
    Harness.call = true  # type: ignore[method-assign]
    _say(passing)
    for line in sys.stdin:
        what, scenarios = json.loads(line)
        for scenario in scenarios:
            _say([scenario])
            _say([scenario, noticed(BUGS[what], scenario).verdict])
        _say([])


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Worker:
    """A process with a model; begins anew where a bug ended it."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._begin()

    def _begin(self) -> None:
        command = [sys.executable, __file__, "--worker", self.arch]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.passing: dict[str, list[str]] = self._answer()

    def _answer(self) -> Any:  # noqa: ANN401  # JSON
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()

    def run(self, what: str, bug: Bug) -> dict[str, str]:
        """Verb -> its verdict, of those that reach the bug."""
        functions, found = set(bug.spoils()), dict[str, str]()
        todo = [scenario for scenario, called in self.passing.items() if functions & set(called)]
        while todo:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([what, todo]) + "\n")
            self.process.stdin.flush()
            while answer := self._answer():
                found[answer[0]] = answer[1] if len(answer) > 1 else "CRASH"
            todo = [scenario for scenario in todo if scenario not in found]
            if answer is None:
                self.close()
                self._begin()
        return found


def main(names: list[str]) -> int:
    """Plant bugs, print, and return the exit code."""
    start, workers, seen = time.monotonic(), dict[str, Worker](), Counter[str]()
    pairs, hits, missed = 0, 0, []
    for what in names or BUGS:
        bug = BUGS[what]
        if bug.arch not in workers:
            workers[bug.arch] = Worker(bug.arch)
        found = workers[bug.arch].run(what, bug)
        by = [scenario for scenario, verdict in found.items() if verdict in (*NOTICED, "CRASH")]
        pairs, hits = pairs + len(found), hits + len(by)
        seen.update(by)
        missed += [f"{what}: {scenario}" for scenario in bug.scenarios.split() if scenario not in by]
        sys.stdout.write(f"{bug.arch:8}{what}: {len(by)} of {len(found)}: {' '.join(by)}\n")
        sys.stdout.flush()
    for w in workers.values():
        w.close()
    few = [scenario for scenario in SCENARIOS if seen[scenario] < LEAST and not names]
    sys.stdout.write("\n" + "\n".join(f"{seen[scenario]:5} {scenario}" for scenario in SCENARIOS) + "\n")
    sys.stdout.write(f"{len(names or BUGS)} bugs, {pairs} pairs, {hits} noticed, {time.monotonic() - start:.0f} s\n")
    sys.stdout.writelines(f"not noticed: {line}\n" for line in missed)
    sys.stdout.writelines(f"fewer than {LEAST}: {line}\n" for line in few)
    return 1 if missed or few else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
