"""`conform triage RUN.json --baseline FILE` as a gate: what a backend is known to fail by hides nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import broken_add
import pytest
from commands import conform_here
from planted_adapter import planted_adapter

from conformance.backend import registry
from conformance.causes import rank

CASES = ("--case", "ops/ADD-f32+f32-*", "--case", "ops/MUL-f32+f32-a=1*")
"""Three of ADD broadcast an operand; of nine others and all of MUL none fails."""
BROADCAST = "ops/ADD-f32+f32-a=13x5x3x2,b=1x5x1x2@612"
WIDE = "ops/ADD-f32+f32-a=16392x2@234"


class Backend:
    """The adapter with a known bug, and what it is known by; a later version of it has the same name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known = folder / "known.toml"
        run = self.run("")
        made = self.triage(run, "", "--write-baseline", self.known)
        assert made[0] == 0, made[1]

    def config(self, also: str) -> Path:
        """Settings that name a version of it."""
        path = self.folder / f"settings-{also}.toml"
        path.write_text(f'[backend.mine]\nadapter = "broken"\noptions = {{ also = "{also}" }}\n', encoding="utf-8")
        return path

    def run(self, also: str, *options: str) -> Path:
        """The record of a run of a version."""
        path = self.folder / f"run-{also}.json"
        args = ("--backend", "mine", "--config", self.config(also), "--json", path, "-q")
        done = conform_here("run", *args, *(options or CASES))
        assert done.exit_code in {0, 1}, done.output
        return path

    def triage(self, path: Path, also: str, *options: str | Path) -> tuple[int, str]:
        """The exit code of grouping the failures of a record, and what it prints."""
        done = conform_here("triage", path, "--config", self.config(also), "--no-confirm", "--budget", "5m", *options)
        return done.exit_code, done.output

    def gate(self, also: str, *options: str) -> tuple[int, str]:
        """A run of a version, against what is known."""
        return self.triage(self.run(also, *options), also, "--baseline", self.known)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Installed for the tests of this file."""
    folder = tmp_path_factory.mktemp("baseline")
    (folder / "site").mkdir()
    source = Path(broken_add.__file__).read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, planted_adapter(folder / "site", patch, "broken", source, "Broken"):
        patch.setattr(rank, "_laid_out", lambda *_: ({}, 0))  # to count them takes a minute
        yield Backend(folder)
        registry.define({})


def test_the_same_failures_are_no_failure(backend: Backend) -> None:
    """A run against its own baseline is green, and the known cause says what is broadcast."""
    assert '[["op", "ADD"], ["src[1].broadcast", "yes"]]' in backend.known.read_text(encoding="utf-8")
    code, said = backend.gate("")
    assert code == 0, said


@pytest.mark.parametrize(
    ("also", "says"),
    [
        pytest.param("wide", WIDE, id="another bug in other shapes"),
        pytest.param("zeros", "zeros instead of numbers: 3 cases", id="zeros, not 1 % too much"),
        pytest.param("nan", "NaN or Inf instead of numbers: 3 cases", id="NaN, not 1 % too much"),
        pytest.param("every", "FAIL where it passed: 2 cases", id="all of the op"),
    ],
)
def test_a_new_bug_does_not_hide_behind_a_known_cause(backend: Backend, also: str, says: str) -> None:
    """Each added bug is of the op that is known to be wrong; it fails the gate, which names it."""
    code, said = backend.gate(also)
    assert code == 1, said
    findings = [line for line in said.splitlines() if line.startswith(("new: ", "wider: "))]
    assert any(says in line for line in findings), said


def test_coverage_that_vanishes_fails_the_gate(backend: Backend) -> None:
    """What passed and is refused now is lost, though nothing fails that was not known to."""
    code, said = backend.gate("refuses")
    assert code == 1, said
    assert "coverage lost on mine: passed, UNSUPPORTED now: " in said
    assert "ops/MUL-f32+f32-a=" in said


def test_a_cause_that_is_gone_fails_the_gate(backend: Backend) -> None:
    """The baseline has to be written again, or the bug may come back in silence."""
    code, said = backend.gate("fixed")
    assert code == 1, said
    assert "gone: ADD-" in said


def test_a_run_of_other_cases_is_not_comparable(backend: Backend) -> None:
    """Another seed, fewer cases: neither equal nor worse, and the line says what was asked of each."""
    for options, words in ((("--case", BROADCAST), f"level smoke, {BROADCAST}"), ((*CASES, "--seed", "7"), "seed 7")):
        run = backend.run("fixed", *options)  # which has no failures to search in
        code, said = backend.triage(run, "fixed", "--baseline", backend.known)
        assert code != 0, said
        assert "not compared: on mine: " in said
        assert words in said


def test_known_failures_alone_prove_nothing(backend: Backend) -> None:
    """Where every case fails as the baseline knows, no case passed: exit code 3."""
    run, known = backend.run("", "--case", BROADCAST), backend.folder / "alone.toml"
    assert backend.triage(run, "", "--write-baseline", known)[0] == 3
    code, said = backend.triage(run, "", "--baseline", known)
    assert code == 3, said
    assert "mine: no case passed (1 failed)" in said


def test_missing_results_make_no_baseline(backend: Backend) -> None:
    """A run that lacks results would be known by less than it was asked for."""
    body = json.loads(backend.run("").read_text(encoding="utf-8"))
    last = body["results"].pop()
    body["missing"] = [{"backend": "mine", "case": last["case"], "reason": "interrupted"}]
    torn, made = backend.folder / "torn.json", backend.folder / "torn.toml"
    torn.write_text(json.dumps(body), encoding="utf-8")
    code, said = backend.triage(torn, "", "--write-baseline", made)
    assert (code, made.exists()) == (2, False)
    assert "has no result for 1 case; finish the run first" in said


@pytest.mark.parametrize(
    ("also", "code", "says"),
    [
        ("", 0, "1 XFAIL"),
        ("zeros", 1, "does not accept this error: zeros instead of numbers"),
        ("nan", 1, "does not accept this error: NaN or Inf instead of numbers"),
    ],
)
def test_a_waiver_for_one_percent_excuses_neither_zeros_nor_nan(
    backend: Backend, also: str, code: int, says: str
) -> None:
    """The waived case fails by the same verdict in the same place: only its numbers say that it is another failure."""
    waivers = backend.folder / "waivers.toml"
    waivers.write_text(
        f'[[waiver]]\ncase = "{BROADCAST}"\nverdict = "FAIL"\nnmse = 1e-4\nreason = "1 % too much"\n'
        'link = "https://example.org/1"\nexpiry = 2099-01-01\n',
        encoding="utf-8",
    )
    args = ("--backend", "mine", "--config", backend.config(also), "--waivers", waivers)
    done = conform_here("run", *args, "--case", BROADCAST, "--case", "ops/ADD-f32+f32-a=16x6x4x2,va=off@708")
    assert done.exit_code == code, done.output
    assert says in done.output
